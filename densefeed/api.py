"""The Python API: a loader of batches on a device, and losses for a training loop of your own."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from densefeed.objectives import build_objective
from densefeed.objectives.base import StepContext, step_loss
from densefeed.pipelines.augment.augmentation import Augmentation
from densefeed.pipelines.batch import Batch
from densefeed.pipelines.mixing import Mixing
from densefeed.pipelines.open import DataOptions, open_dataset
from densefeed.pipelines.targets import check_batch
from densefeed.system.errors import UserError
from densefeed.system.options import with_options
from densefeed.training.config import Config
from densefeed.training.step_inputs import PATCH


class TrainLoader:
    """Training batches of a dataset: random-resized crops, their Views, labels and score maps.

    Attributes:
        plan: the order, crops and flips of every epoch, a function of the seed.
        num_classes, class_names: of the dataset.
        score_maps: specification of the score maps, None for a dataset without.
    """

    def __init__(self, data: DataOptions, batch: int, seed: int) -> None:
        self.data, self._loader = data, open_dataset(data, "train", batch=batch, seed=seed)
        self.plan, self.score_maps = self._loader.plan, self._loader.score_maps
        self.num_classes, self.class_names = self._loader.num_classes, self._loader.class_names
        self._next_epoch = 0

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self._loader)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, from batch `start` on, on the CPU.

        `image` is uint8 `[N, H, W, 3]`; the last batch is padded with samples of weight 0. Raises
        UserError, which names the sample, for one that cannot be read.
        """
        return self._loader.batches(epoch, start)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of the next epoch, for trainers that count epochs themselves."""
        self._next_epoch += 1
        return self.epoch(self._next_epoch - 1)

    def close(self) -> None:
        """Stop the threads and close the files."""
        self._loader.close()

    def __enter__(self) -> "TrainLoader":
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
    **options: Any,
) -> TrainLoader:
    """Open a training set.

    Args:
        path: a .beton file, a pattern of such files, or a folder with `train/<class>/*.jpg`.
        batch: images per batch.
        size: side of the crops, pixels.
        seed: key of every random draw.
        score_maps: HDF5 file of score maps, for data that carries none.
        options: other options of the section `data`, e.g. threads, crop_scale, hflip, loader.

    Raises UserError for data that cannot be opened, TypeError for an unknown option.
    """
    kind = "folder" if Path(path).is_dir() else "ffcv"
    data = DataOptions(
        train=Path(path),
        size=size,
        loader=options.pop("loader", kind),
        score_maps=Path(score_maps) if score_maps else None,
    )
    return TrainLoader(with_options(data, **options) if options else data, batch, seed)


class TrainLoss:
    """The loss of a batch, for a training loop of your own; the device is the model's.

    Args:
        loader: where batches come from; its plan draws augmentation and mixing.
        options: any option of `python train.py RECIPE --help` on labels, augmentation, mixing and
            the objective, with underscores, e.g. mixtoken, token_weight, smoothing, rand_augment.

    Raises UserError for options that contradict each other or the data, TypeError for an unknown
    option.
    """

    objective: str

    def __init__(self, loader: TrainLoader, **options: Any) -> None:
        # A config needs a validation set, which nothing here reads.
        quiet = Config(data=replace(loader.data, val=loader.data.train))
        config = with_options(quiet, **{"mixtoken": False, **options, "objective": self.objective})
        self._config, self._loader = config, loader
        self._objective = build_objective(config.setting)
        if self._objective.needs_score_maps and loader.score_maps is None:
            raise UserError(
                f"{loader.data.train} has no score maps, which {type(self).__name__} needs; pack "
                "them, or give score_maps"
            )
        if type(self._objective).name != self.objective:
            raise UserError(
                "drloc and bootstrap train modules beside the model; use train.py for them"
            )
        self._mixing = Mixing(loader.plan, config.mix)
        self._augmentation = None  # built with the first batch

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of `batch` as `TrainLoader.epoch` yields it, float32 `[]`.

        The batch is moved to the model's device, augmented and mixed. Autocast around the call
        applies. Waits for the device on the first call only, which checks the score maps.
        """
        device = next(model.parameters()).device
        if self._augmentation is None:
            self._augmentation = self._prepare(model, batch).to(device)
        # The operations are chosen on the host; a batch of the loader is there already.
        host = batch.index.cpu(), batch.repeat.cpu()
        chosen = self._augmentation.choose(batch.epoch, *host, *batch.image.shape[1:3])
        augmented = self._augmentation(batch.to(device), chosen)
        size = augmented.image.shape[-1]
        grid = max(1, size // getattr(model, "patch_size", PATCH))
        mix = None
        if self._config.mix:
            mix = self._mixing.draw(batch.epoch, batch.step, size, grid).to(device)
        context = StepContext(self._loader.score_maps, grid, mix)
        enabled = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if enabled else None
        return step_loss(self._objective, model, augmented, context, dtype)

    def _prepare(self, model: nn.Module, batch: Batch) -> Augmentation:
        """Check the first batch, and build the augmentation with the model's mean and deviation."""
        if self._objective.needs_tokens and not getattr(model, "with_token_head", False):
            raise UserError(
                f"{type(model).__name__} has no token head; create it with token_head=True"
            )
        if self._objective.needs_score_maps:
            where = f"the score maps of {self._loader.data.train}"
            check_batch(batch.to("cpu"), self._loader.score_maps, where)
        mean, std = model.pretrained_cfg["mean"], model.pretrained_cfg["std"]
        return Augmentation(self._loader.plan, self._config.augment, mean, std)


class TokenLabeling(TrainLoss):
    """Token Labeling (arXiv 2104.10858): a dense label for every token."""

    objective = "token-label"


class ReLabel(TrainLoss):
    """ReLabel (arXiv 2101.05022): the dense label of the crop, for any classifier."""

    objective = "relabel"


class CrossEntropy(TrainLoss):
    """Cross entropy with the image's label."""

    objective = "ce"
