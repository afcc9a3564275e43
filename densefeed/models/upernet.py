"""UperNet (arXiv 1807.10221) on the maps of a classifier's blocks: logits of all pixels.

The decoder is that of transformers (extra `segment`).
"""

from typing import NamedTuple

from timm.models import register_model
from torch import Tensor
from torch.nn import functional as F

from densefeed.models.on_backbone import (
    OnBackbone,
    build,
    checkpoint_filter_fn,  # noqa: F401
    init_convolution,
)
from densefeed.system.errors import UserError, install_extra

# N images   K classes   H, W pixels   h, w cells


class PixelLogits(NamedTuple):
    """What a segmentation network returns in training."""

    logits: Tensor  # [N, K, H, W]
    auxiliary: Tensor | None  # those of the auxiliary head, likewise


class UperNet(OnBackbone):
    """A decoder on a backbone: images `[N, 3, H, W]` to logits `[N, K, H, W]`.

    In training it returns `PixelLogits`.

    Args:
        backbone: timm's name of a classifier with `forward_intermediates`, which gets `kwargs`.
        decoder_width: channels of the decoder.
        auxiliary: channels of the auxiliary head (FCN) on the last map but one; 0: none.

    Raises UserError without transformers, AttributeError for a backbone without maps.
    """

    def __init__(
        self,
        backbone: str = "swin_tiny_patch4_window7_224",
        num_classes: int = 150,
        decoder_width: int = 512,
        auxiliary: int = 256,
        **kwargs,
    ) -> None:
        try:
            # Four seconds, which no other model should wait for.
            from transformers import UperNetConfig
            from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead
        except ImportError as error:
            raise UserError(
                f"upernet needs the package transformers; {install_extra('segment')}"
            ) from error
        super().__init__(backbone, **kwargs)
        self.pretrained_cfg = self.backbone.pretrained_cfg | {
            "architecture": "upernet",
            "classifier": ("decoder.classifier", *["auxiliary.classifier"] * bool(auxiliary)),
        }
        self.num_classes, channels, plain = num_classes, self.channels, self.plain
        sizes = {"num_labels": num_classes, "hidden_size": decoder_width}
        config = UperNetConfig(**sizes, auxiliary_channels=auxiliary)
        self.decoder = UperNetHead(config, channels)
        index = len(channels) - 2
        self.auxiliary = UperNetFCNHead(config, channels, index) if auxiliary else None
        for part in (self.branches if plain else None, self.decoder, self.auxiliary):
            if part is not None:
                part.apply(init_convolution)

    def forward(self, image_NCHW: Tensor) -> Tensor | PixelLogits:
        if self.training and len(image_NCHW) == 1:
            raise UserError(
                "the decoder normalizes one pooled cell an image over the images of a forward pass,"
                " which needs two; give a larger --batch or --microbatch, or fewer ranks"
            )
        maps = self.make_maps(image_NCHW)
        size = tuple(image_NCHW.shape[2:])
        logits = resize(self.decoder(maps), size)
        if not self.training:
            return logits
        return PixelLogits(logits, resize(self.auxiliary(maps), size) if self.auxiliary else None)


def resize(logits_NKhw: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize logits bilinearly to `size`."""
    return F.interpolate(logits_NKhw, size, mode="bilinear")


@register_model
def upernet(pretrained: bool = False, **kwargs) -> UperNet:
    """Build UperNet, see `build`."""
    return build(UperNet, "upernet", pretrained, **kwargs)
