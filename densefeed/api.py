"""The Python API: a loader of batches, and the step of a training loop of your own."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timm.utils import unwrap_model
from torch import nn

from densefeed.models.token_head import TokenHeadModel
from densefeed.models.token_transformer import TokenTransformer
from densefeed.objectives import Objectives, build_objective, check_unused, complete
from densefeed.objectives.base import Objective, Setting
from densefeed.pipelines.augment.settings import Augment
from densefeed.pipelines.batch import Batch
from densefeed.pipelines.loader import Preparation
from densefeed.pipelines.mixing import MixOptions, check_pairs
from densefeed.pipelines.open import DataOptions, Mode, open_dataset
from densefeed.pipelines.targets import TargetRules
from densefeed.relabel.run import Labeling, run_labeling
from densefeed.step import Step
from densefeed.storage.dataset_items import DatasetItems, name_dataset
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError
from densefeed.system.factories import is_factory
from densefeed.system.object_url import ObjectURL, find_url, parse_location
from densefeed.system.options import check_type, with_options


class Loader:
    """Batches of a dataset: crops, their Views, labels and, in training, score maps.

    Attributes:
        plan: the order, crops and flips of every epoch, a function of the seed.
        num_classes, class_names: of the dataset.
        score_maps: specification of the score maps, None for a dataset without.
    """

    def __init__(
        self, data: DataOptions, mode: Mode, *, ranks_are_given: bool = True, **how: int
    ) -> None:
        self.data, self._loader = data, open_dataset(data, mode, **how)
        self.path, _ = data.locate(mode)
        self.plan, self.score_maps = self._loader.plan, self._loader.score_maps
        self.num_classes, self.class_names = self._loader.num_classes, self._loader.class_names
        self.source, self.prepares = self._loader.source, self._loader.prepares
        self._next_epoch, self._ranks_are_given = 0, ranks_are_given

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return len(self._loader)

    def batches(
        self, epoch: int, start: int = 0, prepare: Preparation | None = None
    ) -> Iterator[Batch]:
        """Yield the batches of an epoch, from batch `start` on, on the CPU.

        `image` is uint8 `[N, H, W, 3]`; the last batch is padded with samples of weight 0.
        `prepare` is for Step. Raises
        UserError, which names the sample, for one that cannot be read, and for a loader that was
        opened without `ranks` before the process group; TypeError for a number that is not whole,
        ValueError for a negative epoch or a `start` beyond the last batch.
        """
        world = find_group()[1]
        if not self._ranks_are_given and 1 < world != self.plan.ranks:
            raise UserError(
                f"{self.path} was opened for {self.plan.ranks} "
                f"rank{'s' if self.plan.ranks > 1 else ''} and torch.distributed has {world}, each "
                "of which would get the same batches; open the loader where the process group "
                "exists (with Lightning in the hooks train_dataloader and val_dataloader), or pass "
                "rank and ranks to open_loader"
            )
        epoch, start = index(epoch), index(start)
        if epoch < 0 or not 0 <= start <= len(self):
            raise ValueError(
                f"epoch {epoch} from batch {start}: both count from 0, and an epoch has "
                f"{len(self)} batches"
            )
        ways = () if prepare is None else (prepare,)
        return self._loader.batches(epoch, start, *ways)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of the next epoch, for trainers that count epochs themselves."""
        self._next_epoch += 1
        return self.batches(self._next_epoch - 1)

    def close(self) -> None:
        """Stop the threads and close the files."""
        self._loader.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# Options of `label` of one value, or one for each teacher.
SEVERAL = {"model", "input_size", "class_map"}


# An object in place of what an option names.
NAMED_TWICE = "dataset names what a folder holds, and a dataset was given; remove it"


def label(
    data: Any,
    /,
    teacher: str | Path | nn.Module | Sequence[str | Path | nn.Module],
    out: str | Path,
    **options: Any,
) -> ScoreMapStore | None:
    """Label the images of a dataset with a teacher, as `densefeed label` does.

    Args:
        data: a map-style dataset: an object with `len` whose `[index]` is (image, label), or a
            dictionary of both, as those of torchvision, timm and Hugging Face. An image is a Pillow
            image, a uint8 array `[H, W, 3]`, a tensor `[3, H, W]` of uint8 or of floats from 0 to
            1, or the bytes or the path of an image file. Or `package.module:factory`, or the path
            of a folder as of --data, with the option dataset as of --dataset, e.g.
            `label("photos", teacher, "maps.h5", dataset="list/train.csv")`.
        teacher: what --teacher names, or a torch.nn.Module; several are averaged. A module is
            moved to the device, in eval mode.
        out: a file NAME.h5, a folder of shards, or `s3://BUCKET/FOLDER`. The same call again
            resumes a killed one, and other processes that make it share the work.
        options: other options of `densefeed label`, with underscores, e.g. input_size, top_k,
            class_map, form, dry_run, and their defaults.

    Returns the store in the process that completes it, and None in others, for a URL, for `shard`
    and for `dry_run`. Row n is the map of item n.

    Raises UserError for images or a teacher that cannot be used, TypeError for an unknown option.
    """
    if foreign := {"data", "teacher", "out"} & options.keys():
        raise TypeError(f"label has no option {min(foreign)!r}")
    teachers = [teacher] if isinstance(teacher, str | Path | nn.Module) else teacher
    is_list = isinstance(teachers, Sequence)
    if not (is_list and all(isinstance(each, str | Path | nn.Module) for each in teachers)):
        raise UserError(
            f"teacher is a {type(teacher).__name__}; give a torch.nn.Module, what --teacher of "
            "densefeed label names, or a list of these"
        )
    teachers = [str(each) if isinstance(each, Path) else each for each in teachers]
    names = [each if isinstance(each, str) else type(each).__name__ for each in teachers]
    for name in SEVERAL & options.keys():
        value = options[name]
        if isinstance(value, str | int | Path):
            options[name] = (str(value) if isinstance(value, Path) else value,)
    place, named = None, options.get("dataset")
    if isinstance(data, str | Path):
        makes = not named and isinstance(data, str) and is_factory(data)
        place = {"dataset": data} if makes else {"data": as_location(data)}
    elif named:
        raise UserError(NAMED_TWICE)
    labeling = with_options(
        Labeling(out=as_location(out), teacher=tuple(names), **place or {}), **options
    )
    items = None if place else DatasetItems(data, name_dataset(data))
    given = () if all(isinstance(each, str) for each in teachers) else teachers
    return run_labeling(labeling, items, given)


def open_loader(
    path: Any,
    *,
    batch: int,
    size: int = 224,
    seed: int = 0,
    score_maps: str | Path | None = None,
    cache: str | Path | None = None,
    train: bool = True,
    rank: int | None = None,
    ranks: int | None = None,
    **options: Any,
) -> Loader:
    """Open a training set, or a validation set with `train=False`.

    Args:
        path: a .beton file or a pattern of such files, on a disk or as `s3://BUCKET/train.beton`
            in object storage, or a folder with `train/<class>/*.jpg` (or `val/...`). With the
            option val_fraction, the folder that it divides, for both `train=True` and False; with
            dataset, its root, e.g. of the paths in `dataset="list/val.txt"`. Or a map-style
            dataset, as `label` takes it: its items are whole images without random transforms, and
            are read one at a time.
        batch: images per batch, all ranks together.
        size: side of the crops, pixels.
        seed: key of every random draw.
        score_maps: HDF5 file of score maps, for data that carries none; or a folder of shards, on a
            disk or in object storage.
        cache: folder of the local copies of data in object storage.
        train: random-resized crops in random order; else center crops, each image once, in order.
        rank, ranks: this process and the number of processes, which share every batch; by default
            those of torch.distributed where it is initialized, else 0 and 1. `rank=0, ranks=1`
            gives a process all rows, e.g. to validate on one rank alone.
        options: other options of the section `data`, e.g. threads, crop_scale, hflip, loader.

    Raises UserError for data that cannot be opened and values that do not fit, TypeError for an
    unknown option or `score_maps` without `train`.
    """
    # `path` and `train` stand for the first two; the last is for densefeed train, which holds the
    # maps.
    if foreign := {"data", "val", "maps_on_device"} & options.keys():
        raise TypeError(f"open_loader has no option {min(foreign)!r}")
    check_type("train", bool, train)
    if score_maps and not train:
        raise TypeError("open_loader reads score_maps with train=True only")
    items, mode = None, "train" if train else "evaluate"
    if not isinstance(path, str | Path):
        if options.get("dataset"):
            raise UserError(NAMED_TWICE)
        items = DatasetItems(path, path := name_dataset(path))
    place = as_location(path)
    places = {"train" if train or options.get("val_fraction") else "val": place}
    # A run reads the list of its validation set from --val.
    kind, _, file = str(options.get("dataset")).partition("/")
    if not train and kind in ("list", "coco") and file:
        places = {"train": place, "val": Path(file)}
    data = DataOptions(
        **places,
        size=size,
        score_maps=as_location(score_maps) if score_maps else None,
        cache=Path(cache) if cache else None,
    )
    own, world = find_group()
    return Loader(
        with_options(data, **options),
        mode,
        batch=batch,
        seed=seed,
        rank=own if rank is None else rank,
        ranks=world if ranks is None else ranks,
        items=items,
        ranks_are_given=ranks is not None,
    )


def find_group() -> tuple[int, int]:
    """Return the rank and the world size of torch.distributed; 0 and 1 without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def as_location(place: str | Path) -> Path | ObjectURL:
    """Return a path, or the URL that text or a path means. UserError for another object."""
    check_type("path", str | os.PathLike, place)
    return find_url(Path(place)) or parse_location(str(place))


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The sections of a run's options that a step reads, with what a plain loop has."""

    labels: TargetRules = field(default_factory=lambda: TargetRules(smoothing=0.1))
    augment: Augment = field(default_factory=Augment)
    # MixToken, the default of a run, exchanges tokens inside the network, which only one with a
    # token head can do.
    mix: MixOptions = field(default_factory=lambda: MixOptions(mixtoken=False))
    objective: Objectives = field(default_factory=lambda: complete(Objectives()))


def build_step(
    loader: Loader,
    model: nn.Module,
    objective: str = "token-label",
    *,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Step:
    """Build the step of a training loop of your own: it augments batches and computes losses.

    Args:
        loader: where batches come from; its plan draws augmentation and mixing.
        model: what is trained, on its device. Build the step after wrapping the model, or call it
            with the wrapped one, e.g. that of DistributedDataParallel.
        objective: `token-label`, `relabel`, `ce`, or the name of one that you registered.
        dtype: of autocast around the model, e.g. torch.bfloat16; None: that of an autocast around
            the call.
        options: any option of `densefeed train RECIPE --help` on labels, augmentation, mixing and
            the objective, with underscores, e.g. mixtoken, token_weight, smoothing, rand_augment.

    Raises UserError for options that contradict each other, the data or the model or have no
    effect, TypeError for an unknown option.
    """
    if not isinstance(loader, Loader):
        raise TypeError(f"the loader is a {type(loader).__name__}; give one of open_loader")
    check_type("objective", str, objective)
    plain = with_options(StepOptions(), objective=objective)
    chosen = with_options(plain, **options)
    check_unused(chosen, plain)
    first = unwrap_model(model)
    shapes, name = loader.plan.shapes(), type(first).__name__
    # Only methods that wrap a model read the number of epochs.
    setting = Setting(chosen.objective, chosen.labels, chosen.mix, shapes, 1, name)
    built = build_objective(setting)
    check_pairs(loader.plan, chosen.mix)
    check_model(loader, first, built)
    return Step(loader, model, built, loader.data, chosen.augment, dtype)


def check_model(loader: Loader, model: nn.Module, objective: Objective) -> None:
    """Raise UserError for a model, data and an objective that do not fit together."""
    name, needed, classes = type(model).__name__, objective.needs_tokens, loader.num_classes
    if type(objective).wrap is not Objective.wrap:
        raise UserError(
            f"{objective.flag} trains modules beside the model; use densefeed train for it"
        )
    if objective.needs_score_maps and loader.score_maps is None:
        raise UserError(
            f"{loader.path} has no score maps, which {objective.name} needs; pack them, or give "
            "score_maps"
        )
    if getattr(model, "with_token_head", False) != needed:
        if not needed:
            raise UserError(
                f"{name} has a token head; create it with token_head=False, or leave out "
                "with_token_head"
            )
        raise UserError(
            f"{name} has no token head; create an lvvit, dhvt or t2t_vit model with "
            "token_head=True, train densefeed.with_token_head(model), or take the objective "
            "relabel, which any model can train with"
        )
    if getattr(model, "num_classes", classes) != classes:
        raise UserError(
            f"{name} has {model.num_classes} classes and {loader.path} {classes}; create it with "
            f"num_classes={classes}"
        )
    if isinstance(model, TokenHeadModel):
        model.check_shapes(loader.plan.shapes())
    elif objective.setting.mix.mixtoken and not isinstance(model, TokenTransformer):
        raise UserError(
            f"{name} cannot exchange tokens; leave out mixtoken, or take a model that can, e.g. "
            "lvvit_s"
        )
