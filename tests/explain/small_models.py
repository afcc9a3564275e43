"""Two-block models of each family with changed weights, and their NumPy counterparts."""

import numpy as np
import timm
import torch
from torch import Tensor, nn

from densefeed.models import checkpoints  # noqa: F401  (registers our models)

from ..models.plain_layers import randomize
from . import written_out
from .written_out import Output

CVT = dict(dims=(4, 8, 12), depths=(1, 1, 2), num_heads=(1, 2, 3))
WRITTEN = {
    "vit": ("vit_tiny_patch16_224", dict(img_size=24, patch_size=8, embed_dim=12, num_heads=3)),
    "lvvit": (
        "lvvit_micro",
        dict(img_size=24, embed_dim=12, num_heads=3, stem_width=4, residual_divisor=2.0),
    ),
    "dhvt": ("dhvt_micro", dict(img_size=16, patch_size=4, embed_dim=16, num_heads=4)),
    "t2t": ("t2t_vit_7", dict(img_size=32, embed_dim=12, num_heads=3, token_dim=6)),
    "cvt": ("cvt_13", CVT),
}
SIZES = {"vit": 24, "lvvit": 24, "dhvt": 16, "t2t": 32, "cvt": 64}


def build_written(family: str) -> nn.Module:
    """Build the model of a family in float64, in evaluation mode."""
    torch.manual_seed(0)
    name, sizes = WRITTEN[family]
    depth = {} if family == "cvt" else {"depth": 2}
    return randomize(timm.create_model(name, num_classes=5, **sizes, **depth)).eval()


def draw_images(family: str, count: int = 2) -> Tensor:
    rng = torch.Generator().manual_seed(1)
    side = SIZES[family]
    return torch.randn(count, 3, side, side, generator=rng, dtype=torch.float64)


def write_out(family: str, model: nn.Module, image: Tensor) -> Output:
    """Compute one image `[3, H, W]` in NumPy."""
    w = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    image = np.array(image)
    if family == "cvt":
        return written_out.cvt(image, w, CVT["depths"], CVT["num_heads"])
    patches = getattr(written_out, f"{family}_patches")(image, w)
    x = written_out.with_class_token(w, patches)
    if family == "dhvt":
        return written_out.dhvt(x, w, 4, patches.shape[1:])
    eps = 1e-6 if family == "vit" else 1e-5
    return written_out.vit(x, w, 3, eps, 2.0 if family == "lvvit" else 1.0)
