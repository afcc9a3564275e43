"""Measure published label files imported per second, beside a plain torch.load loop over them.

    python -m benchmarks.import_labels --files 100000
    python -m benchmarks.import_labels --form legacy --footprint center-crop --json import.json

Both start from an ImageFolder of --files images and a tree of as many .pt files in TokenLabeling's
format: float16 [2, 5, 18, 18], 1,000 classes, or as many as there are images if these are fewer.
The files are generated in the folder for temporary files, 1.2 GB for 100,000, and are in the page
cache. `import` is all of tools/import_labels.py: list both folders, match them, read, check every
number, write the store and sync it. `torch.load` reads each listed file with weights_only=True and
discards it, in one process and thread, as a script would. Each round runs both in turns on
--threads cores; the ratio is the median of the ratios within a round.
"""

import io
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image

from benchmarks.harness import (
    Count,
    Output,
    Series,
    command,
    environment,
    report,
    take_turns,
    use_cores,
)
from densefeed.storage.geometry import Footprint
from densefeed.system.errors import UserError
from densefeed.system.progress import bar
from densefeed.tools import import_labels

OURS, PEER = "import", "torch.load"
CLASSES, SIDE, TOP_K = 1000, 18, 5
# Different maps, which the files repeat.
DISTINCT = 64
# Files per second on two cores: required and goal.
BAR, AIM = 1500, 5000


@dataclass(frozen=True, kw_only=True)
class ImportBenchmark(Output):
    """Options of this benchmark."""

    files: Count = 100_000  # images, and as many maps
    form: Literal["zip", "legacy"] = "zip"  # file format of torch.save
    footprint: Footprint = "squash"  # center-crop: every image's header is read too
    threads: Count = 2  # of the import, each on its own core
    rounds: Count = 5  # measured rounds, after one for warm-up


def main(benchmark: ImportBenchmark) -> dict:
    """Generate the files, measure, print and record; return the document that --json writes."""
    if benchmark.files < TOP_K:
        raise UserError(f"--files must be at least {TOP_K}, the classes that a cell names")
    facts = environment()
    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder), benchmark.files, benchmark.form)
        rates = measure(benchmark, Path(folder))
    data = f"{benchmark.files} files, {benchmark.form}, {benchmark.footprint}"
    print(f"required: {BAR:,} files/s, goal: {AIM:,}")
    return report(benchmark, rates, "files/s", [(OURS, PEER)], facts, data, benchmark.threads)


def make_files(folder: Path, count: int, form: str) -> None:
    """Write `images/train/<class>/<n>.JPEG` and `labels/<class>/<n>.pt`, cycling over classes."""
    # Maps must not name a class that has no image: the import would reject them.
    num_classes = min(CLASSES, count)
    rng = np.random.default_rng(0)
    jpeg, maps = io.BytesIO(), []
    # The import reads at most the header of an image, so a tiny one does.
    Image.new("RGB", (50, 37)).save(jpeg, "JPEG")
    # The classes of a cell are this far apart, or as far as keeps them distinct.
    step = min(7, num_classes // TOP_K) * np.arange(TOP_K)[:, None, None]
    for _ in range(DISTINCT):
        # In published files the classes of a cell descend by their logits.
        logit = -np.sort(-rng.normal(4, 3, (TOP_K, SIDE, SIDE)), axis=0)
        classes = (rng.integers(0, num_classes, (1, SIDE, SIDE)) + step) % num_classes
        encoded = io.BytesIO()
        tensor = torch.from_numpy(np.stack([logit, classes]).astype(np.float16))
        torch.save(tensor, encoded, _use_new_zipfile_serialization=form == "zip")
        maps.append(encoded.getvalue())
    images, labels = folder / "images" / "train", folder / "labels"
    for parent, number in product((images, labels), range(num_classes)):
        (parent / f"n{number:08d}").mkdir(parents=True)
    for number in bar(range(count), "make files"):
        name = f"n{number % num_classes:08d}/{number:07d}"
        (images / f"{name}.JPEG").write_bytes(jpeg.getvalue())
        (labels / f"{name}.pt").write_bytes(maps[number % DISTINCT])


def measure(benchmark: ImportBenchmark, folder: Path) -> Series:
    """Return files per second of each contestant, one value per round."""
    # The peer's files are listed outside the clock; the import lists both folders within it.
    out, paths = folder / "maps.h5", sorted((folder / "labels").rglob("*.pt"))
    options = import_labels.Import(
        labels=folder / "labels",
        data=folder / "images",
        out=out,
        footprint=benchmark.footprint,
        threads=benchmark.threads,
        # The audit is not part of importing: tools/audit.py does the same one alone.
        audit=False,
    )

    def run_ours(_: int) -> int:
        with redirect_stdout(io.StringIO()):
            import_labels.main(options)
        return benchmark.files

    def run_torch(_: int) -> int:
        for path in paths:
            torch.load(path, weights_only=True)
        return len(paths)

    with use_cores(benchmark.threads):
        works = {OURS: run_ours, PEER: run_torch}
        return take_turns(works, benchmark.rounds, done=lambda _: out.unlink(missing_ok=True))


if __name__ == "__main__":
    command(main, ImportBenchmark, __doc__)
