"""alpha-entmax against closed forms, bisection and finite differences; ViT-Sparse of Table 1."""

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.layers import Attention
from torch import Tensor

from densefeed.models.agent_cnn import make_agent
from densefeed.models.meta_device import meta_device
from densefeed.models.sparse_attention import SparseAttention, entmax

DOUBLE = torch.float64


def real(value: float) -> Tensor:
    return torch.tensor(value, dtype=DOUBLE)


def draw_scores(rows: int, tokens: int, scale: float) -> Tensor:
    rng = torch.Generator().manual_seed(tokens)
    return scale * torch.randn(rows, tokens, generator=rng, dtype=DOUBLE)


def sparsemax(scores: Tensor) -> Tensor:
    """alpha 2 in closed form (Martins and Astudillo, 2016): sorted scores and their sums."""
    ranked = scores.sort(-1, descending=True).values
    count = torch.arange(1, scores.shape[-1] + 1, dtype=DOUBLE)
    support = (1 + count * ranked > ranked.cumsum(-1)).sum(-1, keepdim=True)
    threshold = (ranked.cumsum(-1).gather(-1, support - 1) - 1) / support
    return (scores - threshold).clamp(min=0)


def entmax15(scores: Tensor) -> Tensor:
    """alpha 1.5 in closed form: the root of a quadratic equation for each size of the support."""
    half = scores / 2
    ranked = half.sort(-1, descending=True).values
    count = torch.arange(1, scores.shape[-1] + 1, dtype=DOUBLE)
    mean, square = ranked.cumsum(-1) / count, (ranked**2).cumsum(-1) / count
    spread = 1 / count - (square - mean**2)
    thresholds = torch.where(spread >= 0, mean - spread.clamp(min=0).sqrt(), torch.inf)
    # The threshold that all of its support exceeds, and nothing else.
    support = (thresholds <= ranked).sum(-1, keepdim=True)
    return (half - thresholds.gather(-1, support - 1)).clamp(min=0) ** 2


def bisect(scores: Tensor, alpha: float) -> Tensor:
    """Any alpha, by 200 halvings."""
    scaled = (alpha - 1) * scores
    high = scaled.amax(-1, keepdim=True)
    low = high - 1
    for _ in range(200):
        middle = (low + high) / 2
        above = ((scaled - middle).clamp(min=0) ** (1 / (alpha - 1))).sum(-1, keepdim=True) >= 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (scaled - low).clamp(min=0) ** (1 / (alpha - 1))


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("tokens", [1, 5, 197])
def test_entmax_is_the_closed_form(tokens, scale):
    scores = draw_scores(20, tokens, scale)
    for alpha, exact in ((2.0, sparsemax), (1.5, entmax15)):
        got = entmax(scores, real(alpha))
        torch.testing.assert_close(got, exact(scores), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("alpha", [1.02, 1.2, 1.7, 1.95])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_entmax_is_that_of_bisection(alpha, scale):
    scores = draw_scores(20, 785, scale)
    got, want = entmax(scores, real(alpha)), bisect(scores, alpha)
    torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9)
    narrow = entmax(scores.float(), real(alpha).float())
    torch.testing.assert_close(narrow.double(), want, rtol=1e-4, atol=1e-5)


@given(
    st.lists(st.floats(-100, 100), min_size=1, max_size=30),
    st.floats(1.01, 2),
    st.floats(-1000, 1000),
)
def test_weights_sum_to_1_and_do_not_depend_on_a_constant(scores, alpha, constant):
    scores, alpha = torch.tensor(scores, dtype=DOUBLE), real(alpha)
    weights = entmax(scores, alpha)
    assert weights.min() >= 0
    torch.testing.assert_close(weights.sum(), real(1.0), rtol=1e-9, atol=1e-9)
    moved = entmax(scores + constant, alpha)
    torch.testing.assert_close(moved, weights, rtol=1e-6, atol=1e-8)


def test_low_scores_have_weights_of_exactly_0():
    weights = entmax(draw_scores(50, 65, 3.0), real(1.5))
    assert (weights == 0).float().mean() > 0.5
    assert bool((weights > 0).any(-1).all())


@pytest.mark.parametrize("alpha", [1.05, 1.5, 1.8])
def test_gradients_are_finite_differences(alpha):
    """Gradients of the scores and of alpha, in float64."""
    scores = draw_scores(4, 12, 1.5).requires_grad_()
    exponent = real(alpha).requires_grad_()
    assert torch.autograd.gradcheck(entmax, (scores, exponent), eps=1e-6, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("alpha", [1.05, 1.5, 1.95])
def test_gradients_in_float32_are_those_in_float64(alpha):
    """At the size of an attention of 197 tokens; alpha's is a sum of 39 million terms."""
    scores, grad = draw_scores(1000, 197, 2.0), draw_scores(1000, 197, 1.0)
    found = []
    for dtype in (torch.float32, DOUBLE):
        given = [scores.to(dtype).requires_grad_(), real(alpha).to(dtype).requires_grad_()]
        found.append(torch.autograd.grad(entmax(*given), given, grad.to(dtype)))
    for narrow, wide in zip(*found, strict=True):
        bound = 1e-4 * float(wide.abs().max())
        torch.testing.assert_close(narrow.double(), wide, rtol=0, atol=bound)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_becomes_timms_as_alpha_falls_to_1(qk_norm, monkeypatch):
    """In float64, also below the range in which alpha is learned."""
    torch.manual_seed(0)
    options = dict(num_heads=3, qkv_bias=True, qk_norm=qk_norm, norm_layer=torch.nn.LayerNorm)
    sparse, plain = SparseAttention(24, **options).double(), Attention(24, **options).double()
    plain.load_state_dict(sparse.state_dict(), strict=False)
    x, errors = torch.randn(2, 7, 24, dtype=DOUBLE), []
    with torch.no_grad():
        want = plain(x)
        for alpha in (1.5, 1.0067, 1.00012):
            monkeypatch.setattr(SparseAttention, "alpha", real(alpha))
            errors.append(float((sparse(x) - want).abs().max() / want.abs().max()))
    assert errors[0] > 10 * errors[1] > 100 * errors[2]
    assert errors[2] < 1e-4


@pytest.mark.parametrize("logit", [-20.0, 20.0])
def test_alpha_stays_where_float32_can_compute(logit):
    attention = SparseAttention(24, num_heads=3)
    torch.nn.init.constant_(attention.alpha_logit, logit)
    torch.testing.assert_close(attention.alpha.item(), 1.98 if logit > 0 else 1.02)
    weights = entmax(draw_scores(20, 785, 3.0).float(), attention.alpha)
    # At 1.02 a weight is a 50th power of a number with a few roundings of 2^-24: 50 * 4 * 2^-24.
    torch.testing.assert_close(weights.sum(-1), torch.ones(20), rtol=0, atol=1.2e-5)
    weights.square().sum().backward()
    assert attention.alpha_logit.grad.isfinite()


def test_masks_are_refused():
    attention = SparseAttention(8, num_heads=2)
    with pytest.raises(ValueError, match="takes no mask"):
        attention(torch.zeros(1, 3, 8), is_causal=True)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("bootstrapping_vit_s_sparse", 6_302_410), ("bootstrapping_vit_b_sparse", 21_704_176)],
)
def test_models_have_one_alpha_per_block(name, parameters):
    """The published configuration of ViT-S counts 6,302,410 at 100 classes."""
    with meta_device():
        model = timm.create_model(name, num_classes=100)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_alpha_begins_at_1_5_and_is_learned():
    torch.manual_seed(0)
    model = timm.create_model("bootstrapping_vit_s_sparse", depth=2, img_size=64, num_classes=3)
    assert [block.attn.alpha.item() for block in model.blocks] == [1.5, 1.5]
    for dtype in (torch.float32, torch.bfloat16):
        model.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            model(torch.randn(2, 3, 64, 64)).square().sum().backward()
        slopes = [block.attn.alpha_logit.grad for block in model.blocks]
        assert all(slope.isfinite() and slope != 0 for slope in slopes)


def test_an_agent_shares_the_weights_of_sparse_attention():
    """A head passes a mean of its values to the projection, as with softmax."""
    model = timm.create_model("bootstrapping_vit_s_sparse", depth=2, img_size=64, num_classes=3)
    agent = make_agent(model, 3, shared=True)
    agent.share_weights(model)
    assert agent(torch.randn(2, 3, 64, 64)).shape == (2, 3)


@pytest.mark.slow
def test_a_compiled_model_is_the_same():
    torch.manual_seed(0)
    model = timm.create_model("bootstrapping_vit_s_sparse", depth=2, img_size=64, num_classes=3)
    image = torch.randn(2, 3, 64, 64)

    def run(network):
        model.zero_grad()
        out = network(image)
        out.square().sum().backward()
        return out.detach(), [parameter.grad for parameter in model.parameters()]

    torch.testing.assert_close(
        run(torch.compile(model, fullgraph=True)), run(model), rtol=1e-3, atol=1e-4
    )
