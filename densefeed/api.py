"""The Python API: a loader of batches on a device, and losses for a training loop of your own."""

from collections.abc import Iterator
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.utils import unwrap_model
from torch import Tensor, nn

from densefeed.models.token_transformer import TokenTransformer
from densefeed.objectives import build_objective
from densefeed.objectives.base import StepContext, step_loss
from densefeed.pipelines.augment.augmentation import Augmentation
from densefeed.pipelines.batch import Batch
from densefeed.pipelines.mixing import Mixing
from densefeed.pipelines.open import DataOptions, Mode, open_dataset
from densefeed.pipelines.shapes import token_grid
from densefeed.pipelines.targets import check_batch
from densefeed.system.errors import UserError
from densefeed.system.object_store import ObjectURL, find_url, parse_location
from densefeed.system.options import check_type, leaves, with_options
from densefeed.training.config import Config, check_unused
from densefeed.training.step_inputs import PATCH


class Loader:
    """Batches of a dataset: crops, their Views, labels and, in training, score maps.

    Attributes:
        plan: the order, crops and flips of every epoch, a function of the seed.
        num_classes, class_names: of the dataset.
        score_maps: specification of the score maps, None for a dataset without.
    """

    def __init__(self, data: DataOptions, mode: Mode, **how: int) -> None:
        self.data, self._loader = data, open_dataset(data, mode, **how)
        self.plan, self.score_maps = self._loader.plan, self._loader.score_maps
        self.num_classes, self.class_names = self._loader.num_classes, self._loader.class_names
        self._next_epoch = 0

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return len(self._loader)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, from batch `start` on, on the CPU.

        `image` is uint8 `[N, H, W, 3]`; the last batch is padded with samples of weight 0. Raises
        UserError, which names the sample, for one that cannot be read, TypeError for a number that
        is not whole, ValueError for a negative epoch or a `start` beyond the last batch.
        """
        epoch, start = index(epoch), index(start)
        if epoch < 0 or not 0 <= start <= len(self):
            raise ValueError(
                f"epoch {epoch} from batch {start}: both count from 0, and an epoch has "
                f"{len(self)} batches"
            )
        return self._loader.batches(epoch, start)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of the next epoch, for trainers that count epochs themselves."""
        self._next_epoch += 1
        return self.epoch(self._next_epoch - 1)

    def close(self) -> None:
        """Stop the threads and close the files."""
        self._loader.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_loader(
    path: str | Path,
    *,
    batch: int,
    size: int = 224,
    seed: int = 0,
    score_maps: str | Path | None = None,
    cache: str | Path | None = None,
    train: bool = True,
    rank: int = 0,
    ranks: int = 1,
    **options: Any,
) -> Loader:
    """Open a training set, or a validation set with `train=False`.

    Args:
        path: a .beton file or a pattern of such files, on a disk or as `s3://BUCKET/train.beton`
            in object storage, or a folder with `train/<class>/*.jpg` (or `val/...`).
        batch: images per batch, all ranks together.
        size: side of the crops, pixels.
        seed: key of every random draw.
        score_maps: HDF5 file of score maps, for data that carries none; or a folder of shards, on a
            disk or in object storage.
        cache: folder of the local copies of data in object storage.
        train: random-resized crops in random order; else center crops, each image once, in order.
        rank, ranks: this process and the number of processes, which share every batch.
        options: other options of the section `data`, e.g. threads, crop_scale, hflip, loader.

    Raises UserError for data that cannot be opened and values that do not fit, TypeError for an
    unknown option or `score_maps` without `train`.
    """
    # `path` and `train` stand for the first two; the last is for train.py, which holds the maps.
    if foreign := {"data", "val", "maps_on_device"} & options.keys():
        raise TypeError(f"open_loader has no option {min(foreign)!r}")
    check_type("train", bool, train)
    if score_maps and not train:
        raise TypeError("open_loader reads score_maps with train=True only")
    place = as_location(path)
    data = DataOptions(
        # Loader's mode selects one of the two, so both can be the same path.
        train=place,
        val=place,
        size=size,
        loader="folder" if isinstance(place, Path) and place.is_dir() else "ffcv",
        score_maps=as_location(score_maps) if score_maps else None,
        cache=Path(cache) if cache else None,
    )
    mode = "train" if train else "evaluate"
    return Loader(
        with_options(data, **options), mode, batch=batch, seed=seed, rank=rank, ranks=ranks
    )


def as_location(place: str | Path) -> Path | ObjectURL:
    """Return a path, or the URL that text or a path means."""
    return find_url(Path(place)) or parse_location(str(place))


class TrainLoss:
    """The loss of a batch, for a training loop of your own; the device is the model's.

    Args:
        loader: where batches come from; its plan draws augmentation and mixing. A loss serves one
            loader and one model.
        options: any option of `python train.py RECIPE --help` on labels, augmentation, mixing and
            the objective, with underscores, e.g. mixtoken, token_weight, smoothing, rand_augment.

    Raises UserError for options that contradict each other or the data or have no effect, TypeError
    for an unknown option.
    """

    objective: str

    def __init__(self, loader: Loader, **options: Any) -> None:
        if not isinstance(loader, Loader):
            raise TypeError(f"the loader is a {type(loader).__name__}; give one of open_loader")
        self._config, self._loader = make_config(loader.data, self.objective, options), loader
        self._objective = build_objective(self._config.setting)
        if self._objective.needs_score_maps and loader.score_maps is None:
            raise UserError(
                f"{loader.data.train} has no score maps, which {type(self).__name__} needs; pack "
                "them, or give score_maps"
            )
        self._mixing = Mixing(loader.plan, self._config.mix)
        # Built with the first batch, because mean and deviation are those of the model.
        self._augmentation = None

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of `batch` as `Loader.epoch` yields it, float32 `[]`.

        `model` may be wrapped, by DistributedDataParallel for example. The batch is moved to the
        model's device, augmented and mixed. Autocast around the call applies. Waits for the device
        on the first call only, which checks the score maps.
        """
        # DDP hides the model's patch_size and pretrained_cfg.
        device, network = next(model.parameters()).device, unwrap_model(model)
        self._check(network, batch)
        augmented = self._augment(network, batch, device)
        size = tuple(augmented.image.shape[2:])
        # A CNN has a grid too: the regions that a mixed image shows.
        grid = token_grid(size, getattr(network, "patch_size", PATCH))
        mix = None
        if self._config.mix:
            mix = self._mixing.draw(batch.epoch, batch.step, size, grid).to(device)
        context = StepContext(self._loader.score_maps, grid, mix)
        # step_loss sets autocast itself and would otherwise turn off the caller's.
        enabled = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if enabled else None
        loss = step_loss(self._objective, model, augmented, context, dtype)
        # The last batch is padded, so ranks may have different numbers of real samples. With this
        # weight, the mean over ranks is the mean over the batch. It is 1 in all other batches.
        return loss * self._loader.plan.part_weights(batch.step)[0]

    def _check(self, model: nn.Module, batch: Batch) -> None:
        """Raise UserError for a model or a batch that does not fit, without waiting."""
        needed, classes = self._objective.needs_tokens, self._loader.num_classes
        if getattr(model, "with_token_head", False) != needed:
            has = "has no" if needed else "has a"
            raise UserError(
                f"{type(model).__name__} {has} token head; create it with token_head={needed}"
            )
        if needed and not model.training:
            raise UserError(
                f"{type(model).__name__} gives no logits of tokens in evaluation mode; "
                "call model.train() first"
            )
        if getattr(model, "num_classes", classes) != classes:
            raise UserError(
                f"{type(model).__name__} has {model.num_classes} classes and "
                f"{self._loader.data.train} {classes}; create it with num_classes={classes}"
            )
        if self._objective.needs_score_maps and batch.map_class is None:
            raise UserError("the batch has no score maps; take it from a loader with train=True")
        if self._config.mix.mixtoken and not isinstance(model, TokenTransformer):
            raise UserError(
                f"{type(model).__name__} cannot exchange tokens; leave out mixtoken, or take a "
                "model that can, e.g. lvvit_s"
            )

    def _augment(self, model: nn.Module, batch: Batch, device: torch.device) -> Batch:
        """Return the batch on the device, augmented and normalized."""
        if self._augmentation is None:
            self._augmentation = self._prepare(model, batch).to(device)
        # The operations are chosen on the host; a batch of the loader is there already.
        host = batch.index.cpu(), batch.repeat.cpu()
        chosen = self._augmentation.choose(batch.epoch, *host, *batch.image.shape[1:3])
        return self._augmentation(batch.to(device), chosen)

    def _prepare(self, model: nn.Module, batch: Batch) -> Augmentation:
        """Check the first batch, and build the augmentation with the model's mean and deviation."""
        if self._objective.needs_score_maps:
            where = f"the score maps of {self._loader.data.train}"
            check_batch(batch.to("cpu"), self._loader.score_maps, where)
        known = getattr(model, "pretrained_cfg", None)
        try:
            mean, std = np.array([known["mean"], known["std"]], float).reshape(2, 3)
        except (TypeError, KeyError, ValueError):
            mean = std = np.zeros(3)
        if not np.all((mean >= 0) & (mean <= 1) & (std > 0) & (std <= 1)):
            raise UserError(
                f"{type(model).__name__} does not say how its input is normalized; set "
                'model.pretrained_cfg = {"mean": (...), "std": (...)}, each three numbers from 0 '
                "to 1, the deviations above 0"
            )
        return Augmentation(self._loader.plan, self._config.augment, mean.tolist(), std.tolist())


def make_config(data: DataOptions, objective: str, options: dict[str, Any]) -> Config:
    """Return the config of a loss. Raises UserError and TypeError as TrainLoss does."""
    quiet = Config(data=data)
    # Options of a run that nothing here reads.
    others = {"objective"}.union(
        *(dict(leaves(part)) for part in (quiet.data, quiet.model, quiet.optim, quiet.run))
    )
    if foreign := sorted(others & options.keys()):
        raise TypeError(f"{foreign[0]!r} is no option of a loss")
    # MixToken, the default of a run, exchanges tokens inside the network, which only a
    # TokenTransformer can do.
    plain = with_options(quiet, mixtoken=False, objective=objective)
    config = with_options(plain, **options)
    check_unused(config, plain)
    if {config.objective.drloc.variant, config.objective.bootstrap.mode} != {"none"}:
        raise UserError("drloc and bootstrap train modules beside the model; use train.py for them")
    if config.augment.augment_before_crop:
        raise UserError(
            "augment_before_crop needs images before they are cropped, and a loss gets crops; use "
            "train.py for it"
        )
    return config


class TokenLabeling(TrainLoss):
    """Token Labeling (arXiv 2104.10858): a dense label for every token."""

    objective = "token-label"


class ReLabel(TrainLoss):
    """ReLabel (arXiv 2101.05022): the dense label of the crop, for any classifier."""

    objective = "relabel"


class CrossEntropy(TrainLoss):
    """Cross entropy with the image's label."""

    objective = "ce"
