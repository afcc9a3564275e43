"""Objective: what a run trains for. One method is one class, in one file.

An objective defines its inputs (score maps, a head on every token), its additions to the model, its
options, and the loss of a step. A `Method` does so around another objective. The training loop
depends on nothing else of a method. `register` adds one; docs/extending.md has examples.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from densefeed.models.token_head import with_token_head
from densefeed.models.token_transformer import FUSED_FROM
from densefeed.models.wrapped_model import WrappedModel
from densefeed.pipelines.augment.augmentation import Normalize
from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.loader import Masks, ThreadedLoader
from densefeed.pipelines.mixing import (
    Mix,
    MixOptions,
    box_map,
    label_share,
    mean_target,
    mix_images,
    mix_targets,
    share_map,
)
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.shapes import Grid, Shape
from densefeed.pipelines.targets import (
    SparseTargets,
    TargetRules,
    mix_ground_truth,
    palette_maps,
    sparse_targets,
)
from densefeed.system.errors import UserError
from densefeed.system.options import Options, leaves

Place = Callable[[nn.Module], nn.Module]


class Setting(NamedTuple):
    """The parts of a run that an objective depends on."""

    options: Any  # the run's section `objective`
    labels: TargetRules
    mix: MixOptions
    shapes: list[Shape]  # heights and widths of the network's input in training, pixels
    epochs: int  # of the whole run
    model: str  # its name, for messages


class StepContext(NamedTuple):
    """What the loss of a step reads beside the batch."""

    score_maps: ScoreMapSpec | None
    grid: Grid  # of tokens: rows and columns, or the side of a square
    mix: Mix | None  # on the batch's device
    inputs: Any = None  # what `Objective.inputs` returned
    mask: Tensor | None = None  # `token_mask` of `mix`, where the caller has it


def token_mask(mix: Mix, grid: Grid) -> Tensor:
    """Mark the tokens that MixToken takes from the mixing partner, bool `[R, C]`."""
    # MixToken's box has its sides between tokens, so every cell of the map is 0 or 1.
    return box_map(mix, grid) > 0.5


class Evaluation:
    """How a model is evaluated: sums over this rank's images, and metrics of all ranks' sums.

    Class attributes:
        rated: the metric, from 0 to 1, by which `best.pt` is chosen.
    """

    rated: str

    def sum(
        self,
        model: nn.Module,
        loader: ThreadedLoader,
        normalize: Normalize,
        device: torch.device,
        dtype: torch.dtype | None,
        advance: Callable[[int, str], None],
    ) -> Tensor:
        """Return sums over the images of a validation set, float64 `[n]`, on the device.

        The model is put in evaluation mode. `normalize` takes uint8 images `[N, H, W, 3]`, `dtype`
        is that of autocast or None, and `advance(0, text)` shows the progress.
        """
        raise NotImplementedError

    def mean_sync(self, sums: Tensor) -> Any:
        """Return the metrics of all ranks' sums, with the members of `evaluation.Metrics`."""
        raise NotImplementedError


class Objective:
    """Base of all objectives: the loss of the class token alone.

    Class attributes:
        name: what `--objective` calls it; of a method the option that switches it on.
        needs_score_maps: whether batches must carry score maps.
        needs_masks: whether batches must carry hard masks; "instances": maps of objects.
        waits: whether shapes in a step depend on values: it waits for the device, and can neither
            be compiled nor counted.
        needs_tokens: whether the model must have a head on every token.
        mixes_labels: whether its loss mixes labels as the images are mixed; else a run that mixes
            is refused.
        adds_network: whether it trains a network beside the model from scratch.
        own: the class of its own options, which become options of every run, if it has any. An
            instance has those of its run as the attribute `options`.
        section: the name of these options in config.json; by default `name`, with underscores.
        evaluation: how its models are evaluated; None: by the label of each image, top-1. An
            instance may set its own.
        unused: options that it does not read, by name, and what does (`Options.unused`); by
            default, and unless a class sets another dictionary, label smoothing.
    """

    name: str
    needs_score_maps: bool = False
    needs_masks: Masks = False
    waits: bool = False
    needs_tokens: bool = False
    mixes_labels: bool = False
    adds_network: bool = False
    own: type[Options] | None = None
    section: str = ""
    evaluation: Evaluation | None = None
    unused: ClassVar[dict[str, str]] = {"smoothing": "--objective ce, relabel or token-label"}

    def __init__(self, setting: Setting) -> None:
        self.setting, self.options = setting, self.read_options(setting.options)

    @classmethod
    def section_name(cls) -> str:
        """Return the name of its options in the section `objective`."""
        return cls.section or cls.name.replace("-", "_")

    @classmethod
    def read_options(cls, section: Any) -> Any:
        """Return its own options from the section `objective`, None if it has none."""
        return getattr(section, cls.section_name()) if cls.own else None

    @property
    def flag(self) -> str:
        """The option that chooses it, for messages."""
        return f"--objective {self.name}"

    def check(self) -> None:
        """Raise UserError where options of the run contradict this objective."""

    def check_sizes(self, twin: nn.Module, num_classes: int) -> None:
        """Raise UserError for a size of the input that the method cannot train at.

        `twin` is the model on the meta device, which computes shapes alone.
        """

    def wrap(self, model: nn.Module, num_classes: int, place: Place) -> nn.Module | WrappedModel:
        """Return all that is trained: the model, or one that is wrapped with what is added.

        By default that is a token head, where the objective needs one and the model has none.
        `place` moves a new network to the model's device. Raises UserError where the model cannot
        be trained so.
        """
        if not self.needs_tokens or getattr(model, "with_token_head", False):
            return model
        headed = with_token_head(model, self.setting.model)
        headed.fused_head = num_classes >= FUSED_FROM
        headed.check_shapes(self.setting.shapes, self.setting.model)
        return headed

    def inputs(self, plan: EpochPlan, epoch: int, batch: Batch) -> Any:
        """Return what the loss of `batch` reads beside it, on its device and without waiting."""
        return None

    def forward(self, network: nn.Module, image: Tensor, batch: Batch, step: StepContext) -> Any:
        """Run the network on augmented and mixed images `[N, 3, H, W]`.

        They are float32, or under autocast of its dtype unless MixUp blends them.
        """
        return network(image, **self.mix_arguments(step))

    def loss(self, output: Any, batch: Batch, step: StepContext) -> Tensor:
        """Return the loss of the network's output, float32 `[]`, without waiting."""
        raise NotImplementedError

    def check_logits(self, output: Any) -> None:
        """Raise UserError where a model of one's own returned anything but logits `[N, K]`."""
        if not isinstance(output, Tensor) or output.ndim != 2:
            shape = f" of shape {tuple(output.shape)}" if isinstance(output, Tensor) else ""
            raise UserError(
                f"{self.setting.model} returns a {type(output).__name__}{shape} in training, and "
                f"{self.flag} needs logits, a Tensor of a row per image and a column per class; "
                "return them as docs/extending.md describes"
            )

    def mix_arguments(self, step: StepContext) -> dict[str, Tensor]:
        """Return the arguments of a model that exchanges tokens (MixToken)."""
        if not self.setting.mix.mixtoken:
            return {}
        mask_PP = token_mask(step.mix, step.grid) if step.mask is None else step.mask
        return {"mix_PP": mask_PP}


class Method(Objective):
    """Base of methods that train around another objective, `base`, which `--objective` names.

    Its options have one that switches it on.
    """

    def __init__(self, setting: Setting, base: Objective) -> None:
        super().__init__(setting)
        self.base = base
        self.needs_score_maps, self.needs_tokens = base.needs_score_maps, base.needs_tokens
        self.evaluation = base.evaluation

    @staticmethod
    def is_on(options: Any) -> bool:
        """Return whether these options, of the class `own`, switch the method on."""
        raise NotImplementedError

    @property
    def flag(self) -> str:
        chosen = dict(leaves(self.options)).get(self.name.replace("-", "_"), "")
        return f"--{self.name} {chosen}".rstrip()

    def check(self) -> None:
        self.base.check()

    def inputs(self, plan: EpochPlan, epoch: int, batch: Batch) -> Any:
        return self.base.inputs(plan, epoch, batch)

    def loss(self, output: Any, batch: Batch, step: StepContext) -> Tensor:
        return self.base.loss(output, batch, step)


class DenseObjective(Objective):
    """Base of objectives on dense labels: makes sparse targets from score maps."""

    needs_score_maps = True
    mixes_labels = True
    unused: ClassVar[dict[str, str]] = {}

    def check(self) -> None:
        if self.setting.labels.ground_truth != "none" and self.setting.mix.mix_label == "regions":
            raise UserError(
                "--ground-truth mixes one label per image, --mix-label regions many; "
                "choose one of the two"
            )

    def targets(
        self, batch: Batch, step: StepContext
    ) -> tuple[SparseTargets, SparseTargets | None]:
        """Make targets of the class token and, with `needs_tokens`, of the grid of tokens.

        Both are mixed as the logits are.
        """
        rules, options, spec, mix = self.setting.labels, self.setting.mix, step.score_maps, step.mix
        regions = mix is not None and options.mix_label == "regions"
        # The targets of tokens and of the crop share the palette, which is computed once.
        maps, tokens, shown = palette_maps(batch, spec, rules), None, None
        # Regions are pooled from the targets of tokens, also for a model without a head on tokens.
        if regions or self.needs_tokens:
            tokens = shown = sparse_targets(batch, spec, step.grid, rules, maps)
            if mix is not None and (regions or not options.mixtoken):
                shown = mix_targets(tokens, share_map(mix, step.grid))
        whole = mean_target(shown) if regions else sparse_targets(batch, spec, 1, rules, maps)
        # `batch.label` is not mixed, so it joins the class token's target before the partner does.
        # Tokens keep their dense labels, as in the published code.
        if rules.ground_truth != "none":
            whole = mix_ground_truth(
                whole, batch.label, spec.num_classes, rules.smoothing, rules.ground_truth
            )
        if mix is not None and not regions:
            whole = mix_targets(whole, label_share(mix))
        if not options.mixtoken or tokens is None:
            return whole, shown
        # The model puts MixToken's exchanged logits back, so every token keeps the target of its
        # own image, which MixUp has blended.
        if mix is not None and options.mixup:
            tokens = mix_targets(tokens, mix.blend)
        return whole, tokens


def objective_loss(objective: Objective, output: Any, batch: Batch, step: StepContext) -> Tensor:
    """`objective.loss` as a function, which `--compile blocks` compiles apart from the network."""
    return objective.loss(output, batch, step)


def step_loss(
    objective: Objective,
    network: nn.Module,
    batch: Batch,
    step: StepContext,
    dtype: torch.dtype | None,
    measure: Callable[..., Tensor] = objective_loss,
) -> Tensor:
    """Compute the loss of an augmented batch, float32 `[]`, without waiting for the device.

    `dtype` is that of autocast, None for none; `measure` is `objective_loss` or its compiled form.
    """
    image, options = batch.image, objective.setting.mix
    if step.mix is not None and (options.cutmix or options.mixup):
        # MixToken exchanges tokens inside the network, so pixels only have MixUp's blend.
        share = step.mix.blend if options.mixtoken else share_map(step.mix, tuple(image.shape[2:]))
        image = mix_images(image, share)
    # Only the network is under autocast: losses need more than 16 bits.
    with torch.autocast(image.device.type, dtype, enabled=dtype is not None):
        output = objective.forward(network, image, batch, step)
    return measure(objective, output, batch, step)
