"""Token heads of timm's models: outputs of hooks and float64 sums, runs, exports and refusals."""

import json
import shutil
from contextlib import suppress

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

import densefeed
import densefeed.train as training
from densefeed.models.token_head import TokenHeadModel
from densefeed.models.token_transformer import TokenFeatures, TokenLogits
from densefeed.system.errors import UserError
from densefeed.tools.export import Export
from densefeed.tools.export import main as export
from densefeed.training.load_model import open_trained

from ..runs import CPU, records, wrap

VIT = dict(img_size=64, depth=2, embed_dim=24, num_heads=3, dynamic_img_size=True)
SWIN = dict(img_size=64, window_size=2, embed_dim=12, depths=(1, 1, 1, 1), num_heads=(1, 2, 3, 4))


def norm_rows(x_NTD: Tensor, norm: nn.Module) -> Tensor:
    """Layer norm by its definition."""
    centered = x_NTD - x_NTD.mean(-1, keepdim=True)
    scale = (centered.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return centered / scale * norm.weight + norm.bias


def by_rows(x_NDRC: Tensor) -> Tensor:
    return torch.stack([x_NDRC[:, :, r, c] for r, c in cells(*x_NDRC.shape[2:])], 1)


def cells(rows: int, columns: int) -> list[tuple[int, int]]:
    return [(r, c) for r in range(rows) for c in range(columns)]


# Name: arguments, pixels along a token, the module whose output has the tokens, and these in it.
FAMILIES = {
    "vit_tiny_patch16_224": (VIT | dict(patch_size=8), 8, "norm", lambda x, m: x[:, 1:]),
    "deit_tiny_distilled_patch16_224": (VIT, 16, "norm", lambda x, m: x[:, 2:]),
    # Registers, and a norm after the mean over tokens.
    "vit_medium_patch16_reg4_gap_256": (
        VIT,
        16,
        "blocks",
        lambda x, m: norm_rows(x[:, 4:], m.fc_norm),
    ),
    # A class token before the registers.
    "vit_small_patch16_dinov3": (VIT, 16, "norm", lambda x, m: x[:, 5:]),
    "swin_tiny_patch4_window7_224": (SWIN, 32, "norm", lambda x, m: by_rows(x.permute(0, 3, 1, 2))),
    "convnext_atto": (
        dict(depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
        32,
        "stages",
        lambda x, m: norm_rows(by_rows(x), m.head.norm),
    ),
    "test_resnet": ({}, 32, "layer4", lambda x, m: by_rows(x)),
    "test_efficientnet": ({}, 32, "bn2", lambda x, m: by_rows(x)),
    # A transformer on the map of a ResNet.
    "vit_tiny_r_s16_p8_224": (
        dict(img_size=64, depth=1, embed_dim=24, num_heads=3),
        32,
        "norm",
        lambda x, m: x[:, 1:],
    ),
}


def bare(name: str, **more: object) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **({"num_classes": 5} | FAMILIES[name][0] | more))


@pytest.mark.parametrize("name", FAMILIES)
def test_outside_token_logits_are_those_of_hooked_tokens_and_the_class_output_is_the_models(name):
    """In float64; inputs that are not square too, but for models that take one size."""
    _, patch, module, read = FAMILIES[name]
    model = bare(name).double()
    headed = densefeed.with_token_head(model).train()
    # The initial bias is 0.
    nn.init.normal_(headed.token_head.bias)
    assert (headed.patch_size, headed.num_classes) == (patch, 5)
    kept = []
    model.get_submodule(module).register_forward_hook(lambda *args: kept.append(args[-1]))
    shapes = [(64, 64)]
    if name not in ("vit_tiny_r_s16_p8_224", "swin_tiny_patch4_window7_224"):
        shapes += [(64, 96), (96, 32)]
    for H, W in shapes:
        image = torch.randn(3, 3, H, W, dtype=torch.float64)
        for mode in (True, False):
            headed.train(mode)
            torch.manual_seed(1)
            want = model(image)
            torch.manual_seed(1)
            output = headed(image)
            assert torch.equal(output.cls if mode else output, want)
            if not mode:
                continue
            tokens_NTD = read(kept[-1], model)
            assert output.tokens.shape == (3, H // patch * (W // patch), 5)
            head = headed.token_head
            want = torch.einsum("ntd,kd->ntk", tokens_NTD, head.weight) + head.bias
            torch.testing.assert_close(output.tokens, want, rtol=1e-12, atol=1e-12)
            output.tokens.sum().backward()
            assert head.weight.grad.abs().sum() > 0
            assert any(p.grad is not None and p.grad.any() for p in model.parameters())
            headed.zero_grad()


def test_outside_the_state_dict_and_buffers_of_the_model_are_as_without_a_head():
    """Also after a check of shapes, which must not change statistics or modes of BatchNorm."""
    model, plain = bare("test_resnet"), bare("test_resnet")
    model.bn1.eval()
    headed = densefeed.with_token_head(model)
    headed.check_shapes([(64, 64), (32, 96)])
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    assert (model.bn1.training, model.layer1.training, headed.training) == (False, True, True)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_outside_mixtoken_exchanges_patches_and_gives_the_tokens_back(name, no_host_read):
    """As an image that is mixed by hand, whose tokens are put back by hand.

    A patch embedding without overlap makes it MixToken of the embedded patches.
    """
    model, patch = bare(name).double(), FAMILIES[name][1]
    headed = densefeed.with_token_head(model).train()
    image = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    image = image.contiguous(memory_format=torch.channels_last)
    mix_PP = torch.zeros(64 // patch, 64 // patch, dtype=torch.bool)
    mix_PP[0, 1:] = True
    mixed = image.clone()
    mixed[:, :, :patch, patch:] = image.flip(0)[:, :, :patch, patch:]
    torch.manual_seed(1)
    with no_host_read():
        got = headed(image, mix_PP=mix_PP)
    torch.manual_seed(1)
    want = headed(mixed)
    assert torch.equal(got.cls, want.cls)
    for t, own in enumerate(~mix_PP.flatten()):
        source = want.tokens if own else want.tokens.flip(0)
        assert torch.equal(got.tokens[:, t], source[:, t])


def test_outside_of_many_classes_the_loss_applies_the_head():
    """In our trainings alone: sparse_loss took features for logits in loops of others."""
    headed, image = (
        densefeed.with_token_head(bare("test_resnet", num_classes=5000)).train(),
        torch.randn(2, 3, 64, 64),
    )
    assert headed(image).tokens.shape == (2, 4, 5000)
    headed.fused_head = True
    output = headed(image)
    assert isinstance(output, TokenFeatures)
    torch.testing.assert_close(output.head(output.tokens), headed.token_head(output.tokens))
    assert output.tokens.shape[:2] == (2, 4)


@pytest.mark.parametrize(("num_classes", "fused"), [(4095, False), (4096, True)])
def test_outside_trainings_of_many_classes_fuse_the_head(micro, tmp_path, num_classes, fused):
    config = micro(tmp_path / "run", **fields("test_resnet"))
    model = bare("test_resnet", num_classes=num_classes)
    assert wrap(config, model, num_classes).fused_head is fused


@pytest.mark.parametrize("layer_decay", [None, 0.7])
def test_outside_weight_decay_and_layer_decay_are_those_of_the_model(layer_decay):
    """The new layer is in the groups of the model's head."""
    model = bare("vit_tiny_patch16_224")
    headed = densefeed.with_token_head(model)
    found = []
    for trained in (model, headed):
        options = dict(weight_decay=0.1, layer_decay=layer_decay)
        groups = create_optimizer_v2(trained, "adamw", 1.0, **options).param_groups
        names = {id(p): name for name, p in trained.named_parameters()}
        found.append(
            {
                names[id(p)].removeprefix("model."): (g["weight_decay"], g.get("lr_scale", 1.0))
                for g in groups
                for p in g["params"]
            }
        )
    want = found[0] | {f"token_head.{n}": found[0][f"head.{n}"] for n in ("weight", "bias")}
    assert found[1] == want
    assert found[1]["pos_embed"][0] == 0


def test_outside_models_without_spatial_tokens_are_refused():
    """By what they lack, when the head is added or for the first input."""
    relabel = "or train with the objective relabel, which needs no tokens$"
    for model, message in (
        (nn.Linear(2, 2), "Linear cannot have a token head: it has no forward_features; choose"),
        (
            timm.create_model("test_resnet", num_classes=0),
            "ResNet .* no num_classes; choose one of",
        ),
        (bare("vit_tiny_patch16_224", patch_drop_rate=0.5), "uses patch dropout in training"),
        (timm.create_model("agent_micro"), "AgentCNN .* does not state the pixels along a token"),
    ):
        with pytest.raises(UserError, match=f"{message}.*, {relabel}"):
            densefeed.with_token_head(model)
    for has in (timm.create_model("lvvit_micro"), densefeed.with_token_head(bare("test_resnet"))):
        with pytest.raises(UserError, match="has a token head; leave out with_token_head"):
            densefeed.with_token_head(has)
    small = dict(img_size=64, num_classes=5)
    for model, shape, message in (
        ("pit_ti_224", (64, 64), "class token alone, without a grid of tokens"),
        ("crossvit_tiny_240", (240, 240), "neither a map nor a grid of tokens"),
        ("volo_d1_224", (64, 64), "neither a map nor a grid of tokens"),
        # Convolutions without padding: 6 x 6 positions for 256 pixels, and not 8 x 8.
        ("inception_v3", (256, 256), "are 2048 channels of 6 x 6, and not 2048 for every 32 x 32"),
        ("test_resnet", (64, 72), "64 x 72 pixels .* choose multiples of 32, such as 64 or 96"),
    ):
        takes = () if model in ("inception_v3", "test_resnet", "crossvit_tiny_240") else small
        headed = densefeed.with_token_head(timm.create_model(model, **dict(takes)))
        with pytest.raises(UserError, match=f"a name: .*{message}.*, {relabel}"):
            headed.check_shapes([shape], "a name")
    with pytest.raises(ValueError, match=message):
        headed.train()(torch.zeros(2, 3, *shape))


# ---------------------------------------------------------------- runs

# Name: arguments and size of the smallest runs.
RUNS = {
    "vit_tiny_patch16_224": (("patch_size=8", "depth=2", "embed_dim=24", "num_heads=3"), 32),
    "deit_tiny_distilled_patch16_224": (("depth=2", "embed_dim=24", "num_heads=3"), 32),
    "vit_medium_patch16_reg4_gap_256": (("depth=2", "embed_dim=24", "num_heads=3"), 32),
    "swin_tiny_patch4_window7_224": (
        ("window_size=2", "embed_dim=12", "depths=(1, 1, 1, 1)", "num_heads=(1, 2, 3, 4)"),
        64,
    ),
    "convnext_atto": (("depths=(1, 1, 1, 1)", "dims=(8, 16, 24, 32)"), 64),
    "test_resnet": ((), 64),
    "test_efficientnet": ((), 64),
    # It accepts the argument `token_head` and has none.
    "test_byobnet": ((), 64),
}


def fields(name: str) -> dict:
    words, size = RUNS[name]
    return dict(model=name, model_kwargs=words, size=size, drop_path=0.1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", RUNS)
def test_outside_a_run_with_token_labels_adds_the_head(micro, tmp_path, capsys, name):
    """A few steps train it; checkpoint and recipe are those of the plain model beside it."""
    mixtoken = name != "test_resnet"
    config = micro(tmp_path / "run", epochs=1, mixtoken=mixtoken, **fields(name))
    result = training.train(config)
    assert f"note: {name} has no token head; a linear layer" in capsys.readouterr().out
    assert all(0 < line["loss"] < 10 for line in records(tmp_path / "run"))
    assert 0 <= result["top1_ema"] <= 1
    saved = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    assert "token_head" not in saved["recipe"]["kwargs"]
    plain = timm.create_model(name, **saved["recipe"]["kwargs"])
    for key in ("model", "ema"):
        plain.load_state_dict(saved[key])
    assert list(saved["token_head"]) == ["weight", "bias"]
    # The loss of the tokens reached it: the initial bias is 0.
    assert saved["token_head"]["bias"].abs().sum() > 0


def test_outside_the_export_of_such_a_run_is_the_plain_model(micro, tmp_path):
    name, out = "vit_tiny_patch16_224", tmp_path / "exported"
    training.train(micro(tmp_path / "run", epochs=1, **fields(name)))
    export(Export(checkpoint=tmp_path / "run", out=out))
    arguments = json.loads((out / "config.json").read_text())["model_args"]
    assert "token_head" not in arguments
    loaded = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    assert type(loaded) is timm.models.VisionTransformer
    image = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded(image), open_trained(tmp_path / "run").model(image))


@pytest.mark.slow
def test_outside_such_a_run_resumes_to_the_bit_and_starts_from_plain_weights(
    micro, tmp_path, one_thread, capsys
):
    """With EMA, SAM, recomputed activations and stochastic depth; BatchNorm counts once more."""
    name, plain = "vit_tiny_patch16_224", tmp_path / "plain.pt"
    options = fields(name) | dict(grad_checkpointing=True, sam_rho=0.05, threads=1, init=plain)
    words = dict(patch_size=8, depth=2, embed_dim=24, num_heads=3)
    torch.manual_seed(7)
    torch.save(timm.create_model(name, num_classes=2, img_size=32, **words).state_dict(), plain)
    training.train(micro(tmp_path / "whole", **options))
    assert f"initialized from {plain}" in capsys.readouterr().out

    def stop(*_: object) -> None:
        raise InterruptedError

    with pytest.MonkeyPatch.context() as patch, suppress(InterruptedError):
        patch.setattr(training, "evaluate", stop)
        training.train(micro(tmp_path / "part", **options))
    training.train(micro(tmp_path / "part", resume="auto", **options))
    whole, part = (
        torch.load(tmp_path / run / "last.pt", weights_only=True) for run in ("whole", "part")
    )
    for key in ("model", "ema", "token_head"):
        assert whole[key].keys() == part[key].keys()
        assert all(map(torch.equal, whole[key].values(), part[key].values())), key
    # A checkpoint that lost the head is not continued without one.
    out = shutil.copytree(tmp_path / "part", tmp_path / "lost", symlinks=True)
    manifest = out / "checkpoints" / "manifest.json"
    newest = max((out / "checkpoints").glob("*.pt"))
    del part["token_head"]
    torch.save(part, newest)
    manifest.unlink()
    with pytest.raises(UserError, match="does not fit its run"):
        training.train(micro(out, resume="auto", **options))


def test_outside_a_run_refuses_models_whose_tokens_have_no_place(micro, tmp_path):
    for more, message in (
        (dict(model="crossvit_tiny_240", size=240), "crossvit_tiny_240: its features are neither"),
        (
            dict(model="test_resnet", size=48),
            "test_resnet: inputs of 48 x 48 pixels would have part",
        ),
        (
            dict(model="test_vit", drloc="l1", drloc_grid=0),
            r"test_vit has no token head of its own, which --drloc l1 needs for token labels; .*"
            "--objective relabel --no-mixtoken",
        ),
        (
            dict(model="test_resnet", objective="ce"),
            r"test_resnet cannot exchange tokens \(MixToken\)",
        ),
    ):
        with pytest.raises(UserError, match=message):
            training.train(micro(tmp_path / "run", model_kwargs=(), drop_path=0.0, **more))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["blocks", "whole"])
def test_outside_such_a_step_compiles_to_the_same_loss(micro, tmp_path, mode, monkeypatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **k: compile(*a, **k, backend="eager"))
    losses = []
    for chosen in ("never", mode):
        torch._dynamo.reset()
        out = tmp_path / chosen
        options = fields("vit_tiny_patch16_224") | dict(drop_path=0.0, compile=chosen)
        training.train(micro(out, epochs=1, **options))
        losses.append([line["loss"] for line in records(out)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


# ---------------------------------------------------------------- own loops


def test_outside_a_loop_of_ones_own_trains_it(packed):
    with densefeed.open_loader(packed[0], batch=4, size=64, seed=0, threads=1) as loader:
        model = timm.create_model("test_resnet", num_classes=loader.num_classes)
        with pytest.raises(UserError, match=r"ResNet has no token head; .*with_token_head\(model"):
            densefeed.build_step(loader, model, "token-label")
        headed = densefeed.with_token_head(model)
        with pytest.raises(UserError, match=r"has a token head; .* or leave out with_token_head"):
            densefeed.build_step(loader, headed, "ce")
        step = densefeed.build_step(loader, headed, "token-label", mixtoken=True)
        optimizer, losses = torch.optim.AdamW(headed.parameters(), 1e-3), []
        for epoch in range(4):
            for batch in step.batches(epoch):
                loss = step(headed, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        assert sum(losses[-3:]) < sum(losses[:3])
    sizes = dict(num_classes=2, img_size=32, depth=1, embed_dim=24, num_heads=3)
    fixed = densefeed.with_token_head(timm.create_model("vit_tiny_patch16_224", **sizes))
    with densefeed.open_loader(packed[0], batch=4, size=48, threads=1) as loader:
        for model, message in (
            (headed, "ResNet: inputs of 48 x 48 pixels would have partial tokens"),
            (fixed, r"VisionTransformer cannot take inputs of 48 x 48 pixels \(.*img_size"),
        ):
            with pytest.raises(UserError, match=message):
                densefeed.build_step(loader, model, "token-label")


def test_outside_a_step_fuses_the_head_of_many_classes(packed, monkeypatch):
    """With the loss and gradients of logits; the model gives logits outside the step."""
    with densefeed.open_loader(packed[0], batch=4, size=64, seed=0, threads=1) as loader:
        model = timm.create_model("test_resnet", num_classes=loader.num_classes)
        headed, found = densefeed.with_token_head(model).train(), []
        step = densefeed.build_step(loader, headed, "token-label", mixtoken=True)
        batch, kinds = next(step.batches(0)), []
        headed.register_forward_hook(lambda *args: kinds.append(type(args[-1])))
        for least in (loader.num_classes + 1, loader.num_classes):
            monkeypatch.setattr("densefeed.step.FUSED_FROM", least)
            headed.zero_grad()
            step(headed, batch).backward()
            found.append({name: p.grad.clone() for name, p in headed.named_parameters()})
            assert isinstance(headed(batch.image), TokenLogits)
        assert kinds == [TokenLogits, TokenLogits, TokenFeatures, TokenLogits]
        assert found[0]["token_head.weight"].abs().sum() > 0
        for name, grad in found[0].items():
            torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-6)
        with pytest.raises(ValueError, match="do not fit"):
            step(headed, batch._replace(image=batch.image[:2]))
        assert headed.fused_head is False


def test_the_objective_wraps_only_models_without_a_head(micro, tmp_path):
    config = micro(tmp_path / "run", **fields("test_resnet"))
    headed = wrap(config, bare("test_resnet"))
    assert isinstance(headed, TokenHeadModel)
    assert isinstance(headed.train()(torch.zeros(2, 3, 64, 64, device=CPU)), TokenLogits)
    own = timm.create_model("lvvit_micro", num_classes=2)
    assert wrap(config, own) is own
