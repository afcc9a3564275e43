"""Set up a run: open, check and build everything that its first step needs."""

import zlib
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from densefeed.models import checkpoints
from densefeed.models.token_head import TokenHeadModel
from densefeed.models.token_transformer import TokenTransformer
from densefeed.objectives import build_objective
from densefeed.objectives.base import Objective
from densefeed.pipelines.loader import Source, ThreadedLoader
from densefeed.pipelines.mixing import check_pairs
from densefeed.pipelines.open import DataOptions, Mode, open_dataset
from densefeed.pipelines.plan import EpochPlan
from densefeed.storage.dataset_names import (
    check_two_classes,
    describe_lookalikes,
    list_some,
    match_forms,
)
from densefeed.storage.geometry import teacher_window
from densefeed.storage.images import sample_evenly
from densefeed.storage.packs import describe_doubt
from densefeed.system.devices import has_triton
from densefeed.system.errors import UserError, install_extra
from densefeed.system.precision import autocast_dtype
from densefeed.system.terminal import print, warn
from densefeed.training.build import build_model
from densefeed.training.compile import can_capture
from densefeed.training.config import Config, ModelOptions, OptimOptions, RunOptions, check_same_run
from densefeed.training.evaluation import find_evaluation
from densefeed.training.optimizers import FUSED
from densefeed.training.ranks import ALONE, Ranks
from densefeed.training.run_checkpoints import Checkpoints
from densefeed.training.shared_images import warn_shared_images
from densefeed.training.student import Student, build_student

# What a checkpoint of a run holds beside the student's state.
REQUIRED = {"config", "fingerprint", "maps", "step", "microbatch", "skips", "seen", "spent"}
# Score maps that a resumed run compares.
CHECKED_MAPS = 64
# Images whose size is compared with the Window of their map.
CHECKED_WINDOWS = 16
# A generator that crops at whole pixels differs by up to half of one: 1/600 of an image of 300.
WINDOW_ERROR = 2e-3
RELABEL = (
    "label the images as published: densefeed label --data IMAGES "
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
    done: int  # steps
    seen: Tensor  # of TrainMonitor
    skips: int  # of TrainMonitor
    spent: np.ndarray  # seconds so far, and of these waited for data, in earlier processes
    evaluate_first: bool  # whether the last step ended an epoch that was not evaluated

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.config.optim.total_epochs * len(self.loader)

    def is_logged(self, step: int) -> bool:
        """Return whether there is a log line after this number of steps.

        There is one at least in each epoch, and after the first and the last step.
        """
        every = min(self.config.run.log_every, len(self.loader))
        return step % every == 0 or step in (1, self.steps)

    @property
    def described_images(self) -> str:
        """The numbers of images, for messages."""
        train, val = self.loader.plan.num_samples, self.val.plan.num_samples
        return f"{train:,} training and {val:,} validation images"

    def is_evaluated(self, epoch: int) -> bool:
        """Return whether there is an evaluation after this number of epochs."""
        return epoch % self.config.run.eval_every == 0 or epoch == self.config.optim.total_epochs


def setup_run(config: Config, ranks: Ranks) -> Run:
    """Build a run as new, or as its newest checkpoint left it. UserError if something does not fit.

    Close `loader` and `val` of the result.
    """
    out, data = config.run.out, config.data
    if config.run.wandb and ranks.is_first:
        import_wandb()
    # Found before the training set is opened, which may take minutes.
    data.locate("evaluate")
    config.augment.check_operations()
    objective = build_objective(config.setting)
    kept = Checkpoints(out, config.run.keep, find_evaluation(objective).rated)
    checkpoint = find_checkpoint(config.run, kept, ranks)
    if checkpoint:
        check_same_run(config, checkpoint["config"])
    # A resumed run keeps its forward passes where it can.
    optim = divide_batch(config.optim, ranks, checkpoint["microbatch"] if checkpoint else 0)
    config = replace(config, optim=optim, run=choose_compile(config.run, ranks, objective))
    if config.model.frozen_statistics:
        check_frozen(objective)
    loader = open_loader(data, optim, config.run.seed, objective, "train", ranks)
    check_pairs(loader.plan, config.mix)
    val = open_loader(data, optim, config.run.seed, objective, "evaluate", ranks, loader.source)
    # First of all that depends on the data: ranks that differ would wait for each other later.
    check_same_on_ranks(ranks, loader, val)
    align_classes(data, loader, val, ranks)
    check_datasets(data, objective, loader)
    if ranks.is_first:
        if padding := describe_padding(loader.plan):
            print(f"note: {padding}")
        warn_shared_images(data, loader.source, val.source)
        doubt = describe_doubt(loader.source.teacher, data.maps_name)
        if objective.needs_score_maps and doubt:
            warn(doubt)
    check_published(data, config.augment.augment_before_crop, objective, loader, ranks)
    maps = checksum_maps(data.on_bad_sample, objective, loader)
    first, *others = ranks.gather_sync(maps)
    for rank, theirs in enumerate(others, start=1):
        if theirs != first:
            raise UserError(
                f"rank {rank} reads other score maps than rank 0; give every rank the same copy of "
                f"{data.maps_name}"
            )
    if checkpoint:
        check_same_data(out, checkpoint, loader.fingerprint, maps)
    # The first draws are those of the weights: the same seed gives the same ones.
    torch.manual_seed(config.run.seed)
    model, spec = build_model(config.model, data, objective, loader.num_classes)
    if config.model.init and not checkpoint:
        note = checkpoints.initialize(model, config.model.init, loader.class_names)
        if ranks.is_first:
            print(note)
    elif config.model.init and ranks.is_first:
        print(f"{out}: continuing from its newest checkpoint; --init is not read again")
    # After the initial weights: the EMA begins as a copy of the model.
    student = build_trainable(config.model, optim, config.run, objective, model, ranks)
    if checkpoint:
        student.restore(checkpoint, out)
    else:
        nothing_seen = torch.zeros(2, dtype=torch.float64)
        checkpoint = {"step": 0, "seen": nothing_seen, "skips": 0, "spent": (0.0, 0.0)}
    # Over all ranks, of which the first continues the count.
    loader.skipped = checkpoint.get("skipped", 0) if ranks.is_first else 0
    run = Run(
        config=config,
        ranks=ranks,
        kept=kept,
        loader=loader,
        val=val,
        maps=maps,
        objective=objective,
        spec=spec,
        student=student,
        dtype=autocast_dtype(config.run.precision, ranks.device),
        done=checkpoint["step"],
        seen=checkpoint["seen"],
        skips=checkpoint["skips"],
        spent=np.array(checkpoint["spent"]),
        evaluate_first=False,
    )
    if run.done > run.steps:
        raise UserError(f"{out} is past its end, after step {run.done:,}; choose another --out")
    epochs, rest = divmod(run.done, len(loader))
    ended = epochs > 0 and rest == 0 and run.is_evaluated(epochs)
    # A finished run is evaluated again, because result.json needs the metrics.
    last = run.done == run.steps
    first = ended and (last or not ranks.broadcast_sync(kept.rated(run.done)))
    return run._replace(evaluate_first=first)


def open_loader(
    data: DataOptions,
    optim: OptimOptions,
    seed: int,
    objective: Objective,
    mode: Mode,
    ranks: Ranks = ALONE,
    beside: Source | None = None,
) -> ThreadedLoader:
    """Open the loader of the training or the validation set: this rank's rows.

    `beside` is a part of the same data that is open.
    """
    training = mode == "train"
    microbatch = optim.microbatch or optim.batch // ranks.size
    return open_dataset(
        data,
        mode,
        # An evaluation has as many images per forward pass as training, which fit into memory.
        batch=optim.batch if training else microbatch * ranks.size,
        seed=seed,
        microbatches=optim.batch // microbatch if training and optim.microbatch else 0,
        rank=ranks.rank,
        ranks=ranks.size,
        maps=objective.needs_score_maps,
        masks=objective.needs_masks,
        device=ranks.device,
        beside=beside,
    )


def build_trainable(
    options: ModelOptions,
    optim: OptimOptions,
    run: RunOptions,
    objective: Objective,
    model: nn.Module,
    ranks: Ranks,
) -> Student:
    """Move the model to the device, let the objective wrap it, and build the student."""

    def place(network: nn.Module) -> nn.Module:
        # Augmented images have this memory format too.
        network.to(ranks.device, memory_format=torch.channels_last)
        return ranks.synchronized(network) if options.sync_batchnorm else network

    model = place(model)
    if options.grad_checkpointing:
        recompute_activations(model, options.name)
    dtype = autocast_dtype(run.precision, ranks.device)
    if options.half_residual:
        narrow_residual(model, options.name, dtype)
    trainable = objective.wrap(model, model.num_classes, place)
    if isinstance(trainable, TokenHeadModel) and ranks.is_first:
        print(
            f"note: {options.name} has no token head; a linear layer on its tokens of "
            f"{trainable.patch_size} px is trained with it and left out of exports"
        )
    captured = can_capture(run.compile, ranks)
    if captured:
        check_captured(optim, trainable, ranks)
    frozen = options.frozen_statistics
    return build_student(optim, model, trainable, ranks, dtype, captured, frozen)


def check_captured(optim: OptimOptions, trainable: nn.Module, ranks: Ranks) -> None:
    """Raise UserError for an update that a CUDA graph cannot hold."""
    if ranks.size > 1 and getattr(trainable, "aliases", ()):
        why = "on several ranks does not average the gradients of shared weights"
    elif optim.sam_rho:
        why = "draws two masks of drop-path, and --sam-rho needs one for both passes"
    elif optim.optimizer not in FUSED:
        fused = " or ".join(FUSED)
        why = f"holds no update by {optim.optimizer}, which waits for the device, only by {fused}"
    else:
        return
    raise UserError(f"--compile graph {why}; give --compile whole")


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
            f"--wandb needs the package wandb; {install_extra('wandb')}, or remove the option"
        ) from error
    return wandb


def check_frozen(objective: Objective) -> None:
    """Raise UserError for an objective that cannot be trained in evaluation mode."""
    if objective.needs_tokens:
        raise UserError(
            "--frozen-statistics trains in evaluation mode, where a model returns no logits of its "
            "tokens; give --objective ce or relabel"
        )
    if objective.waits:
        raise UserError(
            "--frozen-statistics trains in evaluation mode, where a detector returns boxes and no "
            "losses; remove it"
        )
    if objective.needs_masks:
        raise UserError(
            "--frozen-statistics trains in evaluation mode, where a segmentation network returns "
            "no logits of its auxiliary decoder; remove it"
        )
    if objective.adds_network:
        raise UserError(
            "--frozen-statistics keeps the statistics of BatchNorm, and the network that "
            f"{objective.flag} adds begins without any; give one of the two"
        )


def describe_padding(plan: EpochPlan) -> str:
    """Describe how much of its batches is padding where one is larger than the training set."""
    shown = plan.num_samples * plan.repeats
    if plan.batch <= shown:
        return ""
    return (
        f"--batch {plan.batch:,} is larger than the training set of {plan.num_samples:,} images, "
        f"so {1 - shown / plan.batch:.0%} of each batch is padding, which takes time and does not "
        "count; give a smaller --batch"
    )


def check_same_on_ranks(ranks: Ranks, train: ThreadedLoader, val: ThreadedLoader) -> None:
    """Raise UserError on all ranks if one of them reads other images, labels or classes."""
    own = [(len(each.source.labels), each.class_names, each.fingerprint) for each in (train, val)]
    first, *others = ranks.gather_sync(own)
    kinds = ("training", "--data"), ("validation", "--val")
    for rank, theirs in enumerate(others, start=1):
        for (kind, option), want, found in zip(kinds, first, theirs, strict=True):
            if want == found:
                continue
            (want_count, want_names, _), (count, names, _) = want, found
            what = "with other paths, labels or sizes of files"
            if count != want_count:
                what = f"{count:,} images, not {want_count:,}"
            elif names != want_names:
                pairs = zip_longest(names, want_names)
                name, want_name = next(pair for pair in pairs if len({*pair}) > 1)
                what = f"class {name}, not {want_name}"
            raise UserError(
                f"rank {rank} reads other {kind} data than rank 0 ({what}); give every rank the "
                f"same copy at {option}"
            )


def align_classes(
    data: DataOptions, train: ThreadedLoader, val: ThreadedLoader, ranks: Ranks
) -> None:
    """Number the classes of the validation set as those of the training set, by their names.

    Prints which classes it has no images of. Raises UserError if it has others, or if the training
    set has one class alone, which only objects may have. Masks are not renumbered: the classes of
    both sets must be equal.
    """
    names = train.class_names
    if not train.source.instances:
        check_two_classes(data.train, names)
    if names == val.class_names:
        return
    if train.with_masks:
        raise UserError(
            f"--val {data.val} has other classes than --data {data.train}, or in another order; "
            "give both sets the same classes"
        )
    found = match_forms(val.class_names, names)
    known, there = set(names), set(found)
    if others := [name for name in found if name not in known]:
        raise UserError(
            f"--val {data.val} has {len(others):,} of {len(found):,} classes that --data "
            f"{data.train} lacks ({list_some(others)}), which has {len(names):,} "
            f"({list_some(names)}); validate on the classes of the training set"
            + (f"; {pair}" if (pair := describe_lookalikes(others, names)) else "")
            + explain_numbers(names, found)
        )
    val.renumber(names)
    lacking = [name for name in names if name not in there]
    if lacking and ranks.is_first:
        print(
            f"{data.val} has no images of {len(lacking):,} of the {len(names):,} classes of "
            f"{data.train}: {list_some(lacking)}"
        )


def explain_numbers(*sets: list[str]) -> str:
    """Say what to do where one of two sets has numbers for names, as files that FFCV wrote have."""
    numbered = [all(map(str.isdecimal, names)) for names in sets]
    if len(set(numbered)) == 1:
        return ""
    return "; a .beton of stock FFCV has no class names: write both sets with the same tool"


def check_datasets(data: DataOptions, objective: Objective, train: ThreadedLoader) -> None:
    """Raise UserError where the labels and the objective do not fit together."""
    if objective.needs_score_maps and train.score_maps is None:
        raise UserError(
            f"{data.train} has no score maps, which --objective {objective.setting.options.name} "
            "needs; give --score-maps maps.h5, or pack them"
        )


def check_published(
    data: DataOptions, before_crop: bool, objective: Objective, loader: ThreadedLoader, ranks: Ranks
) -> None:
    """Refuse score maps that differ from those which the published code was run with.

    The published maps are of the image's center square, and classes that they do not keep have
    logit 0. Raises UserError for the published pipeline, `--geometry published` with
    `--augment-before-crop`; of the geometry alone other maps are good for a comparison, and it
    prints a warning.
    """
    if not objective.needs_score_maps or objective.setting.labels.geometry != "published":
        return
    if before_crop and data.maps_on_device:
        raise UserError(
            "--augment-before-crop with --geometry published warps the score maps on the host; "
            "remove --maps-on-device"
        )
    faults = []
    if loader.score_maps.absent != "zero-logit":
        faults.append("do not give the classes that they do not keep logit 0")
    if not cover_center_squares(loader.source):
        faults.append("do not cover the center square of every image")
    if not faults:
        return
    where = f"the score maps of {data.maps_name}"
    what = f"{where} {' and '.join(faults)}, unlike those that --geometry published is for"
    if before_crop:
        raise UserError(f"{what}; {RELABEL}, or train with another recipe or --geometry aligned")
    if ranks.is_first:
        warn(f"{what}; {RELABEL}")


def cover_center_squares(source: Source) -> bool:
    """Return whether 16 maps of a source cover the center squares of their images.

    A damaged image or map counts as one that does: it is reported when its sample comes.
    """
    count = len(source.labels)
    for index in sample_evenly(count, CHECKED_WINDOWS):
        try:
            image, window = source.image(int(index)), source.maps(np.array([index])).window[0]
        except (UserError, OSError):
            continue
        want = teacher_window("center-crop", image.height, image.width)
        if np.abs(window - np.float32(want)).max() > WINDOW_ERROR:
            return False
    return True


def find_checkpoint(run: RunOptions, kept: Checkpoints, ranks: Ranks) -> dict[str, Any] | None:
    """Load the checkpoint to continue from, None for a new run.

    Raises UserError if the folder holds a run that may not be continued.
    """
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
    checkpoint = checkpoints.load(kept.folder / name) if name else {}
    if not checkpoint.keys() >= REQUIRED:
        raise UserError(f"{run.out} holds no checkpoint of densefeed; choose another --out")
    return checkpoint


def divide_batch(optim: OptimOptions, ranks: Ranks, before: int = 0) -> OptimOptions:
    """Decide how many images a forward pass has; `before` are those of a run to resume, or 0.

    Such a run keeps them where it can, since the statistics of BatchNorm and drop-path are per
    forward pass. Raises UserError where a batch cannot be divided so.
    """
    local = optim.batch // ranks.size
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
    return replace(optim, microbatch=small)


def choose_compile(run: RunOptions, ranks: Ranks, objective: Objective) -> RunOptions:
    """Decide what `--compile auto` compiles. UserError for a step that cannot be compiled."""
    if objective.waits:
        if run.compile not in ("auto", "never"):
            raise UserError(
                f"--compile {run.compile} needs shapes that do not depend on values, and "
                f"{objective.flag} has as many boxes as it finds; remove the option"
            )
        return replace(run, compile="never")
    cuda = ranks.device.type == "cuda"
    if run.compile == "graph" and not cuda and ranks.is_first:
        print("--compile graph is --compile whole on this device, which has no CUDA graphs")
    auto = "blocks" if cuda and has_triton() else "never"
    if run.compile == "auto" and auto == "never" and cuda and ranks.is_first:
        warn(
            "nothing is compiled, and training is slower: Triton, a C compiler or "
            "Python's headers are missing; on Debian install gcc and python3-dev"
        )
    return replace(run, compile=auto if run.compile == "auto" else run.compile)


def checksum_maps(on_bad_sample: str, objective: Objective, loader: ThreadedLoader) -> int:
    """Return the CRC-32 of the first 64 score maps, wherever they are stored; 0 without maps."""
    if not objective.needs_score_maps:
        return 0
    try:
        maps = loader.source.maps(np.arange(min(CHECKED_MAPS, len(loader.source.labels))))
    except UserError:
        # A damaged map is skipped when its sample comes.
        if on_bad_sample == "skip":
            return 0
        raise
    parts = maps.logit, maps.cls, maps.lse, maps.window
    return zlib.crc32(b"".join(np.ascontiguousarray(part).tobytes() for part in parts))


def check_same_data(out: Path, checkpoint: dict[str, Any], fingerprint: str, maps: int) -> None:
    """Raise UserError if a run was trained on other images or score maps."""
    for name, now, what in (
        ("fingerprint", fingerprint, "on other images than --data holds"),
        ("maps", maps, "with other score maps than these"),
    ):
        if checkpoint[name] != now:
            raise UserError(f"{out} was trained {what}; give the same, or choose another --out")
