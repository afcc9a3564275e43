"""Render the views that a teacher wants of an image: by Pillow, or by the native library."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image

from densefeed import native
from densefeed.storage.geometry import TeacherView
from densefeed.storage.images import Images, crop_resize, decode
from densefeed.system.errors import UserError

# L looks an image   H, W side of the teacher's input, both the same, pixels

# Renders image `index` into uint8 [L, H, W, 3]; gives its Window. UserError names an image that
# cannot be read. Called from several threads at once.
Render = Callable[[int, np.ndarray], tuple[float, float, float, float]]


class Viewer(Protocol):
    """What rendering asks of a teacher."""

    input_size: int  # pixels
    interpolation: Image.Resampling
    fill: tuple[int, ...]  # 0 to 255, what is shown beyond an image

    def looks(self, height: int, width: int) -> list[TeacherView]:
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


def render(
    image: Image.Image, viewer: Viewer, out_LHWC: np.ndarray
) -> tuple[float, float, float, float]:
    """All looks at an RGB image into uint8 `[L, H, W, 3]`; its Window."""
    for look, out_HWC in zip(viewer.looks(image.height, image.width), out_LHWC, strict=True):
        pixels = crop_resize(
            image, look.box_ltrb, viewer.input_size, viewer.interpolation, viewer.fill
        )
        out_HWC[:] = pixels[:, ::-1] if look.flip else pixels
    return viewer.window(image.height, image.width)


FILTERS = {Image.Resampling.BILINEAR: native.BILINEAR, Image.Resampling.BICUBIC: native.BICUBIC}


class NativeRender(NamedTuple):
    """A Render by our own decoder, on whichever thread calls it, without Python's lock.

    It gives the pixels of PillowRender to 0.6 gray levels on average (tests). What it does not read
    it leaves to Pillow, whose word on damaged files is the last: other formats and colors, looks
    that reach beyond the image, filters other than FILTERS.
    """

    images: Images
    viewer: Viewer

    def __call__(self, index: int, out_LHWC: np.ndarray) -> tuple[float, float, float, float]:
        content, filter = self.images.read(index), FILTERS.get(self.viewer.interpolation)
        try:
            height, width = native.probe(content)
        except native.JpegError:
            height = width = 0
        # Of several looks each would decode the file anew.
        if height and len(out_LHWC) == 1 and filter is not None:
            samples = samples_of(self.viewer, height, width)
            pixels = np.frombuffer(content, np.uint8)
            if samples is not None and cut(samples, pixels, native.JPEG, out_LHWC, filter):
                return self.viewer.window(height, width)
        image = decode(content, self.images.where(index))
        samples = samples_of(self.viewer, image.height, image.width) if filter is not None else None
        if samples is not None and cut(
            samples, np.asarray(image).reshape(-1), native.RAW, out_LHWC, filter
        ):
            return self.viewer.window(image.height, image.width)
        return render(image, self.viewer, out_LHWC)


def samples_of(viewer: Viewer, height: int, width: int) -> np.ndarray | None:
    """The looks at an image of this size as the library takes them, SAMPLE `[L]`; None if one
    reaches beyond the image.
    """
    looks = viewer.looks(height, width)
    left, top, right, bottom = np.array([look.box_ltrb for look in looks], np.float64).T
    if min(left.min(), top.min()) < 0 or right.max() > width + 1e-9 or bottom.max() > height + 1e-9:
        return None
    samples = np.zeros(len(looks), native.SAMPLE)
    samples["height"], samples["width"], samples["flip"] = (
        height,
        width,
        [look.flip for look in looks],
    )
    samples["box_tlhw"] = np.stack([top, left, bottom - top, right - left], 1)
    return samples


def cut(
    samples: np.ndarray, content: np.ndarray, kind: int, out_LHWC: np.ndarray, filter: int
) -> bool:
    """Render the looks of one image; whether the library could. UserError if memory is used up."""
    samples["bytes"], samples["length"], samples["kind"] = content.ctypes.data, len(content), kind
    native.Job(samples, out_LHWC, keep=content, filter=filter).decode()
    if (samples["status"] == native.NO_MEMORY).any():
        raise UserError("memory is used up; choose a smaller --batch or fewer --threads")
    return not samples["status"].any()
