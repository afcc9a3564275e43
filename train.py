"""Train a vision transformer from dense teacher score maps.

    python train.py RECIPE --loader ffcv --data train.beton --val val.beton --out runs/NAME [--any-field value]
    torchrun --nproc-per-node 8 train.py RECIPE ...

What a run is stands in training/config.py, the recipes in training/recipes.py; this file is the run, top to bottom.
`python train.py RECIPE --help` shows every field.
"""

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Literal

import timm
import torch
import tyro
from densefeed.models import checkpoints
from densefeed.models.evaluation import sums
from densefeed.pipelines.augment import Augmentation, Normalise, augmented
from densefeed.pipelines.batch import Batch, Loader, on_device
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.folder import FolderSource
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.resident import ResidentMaps, free_memory
from densefeed.pipelines.targets import TargetRules, check_batch
from densefeed.relabel.files import UserError, replacing, run
from densefeed.training.config import FREE, Config, check_values, model_arguments, plain
from densefeed.training.guards import Finite, Leaps, first_not_finite, memory_told, stopping
from densefeed.training.logs import logging
from densefeed.training.objective import augment_of, mixing_of, objective_loss, step_loss
from densefeed.training.ranks import Agreement, Ranks, started
from densefeed.training.recipes import RECIPES
from densefeed.training.saving import Checkpoints
from densefeed.training.speed import Saved, peak_flops, peak_memory, settle, training_flops
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

FUSED_FROM = 4096  # classes; below, logits that exist whole take less memory than the rest of a step, and less time
ALONE = Ranks(0, 1, torch.device("cpu"))

# ------------------------------------------------------------------------- set up


def open_loader(config: Config, mode: Literal["train", "evaluate"], ranks: Ranks = ALONE) -> ThreadedLoader:
    """The loader of the training or the validation set: this rank's rows."""
    path = config.data if mode == "train" else config.val
    maps = config.labels if mode == "train" else None
    if config.loader == "ffcv":
        if path.is_dir():
            raise UserError(f"{path} is a folder; pack it with tools/pack_dataset.py, or read it with --loader folder")
        source = FfcvSource(path, maps)
    else:
        if path.is_file():
            raise UserError(f"{path} is a file; --loader folder reads folders, --loader ffcv reads .beton files")
        source = FolderSource(path, "train" if mode == "train" else "val", maps, config.threads)
    small = config.microbatch or config.batch // ranks.size
    plan = EpochPlan(
        num_samples=len(source.labels), batch=config.batch if mode == "train" else small * ranks.size, seed=config.seed,
        mode=mode, order=config.order, views=config.views, rank=ranks.rank, ranks=ranks.size,
        parts=config.batch // small if mode == "train" and config.microbatch else 0,
        sizes=config.sizes if config.sizes and mode == "train" else ((0, config.size),),
        crop_scale=config.crop_scale, hflip=config.hflip, crop_pct=config.crop_pct,
    )  # fmt: skip
    streamed = mode == "train" and config.objective != "ce" and not config.labels_on_device
    return ThreadedLoader(source, plan, config.threads, config.on_bad_sample, maps=streamed)


def check(config: Config, train: Loader, val: Loader) -> None:
    """UserError where the two sets, the labels and the objective do not fit together."""
    if train.class_names != val.class_names:
        raise UserError(
            f"{config.data} and {config.val} name different classes ({train.num_classes} and {val.num_classes}); "
            "train and validate on the same classes"
        )
    if config.objective == "ce" and config.mix_label == "regions":
        raise UserError("--mix-label regions pools dense labels, which --objective ce does not use; give --mix-label area")
    if config.ground_truth != "none" and config.mix_label == "regions":
        raise UserError("--ground-truth knows one label an image, --mix-label regions many; choose one of the two")
    if config.objective != "ce" and train.labels is None:
        raise UserError(
            f"{config.data} has no score maps, which --objective {config.objective} needs; give --labels maps.h5, or pack them"
        )


def build_model(config: Config, num_classes: int) -> tuple[nn.Module, checkpoints.Recipe]:
    """The student, and how to build it again."""
    kwargs = {"num_classes": num_classes} | ({"drop_path_rate": config.drop_path} if config.drop_path else {})
    kwargs |= model_arguments(config)
    if config.model.startswith("lvvit"):
        kwargs |= {"token_head": config.objective == "token-label"}
        many = config.fused_head == "always" or (config.fused_head == "auto" and num_classes >= FUSED_FROM)
        kwargs |= {"fused_head": True} if many and kwargs["token_head"] else {}
    elif config.objective == "token-label" or config.mixtoken:
        raise UserError(
            f"{config.model} has no token head and no MixToken; use an lvvit model, or --objective ce --no-mixtoken"
        )
    if not timm.is_model(config.model):
        raise UserError(
            f"timm knows no model {config.model!r}; `python -c 'import timm; print(timm.list_models())'` lists them"
        )
    # Transformers are built for a size, networks of convolutions take any; timm's transformers take others if told so.
    sized = kwargs | {"img_size": config.size}
    ways = [sized | {"dynamic_img_size": True}, sized, kwargs] if config.sizes else [sized, kwargs]
    for way in ways:
        try:
            model, recipe = timm.create_model(config.model, **way), checkpoints.Recipe(config.model, way)
            break
        except (TypeError, ValueError, AssertionError) as error:
            if way is ways[-1] or not isinstance(error, TypeError):  # TypeError: this model has no such argument
                raise UserError(f"{config.model} cannot be built: {error}") from error
    for side in sorted({side for _, side in config.sizes}):
        try:
            with torch.inference_mode():
                model.eval()(torch.zeros(1, 3, side, side))
        except (ValueError, RuntimeError, AssertionError) as error:
            why = str(error).partition("\n")[0]
            raise UserError(
                f"{config.model} cannot train at {side} px ({why}); choose other --sizes or another model"
            ) from error
    return model, recipe


def environment(config: Config, ranks: Ranks) -> dict:
    """What a result depends on beside the config."""
    return {
        "command": sys.argv, "python": platform.python_version(), "torch": torch.__version__, "timm": timm.__version__,
        "device": (
            torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else platform.processor() or platform.machine()
        ),
        "ranks": ranks.size, "cores": os.cpu_count(), "precision": config.precision,
    }  # fmt: skip


def find_checkpoint(config: Config, kept: Checkpoints) -> dict | None:
    """The checkpoint to continue from. UserError if the folder holds a run and may not be continued, or another run."""
    if not kept.exist():
        return None
    if config.resume == "never":
        raise UserError(f"{config.out} holds a run already; continue it with --resume auto, or choose another --out")
    checkpoint = kept.newest()
    if checkpoint is None or not {"config", "fingerprint", "optimizer", "step", "model", "microbatch"} <= set(checkpoint):
        raise UserError(f"{config.out} holds no checkpoint of a run of ours; choose another --out")
    now, then = plain(config), checkpoint["config"]
    differs = [name for name in now if name not in FREE and now[name] != then.get(name)]
    if differs:
        raise UserError(
            f"{config.out} was trained with {differs[0]}={then.get(differs[0])}; give the same value, or choose another --out"
        )
    return checkpoint


def small_batch(config: Config, ranks: Ranks, checkpoint: dict | None) -> int:
    """Images that go through the network at once. A continued run keeps them where it can: statistics of BatchNorm and
    drop-path are of these. UserError where a batch cannot be cut so."""
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
    return small


def autocast_of(config: Config, device: torch.device) -> torch.dtype | None:
    """The type that products are computed in, None for float32."""
    known = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    return known.get(config.precision, torch.bfloat16 if device.type == "cuda" else None)


def compiled(how: str, model: nn.Module) -> Callable[..., Tensor]:
    """`step_loss`, with what `how` says compiled. The model's blocks are alike, so one compilation serves all."""
    if how == "never":
        return step_loss
    if how == "whole" or not isinstance(getattr(model, "blocks", None), nn.Module):
        return torch.compile(step_loss, dynamic=False)
    for block in model.blocks:
        block.compile(dynamic=False)
    measure = torch.compile(objective_loss, dynamic=False)
    return lambda *arguments: step_loss(*arguments, measure=measure)


def dry_run(config: Config, ranks: Ranks, loader: Loader, model: nn.Module, loss_of: Callable[..., Tensor]) -> None:
    """One small step with the first images, and what memory a whole one will take. UserError if there is not so much."""
    batch = next(iter(loader.batches(0)))
    images = min(len(batch.label), 2)
    with Saved(model) as saved:
        loss = loss_of(Batch(*(None if field is None else field[:images] for field in batch)))
    loss.backward()
    weights = sum(p.nbytes for p in model.parameters())
    needed = weights * (4 + (config.ema > 0)) + saved.bytes * config.microbatch / images
    free = free_memory(ranks.device) + weights * 2
    print(
        f"dry run: data, labels and recipe fit together; loss {loss.item():.3f} of {images} images; weights, moments and "
        f"{config.microbatch} images at once take about {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free on {ranks.device}"
    )
    if needed > free:
        raise UserError(
            f"{config.microbatch} images at once take about {needed / 1e9:.1f} GB on {ranks.device}, of which {free / 1e9:.1f} GB "
            f"are free; give --microbatch {max(2, config.microbatch // 4 * 2)} or --grad-checkpointing"
        )


# ------------------------------------------------------------------------- the run


def evaluate_waits(
    model: nn.Module,
    loader: Loader,
    normalise: Normalise,
    ranks: Ranks,
    dtype: torch.dtype | None,
    advance: Callable[[int, str], None],
) -> float:
    """Top-1 accuracy on the validation set, each image once, over all ranks; `advance(0, text)` shows how far it is."""

    def prepared() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for number, batch in enumerate(on_device(loader.batches(0), ranks.device), start=1):
            yield normalise(batch.image), batch.label, batch.weight
            advance(0, f"evaluating, {number} of {len(loader)}")

    with torch.autocast(ranks.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
        right, total = ranks.sum(sums(model, prepared())).tolist()
    return right / total


class Timed:
    """Iterates and adds up the seconds spent waiting for the next item."""

    def __init__(self, items: Iterator[Batch]) -> None:
        self.items, self.waited = items, 0.0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            began = time.perf_counter()
            item = next(self.items, None)
            self.waited += time.perf_counter() - began
            if item is None:
                return
            yield item


def train(config: Config) -> dict:
    """Run or continue a training; returns (and writes to result.json) its result, or {} if a signal stopped it."""
    check_values(config)
    with started(config.device) as ranks, stopping() as asked:
        return run_on(config, ranks, asked)


def run_on(config: Config, ranks: Ranks, asked: Callable[[], str]) -> dict:
    """`train` on this rank; `asked` names the signal that wants it to stop."""
    device, dtype, kept = ranks.device, autocast_of(config, ranks.device), Checkpoints(config.out, config.keep)
    checkpoint = find_checkpoint(config, kept)
    how = config.compile if config.compile != "auto" else "blocks" if device.type == "cuda" else "never"
    config = replace(config, compile=how, microbatch=small_batch(config, ranks, checkpoint))
    loader, val = open_loader(config, "train", ranks), open_loader(config, "evaluate", ranks)
    check(config, loader, val)
    if checkpoint and checkpoint["fingerprint"] != loader.fingerprint:
        raise UserError(
            f"{config.out} was trained on other images than {config.data} holds; give the same, or choose another --out"
        )
    plan = loader.plan
    torch.manual_seed(config.seed)
    model, recipe = build_model(config, loader.num_classes)
    model.to(device, memory_format=torch.channels_last)
    if config.grad_checkpointing:
        model.set_grad_checkpointing(True)
    lr = config.lr * config.batch / config.lr_batch
    optimizer = create_optimizer_v2(model, "adamw", lr=lr, weight_decay=config.weight_decay, fused=True)
    steps = config.epochs * len(loader)
    scheduler = CosineLRScheduler(
        optimizer, t_initial=steps, lr_min=config.min_lr, warmup_t=round(config.warmup_epochs * len(loader)),
        warmup_lr_init=1e-6, t_in_epochs=False,
    )  # fmt: skip
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    augment, mixing = augment_of(config), mixing_of(config, plan)
    augmentation = Augmentation(plan, augment, model.pretrained_cfg["mean"], model.pretrained_cfg["std"]).to(device)
    rules = TargetRules(config.smoothing, config.temperature, config.outside, config.geometry, sheared=augment.shears)
    resident = ResidentMaps(loader.source, device) if config.labels_on_device and config.objective != "ce" else None
    ema = ModelEmaV3(model, decay=config.ema, use_warmup=True, foreach=True) if config.ema else None
    averaged = [model, ema.module] if ema else [model]
    patch = getattr(model, "patch_size", 16)
    with torch.device("meta"):
        twin, _ = build_model(config, loader.num_classes)
    flops = {size: training_flops(twin, size) for _, size in plan.sizes}
    peak = peak_flops(device, dtype or torch.float32) * ranks.size
    network, loss_of = ranks.parallel(model), compiled(config.compile, model)
    seen = torch.zeros(
        2, dtype=torch.float64, device=device
    )  # sum of the losses since the last log line, and of how many steps

    step = 0
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scaler.load_state_dict(checkpoint["scaler"])
        seen.copy_(checkpoint["seen"])
        if ema:
            ema.module.load_state_dict(checkpoint["ema"])
        step = checkpoint["step"]
    del checkpoint

    def part_loss(network: nn.Module, part: Batch, epoch: int, at: int) -> Tensor:
        """The loss of a part of an augmented batch of step `at` of an epoch, which is all of it or `microbatch` rows."""
        size = part.image.shape[-1]
        grid = max(1, size // patch)
        mix = mixing.draw(epoch, at, size, grid).to(device) if mixing else None
        return loss_of(config, network, part, loader.labels, rules, grid, mix, dtype)

    if config.dry_run:

        def first_loss(batch: Batch) -> Tensor:
            choice = augmentation.choose(0, batch.index, batch.repeat, *batch.image.shape[1:3])
            batch = augmentation((resident or (lambda b: b))(batch.to(device)), choice)
            return part_loss(model, batch, 0, 0)

        with closing(loader), closing(val):
            dry_run(config, ranks, loader, model, first_loss)
        return {}

    if ranks.first:
        config.out.mkdir(parents=True, exist_ok=True)
        for name, content in (("config.json", plain(config)), ("environment.json", environment(config, ranks))):
            with replacing(config.out / name) as part:
                part.write_text(json.dumps(content, indent=1))
        print(
            f"{recipe.name}: {sum(p.numel() for p in model.parameters()):,} parameters on {device}"
            + (f" and {ranks.size - 1} more" if ranks.size > 1 else "")
            + f"; objective {config.objective}; {plan.num_samples:,} images, {config.epochs} epochs of {len(loader)} steps; "
            f"peak lr {lr:.2g} = {config.lr:.2g} x {config.batch} / {config.lr_batch}"
            + (f"; continuing at step {step}" if step else ""),
            flush=True,
        )

    finite, leaps, agreement = Finite(device, config.on_nonfinite == "skip"), Leaps(), Agreement(ranks)
    local_parts = config.batch // ranks.size // config.microbatch
    began = clock = time.perf_counter()  # clock, logged and idle: since when, which step and which wait the rate is measured
    first, logged, waited, idle, skips, result, text = step, step, 0.0, 0.0, 0, {}, ""
    with (
        closing(loader),
        closing(val),
        logging(config.out, step, steps, plain(config), config.wandb, ranks.first) as (write, advance),
        memory_told(config.microbatch, str(config.out)),
    ):

        def save(top1: float | None = None) -> None:
            mean_waits()  # numbers that are not finite never replace a good checkpoint
            ranks.average(averaged)
            if ranks.first:
                state = {
                    "model": model.state_dict(), "ema": ema.module.state_dict() if ema else None, "optimizer": optimizer.state_dict(),
                    "scaler": scaler.state_dict(), "seen": seen, "step": step, "config": plain(config), "recipe": recipe._asdict(),
                    "microbatch": config.microbatch, "class_names": loader.class_names, "fingerprint": loader.fingerprint,
                    "mean": list(model.pretrained_cfg["mean"]), "std": list(model.pretrained_cfg["std"]),
                }  # fmt: skip
                kept.save(state, step, top1)

        def evaluate() -> dict:
            ranks.average(averaged)
            accuracy = {"top1": evaluate_waits(model, val, augmentation.normalise, ranks, dtype, advance)}
            if ema:
                accuracy["top1_ema"] = evaluate_waits(ema.module, val, augmentation.normalise, ranks, dtype, advance)
            write("val", step, step / len(loader), accuracy)
            return accuracy

        def mean_waits() -> float:
            """The mean loss since the last log line; waits for the device. UserError if numbers are not finite."""
            nonlocal skips
            bad, when = finite.looked_waits()
            skips += bad
            if bad and (config.on_nonfinite == "stop" or skips > config.max_skips):
                raise UserError(f"{config.out}: {why_not_finite(when)}")
            if bad and ranks.first:
                print(
                    f"skipped {bad} updates whose gradients were not finite, of step {when + 1} first",
                    file=sys.stderr,
                    flush=True,
                )
            total, count = ranks.sum(seen.clone()).tolist()
            mean = total / max(count, 1)
            if not math.isfinite(mean) and not skips:
                raise UserError(f"the loss is {mean} at step {step} of {config.out}; lower --lr, or give --clip-grad 1")
            return mean

        def why_not_finite(when: int) -> str:
            """One sentence on a step whose gradients were not finite. Weights are still those before it, so it is done again."""
            epoch, at = divmod(when, len(loader))
            again = next(augmented(loader.batches(epoch, start=at), augmentation, epoch, device))
            again = resident(again) if resident else again
            cause = ""
            for number, part in enumerate(parts_of(again, local_parts)):
                torch.manual_seed(plan.step_seed(epoch, at, number))
                found = first_not_finite(model.train(), lambda part=part: part_loss(model, part, epoch, at))
                if found and not cause:
                    cause = f"{found} is the first that is not, with samples {', '.join(map(str, part.index[:8].tolist()))} ..."
            return (
                f"the gradients of step {when + 1} are not finite; {cause or 'of this rank all are'}; "
                "lower --lr, or give --clip-grad 1 or --on-nonfinite skip"
            )

        for epoch in range(step // len(loader), config.epochs):
            timed = Timed(loader.batches(epoch, start=step % len(loader)))
            for batch in augmented(timed, augmentation, epoch, device):
                at = step % len(loader)
                scheduler.step_update(step)
                model.train()
                batch = resident(batch) if resident else batch
                if step == first and config.objective != "ce":
                    whole = Batch(*(field.cpu() for field in batch))
                    check_batch(whole, loader.labels, f"the score maps of {config.labels or config.data}")
                weights = plan.part_weights(at)
                for number, part in enumerate(parts_of(batch, local_parts)):
                    # Drop-path is the only draw of the device; seeding it by step and part keeps a resumed run equal.
                    torch.manual_seed(plan.step_seed(epoch, at, number))
                    last = number + 1 == local_parts
                    with nullcontext() if last or ranks.size == 1 else network.no_sync():
                        loss = part_loss(network, part, epoch, at) * (weights[number] / local_parts)
                        scaler.scale(loss).backward()
                    seen[0] += loss.detach()
                seen[1] += 1
                scaler.unscale_(optimizer)
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
                if config.clip_grad:
                    torch.nn.utils.clip_grads_with_norm_(model.parameters(), config.clip_grad, norm, foreach=True)
                if scaler.is_enabled():  # it finds overflows itself, and steps over them
                    finite.update(ranks.sum(loss.detach().clone()), step)
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.found_inf = finite.update(norm, step)
                    optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                step += 1
                if ema:
                    ema.update(model, step)
                if step == first + 1 and config.compile != "never" and ranks.first:
                    settle(device)
                    print(f"first step, with what is compiled: {time.perf_counter() - began:.1f} s", flush=True)
                if step % config.log_every == 0:
                    mean_loss = mean_waits()
                    took, rate = time.perf_counter() - clock, (step - logged) * config.batch / (time.perf_counter() - clock)
                    write("train", step, step / len(loader), {
                        "loss": mean_loss, "lr": optimizer.param_groups[0]["lr"], "grad_norm": norm.item(), "images_per_s": rate,
                        "mfu": rate * flops[plan.size(epoch)] / peak, "data_wait_share": (timed.waited - idle) / took,
                        "peak_memory_gb": peak_memory(device) / 1e9,
                    })  # fmt: skip
                    seen.zero_()
                    logged, clock, idle = step, time.perf_counter(), timed.waited
                    if told := leaps.seen(mean_loss):
                        print(f"step {step}: {told}", file=sys.stderr, flush=True)
                    text = f"loss {mean_loss:.3f}  {rate:.0f} img/s"
                advance(1, text)
                stop = agreement(bool(asked()))
                if at + 1 < len(loader) and (stop or (at + 1) % config.save_every == 0):
                    save()
                if stop:
                    break
            waited += timed.waited
            if step % len(loader):
                break
            ended = (epoch + 1) % config.eval_every == 0 or epoch + 1 == config.epochs
            if ended:
                result = evaluate()
                text = f"top-1 {100 * result['top1']:.1f} %"
                advance(0, text)
            save(max(result["top1"], result.get("top1_ema", 0)) if ended else None)
            logged, clock, idle = step, time.perf_counter(), 0.0
            if agreement(bool(asked())):
                break
        if step < steps:
            if ranks.first:
                print(
                    f"{config.out}: stopped after step {step} of {steps}, all saved; the same command with --resume auto goes on"
                )
            return {}
        result = result or evaluate()  # a run that was killed after its last step
    seconds = time.perf_counter() - began
    result |= {
        "date": time.strftime("%Y-%m-%d"), "seed": config.seed,
        "objective": config.objective, "model": config.model, "epochs": config.epochs, "seconds": round(seconds, 1),
        "data_wait_share": round(waited / seconds, 4), "skipped": loader.skipped + val.skipped,
    }  # fmt: skip
    if ranks.first:
        with replacing(config.out / "result.json") as part:
            part.write_text(json.dumps(result, indent=1))
        skipped = f"; skipped {result['skipped']:,} unreadable" if result["skipped"] else ""
        print(f"{config.out}: top-1 {100 * result['top1']:.1f} % on {val.plan.num_samples:,} images, {seconds:.0f} s{skipped}")
    return result


def parts_of(batch: Batch, count: int) -> list[Batch]:
    """A batch cut into `count` equal parts, row by row."""
    fields = [[None] * count if field is None else field.chunk(count) for field in batch]
    return [Batch(*part) for part in zip(*fields, strict=True)]


def main() -> None:
    """The command line: a recipe's name, then any field of its config."""
    recipes = {recipe.__name__: (recipe.__doc__ or "", recipe()) for recipe in RECIPES}
    config = tyro.extras.overridable_config_cli(recipes, description=__doc__)
    try:
        train(config)
    except checkpoints.CheckpointError as error:
        raise UserError(str(error)) from error


def command() -> None:
    """The console script `densefeed-train`."""
    run(main)


if __name__ == "__main__":
    command()
