"""The augmentation options, RandAugment's string, and the argument of every operation.

The numbers have the meaning that timm and torchvision give to them. timm itself parses
RandAugment's string; arguments follow the formulas of timm/data/auto_augment.py.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import numpy as np
from timm.data.auto_augment import rand_augment_transform
from torch import Tensor

from densefeed.pipelines.augment.operations import OPERATIONS
from densefeed.system.errors import UserError
from densefeed.system.options import Bounds, Fraction, NonNegativeInt, Numbers, Options, Texts

# N samples   R operations of a batch

GEOMETRIC = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")
# Operations whose result for a byte depends on that byte alone.
TABLES = ("Invert", "Posterize", "Solarize", "SolarizeAdd", "Brightness")
CODES = {name: code for code, name in enumerate((*TABLES, *OPERATIONS))}
# An erased box, as in timm: its share of the image's area, and the least ratio of its sides.
LEAST_AREA, MOST_AREA, LEAST_ASPECT = 0.02, 1 / 3, 0.3
# Most operations per image: a run folder from anywhere is replayed by the report.
MOST_STEPS = 100
# Brightness 10 multiplies by up to 11, which leaves white.
MOST_JITTER = 10.0
STRING = re.compile(r"rand(-((m|n|mmax|inc)\d{1,4}|(p|mstd)\d*\.?\d+|t(weights|3aw?)?))*")


class OwnOperation(NamedTuple):
    """An operation that was registered from outside the package."""

    probability: float
    draw: Callable[[np.ndarray], np.ndarray]  # uniform numbers in [0, 1) to arguments, both [N]


OWN: dict[str, OwnOperation] = {}


def register_operation(
    name: str,
    apply: Callable[[Tensor, Tensor], Tensor],
    draw: Callable[[np.ndarray], np.ndarray],
    probability: float = 0.5,
) -> None:
    """Make an operation known to the option `--operations`. ValueError if its name is taken.

    `apply` takes uint8 images `[N, H, W, 3]` and float32 arguments `[N]` and returns new images of
    the same shape on the same device. `draw` turns the plan's uniform numbers into arguments.
    """
    if name in CODES:
        raise ValueError(f"there is an operation {name!r} already")
    OPERATIONS[name], OWN[name] = apply, OwnOperation(probability, draw)
    # CODES and OPERATIONS grow in the same order, on which group_operations relies.
    CODES[name] = len(CODES)


@dataclass(frozen=True, kw_only=True)
class Augment(Options):
    """The augmentation of a crop after it was cut, resized and flipped; none by default."""

    # RandAugment as a timm string, for example "rand-m9-mstd0.5-inc1"; empty: none. Its "3a" sets
    # are combined with color jitter.
    rand_augment: str = ""
    # apply RandAugment to the whole image before the crop, as Token Labeling's published code, and
    # not to the crop: AutoContrast and Equalize see all of it; decodes whole images on the CPU
    augment_before_crop: bool = False
    # color jitter: one number, or strengths for brightness, contrast, saturation and optionally
    # hue; empty: none; not beside RandAugment (except its "3a" sets)
    color_jitter: Numbers = ()
    # operations registered from outside the package, applied after all others, by name
    operations: Texts = ()
    # largest translation of a crop in whole pixels, each way: RandomCrop with this padding
    shift: NonNegativeInt = 0
    # color beyond the shifted crop: the mean, or black as in torchvision's RandomCrop, which is
    # then done before all other operations and not composed with them
    shift_border: Literal["mean", "black"] = "mean"
    # smallest scale of a zoom out, which a third of the crops get, with the mean color around them;
    # 1: none; segmentation's scales of 0.5 to 2 are this and --crop-scale 0.25 1
    zoom_out: Annotated[float, Bounds(0.1, 1)] = 1.0
    # of random erasing (timm's reprob): a box of 2 to 33 % of the image is filled with noise
    erase_probability: Fraction = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rand_augment:
            RandAugmentSpec.parse(self.rand_augment)
        jitter = self.color_jitter
        if any(jitter) and self.rand_augment and "3a" not in self.rand_augment:
            raise UserError(
                "--color-jitter is off beside --rand-augment, as in timm; remove it, or give "
                "--rand-augment ''"
            )
        if len(jitter) not in (0, 1, 3, 4):
            raise UserError(
                f"--color-jitter has {len(jitter):,} numbers, and must have one, three or four"
            )
        # Written as `not <=`, so that NaN fails too.
        if not all(0 <= strength <= MOST_JITTER for strength in jitter) or self.jitter[3] > 0.5:
            raise UserError(
                f"--color-jitter {jitter} must be from 0 to {MOST_JITTER:g}, and its hue (the "
                "fourth number) at most 0.5"
            )

    def check_operations(self) -> None:
        """Raise UserError for an operation that is not registered.

        It is not refused earlier: a config that names one can be read where it is not registered.
        """
        if unknown := [name for name in self.operations if name not in OWN]:
            known = ", ".join(OWN) or "none"
            raise UserError(
                f"--operations {unknown[0]}: no such operation is registered (there are: {known}); "
                "start the file that registers it, as docs/extending.md shows"
            )

    def unused(self) -> dict[str, str]:
        found = {}
        if not self.shift:
            found["shift_border"] = "--shift"
        if not self.rand_augment:
            found["augment_before_crop"] = "--rand-augment"
        return found

    @property
    def jitter(self) -> tuple[float, float, float, float]:
        """Strengths for brightness, contrast, saturation and hue."""
        # One number means brightness, contrast and saturation but not hue, as in timm.
        given = self.color_jitter or (0.0,)
        return (*given, 0.0)[:4] if len(given) > 1 else (*given * 3, 0.0)

    @property
    def shears(self) -> bool:
        """Whether Views may be rotated or sheared.

        The sampling of targets depends on it (Batch.axis_aligned).
        """
        turning = {"Rotate", "ShearX", "ShearY"}
        return bool(self.rand_augment) and not turning.isdisjoint(
            RandAugmentSpec.parse(self.rand_augment).names
        )


class RandAugmentSpec(NamedTuple):
    """The settings in a RandAugment string."""

    names: tuple[str, ...]  # timm's
    weights: np.ndarray | None  # of a choice without replacement; None: uniform, with replacement
    layers: int
    probability: float
    magnitude: float
    std: float  # inf: uniform from 0 to the magnitude
    most: float  # upper end of a magnitude

    @classmethod
    def parse(cls, text: str) -> "RandAugmentSpec":
        """Parse the string with timm.

        UserError where timm refuses it, or where it names an operation that is not implemented.
        """
        try:
            # timm ignores unknown parts silently: rand-mfoo would be magnitude 10.
            if not STRING.fullmatch(text):
                raise ValueError
            parsed = rand_augment_transform(text, {})
        except (AssertionError, ValueError):
            raise UserError(
                f"--rand-augment {text!r} is not a RandAugment string; write one like "
                "rand-m9-mstd0.5-inc1"
            ) from None
        # timm gives all operations of a string the same probability and magnitudes.
        names, first = tuple(op.name for op in parsed.ops), parsed.ops[0]
        if missing := [name for name in names if name not in GEOMETRIC and find_code(name) is None]:
            raise UserError(
                f"--rand-augment {text!r} uses {missing[0]}, which is not implemented; choose "
                "another set"
            )
        if parsed.num_layers > MOST_STEPS:
            raise UserError(
                f"--rand-augment {text!r} is {parsed.num_layers:,} operations per image; lower "
                f"its n to at most {MOST_STEPS}"
            )
        if parsed.choice_weights is not None and parsed.num_layers > len(names):
            raise UserError(
                f"--rand-augment {text!r} has only {len(names)} different operations; lower its n"
            )
        return cls(
            names,
            parsed.choice_weights,
            parsed.num_layers,
            first.prob,
            first.magnitude,
            first.magnitude_std,
            # As in timm, where 10 is _LEVEL_DENOM.
            first.magnitude_max or 10.0,
        )


def find_code(name: str) -> int | None:
    """Return the code of timm's photometric operation, None if it is not implemented.

    Its variants (increasing, original) differ only in their arguments.
    """
    base = name.removesuffix("Increasing").removesuffix("Original")
    return CODES.get("Color" if name == "Desaturate" else base)


def level_to_argument(name: str, level_N: np.ndarray, negative_N: np.ndarray) -> np.ndarray:
    """Compute timm's argument of an operation at magnitude `level_N`: float64 `[N]`.

    Magnitude 10 is full strength. Units by operation: degrees, pixels per pixel, shares of the
    image's side, bits, thresholds, factors. Where the operation has a sign, it is negative where
    `negative_N` is true.
    """
    # timm's level over _LEVEL_DENOM; np.trunc below is its int().
    share_N = level_N / 10
    sign_N = np.where(negative_N, -1.0, 1.0)
    match name:
        case "Rotate":
            return sign_N * share_N * 30
        case "ShearX" | "ShearY":
            return sign_N * share_N * 0.3
        case "TranslateXRel" | "TranslateYRel":
            return sign_N * share_N * 0.45
        case "Posterize":
            return np.trunc(share_N * 4)
        case "PosterizeIncreasing":
            return 4 - np.trunc(share_N * 4)
        case "PosterizeOriginal":
            return np.trunc(share_N * 4) + 4
        case "Solarize":
            return np.minimum(256, np.trunc(share_N * 256))
        case "SolarizeIncreasing":
            return 256 - np.minimum(256, np.trunc(share_N * 256))
        case "SolarizeAdd":
            return np.minimum(128, np.trunc(share_N * 110))
        case "Color" | "Contrast" | "Brightness" | "Sharpness":
            return share_N * 1.8 + 0.1
        case (
            "ColorIncreasing"
            | "ContrastIncreasing"
            | "BrightnessIncreasing"
            | "SharpnessIncreasing"
        ):
            # timm keeps the factor at 0.1 or more: magnitudes may be above 10.
            return np.maximum(0.1, 1 + sign_N * (share_N * 0.9))
        case "Desaturate":
            return 1 - np.clip(0.5 + 0.5 * share_N, 0.5, 1)
        case "GaussianBlur":
            return np.clip(0.1 + 1.9 * share_N, 0.1, 2)
        case _:
            # AutoContrast, Equalize and Invert have no argument.
            return np.zeros_like(level_N)


def make_tables(code_R: np.ndarray, argument_R: np.ndarray) -> np.ndarray:
    """Tabulate the operations in TABLES for every byte, uint8 `[R, 256]`; zeros for other codes.

    Posterize with no bits left is black, as in older Pillow; Pillow 13 raises an error.
    """
    level, argument = np.arange(256), argument_R[:, None]
    out = np.zeros((len(code_R), 256), np.uint8)
    for name in TABLES:
        mine = code_R == CODES[name]
        value = argument[mine]
        match name:
            case "Invert":
                out[mine] = 255 - level
            case "Posterize":
                dropped = np.clip(8 - value.astype(int), 0, 8)
                out[mine] = level >> dropped << dropped
            case "Solarize":
                out[mine] = np.where(level < value, level, 255 - level)
            case "SolarizeAdd":
                out[mine] = np.where(level < 128, np.minimum(255, level + value), level)
            case "Brightness":
                # Pillow's Image.blend multiplies 32-bit floats and truncates.
                product = value.astype(np.float32) * level.astype(np.float32)
                out[mine] = np.clip(product, 0, 255).astype(np.uint8)
    return out


def make_matrix(name: str, argument_N: np.ndarray, height: int, width: int) -> np.ndarray:
    """Build a geometric operation's affine map, output to source: float64 `[N, 3, 3]`.

    It is in pixels from the top-left corner.
    """
    matrix = np.tile(np.eye(3), (len(argument_N), 1, 1))
    match name:
        case "Rotate":
            # Counter-clockwise for positive degrees, about the center, as Pillow's Image.rotate.
            angle = -np.radians(argument_N)
            sine, cosine = np.sin(angle), np.cos(angle)
            x, y = width / 2, height / 2
            matrix[:, 0] = np.stack([cosine, sine, x - cosine * x - sine * y], 1)
            matrix[:, 1] = np.stack([-sine, cosine, y + sine * x - cosine * y], 1)
        case "ShearX":
            matrix[:, 0, 1] = argument_N
        case "ShearY":
            matrix[:, 1, 0] = argument_N
        case "TranslateXRel":
            matrix[:, 0, 2] = argument_N * width
        case "TranslateYRel":
            matrix[:, 1, 2] = argument_N * height
    return matrix
