"""Config: every option of a run, in sections, each checked where it is declared."""

import dataclasses
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import arg

from densefeed.objectives import Objectives, complete
from densefeed.objectives.base import Setting
from densefeed.pipelines.augment.settings import Augment
from densefeed.pipelines.mixing import MixOptions
from densefeed.pipelines.open import DataOptions
from densefeed.pipelines.targets import TargetRules
from densefeed.system.devices import DeviceOptions
from densefeed.system.errors import UserError
from densefeed.system.options import (
    Beside,
    Bounds,
    Count,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Options,
    flag,
    from_dict,
    hints,
    leaves,
    list_values,
    own_first,
    parse_arguments,
    with_options,
)
from densefeed.system.precision import Precision
from densefeed.training.optimizers import check_optimizer, has_momentum


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """The section `model`: the network and how it is built."""

    # any timm classifier; token-label adds a token head to one that has none
    name: Annotated[str, arg(name="model")] = "lvvit_s"
    # more arguments of the model, each NAME=VALUE with a Python value, e.g. depth=12
    kwargs: Annotated[tuple[str, ...], list_values("STR", name="model-kwargs")] = ()
    # initial weights: a run folder or a checkpoint of a run, of the published LV-ViT, or of timm
    # for this model
    init: Path | None = None
    # stochastic depth of the last block, probability
    drop_path: Annotated[float, Bounds(0, 0.99)] = 0.1
    # BatchNorm over the images of all ranks; else per rank, averaged when statistics are saved
    sync_batchnorm: bool = False
    # train in evaluation mode: BatchNorm keeps its statistics, no drop-path (DHVT's fine-tuning)
    frozen_statistics: bool = False
    # recompute activations in the backward pass: less memory, more time
    grad_checkpointing: bool = False
    # keep the sum that runs through all blocks in the dtype of autocast instead of float32: less
    # memory traffic, rounded after every block
    half_residual: bool = False

    def unused(self) -> dict[str, str]:
        # The mode of evaluation has neither stochastic depth nor statistics of a batch.
        if self.frozen_statistics:
            names = "drop_path", "sync_batchnorm"
            return dict.fromkeys(names, Beside("--frozen-statistics"))
        if "drop_path_rate" in self.arguments:
            return {"drop_path": Beside("--model-kwargs drop_path_rate")}
        return {}

    @property
    def arguments(self) -> dict[str, object]:
        """`kwargs` as a dictionary. UserError for a word that is not NAME=VALUE."""
        return parse_arguments(self.kwargs, "--model-kwargs")


@dataclass(frozen=True, kw_only=True)
class OptimOptions(Options):
    """The section `optim`: the length of a run, its batches and its updates."""

    epochs: Count = 300  # passes over the training set until the learning rate is at its lowest
    cooldown_epochs: NonNegativeInt = 0  # further passes at min_lr
    batch: Count = 1024  # images per optimizer step, all ranks together
    # images per forward pass, to save memory; 0: all that a rank has of a batch
    microbatch: NonNegativeInt = 0
    # peak learning rate at a batch of lr_batch images; scaled linearly with the batch
    lr: Annotated[float, Bounds(1e-12)] = 1e-3
    lr_batch: Count = 640  # the batch that lr is meant for, images
    min_lr: NonNegative = 1e-5  # learning rate at the end, not scaled
    warmup_epochs: NonNegative = 5  # linear warm-up from 1e-6
    lr_updates: Literal["step", "epoch"] = "step"  # when the learning rate changes
    # timm's name of a first-order optimizer, with timm's defaults, e.g. sgd, lion or nadamuon; each
    # needs learning rates of its own
    optimizer: str = "adamw"
    # momentum of sgd and the other optimizers that have one; 0: none
    momentum: Annotated[float, Bounds(0, 0.9999)] = 0.9
    # weight decay; not applied to biases, norms and tables
    weight_decay: NonNegative = 0.05
    decay_all: bool = False  # also decay biases, norms and tables
    # radius of Sharpness-Aware Minimization (SAM), which does two passes per step; 0: none
    sam_rho: NonNegative = 0.0
    ema: Fraction = 0.99992  # decay per step of the EMA of the weights, with warm-up; 0: none
    clip_grad: NonNegative = 0.0  # maximum gradient norm; 0: no clipping
    # gradients that are not finite: stop the run, or skip the update
    on_nonfinite: Literal["stop", "skip"] = "stop"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optimizer(self.optimizer)

    def unused(self) -> dict[str, str]:
        found = {} if has_momentum(self.optimizer) else {"momentum": "--optimizer sgd"}
        return found if self.weight_decay else found | {"decay_all": "--weight-decay"}

    @property
    def total_epochs(self) -> int:
        """Passes over the training set: those of the cosine and those at the lowest rate."""
        return self.epochs + self.cooldown_epochs

    @property
    def peak_lr(self) -> float:
        """The highest learning rate: `lr` scaled linearly from `lr_batch` to `batch` images."""
        return self.lr * self.batch / self.lr_batch


@own_first
@dataclass(frozen=True, kw_only=True)
class RunOptions(DeviceOptions):
    """The section `run`: where and how a run computes, saves and logs."""

    out: Path = tyro.MISSING  # run folder: config, metrics, checkpoints
    # seed of weights, order, crops and mixing
    seed: Annotated[int, Bounds(0, 2**63 - 1)] = 0
    # auto: bf16 autocast on GPUs that compute it, else fp32
    precision: Precision = "auto"
    # torch.compile: blocks: each block once, and the loss; whole: all as one graph; graph: the
    # same, and CUDA graphs of the whole update; auto: blocks on CUDA, else never
    compile: Literal["auto", "never", "blocks", "whole", "graph"] = "auto"
    # auto: continue from the newest checkpoint in OUT if there is one
    resume: Literal["auto", "never"] = "never"
    # steps between checkpoints within an epoch; each epoch's end is always saved
    save_every: Count = 1000
    keep: Count = 2  # newest checkpoints to keep; the best one is always kept
    eval_every: Count = 10  # epochs between evaluations; the last epoch is always evaluated
    # steps between log lines; at most an epoch, and the first and last step have one
    log_every: Count = 50
    wandb: str = ""  # Weights & Biases project to log to; empty: none
    dry_run: bool = False  # only check data, labels, recipe and memory, in seconds


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every option of a run. Options not given on the command line come from the recipe."""

    data: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    labels: TargetRules = field(default_factory=lambda: TargetRules(smoothing=0.1))
    augment: Augment = field(default_factory=Augment)
    mix: MixOptions = field(default_factory=MixOptions)
    objective: Objectives = field(default_factory=Objectives)
    optim: OptimOptions = field(default_factory=OptimOptions)
    run: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        """Add the options of methods that were registered after `objective` was made."""
        object.__setattr__(self, "objective", complete(self.objective))

    @property
    def setting(self) -> Setting:
        """What the objective depends on."""
        shapes, epochs = self.data.shapes, self.optim.total_epochs
        return Setting(self.objective, self.labels, self.mix, shapes, epochs, self.model.name)

    def to_dict(self) -> dict[str, dict]:
        """Return the config as JSON can hold it."""
        # Checkpoints hold this too, and torch.load(weights_only=True) refuses a Path.
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))

    @classmethod
    def from_dict(
        cls, values: dict[str, Any], template: "Config | None" = None, where: str = "this config"
    ) -> "Config":
        """Read what `to_dict` wrote; `template` has the classes of its sections.

        A run without a method of one's own that is registered now has its defaults. Raises
        UserError, which begins with `where`, for a config of another version or for values that no
        run can have.
        """
        template = template or cls()
        try:
            own = hints(type(template.objective)).keys() - hints(Objectives).keys()
            kinds = {name: type(getattr(template.objective, name)) for name in own}
            added = {name: dataclasses.asdict(kind()) for name, kind in kinds.items()}
            if isinstance(values, dict) and isinstance(values["objective"], dict):
                values = values | {"objective": added | values["objective"]}
            return from_dict(template, values)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{where} was written by another version of densefeed; train again, or install "
                "that version"
            ) from error


# Options that a resumed run may change. Data and score maps are compared by their content instead,
# and `init` is not read again.
FREE = {
    *("out", "loader", "data", "val", "dataset", "val_fraction", "val_seed", "score_maps"),
    *("threads", "cache", "max_pixels", "device", "resume", "eval_every"),
    *("log_every", "on_bad_sample", "maps_on_device", "microbatch", "compile", "save_every"),
    *("grad_checkpointing", "keep", "wandb", "dry_run", "on_nonfinite", "init"),
}


def check_recipe(words: list[str], recipes: list[str], papers: Iterable[str] = ()) -> None:
    """Raise UserError if a command line begins with neither a recipe nor a request for help.

    tyro's own message has more than a hundred lines.
    """
    word = words[0] if words else ""
    if word in (*recipes, "-h") or word.startswith(("--help", "--tyro")):
        return
    named = f"begins with {word}, which is not a recipe" if word else "names no recipe"
    like = [name for name in recipes if word and name.startswith(word)]
    close = ", ".join((like or get_close_matches(word, recipes))[:3])
    remedy = f"choose {close}, or see" if close else "put one first, or see"
    of = f"{word} " if word in papers else ""
    raise UserError(f"the command line {named}; {remedy} densefeed train {of}--help")


def choose_sizes(config: Config, given: Collection[str]) -> Config:
    """Let a `--size` of the command line, whose options are `given`, replace a recipe's `--sizes`.

    UserError if the command line has other sizes too, none of which is this one.
    """
    data = config.data
    if "size" not in given:
        return config
    for name in ("sizes", "multi_scale"):
        if getattr(data, name) and name in given:
            if data.size in data.sides:
                return config
            raise UserError(
                f"--size {data.size} would be evaluated only, because {flag(name)} sets the sizes "
                f"of training; give one of the two, or a --size that {flag(name)} names"
            )
    return with_options(config, sizes=(), multi_scale=())


def check_same_run(config: Config, saved: dict[str, Any]) -> None:
    """Raise UserError for an option of a run to resume that may not differ, and does."""
    out = config.run.out
    before = dict(leaves(Config.from_dict(saved, config, f"the run in {out}")))
    for name, value in leaves(config):
        if name not in FREE and value != before[name]:
            remedy = "or choose another --out"
            # The learning rate of a run falls to its end.
            if name in ("epochs", "cooldown_epochs") and value > before[name]:
                remedy = f"or train longer from its weights, with --init {out} and another --out"
            raise UserError(
                f"{out} was trained with {name}={before[name]}; give the same value, {remedy}"
            )
