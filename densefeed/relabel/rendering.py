"""Render the pictures that a teacher needs of an image: with Pillow, or with the native library."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image

from densefeed import native
from densefeed.storage.geometry import TLBR, TeacherView
from densefeed.storage.images import Images, crop_resize, decode
from densefeed.system.errors import UserError

# L pictures of an image   H, W side of the teacher's input, both the same, pixels

# Renders image `index` into uint8 [L, H, W, 3] and returns its window. UserError names an image
# that cannot be read. Called from several threads at once.
Render = Callable[[int, np.ndarray], TLBR]


class Viewer(Protocol):
    """What rendering needs of a teacher."""

    input_size: int  # pixels
    interpolation: Image.Resampling
    fill: tuple[int, ...]  # color beyond an image, 0 to 255

    def views(self, height: int, width: int) -> list[TeacherView]:
        """List the L pictures of an image of this size in pixels; L is always the same."""

    def window(self, height: int, width: int) -> TLBR:
        """Return the window of an image of this size."""


class PillowRender(NamedTuple):
    """Renders with Pillow, everything that Pillow reads."""

    images: Images
    viewer: Viewer

    def __call__(self, index: int, out_LHWC: np.ndarray) -> TLBR:
        image = decode(self.images.read(index), self.images.where(index))
        return render(image, self.viewer, out_LHWC)


def render(image: Image.Image, viewer: Viewer, out_LHWC: np.ndarray) -> TLBR:
    """Render all pictures of an RGB image into uint8 `[L, H, W, 3]`; return its window."""
    size, filter, fill = viewer.input_size, viewer.interpolation, viewer.fill
    for view, out_HWC in zip(viewer.views(image.height, image.width), out_LHWC, strict=True):
        pixels = crop_resize(image, view.box_ltrb, size, filter, fill)
        out_HWC[:] = pixels[:, ::-1] if view.flip else pixels
    return viewer.window(image.height, image.width)


FILTERS = {Image.Resampling.BILINEAR: native.BILINEAR, Image.Resampling.BICUBIC: native.BICUBIC}


class NativeRender(NamedTuple):
    """Renders with our own decoder, on the calling thread, without Python's lock.

    Pixels differ from PillowRender's by 0.6 gray levels on average (tests/relabel). Pillow handles
    what the decoder does not: damaged files, other formats and colors, pictures that reach beyond
    the image, and filters other than FILTERS.
    """

    images: Images
    viewer: Viewer

    def __call__(self, index: int, out_LHWC: np.ndarray) -> TLBR:
        content, filter = self.images.read(index), FILTERS.get(self.viewer.interpolation)
        try:
            height, width = native.probe(content)
        except native.JpegError:
            height = width = 0
        # The library would decode the file again for each of several pictures.
        if height and len(out_LHWC) == 1 and filter is not None:
            samples = make_samples(self.viewer, height, width)
            pixels = np.frombuffer(content, np.uint8)
            if samples is not None and decode_samples(
                samples, pixels, native.JPEG, out_LHWC, filter
            ):
                return self.viewer.window(height, width)
        image = decode(content, self.images.where(index))
        height, width = image.height, image.width
        samples = make_samples(self.viewer, height, width) if filter is not None else None
        if samples is not None and decode_samples(
            samples, np.asarray(image).reshape(-1), native.RAW, out_LHWC, filter
        ):
            return self.viewer.window(height, width)
        return render(image, self.viewer, out_LHWC)


def make_samples(viewer: Viewer, height: int, width: int) -> np.ndarray | None:
    """Describe the pictures of an image of this size for the native library, SAMPLE `[L]`.

    None if one of them reaches beyond the image.
    """
    views = viewer.views(height, width)
    left, top, right, bottom = np.array([view.box_ltrb for view in views], np.float64).T
    if min(left.min(), top.min()) < 0 or right.max() > width + 1e-9 or bottom.max() > height + 1e-9:
        return None
    samples = np.zeros(len(views), native.SAMPLE)
    samples["height"], samples["width"] = height, width
    samples["flip"] = [view.flip for view in views]
    samples["box_tlhw"] = np.stack([top, left, bottom - top, right - left], 1)
    return samples


def decode_samples(
    samples: np.ndarray, content: np.ndarray, kind: int, out_LHWC: np.ndarray, filter: int
) -> bool:
    """Render the pictures of one image; return whether the library could.

    Raises UserError if memory is exhausted.
    """
    samples["bytes"], samples["length"], samples["kind"] = content.ctypes.data, len(content), kind
    native.Job(samples, out_LHWC, keep=content, filter=filter).decode()
    if (samples["status"] == native.NO_MEMORY).any():
        raise UserError("memory is exhausted; choose a smaller --batch or fewer --threads")
    return not samples["status"].any()
