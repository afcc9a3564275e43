"""Small real datasets that several rooms' tests share."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

ROOT = Path(__file__).parent.parent
torch.set_num_threads(2)


@pytest.fixture(scope="session")
def command():
    """Runs `python WORDS` in the checkout as a user would; output captured."""

    def run(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, *map(str, words)], cwd=cwd, capture_output=True, text=True)

    return run


def photograph(rng: np.random.Generator, height: int, width: int) -> Image.Image:
    """Smooth colour noise: compresses and resamples as a photograph does."""
    coarse = rng.integers(0, 256, (max(2, height // 8), max(2, width // 8), 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Two classes, `train/` of 11 and `val/` of 5 JPEGs of different sizes."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split, count in (("train", 11), ("val", 5)):
        for number in range(count):
            path = root / split / ("cat", "dog")[number % 2] / f"{number:03d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            photograph(rng, int(rng.integers(40, 90)), int(rng.integers(40, 90))).save(path, quality=90)
    return root


@pytest.fixture(scope="session")
def random_maps():
    """A maker of score maps of any shape, as a teacher of K classes might give them."""
    from densefeed.relabel.labelling import keep_top

    def make(count: int, side: int, top_k: int, num_classes: int, seed: int = 0, window=(0.0, 0.0, 1.0, 1.0)):
        logits = 3 * torch.randn(count, side, side, num_classes, generator=torch.Generator().manual_seed(seed))
        return keep_top(logits, top_k, np.tile(np.array(window, np.float32), (count, 1)))

    return make


@pytest.fixture(scope="session")
def maps(folder, random_maps, tmp_path_factory) -> Path:
    """A store of random maps (S=6, k=2, K=2) for `folder`'s training split, its windows not the whole image."""
    from densefeed.relabel.images import Images
    from densefeed.relabel.store import ScoreMapWriter, StoreHeader

    images = Images(folder, split="train")
    path = tmp_path_factory.mktemp("maps") / "maps.h5"
    header = StoreHeader(
        side=6, top_k=2, num_classes=2, absent="tail", teacher="random", input_size=96, geometry="centre-crop",
        fingerprint=images.fingerprint(), class_names=tuple(images.class_names),
    )  # fmt: skip
    writer = ScoreMapWriter(path, header, images.paths, images.labels)
    writer.write(np.arange(len(images)), random_maps(len(images), 6, 2, 2, window=(0.0, 0.1, 1.0, 0.9)))
    writer.finish()
    return path
