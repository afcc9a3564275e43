"""timm's optimizers by name: which can train, and how an update is skipped."""

import importlib.util
from difflib import get_close_matches
from functools import cache
from types import ModuleType
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers, muon
from torch import Tensor, nn

from densefeed.system.errors import UserError

# Their kernel leaves weights and moments as they are where `found_inf` is 1, without a host sync.
# The last three are SGD, with Nesterov's momentum and without.
FUSED = ("adam", "adamw", "sgd", "nesterov", "momentum")
# Other packages that need a GPU (bitsandbytes, Apex), and an optimizer with draws of its own, which
# a checkpoint does not hold.
LEFT_OUT = ["bnb*", "fused*", "kron*"]


def optimizer_names() -> list[str]:
    """Return the names of the optimizers that can train: timm's, of first order."""
    names = list_optimizers(exclude_filters=LEFT_OUT)
    return [name for name in names if not get_optimizer_info(name).second_order]


def check_optimizer(name: str, option: str = "--optimizer") -> None:
    """Raise UserError for a name of `option` that is not one of `optimizer_names`."""
    if name in (known := optimizer_names()):
        return
    problem = "cannot train here" if name in list_optimizers() else "is unknown to timm"
    close = ", ".join(get_close_matches(name.lower(), known) or ["adamw"])
    raise UserError(
        f"{option} {name} {problem}; choose {close}, or another name of "
        "timm.optim.list_optimizers()"
    )


def has_momentum(name: str) -> bool:
    """Return whether timm's optimizer of this name takes a momentum."""
    return get_optimizer_info(name).has_momentum


def build_optimizer(
    name: str,
    trainable: nn.Module,
    lr: float,
    weight_decay: float,
    momentum: float = 0.9,
    decay_all: bool = False,
) -> torch.optim.Optimizer:
    """Build timm's optimizer of this name, with timm's defaults and grouping.

    Without `decay_all`, biases, norms and tables are not decayed. Muon and its relatives leave
    tensors of one dimension, tables and depth-wise convolutions to AdamW.
    """
    options: dict[str, Any] = {"fused": True} if name in FUSED else {}
    if has_momentum(name):
        options["momentum"] = momentum
        # PyTorch refuses Nesterov's form of no momentum.
        if not momentum and (get_optimizer_info(name).defaults or {}).get("nesterov"):
            options["nesterov"] = False
    if decay_all:
        options["param_group_fn"] = lambda module: group_all(module, weight_decay)
    built = create_optimizer_v2(trainable, name, lr=lr, weight_decay=weight_decay, **options)
    if isinstance(built, muon.Muon):
        return own_muon().Muon(built.param_groups, **built.defaults)
    return begin_momenta(built) if isinstance(built, torch.optim.SGD) else built


def group_all(trainable: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return all trained parameters as one group with weight decay."""
    trained = [parameter for parameter in trainable.parameters() if parameter.requires_grad]
    return [{"params": trained, "weight_decay": weight_decay}]


def begin_momenta(optimizer: torch.optim.SGD) -> torch.optim.SGD:
    """Let the momenta begin at 0; the first update makes them the gradient, as without this.

    Fused SGD allocates them in its first update, and a skipped one leaves uninitialized memory.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


@cache
def own_muon() -> ModuleType:
    """Return timm's module of Muon and its relatives with `orthogonalize` in place of its own.

    timm has no option for it, and calls its function from within a step. This is the module loaded
    once more, so timm's own, which others may use in this process, stays as it is.
    """
    spec = importlib.util.find_spec(muon.__name__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.zeropower_via_newtonschulz = orthogonalize
    return module


def orthogonalize(gradient: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Orthogonalize a gradient as timm's Muon does, but on a CPU in float32 instead of bfloat16.

    A processor without instructions for bfloat16 emulates them: 230 ms a step instead of 25 ms for
    lvvit_micro. In float32 it takes 25 ms on either.
    """
    if gradient.device.type == "cpu":
        options["dtype"] = torch.float32
    return muon.zeropower_via_newtonschulz(gradient, *arguments, **options)


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer skips an update on the device."""
    return bool(optimizer.defaults.get("fused"))


def step_unless(flag: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Update the weights unless `flag`, float32 `[]`, is 1; only a fused optimizer does not wait.

    PyTorch's GradScaler waits for the others too.
    """
    if is_fused(optimizer):
        # The attribute that GradScaler sets too.
        optimizer.found_inf = flag
        optimizer.step()
    elif not flag:
        optimizer.step()
