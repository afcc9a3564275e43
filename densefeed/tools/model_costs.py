"""Parameters and multiply-adds of classifiers, as papers print them.

    python tools/model_costs.py dhvt_tiny_cifar_patch4 cvt_13 swin_tiny_patch4_window7_224

Papers disagree on what a "FLOP" is. Counted here are multiply-adds of one image: of convolutions
and linear layers; of the products inside attention (queries with keys, weights with values), which
many tables leave out; and of norms, which fvcore counts besides (5 a number of LayerNorm, 2 of
BatchNorm at evaluation).
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import timm
import torch
import tyro
from rich.console import Console
from rich.table import Table
from timm.layers import set_fused_attn, use_fused_attn
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from densefeed.models import checkpoints  # noqa: F401  (registers our models with timm)
from densefeed.system.errors import UserError, run

PER_NUMBER = {nn.LayerNorm: 5, nn.BatchNorm2d: 2}  # fvcore's counts
INNER = {"bmm", "baddbmm"}  # products of two activations; a layer's are mm, addmm and convolution


class Costs(NamedTuple):
    """Of one image, multiply-adds; and parameters, those that are trained."""

    parameters: int
    layers: int  # convolutions and linear layers
    attention: int  # products of activations
    norms: int  # fvcore's count

    @property
    def without_attention(self) -> float:
        """fvcore's total less its `matmul`, in 1e9: what the DHVT paper prints."""
        return (self.layers + self.norms) / 1e9

    @property
    def whole(self) -> float:
        """fvcore's total, in 1e9."""
        return (self.layers + self.norms + self.attention) / 1e9


def costs_of(model: nn.Module, size: int) -> Costs:
    """Costs of a model on the meta device, at evaluation, for one image of `size` pixels."""
    norms = 0

    def count(module: nn.Module, _inputs: tuple, output: torch.Tensor) -> None:
        nonlocal norms
        norms += (
            next(each for kind, each in PER_NUMBER.items() if isinstance(module, kind))
            * output.numel()
        )

    hooks = [
        m.register_forward_hook(count) for m in model.modules() if isinstance(m, tuple(PER_NUMBER))
    ]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.empty(1, 3, size, size, device="meta"))
    for hook in hooks:
        hook.remove()
    by_operation = {
        str(name).split(".")[-1]: number
        for name, number in counter.get_flop_counts()["Global"].items()
    }
    attention = (
        sum(n for name, n in by_operation.items() if name in INNER or "attention" in name) // 2
    )
    return Costs(
        sum(p.numel() for p in model.parameters() if p.requires_grad),
        counter.get_total_flops() // 2 - attention,
        attention,
        norms,
    )


def costs_by_name(name: str, size: int = 0, **arguments: object) -> tuple[Costs, int]:
    """Costs of the model of that name, at `size` pixels (0: its own), and that size. UserError for
    a model that is not known.
    """
    if not timm.is_model(name):
        raise UserError(
            f"timm knows no model {name!r}; `python -c 'import timm; print(timm.list_models())'` lists them"
        )
    fused = use_fused_attn()
    set_fused_attn(False)  # a fused attention has no products that could be counted
    try:
        with torch.device("meta"):
            model = timm.create_model(name, **arguments)
    finally:
        set_fused_attn(fused > 0)
    size = size or model.pretrained_cfg["input_size"][-1]
    return costs_of(model, size), size


@dataclass(frozen=True)
class Request:
    """What to print."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional]  # timm's names and ours
    size: int = 0  # side of the input, pixels; 0: each model's own


def main() -> None:
    request = tyro.cli(Request, description=__doc__)
    if not request.models:
        raise UserError("name at least one model, as dhvt_tiny_cifar_patch4")
    table = Table("model", "pixels", "parameters", "G, no attention products", "G", box=None)
    for name in request.models:
        costs, size = costs_by_name(name, request.size)
        table.add_row(
            name,
            str(size),
            f"{costs.parameters:,}",
            f"{costs.without_attention:.3f}",
            f"{costs.whole:.3f}",
        )
    console = Console()
    console.width = max(console.width, 110)  # names in full, also in a log file
    console.print(table)


if __name__ == "__main__":
    run(main)
