"""Feed: what every step is fed with, and the loss it is to lower; a pure function of epoch and
step.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from densefeed.pipelines.augment.augmentation import Augmentation, augment_batches
from densefeed.pipelines.batch import Batch, Loader
from densefeed.pipelines.pairs import draw_pairs
from densefeed.pipelines.resident import ResidentMaps
from densefeed.pipelines.targets import TargetRules, check_batch
from densefeed.training.agent import feature_weight_factor
from densefeed.training.compile import compile_step, get_networks
from densefeed.training.config import Config
from densefeed.training.objective import augment_settings, localization_weight, mixing_settings
from densefeed.training.ranks import Ranks


class StepInputs:
    """This rank's batches on its device, augmented, in parts of `config.microbatch` images; and the
    losses of these parts.

    Args:
        trained: `Student.trained`: the blocks of its networks are compiled if `config.compile` says
            so; mean, deviation and patch size are those of the first, the model.
        dtype: of autocast, None for none.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        loader: Loader,
        trained: nn.Module,
        dtype: torch.dtype | None,
    ) -> None:
        self.config, self.ranks, self.loader, self.dtype = config, ranks, loader, dtype
        model = get_networks(trained)[0]
        augment, mean, std = (
            augment_settings(config),
            model.pretrained_cfg["mean"],
            model.pretrained_cfg["std"],
        )
        self.mixing = mixing_settings(config, loader.plan)
        self.augmentation = Augmentation(loader.plan, augment, mean, std).to(ranks.device)
        self.rules = TargetRules(
            config.smoothing,
            config.temperature,
            config.outside,
            config.geometry,
            sheared=augment.shears,
        )
        resident = config.labels_on_device and config.objective != "ce"
        self.resident = ResidentMaps(loader.source, ranks.device) if resident else None
        self.loss_of, self.patch = (
            compile_step(config.compile, trained),
            getattr(model, "patch_size", 16),
        )

    def batches(
        self, epoch: int, start: int, through: Callable[[Iterator[Batch]], Iterator[Batch]] = iter
    ) -> Iterator[list[Batch]]:
        """The parts of each batch of an epoch from batch `start` on; `through` sees what the loader
        gives, as it comes.
        """
        count = self.config.batch // self.ranks.size // self.config.microbatch
        batches = through(self.loader.batches(epoch, start))
        for batch in augment_batches(batches, self.augmentation, epoch, self.ranks.device):
            yield split_batch(self.resident(batch) if self.resident else batch, count)

    def losses(
        self, network: nn.Module, parts: list[Batch], epoch: int, at: int
    ) -> list[Callable[[], Tensor]]:
        """For each part of the batch `at` of an epoch what computes its loss, weighted so that
        their mean is the batch's.
        """
        plan, size = self.loader.plan, self.loader.plan.size(epoch)
        # Where a network has no tokens of its own, a grid still says what the regions of a mixed
        # image show.
        grid, weights = max(1, size // self.patch), plan.part_weights(at)
        mix = self.mixing.draw(epoch, at, size, grid).to(self.ranks.device) if self.mixing else None
        share = feature_weight_factor(self.config, epoch)
        share = None if share is None else share.to(self.ranks.device, non_blocking=True)

        def compute(number: int) -> Tensor:
            # Drop-path is the only draw of the device; seeding it by step and part keeps a resumed
            # run equal.
            torch.manual_seed(plan.step_seed(epoch, at, number))
            config, part, labels, pairs = self.config, parts[number], self.loader.score_maps, None
            if config.drloc != "none":
                pairs = draw_pairs(
                    plan, epoch, part, config.drloc_pairs, localization_weight(config, epoch)
                )
            loss = self.loss_of(
                config,
                network,
                part,
                labels,
                self.rules,
                grid,
                mix,
                self.dtype,
                pairs=pairs,
                share=share,
            )
            return loss * weights[number]

        return [partial(compute, number) for number in range(len(parts))]

    def check_sync(self, parts: list[Batch]) -> None:
        """UserError, which names the sample, if these parts carry score maps that no step can use;
        waits for the device.
        """
        if self.config.objective != "ce":
            for part in parts:
                whole = Batch(*(field.cpu() for field in part))
                check_batch(
                    whole,
                    self.loader.score_maps,
                    f"the score maps of {self.config.labels or self.config.data}",
                )


def split_batch(batch: Batch, count: int) -> list[Batch]:
    """A batch cut into `count` equal parts, row by row."""
    fields = [[None] * count if field is None else field.chunk(count) for field in batch]
    return [Batch(*part) for part in zip(*fields, strict=True)]
