"""Step: turns a batch into a loss, for train.py and for a training loop of your own."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from timm.utils import unwrap_model
from torch import Tensor, nn

from densefeed.models.token_head import TokenHeadModel, read_stride
from densefeed.models.token_transformer import FUSED_FROM
from densefeed.models.wrapped_model import get_networks
from densefeed.objectives.base import Objective, StepContext, step_loss
from densefeed.objectives.token_labeling import TokenLabeling
from densefeed.pipelines.augment.augmentation import Augmentation, augment_batches
from densefeed.pipelines.augment.settings import Augment
from densefeed.pipelines.batch import Batch
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.mixing import Mixing
from densefeed.pipelines.open import DataOptions
from densefeed.pipelines.resident import ResidentMaps
from densefeed.pipelines.shapes import token_grid
from densefeed.pipelines.targets import TargetRules, check_batch, sparse_targets
from densefeed.system.errors import UserError
from densefeed.system.terminal import warn

# Patch size in pixels for models without `patch_size`: the usual one of a vision transformer.
PATCH = 16
# A run warns if its maps name the image label in a smaller share of the first crops. A batch of
# fewer crops is not judged.
LEAST_RIGHT, LEAST_CROPS = 0.5, 32


def read_patch_size(model: nn.Module, objective: Objective) -> int:
    """Return the pixels along a token of a model, PATCH for one that has no tokens.

    Tokens of a model without a token head of its own are the cells of its last features. UserError
    if the objective needs tokens and the model does not state a whole number.
    """
    if objective.needs_tokens and not getattr(model, "with_token_head", False):
        return read_stride(model)
    patch = getattr(model, "patch_size", None)
    if type(patch) is int and patch > 0:
        return patch
    if objective.needs_tokens:
        raise UserError(
            f"patch_size of {type(model).__name__} is {patch!r}, and {objective.flag} needs the "
            "whole number of pixels along a token; set it as docs/extending.md describes"
        )
    return PATCH


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


class Step:
    """The batches of a loader, augmented on the device of the model, and their losses.

    Batches and losses are pure functions of epoch and step. All draws but those of drop-path and
    dropout are the plan's.

    Args:
        loader: where batches come from.
        model: what is trained, on its device. Mean, deviation and patch size are those of its first
            network. It may lie in DistributedDataParallel.
        data: says whether score maps are on the device, and where they came from.
        augment: the operations on images.
        dtype: of autocast; None: that of an autocast around the call, if there is one.
        compute: `step_loss`, or its compiled form.

    Raises UserError for a model that does not say how its input is normalized, and for a loader
    that cannot augment images before they are cropped where `augment` asks for it.
    """

    def __init__(
        self,
        loader: ThreadedLoader,
        model: nn.Module,
        objective: Objective,
        data: DataOptions,
        augment: Augment,
        dtype: torch.dtype | None = None,
        compute: Callable[..., Tensor] = step_loss,
    ) -> None:
        self.loader, self.model, self.objective, self.dtype = loader, model, objective, dtype
        self._compute, self._maps_name, self._is_checked = compute, data.maps_name, False
        networks, mix = get_networks(unwrap_model(model)), objective.setting.mix
        first = networks[0]
        # Under autocast a convolution would round the images to its dtype anyway. MixUp, and
        # networks that begin with a norm, compute with them before.
        exact = mix.mixup or getattr(first, "exact_images", False)
        image_dtype = (None if exact else dtype) or torch.float32
        # A form of a stem that is under test, see models/kernels/four_channels.py.
        channels = {getattr(network, "image_channels", 3) for network in networks}
        if len(channels) > 1:
            raise UserError(
                "some networks of this training want images of four channels and others of three; "
                "leave four-channels out of DENSEFEED_LEVERS"
            )
        published = objective.setting.labels.geometry == "published"
        options = {"warps_maps": published, "channels": channels.pop()}
        self.augmentation = Augmentation(
            loader.plan, augment, *read_colors(first), image_dtype, **options
        ).to(self._device)
        if self.augmentation.whole and not getattr(loader, "prepares", False):
            raise UserError(
                "this loader does not augment whole images; give --loader folder or ffcv, or "
                "--no-augment-before-crop"
            )
        if objective.needs_masks and self.augmentation.whole and published:
            raise UserError(
                "--augment-before-crop with --geometry published warps score maps, but no masks; "
                "give --geometry aligned"
            )
        self._mixing = Mixing(loader.plan, mix)
        resident = data.maps_on_device and objective.needs_score_maps
        self._resident = ResidentMaps(loader.source, self._device) if resident else None
        # A network without tokens has a grid too: the regions that a mixed image shows.
        self._patch = read_patch_size(first, objective)

    @property
    def _device(self) -> torch.device:
        # Lightning moves a model after it was built.
        return next(self.model.parameters()).device

    def batches(
        self,
        epoch: int,
        start: int = 0,
        through: Callable[[Iterator[Batch]], Iterator[Batch]] = iter,
    ) -> Iterator[Batch]:
        """Yield the batches of an epoch from batch `start` on, on the device and augmented.

        A GPU gets the next batch while the step of this one runs. `through` receives the loader's
        iterator, e.g. to measure how long it takes. Score maps are checked in the first batch,
        which waits for the device; UserError for maps that no step can use.
        """
        augmentation = self.augmentation.to(self._device)
        # A loader of one's own need not have this argument.
        more = {"prepare": augmentation.whole} if augmentation.whole else {}
        batches = through(self.loader.batches(epoch, start, **more))
        for batch in augment_batches(batches, augmentation, self._device):
            yield self._complete(batch)

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a batch, float32 `[]`, without waiting after the first.

        The batch is one of `batches`, or one of the loader, which is copied and augmented here.
        `model` may be wrapped. The mean over ranks is the mean over the images of the global batch;
        tokens and pixels are averaged over those of the rank that have a label. UserError for a
        model in evaluation mode whose tokens are needed.
        """
        if batch.image.dtype == torch.uint8:
            batch = self._augment(batch)
        (loss,) = self.losses(model, batch)
        # The caller's generator is left as it is.
        loss = loss._replace(seed=None)
        headed = unwrap_model(model)
        fits = isinstance(self.objective, TokenLabeling) and isinstance(headed, TokenHeadModel)
        if not fits or headed.num_classes < FUSED_FROM:
            return loss()
        # For this call alone: in other loops the model gives logits.
        before, headed.fused_head = headed.fused_head, True
        try:
            return loss()
        finally:
            headed.fused_head = before

    def losses(self, network: nn.Module, batch: Batch) -> list[PartLoss]:
        """Return for each part of one of `batches` a function that computes its loss.

        The parts are the forward passes of the plan. Losses are weighted so that their mean is the
        loss of the batch.
        """
        objective, plan, device = self.objective, self.loader.plan, batch.image.device
        if objective.needs_tokens and not network.training:
            raise UserError(
                f"{type(unwrap_model(network)).__name__} gives no logits of tokens in evaluation "
                "mode; call model.train() first"
            )
        if objective.needs_score_maps and batch.map_class is None:
            raise UserError("the batch has no score maps; take it from a loader with train=True")
        if objective.needs_masks and batch.mask is None:
            raise UserError(
                "the batch has no masks, which densefeed train reads from --dataset masks; in a "
                "loop of your own use MaskFolder and sample_masks (docs/reference/masks.md)"
            )
        epoch, at, shape = batch.epoch, batch.step, tuple(batch.image.shape[2:])
        grid, options = token_grid(shape, self._patch), objective.setting.mix
        mix = self._mixing.draw(epoch, at, shape, grid).to(device) if options else None
        dtype = self.dtype
        # step_loss sets autocast itself and would otherwise turn off the caller's.
        if dtype is None and torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)

        def compute(part: Batch, context: StepContext, weight: float) -> Tensor:
            loss = self._compute(objective, network, part, context, dtype)
            # A factor of 1 would be two launches on a GPU, here and in the backward pass.
            return loss if weight == 1 else loss * weight

        weights, losses = plan.part_weights(at), []
        # Compiled steps specialize on Python numbers, so a number that changes with the batch would
        # recompile every step.
        for number, part in enumerate(batch._replace(epoch=0, step=0).split(len(weights))):
            inputs = objective.inputs(plan, epoch, part)
            context = StepContext(self.loader.score_maps, grid, mix, inputs)
            seed = plan.step_seed(epoch, at, number)
            losses.append(PartLoss(compute, (part, context, weights[number]), seed))
        return losses

    def check_sync(self, batch: Batch) -> None:
        """Raise UserError, which names the sample, for score maps that no step can use.

        Warn of maps of other classes than the labels, and of masks without any labeled pixel.
        """
        alone = self.objective.needs_masks is True and not self.objective.needs_score_maps
        if alone and not (batch.mask >= 0).any():
            warn(
                "no pixel of the first batch has a class; check that ids of masks are those "
                "of their layout (docs/reference/masks.md)"
            )
        if self.objective.needs_score_maps:
            # On the CPU, because its branches on values would each wait for the device.
            where = f"the score maps of {self._maps_name}"
            batch = batch.to("cpu")
            check_batch(batch, self.loader.score_maps, where)
            # The label of an image with a mask says little.
            if not self.objective.needs_masks:
                self._warn_of_labels(batch, where)

    def _warn_of_labels(self, batch: Batch, where: str) -> None:
        """Warn if the maps name another class than the image label in most crops of a batch."""
        targets = sparse_targets(batch, self.loader.score_maps, 1, TargetRules())
        best = targets.palette.gather(1, targets.extra[:, 0].argmax(1, keepdim=True))[:, 0]
        share = float((best == batch.label).float().mean())
        if share < LEAST_RIGHT and len(best) >= LEAST_CROPS:
            warn(
                f"{where} name the image label in {100 * share:.0f} % of the first crops; check "
                "their class list with densefeed audit, or train a better teacher"
            )

    def _augment(self, batch: Batch) -> Batch:
        """Return a batch of the loader on the device, augmented."""
        if self.augmentation.whole:
            raise UserError(
                "augment_before_crop augments images before they are cropped; take batches from "
                "the step, not from the loader"
            )
        augmentation = self.augmentation.to(self._device)
        # The operations are chosen on the host; a batch of the loader is there already.
        host = batch.index.cpu(), batch.repeat.cpu()
        choice = augmentation.choose(batch.epoch, *host, *batch.image.shape[1:3])
        return self._complete(augmentation(batch.to(self._device), choice))

    def _complete(self, batch: Batch) -> Batch:
        """Add the score maps that are on the device; check those of the first batch."""
        whole = self._resident(batch) if self._resident else batch
        if not self._is_checked:
            self.check_sync(whole)
            self._is_checked = True
        return whole


def read_colors(model: nn.Module) -> tuple[list[float], list[float]]:
    """Return mean and deviation of the input of a model; UserError if it does not state them."""
    known = getattr(model, "pretrained_cfg", None)
    try:
        mean, std = np.array([known["mean"], known["std"]], float).reshape(2, 3)
    except (TypeError, KeyError, ValueError):
        mean = std = np.zeros(3)
    if not np.all((mean >= 0) & (mean <= 1) & (std > 0) & (std <= 1)):
        raise UserError(
            f"{type(model).__name__} does not say how its input is normalized; set "
            'model.pretrained_cfg = {"mean": (...), "std": (...)}, each three numbers from 0 to 1, '
            "the deviations above 0"
        )
    return mean.tolist(), std.tolist()
