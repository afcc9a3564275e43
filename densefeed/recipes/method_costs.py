"""What the methods may cost: training steps with and without each, for benchmarks.step."""

from typing import NamedTuple


class MethodCost(NamedTuple):
    """A measurement by benchmarks.step and the ratio that it should reach.

    Attributes:
        name: of the measurement.
        model: timm's name.
        variant: the options of training that switch the method on, as NAME=VALUE.
        batch: images.
        small: sizes for a CPU, as words of the command.
        beside: what the step with the method is compared with.
        goal: the least ratio, in images per second.
    """

    name: str
    model: str
    variant: str
    batch: int
    small: str
    beside: str
    goal: float


METHOD_COSTS = (
    # Table 14 of the DRLoc paper: 2.36 % of the time of a step.
    MethodCost(
        "swin-drloc",
        "swin_tiny_patch4_window7_224",
        "drloc=l1",
        batch=128,
        small="--size 112",
        beside="ours",
        goal=1 / 1.02,
    ),
    # Two networks together take at most 1.15 times as long as one after the other.
    MethodCost(
        "bootstrapping",
        "bootstrapping_vit_b",
        "bootstrap=joint",
        batch=64,
        small="--model bootstrapping_vit_micro",
        beside="ours, then agent",
        goal=1 / 1.15,
    ),
)
