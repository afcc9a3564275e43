"""Print parameters and multiply-adds of classifiers as papers report them.

    densefeed costs dhvt_tiny_cifar_patch4 cvt_13 swin_tiny_patch4_window7_224

Papers disagree about what a "FLOP" is. This counts the multiply-adds of one image: in convolutions
and linear layers; in the products inside attention (queries with keys, weights with values), which
many tables omit; and in norms, which fvcore counts too (5 per element of LayerNorm, 2 per element
of BatchNorm in evaluation mode).
"""

if not __package__:
    import script_start  # noqa: F401

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import timm
import torch
import tyro
from rich.table import Table
from timm.layers import set_fused_attn, use_fused_attn
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from densefeed.models.meta_device import meta_device
from densefeed.models.model_spec import is_registered
from densefeed.system.errors import UserError, first_line, make_command
from densefeed.system.options import Bounds, Options
from densefeed.system.terminal import print_table

# fvcore's counts.
PER_ELEMENT = {nn.LayerNorm: 5, nn.BatchNorm2d: 2}
# Products of two activations. Layers are mm, addmm and convolution.
ACTIVATION_PRODUCTS = ("aten.bmm", "aten.baddbmm")
# Pixels of the largest side of a JPEG. The meta device cannot hold the attention of much larger
# inputs.
MOST_SIDE = 2**16 - 1


class Costs(NamedTuple):
    """Parameters that require gradients, and multiply-adds of one image."""

    parameters: int
    layers: int  # convolutions and linear layers
    attention: int  # products of activations
    norms: int  # fvcore's count

    @property
    def without_attention(self) -> float:
        """fvcore's total without its `matmul`, in 1e9: what the DHVT paper reports."""
        return (self.layers + self.norms) / 1e9

    @property
    def whole(self) -> float:
        """fvcore's total, in 1e9."""
        return (self.layers + self.norms + self.attention) / 1e9


def measure_costs(model: nn.Module, size: int) -> Costs:
    """Count the costs of a model on the meta device, for one image of `size` pixels."""
    norms = 0

    def count(module: nn.Module, _inputs: tuple, output: torch.Tensor) -> None:
        nonlocal norms
        (per_element,) = (n for kind, n in PER_ELEMENT.items() if isinstance(module, kind))
        norms += per_element * output.numel()

    layers = [module for module in model.modules() if isinstance(module, tuple(PER_ELEMENT))]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.empty(1, 3, size, size, device="meta"))
    for hook in hooks:
        hook.remove()
    # A model may call a fused attention despite timm's setting; its name then contains the word.
    products = (
        number
        for operation, number in counter.get_flop_counts()["Global"].items()
        if str(operation) in ACTIVATION_PRODUCTS or "attention" in str(operation)
    )
    # FlopCounterMode counts a multiplication and an addition as two.
    attention = sum(products) // 2
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Costs(parameters, counter.get_total_flops() // 2 - attention, attention, norms)


def costs_by_name(name: str, size: int = 0) -> tuple[Costs, int]:
    """Return the costs of a timm model at `size` pixels, and that size; 0: the model's own.

    Raises UserError for an unknown model, or a size that it cannot take.
    """
    if not is_registered(name):
        raise UserError(
            f"timm knows no model {name!r}; timm.list_models(include_tags=True) lists those it "
            "knows"
        )
    fused = use_fused_attn()
    # The products inside a fused attention cannot be counted.
    set_fused_attn(False)
    try:
        # Large models are counted without memory for their weights.
        with meta_device():
            model = timm.create_model(name)
    finally:
        # The setting belongs to the whole process, so the caller gets it back.
        set_fused_attn(fused > 0)
    size = size or model.pretrained_cfg["input_size"][-1]
    try:
        return measure_costs(model, size), size
    except (ValueError, RuntimeError, AssertionError) as error:
        raise UserError(
            f"{name} cannot take inputs of {size} px ({first_line(error)}); choose another --size"
        ) from error


@dataclass(frozen=True, kw_only=True)
class ModelCosts(Options):
    """The models to count."""

    # names of timm's models and ours
    models: tyro.conf.Positional[
        Annotated[
            tuple[str, ...], tyro.conf.arg(metavar="MODEL ...", help_behavior_hint="(required)")
        ]
    ]
    # side of the input, pixels; 0: each model's own
    size: Annotated[int, Bounds(0, MOST_SIDE)] = 0


def main(options: ModelCosts) -> None:
    """Print a line for each model."""
    if not options.models:
        raise UserError("name at least one model, e.g. dhvt_tiny_cifar_patch4")
    table = Table("model", "pixels", "parameters", "G, no attention products", "G", box=None)
    for name in options.models:
        costs, size = costs_by_name(name, options.size)
        table.add_row(
            name,
            str(size),
            f"{costs.parameters:,}",
            f"{costs.without_attention:.3f}",
            f"{costs.whole:.3f}",
        )
    # Names stay whole in a log file too.
    print_table(table, least_width=110)


command = make_command(main, ModelCosts, __doc__)


if __name__ == "__main__":
    command()
