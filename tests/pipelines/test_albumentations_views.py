"""Views of Albumentations against pixels that are their own coordinates, live and as recorded.

Albumentations is not among the dependencies: a run of version 2.0.8 is kept in
albumentations.json, which `python -m tests.pipelines.test_albumentations_views` writes.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from densefeed import UserError
from densefeed.pipelines.albumentations_views import follow

RECORDED = Path(__file__).with_name("albumentations.json")
# Pixels are float32, of values up to 1, and interpolated in it three times.
EXACT = 1e-6
SIDES = 97, 83
SEEDS = 3


def make_transforms(A) -> dict:
    """Return what is tried, by name; compositions are tuples."""
    affine = dict(scale=(0.7, 1.3), translate_percent=(-0.1, 0.1), rotate=(-40, 40))
    transforms = {
        "crop": A.RandomCrop(61, 70),
        "crop padded": A.RandomCrop(150, 99, pad_if_needed=True),
        "center crop": A.CenterCrop(50, 41),
        "box": A.Crop(3, 5, 60, 70),
        "borders": A.RandomCropFromBorders(p=1),
        "resized crop": A.RandomResizedCrop((64, 48)),
        "sized crop": A.RandomSizedCrop((40, 80), (64, 64)),
        "resize": A.Resize(130, 55),
        "shorter": A.SmallestMaxSize(77),
        "longer": A.LongestMaxSize(75),
        "scale": A.RandomScale((-0.4, 0.4), p=1),
        "pad to": A.PadIfNeeded(150, 151),
        "pad": A.Pad([1, 2, 3, 4]),
        "flip": A.HorizontalFlip(p=1),
        "vertical flip": A.VerticalFlip(p=1),
        "transpose": A.Transpose(p=1),
        "group": A.D4(p=1),
        "symmetry": A.SquareSymmetry(p=1),
        "quarters": A.RandomRotate90(p=1),
        "affine": A.Affine(**affine, shear=(-20, 20), p=1),
        "affine fitted": A.Affine(rotate=(-40, 40), fit_output=True, p=1),
        "rotate": A.Rotate(180, p=1),
        "rotate cropped": A.Rotate(60, crop_border=True, p=1),
        "safe": A.SafeRotate(90, p=1),
        "shift": A.ShiftScaleRotate(p=1),
        "erased": A.XYMasking(p=1),
    }
    names = sorted(transforms)
    rng = np.random.default_rng(0)
    for number in range(24):
        chosen = rng.choice(names, rng.integers(2, 5))
        transforms[f"composition {number}"] = tuple(transforms[str(name)] for name in chosen)
    return transforms


def erase_border(image: np.ndarray) -> np.ndarray:
    """Mark the outer pixels as fill: interpolation repeats them where a crop is enlarged."""
    image = image.copy()
    inner = np.zeros(image.shape[:2], bool)
    inner[3:-3, 3:-3] = True
    image[..., 2] *= inner
    return image


def run(A, steps, seed: int) -> dict:
    """Return the records of a pipeline, and the coordinates that some pixels show."""
    height, width = SIDES
    y, x = np.meshgrid(
        (np.arange(height) + 0.5) / height, (np.arange(width) + 0.5) / width, indexing="ij"
    )
    image, applied = erase_border(np.stack([x, y, np.ones_like(x)], 2).astype(np.float32)), []
    for step in steps if isinstance(steps, tuple) else (steps,):
        result = A.Compose([step], save_applied_params=True, seed=seed)(image=image)
        applied += result["applied_transforms"]
        image = erase_border(result["image"])
    # The third channel is 0 where pixels are erased.
    rows, columns = np.nonzero(image[..., 2] > 1 - 1e-6)
    some = np.random.default_rng(seed).permutation(len(rows))[:12]
    pixels = [(r, c, *image[r, c, :2]) for r, c in zip(rows[some], columns[some], strict=True)]
    kept = "shape", "crop_coords", "pad_params", "matrix", "factor", "group_element"
    kept += "pad_top", "pad_left", "x_min", "y_min"
    applied = [(name, {k: p[k] for k in kept if k in p}) for name, p in applied]
    return {"applied": applied, "size": image.shape[:2], "pixels": pixels}


def deviation(one: dict) -> float:
    """Return the largest distance of pixels from where the View says, in sides."""
    steps = [tuple(step) for step in one["applied"]]
    result = {"image": np.empty((*one["size"], 3)), "applied_transforms": steps}
    view = follow(np.empty((*SIDES, 3)), result)
    assert view.canvas_size == tuple(one["size"])
    height, width = one["size"]
    far = 0.0
    top, left, bottom, right = view.shown.tolist()
    for row, column, x, y in one["pixels"]:
        point = torch.tensor([(column + 0.5) / width, (row + 0.5) / height, 1], dtype=torch.double)
        found = (view.matrix @ point).tolist()
        far = max(far, abs(found[0] - x), abs(found[1] - y))
        assert left < x < right
        assert top < y < bottom
    return far


def read_recorded() -> dict:
    return json.loads(RECORDED.read_text())


def test_outside_recorded_pipelines_of_albumentations_are_exact():
    runs = read_recorded()
    assert len(runs) > 45 * SEEDS
    assert sum(len(one["pixels"]) == 12 for one in runs.values()) > 0.9 * len(runs)
    assert max(deviation(one) for one in runs.values()) < EXACT


def test_outside_pipelines_of_albumentations_are_exact():
    A = pytest.importorskip("albumentations")
    for steps in make_transforms(A).values():
        for seed in range(20):
            assert deviation(run(A, steps, seed)) < EXACT
    image = np.zeros((*SIDES, 3), np.uint8)
    colors = A.Compose([A.ColorJitter(p=1), A.GaussNoise(p=1)], save_applied_params=True)
    assert torch.equal(follow(image, colors(image=image)).matrix, torch.eye(2, 3).double())
    tensor = pytest.importorskip("albumentations.pytorch").ToTensorV2()
    whole = A.Compose([A.Resize(30, 40), A.Normalize(), tensor], save_applied_params=True)
    assert follow(image, whole(image=image)).canvas_size == (30, 40)
    bent = A.Compose([A.ElasticTransform(p=1)], save_applied_params=True)
    with pytest.raises(UserError, match="cannot follow ElasticTransform of Albumentations"):
        follow(image, bent(image=image))


@pytest.mark.parametrize(
    ("applied", "said"),
    [
        (None, "has no applied_transforms; give its outermost Compose save_applied_params=True"),
        ([("Perspective", {"shape": (97, 83)})], "cannot follow Perspective of Albumentations"),
        ([("RandomCrop", {"shape": (97, 83)})], "RandomCrop of Albumentations recorded other par"),
        ([("HorizontalFlip", {"shape": (97, 83)})], "do not follow from each other"),
    ],
)
def test_outside_records_that_no_view_can_follow_are_one_sentence(applied, said):
    result = {"image": np.empty((50, 50, 3))}
    result |= {} if applied is None else {"applied_transforms": applied}
    with pytest.raises(UserError, match=said):
        follow(np.empty((97, 83, 3)), result)


if __name__ == "__main__":
    import albumentations

    recorded = {
        f"{name}, {seed}": run(albumentations, steps, seed)
        for name, steps in make_transforms(albumentations).items()
        for seed in range(SEEDS)
    }
    write = dict(default=lambda value: np.asarray(value).tolist(), separators=(",", ":"))
    RECORDED.write_text(json.dumps(recorded, **write) + "\n")
