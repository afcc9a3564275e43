"""Read images: encoded bytes, label and path of any dataset that timm reads, in a fixed order."""

import io
import logging
import math
import struct
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
import tyro
from PIL import Image, TiffImagePlugin, UnidentifiedImageError

from densefeed import native
from densefeed.storage import datasets, samples, tiff
from densefeed.storage.dataset_names import SPLITS, hash_images, hold_out
from densefeed.storage.geometry import LTRB
from densefeed.storage.parquet_files import Blocks
from densefeed.system.errors import UserError, explain_os_error
from densefeed.system.object_url import ObjectURL
from densefeed.system.options import Bounds, Count, Options
from densefeed.system.prefetch import ordered_map
from densefeed.system.progress import bar
from densefeed.system.terminal import print, warn

# Files whose byte size enters the fingerprint. A stat of every file of a network disk takes
# minutes.
SIZED_FILES = 1024
# What is read, whatever the file's name says: the formats of torchvision's ImageFolder, and GIF.
# Pillow opens 43, some of them by other programs: EPS runs Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")
# Bytes of an encoded image: the default limit of pixels as RGB, which are its bytes in a BMP, and a
# quarter of that for headers.
MOST_BYTES = 5 * 2**26
# Segments of Exif data in a JPEG. Pillow joins them in quadratic time: 3,000 took 149 s.
EXIF, MOST_EXIF = b"Exif\0\0", 64
# Pillow takes 16 bytes of memory per pixel to decode these (WebP 1.43 GB at the default limit, a
# TIFF of one tile 1.2), for others at most 8. Half of the limit keeps every image below 1 GB.
COSTLY_FORMATS = ("WEBP", "TIFF")
# Pixels of padded rows that are resized at once.
ROWS_PIXELS = 2**22
# TIFF's tags of the size of a tile.
TILE_WIDTH, TILE_LENGTH = 322, 323

# Bytes of sampled files by their rows; None for one that cannot be opened.
FileSizes = dict[int, int | None]
MaxPixels = Annotated[
    Count,
    tyro.conf.arg(
        help="refuse images of more pixels, WebP and TIFF of more than half as many; Pillow warns "
        "above the default; memory is 3 to 10 bytes each"
    ),
]


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(Options):
    """The option of every command that decodes images."""

    max_pixels: MaxPixels = native.MAX_PIXELS


@dataclass(frozen=True, kw_only=True)
class SplitOptions(Options):
    """The options of every command that divides a data set without validation images."""

    # images of each class to hold out for validation, fraction; the same in label, pack and train
    val_fraction: Annotated[float, Bounds(0, 0.9)] = 0.0
    val_seed: Annotated[int, Bounds(0, 2**63 - 1)] = 0  # seed of that choice

    def unused(self) -> dict[str, str]:
        return {} if self.val_fraction else {"val_seed": "--val-fraction"}


UNDIVIDED = SplitOptions()
max_pixels = native.MAX_PIXELS
# Pillow warns above half of its limit. Here an image is either read or refused.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# Without a handler Python would print Pillow's messages, which name no file.
logging.getLogger("PIL").addHandler(logging.NullHandler())


def limit_pixels(pixels: int) -> None:
    """Refuse images of more pixels from now on, in this process, whatever decodes them."""
    global max_pixels
    max_pixels = pixels
    native.limit_pixels(pixels)
    # Pillow raises an error above twice this number.
    Image.MAX_IMAGE_PIXELS = pixels / 2


def open_image(file: BinaryIO) -> Image.Image:
    """Open an image of FORMATS with Pillow, which reads its header; of several frames the first.

    The first frame is what torchvision and timm take of animations too. This is the only call of
    Pillow's `open` in the package.

    Raises an exception of any type if Pillow cannot read it, native.JpegError for a JPEG that
    decoders do not read alike (see native.check_frame), and DecompressionBombError for too many
    pixels.
    """
    start = file.read(2)
    if start == b"\xff\xd8":
        encoded = start + file.read()
        native.check_frame(encoded)
        if encoded.count(EXIF) > MOST_EXIF:
            raise OSError("it has more than 64 segments of Exif data")
    file.seek(0)
    # A file that ends early has an error of Pillow's.
    with suppress(struct.error):
        if start in (b"II", b"MM") and tiff.count_values(file) > tiff.MOST_VALUES:
            raise OSError(f"its tags hold more than {tiff.MOST_VALUES:,} values")
    file.seek(0)
    try:
        image = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:
        file.seek(0)
        if file.read(4) in TiffImagePlugin.PREFIXES:
            problem = "a TIFF that is damaged or whose kind of samples Pillow does not read"
            raise OSError(problem) from error
        raise
    if image.format == "TIFF":
        samples.correct_planes(image)
    # A tile is decoded as a whole, however small the image is.
    tags = image.tag_v2 if image.format == "TIFF" else {}
    tile = tags.get(TILE_WIDTH, 0) * tags.get(TILE_LENGTH, 0)
    most = max_pixels // 2 if image.format in COSTLY_FORMATS else max_pixels
    if max(image.width * image.height, tile) > most:
        raise Image.DecompressionBombError
    return image


def explain(error: Exception) -> str:
    """Return in a few words why Pillow or `open_image` refuses an image."""
    if isinstance(error, UnidentifiedImageError):
        return f"not an image of {', '.join(FORMATS)}"
    if isinstance(error, Image.DecompressionBombError):
        return f"its pixels are more than --max-pixels {max_pixels} (half of it for WebP and TIFF)"
    return str(error)


def read_encoded(file: BinaryIO, where: str) -> bytes:
    """Return the bytes of an image's open file. OSError, which names `where`, above 320 MiB."""
    if file.seek(0, io.SEEK_END) > MOST_BYTES:
        raise OSError(None, "this file has more than 320 MiB; remove it", where)
    file.seek(0)
    return file.read()


def sample_evenly(count: int, most: int) -> np.ndarray:
    """Choose up to `most` of `count` places, evenly spaced from the first to the last; int64."""
    return np.linspace(0, count - 1, min(count, most)).astype(np.int64)


class Images:
    """An indexable labeled image set.

    Args:
        root: the folder of the dataset, by default an ImageFolder; also one in object storage.
        dataset: empty for a folder of class folders; a name of datasets.py; a name of timm,
            `hfds/...`; or, for an object in place of a name, its DatasetItems.
        split: the split; for a folder that holds `train/` and `val/`, one of these names.
        division: how the training split is divided, if `split` is to be a part of it: `train` or
            `val`.
        whole: that training split, if it was listed before; only with a division.

    Raises UserError if the folder does not exist, holds no images, has no random access, or cannot
    be divided.

    Attributes:
        paths: path of each image, relative to the folder it was found in.
        labels: int64 `[N]`.
        class_names: in label order.
        whole: the Images that were divided; None without a division.
        rows: int64 `[N]`, the place of each image in `whole`; None without a division.
        open: a function that opens the file of image `index`; the caller closes it.
        where: a function that returns the name of image `index` for error messages.
        is_object: whether they are those of a dataset object.
        masks: hard masks of the whole set, `MaskFolder`, if the dataset has them; else None.
        has_labels: whether labels are those of images; with masks they are 0, or the class of most
            pixels.
    """

    is_object, has_labels, masks = False, True, None
    _hash_files: Callable[[Sequence[int]], str] | None = None

    def __init__(
        self,
        root: Path | ObjectURL,
        dataset: Any = "",
        split: str = "train",
        division: SplitOptions = UNDIVIDED,
        whole: "Images | None" = None,
    ) -> None:
        self.root = root if isinstance(root, ObjectURL) else Path(root)
        self._split, self.whole, self.rows = split, None, None
        if division.val_fraction:
            self._divide(whole or Images(root, dataset), division)
            return
        is_named = isinstance(dataset, str)
        found = datasets.find(self.root, dataset, split) if is_named else dataset
        self.paths, self.labels, self.class_names = found.paths, found.labels, found.class_names
        self.is_object, self._hash_files = not is_named, getattr(found, "hash_files", None)
        self.open, self.where = found.open, found.where
        self.masks = getattr(found, "masks", None)
        self.has_labels = getattr(found, "has_labels", self.masks is None)
        self._blocks = getattr(found, "blocks", None)
        self._measure = getattr(found, "measure", self._measure_file)
        self._sampling, self._reads_split = getattr(found, "sampling", 1), False
        if is_named:
            # A list is of one split; a folder of class folders has no folders of splits.
            folder = dataset.partition("/")[0] in ("", "classes", "share")
            whole = folder and getattr(found, "root", None) == self.root
            self._reads_split = not (whole or dataset.startswith(("list/", "coco/")))
        # An object that was made for this split.
        self._reads_split |= getattr(found, "split", None) == split

    def _divide(self, whole: "Images", division: SplitOptions) -> None:
        """Become the training or the validation part of `whole`."""
        train, val, _ = SPLITS
        if self._split not in (*train, *val):
            raise UserError(
                f"--val-fraction divides images into the splits train and val; give one of them in "
                f"place of --split {self._split}, or leave out --val-fraction"
            )
        held_N = hold_out(whole.paths, whole.labels, division.val_fraction, division.val_seed)
        self.rows = rows = np.flatnonzero(held_N == (self._split in val))
        if not len(rows):
            raise UserError(
                f"{self.root} has one image of each class, of which --val-fraction holds out none; "
                "add images, or give a validation set of its own"
            )
        self.whole, self.labels, self.class_names = whole, whole.labels[rows], whole.class_names
        self.is_object = whole.is_object
        if whole._hash_files:
            self._hash_files = lambda places: whole._hash_files(rows[list(places)].tolist())
        self.paths = [whole.paths[row] for row in rows.tolist()]
        self.open = lambda index: whole.open(rows[index])
        self.where = lambda index: whole.where(rows[index])
        self.masks, self.has_labels = whole.masks, whole.has_labels
        self._measure = lambda index: whole._measure(int(rows[index]))
        self._sampling = whole._sampling

    def __len__(self) -> int:
        return len(self.paths)

    def describe_split(self, default: str = "train") -> None:
        """Print how many images the split has, or that it is not read.

        The first of a divided set; the second if the set has no splits, and the split is not the
        default.
        """
        if self.whole is not None:
            print(
                f"{self.root}: --val-fraction puts {len(self):,} of {len(self.whole):,} images "
                f"into the split {self._split}"
            )
        elif self._split != default and not self._reads_split:
            warn(
                f"--split {self._split} is not read, because {self.root} holds no splits; "
                "all of its images are taken"
            )

    def blocks(self) -> Blocks | None:
        """Return the order in which training must read them; None if any is fast.

        UserError for images in files that are too slow to read in a shuffled order.
        """
        if self.whole is None:
            return self._blocks and self._blocks()
        blocks = self.whole.blocks()
        # As many row groups as before hold fewer images of a part.
        share = len(self) / len(self.whole)
        return blocks and blocks._replace(block=max(1, int(share * blocks.block)))

    def read(self, index: int) -> bytes:
        """Return the encoded bytes of image `index`, as stored. OSError for more than 320 MiB."""
        with self.open(index) as file:
            return read_encoded(file, self.where(index))

    def size(self, index: int) -> tuple[int, int]:
        """Return the height and width of image `index`, from the file's header.

        Raises OSError that names the file if its header cannot be read.
        """
        with self.open(index) as file:
            try:
                with open_image(file) as image:
                    return image.height, image.width
            # A lack of memory is not a fault of the file.
            except MemoryError:
                raise
            # Pillow does not limit the types of its exceptions.
            except Exception as error:
                problem = f"its size cannot be read ({explain(error)})"
                raise OSError(None, problem, self.where(index)) from error

    def fingerprint(self, rows: range | None = None, sized: int = SIZED_FILES) -> str:
        """Hash all paths and labels in order, and the byte sizes of sampled files, by SHA-256.

        `rows` are consecutive images, by default all. The sample is up to `sized` evenly spaced
        files of them. For items of a dataset, which are fewer, hashes stand for the sizes; where it
        states its files, a hash of their names follows after a hyphen, see `same_images`.
        """
        rows = range(len(self)) if rows is None else rows
        part = slice(rows.start, rows.stop)
        sizes = self.sample_sizes(rows, sized).values()
        found = hash_images(self.paths[part], self.labels[part], sizes)
        files = self._hash_files(rows) if self._hash_files else ""
        return f"{found}-{files}" if files else found

    def sample_sizes(self, rows: range | None = None, sized: int = SIZED_FILES) -> FileSizes:
        """Return the byte sizes of the files that `fingerprint` samples, by their rows.

        None for a file that cannot be opened: the error is raised when the image itself is read.
        """
        rows = range(len(self)) if rows is None else rows
        # Both ends of a shard.
        most = max(min(sized, 2), sized // self._sampling)
        places = sample_evenly(len(rows), most).tolist()
        return {rows[place]: self._measure(rows[place]) for place in places}

    def _measure_file(self, index: int) -> int | None:
        with suppress(OSError), self.open(index) as file:
            return file.seek(0, io.SEEK_END)
        return None


def crop_resize(
    image: Image.Image,
    box_ltrb: LTRB,
    size: int,
    filter: Image.Resampling = Image.Resampling.BILINEAR,
    fill: tuple[int, ...] = (0, 0, 0),
) -> np.ndarray:
    """Crop a box (pixels, fractions allowed) and resize it, antialiased: uint8 `[size, size, 3]`.

    No pixel outside the box (rounded outwards) is read: crop first, then resize, as in torchvision.
    The filter of Pillow's own `resize(box=...)` reaches over the edge of the box. Where the box
    reaches beyond the image it is filled with `fill`, 0 to 255, and rows are resized first, as
    Pillow does for a square.
    """
    left, top, right, bottom = box_ltrb
    x, y = math.floor(left), math.floor(top)
    x_end, y_end = math.ceil(right), math.ceil(bottom)
    if x >= 0 and y >= 0 and x_end <= image.width and y_end <= image.height:
        cut = image.crop((x, y, x_end, y_end))
    else:
        # Pillow resizes the rows of a square, each by itself, and then its columns. So does this, a
        # few rows at a time: the square around an image of 20,000 x 10 would take 1.2 GB.
        cut = pad_rows(image, (x, y, x_end, y_end), (left, right), size, filter, fill)
        x, left, right = 0, 0.0, float(size)
    box = left - x, top - y, right - x, bottom - y
    return np.asarray(cut.resize((size, size), filter, box))


def pad_rows(
    image: Image.Image,
    frame_ltrb: tuple[int, int, int, int],
    ends: tuple[float, float],
    size: int,
    filter: Image.Resampling,
    fill: tuple[int, ...],
) -> Image.Image:
    """Cut out the frame (whole pixels, filled beyond the image) and resize its rows to `size`.

    The result has as many rows as the frame. `ends` are the first and last coordinate across that
    are shown of it, pixels of the image.
    """
    x, y, x_end, y_end = frame_ltrb
    box = ends[0] - x, ends[1] - x

    def resize(part: Image.Image) -> np.ndarray:
        canvas = Image.new("RGB", (x_end - x, part.height), fill)
        canvas.paste(part, (-x, 0))
        shown = box[0], 0, box[1], part.height
        return np.asarray(canvas.resize((size, part.height), filter, shown))

    rows = np.empty((y_end - y, size, 3), np.uint8)
    rows[:] = resize(Image.new("RGB", (1, 1), fill))
    first, end = max(y, 0), min(y_end, image.height)
    step = max(1, ROWS_PIXELS // (x_end - x))
    for low in range(first, end, step):
        high = min(low + step, end)
        rows[low - y : high - y] = resize(image.crop((0, low, image.width, high)))
    return Image.fromarray(rows)


def check_jpeg(encoded: bytes, where: str) -> str:
    """Decode all entropy-coded data of a JPEG; return what libjpeg warns of, see native.scan.

    Pillow ignores damage there, except that a file is truncated. Other formats are not read. Raises
    UserError that names `where` for a damaged file.
    """
    if not encoded.startswith(b"\xff\xd8"):
        return ""
    try:
        return native.scan(encoded)
    except native.JpegError as error:
        # Pillow decodes what the native decoder does not support.
        if error.status == native.UNSUPPORTED:
            return ""
        raise UserError(
            f"{where} cannot be decoded ({error}); replace or remove this file"
        ) from error


def find_damage(images: Images, index: int) -> tuple[str, str]:
    """Decode the whole image `index`; return what is wrong and what libjpeg warns of, if at all."""
    where = images.where(index)
    try:
        encoded = images.read(index)
        warning = check_jpeg(encoded, where)
        try:
            native.probe(encoded)
        # Pillow decodes it for training.
        except native.JpegError:
            decode(encoded, where)
    except UserError as error:
        return str(error), ""
    except OSError as error:
        return explain_os_error(error), ""
    return "", warning and f"{where}: {warning}"


def verify_images(images: Images, name: str, threads: int) -> tuple[list[str], list[str]]:
    """Decode all images; return what is wrong and what libjpeg warns of, a line for each image.

    `name` is that of the bar.
    """
    damaged, warned = [], []
    with (
        ThreadPoolExecutor(threads) as pool,
        # If it is interrupted, images that no thread has begun are not decoded any more.
        closing(
            ordered_map(partial(find_damage, images), range(len(images)), pool, 16 * threads)
        ) as found,
    ):
        for fault, warning in bar(found, f"verify {name}", len(images)):
            damaged += [fault] * bool(fault)
            warned += [warning] * bool(warning)
    return damaged, warned


def decode(encoded: bytes, where: str) -> Image.Image:
    """Decode an image to RGB of 8 bits, see `samples.to_rgb`. `check_jpeg` finds damage in a JPEG.

    Raises UserError that names `where` if it is damaged, not an image, or of refused samples.
    """
    try:
        return samples.to_rgb(open_image(io.BytesIO(encoded)), where)
    # A lack of memory is not a fault of the file.
    except (MemoryError, UserError):
        raise
    except Exception as error:
        # Pillow does not limit the types of its exceptions: OSError, SyntaxError, ValueError, ...
        raise UserError(
            f"{where} cannot be decoded ({explain(error)}); replace or remove this file"
        ) from error
