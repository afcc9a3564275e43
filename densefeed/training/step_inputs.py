"""StepInputs: batches and losses for each step, a pure function of epoch and step."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from densefeed.models.drop_path import skip_dropped
from densefeed.objectives.base import Objective, StepContext
from densefeed.pipelines.augment.augmentation import Augmentation, augment_batches, load_crops
from densefeed.pipelines.batch import Batch
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.mixing import Mixing
from densefeed.pipelines.resident import ResidentMaps
from densefeed.pipelines.shapes import token_grid
from densefeed.pipelines.targets import check_batch
from densefeed.training.compile import compile_step, get_networks
from densefeed.training.config import Config
from densefeed.training.ranks import Ranks

# Patch size in pixels for models without `patch_size`: the usual one of a vision transformer.
PATCH = 16


class PartLoss(NamedTuple):
    """A function that computes the loss of a part of a batch, float32 `[]`."""

    compute: Callable[[Batch, StepContext, float], Tensor]
    data: tuple[Batch, StepContext, float]  # its arguments; the number is the part's weight
    seed: int | None  # of torch's generator; None leaves the generator as it is

    def __call__(self) -> Tensor:
        # Drop-path and dropout are the only draws from torch's generator. Seeding it by step and
        # part makes a resumed run equal.
        if self.seed is not None:
            torch.manual_seed(self.seed)
        return self.compute(*self.data)


class StepInputs:
    """The augmented batches of one rank, in parts of `microbatch` images, and their losses.

    Args:
        trainable: what is trained. The blocks of its networks are compiled if the config says so.
            Mean, deviation and patch size are those of its first network, the model.
        dtype: of autocast, None for none.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        loader: ThreadedLoader,
        objective: Objective,
        trainable: nn.Module,
        dtype: torch.dtype | None,
    ) -> None:
        self.config, self.ranks, self.loader = config, ranks, loader
        self.objective, self.dtype = objective, dtype
        model = get_networks(trainable)[0]
        mean, std = model.pretrained_cfg["mean"], model.pretrained_cfg["std"]
        # Under autocast a convolution would round the images to its dtype anyway. MixUp, and
        # networks that begin with a norm, compute with them before.
        exact = config.mix.mixup or getattr(model, "exact_images", False)
        image_dtype = (None if exact else dtype) or torch.float32
        published = config.labels.geometry == "published"
        augmentation = Augmentation(
            loader.plan, config.augment, mean, std, image_dtype, warps_maps=published
        )
        self.augmentation = augmentation.to(ranks.device)
        self.mixing = Mixing(loader.plan, config.mix)
        resident = config.data.maps_on_device and objective.needs_score_maps
        self.resident = ResidentMaps(loader.source, ranks.device) if resident else None
        self.patch = getattr(model, "patch_size", PATCH)
        options, compile = config.model, config.run.compile
        # The number of kept samples changes from step to step: a GPU would wait for it, and a
        # compiler would compile each.
        eager = ranks.device.type == "cpu" and compile == "never"
        skip_dropped(trainable, eager and options.drop_path_form == "auto")
        self.step_loss = compile_step(compile, trainable)

    def batches(
        self, epoch: int, start: int, through: Callable[[Iterator[Batch]], Iterator[Batch]] = iter
    ) -> Iterator[list[Batch]]:
        """Yield the parts of each batch of an epoch from batch `start` on.

        `through` receives the loader's iterator, e.g. to measure how long it takes.
        """
        count = self.config.optim.batch // self.ranks.size // self.config.optim.microbatch
        batches = through(load_crops(self.loader, self.augmentation, epoch, start))
        for batch in augment_batches(batches, self.augmentation, self.ranks.device):
            whole = self.resident(batch) if self.resident else batch
            # Compiled steps specialize on Python numbers, so a number that changes with the batch
            # would recompile every step.
            yield whole._replace(epoch=0, step=0).split(count)

    def losses(self, network: nn.Module, parts: list[Batch], epoch: int, at: int) -> list[PartLoss]:
        """Return for each part of batch `at` of an epoch a function that computes its loss.

        Losses are weighted so that their mean is the loss of the batch.
        """
        plan, device, shape = self.loader.plan, self.ranks.device, self.loader.plan.shape(epoch, at)
        weights = plan.part_weights(at)
        # A network without tokens has a grid too: the regions that a mixed image shows.
        grid = token_grid(shape, self.patch)
        mix = self.mixing.draw(epoch, at, shape, grid).to(device) if self.config.mix else None

        def compute(part: Batch, context: StepContext, weight: float) -> Tensor:
            loss = self.step_loss(self.objective, network, part, context, self.dtype)
            # A factor of 1 would be two launches on a GPU, here and in the backward pass.
            return loss if weight == 1 else loss * weight

        losses = []
        for number, part in enumerate(parts):
            inputs = self.objective.inputs(plan, epoch, part)
            context = StepContext(self.loader.score_maps, grid, mix, inputs)
            seed = plan.step_seed(epoch, at, number)
            losses.append(PartLoss(compute, (part, context, weights[number]), seed))
        return losses

    def check_sync(self, parts: list[Batch]) -> None:
        """Raise UserError, which names the sample, for score maps that no step can use."""
        if self.objective.needs_score_maps:
            data = self.config.data
            where = f"the score maps of {data.score_maps or data.train}"
            for part in parts:
                # On the CPU, because its branches on values would each wait for the device.
                check_batch(part.to("cpu"), self.loader.score_maps, where)
