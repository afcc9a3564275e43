"""Folders, lists, class maps, trees and stores with hostile names, and their commands."""

import contextlib
import io
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from densefeed.storage.score_maps import ScoreMaps, ScoreMapWriter, StoreHeader

from .commands import OUTSIDE, Damage, Kind, Make, make_commands

SIDE, TOP_K = 4, 2


class Cells(nn.Module):
    """A teacher with a number among the names of its classes."""

    num_classes, class_names = 3, ("tabby", "poodle", "1")

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, 3, 8, 8)

    def forward_token_logits(self, image_NCHW: Tensor) -> Tensor:
        return self.head(image_NCHW)


class FirstChoice(random.Random):
    """Draws the first of all choices, and no samples.

    The makers below list what is valid first, so with these draws they make a valid file.
    """

    def random(self) -> float:
        return 0.0

    def sample(self, population: object, k: int) -> list:
        return []


NAMES = [
    b"\x1b[2J\x1b[31mred.jpg",
    b"\x9b31m.jpg",
    "\x9b31m\u202egpj.exe\u2066.jpg".encode(),
    b"two\nerror: lines.jpg",
    b"[/b][red]x.jpg",
    "1²2.jpg".encode(),
    "٣٤.jpg".encode(),
    b"\xff\xfe.jpg",
    b"-rf.jpg",
    b"--out=x.jpg",
    b"..jpg",
    b"...jpg",
    b".jpg",
    b"%s%n{0}.jpg",
    b"a b\t.jpg ",
    b"a\\..\\b.jpg",
    b"~",
    b"$(touch x).jpg",
    b"9" * 250 + b".jpg",
    b"\x7f\x08\r.jpg",
    "é".encode() + b".JPG",
    b"x.webp",
    b"x.TIFF",
    b"x.gif",
    b"x.txt",
    b"x.\x1b[2J",
    b"no-ending",
]
PATHS = [
    # An image that is there; a list that is otherwise valid must lead to it now and then.
    *["../secret.jpg", "a/../../secret.jpg"] * 4,
    "/etc/passwd",
    "//etc/passwd",
    "a//x.jpg",
    "",
    ".",
    "..",
    "a/..",
    "./a/0.jpg",
    "a/",
    "/",
    "//x.jpg",
    "a/./0.jpg",
    "a" * 300 + "/x.jpg",
    "a/" * 3000 + "x.jpg",
    "\x1b]0;title\x07/x.jpg",
    "a/\u202e.jpg",
    "a\\..\\x.jpg",
    "~/x.jpg",
    "a/.x.jpg",
    "a.b/x.jpg",
    "a\tb/x.jpg",
    "a/0.jpg",
    "a/1.jpg",
    "b/0.jpg",
]
LABELS = ["", "0", "1", "65534", "65535", "100000000", "-1", "1e3", "9" * 5000, "٣", "²", "nan"]


def encode(kind: str) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((24, 20), 50).convert("RGB").save(file, kind)
    return file.getvalue()


IMAGES = [encode(kind) for kind in ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")]
OTHERS = [
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(x) (w) file\n",
    b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    b"P3\n99999999 99999999\n255\n",
    b"GIF89a\xff\xff\xff\xff\0\0\0",
    IMAGES[0][:200],
    IMAGES[1][:60] + b"\0" * 60,
    encode("ICO"),
    encode("JPEG2000"),
    encode("TGA"),
    b"",
    b"\0" * 5000,
]
# Values, all zero, and classes, which are 0 and 1, of an image's score map.
MAP = torch.zeros(2, TOP_K, SIDE, SIDE, dtype=torch.float16)
MAP[1, 1] = 1


def plant(rng: random.Random, path: bytes, content: bytes, depth: int = 0) -> None:
    """Put something in place of a file, unless there is something."""
    kind = rng.random()
    # To write into a pipe that is there would wait.
    if os.path.lexists(path):
        return
    with contextlib.suppress(OSError):
        if kind < 0.7:
            Path(os.fsdecode(path)).write_bytes(content)
        elif kind < 0.74:
            os.mkfifo(path)
        elif kind < 0.78:
            target = [path, b"/dev/zero", b"..", b".", b"nowhere", b"/etc/passwd", b"/dev/tty"]
            os.symlink(rng.choice(target), path)
        elif kind < 0.8:
            with socket.socket(socket.AF_UNIX) as pipe:
                pipe.bind(path)
        elif kind < 0.82:
            with open(path, "wb") as file:
                file.truncate(rng.choice([2**31, 2**40]))
        elif kind < 0.84:
            deep = path
            while len(deep) < 3900:
                os.mkdir(deep)
                deep += b"/" + rng.choice([b"d", b"d" * 200])
        elif kind < 0.88:
            os.mkdir(path)
            for link in (b"p", b"q") * (depth < 20):
                os.symlink(rng.choice([b"..", b"../.", path]), path + b"/" + link)
            plant(rng, path + b"/0.jpg", content, depth + 1)
        else:
            Path(os.fsdecode(path)).write_bytes(rng.choice(OTHERS))


def write_images(data: Path) -> None:
    """Write two images of each of two classes."""
    for name in ("a/0", "a/1", "b/0", "b/1"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / f"{name}.jpg").write_bytes(IMAGES[0])


def make_text(rng: random.Random, lines: list[str]) -> bytes:
    """Join lines, and damage them in a third of the cases."""
    text = rng.choice(["\n", "\r\n", "\n\n"]).join(lines).encode(errors="surrogateescape")
    change = rng.choice([*["none"] * 8, *["insert"] * 3, "mark", "utf-16"])
    if change == "insert":
        at = rng.randrange(len(text) + 1)
        extra = [b"\0", b"\xff", b"\x1b[2J", b'"', b"'", b"\n", b"[" * 100_000, b"9" * 200_000]
        return text[:at] + rng.choice(extra) + text[at:]
    if change == "mark":
        return b"\xef\xbb\xbf" + text
    if change == "utf-16":
        return text.decode(errors="replace").encode("utf-16")
    return text


# ------------------------------------------------------------------------- makers


def make_images(folder: Path, rng: random.Random) -> Path:
    """Make class folders, some with hostile names, and with hostile files in them."""
    data = folder / "data"
    for name in (b"a", b"b", *rng.sample(NAMES, rng.choice([0, 0, 1, 2]))):
        home = os.fsencode(data) + b"/" + name
        with contextlib.suppress(OSError):
            os.makedirs(home)
        for number in range(2):
            Path(os.fsdecode(home + b"/%d.jpg" % number)).write_bytes(IMAGES[0])
        for other in rng.sample(NAMES, rng.choice([0, 1, 3])):
            plant(rng, home + b"/" + other, rng.choice(IMAGES))
    return data


def make_list(folder: Path, rng: random.Random) -> tuple[Path, str]:
    """Make a list of images, some with hostile paths and labels."""
    write_images(folder / "data")
    file = folder / rng.choice(["l.txt", "l_train.txt"])
    labeled = rng.choice([True, False])
    lines = ["a/0.jpg 0", "b/0.jpg 1"] if labeled else ["a/0.jpg", "b/0.jpg"]
    for _ in range(rng.choice([0, 1, 1, 3])):
        label = f" {rng.choice([*'01' * 6, *LABELS])}" if labeled or rng.random() < 0.1 else ""
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(PATHS) + label)
    text = make_text(rng, lines)
    plant(rng, os.fsencode(file), text)
    return file, OUTSIDE if b"secret" in text else ""


def make_class_list(folder: Path, rng: random.Random) -> Path:
    """Make a list of class folders, some of which have hostile names or do not exist."""
    data, file = folder / "data", folder / "classes.txt"
    write_images(data)
    names = rng.sample(NAMES, rng.choice([0, 1, 3]))
    for name in names:
        home = Path(data, os.fsdecode(name))
        home.mkdir(parents=True, exist_ok=True)
        (home / "0.jpg").write_bytes(IMAGES[0])
    lines = ["a", "b", *rng.sample([*map(os.fsdecode, names)], rng.randrange(1 + len(names)))]
    lines += rng.sample(["..", "/", "a", "a/../b", "\x1b[2J", "é"], rng.choice([0, 0, 1]))
    plant(rng, os.fsencode(file), make_text(rng, lines))
    return file


def draw_pairs(rng: random.Random) -> list[tuple[str, str]]:
    """Draw classes of the teacher with those of the data, from 0 to 2 of them hostile."""
    cells = ["1", "2", "0", "9" * 5000, "-1", "²", "٣", "\x1b[2J", "x" * 10**6, "tabby"]
    pairs = [("tabby", "a"), ("poodle", "b")]
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        pairs.append((rng.choice(cells), rng.choice(["a", "b", "", "c"])))
    return pairs


def make_class_csv(folder: Path, rng: random.Random) -> Path:
    write_images(folder / "data")
    file = folder / rng.choice(["m.csv", "m"])
    extra = ['"', 'tabby,"a', '"a"b,c', ",,,", "teacher,data", '"a\nb",a', ",a", "a"]
    lines = [",".join(pair) for pair in draw_pairs(rng)]
    lines += rng.sample(extra, rng.choice([0, 0, 1]))
    plant(rng, os.fsencode(file), make_text(rng, lines))
    return file


def make_class_json(folder: Path, rng: random.Random) -> Path:
    write_images(folder / "data")
    file = folder / "m.json"
    body = ", ".join(f'"{theirs}": "{ours}"' for theirs, ours in draw_pairs(rng))
    nested = ["[" * 50_000, '{"a":' * 50_000, "9" * 5000, "NaN", '{"\\ud800": "a"}', "{}"]
    text = rng.choice([*[f"{{{body}}}"] * 12, *nested])
    plant(rng, os.fsencode(file), make_text(rng, [text]))
    return file


def make_tree(folder: Path, rng: random.Random) -> Path:
    """Make a tree of score maps for class folders with hostile names."""
    data, labels, file = make_images(folder, rng), folder / "labels", io.BytesIO()
    torch.save(MAP, file)
    for path in [*data.rglob("*")]:
        with contextlib.suppress(OSError, UnicodeError):
            if path.is_file():
                target = (labels / path.relative_to(data)).with_suffix(".pt")
                target.parent.mkdir(parents=True, exist_ok=True)
                plant(rng, os.fsencode(target), file.getvalue())
    for name in rng.sample(NAMES, rng.choice([0, 2])):
        with contextlib.suppress(OSError):
            os.makedirs(os.fsencode(labels) + b"/" + name + b"/x.pt")
    return labels


def make_store(folder: Path, rng: random.Random) -> Path:
    """Make a store with hostile paths and names of classes."""
    paths = ["a/0.jpg", "a/1.jpg", "b/0.jpg", "b/1.jpg"]
    for place in rng.sample(range(4), rng.choice([0, 1, 4])):
        # Longer paths are refused in any file.
        paths[place] = rng.choice(PATHS).encode()[:4096].decode(errors="ignore")
    header = StoreHeader(
        side=SIDE,
        top_k=TOP_K,
        num_classes=2,
        absent="zero-logit",
        teacher=rng.choice(["t", "\x1b[2J[/b]"]),
        input_size=64,
        geometry="squash",
        fingerprint="0" * 64,
        class_names=rng.choice([("a", "b"), ("..", "/"), ("\x1b[2J", "[/b]")]),
    )
    maps = ScoreMaps(
        np.zeros((4, SIDE, SIDE, TOP_K), np.float16),
        np.tile(np.arange(TOP_K, dtype=np.uint16), (4, SIDE, SIDE, 1)),
        np.full((4, SIDE, SIDE), np.log(2), np.float16),
        np.tile(np.array([0, 0, 1, 1], np.float32), (4, 1)),
    )
    labels = np.array([0, 1, 0, rng.choice([0, 0, 10**8])])
    writer = ScoreMapWriter(folder / "maps.h5", header, paths, labels)
    writer.write(np.arange(4), maps)
    writer.finish()
    writer.close()
    return folder / "maps.h5"


def adapt(maker: Callable[[Path, random.Random], Path | tuple[Path, str]]) -> Make:
    """Give a maker of this file, `maker(folder, rng)`, the arguments of those of a Kind."""

    def make(
        seeds: Path, folder: Path, rng: random.Random, damage: Damage | None
    ) -> tuple[Path, str]:
        folder.mkdir()
        # Beside the data, where lists must not lead.
        (folder / "secret.jpg").write_bytes(IMAGES[0])
        made = maker(folder, rng if damage else FirstChoice())
        return made if isinstance(made, tuple) else (made, "")

    return make


# ------------------------------------------------------------------------- commands

PACK = "tools.pack_dataset --data {file} --threads 2 --out {out}/x.beton"
DATA = "--data {file.parent}/data --threads 1"
TRAIN = (
    "train nfnet_micro_ce --loader folder --data {file} --val {file} --batch 2 --size 32 "
    "--dry-run --threads 1 --out {out}/run"
)
FOLDER = (
    *(PACK, f"{PACK} --dataset share/50", f"{PACK} --split val"),
    *(f"{PACK} --on-bad-sample skip", f"{PACK} --split ../data --on-bad-sample skip"),
    *(TRAIN, f"{TRAIN} --on-bad-sample skip"),
)
LIST = (f"tools.pack_dataset {DATA} --dataset list/{{file}} --out {{out}}/x.beton",)
CLASSES = (f"tools.pack_dataset {DATA} --dataset classes/{{file}} --out {{out}}/x.beton",)
CLASS_MAP = (
    f"tools.relabel_imagenet {DATA} --teacher tests.hostile.names:Cells --class-map {{file}} "
    "--input-size 32 --top-k 1 --device cpu --dry-run --out {out}/maps.h5",
)
IMPORT = (
    f"tools.import_labels {DATA} --labels {{file}} --teacher t --input-size 64 --no-audit "
    "--out {out}/maps.h5"
)
TREE = (
    f"{IMPORT} --footprint squash",
    f"{IMPORT} --footprint center-crop --missing label --problems {{out}}/problems.txt",
)
EXPORT = "tools.export_labels --maps {file} --out {out}"
STORE = (
    "tools.score_maps verify {file}",
    *(f"{EXPORT}/tree", f"{EXPORT}/[/b]tree", f"{EXPORT}/\x1b[2J"),
)

KINDS = {
    "folder": Kind(5, adapt(make_images), make_commands(FOLDER)),
    "list": Kind(4, adapt(make_list), make_commands(LIST)),
    "class list": Kind(2, adapt(make_class_list), make_commands(CLASSES)),
    "class map, CSV": Kind(2, adapt(make_class_csv), make_commands(CLASS_MAP)),
    "class map, JSON": Kind(2, adapt(make_class_json), make_commands(CLASS_MAP)),
    "tree": Kind(3, adapt(make_tree), make_commands(TREE)),
    "store": Kind(3, adapt(make_store), make_commands(STORE)),
}
