"""What timm's and torchvision's numbers mean: the settings, RandAugment's string, and the argument
of every operation.

RandAugment's string is read by timm itself; arguments follow the formulas of
timm/data/auto_augment.py.
"""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import numpy as np
from timm.data.auto_augment import rand_augment_transform

from densefeed.pipelines.augment.operations import OPERATIONS
from densefeed.system.errors import UserError
from densefeed.system.options import Bounds, Count, Fraction, Options

# N samples   R operations of a batch

GEOMETRIC = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")
# a byte's value follows from the byte
TABLES = ("Invert", "Posterize", "Solarize", "SolarizeAdd", "Brightness")
CODES = {name: code for code, name in enumerate((*TABLES, *OPERATIONS))}
LEAST_AREA, LEAST_ASPECT = 0.02, 0.3  # of an erased box, timm's


STRING = re.compile(r"rand(-((m|n|mmax|inc)\d+|(p|mstd)\d*\.?\d+|t(weights|3aw?)?))*")


@dataclass(frozen=True, kw_only=True)
class Augment(Options):
    """What happens to a crop after it was cut, resized and flipped; the defaults do nothing.

    Raises UserError for values that mean nothing.
    """

    # timm's, as "rand-m9-mstd0.5-inc1"; its "3a" sets come together with color jitter
    rand_augment: str = ""
    # one number, or brightness, contrast, saturation and perhaps hue; empty: none
    color_jitter: tuple[float, ...] = ()
    # most whole pixels that a crop moves by, each way: RandomCrop with so much padding
    shift: Annotated[int, Bounds(0)] = 0
    # of rotation, shear and translation
    interpolation: Literal["random", "bilinear", "bicubic"] = "random"
    erase_probability: Fraction = 0.0  # of random erasing (timm's reprob)
    erase_mode: Literal["const", "rand", "pixel"] = "pixel"  # zeros (the mean), one color, noise
    erase_count: Count = 1  # largest number of boxes per image
    # of all boxes together, as a share of the image; the least is 0.02
    erase_max_area: Annotated[float, Bounds(0.02, 1)] = 1 / 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.interpolation not in ("random", "bilinear", "bicubic"):
            raise UserError(
                f"interpolation {self.interpolation!r} is none of random, bilinear and bicubic"
            )
        if self.erase_mode not in ("const", "rand", "pixel"):
            raise UserError(f"erase_mode {self.erase_mode!r} is none of const, rand and pixel")
        jitter = self.color_jitter
        if any(jitter) and self.rand_augment and "3a" not in self.rand_augment:
            raise UserError(
                "--color-jitter is off beside --rand-augment, as in timm; give one of the two"
            )
        if len(jitter) not in (0, 1, 3, 4):
            raise UserError(f"color_jitter {jitter} must be one number, or three or four")
        if min(self.jitter) < 0 or self.jitter[3] > 0.5 or not all(map(math.isfinite, self.jitter)):
            raise UserError(
                f"color_jitter {jitter} must not be negative, and the hue's (the fourth) not above 0.5"
            )

    @property
    def jitter(self) -> tuple[float, float, float, float]:
        """Of brightness, contrast, saturation and hue."""
        given = self.color_jitter or (0.0,)
        return (*given, 0.0)[:4] if len(given) > 1 else (*given * 3, 0.0)

    @property
    def shears(self) -> bool:
        """Whether Views may be rotated or sheared, which sampling them must know beforehand
        (targets.TargetRules).
        """
        turning = {"Rotate", "ShearX", "ShearY"}
        return bool(self.rand_augment) and not turning.isdisjoint(
            RandAugmentSpec.of(self.rand_augment).names
        )


class RandAugmentSpec(NamedTuple):
    """RandAugment as its string says."""

    names: tuple[str, ...]  # timm's
    weights: np.ndarray | None  # of a choice without replacement; None: uniform, with replacement
    layers: int
    probability: float
    magnitude: float
    std: float  # inf: uniform from 0 to the magnitude
    most: float  # upper end of a magnitude

    @classmethod
    def of(cls, text: str) -> "RandAugmentSpec":
        """timm's reading of the string. UserError where timm refuses it, or where it asks for what
        is not here.
        """
        try:
            # timm passes over what it does not know in silence: rand-mfoo would be magnitude 10.
            if not STRING.fullmatch(text):
                raise ValueError
            parsed = rand_augment_transform(text, {})
        except (AssertionError, ValueError):
            raise UserError(
                f"rand_augment {text!r} is no RandAugment string; write one like rand-m9-mstd0.5-inc1"
            ) from None
        names, first = tuple(op.name for op in parsed.ops), parsed.ops[0]
        if missing := [name for name in names if name not in GEOMETRIC and code_of(name) is None]:
            raise UserError(
                f"rand_augment {text!r} uses {missing[0]}, which is not known here; choose another set"
            )
        if parsed.choice_weights is not None and parsed.num_layers > len(names):
            raise UserError(
                f"rand_augment {text!r} wants {parsed.num_layers} different operations of {len(names)}"
            )
        return cls(
            names,
            parsed.choice_weights,
            parsed.num_layers,
            first.prob,
            first.magnitude,
            first.magnitude_std,
            first.magnitude_max or 10.0,
        )


def code_of(name: str) -> int | None:
    """The code of timm's photometric operation; its variants (increasing, original) differ in their
    arguments only.
    """
    return CODES.get(
        "Color"
        if name == "Desaturate"
        else name.removesuffix("Increasing").removesuffix("Original")
    )


def argument_of(name: str, level_N: np.ndarray, negative_N: np.ndarray) -> np.ndarray:
    """timm's argument of an operation at magnitude `level_N` (10 is full strength): float64 `[N]`.

    Degrees, pixels per pixel, shares of the image's side, bits, thresholds, factors; what has a
    sign is negative where `negative_N` is true.
    """
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
            return np.maximum(0.1, 1 + sign_N * (share_N * 0.9))
        case "Desaturate":
            return 1 - np.clip(0.5 + 0.5 * share_N, 0.5, 1)
        case "GaussianBlur":
            return np.clip(0.1 + 1.9 * share_N, 0.1, 2)
        case _:  # AutoContrast, Equalize, Invert
            return np.zeros_like(level_N)


def tables_of(code_R: np.ndarray, argument_R: np.ndarray) -> np.ndarray:
    """What the operations of TABLES make of each byte: uint8 `[R, 256]`; zeros for other codes.

    Posterize with no bits left is black, as its formula says and older Pillow did; Pillow 13
    refuses to.
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
            case "Brightness":  # Pillow multiplies floats and truncates
                out[mine] = np.clip(
                    value.astype(np.float32) * level.astype(np.float32), 0, 255
                ).astype(np.uint8)
    return out


def step_of(name: str, argument_N: np.ndarray, height: int, width: int) -> np.ndarray:
    """The affine map of a geometric operation, output to source, in pixels from the corner: float64
    `[N, 3, 3]`.
    """
    step = np.tile(np.eye(3), (len(argument_N), 1, 1))
    match name:
        case "Rotate":  # counter-clockwise for positive degrees, about the center
            angle = -np.radians(argument_N)
            sine, cosine = np.sin(angle), np.cos(angle)
            step[:, 0, 0], step[:, 0, 1], step[:, 1, 0], step[:, 1, 1] = cosine, sine, -sine, cosine
            x, y = width / 2, height / 2
            step[:, 0, 2], step[:, 1, 2] = x - cosine * x - sine * y, y + sine * x - cosine * y
        case "ShearX":
            step[:, 0, 1] = argument_N
        case "ShearY":
            step[:, 1, 0] = argument_N
        case "TranslateXRel":
            step[:, 0, 2] = argument_N * width
        case "TranslateYRel":
            step[:, 1, 2] = argument_N * height
    return step
