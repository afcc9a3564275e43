"""Number of compilations of a step; its code in PyTorch's cache."""

import copy
import os
from functools import partial

import pytest
import timm
import torch
from timm.layers import DropPath

from densefeed.models.agent_cnn import make_agent
from densefeed.models.wrapped_model import get_networks
from densefeed.objectives.bootstrapping import JointModel
from densefeed.objectives.drloc import LocalizedModel
from densefeed.system.devices import tag_compiled_code
from densefeed.training.compile import (
    DropPathMasks,
    SharedDropPath,
    compile_ends,
    compile_step,
    share_drop_path,
)

from ..runs import compiled_step


@pytest.mark.parametrize(
    ("name", "evaluated"),
    [("lvvit_micro", 4), pytest.param("dhvt_tiny_cifar_patch4", 3, marks=pytest.mark.slow)],
)
def test_blocks_with_different_drop_rates_share_a_compilation(monkeypatch, name, evaluated):
    """Twelve blocks, where the compiler's limit is eight; in training and in evaluation.

    A patch embedding with BatchNorm is compiled again for evaluation, as heads and blocks are.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = timm.create_model(
        name, depth=12, embed_dim=24, drop_path_rate=0.3, img_size=32, num_classes=3
    ).train()
    names = list(model.state_dict())
    compile_step("blocks", model)
    assert list(model.state_dict()) == names
    image = torch.randn(2, 3, 32, 32)
    # The first block drops nothing, and has no DropPath. With it, another block, patch embedding
    # and heads.
    for wanted in (4, 4 + evaluated):
        model(image)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == wanted
        model.eval()


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=8)
def test_blocks_are_compiled_for_every_input_size(monkeypatch):
    """Also for more than PyTorch's default, beyond which it runs them in eager mode."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = timm.create_model(
        "lvvit_micro", depth=2, embed_dim=24, drop_path_rate=0.3, num_classes=3
    ).train()
    compile_step("blocks", model)
    for number in range(1, 7):
        model(torch.randn(2, 3, 16 * number, 16 * number))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4 * number


def test_blocks_of_wrapped_models_are_compiled(monkeypatch):
    """The heads of DRLoc have no blocks; the blocks of an agent are compiled too."""
    compiled = []
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module, **options: compiled.append(module)
    )
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    with_heads = timm.create_model("test_vit", img_size=32, num_classes=3)
    vit = timm.create_model("bootstrapping_vit_micro", img_size=32, num_classes=3, depth=2)
    agent = make_agent(vit, 3, shared=True)
    for trained, networks in (
        (vit, (vit,)),
        (LocalizedModel(with_heads, "l1", 0, [32]), (with_heads,)),
        (JointModel(vit, agent), (vit, agent)),
    ):
        assert get_networks(trained) == networks
        compile_step("blocks", trained)
        blocks = [block for network in networks for block in network.blocks]
        assert compiled == blocks + [net.patch_embed for net in networks if net is not agent]
        compiled.clear()


@pytest.mark.parametrize("scale", [True, False])
def test_drop_path_rate_matches_timm(scale):
    """With 20,000 samples; the standard deviation of the share is 0.003.

    Kept samples are scaled as in timm.
    """
    timms = DropPath(0.3, scale)
    ours = SharedDropPath(timms)
    x = torch.ones(20_000, 2, 3, dtype=torch.bfloat16)
    seen = ours(x)
    assert seen.dtype == x.dtype
    assert set(seen.unique().tolist()) == set(timms(x).unique().tolist())
    assert torch.equal(seen, seen[:, :1, :1].expand_as(seen))
    assert (seen[:, 0, 0] == 0).float().mean().item() == pytest.approx(0.3, abs=0.012)
    assert ours.eval()(x) is x


def test_masks_of_a_step_are_drawn_before_it(monkeypatch):
    """The step equals that of the uncompiled network with these masks; each step has others."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = timm.create_model(
        "lvvit_micro",
        depth=3,
        embed_dim=24,
        drop_path_rate=0.5,
        img_size=32,
        num_classes=3,
        token_head=False,
    ).train()
    step, image, seen = compiled_step(model), torch.randn(6, 3, 32, 32), []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        loss = step(image)
        paths = [part for part in model.modules() if isinstance(part, SharedDropPath)]
        seen.append(torch.stack([path.mask_N for path in paths]))
        eager = copy.deepcopy(model)
        for block in eager.blocks:
            block._compiled_call_impl = None
        torch.testing.assert_close(loss, eager(image).square().mean())
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    # rates 0.25 and 0.5, two branches each, which drop different images
    keep = torch.tensor([[0.75], [0.75], [0.5], [0.5]])
    assert torch.equal(seen[0] * keep, (seen[0] > 0).float())
    assert len({tuple(row) for row in (torch.stack(seen) > 0).flatten(0, 1).tolist()}) > 4
    # blocks with drop-path, the one without, patch embedding, heads and the loss; those of copies
    # are the same
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 5


def test_copies_of_a_compiled_network_are_copies(monkeypatch):
    """What is compiled of a copy computes with its own weights."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = timm.create_model("lvvit_micro", depth=1, embed_dim=24, num_classes=3).eval()
    compile_step("blocks", model)
    other, image = copy.deepcopy(model), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        before = model(image)
        for part in (other.stem[-1], other.head):
            part.bias += 1
        assert torch.equal(model(image), before)
        assert not torch.allclose(other._embed(image), model._embed(image))
        assert not torch.allclose(other(image), before)


def test_patch_embeddings_with_synchronized_norms_stay_in_eager_mode(monkeypatch):
    """Their norms exchange statistics between ranks, where the compiler would break the graph."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: None)
    for synced in (False, True):
        model = timm.create_model("lvvit_micro", depth=1, num_classes=3)
        if synced:
            model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
        compile_step("blocks", model)
        assert ("_embed" in vars(model)) == (not synced)
        assert "forward_head" in vars(model)


@pytest.mark.parametrize("name", ["lvvit_micro", "dhvt_tiny_cifar_patch4"])
def test_outside_the_last_norm_is_compiled(monkeypatch, name):
    """Alone it would read and write float32."""
    regions, seen = [], []

    def compile(function, **options):
        def run(*args, **kwargs):
            regions.append(function.__name__)
            output = function(*args, **kwargs)
            regions.pop()
            return output

        return run

    monkeypatch.setattr(torch, "compile", compile)
    model = timm.create_model(name, depth=1, embed_dim=24, img_size=32, num_classes=3).train()
    compile_ends(model, torch.device("cuda"))
    model.norm.register_forward_hook(lambda *_: seen.append(list(regions)))
    model(torch.randn(2, 3, 32, 32))
    assert seen == [["_forward_end"]]


def test_masks_of_a_step_have_the_rates_of_drop_path():
    """With 20,000 samples; the standard deviation of a share is 0.003."""
    paths = [SharedDropPath(DropPath(*of)) for of in ((0.1, True), (0.6, True), (0.3, False))]
    DropPathMasks(paths).draw(20_001)
    for path, kept, scale in zip(paths, (0.9, 0.4, 0.7), (1 / 0.9, 2.5, 1.0), strict=True):
        assert path.mask_N.shape == (20_001,)
        assert (path.mask_N > 0).float().mean().item() == pytest.approx(kept, abs=0.012)
        torch.testing.assert_close(path.mask_N.amax().item(), scale)
        # another number of images, as in the evaluation of a model in training mode
        assert path(torch.ones(3, 2)).shape == (3, 2)


def test_a_drop_path_of_two_branches_draws_for_each():
    """CaiT's blocks call one module for both branches."""
    model = timm.create_model("cait_xxs24_224", drop_path_rate=0.5, depth=2, img_size=32)
    shared = [share_drop_path(block, torch.device("cpu")) for block in model.blocks]
    assert not any(shared)
    assert isinstance(model.blocks[1].drop_path, SharedDropPath)
    vit = timm.create_model("test_vit", drop_path_rate=0.5)
    assert len(share_drop_path(vit.blocks[-1], torch.device("cpu"))) == 2


# Not monkeypatch, which would leave a config without the option.
@torch.compiler.config.patch(cache_key_tag="mine")
def test_compiled_code_is_tagged_once_with_the_vector_width(monkeypatch):
    """A tag that the user set stays."""
    for width in ("AVX2", "AVX512", "AVX2"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda width=width: width)
        tag_compiled_code()
    assert torch.compiler.config.cache_key_tag == "mine AVX2 AVX512"


COMPILED = """
import copy, timm, torch
from densefeed.training.compile import compile_step
torch.manual_seed(0)
model = timm.create_model("test_vit", img_size=32, num_classes=3).eval()
plain, image = copy.deepcopy(model), torch.randn(2, 3, 32, 32)
compile_step("blocks", model)
torch.testing.assert_close(model(image), plain(image))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="needs AVX2"
)
def test_cached_code_of_other_vectors_is_not_run(command, tmp_path):
    """Without the tag the code for AVX2 is found, and does not compile without vectors."""
    for capability in ("avx2", "default"):
        chosen = {"ATEN_CPU_CAPABILITY": capability, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        done = command("-c", COMPILED, environment=os.environ | chosen, fresh=True)
        assert done.returncode == 0, (capability, done.stderr[-2000:])
