"""UperNet: published sizes, maps of the backbones, gradients of all weights, and ONNX."""

import pytest
import timm
import torch

from densefeed.models.meta_device import meta_device
from densefeed.models.upernet import PixelLogits, UperNet
from densefeed.recipes import RECIPES
from densefeed.system.errors import UserError
from densefeed.tools.export import Export, main
from densefeed.train import train
from densefeed.training.load_model import open_trained

from ..runs import model_for

MICRO = dict(
    backbone="lvvit_micro", depth=2, stem=((7, 2), (3, 2), (4, 2)), stem_width=8, img_size=32
)


def test_parameters_are_those_of_the_published_rows():
    """In millions: token-labeling's README (44, 77, 209) and Swin's paper (60; DRLoc has none)."""
    published = {"swin_t": 60, "lvvit_s": 44, "lvvit_m": 77, "lvvit_l": 209}
    taps = {"swin_t": [0, 1, 2, 3], "lvvit_s": [6, 9, 12, 15]}
    taps |= {"lvvit_m": [10, 13, 16, 19], "lvvit_l": [14, 17, 20, 23]}
    for name, millions in published.items():
        with meta_device():
            model = model_for(RECIPES[f"segment_ade20k_{name}"](), 150)
        count = sum(p.numel() for p in model.parameters()) / 1e6
        assert abs(count - millions) < 0.5, (name, count)
        assert model.taken == taps[name]


def test_every_weight_has_a_gradient_and_logits_have_the_size_of_the_input():
    torch.manual_seed(0)
    for arguments in (MICRO, dict(backbone="test_resnet"), dict(backbone="cvt_13", img_size=None)):
        kwargs = {name: value for name, value in arguments.items() if value is not None}
        if kwargs["backbone"] == "cvt_13":
            kwargs |= dict(dims=(16, 48, 96), depths=(1, 1, 1))
        model = timm.create_model("upernet", num_classes=5, decoder_width=8, auxiliary=8, **kwargs)
        image = torch.randn(2, 3, 32, 32)
        output = model.train()(image)
        assert isinstance(output, PixelLogits)
        assert output.logits.shape == output.auxiliary.shape == (2, 5, 32, 32)
        (output.logits.square().mean() + output.auxiliary.square().mean()).backward()
        unused = [name for name, p in model.named_parameters() if p.grad is None]
        assert not unused, kwargs
        assert model.eval()(image[:1]).shape == (1, 5, 32, 32)
    bare = timm.create_model("upernet", num_classes=5, decoder_width=8, auxiliary=0, **MICRO)
    assert bare.train()(torch.randn(2, 3, 32, 32)).auxiliary is None


@pytest.mark.slow
def test_an_export_to_onnx_equals_torch_and_is_built_again(segments, tmp_path):
    """`densefeed export` itself refuses a difference above 1e-4."""
    train(segments(tmp_path / "run", epochs=1, eval_every=2))
    main(Export(checkpoint=tmp_path / "run", out=tmp_path / "export", format="both"))
    import onnxruntime

    session = onnxruntime.InferenceSession(str(tmp_path / "export/model.onnx"))
    image = torch.randn(3, 3, 32, 32)
    (found,) = session.run(["logits"], {"image": image.numpy()})
    with pytest.raises(UserError, match="holds a segmentation network, which classifies pixels"):
        open_trained(tmp_path / "run")
    opened = [open_trained(tmp_path / path, others=(UperNet,)).model for path in ("run", "export")]
    for model in [*opened, timm.create_model(f"local-dir:{tmp_path}/export", pretrained=True)]:
        model.eval()
        with torch.inference_mode():
            want = model(image)
        assert found.shape == want.shape == (3, 4, 32, 32)
        assert torch.allclose(torch.from_numpy(found), want, atol=1e-4)
