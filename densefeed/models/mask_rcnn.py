"""Mask R-CNN (arXiv 1703.06870) with a feature pyramid on a classifier's blocks.

Proposals, heads, losses and their constants are torchvision's. The maps are those of `OnBackbone`,
of a plain transformer at a quarter, a half, once and twice its pixels a cell (as ViTDet's). Anchors
are 8 cells wide on each level, as usual: 32 pixels on cells of 4.
"""

from collections import OrderedDict
from types import SimpleNamespace

import torch
from timm.models import register_model
from torch import Tensor
from torch.nn import functional as F
from torchvision.models.detection import MaskRCNN as TorchMaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from densefeed.models.on_backbone import (
    OnBackbone,
    build,
    checkpoint_filter_fn,  # noqa: F401
    init_convolution,
)
from densefeed.system.errors import UserError

# N images   K classes   D width   H, W pixels   n boxes

# Side of an anchor in cells, and heights over widths of the anchors of a cell.
ANCHOR, RATIOS = 8, (0.5, 1.0, 2.0)


class MaskRCNN(OnBackbone):
    """A detector on a backbone, for images `[N, 3, H, W]` and K classes.

    In training it takes the objects of each image too, as torchvision's (`boxes`, `labels` from 1,
    `masks`), and returns a dictionary of losses. In evaluation mode it returns for each image
    `boxes` `[n, 4]` in pixels, `labels` from 1, `scores`, `masks` `[n, 1, 28, 28]` (probabilities
    inside the boxes) and `finite`, whether its features are finite.

    Args:
        backbone: timm's name of a classifier with `forward_intermediates`, which gets `kwargs`.
        decoder_width: channels of the pyramid and of the mask head; the box head has four times as
            many.
        samples: regions of an image that the heads learn from in a step.

    Raises UserError in training without objects.
    """

    def __init__(
        self,
        backbone: str = "swin_tiny_patch4_window7_224",
        num_classes: int = 80,
        decoder_width: int = 256,
        samples: int = 512,
        **kwargs,
    ) -> None:
        # Whole images of an evaluation have other sizes than crops; not all models can be told so.
        try:
            super().__init__(backbone, 0.5, 0, dynamic_img_size=True, **kwargs)
        except TypeError:
            super().__init__(backbone, 0.5, 0, **kwargs)
        D, K = decoder_width, num_classes + 1
        predictors = ("box_predictor.cls_score", "box_predictor.bbox_pred")
        heads = (*predictors, "mask_predictor.mask_fcn_logits")
        self.pretrained_cfg = self.backbone.pretrained_cfg | {
            "architecture": "mask_rcnn",
            "classifier": tuple(f"roi_heads.{name}" for name in heads),
        }
        self.num_classes = num_classes
        # Sides of images are filled up to multiples of the coarsest cell, in pixels.
        self.whole = round(max(self.strides[-1], self.backbone.feature_info[-1]["reduction"]))
        if self.plain:
            self.branches.apply(init_convolution)
        self.fpn = FeaturePyramidNetwork(self.channels, D, LastLevelMaxPool())
        strides = [*self.strides, 2 * self.strides[-1]]
        names = [str(number) for number in range(len(self.channels))]
        parts = TorchMaskRCNN(
            SimpleNamespace(out_channels=D),
            rpn_anchor_generator=AnchorGenerator(
                tuple((ANCHOR * stride,) for stride in strides), (RATIOS,) * len(strides)
            ),
            box_roi_pool=MultiScaleRoIAlign(names, 7, 2),
            box_head=TwoMLPHead(D * 7**2, 4 * D),
            box_predictor=FastRCNNPredictor(4 * D, K),
            box_batch_size_per_image=samples,
            mask_roi_pool=MultiScaleRoIAlign(names, 14, 2),
            mask_head=MaskRCNNHeads(D, (D,) * 4, 1),
            mask_predictor=MaskRCNNPredictor(D, D, K),
        )
        # Its resizing and normalization of images are the loader's and the step's here.
        self.rpn, self.roi_heads = parts.rpn, parts.roi_heads

    def forward(
        self, image_NCHW: Tensor, objects: list[dict[str, Tensor]] | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        if self.training and objects is None:
            raise UserError(
                "mask_rcnn learns from objects, which the objective does not read; give "
                "--objective detect, or another --model"
            )
        H, W = image_NCHW.shape[2:]
        padded = F.pad(image_NCHW, (0, -W % self.whole, 0, -H % self.whole))
        maps = self.fpn(OrderedDict((str(n), x) for n, x in enumerate(self.make_maps(padded))))
        sizes = [(H, W)] * len(padded)
        # bfloat16 would round coordinates of boxes to 4 pixels.
        with torch.autocast(padded.device.type, enabled=False):
            maps = OrderedDict((name, x.float()) for name, x in maps.items())
            boxes, losses = self.rpn(ImageList(padded, sizes), maps, objects)
            found, more = self.roi_heads(maps, boxes, sizes, objects)
        if self.training:
            return losses | more
        finite = torch.stack([x.isfinite().flatten(1).all(1) for x in maps.values()]).all(0)
        return [one | {"finite": fine} for one, fine in zip(found, finite, strict=True)]


@register_model
def mask_rcnn(pretrained: bool = False, **kwargs) -> MaskRCNN:
    """Build Mask R-CNN, see `build`."""
    return build(MaskRCNN, "mask_rcnn", pretrained, **kwargs)
