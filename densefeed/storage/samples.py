"""Convert images of every Pillow mode to RGB of 8 bits; deeper samples are scaled, not clipped.

A table in docs/reference/data.md shows what each format and mode becomes.
"""

import numpy as np
from PIL import Image, TiffImagePlugin

from densefeed.system.errors import UserError

# TIFF's tags (TIFF 6.0, sections 8 and 19), and values of the last three.
BITS, SAMPLES, PHOTOMETRIC, PLANAR, SAMPLE_FORMAT = 258, 277, 262, 284, 339
WHITE_IS_ZERO, CHUNKY, SEPARATE, SIGNED = 0, 1, 2, 2
# Samples that are scaled at once, in 4 MB.
AT_ONCE = 2**20


def correct_planes(image: TiffImagePlugin.TiffImageFile) -> None:
    """Correct how Pillow reads a TIFF that was only opened, if its channels are separate planes.

    Pillow takes the first letter of the name of the samples for that of a plane's: `R` for
    `RGB;16L`, which are samples of 8 bits, and `L` for `L;I`, whose 0 is black. Raises OSError for
    planes that Pillow reads wrong.
    """
    tags = image.tag_v2
    if tags.get(PLANAR, CHUNKY) != SEPARATE:
        return
    # libtiff reads what is compressed.
    raw = all(tile.codec_name == "raw" for tile in image.tile)
    if raw and tags.get(SAMPLES, 1) == 1:
        # The tag has no meaning for one channel (TIFF 6.0, PlanarConfiguration).
        tags[PLANAR] = CHUNKY
        image._setup()
        return
    deep = max(tags.get(BITS, (1,))) == 16
    names = set("RGBA" if deep else "RGBACMYK")
    # Pillow neither applies the offset of CIELAB's a and b nor divides gray by alpha.
    if image.mode in ("LAB", "La") or (raw and not {tile.args[0] for tile in image.tile} <= names):
        raise OSError("a TIFF in separate planes, of a kind of samples that Pillow does not read")
    if raw and deep:
        order = ";16L" if tags.prefix == b"II" else ";16B"
        image.tile = [
            tile._replace(args=(tile.args[0] + order, *tile.args[1:])) for tile in image.tile
        ]


def to_rgb(image: Image.Image, where: str) -> Image.Image:
    """Load an image that was only opened, and convert it to RGB. Alpha is dropped.

    Gray samples of 9 to 16 bits become `255 * value / (2**bits - 1)`, rounded to nearest; Pillow's
    own conversion clips them at 255. Raises UserError that names `where` for floats, signed and
    32-bit samples, and exceptions of any type of Pillow.
    """
    tags = image.tag_v2 if image.format == "TIFF" else {}
    if kind := name_unscalable(image.mode, tags):
        raise UserError(
            f"{where} cannot be decoded (it holds {kind}, whose black and white are unknown); "
            "save it with unsigned samples of 8 or 16 bits, or remove this file"
        )
    image.load()
    if image.mode == "RGB":
        # A copy of a large image doubles the memory.
        return image
    if image.mode == "I" or image.mode.startswith("I;16"):
        # Pillow gives 12 bits of a TIFF as they are, and scales all other samples to 16.
        bits = tags.get(BITS, (16,))[0]
        # Pillow inverts up to 8 bits only. Like Pillow, take a missing tag as 0.
        inverted = bool(tags) and tags.get(PHOTOMETRIC, WHITE_IS_ZERO) == WHITE_IS_ZERO
        image = scale(image, 2**bits - 1, inverted)
    elif image.mode == "La":
        # Pillow has no direct conversion of premultiplied gray.
        image = image.convert("LA")
    # Pillow warns of a palette with transparency, which RGB drops anyway.
    image.info.pop("transparency", None)
    return image.convert("RGB")


def name_unscalable(mode: str, tags: dict) -> str:
    """Return what samples of an image have no known black and white; empty if they are known.

    No header states them, and files differ: floats are 0 to 1 or 0 to 65535, int32 often 0 to 255.
    """
    if mode == "F":
        return "floats"
    # Pillow gives signed samples of 8 bits as unsigned.
    if tags and SIGNED in tags.get(SAMPLE_FORMAT, ()):
        return "signed samples"
    return "samples of 32 bits" if tags and mode == "I" else ""


def scale(image: Image.Image, most: int, inverted: bool) -> Image.Image:
    """Scale gray from 0 to `most` to 0 to 255, to nearest; `inverted` where 0 is white."""
    gray_HW = np.empty((image.height, image.width), np.uint8)
    rows = max(1, AT_ONCE // image.width)
    for top in range(0, image.height, rows):
        end = min(top + rows, image.height)
        part_HW = np.asarray(image.crop((0, top, image.width, end))).astype(np.uint32)
        part_HW = most - part_HW if inverted else part_HW
        gray_HW[top:end] = (part_HW * 255 + most // 2) // most
    return Image.fromarray(gray_HW)
