"""What the methods may cost: training steps with and without each, for benchmarks.step."""

from typing import NamedTuple


class MethodCost(NamedTuple):
    """A measurement by benchmarks.step and the ratio that it should reach."""

    name: str
    words: str  # after `python -m benchmarks.step`
    small: str  # further words for a CPU
    ratio: str  # of contestants, in images per second
    goal: float  # at least


METHOD_COSTS = (
    # Table 14 of the DRLoc paper: 2.36 % of the time of a step.
    MethodCost(
        "swin-drloc",
        "--model swin_tiny_patch4_window7_224 --variants drloc=l1 --batch 128",
        "--size 112",
        "ours+drloc=l1 / ours",
        1 / 1.02,
    ),
    # Two networks together take at most 1.15 times as long as one after the other.
    MethodCost(
        "bootstrapping",
        "--model bootstrapping_vit_b --variants bootstrap=joint --batch 64",
        "--model bootstrapping_vit_micro",
        "ours+bootstrap=joint / ours, then agent",
        1 / 1.15,
    ),
)
