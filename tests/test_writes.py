"""Every writer, with a fault at every call that changes a file: no wrong file, no failure hidden.

`make soak` injects every fault at every call (SOAK_FAULTS=all); the suite takes a sample.
"""

import errno
import json
import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from .faults import SHORT, Done, FaultServer, list_faults
from .test_resume import assert_whole, differences, records, state

EVERYTHING = os.environ.get("SOAK_FAULTS") == "all"
# Calls whose failure a command may leave unsaid: it removes a temporary file, which the next run
# removes too, or closes a descriptor that nothing was written through since the last fsync.
TIDYING = ("unlink", "unlinkat", "rmdir", "close")
KINDS = errno.errorcode | {SHORT: "SHORT"}
# Calls that change the bytes of a file, that give a file its name, and that remove one.
CHANGING = ("write", "pwrite", "writev", "ftruncate", "posix_fallocate")
NAMING, REMOVING = ("rename", "renameat", "link", "linkat"), ("unlink", "unlinkat")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run a command with a fault; see FaultServer."""
    with closing(FaultServer(tmp_path_factory.mktemp("faults"))) as server:
        yield server


@pytest.fixture(scope="module")
def run_store(tmp_path_factory):
    """As `run`, without the imports of the commands."""
    with closing(FaultServer(tmp_path_factory.mktemp("faults"), ["tests.stores"])) as server:
        yield server


@dataclass
class Writer:
    """A command that writes to a folder: its words, the files it makes, the files it begins with.

    `made` are files or folders; each is complete, old or absent. `same` compares two of them.
    `repeats` tells whether the same words after a failure end with the same files. Of calls with
    one name, on paths that differ only in numbers, `alike` are tried, from the first to the last.
    """

    words: tuple
    made: tuple[str, ...]
    begin: Callable[[Path], None] = lambda work: None
    same: Callable[[Path, Path], bool] | None = None
    repeats: bool = True
    alike: int = 10**9


def content(path: Path) -> object:
    """Return the bytes of a file, or of all files of a folder; None if there is none."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return {str(file.relative_to(path)): file.read_bytes() for file in files}
    return path.read_bytes() if path.exists() else None


def same_content(one: Path, other: Path) -> bool:
    return content(one) == content(other)


def same_run(one: Path, other: Path) -> bool:
    """Whether two run folders hold the same finished run, apart from times."""
    if not (one / "result.json").exists():
        return False
    top1 = [json.loads((out / "result.json").read_text())["top1"] for out in (one, other)]
    entries = [json.loads((out / "checkpoints/manifest.json").read_text()) for out in (one, other)]
    manifests = [[(entry["step"], entry["top1"]) for entry in listed] for listed in entries]
    return (
        top1[0] == top1[1]
        and manifests[0] == manifests[1]
        and records(one) == records(other)
        and differences(state(one), state(other)) == []
        and json.loads((one / "config.json").read_text())
        == json.loads((other / "config.json").read_text())
    )


def sound_run(out: Path) -> bool:
    """Whether everything that a stopped run left under a final name is complete."""
    assert_whole(out)
    for name in ("config", "environment", "result"):
        if (out / f"{name}.json").exists():
            json.loads((out / f"{name}.json").read_text())
    return True


def find_unsynced(calls: list[str]) -> list[str]:
    """Return what a power cut could tear: names of bytes that are not on disk, and lost names.

    A file is synced after its last write and before it gets a name, and its folder after that and
    before a file in it is removed, which may be the only other copy.
    """
    dirty, named, opened, wrong = set(), set(), {}, []
    for call in calls:
        kind, _, path = call.partition(" ")
        kind = kind.removesuffix("64")
        if kind in CHANGING:
            dirty.add(path)
        elif kind in ("fsync", "fdatasync"):
            dirty.discard(path)
            named = {name for name in named if os.path.dirname(name) != path}
        elif kind == "syncfs":
            dirty.clear()
        elif kind in NAMING:
            part, _, path = path.partition(" ")
            # A file that got its name by a link is still open by the first name, now deleted.
            files = part, opened.get(part)
            if any(file in files or file.startswith(f"{part}/") for file in dirty):
                wrong.append(f"{path} is not synced before it gets its name")
            opened[path] = f"{part} (deleted)"
            named.add(path)
        elif kind in REMOVING and os.path.dirname(path) in map(os.path.dirname, named):
            wrong.append(f"{path} is removed before the names in its folder are synced")
    return wrong + [f"the folder of {name} is not synced" for name in sorted(named)]


class Campaign:
    """Runs one writer undisturbed, then with each fault, and checks what it leaves."""

    def __init__(self, run: FaultServer, folder: Path, writer: Writer) -> None:
        self.run, self.writer = run, writer
        self.work, self.begun, self.whole = (folder / name for name in ("work", "begun", "whole"))
        self.begun.mkdir(parents=True)
        self.words = [str(word).replace("WORK", str(self.work)) for word in writer.words]
        writer.begin(self.begun)
        self._restore()
        done = run(*self.words, folder=self.work)
        assert done.code == 0, done.stderr
        self.calls = done.calls
        assert any(call.startswith(("write ", "pwrite ")) for call in self.calls), self.calls
        shutil.copytree(self.work, self.whole, symlinks=True)

    def _restore(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.begun, self.work, symlinks=True)

    def finished(self) -> bool:
        same = self.writer.same or same_content
        return all(
            (self.work / name).exists() and same(self.work / name, self.whole / name)
            for name in self.writer.made
        )

    def sound(self, name: str) -> bool:
        """Whether what has a final name is complete, or as it was before."""
        path = self.work / name
        if not path.exists() or same_content(path, self.begun / name):
            return True
        if self.writer.same:
            return sound_run(path)
        return same_content(path, self.whole / name)

    def leftovers(self) -> list[Path]:
        return list(self.work.rglob("*.part*"))

    def faults(self, sample: int) -> list[tuple[int, int]]:
        """List calls and their faults: all, or a sample with each fault of each kind of call.

        The sample has at least `sample` faults, drawn at random.
        """
        kinds = defaultdict(list)
        for at, call in enumerate(self.calls, 1):
            kinds[re.sub(r"\d+", "N", call)].append(at)
        most = self.writer.alike
        places = (np.linspace(0, len(ats) - 1, min(len(ats), most)) for ats in kinds.values())
        chosen = sorted(
            ats[int(at)] for ats, some in zip(kinds.values(), places, strict=True) for at in some
        )
        every = [(at, fault) for at in chosen for fault in list_faults(self.calls[at - 1])]
        if EVERYTHING:
            return every
        rng, picked, seen = np.random.default_rng(len(every)), [], set()
        for number in rng.permutation(len(every)).tolist():
            at, fault = every[number]
            kind = self.calls[at - 1].split()[0], fault
            if len(picked) < sample or kind not in seen:
                picked.append((at, fault))
            seen.add(kind)
        return picked

    def inject(self, at: int, fault: int) -> list[str]:
        """Run with a fault; return what is wrong with the result."""
        self._restore()
        done = self.run(*self.words, folder=self.work, at=at, fault=fault)
        call = done.calls[at - 1] if at <= len(done.calls) else "no call"
        wrong = []
        if done.code == 0:
            if not self.finished():
                wrong.append("wrong file after exit 0")
            harmless = fault in (SHORT, errno.EINTR) or call.split()[0] in TIDYING
            if not harmless and at <= len(done.calls):
                wrong.append("exit 0 after a failed write")
            if self.leftovers() and call.split()[0] not in TIDYING:
                wrong.append(f"left {self.leftovers()} after exit 0")
        else:
            wrong += self._check_failure(done, fault)
        return [f"{KINDS[fault]} at {at}, {call}: {what}" for what in wrong]

    def _check_failure(self, done: Done, fault: int) -> list[str]:
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        wrong = [
            f"{name} is wrong after exit {done.code}"
            for name in self.writer.made
            if not self.sound(name)
        ]
        if done.code != 2 or len(errors) != 1 or "Traceback" in done.stderr:
            wrong.append(f"exit {done.code}, {done.stderr[-600:]!r}")
        elif str(self.work) not in errors[0] or re.search(r"\.\d+\.part", errors[0]):
            wrong.append(f"does not name the file: {errors[0]}")
        # Once for each call is enough where all faults are injected.
        if wrong or not self.writer.repeats or (EVERYTHING and fault != errno.EIO):
            return wrong
        again = self.run(*self.words, folder=self.work)
        if again.code and self.finished() and "exists already" in again.stderr:
            for name in self.writer.made:
                path = self.work / name
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            again = self.run(*self.words, folder=self.work)
        if again.code:
            wrong.append(f"cannot be repeated: {again.stderr[-600:]!r}")
        elif not self.finished():
            wrong.append(f"wrong file after it was repeated: {again.stderr}")
        elif self.leftovers():
            wrong.append(f"left {self.leftovers()} after it was repeated")
        return wrong


# ------------------------------------------------------------------------- The writers


@pytest.fixture(scope="module")
def inputs(run, folder, maps, packed, tmp_path_factory):
    """Files that the writers read: a teacher, maps, labels, a run."""
    root = tmp_path_factory.mktemp("inputs")

    def make(*words: object) -> None:
        done = run(*words, folder=root / "no faults")
        assert done.code == 0, done.stderr

    small = "--epochs", 1, "--batch", 4, "--threads", 1, "--device", "cpu"
    given = "--loader", "folder", "--data", folder, "--val", folder
    make("train.py", "nfnet_micro_ce", *given, *small, "--out", root / "teacher")
    make("train.py", "lvvit_micro_ce", *given, *small, "--size", 32, "--out", root / "student")
    make("tools/export_labels.py", "--maps", maps, "--out", root / "labels")
    # A label that is missing.
    sorted((root / "labels").rglob("*.pt"))[0].unlink()
    make("tools/score_maps.py", "convert", maps, "--form", "lossless", "--out", root / "small.h5")
    for index in range(2):
        words = label(folder, root / "teacher", root / f"part-{index}")
        make(*words, "--shard-images", 4, "--shard", f"{index}/2")
    for number in range(5):
        pixels = np.full((9, 9, 3), 20 * number, np.uint8)
        path = root / "pixels" / "train" / ("a", "b")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    make(*label(folder, root / "teacher", root / "labeled.h5"))
    # A labeling whose second batch fails leaves the rows of the first.
    words = label(folder, root / "teacher", root / "half" / "maps.h5")
    calls = run(*words, folder=root / "half").calls
    (root / "half" / "maps.h5").unlink()
    last = max(number for number, call in enumerate(calls, 1) if call.startswith("pwrite"))
    done = run(*words, folder=root / "half", at=last - 6, fault=errno.ENOSPC)
    assert done.code == 2, done.stderr
    return root


def label(folder: Path, teacher: Path, out: object) -> tuple:
    """Return the words that label the small folder."""
    options = ("--input-size", 64, "--top-k", 2, "--batch", 4, "--threads", 1, "--device", "cpu")
    given = "--data", folder, "--teacher", teacher, "--out", out
    return "tools/relabel_imagenet.py", *given, *options


APPEND = """
from pathlib import Path
from benchmarks.harness import COLUMNS, append_rows
from densefeed.system.errors import run
run(lambda: append_rows(Path("WORK/results.csv"), [dict.fromkeys(COLUMNS, 1.0)] * 50))
"""


STORE = """
from pathlib import Path
import numpy as np
from densefeed.storage.images import Images
from densefeed.storage.row_codecs import ScoreMaps
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import run
from tests.stores import write_store

def main():
    store, images = ScoreMapStore("MAPS"), Images("FOLDER", split="train")
    write_store(Path("WORK/maps.h5"), images, store.rows(np.arange(len(store))), 2)
run(main)
"""


def writers(inputs: Path, folder: Path, maps: Path, packed: tuple[Path, Path]) -> dict[str, Writer]:
    """Return all writers by name."""
    labeled = label(folder, inputs / "teacher", "WORK/new/maps.h5")
    pack = "tools/pack_dataset.py", "--threads", 1, "--out", "WORK/new/train.beton", "--data"
    convert = "tools/score_maps.py", "convert"
    merge = "tools/score_maps.py", "merge", inputs / "part-0", inputs / "part-1"
    audit = "tools/audit.py", inputs / "labeled.h5", "--data", folder
    explain = "tools/explain.py", inputs / "student", "--images", folder, "--device", "cpu"
    labels = "--data", folder, "--labels", inputs / "labels", "--teacher", "t", "--input-size", 96
    labels += "--footprint", "center-crop", "--missing", "label", "--threads", 1, "--no-audit"
    labels += "--problems", "WORK/problems.txt"

    def half_labeled(work: Path) -> None:
        shutil.copytree(inputs / "half" / "maps.h5.shards", work / "maps.h5.shards")

    def old_results(work: Path) -> None:
        (work / "results.csv").write_text("")

    data, val = packed
    train = "train.py", "lvvit_micro_token_label", "--loader", "ffcv", "--data", data, "--val", val
    train += "--epochs", 2, "--batch", 4, "--size", 32, "--log-every", 1, "--save-every", 2
    train += "--device", "cpu", "--threads", 1, "--resume", "auto", "--keep", 1
    store = STORE.replace("MAPS", str(maps)).replace("FOLDER", str(folder))
    return {
        "store": Writer(("-c", store), ("maps.h5",)),
        "resume labeling": Writer(
            label(folder, inputs / "teacher", "WORK/maps.h5"), ("maps.h5",), half_labeled
        ),
        "label": Writer(labeled, ("new/maps.h5",)),
        "label, lossless": Writer((*labeled, "--form", "lossless"), ("new/maps.h5",)),
        # A single shard: workers begin at a random one.
        "label as a worker": Writer(
            label(folder, inputs / "teacher", "WORK/new/maps"),
            ("new/maps/manifest.json", "new/maps/plan.json"),
        ),
        "merge": Writer((*merge, "--out", "WORK/maps.h5"), ("maps.h5",)),
        "merge into a folder": Writer((*merge, "--out", "WORK/maps"), ("maps/manifest.json",)),
        "convert to lossless": Writer(
            (*convert, maps, "--form", "lossless", "--out", "WORK/new/x.h5"), ("new/x.h5",)
        ),
        "convert to compact": Writer(
            (*convert, maps, "--form", "compact", "--out", "WORK/new/x.h5"), ("new/x.h5",)
        ),
        "convert to raw": Writer(
            (*convert, inputs / "small.h5", "--form", "raw", "--out", "WORK/x.h5"), ("x.h5",)
        ),
        "select": Writer(
            ("tools/score_maps.py", "select", maps, "--data", folder, "--out", "WORK/x.h5"),
            ("x.h5",),
        ),
        "pack": Writer((*pack, folder, "--maps", maps), ("new/train.beton",)),
        "pack pixels": Writer((*pack, inputs / "pixels"), ("new/train.beton",)),
        "import labels": Writer(
            ("tools/import_labels.py", *labels, "--out", "WORK/x.h5"), ("x.h5", "problems.txt")
        ),
        "export labels": Writer(
            ("tools/export_labels.py", "--maps", maps, "--out", "WORK/new/labels"), ("new/labels",)
        ),
        "export": Writer(
            ("tools/export.py", inputs / "teacher", "--out", "WORK/exported"),
            ("exported/model.safetensors", "exported/config.json"),
        ),
        "export ONNX": Writer(
            ("tools/export.py", inputs / "teacher", "--format", "onnx", "--out", "WORK/exported"),
            ("exported/model.onnx",),
        ),
        # torch.save writes a checkpoint in 144 calls.
        "train": Writer((*train, "--out", "WORK/new/run"), ("new/run",), same=same_run, alike=3),
        "report": Writer(
            ("tools/report.py", inputs / "teacher", "--out", "WORK/new/report.html"),
            ("new/report.html",),
        ),
        "explain": Writer(
            (*explain, "--out", "WORK/page.html", "--arrays", "WORK/new/a", "--count", 2),
            ("page.html", "new/a"),
        ),
        "audit": Writer((*audit, "--out", "WORK/audit.html"), ("audit.html", "audit.json")),
        "digit scenes": Writer(
            ("tools/make_digit_scenes.py", "--train", 10, "--val", 10, "--out", "WORK/new/scenes"),
            ("new/scenes",),
        ),
        # Rows whose name could not be synced are in the file, and appended again.
        "results.csv": Writer(("-c", APPEND), ("results.csv",), old_results, repeats=False),
    }


# Faults in the suite; commands that need PyTorch's networks take too long for it.
QUICK = {"store": 3}
SLOW = (
    *("label", "label, lossless", "resume labeling", "merge", "merge into a folder"),
    *("label as a worker", "pack", "convert to lossless", "convert to compact", "convert to raw"),
    *("select", "pack pixels", "import labels", "export labels"),
    *("export", "train", "report", "audit", "explain", "digit scenes", "results.csv"),
    # Its packages take 3 s to import in each of some 100 runs.
    *(["export ONNX"] if EVERYTHING else []),
)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_no_fault_leaves_a_wrong_file_or_is_hidden(
    name, request, folder, maps, packed, tmp_path, capsys
):
    """After exit 0 the files are those of an undisturbed run; else one sentence names them.

    In the undisturbed run every file is on disk before it gets its name.
    """
    inputs = tmp_path if name in QUICK else request.getfixturevalue("inputs")
    run = request.getfixturevalue("run_store" if name in QUICK else "run")
    campaign = Campaign(run, tmp_path, writers(inputs, folder, maps, packed)[name])
    faults = campaign.faults(QUICK.get(name, 10))
    wrong = find_unsynced(campaign.calls)
    wrong += [line for at, fault in faults for line in campaign.inject(at, fault)]
    kinds = dict(Counter(KINDS[fault] for _, fault in faults))
    if EVERYTHING:
        with capsys.disabled():
            print(f"\n{name}: {len(campaign.calls)} calls, {kinds}, {len(wrong)} wrong")
    assert wrong == []
