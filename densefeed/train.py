"""Train a vision transformer from dense teacher score maps.

    python train.py RECIPE --loader ffcv --data train.beton --val val.beton --out runs/NAME [--any-field value]
    torchrun --nproc-per-node 8 train.py RECIPE ...

What a run is stands in densefeed/training/config.py, the recipes in densefeed/training/recipes.py;
this file is the run, top to bottom. `python train.py RECIPE --help` shows every field.
"""

import inspect
import json
import os
import platform
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import timm
import torch
import tyro
from torch import Tensor, nn

from densefeed.models import checkpoints
from densefeed.models.token_transformer import TokenTransformer, has_tokens
from densefeed.pipelines.augment.augmentation import Normalize
from densefeed.pipelines.batch import Batch, Loader, to_device
from densefeed.pipelines.dali import DaliLoader
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.folder import FolderSource
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.resident import bytes_of_map
from densefeed.system.devices import free_memory, peak_memory, synchronize
from densefeed.system.errors import UserError, run
from densefeed.system.files import replace_file
from densefeed.system.malloc import tune_malloc
from densefeed.training.agent import build_agent, check_agent_sizes, joint_model
from densefeed.training.config import FREE, Config, check_read, check_values, model_arguments, plain
from densefeed.training.evaluation import (
    Metrics,
    MetricSums,
    mean_metrics_sync,
    predict,
    sum_metrics,
)
from densefeed.training.guards import explain_oom, signal_handler
from densefeed.training.logs import logging
from densefeed.training.monitor import TrainMonitor
from densefeed.training.ranks import Agreement, Ranks, init_distributed, raise_on_rank0
from densefeed.training.recipes import RECIPES
from densefeed.training.run_checkpoints import Checkpoints
from densefeed.training.schedule import learning_rate, peak_rate, total_epochs
from densefeed.training.speed import ActivationBytes, peak_flops, training_flops
from densefeed.training.step_inputs import StepInputs
from densefeed.training.student import Student, build_student, update

# classes; below, logits that exist whole take less memory than the rest of a step, and less time
FUSED_FROM = 4096
ALONE = Ranks(0, 1, torch.device("cpu"))

# ------------------------------------------------------------------------- set up


def open_loader(
    config: Config, mode: Literal["train", "evaluate"], ranks: Ranks = ALONE
) -> ThreadedLoader:
    """The loader of the training or the validation set: this rank's rows."""
    path = config.data if mode == "train" else config.val
    maps = config.labels if mode == "train" else None
    if config.loader == "ffcv" or (config.loader == "dali" and not path.is_dir()):
        if path.is_dir():
            raise UserError(
                f"{path} is a folder; pack it with tools/pack_dataset.py, or read it with --loader folder"
            )
        source = FfcvSource(path, maps)
    else:
        if path.is_file():
            raise UserError(
                f"{path} is a file; --loader folder reads folders, --loader ffcv reads .beton files"
            )
        source = FolderSource(path, "train" if mode == "train" else "val", maps, config.threads)
    small = config.microbatch or config.batch // ranks.size
    plan = EpochPlan(
        num_samples=len(source.labels),
        batch=config.batch if mode == "train" else small * ranks.size,
        seed=config.seed,
        mode=mode,
        order=config.order,
        repeats=config.repeats if mode == "train" else 1,
        rank=ranks.rank,
        ranks=ranks.size,
        parts=config.batch // small if mode == "train" and config.microbatch else 0,
        sizes=config.sizes if config.sizes and mode == "train" else ((0, config.size),),
        crop_scale=config.crop_scale,
        hflip=config.hflip,
        crop_pct=config.crop_pct,
    )
    streamed = mode == "train" and config.objective != "ce" and not config.labels_on_device
    if config.loader == "dali":
        return DaliLoader(
            source, plan, config.threads, config.on_bad_sample, streamed, ranks.device
        )
    return ThreadedLoader(source, plan, config.threads, config.on_bad_sample, maps=streamed)


def check(config: Config, train: Loader, val: Loader) -> None:
    """UserError where the two sets, the labels and the objective do not fit together."""
    if train.class_names != val.class_names:
        pairs = enumerate(zip(train.class_names, val.class_names, strict=False))
        differ = next(
            (
                f"; class {number} is {ours!r} and {theirs!r}"
                for number, (ours, theirs) in pairs
                if ours != theirs
            ),
            "",
        )
        raise UserError(
            f"{config.data} and {config.val} name different classes ({train.num_classes} and {val.num_classes}{differ}); "
            "train and validate on the same classes"
        )
    if config.objective == "ce" and config.mix_label == "regions":
        raise UserError(
            "--mix-label regions pools dense labels, which --objective ce does not use; give --mix-label area"
        )
    if config.ground_truth != "none" and config.mix_label == "regions":
        raise UserError(
            "--ground-truth knows one label an image, --mix-label regions many; choose one of the two"
        )
    if config.objective != "ce" and train.score_maps is None:
        raise UserError(
            f"{config.data} has no score maps, which --objective {config.objective} needs; give --labels maps.h5, or pack them"
        )


def build_model(config: Config, num_classes: int) -> tuple[nn.Module, checkpoints.Recipe]:
    """The student, and how to build it again."""
    kwargs = {"num_classes": num_classes} | (
        {"drop_path_rate": config.drop_path} if config.drop_path else {}
    )
    kwargs |= model_arguments(config)
    if has_tokens(config.model):
        kwargs |= {"token_head": config.objective == "token-label"}
        many = config.fused_head == "always" or (
            config.fused_head == "auto" and num_classes >= FUSED_FROM
        )
        kwargs |= {"fused_head": True} if many and kwargs["token_head"] else {}
    elif config.objective == "token-label" or config.mixtoken:
        raise UserError(
            f"{config.model} has no token head and no MixToken; use an lvvit, dhvt or t2t_vit model, or --objective ce --no-mixtoken"
        )
    if not timm.is_model(config.model):
        raise UserError(
            f"timm knows no model {config.model!r}; `python -c 'import timm; print(timm.list_models())'` lists them"
        )
    # Transformers are built for a size, networks of convolutions take any; timm's transformers take
    # others if told so.
    sized = kwargs | {"img_size": config.size}
    ways = [sized | {"dynamic_img_size": True}, sized, kwargs] if config.sizes else [sized, kwargs]
    for way in ways:
        try:
            model, recipe = (
                timm.create_model(config.model, **way),
                checkpoints.Recipe(config.model, way),
            )
            break
        except (TypeError, ValueError, AssertionError) as error:
            # TypeError: this model has no such argument
            if way is ways[-1] or not isinstance(error, TypeError):
                remedy = "; give --drop-path 0" if "drop_path_rate" in str(error) else ""
                raise UserError(f"{config.model} cannot be built: {error}{remedy}") from error
    # A transformer of ours is never built for a size that it cannot take; some of timm's are, and
    # others take no second one. Twins on the meta device are of what was built before.
    asked = bool(config.sizes) or not isinstance(model, TokenTransformer)
    asked = asked and not next(model.parameters()).is_meta
    for side in sorted({side for _, side in config.sizes} or {config.size}) if asked else ():
        try:
            with torch.inference_mode():
                model.eval()(torch.zeros(1, 3, side, side))
        except (ValueError, RuntimeError, AssertionError) as error:
            why, option = (
                str(error).partition("\n")[0],
                "other --sizes" if config.sizes else "another --size",
            )
            raise UserError(
                f"{config.model} cannot train at {side} px ({why}); choose {option} or another model"
            ) from error
    if isinstance(model, TokenTransformer) and (
        config.objective == "token-label" or config.mixtoken
    ):
        for _, side in config.sizes or ((0, config.size),):
            if side % model.patch_size:
                raise UserError(
                    f"{config.model} would see cut tokens at {side} px, which have no labels; choose a multiple of {model.patch_size} px"
                )
    return model, recipe


def environment(config: Config, ranks: Ranks) -> dict:
    """What a result depends on beside the config."""
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "device": (
            torch.cuda.get_device_name(ranks.device)
            if ranks.device.type == "cuda"
            else platform.processor() or platform.machine()
        ),
        "ranks": ranks.size,
        "cores": os.cpu_count(),
        "precision": config.precision,
    }


def find_checkpoint(config: Config, kept: Checkpoints, ranks: Ranks) -> dict | None:
    """The checkpoint to continue from. UserError if the folder holds a run and may not be
    continued, or another run.
    """
    if not ranks.broadcast_sync(kept.exist()):
        return None
    if config.resume == "never":
        if config.dry_run:
            return None
        raise UserError(
            f"{config.out} holds a run already; continue it with --resume auto, or choose another --out"
        )
    name = ranks.broadcast_sync(kept.newest() if ranks.first else None)
    checkpoint = checkpoints.load(kept.folder / name) if name else None
    if checkpoint is None or not {
        "config",
        "fingerprint",
        "optimizer",
        "step",
        "model",
        "microbatch",
    } <= set(checkpoint):
        raise UserError(f"{config.out} holds no checkpoint of a run of ours; choose another --out")
    now, then = plain(config), checkpoint["config"]
    differs = [name for name in now if name not in FREE and now[name] != then.get(name)]
    if differs:
        raise UserError(
            f"{config.out} was trained with {differs[0]}={then.get(differs[0])}; give the same value, or choose another --out"
        )
    return checkpoint


def resolve(config: Config, ranks: Ranks, checkpoint: dict | None) -> Config:
    """The config with what it leaves open decided: what to compile, and how many images go through
    the network at once.

    A continued run keeps the latter where it can, since BatchNorm's statistics and drop-path are of
    these. UserError where a batch cannot be cut so.
    """
    local = config.batch // ranks.size
    before = checkpoint["microbatch"] if checkpoint else 0
    small = config.microbatch or (before if before and local % before == 0 else local)
    if config.batch % ranks.size or local % small:
        raise UserError(
            f"a batch of {config.batch} on {ranks.size} ranks cannot be cut into {small or 'as many'} images each; "
            "choose --batch and --microbatch so that every rank has whole parts"
        )
    if before and before != small and ranks.first:
        print(
            f"continuing with {small} images at once, not {before}: same samples, crops and partners, other BatchNorm statistics"
        )
    if config.compile == "graph" and config.batch // small != 1:
        # Its gradients lie in the graph's own memory, which the next pass writes anew; with several
        # ranks others read it too.
        raise UserError(
            "--compile graph takes one rank and whole batches; give --compile whole, or leave --microbatch away"
        )
    how = (
        config.compile
        if config.compile != "auto"
        else "blocks"
        if ranks.device.type == "cuda"
        else "never"
    )
    return replace(config, compile=how, microbatch=small)


def score_maps_checksum(config: Config, loader: ThreadedLoader) -> int:
    """Of the first 64 score maps, wherever they are stored: tells a resumed run that its labels are
    others. 0 without maps.
    """
    if config.objective == "ce":
        return 0
    try:
        maps = loader.source.maps(np.arange(min(64, len(loader.source.labels))))
    except UserError:
        # a damaged one among them is left out when its turn comes
        if config.on_bad_sample == "skip":
            return 0
        raise
    return zlib.crc32(
        b"".join(
            np.ascontiguousarray(part).tobytes()
            for part in (maps.logit, maps.cls, maps.lse, maps.window)
        )
    )


def autocast_dtype(config: Config, device: torch.device) -> torch.dtype | None:
    """The type that products are computed in, None for float32."""
    known = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    return known.get(config.precision, torch.bfloat16 if device.type == "cuda" else None)


def flops_per_size(config: Config, loader: Loader) -> dict[int, float]:
    """Operations of one image in training, for each side of the network's input."""
    with torch.device("meta"):
        twin, _ = build_model(config, loader.num_classes)
        twin = joint_model(config, twin, build_agent(config, twin, loader.num_classes))
    return {size: training_flops(twin, size) for _, size in loader.plan.sizes}


def dry_run(config: Config, ranks: Ranks, student: Student, dtype: torch.dtype | None) -> None:
    """The loss and gradient of the first images, and what memory a whole step takes. UserError if
    there is not so much.
    """
    images, trained = 2 * config.repeats, student.trained.train(not config.frozen_statistics)
    largest = max((side for _, side in config.sizes), default=config.size)
    few = replace(
        config,
        batch=images,
        microbatch=images,
        threads=1,
        sizes=((0, largest),) if config.sizes else (),
        labels_on_device=False,
        compile="never",
    )
    loader = open_loader(few, "train")
    with closing(loader):
        alone = replace(ranks, rank=0, size=1)
        feed = StepInputs(few, alone, loader, trained, dtype)
        parts = next(feed.batches(0, 0))
        feed.check_sync(parts)
        (compute,) = feed.losses(trained, parts, 0, 0)
        with ActivationBytes(trained) as saved:
            loss = compute()
        loss.backward()
    # Gradients, two moments and perhaps averaged weights are as large as the weights; what an agent
    # borrows has a gradient more.
    fixed, each = (
        sum(p.nbytes for p in trained.parameters()) * (3 + (config.ema > 0)),
        saved.bytes / images,
    )
    fixed += sum(tensor.nbytes for tensor in student.agent.borrowed()) if student.agent else 0
    if config.labels_on_device and loader.score_maps:
        fixed += loader.plan.num_samples * bytes_of_map(loader.score_maps)
    needed, free = fixed + each * config.microbatch, free_memory(ranks.device)
    if ranks.first:
        print(
            f"dry run: data, labels and recipe fit together; loss {loss.item():.3f} of {images} images; gradients, moments"
            f"{', all score maps' * config.labels_on_device} and {config.microbatch} images at once take about "
            f"{needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free on {ranks.device}"
        )
    if needed > free:
        local = config.batch // ranks.size
        fits = [
            n for n in range(2, config.microbatch, 2) if local % n == 0 and fixed + each * n < free
        ]
        raise UserError(
            f"{config.microbatch} images at once take about {needed / 1e9:.2f} GB on {ranks.device}, of which {free / 1e9:.2f} GB "
            f"are free; give {f'--microbatch {fits[-1]}' if fits else '--grad-checkpointing, or a smaller model'}"
        )


# ------------------------------------------------------------------------- the run


def evaluate_sync(
    model: nn.Module,
    loader: Loader,
    normalize: Normalize,
    ranks: Ranks,
    dtype: torch.dtype | None,
    advance: Callable[[int, str], None],
) -> Metrics:
    """Top-1, top-5 and loss on the validation set, each image once, over all ranks; `advance(0,
    text)` shows how far it is.
    """

    def setup_run() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for number, batch in enumerate(to_device(loader.batches(0), ranks.device), start=1):
            yield normalize(batch.image), batch.label, batch.weight
            advance(0, f"evaluating, {number} of {len(loader)}")

    sums = ranks.sum(torch.stack(sum_metrics(predict(model, setup_run(), dtype=dtype))))
    return mean_metrics_sync(MetricSums(*sums))


class DataTimer:
    """Passes items on, and adds up the seconds spent waiting for them."""

    def __init__(self) -> None:
        self.waited = self._told = 0.0

    def __call__(self, items: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            began = time.perf_counter()
            item = next(items, None)
            self.waited += time.perf_counter() - began
            if item is None:
                return
            yield item

    def since_last(self) -> float:
        """Seconds waited since the last call."""
        before, self._told = self._told, self.waited
        return self.waited - before


def train(config: Config) -> dict:
    """Run or continue a training; returns (and writes to result.json) its result, or {} if a signal
    stopped it.
    """
    check_values(config)
    # A dry run has nothing to save: signals end it at once.
    with (
        init_distributed(config.device) as ranks,
        nullcontext(str) if config.dry_run else signal_handler() as asked,
    ):
        if ranks.device.type == "cpu":
            tune_malloc()
        run = setup_run(config, ranks)
        with closing(run.loader), closing(run.val):
            if config.dry_run:
                dry_run(run.config, ranks, run.student, autocast_dtype(config, ranks.device))
                return {}
            return train_loop(run, ranks, asked)


class Prepared(NamedTuple):
    """A run before its next step."""

    config: Config  # resolved
    loader: ThreadedLoader
    val: ThreadedLoader
    maps: int  # checksum of the score maps
    recipe: checkpoints.Recipe
    student: Student
    step: int  # steps done
    watched: tuple[Tensor | None, int]  # what Watch goes on from
    spent: np.ndarray  # seconds, and of these waited for data, in the processes before this one
    owed: bool  # whether the last of these steps ended an epoch whose evaluation has not been made


def setup_run(config: Config, ranks: Ranks) -> Prepared:
    """Open, check and build everything, as new or as a checkpoint left it. UserError if something
    does not fit.
    """
    dtype, kept = autocast_dtype(config, ranks.device), Checkpoints(config.out, config.keep)
    checkpoint = find_checkpoint(config, kept, ranks)
    config = resolve(config, ranks, checkpoint)
    loader, val = open_loader(config, "train", ranks), open_loader(config, "evaluate", ranks)
    check(config, loader, val)
    if checkpoint and checkpoint["fingerprint"] != loader.fingerprint:
        raise UserError(
            f"{config.out} was trained on other images than {config.data} holds; give the same, or choose another --out"
        )
    maps = score_maps_checksum(config, loader)
    if checkpoint and checkpoint["maps"] != maps:
        raise UserError(
            f"{config.out} was trained with other score maps than these; give the same, or choose another --out"
        )
    torch.manual_seed(config.seed)
    model, recipe = build_model(config, loader.num_classes)
    if config.init and not checkpoint:  # else the run continues
        begun = checkpoints.initialize(model, config.init)
        if ranks.first:
            print(begun)
    model.to(ranks.device, memory_format=torch.channels_last)
    if config.sync_batchnorm:
        model = ranks.synchronized(model)
    if config.grad_checkpointing:
        try:
            model.set_grad_checkpointing(True)
        except (AssertionError, AttributeError) as error:
            raise UserError(
                f"{config.model} cannot compute its blocks anew; leave --grad-checkpointing away"
            ) from error
    if config.bootstrap != "none":
        with torch.device("meta"):
            check_agent_sizes(
                config, build_model(config, loader.num_classes)[0], loader.num_classes
            )
    agent = build_agent(config, model, loader.num_classes)
    if agent is not None:
        agent.to(ranks.device, memory_format=torch.channels_last)
        agent = ranks.synchronized(agent) if config.sync_batchnorm else agent
    student = build_student(config, model, ranks, dtype, agent)
    if not checkpoint:
        return Prepared(
            config, loader, val, maps, recipe, student, 0, (None, 0), np.zeros(2), owed=False
        )
    student.restore(checkpoint)
    step, steps = checkpoint["step"], total_epochs(config) * len(loader)
    ends = step > 0 and step % len(loader) == 0 and is_due(config, step // len(loader))
    owed = ends and (step == steps or not ranks.broadcast_sync(kept.rated(step)))
    watched, spent = (checkpoint["seen"], checkpoint["skips"]), np.array(checkpoint["spent"])
    return Prepared(config, loader, val, maps, recipe, student, step, watched, spent, owed)


def is_due(config: Config, epoch: int) -> bool:
    """Whether there is an evaluation after so many epochs."""
    return epoch % config.eval_every == 0 or epoch == total_epochs(config)


def write_run_header(run: Prepared, ranks: Ranks) -> None:
    """Make the run's folder, write what the run is, and say it."""
    config = run.config
    config.out.mkdir(parents=True, exist_ok=True)
    for left in config.out.glob("*.part"):  # half-written when an earlier process was killed
        left.unlink()
    for name, content in (
        ("config.json", plain(config)),
        ("environment.json", environment(config, ranks)),
    ):
        with replace_file(config.out / name) as part:
            part.write_text(json.dumps(content, indent=1))
    student = run.student
    count, beside = (
        sum(p.numel() for p in part.parameters()) for part in (student.model, student.trained)
    )
    option = f"--bootstrap {config.bootstrap}" if student.agent else f"--drloc {config.drloc}"
    print(
        f"{run.recipe.name}: {count:,} parameters"
        + (f", and {beside - count:,} that {option} trains beside them," if beside > count else "")
        + f" on {ranks.device}"
        + (f" and {ranks.size - 1} more" if ranks.size > 1 else "")
        + f"; objective {config.objective}; {run.loader.plan.num_samples:,} images, {total_epochs(config)} epochs of "
        f"{len(run.loader)} steps; peak lr {peak_rate(config):.2g} = {config.lr:.2g} x {config.batch} / {config.lr_batch}"
        + (f"; continuing at step {run.step}" if run.step else ""),
        flush=True,
    )


def train_loop(run: Prepared, ranks: Ranks, asked: Callable[[], str]) -> dict:
    """The steps that are left, on this rank; `asked` names the signal that wants it to stop."""
    config, loader, val, student, step = run.config, run.loader, run.val, run.student, run.step
    device, model, plan, dtype = (
        ranks.device,
        student.model,
        loader.plan,
        autocast_dtype(config, ranks.device),
    )
    epochs, steps = total_epochs(config), total_epochs(config) * len(loader)
    kept, feed = (
        Checkpoints(config.out, config.keep),
        StepInputs(config, ranks, loader, student.trained, dtype),
    )
    watch = TrainMonitor(config, ranks, student, feed, *run.watched)
    if ranks.first:
        write_run_header(run, ranks)
    flops = flops_per_size(config, loader)
    peak = peak_flops(device, dtype or torch.float32) * ranks.size
    # clock and logged: since when, and which step, the rate is measured
    began = clock = time.perf_counter()
    logged, result, text, timed = step, {}, "", DataTimer()
    agreement = Agreement(ranks)
    with (
        logging(
            config.out,
            step,
            steps,
            plain(config),
            config.wandb,
            ranks.first,
            evaluated=not run.owed,
        ) as (write, advance),
        explain_oom(config.microbatch, str(config.out)),
    ):

        def so_far() -> np.ndarray:
            """Seconds of this run, and of these waited for data."""
            return run.spent + np.array([time.perf_counter() - began, timed.waited])

        def save() -> None:
            # numbers that are not finite never replace a good checkpoint
            watch.mean_loss_sync(step)
            ranks.average(student.averaged())
            # of all ranks, so that any number of them can go on from it
            seen = ranks.sum(watch.seen.clone()) / ranks.size
            if ranks.first:
                about = {
                    "seen": seen,
                    "skips": watch.skips,
                    "spent": so_far().tolist(),
                    "step": step,
                    "config": plain(config),
                    "recipe": run.recipe._asdict(),
                    "microbatch": config.microbatch,
                    "class_names": loader.class_names,
                    "fingerprint": loader.fingerprint,
                    "maps": run.maps,
                    "mean": list(model.pretrained_cfg["mean"]),
                    "std": list(model.pretrained_cfg["std"]),
                }
                kept.save(student.state() | about, step)

        def evaluate() -> None:
            nonlocal result, text
            ranks.average(student.averaged())
            accuracy = {}
            for kind, one in (
                ("", model),
                ("_ema", student.ema and student.ema.module),
                ("_agent", student.agent),
            ):
                if one:
                    shares = evaluate_sync(
                        one, val, feed.augmentation.normalize, ranks, dtype, advance
                    )
                    accuracy |= {
                        f"top1{kind}": shares.top1,
                        f"top5{kind}": shares.top5,
                        f"loss{kind}": shares.loss,
                    }
            write("val", step, step / len(loader), accuracy)
            result, text = accuracy, f"top-1 {100 * accuracy['top1']:.1f} %"
            advance(0, text)
            if ranks.first:
                kept.rate(step, max(accuracy["top1"], accuracy.get("top1_ema", 0)))

        if run.owed:
            evaluate()
        for epoch in range(step // len(loader), epochs):
            student.trained.train(not config.frozen_statistics)
            for parts in feed.batches(epoch, step % len(loader), timed):
                at = step % len(loader)
                if step == run.step:
                    feed.check_sync(parts)
                for group in student.optimizer.param_groups:
                    group["lr"] = learning_rate(config, step, len(loader))
                loss, norm = update(
                    student, ranks, step, feed.losses(student.network, parts, epoch, at)
                )
                watch.add(loss)
                step += 1
                if step == run.step + 1 and config.compile != "never" and ranks.first:
                    synchronize(device)
                    print(
                        f"first step, with what is compiled: {time.perf_counter() - began:.1f} s",
                        flush=True,
                    )
                if step % config.log_every == 0:
                    mean, now = watch.mean_loss_sync(step), time.perf_counter()
                    rate = (step - logged) * config.batch / (now - clock)
                    write(
                        "train",
                        step,
                        step / len(loader),
                        {
                            "loss": mean,
                            "lr": student.optimizer.param_groups[0]["lr"],
                            "grad_norm": norm.item(),
                            "images_per_s": rate,
                            "mfu": rate * flops[plan.size(epoch)] / peak,
                            "data_wait_share": timed.since_last() / (now - clock),
                            "peak_memory_gb": peak_memory(device) / 1e9,
                        },
                    )
                    watch.next_interval(step, mean)
                    logged, clock, text = step, now, f"loss {mean:.3f}  {rate:.0f} img/s"
                advance(1, text)
                stop = agreement(bool(asked()))
                if at + 1 < len(loader) and (stop or (at + 1) % config.save_every == 0):
                    save()
                if stop:
                    break
            if step % len(loader):
                break
            save()  # also before an evaluation, so that whoever is killed in it has lost nothing
            if is_due(config, epoch + 1):
                evaluate()
            timed.since_last()
            logged, clock = step, time.perf_counter()
            if agreement(bool(asked())):
                break
        if step < steps:
            if ranks.first:
                print(
                    f"{config.out}: stopped after step {step} of {steps}, all saved; the same command with --resume auto goes on"
                )
            return {}
        seconds, waited = so_far()
    result |= {
        "date": time.strftime("%Y-%m-%d"),
        "seed": config.seed,
        "objective": config.objective,
        "model": config.model,
        "epochs": epochs,
        "seconds": round(float(seconds), 1),
        "data_wait_share": round(float(waited / seconds), 4),
        "skipped": loader.skipped + val.skipped,
    }
    if ranks.first:
        with replace_file(config.out / "result.json") as part:
            part.write_text(json.dumps(result, indent=1))
        skipped = f"; skipped {result['skipped']:,} unreadable" if result["skipped"] else ""
        print(
            f"{config.out}: top-1 {100 * result['top1']:.1f} % on {val.plan.num_samples:,} images, {seconds:.0f} s{skipped}"
        )
    return result


def main() -> None:
    """The command line: a recipe's name, then any field of its config."""

    def about(recipe: Callable[[], Config]) -> str:
        """In the list of recipes a line of each; for one's own --help its whole docstring."""
        text = inspect.getdoc(recipe)
        return text if recipe.__name__ in sys.argv else text.partition("\n")[0]

    recipes = {recipe.__name__: (about(recipe), recipe()) for recipe in RECIPES}
    config = tyro.extras.overridable_config_cli(recipes, description=__doc__)
    name = next(word for word in sys.argv[1:] if word in recipes)
    with raise_on_rank0():
        try:
            check_read(config, recipes[name][1])
            train(config)
        except checkpoints.CheckpointError as error:
            raise UserError(str(error)) from error


def command() -> None:
    """The console script `densefeed-train`."""
    run(main)


if __name__ == "__main__":
    command()
