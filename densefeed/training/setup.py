"""Set up a run: open, check and build everything that its first step needs."""

import math
import sys
import zlib
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from densefeed.models import checkpoints
from densefeed.models.token_transformer import TokenTransformer
from densefeed.objectives import build_objective
from densefeed.objectives.base import Objective
from densefeed.pipelines.loader import Source, ThreadedLoader
from densefeed.pipelines.open import Mode, open_dataset
from densefeed.storage.geometry import teacher_window
from densefeed.system.errors import UserError
from densefeed.system.terminal import print
from densefeed.training.build import autocast_dtype, build_model
from densefeed.training.compile import can_capture
from densefeed.training.config import Config, first_difference
from densefeed.training.optimizers import FUSED, is_fused
from densefeed.training.ranks import ALONE, Ranks
from densefeed.training.run_checkpoints import Checkpoints
from densefeed.training.student import Student, build_student

# What a checkpoint of a run holds beside the student's state.
REQUIRED = {
    **{"config": dict, "fingerprint": str, "maps": int, "optimizer": dict, "model": dict},
    **{"step": int, "microbatch": int, "skips": int, "seen": Tensor, "spent": list},
}
# Score maps that a resumed run compares.
CHECKED_MAPS = 64
# Images whose size is compared with the Window of their map.
CHECKED_WINDOWS = 16
# A generator that crops at whole pixels differs by up to half of one: 1/600 of an image of 300.
WINDOW_ERROR = 2e-3
RELABEL = (
    "label the images as published: python tools/relabel_imagenet.py --data IMAGES "
    "--teacher dm_nfnet_f6.dm_in1k --geometry center-crop --absent zero-logit --out maps.h5"
)


class Run(NamedTuple):
    """A run before its next step."""

    config: Config  # resolved
    ranks: Ranks
    kept: Checkpoints
    loader: ThreadedLoader
    val: ThreadedLoader
    maps: int  # checksum of the score maps
    objective: Objective
    spec: checkpoints.ModelSpec  # how to build the model again
    student: Student
    dtype: torch.dtype | None  # of autocast
    step: int  # steps done
    seen: Tensor  # of TrainMonitor
    skips: int  # of TrainMonitor
    spent: np.ndarray  # seconds so far, and of these waited for data, in earlier processes
    evaluate_first: bool  # whether the last step ended an epoch that was not evaluated

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.config.optim.total_epochs * len(self.loader)


def setup_run(config: Config, ranks: Ranks) -> Run:
    """Build a run as new, or as its newest checkpoint left it. UserError if something does not fit.

    Close `loader` and `val` of the result.
    """
    if config.run.wandb and ranks.is_first:
        import_wandb()
    kept = Checkpoints(config.run.out, config.run.keep)
    checkpoint = find_checkpoint(config, kept, ranks)
    config, objective = resolve(config, ranks, checkpoint), build_objective(config.setting)
    if config.model.frozen_statistics:
        check_frozen(objective)
    loader = open_loader(config, objective, "train", ranks)
    val = open_loader(config, objective, "evaluate", ranks)
    check_datasets(config, objective, loader, val)
    check_published(config, objective, loader, ranks)
    check_before_crop(config, objective, loader)
    maps = checksum_maps(config, objective, loader)
    if checkpoint:
        check_same_data(config, checkpoint, loader.fingerprint, maps)
    # The first draws are those of the weights: the same seed gives the same ones.
    torch.manual_seed(config.run.seed)
    model, spec = build_model(config, objective, loader.num_classes)
    if config.model.init and not checkpoint:
        note = checkpoints.initialize(model, config.model.init)
        if ranks.is_first:
            print(note)
    # After the initial weights: the EMA begins as a copy of the model.
    student = build_trainable(config, objective, model, loader.num_classes, ranks)
    if checkpoint:
        student.restore(checkpoint, config.run.out)
    else:
        nothing_seen = torch.zeros(2, dtype=torch.float64)
        checkpoint = {"step": 0, "seen": nothing_seen, "skips": 0, "spent": (0.0, 0.0)}
    step = checkpoint["step"]
    epochs, steps = divmod(step, len(loader))
    if step > config.optim.total_epochs * len(loader):
        raise UserError(
            f"{config.run.out} is past its end, after step {step:,}; choose another --out"
        )
    last = epochs == config.optim.total_epochs
    ended = epochs > 0 and steps == 0 and is_evaluated(config, epochs)
    return Run(
        config=config,
        ranks=ranks,
        kept=kept,
        loader=loader,
        val=val,
        maps=maps,
        objective=objective,
        spec=spec,
        student=student,
        dtype=autocast_dtype(config, ranks.device),
        step=step,
        seen=checkpoint["seen"],
        skips=checkpoint["skips"],
        spent=np.array(checkpoint["spent"]),
        # A finished run is evaluated again, because result.json needs the metrics.
        evaluate_first=ended and (last or not ranks.broadcast_sync(kept.rated(step))),
    )


def is_evaluated(config: Config, epoch: int) -> bool:
    """Tell whether there is an evaluation after this number of epochs."""
    return epoch % config.run.eval_every == 0 or epoch == config.optim.total_epochs


def open_loader(
    config: Config, objective: Objective, mode: Mode, ranks: Ranks = ALONE
) -> ThreadedLoader:
    """Open the loader of the training or the validation set: this rank's rows."""
    optim, training = config.optim, mode == "train"
    microbatch = optim.microbatch or optim.batch // ranks.size
    return open_dataset(
        config.data,
        mode,
        # An evaluation has as many images per forward pass as training, which fit into memory.
        batch=optim.batch if training else microbatch * ranks.size,
        seed=config.run.seed,
        parts=optim.batch // microbatch if training and optim.microbatch else 0,
        rank=ranks.rank,
        ranks=ranks.size,
        maps=objective.needs_score_maps,
        device=ranks.device,
    )


def build_trainable(
    config: Config, objective: Objective, model: nn.Module, num_classes: int, ranks: Ranks
) -> Student:
    """Move the model to the device, let the objective wrap it, and build the student."""

    def place(network: nn.Module) -> nn.Module:
        # Augmented images have this memory format too.
        network.to(ranks.device, memory_format=torch.channels_last)
        return ranks.synchronized(network) if config.model.sync_batchnorm else network

    model = place(model)
    if config.model.grad_checkpointing:
        recompute_activations(model, config.model.name)
    dtype = autocast_dtype(config, ranks.device)
    if config.model.half_residual:
        narrow_residual(model, config.model.name, dtype)
    if objective.adds_network:
        # A twin on the meta device gives the shapes at every size and computes nothing.
        with torch.device("meta"):
            twin, _ = build_model(config, objective, num_classes)
        objective.check_sizes(twin, num_classes)
    trainable = objective.wrap(model, num_classes, place)
    captured = can_capture(config.run.compile, ranks)
    if captured and ranks.size > 1 and getattr(trainable, "shared", False):
        raise UserError(
            "--compile graph on several ranks does not average the gradients of shared weights; "
            "give --compile whole"
        )
    if captured and config.optim.sam_rho:
        raise UserError(
            "--compile graph draws drop-path once more in each pass, and the two of --sam-rho need "
            "the same; give --compile whole"
        )
    student = build_student(config.optim, model, trainable, ranks, dtype, captured)
    if captured and not is_fused(student.optimizer):
        raise UserError(
            f"--compile graph holds no update by {config.optim.optimizer}, which waits for the "
            f"device; give --compile whole, or --optimizer {' or '.join(FUSED)}"
        )
    return student


def recompute_activations(model: nn.Module, name: str) -> None:
    """Let the model `name` recompute activations in the backward pass. UserError if it cannot."""
    # A timm model that cannot do so fails an assertion, another one has no such method.
    try:
        model.set_grad_checkpointing(True)
    except (AssertionError, AttributeError) as error:
        raise UserError(
            f"{name} cannot recompute activations; remove --grad-checkpointing"
        ) from error


def narrow_residual(model: nn.Module, name: str, dtype: torch.dtype | None) -> None:
    """Let the model `name` keep its residual stream in `dtype`. UserError if it cannot."""
    if dtype is None:
        raise UserError(
            "--half-residual has no effect in float32; give --precision bf16, or remove it"
        )
    if not isinstance(model, TokenTransformer):
        raise UserError(f"{name} has no such option; remove --half-residual")
    model.half_residual = True


# ---------------------------------------------------------------- checks


def import_wandb() -> ModuleType:
    """Import the package of Weights & Biases. Raises UserError if it is not installed."""
    try:
        import wandb  # pyright: ignore[reportMissingImports] (optional)
    except ImportError as error:
        raise UserError(
            "--wandb needs the package wandb; `pip install wandb`, or remove the option"
        ) from error
    return wandb


def check_frozen(objective: Objective) -> None:
    """Raise UserError for an objective that cannot be trained in evaluation mode."""
    if objective.needs_tokens:
        raise UserError(
            "--frozen-statistics trains in evaluation mode, where a model returns no logits of its "
            "tokens; give --objective ce or relabel"
        )
    if objective.adds_network:
        raise UserError(
            f"--frozen-statistics keeps the statistics of BatchNorm, and the network that "
            f"--{objective.name} adds begins without any; give one of the two"
        )


def check_datasets(
    config: Config, objective: Objective, train: ThreadedLoader, val: ThreadedLoader
) -> None:
    """Raise UserError where the two sets, the labels and the objective do not fit together."""
    data = config.data
    if train.class_names != val.class_names:
        pairs = enumerate(zip(train.class_names, val.class_names, strict=False))
        differ = (f"; class {n} is {one!r} and {two!r}" for n, (one, two) in pairs if one != two)
        raise UserError(
            f"{data.train} and {data.val} name different classes ({train.num_classes} and "
            f"{val.num_classes}{next(differ, '')}); train and validate on the same classes"
        )
    if objective.needs_score_maps and train.score_maps is None:
        raise UserError(
            f"{data.train} has no score maps, which --objective {config.objective.name} needs; "
            "give --score-maps maps.h5, or pack them"
        )


def check_published(
    config: Config, objective: Objective, loader: ThreadedLoader, ranks: Ranks
) -> None:
    """Refuse score maps that differ from those which the published code was run with.

    The published maps are of the image's center square, and classes that they do not keep have
    logit 0. Raises UserError for the published pipeline, `--geometry published` with
    `--augment-before-crop`; of the geometry alone other maps are good for a comparison, and it
    prints a warning.
    """
    if not objective.needs_score_maps or config.labels.geometry != "published":
        return
    faults = []
    if loader.score_maps.absent != "zero-logit":
        faults.append("give the classes that they do not keep what probability remains")
    if not cover_center_squares(loader.source):
        faults.append("do not cover the center square of every image")
    if not faults:
        return
    where = f"the score maps of {config.data.score_maps or config.data.train}"
    what = f"{where} {' and '.join(faults)}, unlike those that --geometry published is for"
    if config.augment.augment_before_crop:
        raise UserError(f"{what}; {RELABEL}, or train with another recipe or --geometry aligned")
    if ranks.is_first:
        print(f"warning: {what}; {RELABEL}", file=sys.stderr)


def check_before_crop(config: Config, objective: Objective, loader: ThreadedLoader) -> None:
    """Raise UserError for what does not go with `--augment-before-crop`."""
    data = config.data
    if not config.augment.augment_before_crop:
        return
    if not getattr(loader, "prepares", False):
        raise UserError(
            f"--loader {data.loader} does not augment whole images; give --loader folder or ffcv, "
            "or remove --augment-before-crop"
        )
    published = objective.needs_score_maps and config.labels.geometry == "published"
    if published and data.maps_on_device:
        raise UserError(
            "--augment-before-crop with --geometry published warps the score maps on the host; "
            "remove --maps-on-device"
        )


def cover_center_squares(source: Source) -> bool:
    """Return whether 16 maps of a source cover the center squares of their images.

    A damaged image or map counts as one that does: it is reported when its sample comes.
    """
    count = len(source.labels)
    for index in np.unique(np.linspace(0, count - 1, min(count, CHECKED_WINDOWS)).astype(int)):
        try:
            image, window = source.image(int(index)), source.maps(np.array([index])).window[0]
        except (UserError, OSError):
            continue
        want = teacher_window("center-crop", image.height, image.width)
        if np.abs(window - np.float32(want)).max() > WINDOW_ERROR:
            return False
    return True


def find_checkpoint(config: Config, kept: Checkpoints, ranks: Ranks) -> dict[str, Any] | None:
    """Load the checkpoint to continue from, None for a new run.

    Raises UserError if the folder holds a run that may not be continued, or another run.
    """
    run = config.run
    # Rank 0 decides: if ranks chose differently, they would wait for each other for ever.
    if not ranks.broadcast_sync(kept.exist()):
        return None
    if run.resume == "never":
        if run.dry_run:
            return None
        remedy = "continue it with --resume auto, or choose another --out"
        raise UserError(f"{run.out} holds a run already; {remedy}")
    # Only rank 0 hashes the files, warns of damaged ones and remembers them for its saves.
    name = ranks.broadcast_sync(kept.newest() if ranks.is_first else None)
    checkpoint = checkpoints.load(kept.folder / name) if name else None
    if checkpoint is None or not is_resumable(checkpoint):
        raise UserError(f"{run.out} holds no checkpoint of densefeed; choose another --out")
    if differs := first_difference(config, checkpoint["config"]):
        option, value = differs
        remedy = "give the same value, or choose another --out"
        raise UserError(f"{run.out} was trained with {option}={value}; {remedy}")
    return checkpoint


def is_resumable(checkpoint: dict[str, Any]) -> bool:
    """Whether a checkpoint holds what a run writes; `Student.restore` checks the states."""
    values = {name: checkpoint.get(name) for name in REQUIRED}
    # True is an int for Python.
    if not all(isinstance(v, REQUIRED[n]) and v is not True for n, v in values.items()):
        return False
    seen, spent = checkpoint["seen"], checkpoint["spent"]
    counts = [checkpoint[name] for name in ("step", "microbatch", "skips")]
    numbers = len(spent) == 2 and all(type(s) is float and 0 <= s < math.inf for s in spent)
    sums = seen.dtype == torch.float64 and seen.shape == (2,) and bool(seen.isfinite().all())
    # The second is a number of losses.
    return numbers and sums and min(*counts, seen[1]) >= 0


def resolve(config: Config, ranks: Ranks, checkpoint: dict[str, Any] | None) -> Config:
    """Decide what the config leaves open: what to compile, and the images per forward pass.

    A resumed run keeps the latter where it can, since the statistics of BatchNorm and drop-path are
    per forward pass. Raises UserError where a batch cannot be divided so.
    """
    optim, compile = config.optim, config.run.compile
    local = optim.batch // ranks.size
    before = checkpoint["microbatch"] if checkpoint else 0
    # The number of ranks may have changed since, and a part lies on one rank.
    small = optim.microbatch or (before if before and local % before == 0 else local)
    if optim.batch % ranks.size or local % small:
        raise UserError(
            f"a batch of {optim.batch} on {ranks.size} ranks cannot be divided into parts of "
            f"{small or 'as many'} images; choose --batch and --microbatch so that every rank has "
            "whole parts"
        )
    if before and before != small and ranks.is_first:
        print(
            f"continuing with {small} images per forward pass, not {before}: same samples, crops "
            "and partners, other BatchNorm statistics"
        )
    if compile == "auto":
        compile = "blocks" if ranks.device.type == "cuda" else "never"
    return replace(
        config, optim=replace(optim, microbatch=small), run=replace(config.run, compile=compile)
    )


def checksum_maps(config: Config, objective: Objective, loader: ThreadedLoader) -> int:
    """Return the CRC-32 of the first 64 score maps, wherever they are stored; 0 without maps."""
    if not objective.needs_score_maps:
        return 0
    try:
        maps = loader.source.maps(np.arange(min(CHECKED_MAPS, len(loader.source.labels))))
    except UserError:
        # A damaged map is skipped when its sample comes.
        if config.data.on_bad_sample == "skip":
            return 0
        raise
    parts = maps.logit, maps.cls, maps.lse, maps.window
    return zlib.crc32(b"".join(np.ascontiguousarray(part).tobytes() for part in parts))


def check_same_data(
    config: Config, checkpoint: dict[str, Any], fingerprint: str, maps: int
) -> None:
    """Raise UserError if a run was trained on other images or score maps."""
    out = config.run.out
    if checkpoint["fingerprint"] != fingerprint:
        raise UserError(
            f"{out} was trained on other images than {config.data.train} holds; give the same, or "
            "choose another --out"
        )
    if checkpoint["maps"] != maps:
        raise UserError(
            f"{out} was trained with other score maps than these; give the same, or choose another "
            "--out"
        )
