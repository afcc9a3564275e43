"""What a teacher sees of an image: its Looks, cut out and resized. By Pillow here; a pass may be given a faster renderer."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image

from .geometry import Look
from .images import Images, crop_resize, decode

# L looks an image   H, W side of the teacher's input, both the same, pixels

# Renders image `index` into uint8 [L, H, W, 3]; gives its Window. UserError names an image that cannot be read. Called from
# several threads at once.
Render = Callable[[int, np.ndarray], tuple[float, float, float, float]]


class Viewer(Protocol):
    """What rendering asks of a teacher."""

    input_size: int  # pixels
    interpolation: Image.Resampling
    fill: tuple[int, ...]  # 0 to 255, what is shown beyond an image

    def looks(self, height: int, width: int) -> list[Look]:
        """Its looks at an image of this size, pixels; always as many."""

    def window(self, height: int, width: int) -> tuple[float, float, float, float]:
        """The Window of an image of this size."""


class PillowRender(NamedTuple):
    """A Render by Pillow, of anything that Pillow reads."""

    images: Images
    viewer: Viewer

    def __call__(self, index: int, out_LHWC: np.ndarray) -> tuple[float, float, float, float]:
        image = decode(self.images.read(index), self.images.where(index))
        return render(image, self.viewer, out_LHWC)


def render(image: Image.Image, viewer: Viewer, out_LHWC: np.ndarray) -> tuple[float, float, float, float]:
    """All looks at an RGB image into uint8 `[L, H, W, 3]`; its Window."""
    for look, out_HWC in zip(viewer.looks(image.height, image.width), out_LHWC, strict=True):
        pixels = crop_resize(image, look.box, viewer.input_size, viewer.interpolation, viewer.fill)
        out_HWC[:] = pixels[:, ::-1] if look.flip else pixels
    return viewer.window(image.height, image.width)
