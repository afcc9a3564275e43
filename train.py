"""Train a vision transformer from dense teacher score maps.

    python train.py RECIPE --loader ffcv --data train.beton --val val.beton --out runs/NAME [--any-field value]

The file reads top to bottom: what a run is, the recipes, the run. `python train.py RECIPE --help` shows every field.
"""

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import timm
import torch
import tyro
from densefeed.models import checkpoints
from densefeed.models.evaluation import top1_waits
from densefeed.models.token_labeling import class_token_loss, hard_label_loss, token_labeling_loss
from densefeed.pipelines.augment import Augmentation, Normalise, augmented
from densefeed.pipelines.batch import Batch, LabelSpec, Loader, on_device
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.folder import FolderSource
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.mixing import Mix, Mixing, label_share, mixed, mixed_images, pooled, share_map
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.policies import Augment
from densefeed.pipelines.resident import ResidentMaps
from densefeed.pipelines.targets import SparseTargets, TargetRules, check_batch, palette_maps, sparse_targets, with_ground_truth
from densefeed.relabel.files import UserError, replacing, run
from densefeed.relabel.progress import steps_bar
from densefeed.relabel.teacher import choose_device
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

# ------------------------------------------------------------------------- what a run is


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run depends on. Fields not given on the command line come from the recipe."""

    data: Path = tyro.MISSING  # training set: a folder of class folders; with --loader ffcv a .beton, or a pattern 'a-*.beton'
    val: Path = tyro.MISSING  # validation set, of the same kind
    out: Path = tyro.MISSING  # run folder: config, metrics, checkpoints
    labels: Path | None = None  # score maps (HDF5) of the training set; a .beton may carry its own
    loader: Literal["folder", "ffcv"] = "folder"  # what --data and --val are: folders of images, or .beton files
    threads: int = os.cpu_count() or 1  # decoding threads
    on_bad_sample: Literal["raise", "skip"] = "raise"  # an unreadable sample stops the run, or is skipped and counted

    model: str = "lvvit_s"  # any timm classifier; token-label needs a model with a token head (lvvit_*)
    drop_path: float = 0.1  # stochastic depth of the last block, probability
    size: int = 224  # side of the network's input, pixels
    sizes: tuple[tuple[int, int], ...] = ()  # growing in training: pairs FROM_EPOCH PIXELS, the first from epoch 0; empty: size
    objective: Literal["ce", "relabel", "token-label"] = "token-label"  # hard labels; dense label of the crop; of every token
    token_weight: float = 0.5  # beta of equation 7, the weight of the tokens' loss
    smoothing: float = 0.1  # label smoothing, probability
    temperature: float = 1.0  # of dense labels: above 1 softer, below harder than the teacher's
    ground_truth: Literal["none", "published", "intended"] = "none"  # mix the image's label into the class token's dense one
    geometry: Literal["aligned", "compatible"] = "aligned"  # labels of what a token shows, or of where published code looks
    outside: Literal["ignore", "uniform"] = "ignore"  # what lies outside map, image or crop: no label, or all classes alike
    labels_on_device: bool = False  # keep all score maps in the device's memory (ImageNet: 9 GB), not in the batches
    fused_head: Literal["auto", "always", "never"] = "auto"  # tokens' logits never whole; auto: from 4,096 classes on
    mixtoken: bool = True  # exchange a box of tokens with the partner image in every step
    cutmix: float = 0.0  # alpha of CutMix, which exchanges a box of pixels; 0: none
    mixup: float = 0.0  # alpha of MixUp, which blends images; 0: none
    mix_prob: float = 1.0  # share of the steps that CutMix or MixUp mix
    switch_prob: float = 0.5  # with both, the share of those that are CutMix
    mix_label: Literal["area", "regions"] = "area"  # dense label of a mixed image: both labels by area; or of what it shows

    crop_scale: tuple[float, float] = (0.08, 1.0)  # area of a training crop, share of the image
    hflip: float = 0.5  # probability of a left-right flip
    rand_augment: str = ""  # as timm writes it, e.g. rand-m9-mstd0.5-inc1; empty: none
    color_jitter: tuple[float, ...] = ()  # one number, or brightness, contrast, saturation and perhaps hue; empty: none
    interpolation: Literal["random", "bilinear", "bicubic"] = "random"  # where RandAugment rotates, shears and moves
    erase_probability: float = 0.0  # of random erasing
    erase_mode: Literal["const", "rand", "pixel"] = "pixel"  # what is erased becomes the mean colour, one colour, or noise
    erase_count: int = 1  # most boxes erased of an image
    erase_max_area: float = 1 / 3  # most that is erased of an image, share
    order: Literal["random", "blocks"] = "random"  # of the training set; blocks: reads runs of storage, for disks and networks
    views: int = 1  # crops of each image in an epoch (repeated augmentation), which makes an epoch so many times longer
    crop_pct: float = 0.9  # side of the evaluation crop, share of the shorter side

    epochs: int = 300  # passes over the training set
    batch: int = 1024  # images per optimiser step
    lr: float = 1e-3  # peak learning rate at a batch of lr_batch images; scaled linearly with the batch
    lr_batch: int = 640  # the batch that lr is meant for, images
    min_lr: float = 1e-5  # learning rate at the end, not scaled
    warmup_epochs: float = 5  # linear from 1e-6
    weight_decay: float = 0.05  # AdamW's; not on biases, norms, tables
    ema: float = 0.99992  # decay per step of the averaged weights, with warm-up; 0: none
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 autocast on CUDA, float32 on a CPU

    seed: int = 0  # of weights, order, crops, mixing
    device: str = "auto"  # auto: cuda if there is one, else cpu
    resume: Literal["auto", "never"] = "never"  # auto: continue from OUT/last.pt if it is there
    eval_every: int = 10  # epochs between evaluations; the last epoch always
    log_every: int = 50  # steps between log lines


RANGES = {  # of numbers, both ends allowed
    "lr": (1e-12, math.inf), "min_lr": (0, math.inf), "weight_decay": (0, math.inf), "warmup_epochs": (0, math.inf),
    "ema": (0, 1), "drop_path": (0, 0.99), "token_weight": (0, math.inf), "temperature": (1e-3, math.inf),
    "cutmix": (0, math.inf), "mixup": (0, math.inf), "mix_prob": (0, 1), "switch_prob": (0, 1), "erase_probability": (0, 1),
}  # fmt: skip
FUSED_FROM = 4096  # classes; below, logits that exist whole take less memory than the rest of a step, and less time

# Fields in which a resumed run may differ from the run it continues.
FREE = {
    "out", "loader", "data", "val", "labels", "threads", "device", "resume", "eval_every", "log_every", "on_bad_sample",
    "labels_on_device",
}  # fmt: skip

# ------------------------------------------------------------------------- recipes


def lvvit_s_224_token_label() -> Config:
    """LV-ViT-S on ImageNet-1k with token labels, 300 epochs; needs a GPU.

    python train.py lvvit_s_224_token_label --loader ffcv --data train.beton --val val.beton --out runs/lvvit_s

    Paper: 83.3 % top-1 (Table 10). Not run here.
    """
    return Config(model="lvvit_s", rand_augment="rand-m9-mstd0.5-inc1", erase_probability=0.25)


def lvvit_s_160_to_224_token_label() -> Config:
    """lvvit_s_224_token_label in growing sizes: 160 px, from epoch 100 on 192 px, from epoch 200 on 224 px.

    python train.py lvvit_s_160_to_224_token_label --loader ffcv --data train.beton --val val.beton --out runs/lvvit_s

    An epoch of 160 px has half the tokens of one of 224 px (100 instead of 196), one of 192 px three quarters (144), so the
    whole run 75 % of them. Not run here.
    """
    return replace(lvvit_s_224_token_label(), sizes=((0, 160), (100, 192), (200, 224)))


def lvvit_micro_token_label() -> Config:
    """The demo's student with token labels: digit scenes at 64 px, a minute on two CPU cores.

    python train.py lvvit_micro_token_label --loader ffcv --data quickstart/train.beton --val quickstart/val.beton --out runs/token-label

    No MixToken and no drop-path: they regularise trainings of hundreds of epochs and slow one of eight.
    """
    return Config(
        model="lvvit_micro", size=64, mixtoken=False, drop_path=0.0, crop_scale=(0.25, 1.0), hflip=0.0, crop_pct=1.0,
        epochs=8, batch=32, lr=1e-3, lr_batch=32, min_lr=1e-5, warmup_epochs=1, ema=0.0, eval_every=2, log_every=25,
    )  # fmt: skip


def lvvit_micro_token_label_mixtoken() -> Config:
    """The demo's student with token labels and MixToken; all else as lvvit_micro_token_label.

    python train.py lvvit_micro_token_label_mixtoken --loader ffcv --data quickstart/train.beton --val quickstart/val.beton --out runs/mix
    """
    return replace(lvvit_micro_token_label(), mixtoken=True)


def lvvit_micro_token_label_compatible() -> Config:
    """The demo's student with labels read where the published code reads them; all else as lvvit_micro_token_label.

    python train.py lvvit_micro_token_label_compatible --loader ffcv --data quickstart/train.beton \
        --val quickstart/val.beton --out runs/compatible
    """
    return replace(lvvit_micro_token_label(), geometry="compatible", outside="uniform")


def lvvit_micro_relabel() -> Config:
    """The demo's student with one dense label a crop (ReLabel, arXiv 2101.05022); all else as lvvit_micro_token_label.

    python train.py lvvit_micro_relabel --loader ffcv --data quickstart/train.beton --val quickstart/val.beton --out runs/relabel
    """
    return replace(lvvit_micro_token_label(), objective="relabel")


def lvvit_micro_ce() -> Config:
    """The demo's student with image labels only; all else as lvvit_micro_token_label.

    python train.py lvvit_micro_ce --loader ffcv --data quickstart/train.beton --val quickstart/val.beton --out runs/ce
    """
    return replace(lvvit_micro_token_label(), objective="ce")


def nfnet_micro_ce() -> Config:
    """The demo's teacher: a small normaliser-free network with plain cross entropy, a minute on two CPU cores.

    python train.py nfnet_micro_ce --loader ffcv --data quickstart/train.beton --val quickstart/val.beton --out runs/teacher
    """
    return replace(
        lvvit_micro_token_label(), model="nfnet_micro", objective="ce", smoothing=0.0, epochs=16, lr=5e-3, eval_every=4
    )  # fmt: skip


RECIPES = (
    lvvit_s_224_token_label,
    lvvit_s_160_to_224_token_label,
    lvvit_micro_token_label,
    lvvit_micro_token_label_mixtoken,
    lvvit_micro_token_label_compatible,
    lvvit_micro_relabel,
    lvvit_micro_ce,
    nfnet_micro_ce,
)

# ------------------------------------------------------------------------- set up


def check_values(config: Config) -> None:
    """UserError where a field's value makes no sense, whatever the data."""
    positive = ("batch", "epochs", "lr_batch", "size", "views", "threads", "eval_every", "log_every")
    wrong = [name for name in positive if getattr(config, name) < 1]
    if wrong:
        raise UserError(f"--{wrong[0].replace('_', '-')} must be at least 1")
    if not 0 <= config.seed < 2**63:
        raise UserError("--seed must be from 0 to 2^63 - 1")
    for name, (least, most) in RANGES.items():
        value = getattr(config, name)
        if not (least <= value <= most and math.isfinite(value)):
            bounds = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
            raise UserError(f"--{name.replace('_', '-')} is {value:g}, and must be {bounds}")
    if any(config.color_jitter) and config.rand_augment and "3a" not in config.rand_augment:
        raise UserError("--color-jitter is off beside --rand-augment, as in timm; give one of the two")
    low, high = config.crop_scale
    if not (0 < low <= high <= 1 and 0 < config.crop_pct <= 1 and 0 <= config.smoothing < 1 and 0 <= config.hflip <= 1):
        raise UserError("--crop-scale, --crop-pct, --smoothing and --hflip are shares: from 0 to 1, and crops not empty")


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


def plain(config: Config) -> dict:
    """The config as JSON can hold it."""
    return json.loads(json.dumps(asdict(config), default=str))


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


def augment_of(config: Config) -> Augment:
    """What happens to a crop before the network sees it."""
    jitter = config.color_jitter or (0.0,)
    return Augment(
        rand_augment=config.rand_augment, color_jitter=jitter if len(jitter) > 1 else jitter[0], interpolation=config.interpolation,
        erase_probability=config.erase_probability, erase_mode=config.erase_mode, erase_count=config.erase_count,
        erase_max_area=config.erase_max_area,
    )  # fmt: skip


def mixing_of(config: Config, plan: EpochPlan) -> Mixing:
    """What is mixed with what."""
    return Mixing(
        plan=plan, mixtoken=config.mixtoken, cutmix=config.cutmix, mixup=config.mixup, prob=config.mix_prob,
        switch_prob=config.switch_prob,
    )  # fmt: skip


# ------------------------------------------------------------------------- the run


def dense_targets(
    config: Config, batch: Batch, spec: LabelSpec, rules: TargetRules, grid: int, mix: Mix | None
) -> tuple[SparseTargets, SparseTargets | None]:
    """Targets of the class token, and of the grid of tokens if they are asked for; both mixed as the logits are."""
    regions = mix is not None and config.mix_label == "regions"
    maps, tokens, shown = palette_maps(batch, spec, rules), None, None
    if regions or config.objective == "token-label":
        tokens = shown = sparse_targets(batch, spec, grid, rules, maps)
        if mix is not None and (regions or not config.mixtoken):
            shown = mixed(tokens, share_map(mix, grid))
    whole = pooled(shown) if regions else sparse_targets(batch, spec, 1, rules, maps)
    if config.ground_truth != "none":
        whole = with_ground_truth(whole, batch.label, spec.num_classes, config.smoothing, config.ground_truth)
    if mix is not None and not regions:
        whole = mixed(whole, label_share(mix))
    # The model un-mixes what MixToken has mixed, so that every token answers for its own image.
    return whole, tokens if config.mixtoken else shown


def objective_loss(
    config: Config, output, batch: Batch, spec: LabelSpec | None, rules: TargetRules, grid: int, mix: Mix | None
) -> Tensor:
    """The loss of a step: equation 7, or its first term alone."""
    if config.objective == "ce":
        share = None if mix is None else label_share(mix)
        return hard_label_loss(output, batch.label, batch.weight, config.smoothing, share)
    whole, tokens = dense_targets(config, batch, spec, rules, grid, mix)
    if config.objective == "relabel":
        return class_token_loss(output, whole)
    return token_labeling_loss(output, whole, tokens, config.token_weight)


def step_loss(
    config: Config, model: nn.Module, batch: Batch, spec: LabelSpec | None, rules: TargetRules, mix: Mix | None, amp: bool
) -> Tensor:
    """The loss of a batch on the device, augmented; nothing in it waits for the device."""
    # Where a network has no tokens of its own, a grid still says what the regions of a mixed image show.
    image, grid = batch.image, max(1, batch.image.shape[-1] // getattr(model, "patch_size", 16))
    if mix is not None and not config.mixtoken:
        image = mixed_images(image, mix)
    with torch.autocast(image.device.type, torch.bfloat16, enabled=amp):
        output = model(image, share_map(mix, grid) > 0.5) if config.mixtoken else model(image)
    return objective_loss(config, output, batch, spec, rules, grid, mix)


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
    model.to(device, memory_format=torch.channels_last)
    lr = config.lr * config.batch / config.lr_batch
    optimizer = create_optimizer_v2(model, "adamw", lr=lr, weight_decay=config.weight_decay, fused=True)
    steps = config.epochs * len(loader)
    scheduler = CosineLRScheduler(
        optimizer, t_initial=steps, lr_min=config.min_lr, warmup_t=round(config.warmup_epochs * len(loader)),
        warmup_lr_init=1e-6, t_in_epochs=False,
    )  # fmt: skip
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
        f"{loader.plan.num_samples:,} images, {config.epochs} epochs of {len(loader)} steps; peak lr {lr:.2g}"
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

        for epoch in range(step // len(loader), config.epochs):
            grid = loader.plan.size(epoch) // getattr(model, "patch_size", loader.plan.size(epoch))
            timed = Timed(loader.batches(epoch, start=step % len(loader)))
            for batch in augmented(timed, augmentation, epoch, device):
                # Drop-path is the only draw of the device; seeding it by the step keeps a resumed run equal.
                torch.manual_seed(loader.plan.step_seed(epoch, step % len(loader)))
                scheduler.step_update(step)
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
            if (epoch + 1) % config.eval_every == 0 or epoch + 1 == config.epochs:
                result = evaluate()
                text = f"top-1 {100 * result['top1']:.1f} %"
                advance(0, text)
            save()
            logged, clock = step, time.perf_counter()
        result = result or evaluate()  # a run that was killed after its last step
    seconds = time.perf_counter() - began
    result |= {
        "date": time.strftime("%Y-%m-%d"), "seed": config.seed,
        "objective": config.objective, "model": config.model, "epochs": config.epochs, "seconds": round(seconds, 1),
        "data_wait_share": round(waited / seconds, 4), "skipped": loader.skipped + val.skipped,
    }  # fmt: skip
    with replacing(config.out / "result.json") as part:
        part.write_text(json.dumps(result, indent=1))
    skipped = f"; skipped {result['skipped']:,} unreadable" if result["skipped"] else ""
    print(f"{config.out}: top-1 {100 * result['top1']:.1f} % on {val.plan.num_samples:,} images, {seconds:.0f} s{skipped}")
    return result


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
