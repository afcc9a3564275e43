"""Hostile names, lists, class maps and folders, given to the commands in forked children.

    python tests/hostile_names.py CASES [SEED]

Every case must end with exit code 0 or 2 in time, without a traceback, without a control character
in its output, and without a change of any file but those below `out/`. The cases are a function of
the seed. The exit code of this program is 1 if one of them did not.
"""

import contextlib
import io
import os
import random
import re
import resource
import runpy
import signal
import socket
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from densefeed.storage.score_maps import ScoreMaps, ScoreMapWriter, StoreHeader

ROOT = Path(__file__).parent.parent
# Seconds, and bytes of memory beyond those of the parent, of one case.
TIMEOUT, MEMORY = 30, 3 * 2**30
SIDE, TOP_K = 4, 2
TEACHER = """
import torch
class Cells(torch.nn.Module):
    num_classes, class_names = 3, ["tabby", "poodle", "1"]
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Conv2d(3, 3, 8, 8)
    def forward_token_logits(self, image_NCHW):
        return self.head(image_NCHW).permute(0, 2, 3, 1)
"""
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
    "../secret.jpg",
    "/etc/passwd",
    "//etc/passwd",
    "a//x.jpg",
    "a/../../secret.jpg",
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
EMPTY = torch.zeros(2, TOP_K, SIDE, SIDE, dtype=torch.float16)


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


def make_folder(rng: random.Random, home: Path) -> Path:
    """Make a hostile folder of class folders."""
    data = home / "data"
    classes = [b"a", b"b", *rng.sample(NAMES, rng.choice([0, 0, 1, 2]))]
    for name in classes:
        folder = os.fsencode(data) + b"/" + name
        with contextlib.suppress(OSError):
            os.makedirs(folder)
        for number in range(2):
            Path(os.fsdecode(folder + b"/%d.jpg" % number)).write_bytes(IMAGES[0])
        for other in rng.sample(NAMES, rng.choice([0, 1, 3])):
            plant(rng, folder + b"/" + other, rng.choice(IMAGES))
    return data


def make_plain(home: Path) -> Path:
    data = home / "data"
    for name in ("a/0", "a/1", "b/0", "b/1"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / f"{name}.jpg").write_bytes(IMAGES[0])
    return data


def make_text(rng: random.Random, lines: list[str]) -> bytes:
    """Join lines and damage them."""
    text = rng.choice(["\n", "\r\n", "\n\n"]).join(lines).encode(errors="surrogateescape")
    kind = rng.randrange(12)
    if kind < 3:
        at = rng.randrange(len(text) + 1)
        extra = [b"\0", b"\xff", b"\x1b[2J", b'"', b"'", b"\n", b"[" * 100_000, b"9" * 200_000]
        text = text[:at] + rng.choice(extra) + text[at:]
    if kind == 3:
        text = b"\xef\xbb\xbf" + text
    if kind == 4:
        text = text.decode(errors="replace").encode("utf-16")
    return text


def of_folder(rng: random.Random, home: Path) -> list[str]:
    data = make_folder(rng, home)
    dataset = rng.choice([[], [], ["--dataset", "share/50"]])
    skip = rng.choice([[], ["--on-bad-sample", "skip"]])
    words = ["tools/pack_dataset.py", "--data", str(data), "--out", "out/x.beton", *dataset]
    return [*words, *skip, "--threads", "2", "--split", rng.choice(["train", "val", "../data", ""])]


def of_list(rng: random.Random, home: Path) -> list[str]:
    data, file = make_plain(home), home / rng.choice(["l.txt", "l_train.txt"])
    labeled = rng.random() < 0.5
    lines = ["a/0.jpg 0", "b/0.jpg 1"] if labeled else ["a/0.jpg", "b/0.jpg"]
    for _ in range(rng.choice([0, 1, 3])):
        label = f" {rng.choice(LABELS)}" if labeled or rng.random() < 0.1 else ""
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(PATHS) + label)
    plant(rng, os.fsencode(file), make_text(rng, lines))
    words = ["tools/pack_dataset.py", "--data", str(data), "--out", "out/x.beton"]
    return [*words, "--dataset", f"list/{file}", "--threads", "1"]


def of_classes(rng: random.Random, home: Path) -> list[str]:
    data, file = make_folder(rng, home), home / "classes.txt"
    lines = ["a", *rng.sample(["b", "..", "/", "a", "a/../b", "\x1b[2J", "é"], rng.randrange(3))]
    plant(rng, os.fsencode(file), make_text(rng, lines))
    words = ["tools/pack_dataset.py", "--data", str(data), "--out", "out/x.beton"]
    return [*words, "--dataset", f"classes/{file}", "--threads", "1"]


def of_class_map(rng: random.Random, home: Path) -> list[str]:
    data, file = make_plain(home), home / rng.choice(["m.csv", "m.json", "m"])
    cells = ["tabby", "poodle", "1", "0", "2", "9" * 5000, "-1", "²", "٣", "\x1b[2J", "x" * 10**6]
    pairs = [("tabby", "a"), ("poodle", "b")]
    pairs += [(rng.choice(cells), rng.choice(["a", "b", "", "c"])) for _ in range(rng.randrange(3))]
    if file.suffix == ".json":
        body = ", ".join(f'"{theirs}": "{ours}"' for theirs, ours in pairs)
        nested = ["[" * 50_000, '{"a":' * 50_000, "9" * 5000, "NaN", '{"\\ud800": "a"}', "{}"]
        lines = [rng.choice([f"{{{body}}}", f"{{{body}}}", *nested])]
    else:
        lines = [",".join(pair) for pair in pairs]
        extra = ['"', 'tabby,"a', '"a"b,c', ",,,", "teacher,data", '"a\nb",a', ",a", "a"]
        lines += rng.sample(extra, rng.randrange(2))
    plant(rng, os.fsencode(file), make_text(rng, lines))
    (home / "cells.py").write_text(TEACHER)
    words = ["tools/relabel_imagenet.py", "--data", str(data), "--out", "out/maps.h5"]
    words += ["--teacher", "cells:Cells", "--input-size", "32", "--top-k", "1", "--dry-run"]
    return [*words, "--class-map", str(file), "--threads", "1", "--device", "cpu"]


def of_pack(rng: random.Random, home: Path) -> list[str]:
    data, labels, file = make_folder(rng, home), home / "labels", io.BytesIO()
    torch.save(EMPTY, file)
    for path in [*data.rglob("*")]:
        with contextlib.suppress(OSError, UnicodeError):
            if path.is_file():
                target = (labels / path.relative_to(data)).with_suffix(".pt")
                target.parent.mkdir(parents=True, exist_ok=True)
                plant(rng, os.fsencode(target), file.getvalue())
    for name in rng.sample(NAMES, 2):
        with contextlib.suppress(OSError):
            os.makedirs(os.fsencode(labels) + b"/" + name + b"/x.pt")
    words = ["tools/import_labels.py", "--labels", str(labels), "--data", str(data)]
    words += ["--out", "out/maps.h5", "--teacher", "t", "--input-size", "64", "--threads", "1"]
    words += ["--footprint", rng.choice(["squash", "center-crop"]), "--no-audit"]
    return [*words, *rng.choice([[], ["--missing", "label", "--problems", "out/problems.txt"]])]


def of_store(rng: random.Random, home: Path) -> list[str]:
    paths = rng.sample(PATHS, 4)
    names = tuple(rng.choice([["a", "b"], ["..", "/"], ["\x1b[2J", "[/b]"]]))
    maps = ScoreMaps(
        np.zeros((4, SIDE, SIDE, TOP_K), np.float16),
        np.tile(np.arange(TOP_K, dtype=np.uint16), (4, SIDE, SIDE, 1)),
        np.full((4, SIDE, SIDE), np.log(2), np.float16),
        np.tile(np.array([0, 0, 1, 1], np.float32), (4, 1)),
    )
    header = StoreHeader(
        side=SIDE,
        top_k=TOP_K,
        num_classes=2,
        absent="zero-logit",
        teacher=rng.choice(["t", "\x1b[2J[/b]"]),
        input_size=64,
        geometry="squash",
        fingerprint="0" * 64,
        class_names=names,
    )
    labels = np.array([0, 1, 0, 10**8 * rng.randrange(2)])
    # Longer paths are refused in any file.
    paths = [path.encode()[:4096].decode(errors="ignore") for path in paths]
    writer = ScoreMapWriter(home / "maps.h5", header, paths, labels)
    writer.write(np.arange(4), maps)
    writer.finish()
    writer.close()
    if rng.random() < 0.3:
        return ["tools/score_maps.py", "verify", str(home / "maps.h5")]
    out = rng.choice(["out/tree", "out/[/b]tree", "out/\x1b[2J"])
    return ["tools/export_labels.py", "--maps", str(home / "maps.h5"), "--out", out]


def of_training(rng: random.Random, home: Path) -> list[str]:
    data = make_folder(rng, home)
    words = ["train.py", "nfnet_micro_ce", "--loader", "folder", "--data", str(data)]
    words += ["--val", str(data), "--out", "out/run", "--batch", "2", "--size", "32", "--dry-run"]
    return [*words, "--on-bad-sample", rng.choice(["raise", "skip"]), "--threads", "1"]


OFTEN, SELDOM = (of_folder, of_list, of_class_map), (of_pack, of_store)
MAKERS = (*OFTEN * 4, *SELDOM * 3, of_classes, of_training)


def snapshot(home: Path) -> dict:
    """Return what lies outside `out`, with sizes and times."""
    found = {}
    for folder, folders, files in os.walk(home):
        if folder == str(home) and "out" in folders:
            folders.remove("out")
        for name in files:
            about = os.lstat(os.path.join(folder, name))
            found[os.path.join(folder, name)] = about.st_size, about.st_mtime_ns
        found[folder] = sorted(folders)
    return found | {"/": sorted(set(os.listdir("/")))}


def run_child(words: list[str], home: Path) -> None:
    """Become the command; never returns."""
    with open(home / "out" / ".printed", "wb") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    os.chdir(home)
    status = Path("/proc/self/statm").read_text().split()
    most = int(status[0]) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.alarm(TIMEOUT)
    sys.argv, sys.path[0] = [str(ROOT / words[0]), *words[1:]], str(home)
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def find_fault(rng: random.Random, home: Path) -> str:
    """Run a case; return what is wrong with its end, or an empty string."""
    (home / "out").mkdir()
    (home / "secret.jpg").write_bytes(IMAGES[0])
    words = rng.choice(MAKERS)(rng, home)
    before = snapshot(home)
    child = os.fork()
    if not child:
        run_child(words, home)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    printed = (home / "out" / ".printed").read_bytes()
    text, faults = printed.decode(errors="replace"), []
    if status not in (0, 2):
        faults.append(f"status {status}")
    if "Traceback" in text:
        faults.append("traceback")
    if status == 2 and "error: " not in text and "usage" not in text:
        faults.append("no sentence")
    if found := re.search(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text):
        faults.append(f"printed {found[0]!r}")
    after = snapshot(home)
    if changed := [path for path in before | after if before.get(path) != after.get(path)]:
        faults.append(f"changed {changed[:3]}")
    return f"{', '.join(faults)}: {words}\n{text[-1500:]}" if faults else ""


def main(cases: int, seed: int = 0) -> None:
    """Run the cases and print those that failed."""
    # Before the forks: OpenMP's threads do not survive them.
    torch.set_num_threads(1)
    for module in ("densefeed.train", "densefeed.tools.pack_dataset", "densefeed.tools.validate"):
        __import__(module)
    failed = 0
    for number in range(cases):
        with tempfile.TemporaryDirectory() as folder:
            rng = random.Random(f"{seed} {number}")
            if fault := find_fault(rng, Path(folder)):
                failed += 1
                print(f"case {number} of seed {seed}: {fault}", flush=True)
    print(f"{cases:,} cases, {failed:,} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
