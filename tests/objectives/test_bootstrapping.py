"""Bootstrapping's losses and gradients against plain float64, and weight sharing."""

import copy

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from torch.nn import functional as F

import densefeed.models.checkpoints  # noqa: F401  (registers our models with timm)
from densefeed.models.agent_cnn import make_agent
from densefeed.objectives.bootstrapping import (
    JointModel,
    align_gradients,
    class_logits,
    distillation_loss,
    feature_loss,
    pool_sequence,
    pool_squares,
)

# The image in the middle is padding.
KEPT = torch.tensor([1.0, 0.0, 1.0])


def build_joint(shared: bool, align: str = "global") -> JointModel:
    torch.manual_seed(0)
    vit = timm.create_model("bootstrapping_vit_micro", img_size=32, num_classes=3, depth=3)
    return JointModel(vit, make_agent(vit, 3, shared=shared), align=align)


def random_features(*sides: int) -> tuple[list, list]:
    """Make tokens of a 4 x 4 grid, and maps of these sides."""
    rng = torch.Generator().manual_seed(0)
    tokens = [
        torch.randn(3, 16, 6, generator=rng, dtype=torch.float64).requires_grad_() for _ in sides
    ]
    return tokens, [
        torch.randn(3, 6, side, side, generator=rng, dtype=torch.float64).requires_grad_()
        for side in sides
    ]


# ------------------------------------------------------------------------- features


def pooled_tokens(many: int, few: int, place: int, adapt: str) -> list[int]:
    """Return which of `many` tokens are averaged to position `place` of `few`."""
    if adapt == "sequence":
        return list(range(place * (many // few), (place + 1) * (many // few)))
    wide, small = int(many**0.5), int(few**0.5)
    times = wide // small
    top, left = place // small * times, place % small * times
    return [(top + row) * wide + left + column for row in range(times) for column in range(times)]


def plain_feature_loss(tokens, maps, norm, adapt):
    """Compute equation 6 image by image and token by token, in float64."""
    total = 0.0
    for x, y in zip(tokens, maps, strict=True):
        for image in (0, 2):
            vit, agent = x[image], y[image].flatten(1).T
            few = min(len(vit), len(agent))
            vit, agent = (
                torch.stack(
                    [x[pooled_tokens(len(x), few, place, adapt)].mean(0) for place in range(few)]
                )
                for x in (vit, agent)
            )
            if norm == "layernorm":
                vit, agent = (
                    (z - z.mean(1, keepdim=True))
                    / (z.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
                    for z in (vit, agent)
                )
                total += ((vit - agent) ** 2).mean()
            else:
                total += (
                    sum(
                        ((v / v.norm() - a / a.norm()) ** 2).sum()
                        for v, a in zip(vit, agent, strict=True)
                    )
                    / few
                )
    return total / 2


@pytest.mark.parametrize("adapt", ["sequence", "pool-2d"])
@pytest.mark.parametrize("norm", ["l2-token", "layernorm"])
def test_feature_loss_matches_equations_6_and_7(norm, adapt):
    """Maps larger than the tokens' grid, equal and smaller."""
    tokens, maps = random_features(8, 4, 2)
    loss = feature_loss(tokens, maps, KEPT, norm, adapt)
    want = plain_feature_loss(tokens, maps, norm, adapt)
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(loss, tokens), torch.autograd.grad(want, tokens), rtol=1e-4, atol=1e-7
    )


def test_agent_features_get_no_gradient():
    tokens, maps = random_features(8, 2)
    feature_loss(tokens, maps, KEPT).backward()
    assert all(found.grad is None for found in maps)
    assert all(found.grad[0].any() and not found.grad[1].any() for found in tokens)


def test_normalized_losses_are_correlations():
    """2 - 2 cos per token, 2 - 2 rho; zero if equal up to scale."""
    (x,), (y,) = random_features(4)
    agent, one = y.flatten(2).mT, torch.ones(3)
    want = {
        "l2-token": 2 - 2 * F.cosine_similarity(x, agent, dim=2).mean(),
        "layernorm": 2
        - 2
        * torch.stack(
            [
                torch.corrcoef(torch.stack(pair))[0, 1]
                for pair in zip(x.flatten(0, 1), agent.flatten(0, 1), strict=True)
            ]
        ).mean(),
    }
    for norm, value in want.items():
        assert feature_loss([x], [y], one, norm).item() == pytest.approx(value.item(), rel=1e-4)
        assert feature_loss([3 * agent], [y], one, norm).item() == pytest.approx(0, abs=1e-5)


def test_pool_squares_restores_upsampled_map():
    """Sequence pooling does not."""
    small = torch.arange(12.0).view(1, 4, 3)
    large = F.interpolate(small.mT.unflatten(2, (2, 2)), scale_factor=2).flatten(2).mT
    torch.testing.assert_close(pool_squares(large, 4), small)
    assert not torch.allclose(pool_sequence(large, 4), small)
    torch.testing.assert_close(
        pool_squares(large, 4).mT.unflatten(2, (2, 2)),
        F.avg_pool2d(large.mT.unflatten(2, (4, 4)), 2),
    )
    torch.testing.assert_close(pool_sequence(large, 4).mT, F.avg_pool1d(large.mT, 4))


def test_error_if_token_counts_do_not_fit():
    x = torch.zeros(1, 16, 2)
    with pytest.raises(ValueError, match="16 tokens cannot be averaged to 9"):
        pool_sequence(x, 9)
    for length in (9, 8):
        with pytest.raises(
            ValueError, match=f"16 tokens cannot be averaged to {length} in squares"
        ):
            pool_squares(x, length)


# ------------------------------------------------------------------------- distillation


def test_distillation_is_kl_and_teacher_is_constant():
    torch.manual_seed(0)
    student, teacher = (torch.randn(3, 5, dtype=torch.float64).requires_grad_() for _ in range(2))
    p, q = (logits / 4 for logits in (teacher, student))
    p, q = p.exp() / p.exp().sum(1, keepdim=True), q.exp() / q.exp().sum(1, keepdim=True)
    want = 16 * (p * (p / q).log()).sum(1)[[0, 2]].mean()
    loss = distillation_loss(student, teacher, KEPT, 4.0)
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    loss.backward()
    assert teacher.grad is None
    assert student.grad[0].any()
    # The loss is in float32. Each log of a probability, below 4 here, errs by at most three units
    # of 2^-23, and the square of the temperature scales the mean.
    same = distillation_loss(teacher + 3, teacher, KEPT, 4.0).item()
    assert same == pytest.approx(0, abs=4.0**2 * 3 * 2.0**-23)


def test_gradient_norm_is_independent_of_temperature():
    """For small logits, to first order (Hinton et al., arXiv 1503.02531): T² compensates for T."""
    torch.manual_seed(0)
    teacher, student = 0.01 * torch.randn(3, 5), (0.01 * torch.randn(3, 5)).requires_grad_()
    norms = [
        torch.autograd.grad(distillation_loss(student, teacher, KEPT, T), student)[0].norm().item()
        for T in (1.0, 4.0, 16.0)
    ]
    assert norms[1:] == pytest.approx(norms[:2], rel=0.03)


# ------------------------------------------------------------------------- gradients


def test_align_hand_made_gradients():
    """A conflicting gradient loses its component along the other; other gradients do not change.

    Lists are one vector.
    """
    vit = [torch.tensor([2.0, 0.0]), torch.tensor([[0.0]])]
    for agent, want in (
        ([[-3.0, 5.0], [[7.0]]], [[0.0, 5.0], [[7.0]]]),
        ([[3.0, 5.0], [[7.0]]], [[3.0, 5.0], [[7.0]]]),
        ([[0.0, 5.0], [[7.0]]], [[0.0, 5.0], [[7.0]]]),
    ):
        found = align_gradients([torch.tensor(part) for part in agent], vit)
        assert [part.tolist() for part in found] == want
        # A second alignment has no effect.
        assert [part.tolist() for part in align_gradients(found, vit)] == want
    # One vector: (1, -2) has the product -1 with (1, 1), and loses -1/2 of it, though its first
    # part alone agrees.
    found = align_gradients(
        [torch.tensor([1.0]), torch.tensor([-2.0])], [torch.tensor([1.0]), torch.tensor([1.0])]
    )
    assert [part.item() for part in found] == [1.5, -1.5]
    nothing = align_gradients([torch.tensor([1.0])], [torch.tensor([0.0])])
    assert nothing[0].item() == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_aligned_gradients_never_conflict(seed):
    rng = torch.Generator().manual_seed(seed)
    agent, vit = (
        [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in ((3, 4), (5,))]
        for _ in range(2)
    )

    def product(one, other):
        return sum((a * b).sum() for a, b in zip(one, other, strict=True)).item()

    before, after = product(agent, vit), product(align_gradients(agent, vit), vit)
    assert after == pytest.approx(max(before, 0.0), abs=1e-12)
    scaled = align_gradients([1e4 * a for a in agent], [1e4 * v for v in vit])
    torch.testing.assert_close(scaled, [1e4 * a for a in align_gradients(agent, vit)])


def joint_losses(output) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one loss for each network: some classes, and features."""
    label = torch.tensor([0, 2])
    vit = F.cross_entropy(class_logits(output.vit), label) + feature_loss(
        output.tokens, output.maps, torch.ones(2)
    )
    return vit + distillation_loss(output.vit, output.agent, torch.ones(2), 4.0), F.cross_entropy(
        class_logits(output.agent), label
    )


def reference_gradients(pair: JointModel, image, align: str) -> dict[str, torch.Tensor]:
    """Compute gradients by two backward passes and Algorithm 1 with loops, in float64."""
    plain = copy.deepcopy(pair)
    V = slice(2 * plain.vit.embed_dim, None)
    # The agent uses the parameters themselves instead of aliases.
    for block, lent in enumerate(plain.agent.shared_weights):
        own = plain.vit.blocks[block]
        plain.agent.shared_weights[block] = lent._replace(
            value=own.attn.qkv.weight[V],
            proj=own.attn.proj.weight,
            proj_bias=own.attn.proj.bias,
            fc1=own.mlp.fc1.weight,
            fc1_bias=own.mlp.fc1.bias,
            fc2=own.mlp.fc2.weight,
            fc2_bias=own.mlp.fc2.bias,
        )
    vit_loss, agent_loss = joint_losses(plain(image))
    names, tensors = zip(*plain.named_parameters(), strict=True)
    of_vit, of_agent = (
        dict(
            zip(
                names,
                torch.autograd.grad(loss, tensors, retain_graph=True, materialize_grads=True),
                strict=True,
            )
        )
        for loss in (vit_loss, agent_loss)
    )
    ends = (
        "attn.qkv.weight",
        "attn.proj.weight",
        "attn.proj.bias",
        "mlp.fc1.weight",
        "mlp.fc1.bias",
        "mlp.fc2.weight",
        "mlp.fc2.bias",
    )
    shared = [
        [f"vit.blocks.{block}.{end}" for end in ends] for block in range(len(plain.vit.blocks))
    ]
    together = [name for block in shared for name in block]
    groups = [together] if align == "global" else []

    def rows(gradient, name):
        return gradient[V] if "qkv" in name else gradient

    for group in groups:
        product = sum(
            (rows(of_agent[name], name) * rows(of_vit[name], name)).sum() for name in group
        )
        square = sum(rows(of_vit[name], name).square().sum() for name in group)
        if product < 0:
            for name in group:
                rows(of_agent[name], name).sub_(product / square * rows(of_vit[name], name))
    found = {}
    for name in names:
        found[name] = of_vit[name] + of_agent[name]
        if any(name in block for block in shared):
            rows(found[name], name).div_(2)
            if "qkv" in name:
                assert not of_agent[name][: V.start].any()
    return found


@pytest.mark.parametrize("align", ["global", "none"])
def test_combine_gradients_matches_algorithm_1(align):
    """Private weights get the whole gradient of their own network, shared ones the mean.

    q and k get nothing of the agent's gradient.
    """
    pair = build_joint(shared=True, align=align).double()
    image = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    # double() has replaced the weights.
    pair.agent.share_weights(pair.vit)
    want = reference_gradients(pair, image, align)
    sum(joint_losses(pair(image))).backward()
    pair.combine_gradients(lambda gradients: None)
    for name, parameter in pair.named_parameters():
        torch.testing.assert_close(
            parameter.grad,
            want[name],
            rtol=1e-6,
            atol=1e-9,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    assert all(seen.grad is None for lent in pair.agent.shared_weights for seen in lent)


def test_alignment_modes_differ():
    """Otherwise the test above would show little."""
    pair, image = build_joint(shared=True).double(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    pair.agent.share_weights(pair.vit)
    one, other = (
        torch.cat([g.flatten() for g in reference_gradients(pair, image, align).values()])
        for align in ("global", "none")
    )
    assert not torch.equal(one, other)


def test_microbatches_accumulate_and_ranks_are_averaged_once():
    pair, images, calls = build_joint(shared=True, align="none"), torch.randn(2, 2, 3, 32, 32), []
    for image in images:
        sum(joint_losses(pair(image))).backward()
    want = [seen.grad.clone() for lent in pair.agent.shared_weights for seen in lent]
    pair.combine_gradients(lambda gradients: calls.append([g.clone() for g in gradients]))
    assert len(calls) == 1
    assert all(torch.equal(a, b) for a, b in zip(calls[0], want, strict=True))


# ------------------------------------------------------------------------- shared weights


def test_shared_weights_are_held_once():
    """By parameters, state dict, optimizer and EMA, none of which holds the agent's aliases."""
    pair, joint = build_joint(shared=True), build_joint(shared=False)
    storages = [p.untyped_storage().data_ptr() for p in pair.parameters()]
    assert len(storages) == len(set(storages))
    assert {name for name in pair.state_dict() if name.startswith("vit.")} == {
        f"vit.{name}" for name in pair.vit.state_dict()
    }
    assert not any("fc1" in name or "conv" in name for name in pair.agent.state_dict())
    assert any("fc1" in name for name in joint.agent.state_dict())
    groups = create_optimizer_v2(pair, "adamw", weight_decay=0.05).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(storages)
    assert id(pair.vit.pos_embed) not in decayed
    assert id(pair.vit.blocks[0].mlp.fc1.weight) in decayed


def test_joint_outputs_match_single_networks():
    for shared in (False, True):
        pair, image = build_joint(shared=shared).eval(), torch.randn(2, 3, 32, 32)
        output = pair(image)
        torch.testing.assert_close(output.vit, pair.vit(image))
        torch.testing.assert_close(output.agent, pair.agent(image))
        assert [x.shape for x in output.tokens] == 3 * [(2, 16, 108)]
        seen = []
        handle = pair.vit.blocks[1].register_forward_hook(
            lambda block, inputs, result, seen=seen: seen.append(result)
        )
        pair.vit(image)
        handle.remove()
        # Without the class token.
        torch.testing.assert_close(output.tokens[1], seen[0][:, 1:])
