"""What a file may say of the model to build: a name of timm's registry and sizes.

`timm.create_model` has arguments that read another file and run its code (`checkpoint_path`,
`pretrained_cfg`), that download (`pretrained`, `hf-hub:NAME`) or that replace classes. A checkpoint
or config.json comes from anywhere, so only the arguments below are passed on.
"""

import math
import re
from typing import NamedTuple

import timm
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import nn

from densefeed.models.meta_device import meta_device
from densefeed.system.channels import CHANNEL_RANGES, parse_channels

# Arguments of our families, then those of timm's that hold numbers or the name of a variant.
ARGUMENTS = (
    "img_size patch_size in_chans num_classes global_pool embed_dim depth num_heads mlp_ratio stem "
    "stem_width residual_divisor qkv_bias norm_groups post_norm drop_path_rate token_head "
    "fused_head norms embedding affine head_tokens pos_embed feed_forward aggregate shortcut "
    "published token_dim down pool norm own_weights dims depths pretrained_cfg_overlay "
    "drop_rate attn_drop_rate proj_drop_rate pos_drop_rate patch_drop_rate drop_block_rate "
    "head_drop_rate dynamic_img_size dynamic_img_pad strict_img_size window_size window_ratio "
    "embed_dims mlp_ratios num_layers layers class_token no_embed_class reg_tokens pre_norm "
    "final_norm fc_norm qk_norm init_values ls_init_value layer_scale_init_value output_stride "
    "kernel_sizes patch_norm use_rel_pos_bias use_abs_pos_emb backbone decoder_width auxiliary"
    " samples transformer_window_size transformer_grid_size transformer_partition_ratio"
)
# Arguments that count blocks, each of which takes a millisecond to build.
DEPTHS = frozenset(("depth", "depths", "layers", "num_layers"))
MAX_DEPTH = 1000
# Arguments that divide, or are divided, when a model is built.
POSITIVE = {
    *("img_size", "patch_size", "embed_dim", "embed_dims", "num_heads", "mlp_ratio", "mlp_ratios"),
    *("transformer_window_size", "transformer_grid_size", "transformer_partition_ratio"),
}
MAX_PIXELS = 4096
# Cells along a window. Swin's table of its pairs of cells is not a weight: 8 MB at 32, 0.8 GB at
# 100.
MAX_WINDOW = 32
WINDOWS = "window_size", "transformer_window_size", "transformer_grid_size"
# For any other number: more than the classes of any data set.
MAX_NUMBER = 2**20
MAX_ITEMS = 64
WORD = re.compile(r"[\w.+-]{0,64}", re.ASCII)
# No colon, as in `hf-hub:NAME`, and no slash.
NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
# What constructors of timm's 1,400 models raise for sizes that they cannot be built with.
CANNOT_BUILD = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError),
    *(TypeError, ValueError),
)


class ModelSpec(NamedTuple):
    """The name and the keyword arguments of `timm.create_model` that build a model again."""

    name: str
    kwargs: dict

    def build(self) -> nn.Module:
        """Build the model on the default device, with initial weights."""
        return timm.create_model(self.name, pretrained=False, **self.kwargs)


def is_registered(name: object) -> bool:
    """Whether `name` is one of timm's models, perhaps with the tag of published weights."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or not timm.is_model(name):
        return False
    # timm.is_model disregards tags.
    architecture, dot, _ = name.partition(".")
    return not dot or name in timm.models.get_arch_pretrained_cfgs(architecture)


def find_forbidden(kwargs: dict) -> str:
    """Return what a file may not say in these arguments, as `NAME is ...`; "" if there is none."""
    for name, value in kwargs.items():
        if not isinstance(name, str) or name not in ARGUMENTS.split():
            shown = ascii(name)[1:-1][:40] if isinstance(name, str) else type(name).__name__
            return f"{shown} is not an argument that a checkpoint may hold"
        if name == "pretrained_cfg_overlay":
            if not isinstance(value, dict) or not value.keys() <= {"mean", "std"}:
                return f"{name} may hold mean and std only"
            for key, numbers in value.items():
                if not is_channels(key, numbers):
                    return f"{name} has a {key} that is not three numbers {CHANNEL_RANGES[key]}"
        elif not is_plain(value, 2):
            return f"{name} is neither a number, a short text nor a list of these"
        elif largest := find_excess(name, value):
            return f"{name} is above {largest:,}"
        elif name in POSITIVE and any(number <= 0 for number in numbers_in(value)):
            return f"{name} is not above 0"
        elif name == "in_chans" and value != 3:
            return f"{name} is not 3, the channels of an image"
        elif name == "norm_groups" and any(number < 0 for number in numbers_in(value)):
            return f"{name} is below 0"
    return ""


def is_plain(value: object, depth: int) -> bool:
    """Whether a value is a number, a word, None, or a sequence of those, nested `depth` times."""
    if isinstance(value, list | tuple):
        return depth > 0 and len(value) <= MAX_ITEMS and all(is_plain(v, depth - 1) for v in value)
    if isinstance(value, str):
        return WORD.fullmatch(value) is not None
    return value is None or (isinstance(value, int | float) and math.isfinite(value))


def is_channels(name: str, value: object) -> bool:
    """Whether a value is a `mean` or `std`: a sequence of three numbers in CHANNEL_RANGES."""
    numbers = isinstance(value, list | tuple) and all(type(v) in (int, float) for v in value)
    return numbers and parse_channels(name, value) is not None


def find_excess(name: str, value: object) -> int:
    """Return the limit that a plain value of this argument is above, else 0."""
    numbers = numbers_in(value)
    if name in DEPTHS and sum(map(abs, numbers)) > MAX_DEPTH:
        return MAX_DEPTH
    windows = dict.fromkeys(WINDOWS, MAX_WINDOW)
    limit = ({"img_size": MAX_PIXELS} | windows).get(name, MAX_NUMBER)
    return limit if any(abs(number) > limit for number in numbers) else 0


def numbers_in(value: object) -> list[int | float]:
    """List the numbers of a plain value, those of nested sequences too."""
    if isinstance(value, list | tuple):
        return [number for part in value for number in numbers_in(part)]
    return [value] if isinstance(value, int | float) else []


def build_on_meta(spec: ModelSpec) -> nn.Module:
    """Build a model that has shapes and takes no memory."""
    with meta_device():
        return spec.build()


def imagenet_names(model: nn.Module) -> list[str]:
    """Return the WordNet ids in the order of the logits, or an empty list.

    They are known if the number of classes is that of an ImageNet set (1,000, 21,841, ...).
    """
    subset = infer_imagenet_subset(model)
    return ImageNetInfo(subset).label_names() if subset else []
