"""Open the loader of a dataset: the options of the data, and the loaders that `--loader` names."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from tyro.conf import arg

from densefeed.pipelines.dali import DaliLoader
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.folder import FolderSource
from densefeed.pipelines.loader import CPU, Masks, Source, ThreadedLoader
from densefeed.pipelines.plan import EpochPlan, Interpolation
from densefeed.pipelines.remote import RemoteSource
from densefeed.pipelines.shapes import (
    AspectBuckets,
    Shape,
    check_aspects,
    describe_shape,
    list_shapes,
)
from densefeed.storage.beton import is_beton
from densefeed.storage.dataset_items import DatasetItems
from densefeed.storage.datasets import choose_validation_split
from densefeed.storage.fetch import make_local
from densefeed.storage.geometry import LEAST_CROP
from densefeed.storage.images import UNDIVIDED, DecodeOptions, Images, SplitOptions, limit_pixels
from densefeed.system.devices import ThreadOptions, free_memory
from densefeed.system.errors import UserError
from densefeed.system.files import cache_folder
from densefeed.system.object_url import ObjectURL, check_local
from densefeed.system.options import (
    Bounds,
    Count,
    Fraction,
    Integers,
    Location,
    Numbers,
    list_values,
    own_first,
)

Mode = Literal["train", "evaluate"]
Filter = Literal["bilinear", "bicubic"]


@own_first
@dataclass(frozen=True, kw_only=True)
class DataOptions(SplitOptions, DecodeOptions, ThreadOptions):
    """The section `data` of a run's options."""

    # training set: a folder of class folders, a .beton or 'a-*.beton', also
    # s3://BUCKET/train.beton; the root of --dataset
    train: Annotated[Location, arg(name="data")] = tyro.MISSING
    # validation set, with --dataset list/FILE another list of that kind; or give --val-fraction
    val: Location | None = None
    # name of the dataset, from the list in the --help of packing, if --data is a folder, but not of
    # class folders, e.g. list/FILE
    dataset: str = ""
    # folder of local copies of --data, --val and --score-maps in object storage; default:
    # ~/.cache/densefeed
    cache: Path | None = None
    # score maps of the training set: HDF5 file, or folder of shards, also s3://BUCKET/FOLDER, of
    # which a local copy is made; a .beton may carry its own
    score_maps: Location | None = None
    # keep all score maps in the memory of the device (ImageNet: 9 GB) instead of in the batches
    maps_on_device: bool = False
    # folder: folders of images; ffcv: .beton files; auto: the one that reads the data; dali:
    # either, decoded by NVIDIA DALI
    loader: str = "auto"
    # stop at an unreadable sample, or skip and count it
    on_bad_sample: Literal["raise", "skip"] = "raise"
    # order of the training set; blocks reads runs of storage, for disks and network file systems
    order: Literal["random", "blocks"] = "random"
    # crops of each image per epoch (repeated augmentation); an epoch is that many times longer
    repeats: Count = 1
    size: Count = 224  # side of the network's input, pixels
    # sizes that grow in training: pairs FROM_EPOCH PIXELS, the first from epoch 0; empty: --size
    sizes: Annotated[tuple[tuple[int, int], ...], list_values("INT INT")] = ()
    # sides of which every training batch draws one, in place of --sizes, e.g. 160 192 224
    multi_scale: Integers = ()
    # width / height of aspect buckets, e.g. 0.75 1 1.333: a training batch holds images of one, its
    # input has that aspect and about as many pixels as --size squared; crops are not squeezed
    aspects: Numbers = ()
    # heights and widths of buckets are multiples of this, pixels: the model's patch size
    side_multiple: Count = 16
    crop_scale: tuple[float, float] = (0.08, 1.0)  # area of a training crop, fraction of the image
    hflip: Fraction = 0.5  # probability of a left-right flip
    # filter that resizes training crops; random: either for each crop
    crop_interpolation: Interpolation = "bilinear"
    # filter that resizes evaluation crops; checkpoints and exports state it
    eval_interpolation: Filter = "bilinear"
    # side of the evaluation crop, fraction of the image's shorter side
    crop_pct: Annotated[float, Bounds(LEAST_CROP, 1)] = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            raise UserError(
                f"--crop-scale {low:g} {high:g}: give the smallest and the largest fraction of the "
                "image, above 0 and up to 1"
            )
        if self.sizes and self.multi_scale:
            raise UserError(
                "--sizes and --multi-scale both set the resolution; give one of the two, and a "
                "bare --sizes to remove those of a recipe"
            )
        check_aspects(self.aspects)
        if self.val_fraction and self.val is not None:
            raise UserError(
                f"--val {self.val} and --val-fraction both name validation images; give one of the "
                "two"
            )

    def unused(self) -> dict[str, str]:
        found = super().unused() | ({} if self.aspects else {"side_multiple": "--aspects"})
        if not any(isinstance(path, ObjectURL) for path in (self.train, self.val, self.score_maps)):
            found["cache"] = "--data s3://..."
        return found

    def locate(self, mode: Mode) -> tuple[Location, str]:
        """Return where the training or the validation set is, and its `dataset`.

        UserError for a missing --val.
        """
        if mode == "train" or self.val_fraction:
            return self.train, self.dataset
        if self.val is None:
            raise UserError(
                "--val is missing; name the validation set, or give --val-fraction 0.15, which "
                "holds out that fraction of --data"
            )
        kind = self.dataset.partition("/")[0]
        # A list is of one split, and the images of another are below the same root.
        if kind in ("list", "coco") and isinstance(self.val, Path) and not self.val.is_dir():
            return self.train, f"{kind}/{self.val}"
        if kind == "coco":
            raise UserError(
                f"--val {self.val} is a folder, and --dataset {self.dataset} has the objects of "
                "the training set; give --val the annotation file of the validation set, or give "
                "--val-fraction 0.15"
            )
        # A share is one of the training images.
        return self.val, "" if kind in ("list", "share") else self.dataset

    @property
    def all_sizes(self) -> tuple[tuple[int, int], ...]:
        """`sizes`, or `size` from epoch 0."""
        return self.sizes or ((0, self.size),)

    @property
    def sides(self) -> tuple[int, ...]:
        """All sides of the network's input in training, pixels, ascending.

        An aspect bucket has about as many pixels as the square of a side.
        """
        return tuple(sorted(set(self.multi_scale) or {side for _, side in self.all_sizes}))

    @property
    def described_sizes(self) -> str:
        """The sizes of training and evaluation, for messages."""
        if self.sides == (self.size,) and not self.aspects:
            return f"trained and evaluated at {self.size:,} px"
        sides = " and ".join(f"{side:,}" for side in self.sides)
        several = f" in {len(self.aspects)} aspects" if self.aspects else ""
        return f"trained at {sides} px{several}, evaluated at {self.size:,} px"

    @property
    def varies(self) -> bool:
        """Whether inputs may have another shape than the square of `size`."""
        return bool(self.sizes or self.multi_scale or self.aspects)

    @property
    def maps_name(self) -> Location:
        """Where the score maps of the training set are, for messages."""
        return self.score_maps or self.train

    @property
    def size_option(self) -> str:
        """The option that sets the shapes of inputs, as a remedy in messages."""
        if self.aspects:
            return "other --aspects, another --side-multiple"
        if self.multi_scale:
            return "other --multi-scale"
        return "other --sizes" if self.sizes else "another --size"

    @property
    def shapes(self) -> list[Shape]:
        """All heights and widths of the network's input in training, pixels."""
        return list_shapes(self.sides, self.aspects, self.side_multiple)


def open_folder(
    path: Path,
    mode: Mode,
    maps: Path | None,
    threads: int,
    dataset: str | DatasetItems = "",
    division: SplitOptions = UNDIVIDED,
    whole: Images | None = None,
) -> FolderSource:
    """Open a folder of images; `whole` are those to divide, if listed. UserError for a file."""
    if isinstance(dataset, DatasetItems):
        split = "train" if mode == "train" else "val"
        return FolderSource(path, split, maps, threads, dataset, division)
    check_local(path)
    if path.is_file():
        raise UserError(
            f"{path} is a file; --loader folder reads folders (of a tar or Parquet file give "
            f"{path.parent}), --loader ffcv reads .beton files"
        )
    split = "train"
    if mode != "train":
        split = "val" if division.val_fraction else choose_validation_split(dataset)
    return FolderSource(path, split, maps, threads, dataset, division, whole)


def open_beton(
    path: Path,
    mode: Mode,
    maps: Path | None,
    threads: int,
    dataset: str = "",
    division: SplitOptions = UNDIVIDED,
) -> FfcvSource:
    """Open .beton files. UserError for a folder, a dataset's name and a division."""
    if path.is_dir():
        raise UserError(
            f"{path} is a folder; pack it with densefeed pack, or read it with --loader folder"
        )
    check_packed(path, dataset, division)
    return FfcvSource(path, maps)


def open_either(path: Path, *arguments: Any, **which: Any) -> Source:
    """Open a folder of images, a dataset or .beton files, with the arguments of either."""
    is_folder = path.is_dir() or isinstance(which.get("dataset"), DatasetItems)
    return (open_folder if is_folder else open_beton)(path, *arguments, **which)


def check_packed(
    path: Path | ObjectURL, dataset: str | DatasetItems, division: SplitOptions
) -> None:
    """Raise UserError if packed images are to be divided, or a dataset is given beside them."""
    if dataset and not isinstance(dataset, str):
        raise UserError(
            "a dataset object is read with loader='folder', and --loader ffcv reads packed files; "
            "pack it, or leave out the loader"
        )
    if dataset:
        raise UserError(
            f"{path} is packed, and --dataset {dataset} names what a folder holds; leave it out"
        )
    if division.val_fraction:
        raise UserError(
            f"{path} is packed, and --val-fraction divides folders; pack the two parts by "
            "densefeed pack --val-fraction with --split train and with --split val, and give both"
        )


def open_remote(
    url: ObjectURL, data: DataOptions, loader: str, dataset: str, maps: Path | None
) -> RemoteSource:
    """Open .beton files in object storage. UserError for a loader that cannot read them."""
    if loader not in ("ffcv", "dali"):
        raise UserError(
            f"{url} is in object storage, where --loader {loader} reads nothing, and --loader "
            "ffcv and dali read .beton files; pack the data with densefeed pack, or copy it "
            "to a local disk"
        )
    if not url.endswith(".beton"):
        raise UserError(
            f"{url} is not a .beton; folders, tar and Parquet files in object storage are labeled "
            "and packed, not trained from: pack them with densefeed pack"
        )
    check_packed(url, dataset, data)
    if data.maps_on_device and maps is None:
        raise UserError(
            "--maps-on-device would fetch all images with their score maps before the first step; "
            "remove it, or copy the file to a local disk"
        )
    return RemoteSource(url, maps, data.cache or cache_folder())


# For each name of `--loader` what opens its samples, (path, mode, score maps, threads) to a Source,
# and what makes the loader, with the arguments of ThreadedLoader.
LOADERS = {
    "folder": (open_folder, ThreadedLoader),
    "ffcv": (open_beton, ThreadedLoader),
    "dali": (open_either, DaliLoader),
}
# Those of this package, whose sources take a dataset's name and a division too.
BUILTIN = tuple(LOADERS)
AUTO = "auto"


def register_loader(
    name: str,
    open_source: Callable[[Path, Mode, Path | None, int], Source],
    make: Callable[..., ThreadedLoader] = ThreadedLoader,
) -> None:
    """Make a loader known to `--loader`. ValueError if the name is taken."""
    if name in (*LOADERS, AUTO):
        raise ValueError(f"there is a loader {name!r} already")
    LOADERS[name] = open_source, make


def choose_loader(name: str, path: Location) -> str:
    """Return the loader of `path` for `auto`, else `name`. UserError if it is unknown."""
    if name == AUTO:
        return "ffcv" if isinstance(path, ObjectURL) or is_beton(path) else "folder"
    if name not in LOADERS:
        raise UserError(
            f"--loader {name} is unknown; choose one of {', '.join((AUTO, *LOADERS))}, or start "
            "the file that registers your own, as docs/extending.md shows"
        )
    return name


def open_dataset(
    data: DataOptions,
    mode: Mode,
    *,
    batch: int,
    seed: int,
    microbatches: int = 0,
    rank: int = 0,
    ranks: int = 1,
    maps: bool = True,
    masks: Masks = False,
    device: torch.device = CPU,
    beside: Source | None = None,
    items: DatasetItems | None = None,
) -> ThreadedLoader:
    """Open the loader of the training or the validation set: the rows of one rank.

    Args:
        batch: images of a global batch, all ranks together.
        seed: key of every random draw.
        microbatches: forward passes that a global batch is divided into, see `EpochPlan`.
        maps: whether training batches carry score maps, if the set has any.
        masks: whether hard masks, or maps of objects, are needed; training batches carry them.
        device: where DALI decodes.
        beside: a part of the same data that is open; with --val-fraction the folder is not listed
            again.
        items: a dataset object in place of `data`'s path, which is what messages call it.

    The limit of pixels is one for the process: that of the dataset opened last.

    Raises UserError for data that cannot be opened or options that do not fit it.
    """
    limit_pixels(data.max_pixels)
    training, (path, dataset) = mode == "train", data.locate(mode)
    dataset = items or dataset
    score_maps, loader = data.score_maps if training else None, choose_loader(data.loader, path)
    open_source, make = LOADERS[loader]
    if score_maps is not None:
        score_maps = make_local(score_maps, data.cache)
    if isinstance(path, ObjectURL):
        source = open_remote(path, data, loader, dataset, score_maps)
    else:
        which = {"dataset": dataset, "division": data} if dataset or data.val_fraction else {}
        if which and loader not in BUILTIN:
            option, instead = "--val-fraction", ", and give another set to --val"
            if dataset:
                option, instead = "--dataset", ""
            raise UserError(
                f"--loader {loader} takes no {option}, which is for folders that --loader folder "
                f"or dali reads; leave it out{instead}, or let the function that {loader} is "
                "registered with choose the samples"
            )
        if data.val_fraction and isinstance(beside, FolderSource):
            which["whole"] = beside.images.whole
        source = open_source(Path(path), mode, score_maps, data.threads, **which)
    with ExitStack() as stack:
        stack.callback(source.close)
        plan = EpochPlan(
            num_samples=len(source.labels),
            batch=batch,
            seed=seed,
            mode=mode,
            **choose_order(data, source, training),
            repeats=data.repeats if training else 1,
            rank=rank,
            ranks=ranks,
            microbatches=microbatches,
            sizes=data.all_sizes if training else ((0, data.size),),
            multi_scale=data.multi_scale if training else (),
            buckets=make_buckets(data, source, loader) if training and data.aspects else None,
            crop_scale=data.crop_scale,
            hflip=data.hflip,
            crop_pct=data.crop_pct,
            crop_interpolation=data.crop_interpolation if training else data.eval_interpolation,
        )
        if training:
            check_memory(plan)
        if isinstance(source, RemoteSource):
            source.check_room(plan)
        streamed = training and maps and not data.maps_on_device
        if masks:
            # Soft maps can do without.
            use = "training" if training else "validation"
            check_masks(path, source, masks, use, optional=training and maps)
        opened = make(source, plan, data.threads, data.on_bad_sample, streamed, device)
        opened.with_masks = masks and training
        # Closed here only if it fails.
        stack.pop_all()
    return opened


def check_masks(
    path: Location, source: Source, masks: Masks, use: str = "validation", optional: bool = False
) -> None:
    """Raise UserError if a source lacks the masks, or has maps of objects in place of classes.

    With `optional`, all its images may be without a mask.
    """
    if masks == "instances" and not source.instances:
        fault = (
            "is read without objects, which detection needs; give --dataset coco/FILE, or "
            "instances for photo scenes"
        )
    elif masks != "instances" and source.instances:
        fault = (
            "is read with objects, which detection needs; segmentation needs classes of pixels: "
            "give --dataset masks"
        )
    elif source.masks is None:
        fault = (
            "is read without masks, which segmentation needs; give --dataset masks and a folder of "
            "images and masks"
        )
    elif not (source.masks or optional):
        fault = (
            f"has no masks of its images for {use}, which segmentation needs; add them, or give "
            "another folder"
        )
    else:
        return
    raise UserError(f"{path} {fault}")


def choose_order(data: DataOptions, source: Source, training: bool) -> dict[str, str | int]:
    """Return the plan's settings of the order. UserError if the source is too slow for it."""
    blocks = source.blocks() if training else None
    if blocks is None:
        return {"order": data.order}
    if data.order != "blocks":
        raise UserError(
            f"{data.train} holds more images in Parquet than memory should, and shuffled training "
            "would read a whole row group for each; give --order blocks, which shuffles within "
            f"{blocks.block * blocks.window:,} images, or pack it with densefeed pack"
        )
    return {"order": "blocks", **blocks._asdict()}


def make_buckets(data: DataOptions, source: Source, loader: str) -> AspectBuckets:
    """Assign the images of a source to `--aspects`. UserError if it cannot tell their sizes."""
    extents = source.extents()
    if extents is None:
        raise UserError(
            f"--loader {loader} does not know the sizes of stored images; remove --aspects"
        )
    return AspectBuckets(data.aspects, data.side_multiple, *extents)


def check_memory(plan: EpochPlan) -> None:
    """Raise UserError if the images of one forward pass are more bytes than memory is free.

    Linux grants such memory and kills the process when it is used.
    """
    count = plan.batch // (plan.microbatches or plan.ranks)
    largest = max(plan.shapes(), key=math.prod)
    needed, free = 3 * count * math.prod(largest), free_memory(CPU)
    if needed > free:
        raise UserError(
            f"--batch {plan.batch:,} with images of {describe_shape(largest)} takes "
            f"{needed / 1e9:,.1f} GB for the pixels alone, and {free / 1e9:,.1f} GB are free; give "
            "a smaller --batch or --size"
        )
