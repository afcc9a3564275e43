"""Train a vision transformer from dense teacher score maps.

    python train.py RECIPE --loader ffcv --data train.beton --val val.beton --out runs/NAME [--any-field value]

What a run is stands in training/config.py, the recipes in training/recipes.py; this file is the run, top to bottom.
`python train.py RECIPE --help` shows every field.
"""

import inspect
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

import timm
import torch
import tyro
from densefeed.models import checkpoints
from densefeed.models.evaluation import top1_waits
from densefeed.pipelines.augment import Augmentation, Normalise, augmented
from densefeed.pipelines.batch import Batch, Loader, on_device
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.folder import FolderSource
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.resident import ResidentMaps
from densefeed.pipelines.targets import TargetRules, check_batch
from densefeed.relabel.files import UserError, replacing, run
from densefeed.relabel.progress import steps_bar
from densefeed.relabel.teacher import choose_device
from densefeed.training.config import FREE, Config, check_values, model_arguments, plain
from densefeed.training.objective import augment_of, mixing_of, step_loss
from densefeed.training.recipes import RECIPES
from densefeed.training.schedule import learning_rate, peak_rate, total_epochs
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

FUSED_FROM = 4096  # classes; below, logits that exist whole take less memory than the rest of a step, and less time

# ------------------------------------------------------------------------- set up


def open_loader(config: Config, mode: Literal["train", "evaluate"]) -> ThreadedLoader:
    """The loader of the training or the validation set."""
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
    plan = EpochPlan(
        num_samples=len(source.labels), batch=config.batch, seed=config.seed, mode=mode, order=config.order, views=config.views,
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


def environment(config: Config, device: torch.device) -> dict:
    """What a result depends on beside the config."""
    return {
        "command": sys.argv, "python": platform.python_version(), "torch": torch.__version__, "timm": timm.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine(),
        "cores": os.cpu_count(), "precision": config.precision,
    }  # fmt: skip


def find_checkpoint(config: Config, fingerprint: str) -> dict | None:
    """The checkpoint to continue from. UserError if the folder holds a run and may not be continued, or another run."""
    path = config.out / "last.pt"
    if not path.exists():
        return None
    if config.resume == "never":
        raise UserError(f"{path} exists already; continue it with --resume auto, or choose another --out")
    checkpoint = checkpoints.load(path)
    if not {"config", "fingerprint", "optimizer", "step", "model"} <= set(checkpoint):
        raise UserError(f"{path} is no checkpoint of a run of ours; choose another --out")
    now, then = plain(config), checkpoint["config"]
    differs = [name for name in now if name not in FREE and now[name] != then.get(name)]
    if differs:
        raise UserError(
            f"{path} was trained with {differs[0]}={then.get(differs[0])}; give the same value, or choose another --out"
        )
    if checkpoint["fingerprint"] != fingerprint:
        raise UserError(f"{path} was trained on other images than {config.data} holds; give the same, or choose another --out")
    return checkpoint


def forget_after(step: int, path: Path) -> None:
    """Drop the records of steps that a continued run will do again."""
    if path.exists():
        # A line that a kill or a full disk cut short ends in no newline; it is forgotten too.
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        kept = [line for line in whole if json.loads(line)["step"] <= step]
        with replacing(path) as part:
            part.write_text("".join(kept))


# ------------------------------------------------------------------------- the run


def evaluate_waits(
    model: nn.Module, loader: Loader, normalise: Normalise, device: torch.device, advance: Callable[[int, str], None]
) -> float:
    """Top-1 accuracy on the validation set; `advance(0, text)` shows how far it is."""

    def prepared() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for number, batch in enumerate(on_device(loader.batches(0), device), start=1):
            yield normalise(batch.image), batch.label, batch.weight
            advance(0, f"evaluating, {number} of {len(loader)}")

    return top1_waits(model, prepared())


def finite_waits(loss: Tensor, step: int, config: Config) -> float:
    """The loss as a number; waits for the device. UserError if it is not finite."""
    value = loss.item()
    if not math.isfinite(value):
        raise UserError(f"the loss is {value} at step {step} of {config.out}; lower --lr")
    return value


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
    """Run or continue a training; returns (and writes to result.json) its result."""
    device = choose_device(config.device)
    amp = config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda")
    check_values(config)
    loader, val = open_loader(config, "train"), open_loader(config, "evaluate")
    check(config, loader, val)
    torch.manual_seed(config.seed)
    model, recipe = build_model(config, loader.num_classes)
    if config.init and not (config.out / "last.pt").exists():  # else the run continues, or is refused below
        print(checkpoints.initialise(model, config.init))
    model.to(device, memory_format=torch.channels_last)
    lr, epochs = peak_rate(config), total_epochs(config)
    optimizer = create_optimizer_v2(model, "adamw", lr=lr, weight_decay=config.weight_decay, fused=True)
    steps = epochs * len(loader)
    augment, mixing = augment_of(config), mixing_of(config, loader.plan)
    augmentation = Augmentation(loader.plan, augment, model.pretrained_cfg["mean"], model.pretrained_cfg["std"]).to(device)
    rules = TargetRules(config.smoothing, config.temperature, config.outside, config.geometry, sheared=augment.shears)
    resident = ResidentMaps(loader.source, device) if config.labels_on_device and config.objective != "ce" else None
    ema = ModelEmaV3(model, decay=config.ema, use_warmup=True, foreach=True) if config.ema else None

    checkpoint, step = find_checkpoint(config, loader.fingerprint), 0
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        if ema:
            ema.module.load_state_dict(checkpoint["ema"])
        step = checkpoint["step"]
    config.out.mkdir(parents=True, exist_ok=True)
    forget_after(step, config.out / "metrics.jsonl")
    for name, content in (("config.json", plain(config)), ("environment.json", environment(config, device))):
        with replacing(config.out / name) as part:
            part.write_text(json.dumps(content, indent=1))
    print(
        f"{recipe.name}: {sum(p.numel() for p in model.parameters()):,} parameters on {device}; objective {config.objective}; "
        f"{loader.plan.num_samples:,} images, {epochs} epochs of {len(loader)} steps; "
        f"peak lr {lr:.2g} ({config.lr:g} x {config.batch} / {config.lr_batch})"
        + (f"; continuing at step {step}" if step else "")
    )

    def save() -> None:
        state = {
            "model": model.state_dict(), "ema": ema.module.state_dict() if ema else None, "optimizer": optimizer.state_dict(),
            "step": step, "config": plain(config), "recipe": recipe._asdict(), "class_names": loader.class_names,
            "fingerprint": loader.fingerprint,
            "mean": list(model.pretrained_cfg["mean"]), "std": list(model.pretrained_cfg["std"]),
        }  # fmt: skip
        # Through a Python file: a full disk is an OSError there, and only a failed assertion in torch's own writer.
        with replacing(config.out / "last.pt") as part, open(part, "wb") as file:
            torch.save(state, file)

    began = clock = time.perf_counter()  # clock and logged: since when, and which step, the rate is measured
    first, logged, waited, result = step, step, 0.0, {}
    losses, text = torch.zeros((), device=device), ""
    with (
        closing(loader),
        closing(val),
        open(config.out / "metrics.jsonl", "a") as metrics,
        SummaryWriter(config.out / "tensorboard", purge_step=step) as board,
        steps_bar(f"train {config.out.name}", steps, step) as advance,
    ):

        def write(kind: str, values: dict) -> None:
            metrics.write(json.dumps({"kind": kind, "step": step, "epoch": round(step / len(loader), 4)} | values) + "\n")
            metrics.flush()
            for name, value in values.items():
                board.add_scalar(f"{kind}/{name}", value, step)

        def evaluate() -> dict:
            accuracy = {"top1": evaluate_waits(model, val, augmentation.normalise, device, advance)}
            if ema:
                accuracy["top1_ema"] = evaluate_waits(ema.module, val, augmentation.normalise, device, advance)
            write("val", accuracy)
            return accuracy

        for epoch in range(step // len(loader), epochs):
            grid = loader.plan.size(epoch) // getattr(model, "patch_size", loader.plan.size(epoch))
            timed = Timed(loader.batches(epoch, start=step % len(loader)))
            for batch in augmented(timed, augmentation, epoch, device):
                # Drop-path is the only draw of the device; seeding it by the step keeps a resumed run equal.
                torch.manual_seed(loader.plan.step_seed(epoch, step % len(loader)))
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(config, step, len(loader))
                model.train()
                if resident:
                    batch = resident(batch)
                if step == first and config.objective != "ce":
                    whole = Batch(*(field.cpu() for field in batch))
                    check_batch(whole, loader.labels, f"the score maps of {config.labels or config.data}")
                mix = mixing.draw(epoch, step % len(loader), batch.image.shape[-1], grid).to(device) if mixing else None
                loss = step_loss(config, model, batch, loader.labels, rules, mix, amp)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                step += 1
                if ema:
                    ema.update(model, step)
                losses += loss.detach()
                if step % config.log_every == 0:
                    mean_loss = finite_waits(losses, step, config) / config.log_every
                    losses.zero_()
                    rate = (step - logged) * config.batch / (time.perf_counter() - clock)
                    logged, clock = step, time.perf_counter()
                    write("train", {"loss": mean_loss, "lr": optimizer.param_groups[0]["lr"], "images_per_s": rate})
                    text = f"loss {mean_loss:.3f}  {rate:.0f} img/s"
                advance(1, text)
            waited += timed.waited
            finite_waits(losses, step, config)  # before what is saved replaces a good checkpoint
            if (epoch + 1) % config.eval_every == 0 or epoch + 1 == epochs:
                result = evaluate()
                text = f"top-1 {100 * result['top1']:.1f} %"
                advance(0, text)
            save()
            logged, clock = step, time.perf_counter()
        result = result or evaluate()  # a run that was killed after its last step
    seconds = time.perf_counter() - began
    result |= {
        "date": time.strftime("%Y-%m-%d"), "seed": config.seed,
        "objective": config.objective, "model": config.model, "epochs": epochs, "seconds": round(seconds, 1),
        "data_wait_share": round(waited / seconds, 4), "skipped": loader.skipped + val.skipped,
    }  # fmt: skip
    with replacing(config.out / "result.json") as part:
        part.write_text(json.dumps(result, indent=1))
    skipped = f"; skipped {result['skipped']:,} unreadable" if result["skipped"] else ""
    print(f"{config.out}: top-1 {100 * result['top1']:.1f} % on {val.plan.num_samples:,} images, {seconds:.0f} s{skipped}")
    return result


def main() -> None:
    """The command line: a recipe's name, then any field of its config."""

    def about(recipe: Callable[[], Config]) -> str:
        """In the list of recipes a line of each; for one's own --help its whole docstring."""
        text = inspect.getdoc(recipe)
        return text if recipe.__name__ in sys.argv else text.partition("\n")[0]

    recipes = {recipe.__name__: (about(recipe), recipe()) for recipe in RECIPES}
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
