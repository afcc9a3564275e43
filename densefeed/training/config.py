"""Config: everything a run depends on, and which values of it make sense."""

import ast
import json
import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, get_type_hints

import tyro

from densefeed.system.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run depends on. Fields not given on the command line come from the recipe."""

    # training set: a folder of class folders; with --loader ffcv or dali a .beton or 'a-*.beton'
    data: Path = tyro.MISSING
    val: Path = tyro.MISSING  # validation set, of the same kind
    out: Path = tyro.MISSING  # run folder: config, metrics, checkpoints
    labels: Path | None = None  # score maps (HDF5) of the training set; a .beton may carry its own
    # folders of images; .beton files; either, decoded by NVIDIA DALI
    loader: Literal["folder", "ffcv", "dali"] = "folder"
    # decoding threads of each rank
    threads: int = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    # an unreadable sample stops the run, or is skipped and counted
    on_bad_sample: Literal["raise", "skip"] = "raise"

    # any timm classifier; token-label needs a model with a token head (lvvit_*, dhvt_*, t2t_vit_*)
    model: str = "lvvit_s"
    # more arguments of the model, each NAME=VALUE as Python writes it, e.g. depth=12
    model_kwargs: tuple[str, ...] = ()
    # weights to begin from: a checkpoint of ours, of the published LV-ViT, or of timm for this
    # model
    init: Path | None = None
    drop_path: float = 0.1  # stochastic depth of the last block, probability
    size: int = 224  # side of the network's input, pixels
    # growing in training: pairs FROM_EPOCH PIXELS, the first from epoch 0; empty: size
    sizes: tuple[tuple[int, int], ...] = ()
    # hard labels; dense label of the crop; of every token
    objective: Literal["ce", "relabel", "token-label"] = "token-label"
    token_weight: float = 0.5  # beta of equation 7, the weight of the tokens' loss
    # also tell how far apart two tokens lie, in that variant
    drloc: Literal["none", "l1", "signed", "ce", "reg", "all"] = "none"
    drloc_weight: float = 0.5  # lambda, the weight of that loss
    drloc_pairs: int = 64  # of tokens, in each image
    drloc_grid: int = 7  # rows to which the grid of tokens is pooled for it; 0: none
    # as the public code has it: offsets counted in places, weight that rises and falls, other heads
    drloc_published: bool = False
    smoothing: float = 0.1  # label smoothing, probability
    temperature: float = 1.0  # of dense labels: above 1 softer, below harder than the teacher's
    # mix the image's label into the class token's dense one
    ground_truth: Literal["none", "published", "intended"] = "none"
    # labels of what a token shows, or of where published code looks
    geometry: Literal["aligned", "published"] = "aligned"
    # what lies outside map, image or crop: no label, or all classes alike
    outside: Literal["ignore", "uniform"] = "ignore"
    # keep all score maps in the device's memory (ImageNet: 9 GB), not in the batches
    labels_on_device: bool = False
    # tokens' logits never whole; auto: from 4,096 classes on
    fused_head: Literal["auto", "always", "never"] = "auto"
    mixtoken: bool = True  # exchange a box of tokens with the partner image in every step
    cutmix: float = 0.0  # alpha of CutMix, which exchanges a box of pixels; 0: none
    mixup: float = 0.0  # alpha of MixUp, which blends images; 0: none
    mix_prob: float = 1.0  # share of the steps that CutMix or MixUp mix
    switch_prob: float = 0.5  # with both, the share of those that are CutMix
    # dense label of a mixed image: both labels by area; or of what it shows
    mix_label: Literal["area", "regions"] = "area"

    # train an agent CNN beside the model, perhaps with its weights
    bootstrap: Literal["none", "joint", "shared"] = "none"
    agent: Literal["res-like", "base"] = "res-like"  # tables 7 and 6 of Bootstrapping ViTs
    # more arguments of the agent, as model_kwargs: down, pool, norm
    agent_kwargs: tuple[str, ...] = ()
    distill_weight: float = 1.0  # of what model and agent learn of each other's answers
    distill_temperature: float = 4.0  # of these answers
    feature_weight: float = 10.0  # of what the model's blocks learn of the agent's
    feature_decay: Literal["linear", "none"] = "linear"  # of that weight, to 0 after the last epoch
    feature_blocks: tuple[int, ...] = ()  # which learn so, counted from 1; empty: all
    # before features are compared; layernorm: as published
    feature_norm: Literal["l2-token", "l2-whole", "layernorm"] = "l2-token"
    # to equal numbers: neighbors in the sequence, or squares
    feature_adapt: Literal["sequence", "pool-2d"] = "sequence"
    # of which shared weights gradients are aligned together
    align: Literal["global", "layer", "tensor", "none"] = "global"

    crop_scale: tuple[float, float] = (0.08, 1.0)  # area of a training crop, share of the image
    hflip: float = 0.5  # probability of a left-right flip
    # most pixels that a crop moves by, each way; with --crop-scale 1 1 CIFAR's crop of a padded
    # image
    shift: int = 0
    rand_augment: str = ""  # as timm writes it, e.g. rand-m9-mstd0.5-inc1; empty: none
    # one number, or brightness, contrast, saturation and perhaps hue; empty: none
    color_jitter: tuple[float, ...] = ()
    # where RandAugment rotates, shears and moves
    interpolation: Literal["random", "bilinear", "bicubic"] = "random"
    erase_probability: float = 0.0  # of random erasing
    # what is erased becomes the mean color, one color, or noise
    erase_mode: Literal["const", "rand", "pixel"] = "pixel"
    erase_count: int = 1  # most boxes erased of an image
    erase_max_area: float = 1 / 3  # most that is erased of an image, share
    # of the training set; blocks: reads runs of storage, for disks and networks
    order: Literal["random", "blocks"] = "random"
    # crops of each image in an epoch (repeated augmentation), which makes an epoch so many times
    # longer
    repeats: int = 1
    crop_pct: float = 0.9  # side of the evaluation crop, share of the shorter side

    epochs: int = 300  # passes over the training set until the learning rate is at its lowest
    cooldown_epochs: int = 0  # further passes at min_lr
    batch: int = 1024  # images per optimizer step, all ranks together
    # images that go through the network at once, for memory; 0: all that a rank has of a batch
    microbatch: int = 0
    # peak learning rate at a batch of lr_batch images; scaled linearly with the batch
    lr: float = 1e-3
    lr_batch: int = 640  # the batch that lr is meant for, images
    min_lr: float = 1e-5  # learning rate at the end, not scaled
    warmup_epochs: float = 5  # linear from 1e-6
    lr_updates: Literal["step", "epoch"] = "step"  # when the learning rate changes
    weight_decay: float = 0.05  # AdamW's; not on biases, norms, tables
    ema: float = 0.99992  # decay per step of the averaged weights, with warm-up; 0: none
    clip_grad: float = 0.0  # longest gradient, by its norm; longer ones are shortened; 0: any
    # where gradients are not finite: end the run, or leave the weights alone
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skips: int = 10  # such steps that --on-nonfinite skip allows
    # auto: bf16 autocast on CUDA, float32 on a CPU
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    # blocks: each once, and the loss; whole: all as one; graph: that, as CUDA graphs; auto: blocks
    # on CUDA, else never
    compile: Literal["auto", "never", "blocks", "whole", "graph"] = "auto"
    # BatchNorm over the images of all ranks; else each rank's own, averaged when they are saved
    sync_batchnorm: bool = False
    # train in evaluation mode: BatchNorm as it was learned, no drop-path (DHVT's fine-tuning)
    frozen_statistics: bool = False
    # compute blocks anew in the backward pass instead of keeping them: less memory, more time
    grad_checkpointing: bool = False

    seed: int = 0  # of weights, order, crops, mixing
    device: str = "auto"  # auto: cuda if there is one, else cpu
    # auto: continue from the newest checkpoint in OUT if there is one
    resume: Literal["auto", "never"] = "never"
    save_every: int = 1000  # steps between checkpoints within an epoch; each epoch's end always
    keep: int = 2  # newest checkpoints that stay; the best one does in any case
    eval_every: int = 10  # epochs between evaluations; the last epoch always
    log_every: int = 50  # steps between log lines
    wandb: str = ""  # Weights & Biases project that follows the run; empty: none
    dry_run: bool = False  # only check data, labels, recipe and memory, in seconds


RANGES = {  # of numbers, both ends allowed
    "lr": (1e-12, math.inf),
    "min_lr": (0, math.inf),
    "weight_decay": (0, math.inf),
    "warmup_epochs": (0, math.inf),
    "cooldown_epochs": (0, math.inf),
    "ema": (0, 1),
    "drop_path": (0, 0.99),
    "token_weight": (0, math.inf),
    "temperature": (1e-3, math.inf),
    "clip_grad": (0, math.inf),
    "cutmix": (0, math.inf),
    "mixup": (0, math.inf),
    "mix_prob": (0, 1),
    "switch_prob": (0, 1),
    "erase_probability": (0, 1),
    "drloc_weight": (0, math.inf),
    "drloc_grid": (0, math.inf),
    "distill_weight": (0, math.inf),
    "distill_temperature": (1e-3, math.inf),
    "feature_weight": (0, math.inf),
}

# Fields, by how their names begin; the option that they belong to, and its values with which nobody
# reads them.
READ_WITH = {
    "drloc_": ("drloc", ("none",)),
    "agent": ("bootstrap", ("none",)),
    "distill_": ("bootstrap", ("none",)),
    "feature_": ("bootstrap", ("none",)),
    "align": ("bootstrap", ("none", "joint")),
}

# Fields in which a resumed run may differ from the run it continues.
FREE = {
    "out",
    "loader",
    "data",
    "val",
    "labels",
    "threads",
    "device",
    "resume",
    "eval_every",
    "log_every",
    "on_bad_sample",
    "labels_on_device",
    "microbatch",
    "compile",
    "grad_checkpointing",
    "save_every",
    "keep",
    "wandb",
    "dry_run",
    "on_nonfinite",
    "max_skips",
    "init",
}


def check_values(config: Config) -> None:
    """UserError where a field's value makes no sense, whatever the data."""
    positive = (
        "batch",
        "epochs",
        "lr_batch",
        "size",
        "repeats",
        "threads",
        "eval_every",
        "log_every",
        "save_every",
        "keep",
    )
    wrong = [name for name in (*positive, "drloc_pairs") if getattr(config, name) < 1]
    if wrong:
        raise UserError(f"--{wrong[0].replace('_', '-')} must be at least 1")
    if not 0 <= config.seed < 2**63:
        raise UserError("--seed must be from 0 to 2^63 - 1")
    for name, (least, most) in RANGES.items():
        value = getattr(config, name)
        if not (least <= value <= most and math.isfinite(value)):
            finite = "" if math.isfinite(value) else " and finite"
            bounds = (
                f"at least {least:g}{finite}" if most == math.inf else f"from {least:g} to {most:g}"
            )
            raise UserError(f"--{name.replace('_', '-')} is {value:g}, and must be {bounds}")
    if any(config.color_jitter) and config.rand_augment and "3a" not in config.rand_augment:
        raise UserError(
            "--color-jitter is off beside --rand-augment, as in timm; give one of the two"
        )
    if config.drloc == "all" and config.mixtoken:
        raise UserError(
            "--drloc all reads every block's tokens, which no model here tells of mixed ones; give --no-mixtoken"
        )
    if config.frozen_statistics and config.objective == "token-label":
        raise UserError(
            "--frozen-statistics trains in evaluation mode, where tokens give no answers; give --objective ce or relabel"
        )
    low, high = config.crop_scale
    if not (
        0 < low <= high <= 1
        and 0 < config.crop_pct <= 1
        and 0 <= config.smoothing < 1
        and 0 <= config.hflip <= 1
    ):
        raise UserError(
            "--crop-scale, --crop-pct, --smoothing and --hflip are shares: from 0 to 1, and crops not empty"
        )
    if config.bootstrap != "none" and config.drloc != "none":
        raise UserError(
            "--drloc and --bootstrap: its heads read the last map of one network, and no paper says which of two is asked for "
            "places; give one of the two"
        )
    if config.bootstrap != "none" and config.frozen_statistics:
        raise UserError(
            "--frozen-statistics keeps BatchNorm as it was learned, and the agent CNN of --bootstrap begins with statistics that "
            "nobody has learned; give one of the two"
        )
    if config.bootstrap != "none" and config.mixtoken:
        raise UserError(
            "--bootstrap: MixToken exchanges tokens, which an agent CNN has not, so the two networks would see different images; "
            "give --no-mixtoken, and perhaps --cutmix 1, which exchanges pixels"
        )
    uneven = (
        config.agent == "res-like"
        and config.feature_adapt == "sequence"
        and config.feature_weight > 0
    )
    if config.bootstrap != "none" and config.objective == "token-label" and uneven:
        raise UserError(
            "--feature-adapt sequence compares tokens with other places of the agent's maps than they show, which token labels "
            "contradict; give --feature-adapt pool-2d, or --agent base, whose maps are as large as the tokens' grid"
        )


def check_read(config: Config, recipe: Config) -> None:
    """UserError where a field has another value than its recipe's and belongs to an option that is
    off.

    A recipe's own values may wait for theirs: with `--drloc none` it is the baseline of itself.
    """
    for name in (field.name for field in fields(config)):
        option, off = next(
            (of for start, of in READ_WITH.items() if name.startswith(start)), ("", ())
        )
        if (
            option
            and getattr(config, option) in off
            and getattr(config, name) != getattr(recipe, name)
        ):
            written = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{written} is read by nobody with --{option} {getattr(config, option)}; leave it away, or give another --{option}"
            )


def model_arguments(config: Config) -> dict[str, object]:
    """`model_kwargs` as a dictionary. UserError where one is no NAME=VALUE."""
    return parse_arguments(config.model_kwargs, "--model-kwargs")


def parse_arguments(words: tuple[str, ...], field: str) -> dict[str, object]:
    """NAME=VALUE words of the option `field` as a dictionary. UserError where one is none."""
    arguments = {}
    for word in words:
        name, equals, value = word.partition("=")
        try:
            arguments[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            equals = ""
        if not equals or not name.strip().isidentifier():
            raise UserError(
                f"{field} {word!r} is not NAME=VALUE with a Python number, string or tuple, as depth=12 is"
            )
    return arguments


def plain(config: Config) -> dict:
    """The config as JSON can hold it."""
    return json.loads(json.dumps(asdict(config), default=str))


def config_from_dict(fields: dict) -> Config:
    """The config that `plain` wrote, perhaps in an earlier version: fields that are no longer known
    are left out.
    """
    hints = get_type_hints(Config)
    known = {name: value for name, value in fields.items() if name in hints}
    return Config(
        **{
            name: Path(value)
            if value is not None and hints[name] in (Path, Path | None)
            else as_tuple(value)
            for name, value in known.items()
        }
    )


def as_tuple(value: object) -> object:
    """JSON's lists as the tuples they were."""
    return tuple(map(as_tuple, value)) if isinstance(value, list) else value
