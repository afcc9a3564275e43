"""Render the pictures that a teacher needs of an image: with Pillow, or with the native library."""

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image

from densefeed import native
from densefeed.storage.geometry import TLBR, TeacherView
from densefeed.storage.images import Images, check_jpeg, crop_resize, decode
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
        content, where = self.images.read(index), self.images.where(index)
        image = decode(content, where)
        check_jpeg(content, where)
        return render(image, self.viewer, out_LHWC)


def render(image: Image.Image, viewer: Viewer, out_LHWC: np.ndarray) -> TLBR:
    """Render all pictures of an RGB image into uint8 `[L, H, W, 3]`; return its window."""
    size, filter, fill = viewer.input_size, viewer.interpolation, viewer.fill
    for view, out_HWC in zip(viewer.views(image.height, image.width), out_LHWC, strict=True):
        pixels = crop_resize(image, view.box_ltrb, size, filter, fill)
        out_HWC[:] = pixels[:, ::-1] if view.flip else pixels
    return viewer.window(image.height, image.width)


# The native library has no Lanczos filter.
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
        content, where = self.images.read(index), self.images.where(index)
        # The library would decode a JPEG again for each of several pictures.
        if len(out_LHWC) == 1:
            # Pillow reads what the library refuses, and names files that are damaged.
            with suppress(native.JpegError):
                size, encoded = native.probe(content), np.frombuffer(content, np.uint8)
                if render_native(self.viewer, size, native.JPEG, encoded, out_LHWC):
                    # The library stops decoding below the picture.
                    if self.viewer.views(*size)[0].box_ltrb[3] < size[0]:
                        check_jpeg(content, where)
                    return self.viewer.window(*size)
        image = decode(content, where)
        check_jpeg(content, where)
        size, pixels = (image.height, image.width), np.asarray(image).reshape(-1)
        if render_native(self.viewer, size, native.RAW, pixels, out_LHWC):
            return self.viewer.window(*size)
        return render(image, self.viewer, out_LHWC)


def render_native(
    viewer: Viewer, size: tuple[int, int], kind: int, content: np.ndarray, out_LHWC: np.ndarray
) -> bool:
    """Render all pictures of an image of this (height, width); return whether the library could.

    `content` is the file (`kind` JPEG) or the pixels (RAW), uint8. Raises UserError if memory is
    exhausted.
    """
    filter, views, (height, width) = FILTERS.get(viewer.interpolation), viewer.views(*size), size
    left, top, right, bottom = np.array([view.box_ltrb for view in views], np.float64).T
    # An edge may pass the image by a rounding error.
    beyond = right.max() > width + 1e-9 or bottom.max() > height + 1e-9
    if filter is None or beyond or min(left.min(), top.min()) < 0:
        return False
    samples = np.zeros(len(views), native.SAMPLE)
    samples["height"], samples["width"] = size
    samples["flip"] = [view.flip for view in views]
    samples["box_tlhw"] = np.stack([top, left, bottom - top, right - left], 1)
    samples["bytes"], samples["length"], samples["kind"] = content.ctypes.data, len(content), kind
    samples["filter"] = filter
    # The samples hold addresses only; `keep` holds the memory.
    native.Job(samples, out_LHWC, keep=content).decode()
    if (samples["status"] == native.NO_MEMORY).any():
        raise UserError("memory is exhausted; choose a smaller --batch or fewer --threads")
    return not samples["status"].any()
