"""Images as every stage reads them: the encoded bytes, label and path of any dataset that timm
reads, in a fixed order.
"""

import hashlib
import io
import math
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from densefeed.storage import datasets
from densefeed.storage.geometry import LTRB
from densefeed.system.errors import UserError

# files whose byte size enters the fingerprint: a stat of every file of a network disk takes minutes
SIZED_FILES = 1024


class Images:
    """An indexable labeled image set.

    Args:
        root: the folder (an ImageFolder unless `dataset` says otherwise).
        dataset: empty for a folder of class folders; a name of datasets.py; or timm's, `hfds/...`.
        split: the split that is asked for; for a folder that holds `train/` and `val/`, their
            names.

    Raises UserError if there is no such folder, no image in it, or the set cannot be read in any
    order.

    Attributes:
        paths: of each image, relative to the folder it was found in. labels: int64 `[N]`.
            class_names: in label order.
    """

    def __init__(self, root: Path, dataset: str = "", split: str = "train") -> None:
        self.root = Path(root)
        self._found = datasets.find(self.root, dataset, split)
        self.paths, self.labels, self.class_names = (
            self._found.paths,
            self._found.labels,
            self._found.class_names,
        )

    def __len__(self) -> int:
        return len(self.paths)

    def open(self, index: int) -> BinaryIO:
        """The file of image `index`, to be closed."""
        return self._found.open(index)

    def where(self, index: int) -> str:
        """How an error message should name image `index`."""
        return self._found.where(index)

    def read(self, index: int) -> bytes:
        """The encoded bytes of image `index`, as stored."""
        with self.open(index) as file:
            return file.read()

    def size(self, index: int) -> tuple[int, int]:
        """Height and width of image `index`, of which only the file's header is read; OSError that
        names the file if it cannot be.
        """
        with self.open(index) as file:
            try:
                with Image.open(file) as image:
                    return image.height, image.width
            except MemoryError:
                raise
            except Exception as error:  # Pillow promises nothing
                raise OSError(
                    None, f"its size cannot be read ({error})", self.where(index)
                ) from error

    def fingerprint(self) -> str:
        """SHA-256 over all paths and labels in order, and the byte sizes of up to 1,024 evenly
        spaced files.
        """
        digest = hashlib.sha256(
            "\n".join(
                f"{p}\t{label}" for p, label in zip(self.paths, self.labels, strict=True)
            ).encode()
        )
        for index in np.linspace(0, len(self) - 1, min(len(self), SIZED_FILES)).astype(int):
            try:
                with self.open(int(index)) as file:
                    digest.update(str(file.seek(0, io.SEEK_END)).encode())
            except OSError:  # whoever reads this image says what is wrong with it
                digest.update(b"unreadable")
        return digest.hexdigest()


def crop_resize(
    image: Image.Image,
    box_ltrb: LTRB,
    size: int,
    filter: Image.Resampling = Image.Resampling.BILINEAR,
    fill: tuple[int, ...] = (0, 0, 0),
) -> np.ndarray:
    """The box (pixels, fractions allowed) as uint8 `[size, size, 3]`,
    antialiased.

    No pixel outside the box (rounded outwards) is read: as torchvision, crop first and then resize.
    Pillow's own `resize(box=...)` lets the filter reach over the box's edge. Where the box reaches
    beyond the image it shows `fill`, 0 to 255.
    """
    left, top, right, bottom = box_ltrb
    x, y = math.floor(left), math.floor(top)
    ends = math.ceil(right), math.ceil(bottom)
    if x >= 0 and y >= 0 and ends[0] <= image.width and ends[1] <= image.height:
        cut = image.crop((x, y, *ends))
    else:
        cut = Image.new("RGB", (ends[0] - x, ends[1] - y), fill)
        cut.paste(image, (-x, -y))
    return np.asarray(
        cut.resize((size, size), filter, box=(left - x, top - y, right - x, bottom - y))
    )


def decode(encoded: bytes, where: str) -> Image.Image:
    """The image, RGB, every pixel decoded; UserError names `where` if it is damaged or no image."""
    try:
        image = Image.open(io.BytesIO(encoded))
        if image.mode.startswith("I;16"):  # Pillow would clip 16 bits to 8: a nearly white image
            image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
        return image.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:
        # Pillow promises nothing: OSError, SyntaxError, ValueError, of AVIF RuntimeError, ...
        reason = "not an image" if isinstance(error, UnidentifiedImageError) else str(error)
        raise UserError(
            f"{where} cannot be decoded ({reason}); replace or remove this file"
        ) from error
