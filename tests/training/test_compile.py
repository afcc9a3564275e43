"""Number of compilations of a step; its code in PyTorch's cache."""

import os
from functools import partial

import pytest
import timm
import torch
from timm.layers import DropPath

from densefeed.models.agent_cnn import make_agent
from densefeed.objectives.bootstrapping import JointModel
from densefeed.objectives.drloc import LocalizedModel
from densefeed.system.devices import tag_compiled_code
from densefeed.training.compile import SharedDropPath, compile_step, get_networks


@pytest.mark.parametrize("name", ["lvvit_micro", "dhvt_tiny_cifar_patch4"])
def test_blocks_with_different_drop_rates_share_a_compilation(monkeypatch, name):
    """Twelve blocks, where the compiler's limit is eight; in training and in evaluation."""
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
    # the first block drops nothing, and has no DropPath; then both again, in evaluation
    for wanted in (2, 4):
        model(image)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == wanted
        model.eval()


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
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * number


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
        assert compiled == [block for network in networks for block in network.blocks]
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
