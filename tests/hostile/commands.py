"""The commands that read each kind of file."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .seeds import SMALL

# Damages a file in place and describes how.
Damage = Callable[[Path, random.Random], str]


class Command(NamedTuple):
    """A command line; `{file}`, `{out}` and `{NAME}` of a seed stand for paths."""

    text: str

    TOOLS = (
        "relabel_imagenet",
        "pack_dataset",
        "import_labels",
        "export_labels",
        "audit",
        "report",
        "validate",
        "export",
        "score_maps",
        "beton",
    )

    def words(self, seeds: Path, file: Path, out: Path) -> list[str]:
        """Return the module and its options."""
        paths = {path.name.replace(".", "_"): path for path in seeds.iterdir()}
        return [word.format(file=file, out=out, **paths) for word in self.text.split()]


class Kind(NamedTuple):
    """A kind of file: how often it is drawn, how it is made hostile, and what reads it."""

    share: int
    make: Callable[[Path, Path, random.Random, Damage], tuple[Path, str]]
    commands: list[Command]


def train(recipe: str, text: str) -> str:
    return f"train {recipe} {' '.join(SMALL)} {text}"


IMAGES = "--data {images} --val {images}"
STORE = (
    "tools.score_maps verify {file}",
    "tools.score_maps convert {file} --form lossless --out {out}/maps.h5",
    "tools.score_maps convert {file} --form compact --out {out}/maps.h5",
    "tools.pack_dataset --data {images} --maps {file} --out {out}/x.beton",
    "tools.export_labels --maps {file} --out {out}/tree",
    "tools.audit {file} --data {images} --out {out}/audit.html",
    train(
        "lvvit_micro_token_label",
        f"--loader folder {IMAGES} --score-maps {{file}} --out {{out}}/run",
    ),
)
BETON = (
    "tools.beton verify {file}",
    train(
        "lvvit_micro_token_label", "--loader ffcv --data {file} --val {val_beton} --out {out}/run"
    ),
    train("lvvit_micro_ce", "--loader ffcv --data {train_beton} --val {file} --out {out}/run"),
    "tools.validate {run} --data {file} --loader ffcv --threads 1 --json {out}/result.json",
)
RUN = (
    "tools.report {file} --out {out}/report.html",
    "tools.validate {file} --data {images} --loader folder --threads 1",
    "tools.export {file} --out {out}/model",
    train("nfnet_micro_ce", f"--loader folder {IMAGES} --out {{file}} --resume auto"),
    "tools.relabel_imagenet --data {images} --teacher {file} --input-size 64 --top-k 2 "
    "--out {out}/maps.h5",
)
CHECKPOINT = (
    "tools.validate {file} --data {images} --loader folder --threads 1",
    "tools.export {file} --out {out}/model",
    "tools.relabel_imagenet --data {images} --teacher {file} --input-size 64 --top-k 2 "
    "--out {out}/maps.h5",
    "tools.audit {maps_h5} --data {images} --teacher {file} --out {out}/audit.html",
)
FOLDER = (
    "tools.pack_dataset --data {file} --out {out}/x.beton",
    train("lvvit_micro_ce", "--loader folder --data {file} --val {images} --out {out}/run"),
    "tools.relabel_imagenet --data {file} --teacher {run} --input-size 64 --top-k 2 "
    "--out {out}/maps.h5",
    "tools.validate {run} --data {file} --loader folder --threads 1",
)
LIST = (
    "tools.pack_dataset --data {images} --dataset list/{file} --out {out}/x.beton",
    "tools.relabel_imagenet --data {images} --dataset list/{file} --teacher {run} "
    "--input-size 64 --top-k 2 --out {out}/maps.h5",
)
CLASS_MAP = (
    "tools.relabel_imagenet --data {images} --teacher {run} --class-map {file} --input-size 64 "
    "--top-k 2 --out {out}/maps.h5",
)
TREE = (
    "tools.import_labels --labels {file} --data {images} --footprint squash --teacher mine "
    "--input-size 64 --out {out}/maps.h5 --no-audit",
    "tools.import_labels --labels {file} --data {images} --footprint squash --teacher mine "
    "--input-size 64 --out {out}/maps.h5 --no-audit --missing label",
)
REAL = ("tools.validate {run} --data {images} --loader folder --threads 1 --real {file}",)
BOXES = ("tools.report {run} --boxes {file} --out {out}/report.html",)
MERGE = ("tools.score_maps merge {file}",)


def lone(*names: str) -> Callable:
    """Return a maker of one damaged file, a copy of a seed."""

    def make(seeds: Path, folder: Path, rng: random.Random, damage: Damage) -> tuple[Path, str]:
        folder.mkdir()
        path = Path(shutil.copy(seeds / rng.choice(names), folder))
        return path, damage(path, rng)

    return make


def inside(name: str, pattern: str, file: str = "") -> Callable:
    """Return a maker of a copied folder with one damaged file of `pattern`.

    The command gets the folder, or `file` in it.
    """

    def make(seeds: Path, folder: Path, rng: random.Random, damage: Damage) -> tuple[Path, str]:
        shutil.copytree(seeds / name, folder, symlinks=True)
        path = rng.choice(sorted(path for path in folder.glob(pattern) if path.is_file()))
        text = damage(path, rng)
        return folder / file, f"{path.relative_to(folder)}: {text}"

    return make


def checkpoint(seeds: Path, folder: Path, rng: random.Random, damage: Damage) -> tuple[Path, str]:
    folder.mkdir()
    path = folder / "model.pt"
    shutil.copy(seeds / "run" / "last.pt", path)
    return path, damage(path, rng)


def commands(texts: tuple[str, ...]) -> list[Command]:
    return [Command(text) for text in texts]


KINDS = {
    "store": Kind(30, lone("maps.h5", "lossless.h5", "compact.h5"), commands(STORE)),
    "beton": Kind(20, lone("train.beton"), commands(BETON)),
    "checkpoint": Kind(15, checkpoint, commands(CHECKPOINT)),
    "run": Kind(15, inside("run", "*.json*"), commands(RUN)),
    "manifest": Kind(4, inside("run", "checkpoints/*"), commands(RUN)),
    "image": Kind(10, inside("images", "train/*/*"), commands(FOLDER)),
    "list": Kind(10, lone("list.txt"), commands(LIST)),
    "class map": Kind(6, lone("class_map.csv", "class_map.json"), commands(CLASS_MAP)),
    "tree": Kind(12, inside("tree", "*/*.pt"), commands(TREE)),
    "arrays": Kind(6, inside("arrays", "*/*.npy"), commands(TREE)),
    "real": Kind(3, lone("real.json"), commands(REAL)),
    "boxes": Kind(3, inside("images", "boxes.json", "boxes.json"), commands(BOXES)),
    "shards": Kind(4, inside("shards", "*", "maps.h5"), commands(MERGE)),
}
