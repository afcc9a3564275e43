"""A small valid file of every kind that a command reads."""

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from densefeed.storage.images import Images

from ..shard_files import write_shards

SIZE = 32
TRAIN, VAL = 6, 4
CLASSES = "cat", "dog"
# Options of the smallest run.
SMALL = f"--size {SIZE} --batch 3 --epochs 1 --threads 1 --eval-every 1 --device cpu".split()


RELABEL = "tools.relabel_imagenet --data images --teacher run --input-size 64 --top-k 2"
COMMANDS = (
    f"train nfnet_micro_ce --loader folder --data images --val images --out run {' '.join(SMALL)}",
    "train lvvit_micro_ce --loader folder --data images --val images --out student "
    + " ".join(SMALL),
    f"{RELABEL} --out maps.h5",
    "tools.score_maps convert maps.h5 --form lossless --out lossless.h5",
    "tools.score_maps convert maps.h5 --form compact --out compact.h5",
    "tools.pack_dataset --data images --maps maps.h5 --out train.beton",
    "tools.pack_dataset --data images --split val --out val.beton",
    "train lvvit_micro_token_label --data train.beton --val val.beton --out labeled --no-mixtoken "
    + " ".join(SMALL),
    "tools.export_labels --maps maps.h5 --out tree",
    f"{RELABEL} --out share --shard-images 2 --shard 0/2",
    f"{RELABEL} --out other --shard-images 2 --shard 1/2",
    f"{RELABEL} --out joined --shard-images 2",
)


def make_seeds(seeds: Path, run_command: Callable) -> None:
    """Write the files to `seeds`; `run_command(words, folder)` runs a command."""
    parts = seeds.with_name("seeds.part")
    shutil.rmtree(parts, ignore_errors=True)
    write_images(parts / "images")
    for text in COMMANDS:
        done = run_command(text.split(), parts)
        assert done.code == 0, done.output
    for path in sorted((parts / "tree").rglob("*.pt")):
        array = parts / "arrays" / path.relative_to(parts / "tree").with_suffix(".npy")
        array.parent.mkdir(parents=True, exist_ok=True)
        np.save(array, torch.load(path, weights_only=True).numpy())
    paths = sorted(str(path.relative_to(parts / "images")) for path in parts.rglob("*.jpg"))
    lines = [f"{path} {int('dog' in path)}\n" for path in paths]
    (parts / "list.txt").write_text("".join(lines))
    (parts / "class_map.csv").write_text("teacher,data\ncat,cat\ndog,dog\n")
    (parts / "class_map.json").write_text('{"cat": "cat", "dog": "dog"}')
    (parts / "real.json").write_text(json.dumps([[0], [1], [0, 1], []]))
    write_boxes(parts / "images")
    write_image_shards(parts)
    weights = torch.load(parts / "run" / "last.pt", weights_only=True)["model"]
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(weights, parts / "weights.safetensors")
    parts.rename(seeds)


def write_images(folder: Path) -> None:
    """Write images of noise, in two class folders of two splits."""
    rng = np.random.default_rng(0)
    for split, count in (("train", TRAIN), ("val", VAL)):
        for number in range(count):
            path = folder / split / CLASSES[number % 2] / f"{number:03d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            coarse = rng.integers(0, 256, (6, 5, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((40, 48)).save(path, quality=90)


def write_image_shards(parts: Path) -> None:
    """Write the images as shards: `tar` and `parquet`, and `folders`, a tar of class folders."""
    for split in ("train", "val"):
        write_shards(Images(parts / "images", split=split), parts, split, parts=2)
        (parts / "folders").mkdir(exist_ok=True)
        with tarfile.open(
            parts / "folders" / f"{split}.tar", "w", format=tarfile.PAX_FORMAT
        ) as tar:
            # A path of a pax header.
            tar.add(parts / "images" / split, f"./{'long' * 40}/{split}")


def write_boxes(images: Path) -> None:
    """Write the true boxes of the training images, as make_digit_scenes does."""
    paths = sorted(str(path.relative_to(images)) for path in (images / "train").rglob("*.jpg"))
    scenes = {path: [{"class": path.split("/")[1], "box": [4, 4, 20, 20]}] for path in paths}
    (images / "boxes.json").write_text(json.dumps({"size": [40, 40], "scenes": scenes}))
