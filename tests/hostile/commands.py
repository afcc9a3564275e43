"""The commands that read each kind of file."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from densefeed.models.checkpoints import MANIFEST

from .mutations import list_hash
from .seeds import SMALL

# Damages a file in place and describes how.
Damage = Callable[[Path, random.Random], str]
# Makes a file, from the seeds, in a folder that does not exist, valid if there is no damage;
# returns its path and a description.
Make = Callable[[Path, Path, random.Random, Damage | None], tuple[Path, str]]
# Description of lists that must be refused.
OUTSIDE = "names an image outside --data"


class Command(NamedTuple):
    """A command line; `{file}`, `{out}` and `{NAME}` of a seed stand for paths."""

    text: str

    @property
    def module(self) -> str:
        return self.text.split()[0]

    def words(self, seeds: Path, file: Path, out: Path) -> list[str]:
        """Return the module and its options."""
        paths = {path.name.replace(".", "_"): path for path in seeds.glob("*")}
        return [word.format(file=file, out=out, **paths) for word in self.text.split()]

    def outputs(self, file: Path, out: Path, accepted: bool) -> set[Path]:
        """Return the files and folders that the command may change."""
        # Training goes on in the folder that it is given.
        if "--out {file}" in self.text:
            return {out, file}
        return {out}


class Kind(NamedTuple):
    """A kind of file: how often it is drawn, how it is made hostile, and what reads it."""

    share: int
    make: Make
    commands: list[Command]


def train(recipe: str, text: str) -> str:
    return f"train {recipe} {' '.join(SMALL)} {text}"


IMAGES = "--data {images} --val {images}"
STORE = (
    "tools.explain {student} --images {images} --split train --maps {file} --out {out}/page.html",
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
    "tools.relabel_imagenet --data {images} --teacher {file} --input-size 64 --top-k 2 "
    "--out {out}/maps.h5",
)
EXPLAIN = "tools.explain {file} --images {images} --count 2 --out {out}/page.html"
CHECKPOINT = (
    EXPLAIN,
    "tools.validate {file} --data {images} --loader folder --threads 1",
    "tools.export {file} --out {out}/model",
    "tools.relabel_imagenet --data {images} --teacher {file} --input-size 64 --top-k 2 "
    "--out {out}/maps.h5",
    "tools.audit {maps_h5} --data {images} --teacher {file} --out {out}/audit.html",
    train("nfnet_micro_ce", f"--loader folder {IMAGES} --init {{file}} --out {{out}}/run"),
)
STUDENT = (f"{EXPLAIN} --arrays {{out}}/arrays", f"{EXPLAIN} --pictures {{out}}/pictures")
WEIGHTS = (
    "tools.validate {file} --model nfnet_micro --data {images} --loader folder --threads 1",
    "tools.export {file} --model nfnet_micro --out {out}/model",
    train("nfnet_micro_ce", f"--loader folder {IMAGES} --init {{file}} --out {{out}}/run"),
)
FOLDER = (
    "tools.explain {student} --images {file} --split train --out {out}/page.html",
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
BOXES = ("tools.report {labeled} --boxes {file} --out {out}/report.html",)
MERGE = ("tools.score_maps merge {file} {other} --out {out}/maps.h5",)
JOINED = (*STORE, "tools.score_maps status {file}")


def damage_file(*names: str) -> Make:
    """Return a maker of one damaged file, a copy of a seed."""

    def make(
        seeds: Path, folder: Path, rng: random.Random, damage: Damage | None
    ) -> tuple[Path, str]:
        folder.mkdir()
        path = Path(shutil.copy(seeds / rng.choice(names), folder))
        return path, damage(path, rng) if damage else ""

    return make


def damage_in_folder(name: str, pattern: str, file: str = "") -> Make:
    """Return a maker of a copied folder with one damaged file of `pattern`.

    The command gets the folder, or `file` in it.
    """

    def make(
        seeds: Path, folder: Path, rng: random.Random, damage: Damage | None
    ) -> tuple[Path, str]:
        shutil.copytree(seeds / name, folder, symlinks=True)
        path = rng.choice(sorted(path for path in folder.glob(pattern) if path.is_file()))
        text = damage(path, rng) if damage else ""
        # A checkpoint whose hash is another one is refused before it is read.
        listed = path.suffix == ".pt" and path.with_name(MANIFEST).exists() and path.is_file()
        if listed and rng.random() < 0.5:
            list_hash(path)
            text += ", with its hash"
        return folder / file, f"{path.relative_to(folder)}: {text}"

    return make


def make_commands(texts: tuple[str, ...]) -> list[Command]:
    return [Command(text) for text in texts]


KINDS = {
    "store": Kind(30, damage_file("maps.h5", "lossless.h5", "compact.h5"), make_commands(STORE)),
    "beton": Kind(20, damage_file("train.beton"), make_commands(BETON)),
    "checkpoint": Kind(15, damage_file("run/last.pt"), make_commands(CHECKPOINT)),
    "student": Kind(6, damage_file("student/last.pt"), make_commands(STUDENT)),
    "weights": Kind(5, damage_file("weights.safetensors"), make_commands(WEIGHTS)),
    "run": Kind(15, damage_in_folder("run", "*.json*"), make_commands(RUN)),
    "manifest": Kind(4, damage_in_folder("run", "checkpoints/*"), make_commands(RUN)),
    "image": Kind(10, damage_in_folder("images", "train/*/*"), make_commands(FOLDER)),
    "tar": Kind(10, damage_in_folder("tar", "*.tar"), make_commands(FOLDER)),
    "tar folders": Kind(5, damage_in_folder("folders", "*"), make_commands(FOLDER)),
    "parquet": Kind(10, damage_in_folder("parquet", "data/*"), make_commands(FOLDER)),
    "list": Kind(10, damage_file("list.txt"), make_commands(LIST)),
    "class map": Kind(6, damage_file("class_map.csv", "class_map.json"), make_commands(CLASS_MAP)),
    "tree": Kind(12, damage_in_folder("tree", "*/*.pt"), make_commands(TREE)),
    "arrays": Kind(6, damage_in_folder("arrays", "*/*.npy"), make_commands(TREE)),
    "real": Kind(3, damage_file("real.json"), make_commands(REAL)),
    "boxes": Kind(3, damage_in_folder("images", "boxes.json", "boxes.json"), make_commands(BOXES)),
    "share": Kind(4, damage_in_folder("share", "**/*.*"), make_commands(MERGE)),
    "joined": Kind(8, damage_in_folder("joined", "**/*.*"), make_commands(JOINED)),
}
