"""Benchmark data: crops of real photographs in every format that benchmarks/peers.py reads.

The photographs ship with scikit-image and scikit-learn (astronaut, coffee, chelsea, rocket,
motorcycle; china, flower), so nothing is downloaded. Every image is another crop of one of them, of
4:3 or 3:4, mirrored or not, resized to 500 pixels on its longer side and encoded by Pillow at
quality 90, 4:2:0. The crops cover 5 to 30 % of the area of the largest possible one, which gives
files of 33 kB on average. Whole photographs of that size have about 48 kB and take every decoder
longer.

Score maps are random but of the published shape: 18 x 18 cells, 5 of 1000 classes each, 24 distinct
classes per image.
"""

import hashlib
import io
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from benchmarks.peers import BenchmarkSet
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.storage.beton import Beton
from densefeed.storage.beton_format import JPEG
from densefeed.storage.geometry import WHOLE
from densefeed.storage.images import Images
from densefeed.storage.score_maps import ScoreMaps, ScoreMapStore, ScoreMapWriter, StoreHeader
from densefeed.system.errors import UserError
from densefeed.tools import export_labels, pack_dataset

# Pixels; 500 x 375 is the most frequent size in ImageNet.
LONG, SHORT = 500, 375
QUALITY = 90
# Area of a crop, relative to the largest one of its shape.
SHARE = (0.05, 0.3)
# As in published score maps: NFNet-F6 at 576 pixels has a cell every 32 pixels.
MAP_SIDE, TOP_K = 18, 5
# Classes in an image's map.
DISTINCT = 24


def sample_dataset(cache: Path, images: int, classes: int) -> BenchmarkSet:
    """Return a set of `images` crops in `classes` classes, in every form that a loader reads.

    Raises UserError as `sample_beton` does.
    """
    folder, maps, beton = sample_beton(cache, images, classes)
    planes = pack(folder, maps, beton.with_name("planes.beton"), "planes")
    return add_peer_formats(beton.parent, folder, maps, beton)._replace(planes=planes)


def sample_beton(cache: Path, images: int, classes: int) -> tuple[Path, Path, Path]:
    """Return folder, score maps and .beton of `images` crops, which the first call generates.

    The .beton is packed on every call. A class is only a number here; 1,000 are the default, as in
    published maps, because the cost of dense targets is proportional to it. Raises UserError if
    scikit-image or scikit-learn is missing.
    """
    home = cache / f"photographs-{images}-{classes}"
    folder, maps = home / "images", home / "maps.h5"
    make_once(folder, lambda part: write_crops(part, images, classes))
    if not maps.exists():
        write_maps(maps, draw_maps(images, classes), folder, classes, "random", "zero-logit")
    return folder, maps, pack(folder, maps, home / "train.beton", "jpeg")


def pack(folder: Path, maps: Path, beton: Path, form: Literal["jpeg", "planes"]) -> Path:
    """Pack a .beton, also over an old one: what is measured is the current packer's; return it."""
    beton.unlink(missing_ok=True)
    packing = pack_dataset.Packing(data=folder, maps=maps, out=beton, form=form)
    # The packer's own table would be confusing here.
    with redirect_stdout(io.StringIO()):
        pack_dataset.main(packing)
    return beton


def beton_dataset(beton: Path, folder: Path | None, cache: Path) -> BenchmarkSet:
    """Return the set of a given .beton; its JPEGs are unpacked unless their `folder` is given.

    Raises UserError if it holds raw pixels, or if `folder` holds other images.
    """
    opened, source, stat = Beton(beton), FfcvSource(beton), beton.stat()
    # A .beton that is packed again gets another folder: its images may be others.
    facts = f"{source.fingerprint} {stat.st_size} {stat.st_mtime_ns} {folder}"
    home = cache / f"data-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"
    if folder is None:
        folder = home / "images"
        make_once(folder, lambda part: unpack(opened, part))
    # Classes without images are left out, as they have no folder.
    counts = np.unique(opened.labels, return_counts=True)[1]
    images = Images(folder)
    if not np.array_equal(np.bincount(images.labels), counts):
        raise UserError(
            f"{folder} holds other images than {beton}; give the folder it was packed from"
        )
    # The peers know class folders only, which may lie in `train/` of the folder that was packed.
    folder = Path(images.where(0).removesuffix(images.paths[0]))
    spec = source.score_maps
    maps = home / "maps.h5" if spec else None
    if maps and not maps.exists():
        # Unpacked files are sorted by class and, within a class, in the order of the .beton.
        rows = source.maps(np.argsort(opened.labels, kind="stable"))
        write_maps(maps, rows, folder, spec.num_classes, opened.notes["teacher"], spec.absent)
    return add_peer_formats(home, folder, maps, beton)


def add_peer_formats(home: Path, folder: Path, maps: Path | None, beton: Path) -> BenchmarkSet:
    """Add the peers' formats: a .beton of the original files, and the maps as published files."""
    images, stock, published = Images(folder), home / "stock.beton", None
    num_classes = len(images.class_names)
    if not stock.exists():
        write_stock(stock, folder)
    if maps is not None:
        num_classes = ScoreMapStore(maps).header.num_classes
        # The published files hold class ids as float16.
        if num_classes <= export_labels.MOST_CLASSES:
            published = home / "published"
            # It appears under its name when it is complete.
            if not published.exists():
                with redirect_stdout(io.StringIO()):
                    export_labels.main(export_labels.ExportLabels(maps=maps, out=published))
    paths = tuple(map(images.where, range(len(images))))
    plain = Beton(stock)
    sizes = plain.labels, plain.heights, plain.widths
    return BenchmarkSet(folder, beton, None, stock, maps, published, paths, *sizes, num_classes)


def make_once(path: Path, make: Callable[[Path], None]) -> None:
    """Let `make` fill a folder that gets its name when it is complete; do nothing if it exists."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(suffix=".part", dir=path.parent) as folder:
        part = Path(folder, path.name)
        part.mkdir()
        make(part)
        part.rename(path)


def load_photographs() -> list[Image.Image]:
    """Return the originals, RGB, 300 to 512 pixels on their shorter side."""
    try:
        from skimage import data
        from sklearn.datasets import load_sample_image
    except ImportError as error:
        raise UserError(
            f"the benchmark's photographs need {error.name}; "
            "pip install scikit-image scikit-learn, or give --data"
        ) from None
    pixels = [data.astronaut(), data.coffee(), data.chelsea(), data.rocket()]
    pixels += [data.stereo_motorcycle()[0], *map(load_sample_image, ("china.jpg", "flower.jpg"))]
    return [Image.fromarray(np.ascontiguousarray(image)) for image in pixels]


def write_crops(folder: Path, images: int, classes: int) -> None:
    """Write `images` JPEGs as `<class>/<number>.jpg`, the same on every call."""
    originals = load_photographs()
    # Drawn before the threads start, so that images do not depend on the order of threads.
    draws = np.random.default_rng(0).random((images, 5))

    def write(number: int) -> None:
        crop = cut_crop(originals[number % len(originals)], draws[number])
        path = folder / f"{number % classes:04d}" / f"{number:06d}.jpg"
        path.parent.mkdir(exist_ok=True)
        crop.save(path, quality=QUALITY, subsampling="4:2:0")

    with ThreadPoolExecutor() as pool:
        # list() raises the error of a thread; the iterator alone would drop it.
        list(pool.map(write, range(images)))


def cut_crop(original: Image.Image, draws: np.ndarray) -> Image.Image:
    """Cut the crop that five random numbers from 0 to 1 choose, and resize it."""
    shape, area, left, top, mirrored = draws
    width, height = (LONG, SHORT) if shape < 0.7 else (SHORT, LONG)
    largest = min(original.width / width, original.height / height)
    scale = largest * np.sqrt(SHARE[0] + area * (SHARE[1] - SHARE[0]))
    left *= original.width - width * scale
    top *= original.height - height * scale
    box = (left, top, left + width * scale, top + height * scale)
    crop = original.resize((width, height), Image.Resampling.LANCZOS, box)
    return crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored < 0.5 else crop


def draw_maps(images: int, classes: int) -> ScoreMaps:
    """Draw maps like those of a teacher of `classes` classes.

    Each image has a few likely classes; the others are at logit 0.
    """
    rng = np.random.default_rng(1)
    distinct, top_k = min(DISTINCT, classes), min(TOP_K, classes)
    palette = np.argsort(rng.random((images, classes)), axis=1)[:, :distinct]
    logit = rng.normal(4.0, 3.0, (images, MAP_SIDE, MAP_SIDE, distinct))
    # Each class that is not named has logit 0 and adds exp(0) = 1 to the sum.
    lse = np.log(np.exp(logit).sum(-1) + classes - distinct)
    best = np.argsort(-logit, axis=-1)[..., :top_k]
    cls = np.take_along_axis(palette[:, None, None], best, axis=-1).astype(np.uint16)
    logit = np.take_along_axis(logit, best, axis=-1).astype(np.float16)
    window = np.tile(np.array(WHOLE, np.float32), (images, 1))
    return ScoreMaps(logit, cls, lse.astype(np.float16), window)


def write_maps(
    path: Path, maps: ScoreMaps, folder: Path, num_classes: int, teacher: str, absent: str
) -> None:
    """Write a store of `maps` for the images of `folder`, in their order."""
    images = Images(folder)
    header = StoreHeader(
        side=maps.logit.shape[1],
        top_k=maps.logit.shape[3],
        num_classes=num_classes,
        absent=absent,
        teacher=teacher,
        input_size=576,
        geometry="squash",
        fingerprint=images.fingerprint(),
        class_names=tuple(images.class_names),
    )
    writer = ScoreMapWriter(path, header, images.paths, images.labels)
    writer.write(np.arange(len(images)), maps)
    writer.finish()


def write_stock(path: Path, folder: Path) -> None:
    """Write a .beton of the folder's JPEG bytes for stock FFCV.

    FFCV's own writer would encode the images a second time and change them.
    """
    images = Images(folder)
    for number in range(len(images)):
        # Every JPEG begins with these two bytes, the marker SOI.
        if images.read(number)[:2] != b"\xff\xd8":
            raise UserError(
                f"{images.where(number)} is not a JPEG; the benchmark's peers read only JPEGs"
            )
    # index=False keeps the bytes: no restart markers, no segment offsets.
    pack_dataset.main(pack_dataset.Packing(data=folder, out=path, index=False))


def unpack(beton: Beton, folder: Path) -> None:
    """Write the JPEGs of a .beton as `<class>/<sample>.jpg`."""
    for number, label in enumerate(beton.labels.tolist()):
        encoded, mode = beton.image(number)
        if mode != JPEG:
            raise UserError(
                f"{beton.where(number)} is not a JPEG; the benchmark's peers read only JPEGs"
            )
        # With leading zeros the order of names, in which the folder is read, is that of numbers.
        path = folder / f"{label:06d}" / f"{number:08d}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded)
