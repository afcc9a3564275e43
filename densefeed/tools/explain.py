"""Show what a trained model looked at, in one self-contained HTML file.

    densefeed explain runs/student --images scenes --count 32 --out page.html
    densefeed explain runs/student --images a.jpg b.jpg --classes 3 8 --out page.html
    densefeed explain weights.safetensors --model lvvit_s --images photos --out page.html

Of each image the page shows the relevance of the two most probable classes and of --classes, the
attention of every layer, with a slider, and whole attention matrices and features of some layers.
Rollout and gradient x attention stand beside relevance, to compare. What a model cannot be shown
by is named on the page with the reason. --maps adds the labels of the tokens. --arrays and
--pictures write the same as raw arrays and PNG files.

The model sees each image as in densefeed validate: the centered square of crop-pct times the
shorter side, resized to the model's size. Images are read and written one batch after the other, so
their number does not change the memory that the command takes.
"""

if not __package__:
    import script_start  # noqa: F401

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import tyro
from PIL import Image
from timm.data import ImageNetInfo, resolve_data_config
from torch import Tensor

from densefeed.explain.capture import TokenLayout
from densefeed.explain.explainer import (
    Explainer,
    Explanation,
    LayerMaps,
    list_classes,
    save_arrays,
    save_pictures,
)
from densefeed.explain.features import feature_picture
from densefeed.explain.heat_maps import HEAT, encode_map, gray, matrix_picture, shrink
from densefeed.explain.refusals import group_refusals
from densefeed.models.model_spec import ModelSpec, imagenet_names, is_registered
from densefeed.pages.templates import TEMPLATES, picture
from densefeed.pages.tokens import draw_labels, label_tokens
from densefeed.pipelines.augment.augmentation import Normalize
from densefeed.pipelines.batch import crop_batch
from densefeed.pipelines.folder import map_spec
from densefeed.pipelines.plan import RankRows
from densefeed.relabel.load_teacher import download
from densefeed.storage.dataset_names import ENDINGS, SPLITS, natural_key
from densefeed.storage.geometry import LEAST_CROP, center_box
from densefeed.storage.image_shards import list_names
from densefeed.storage.images import (
    DecodeOptions,
    Images,
    decode,
    limit_pixels,
    read_encoded,
    sample_evenly,
)
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.storage.selection import find_rows
from densefeed.system.devices import DeviceOptions, choose_device
from densefeed.system.errors import UserError, make_command
from densefeed.system.files import (
    check_ending,
    create_folder,
    name_errors,
    open_regular,
    replace_file,
)
from densefeed.system.options import (
    Beside,
    Bounds,
    Count,
    Integers,
    NonNegativeInt,
    Texts,
    own_first,
)
from densefeed.system.progress import steps_bar
from densefeed.system.terminal import escape_controls, print
from densefeed.training.load_model import (
    Trained,
    Weights,
    at_size,
    crop_input,
    find_division,
    open_beside,
    open_trained,
)

# Longer side of a photograph, a matrix and a picture of features on the page, pixels.
PHOTO_SIDE, MATRIX_SIDE, FEATURES_SIDE = 224, 224, 280
# Classes whose probability the page lists.
LISTED = 5
# Rows and columns of token labels where no layer has a grid.
GRID = 14


@own_first
@dataclass(frozen=True, kw_only=True)
class Explanations(DecodeOptions, DeviceOptions):
    """The model, the images and what to show of them."""

    # a run folder of densefeed train, a checkpoint, or timm's name of a model with published
    # weights
    source: tyro.conf.Positional[str]
    # image files, and folders of images
    images: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH ...")]
    out: Path  # the HTML file to write
    classes: Texts = ()  # names or numbers of classes to explain in every image
    # numbers from 1 of the layers whose matrix and features are shown; empty: four, evenly spaced
    layers: Integers = ()
    count: NonNegativeInt = 0  # how many of the images, evenly spaced; 0: all
    split: str = "val"  # split of a folder that holds train/ and val/
    maps: Path | None = None  # score maps of the folder of images, whose token labels are drawn
    arrays: Path | None = None  # folder to make, with an .npz file of raw arrays for each image
    pictures: Path | None = None  # folder to make, with PNG files at the model's size
    size: NonNegativeInt = 0  # side of the input, pixels; 0: the size the model was trained at
    # side of the crop, share of the shorter side; 0: the checkpoint's value
    crop_pct: float = 0.0
    weights: Weights = "ema"  # EMA weights where the checkpoint has them, or the raw weights
    model: str = ""  # timm's name of the model, for a checkpoint that does not contain it
    # model, or the name of a network that was trained beside it, e.g. agent; it has no EMA weights
    network: str = "model"
    batch: Count = 4  # images at once

    def unused(self) -> dict[str, str]:
        found = {}
        if not any(path.is_dir() and not list_loose(path) for path in self.images):
            found["split"] = "a folder among --images"
        if self.network != "model":
            found["weights"] = Beside("--network")
        elif not Path(self.source).exists() and is_registered(self.source):
            found["weights"] = "a checkpoint"
        return found


class ImageFile(NamedTuple):
    """An image to explain."""

    path: Path
    label: str  # name of its class folder; empty for a file of its own
    row: int  # its place in its folder
    folder: Images | None  # None for a file of its own


# ------------------------------------------------------------------------- inputs


def open_model(options: Explanations, device: torch.device) -> Trained:
    """Load the model of a checkpoint or run folder, or timm's with published weights. UserError."""
    source, path = options.source, Path(options.source)
    name, beside = options.network, options.network != "model"
    if path.exists() or not is_registered(source):
        weights = "raw" if beside else options.weights
        trained = open_trained(path, weights, options.model, options.size)
        trained.model.to(device)
        return open_beside(trained, name, device) if beside else trained
    if beside:
        raise UserError(f"{source} is a model of timm alone; leave out --network {name}")
    if options.model:
        raise UserError(f"{source} is a model of timm; leave out --model {options.model}")
    model = download(source)
    data = resolve_data_config(model=model)
    size = options.size or data["input_size"][-1]
    model, kwargs = at_size(model, ModelSpec(source, {}), size, path)
    return Trained(
        path=path,
        model=model.to(device),
        name=source,
        kwargs=kwargs,
        weights="raw",
        class_names=imagenet_names(model),
        size=size,
        crop_pct=data["crop_pct"],
        interpolation=data["interpolation"],
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
    )


def name_classes(trained: Trained) -> list[str]:
    """Return a name for each class: words for WordNet ids, numbers where there are no names."""
    names, model = trained.class_names, trained.model
    if names and names == imagenet_names(model):
        words = ImageNetInfo("imagenet-22k").label_descriptions(as_dict=True)
        return [words.get(name, name) for name in names]
    return names or [str(n) for n in range(model.num_classes)]


def choose_classes(asked: Sequence[str], trained: Trained) -> list[int]:
    """Return the numbers of classes, given by name or number. Raises UserError."""
    place = {name: n for n, name in enumerate(trained.class_names)}
    place |= {name: n for n, name in enumerate(name_classes(trained))}
    count, found = trained.model.num_classes, []
    for name in asked:
        # A folder may be called 7 and be class 2.
        n = place.get(name, int(name) if name.isdecimal() and len(name) < 8 else count)
        if n >= count:
            raise UserError(
                f"--classes {name} is not a class of {trained.path}; give a name, or a number from "
                f"0 to {count - 1:,}"
            )
        found.append(n)
    return found


def find_images(options: Explanations, trained: Trained) -> tuple[list[ImageFile], Images | None]:
    """Return the images to explain, and the last folder among --images. Raises UserError.

    A folder that the model's run divided is divided alike.
    """
    found, images = [], None
    for path in options.images:
        # A data set must have classes, and these pictures need none.
        if loose := list_loose(path):
            found += [ImageFile(file, "", 0, None) for file in loose]
        elif path.is_dir():
            is_part = options.split in (*SPLITS[0], *SPLITS[1])
            divided = find_division(trained, path) if is_part else None
            if divided:
                images = Images(path, divided.dataset, options.split, divided.division)
            else:
                images = Images(path, split=options.split)
            images.describe_split("val")
            labels = images.labels.tolist()
            found += [
                ImageFile(Path(images.where(row)), images.class_names[label], row, images)
                for row, label in enumerate(labels)
            ]
        # Before the first image is explained, and not after hours.
        elif not path.is_file():
            raise UserError(f"--images {path} is neither an image nor a folder; check the path")
        else:
            found.append(ImageFile(path, "", 0, None))
    if not found:
        raise UserError("--images names no image; give files, or folders of images")
    places = sample_evenly(len(found), options.count or len(found))
    return [found[n] for n in places.tolist()], images


def list_loose(folder: Path) -> list[Path]:
    """Return the images in a folder that has no folders, in the order of a data set."""
    names, folders = list_names(folder) if folder.is_dir() else ([], [])
    images = [name for name in names if Path(name).suffix.lower() in ENDINGS]
    return [] if folders else [folder / name for name in sorted(images, key=natural_key)]


class TokenLabels:
    """The labels of the tokens that the model sees, from the score maps of a folder of images."""

    def __init__(self, options: Explanations, images: Images | None) -> None:
        if images is None or len(options.images) > 1:
            raise UserError("--maps needs --images to be one folder, that of the score maps")
        self.store = store = ScoreMapStore(options.maps)
        # A row belongs to an image by its place in the folder.
        self.rows = find_rows(store, images, options.images[0], options.split)
        self.spec = map_spec(store)

    def __call__(self, row: int, size: tuple[int, int], crop_pct: float, grid: tuple) -> dict:
        """Return how the tokens of an image of `size` (H, W) are drawn, as `draw_labels` does."""
        rows = np.array([row])
        maps = self.store.checked_rows(rows)
        height_1, width_1 = np.array(size)[:, None]
        crop = center_box(height_1, width_1, crop_pct), np.array([False]), height_1, width_1
        places = RankRows(rows, np.zeros(1, np.int64), np.ones(1, np.float32))
        fields = [torch.from_numpy(part) for part in maps]
        batch = crop_batch(torch.empty(1, 0), torch.zeros(1), crop, places, fields)
        class_NT, probability_NT = label_tokens(batch, self.spec, grid)
        class_RC, probability_RC = class_NT[0].reshape(grid), probability_NT[0].reshape(grid)
        return draw_labels(class_RC, probability_RC, self.store.header.class_names)


class Input(NamedTuple):
    """What the model sees of an image."""

    file: ImageFile
    pixels: np.ndarray  # uint8 [S, S, 3]
    size: tuple[int, int]  # (H, W) of the stored image


def read_input(file: ImageFile, trained: Trained, crop_pct: float) -> Input:
    """Read an image and cut out what the model sees. Raises UserError for a damaged one."""
    # Also from a tar or Parquet file.
    with file.folder.open(file.row) if file.folder else open_regular(file.path) as opened:
        image = decode(read_encoded(opened, str(file.path)), str(file.path))
    pixels = crop_input(image, trained, crop_pct)
    return Input(file, pixels, (image.height, image.width))


# ------------------------------------------------------------------------- page


def describe(
    shown: Input, number: int, found: Explanation, n: int, names: list[str], labels: dict
) -> dict:
    """Return what the page shows of one image: row `n` of `found`."""
    probability = found.probability[n]
    best = probability.topk(min(LISTED, len(names)))
    photo = shrink(Image.fromarray(shown.pixels), PHOTO_SIDE)
    layers = [describe_layer(k, maps, n) for k, maps in found.layers.items()]
    return {
        "number": number,
        "path": str(shown.file.path),
        "label": shown.file.label,
        "image": picture(photo, "JPEG"),
        "small": photo.width < PHOTO_SIDE // 2,
        "best": list(zip(map(names.__getitem__, best.indices), best.values.tolist(), strict=True)),
        "classes": [
            {
                "name": names[c],
                "probability": probability[c].item(),
                "relevance": encode(found.relevance, n, j),
                "gradient": encode(found.gradient, n, j),
            }
            for c, j in list_classes(found, n).items()
        ],
        "rollout": encode(found.rollout, n),
        "labels": labels,
        "layers": layers,
        "head_count": max((len(layer["heads"]) for layer in layers), default=0),
        "matrices": [
            (k, maps.matrix.shape[1:], picture(matrix_picture(maps.matrix[n], MATRIX_SIDE), "PNG"))
            for k, maps in found.layers.items()
            if maps.matrix is not None
        ],
        "features": [
            (block, maps.shape[1:], draw_features(maps[n : n + 1]))
            for block, maps in found.features.items()
        ],
    }


def describe_layer(number: int, maps: LayerMaps, n: int) -> dict:
    """Return what the slider shows of a layer."""
    row_RC = maps.class_map[n]
    return {
        "number": number,
        "name": maps.name,
        "reader": name_reader(maps.layout),
        "grid": tuple(row_RC.shape),
        # How many times the mean the largest share is; 1 if all are equal.
        "peak": (row_RC.max() / row_RC.mean()).item(),
        "class_row": encode_map(row_RC),
        # In windows both are the same.
        "mean_row": "" if maps.layout.windows else encode_map(maps.mean_map[n]),
        "heads": [] if maps.head_maps is None else list(map(encode_map, maps.head_maps[n])),
    }


def name_reader(layout: TokenLayout) -> str:
    """Return whose attention the class map of a layer is."""
    if layout.windows:
        return "mean over each patch's window"
    return "of the class token" if layout.class_tokens else "mean over the patches"


def encode(maps: Tensor | None, *places: int) -> str:
    """Encode one of the maps, or return an empty string if there are none."""
    return "" if maps is None else encode_map(maps[places])


def draw_features(map_1DRC: Tensor) -> str:
    """Return the picture of an image's features as a data URL."""
    return picture(shrink(gray(feature_picture(map_1DRC)[0]), FEATURES_SIDE), "JPEG")


def label_grid(found: Explanation) -> tuple[int, int]:
    """Return rows and columns of token labels: those of the last layer's patches."""
    last = next(reversed(found.layers.values()), None)
    return tuple(last.class_map.shape[1:]) if last else (GRID, GRID)


# ------------------------------------------------------------------------- command


class Outputs(NamedTuple):
    """Temporary folders for the files of images; None where the user wants none."""

    arrays: Path | None
    pictures: Path | None


def explain_images(
    files: list[ImageFile],
    trained: Trained,
    explainer: Explainer,
    labels: TokenLabels | None,
    options: Explanations,
    outputs: Outputs,
) -> Iterator[dict]:
    """Explain images batch by batch, write their files, and yield what the page shows of each."""
    names, crop_pct = name_classes(trained), options.crop_pct or trained.crop_pct
    device = next(trained.model.parameters()).device
    normalize, done = Normalize(trained.mean, trained.std).to(device), 0
    with steps_bar("explain, images", len(files), 0) as advance:
        for begin in range(0, len(files), options.batch):
            part = files[begin : begin + options.batch]
            inputs = [read_input(file, trained, crop_pct) for file in part]
            pixels_NHWC = torch.from_numpy(np.stack([shown.pixels for shown in inputs]))
            found = explainer(normalize(pixels_NHWC.to(device)))
            for n, shown in enumerate(inputs):
                stem = f"{done:06d}"
                save_files(outputs, stem, found, n, shown, options)
                row, grid = shown.file.row, label_grid(found)
                drawn = labels(row, shown.size, crop_pct, grid) if labels else {}
                yield describe(shown, done, found, n, names, drawn)
                done += 1
                advance(1, "")


def save_files(
    outputs: Outputs, stem: str, found: Explanation, n: int, shown: Input, options: Explanations
) -> None:
    """Write the files of an image that the user wants."""
    # They are written while the page is, whose name an error of the system would otherwise have.
    if outputs.arrays:
        path = outputs.arrays / f"{stem}.npz"
        with name_errors(options.arrays):
            save_arrays(path, found, n, escape_controls(shown.file.path))
    if outputs.pictures:
        with name_errors(options.pictures):
            save_pictures(outputs.pictures, stem, found, n, Image.fromarray(shown.pixels))


def main(options: Explanations) -> None:
    """Explain the images; write the page, and the files if there should be some."""
    check_ending(options.out, ".html", "--out")
    if options.out.is_dir():
        raise UserError(f"--out {options.out} is a folder; give the name of a file")
    folders = check_folders(options)
    limit_pixels(options.max_pixels)
    if options.crop_pct:
        Bounds(LEAST_CROP, 1).check("crop_pct", options.crop_pct)
    device = choose_device(options.device)
    trained = open_model(options, device)
    files, folder = find_images(options, trained)
    labels = TokenLabels(options, folder) if options.maps else None
    classes = choose_classes(options.classes, trained)
    explainer = Explainer(trained.model, options.layers, classes)
    with ExitStack() as stack:
        # The page is renamed first: a folder that stands already could not be made again.
        made = [folder and stack.enter_context(create_folder(folder)) for folder in folders]
        part = stack.enter_context(replace_file(options.out))
        items = explain_images(files, trained, explainer, labels, options, Outputs(*made))
        write_page(part, items, trained, explainer, len(files), any(folders))
    size = options.out.stat().st_size
    images = f"{len(files):,} image{'s' * (len(files) > 1)}"
    print(f"{options.out}: {images}, {size / 2**20:,.1f} MiB, open it in a browser")


def check_folders(options: Explanations) -> list[Path | None]:
    """Return the folders for files. Raises UserError for one that exists, or one for both."""
    folders = {"--arrays": options.arrays, "--pictures": options.pictures}
    for option, folder in folders.items():
        if folder and os.path.lexists(folder):
            raise UserError(f"{option} {folder} exists already; remove it or choose another name")
    places = [folder.resolve() for folder in folders.values() if folder]
    if len(set(places)) < len(places):
        raise UserError(f"--arrays and --pictures are both {options.arrays}; choose two names")
    # A folder gets its name when all is done, and by then it must not exist.
    for place in [*places, options.out.resolve()]:
        if around := set(place.parents) & set(places):
            raise UserError(f"{place} is inside {around.pop()}; give names beside each other")
    return list(folders.values())


def write_page(
    path: Path,
    items: Iterator[dict],
    trained: Trained,
    explainer: Explainer,
    count: int,
    has_files: bool,
) -> None:
    """Write the page image by image. UserError if the model can be shown by nothing."""
    # What the model refuses is known after the first batch, and stands at the top of the page.
    first = next(items)
    shown = first["classes"][0]["relevance"] or first["layers"] or first["features"]
    if not shown:
        raise UserError("; ".join(dict.fromkeys(explainer.refused.values())))
    page = TEMPLATES.get_template("explain.html").stream(
        items=chain([first], items),
        count=count,
        trained=trained,
        family=type(trained.model).__name__,
        refused=group_refusals(explainer.refused),
        has_maps=bool(first["layers"]),
        has_files=has_files,
        heat=HEAT,
    )
    with open(path, "w", encoding="utf-8") as file:
        page.dump(file)


command = make_command(main, Explanations, __doc__)


if __name__ == "__main__":
    command()
