"""The View of an image after a pipeline of Albumentations, from the parameters that it records.

    transform = A.Compose([...], save_applied_params=True)
    result = transform(image=image)
    view = follow(image, result)

Albumentations 2.0 records the size, box or matrix of each transform that moves pixels. Its own
keypoints are of no use here: where it resizes, they are a fraction of a pixel off the pixels.
"""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from densefeed.pipelines.views import Size, View, compose, cut
from densefeed.system.errors import UserError

RESIZES = {"Resize", "SmallestMaxSize", "LongestMaxSize", "RandomScale"}
CROPS = {"Crop", "CenterCrop", "RandomCrop", "RandomCropFromBorders"}
CROPS |= {"RandomResizedCrop", "RandomSizedCrop"}
PADS = {"Pad", "PadIfNeeded"}
WARPS = {"Affine", "ShiftScaleRotate", "Rotate", "SafeRotate"}
# Elements of the square's group: quarter turns counterclockwise, then whether it is transposed.
TURNS = {"e": (0, False), "r90": (1, False), "r180": (2, False), "r270": (3, False)}
TURNS |= {"t": (0, True), "h": (1, True), "hvt": (2, True), "v": (3, True)}
FLIPS = {"HorizontalFlip": "h", "VerticalFlip": "v", "Transpose": "t"}
# Besides all that change the image alone. Erased pixels keep their labels.
KEEPS = {"NoOp", "ToTensorV2", "CoarseDropout", "Erasing", "GridDropout", "PixelDropout"}
KEEPS |= {"XYMasking"}


def follow(image: np.ndarray, result: Mapping[str, Any]) -> View:
    """Return the View of what `A.Compose(..., save_applied_params=True)` made of an image.

    Args:
        image: what the pipeline received, `[H, W, C]`.
        result: what it returned. The image in it is an array, or a tensor `[C, h, w]`.

    Raises UserError for a transform that is not affine or not known, and for other records. Leave
    out OneOrOther and SelectiveChannelTransform: Albumentations records nothing of what they do.
    """
    if "applied_transforms" not in result:
        raise UserError(
            "the result of Albumentations has no applied_transforms; give its outermost Compose "
            "save_applied_params=True"
        )
    view, out = View.identity(torch.empty(0, *image.shape[:2])), result["image"]
    steps = result["applied_transforms"]
    sizes = [tuple(parameters["shape"][:2]) for _, parameters in steps]
    sizes.append(tuple(out.shape[-2:] if isinstance(out, Tensor) else out.shape[:2]))
    for (name, parameters), size in zip(steps, sizes[1:], strict=True):
        try:
            view = follow_one(view, name, parameters, size)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{name} of Albumentations recorded other parameters than in version 2.0; install "
                "that, or use torchvision's transforms"
            ) from error
        if view.canvas_size != size:
            break
    if view.canvas_size != sizes[-1]:
        raise UserError(
            "the sizes that Albumentations recorded do not follow from each other; give `follow` "
            "the image that its outermost Compose received"
        )
    return view


def follow_one(view: View, name: str, parameters: Mapping[str, Any], size: Size) -> View:
    """Append one transform, whose output has `size`."""
    if name in RESIZES:
        return compose(view, size, (1, 0, 0), (0, 1, 0))
    if name in CROPS:
        left, top, right, bottom = parameters["crop_coords"]
        # The box is of the padded image.
        pad = parameters.get("pad_params") or {"pad_top": 0, "pad_left": 0}
        y, x = top - pad["pad_top"], left - pad["pad_left"]
        return cut(view, y, x, bottom - top, right - left, size)
    if name in PADS:
        return cut(view, -parameters["pad_top"], -parameters["pad_left"], *size, size)
    if name in WARPS:
        return warp(view, parameters, size)
    if name == "RandomRotate90":
        return turn(view, parameters["factor"] % 4, False)
    if name in FLIPS or name in ("D4", "SquareSymmetry"):
        return turn(view, *TURNS[FLIPS.get(name) or str(parameters["group_element"])])
    module = sys.modules.get("albumentations")
    kind = getattr(module, name, None)
    if name in KEEPS or (isinstance(kind, type) and issubclass(kind, module.ImageOnlyTransform)):
        return view
    raise UserError(
        f"a View cannot follow {name} of Albumentations; leave it out, or use Affine or a crop"
    )


def turn(view: View, quarters: int, transposed: bool) -> View:
    """Append quarter turns counterclockwise, then an exchange of rows and columns."""
    view = F.rotate(view, 90 * quarters, expand=True)
    return compose(view, view.canvas_size[::-1], (0, 1, 0), (1, 0, 0)) if transposed else view


def warp(view: View, parameters: Mapping[str, Any], size: Size) -> View:
    """Append an affine map; Rotate may crop what it has turned."""
    (H, W), (h, w) = view.canvas_size, size
    # From the first pixel's center to the corner, and to the output's corner.
    center, corner = np.eye(3), np.eye(3)
    center[:2, 2], corner[:2, 2] = 0.5, [max(parameters.get(k, 0), 0) for k in ("x_min", "y_min")]
    matrix = center @ np.asarray(parameters["matrix"], float) @ np.linalg.inv(center)
    (a, b, x), (c, d, y), _ = (np.linalg.inv(matrix) @ corner).tolist()
    return compose(view, size, (a * w / W, b * h / W, x / W), (c * w / H, d * h / H, y / H))
