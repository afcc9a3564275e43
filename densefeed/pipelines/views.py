"""View: which part of the stored image each pixel shows, through pipelines of torchvision.

A `View` passes through any pipeline of torchvision.transforms.v2 beside its image:

    image, view = transform(image, View.identity(image))

Each functional of torchvision that moves pixels has a kernel for Views here, which composes the
same map by torchvision's rules for angles, centers and sizes of the output, or refuses what is not
affine. Transforms of colors leave Views as they are.

torchvision's own RandAugment, AutoAugment and TrivialAugmentWide refuse Views, because they apply
their operations to the image alone. Those of this module have the same arguments and draws, and
apply the geometric operations to Views too.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from densefeed.system.errors import UserError

# A row of a matrix [2, 3]: the factors of x and of y, and the shift.
Row = tuple[float, float, float]
Size = tuple[int, int]  # height, width
# A number, or a sequence of one to four as the functional allows.
Numbers = float | Sequence[float]


class View(tv_tensors.Mask):
    """Which part of the stored image each pixel of the network's input shows.

    Float64 `[2, 6]`: a row for x and one for y. Columns 0 to 2 are the matrix that takes a point
    (x, y, 1) of the input to a point of the stored image, both from 0 to 1 along their sides.
    Columns 3 and 4 are the first and the last coordinate of the stored image that is shown: the
    input shows fill elsewhere. Column 5 is the number of the input's pixels along this axis.

    Everything is in the tensor, so Views can be collated: `default_collate` makes a View
    `[N, 2, 6]` of N, whose properties are those of all, and `View(tensor)` one of a stacked tensor.
    UserError for other shapes.

    What is shown is a box along the axes of the stored image. Fill that a rotation brings into the
    input lies outside the stored image, so labels know it; but a second rotation may bring back a
    corner that the first has cut off and filled, and such a corner is inside the box.

    Pixels are taken to be interpolated about their centers. "nearest" resizes tensors with the
    pixel at their upper left, half an output pixel away at most; "nearest-exact" does not.
    """

    # A subclass of Mask because transforms that change only images pass unknown classes through,
    # which would be wrong without a word, but refuse masks: RandAugment, AutoAugment,
    # TrivialAugmentWide, AugMix, FiveCrop, TenCrop, and of batches CutMix and MixUp.

    # Whether the transforms receive a PIL image: its rotations are expanded to sizes of their own.
    is_pil = False

    def __new__(cls, data: Any) -> "View":
        view = torch.as_tensor(data, dtype=torch.float64).as_subclass(cls)
        if view.shape[-2:] != (2, 6):
            raise UserError(
                f"a View has the shape [2, 6], not {list(view.shape)}; begin with View.identity"
            )
        return view

    @classmethod
    def identity(cls, image: Any) -> "View":
        """Return the View of a stored image that is not transformed yet.

        `image` is what the first transform receives: a PIL image, a tensor `[..., C, H, W]` or a
        tv_tensors.Image. UserError for others.
        """
        try:
            height, width = F.get_size(image)
        except TypeError:
            raise UserError(
                f"View.identity takes a PIL image or a tensor, not {type(image).__name__}; convert "
                "the image with v2.ToImage first"
            ) from None
        rows = (1, 0, 0, 0, 1, width), (0, 1, 0, 0, 1, height)
        view = torch.tensor(rows, dtype=torch.float64).as_subclass(cls)
        view.is_pil = isinstance(image, Image.Image)
        return view

    def as_subclass(self, cls: type) -> Tensor:
        """Return this View as a `cls`, except as a plain tensor.

        v2.ToPureTensor asks for that, and the transforms after it would pass a plain tensor
        through.
        """
        return self if cls is Tensor else super().as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Keep the class where the output has a View's shape, and `is_pil` as in copies.

        CutMix would pass a plain tensor through, as of `torch.stack`.
        """
        output = super().__torch_function__(func, types, args, kwargs)
        # `plain` asks for a plain tensor.
        if func is not Tensor.as_subclass:
            several = type(output) in (tuple, list)
            output = type(output)(map(keep_view, output)) if several else keep_view(output)
        if isinstance(output, View):
            output.is_pil = getattr(next(iter(args), None), "is_pil", False)
        return output

    def __getitem__(self, index: Any) -> Tensor:
        """Return a part; whole Views are Views, others are plain tensors.

        IndexError for masks: v2.SanitizeBoundingBoxes drops the rows of boxes from masks of as many
        rows as boxes, and passes through what it cannot index.
        """
        if isinstance(index, Tensor) and index.dtype == torch.bool:
            raise IndexError("a View has no rows to choose; use its properties")
        part = self.plain[index]
        return part.as_subclass(View) if part.shape[-2:] == (2, 6) else part

    @classmethod
    def wrap(cls, tensor: Tensor, like: "View", **options: Any) -> "View":
        """Raise UserError: only torchvision's kernels for masks wrap what they return.

        A functional that moves pixels and is newer than this module has no other.
        """
        raise UserError(
            "a View cannot follow this transform of torchvision; leave it out, or update DenseFeed"
        )

    @property
    def plain(self) -> Tensor:
        """All numbers, as a tensor that is not a View."""
        return super().as_subclass(Tensor)

    @property
    def matrix(self) -> Tensor:
        """Float64 `[..., 2, 3]`: from the network's input to the stored image, as `Batch.view`."""
        return self.plain[..., :3]

    @property
    def shown(self) -> Tensor:
        """Float64 `[..., 4]`: top, left, bottom, right of what is shown, as `Batch.shown`."""
        return self.plain[..., 3:5].mT.flip(-1).flatten(-2)

    @property
    def canvas_size(self) -> Size:
        """Height and width of the network's input in pixels."""
        plain = self.plain
        (*_, width), (*_, height) = (plain if plain.ndim == 2 else plain.flatten(0, -3)[0]).tolist()
        return int(height), int(width)


def keep_view(output: Any) -> Any:
    """Return a plain tensor as a View if it has the shape and a type of Views; else `output`."""
    fits = type(output) is Tensor and output.shape[-2:] == (2, 6) and output.is_floating_point()
    return output.as_subclass(View) if fits else output


def collate_views(views: Sequence[View], **options: Any) -> View:
    """Stack the Views of a batch, for `default_collate`: `[N, 2, 6]`.

    The class is kept, because CutMix and MixUp refuse it, and would pass a plain tensor beside the
    images that they mix through.
    """
    return View(collate_tensor_fn([view.plain for view in views]))


default_collate_fn_map[View] = collate_views


# ---------------------------------------------------------------- maps


def compose(view: View, size: Size, x: Row, y: Row) -> View:
    """Append an operation whose output has `size`.

    `x` and `y` take a point of its output to one of its input, both from 0 to 1 along their sides.
    """
    plain = view.plain
    if plain.ndim > 2:
        return View(torch.stack([compose(View(one), size, x, y).plain for one in plain]))
    # In floats of Python: a tenth of the time of operations on such small tensors.
    row_x, row_y = plain.tolist()
    rows = compose_row(row_x, x, y, size[1]), compose_row(row_y, x, y, size[0])
    new = torch.tensor(rows, dtype=torch.float64, device=plain.device).as_subclass(View)
    new.is_pil = view.is_pil
    return new


def compose_row(row: Sequence[float], x: Row, y: Row, pixels: int) -> tuple[float, ...]:
    """Do so for one axis of the stored image."""
    a, b, shift, first, last, _ = row
    u, v, w = a * x[0] + b * y[0], a * x[1] + b * y[1], a * x[2] + b * y[2] + shift
    # The output's four corners reach from `low` to `high` in the stored image.
    low = w + (u if u < 0 else 0) + (v if v < 0 else 0)
    high = w + (u if u > 0 else 0) + (v if v > 0 else 0)
    first = low if low > first else first
    last = high if high < last else last
    return u, v, w, first, last if last > first else first, pixels


def cut(view: View, top: int, left: int, height: int, width: int, size: Size) -> View:
    """Append a crop, which may reach beyond its input, and is resized to `size`."""
    H, W = view.canvas_size
    return compose(view, size, (width / W, 0, left / W), (0, height / H, top / H))


def warp(
    view: View, size: Size, linear: Sequence[float], center: Numbers | None, shift: Numbers
) -> View:
    """Append x -> `linear` (x - center) + center + shift, in pixels.

    `linear` is a matrix [2, 2], row-major. The output's center is that of the input, plus `shift`.
    """
    (H, W), (height, width), (a, b, c, d) = view.canvas_size, size, linear
    cx, cy = (W / 2, H / 2) if center is None else center
    # A larger output begins before the input.
    x = cx + shift[0] + (width - W) / 2
    y = cy + shift[1] + (height - H) / 2
    scale = 1 / (a * d - b * c)
    a, b, c, d = d * scale, -b * scale, -c * scale, a * scale
    return compose(
        view,
        size,
        (a * width / W, b * height / W, (cx - a * x - b * y) / W),
        (c * width / H, d * height / H, (cy - c * x - d * y) / H),
    )


def spread(numbers: Numbers, count: int) -> list[float]:
    """Repeat a number, or a sequence of fewer, to `count`: as torchvision reads its arguments."""
    numbers = [numbers] if isinstance(numbers, int | float) else list(numbers)
    return numbers * (count // len(numbers))


def resized(size: Size, to: Numbers | None, max_size: int | None = None) -> Size:
    """Return the size that torchvision resizes images of `size` to."""
    if isinstance(to, Sequence) and len(to) == 2:
        return tuple(to)
    # An image without channels costs little.
    return tuple(F.resize(torch.empty(0, *size), size=to, max_size=max_size).shape[1:])


# ---------------------------------------------------------------- kernels


def kernel(functional: Callable) -> Callable:
    """Register a kernel of Views for a functional."""
    return F.register_kernel(functional, View)


@kernel(F.get_size)
def get_size(view: View) -> list[int]:
    return list(view.canvas_size)


@kernel(F.to_dtype)
def to_dtype(view: View, dtype: torch.dtype | None = None, scale: bool = False) -> View:
    return view


@kernel(F.horizontal_flip)
def horizontal_flip(view: View) -> View:
    return compose(view, view.canvas_size, (-1, 0, 1), (0, 1, 0))


@kernel(F.vertical_flip)
def vertical_flip(view: View) -> View:
    return compose(view, view.canvas_size, (1, 0, 0), (0, -1, 1))


@kernel(F.crop)
def crop(view: View, top: int, left: int, height: int, width: int) -> View:
    return cut(view, top, left, height, width, (height, width))


@kernel(F.pad)
def pad(view: View, padding: Numbers, fill: Any = None, padding_mode: str = "constant") -> View:
    # In every mode: pixels that are repeated or mirrored beyond the image count as fill.
    left, top, right, bottom = spread(padding, 4)
    H, W = view.canvas_size
    return crop(view, -top, -left, H + top + bottom, W + left + right)


@kernel(F.center_crop)
def center_crop(view: View, output_size: Numbers) -> View:
    size = spread(output_size, 2)
    # torchvision pads, rounding the first side down, and else crops, rounding to even.
    top, left = (
        -((side - canvas) // 2) if side > canvas else round((canvas - side) / 2)
        for side, canvas in zip(size, view.canvas_size, strict=True)
    )
    return crop(view, top, left, *size)


@kernel(F.resize)
def resize(
    view: View,
    size: Numbers | None,
    interpolation: Any = None,
    max_size: int | None = None,
    antialias: bool | None = True,
) -> View:
    return compose(view, resized(view.canvas_size, size, max_size), (1, 0, 0), (0, 1, 0))


@kernel(F.resized_crop)
def resized_crop(
    view: View, top: int, left: int, height: int, width: int, size: Numbers, **options: Any
) -> View:
    return cut(view, top, left, height, width, resized((height, width), size))


@kernel(F.affine)
def affine(
    view: View,
    angle: float,
    translate: Sequence[float],
    scale: float,
    shear: Numbers,
    interpolation: Any = None,
    fill: Any = None,
    center: Sequence[float] | None = None,
) -> View:
    # torchvision's own: rotation by the angle, times the scale, times the shear along y, times
    # that along x, whose tangents are negative. One number shears along x alone, [s] along both.
    shears = [shear, 0] if isinstance(shear, int | float) else spread(shear, 2)
    tan_x, tan_y = (math.tan(math.radians(one)) for one in shears)
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    a, c = cos + sin * tan_y, sin - cos * tan_y
    linear = [scale * part for part in (a, -a * tan_x - sin, c, -c * tan_x + cos)]
    return warp(view, view.canvas_size, linear, center, translate)


@kernel(F.rotate)
def rotate(
    view: View,
    angle: float,
    interpolation: Any = None,
    expand: bool = False,
    center: Sequence[float] | None = None,
    fill: Any = None,
) -> View:
    size = view.canvas_size
    if expand:
        # Asked of the functional, on pixels that cost nothing (bits, or none): PIL and torchvision
        # round the size each its own way. Of 10,000 angles they differ in about four.
        blank = Image.new("1", size[::-1]) if view.is_pil else torch.empty(0, *size, device="meta")
        size = F.get_size(F.rotate(blank, angle, expand=True, center=center))
    # Exact at multiples of 90 degrees with 15 digits: a view turned by 180 stays axis-aligned.
    cos = round(math.cos(math.radians(angle)), 15)
    sin = round(math.sin(math.radians(angle)), 15)
    # Counterclockwise, where y points down.
    return warp(view, size, (cos, sin, -sin, cos), center, (0, 0))


REFUSED = {
    F.perspective: "which is not affine; use RandomAffine, or leave it out",
    F.elastic: "which is not affine; use RandomAffine, or leave it out",
    F.five_crop: "which makes several images; crop with F.crop, each with a View of its own",
    F.ten_crop: "which makes several images; crop with F.crop, each with a View of its own",
}


def refuse(functional: Callable) -> None:
    """Register a kernel that refuses Views."""

    @kernel(functional)
    def refusal(view: View, *arguments: Any, **options: Any) -> View:
        reason = REFUSED[functional]
        raise UserError(f"a View cannot follow {functional.__name__} of torchvision, {reason}")


for functional in REFUSED:
    refuse(functional)


# ---------------------------------------------------------------- policies

# Operations of the policies that move no pixel. All others are applied to Views; torchvision
# raises TypeError for one that has no kernel.
KEEPING = {"Identity", "Brightness", "Color", "Contrast", "Sharpness", "Posterize", "Solarize"}
KEEPING |= {"AutoContrast", "Equalize", "Invert"}


class Following:
    """Apply the geometric operations of a policy of torchvision to the Views of a sample too.

    The draws and the image are those of the class of torchvision, for the same state of torch's
    generator.
    """

    # The Views of a call, by their place among the leaves of its sample.
    views: dict[int, View]

    def forward(self, *inputs: Any) -> Any:
        # A copy holds them, as threads may share a transform.
        call = copy.copy(self)
        call.views = {}
        return super(Following, call).forward(*inputs)

    # These three private methods are the same in torchvision 0.26 to 0.29.

    def _flatten_and_extract_image_or_video(self, inputs: Any, *types: Any) -> Any:
        others = tv_tensors.BoundingBoxes, tv_tensors.KeyPoints
        found = super()._flatten_and_extract_image_or_video(inputs, others)
        for place, leaf in enumerate(found[0][0]):
            if isinstance(leaf, View):
                self.views[place] = leaf
            elif isinstance(leaf, tv_tensors.Mask):
                raise TypeError(f"Inputs of type Mask are not supported by {type(self).__name__}()")
        return found

    def _unflatten_and_insert_image_or_video(self, flat: Any, image: Any) -> Any:
        for place, view in self.views.items():
            flat[0][place] = view
        return super()._unflatten_and_insert_image_or_video(flat, image)

    def _apply_image_or_video_transform(
        self, image: Any, transform_id: str, magnitude: float, **options: Any
    ) -> Any:
        apply = super()._apply_image_or_video_transform
        if transform_id not in KEEPING:
            for place, view in self.views.items():
                self.views[place] = apply(view, transform_id, magnitude, **options)
        return apply(image, transform_id, magnitude, **options)


class RandAugment(Following, v2.RandAugment):
    """torchvision's RandAugment, for samples with Views."""


class AutoAugment(Following, v2.AutoAugment):
    """torchvision's AutoAugment, for samples with Views."""


class TrivialAugmentWide(Following, v2.TrivialAugmentWide):
    """torchvision's TrivialAugmentWide, for samples with Views."""
