"""How fast published packs are imported: files a second of ours beside a plain loop of torch.load
over the same files.

    python -m benchmarks.import_labels --files 100000
    python -m benchmarks.import_labels --form legacy --footprint center-crop --json import.json

Both begin with an ImageFolder of --files images and a tree of as many .pt files, as
TokenLabeling's: float16 [2, 5, 18, 18], 1,000 classes, made for the purpose and in the page cache.
`import` is the whole of tools/import_labels.py: list both folders, match, read, check every number,
write the store, sync it. `torch.load` reads each file of the list with weights_only=True and does
nothing with it, in one process and thread, as a script would. Each round does both, in turns, on
--threads cores; the ratio is the median of the rounds' own.
"""

import io
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from PIL import Image

from benchmarks.harness import Spread, append_rows, cores, pairwise, pin, take_turns, unpinned_after
from densefeed.storage.geometry import Footprint
from densefeed.system.errors import UserError, run
from densefeed.system.progress import bar
from densefeed.system.provenance import RESULTS, environment, write_json
from densefeed.tools import import_labels

PACKAGES = ("torch", "numpy", "h5py", "pillow")
OURS, PEER = "import", "torch.load"
CLASSES, SIDE, TOP_K = 1000, 18, 5
DISTINCT = 64  # maps; the files repeat them
BAR, AIM = 1500, 5000  # files a second on two cores


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What to measure."""

    files: int = 100_000  # images, and as many maps
    form: Literal["zip", "legacy"] = "zip"  # of torch.save
    footprint: Footprint = "squash"  # center-crop: every image's header is read too
    threads: int = 2  # of ours, each on a core of its own
    rounds: int = 5  # after one to warm up
    work: Path | None = None  # folder for the files, 1.2 GB for 100,000; none: a temporary one
    json: Path | None = None  # write rows and ratio there
    record: bool = True  # append rows to --results
    results: Path = RESULTS  # CSV


def main(benchmark: Benchmark) -> dict:
    """Make the files, measure, print, record; the document that --json writes."""
    small = [name for name in ("files", "threads", "rounds") if getattr(benchmark, name) < 1]
    if small:
        raise UserError(f"--{small[0]} must be at least 1")
    if benchmark.work is not None and not benchmark.work.is_dir():
        raise UserError(f"--work {benchmark.work} is not a folder; make it first")
    facts = environment(PACKAGES)
    with tempfile.TemporaryDirectory(dir=benchmark.work) as folder:
        make_files(Path(folder), benchmark.files, benchmark.form)
        rates = measure(benchmark, Path(folder))
    ratio = pairwise(rates[OURS], rates[PEER])
    rows = [
        {"name": name, "unit": "files/s", **Spread.of(values)._asdict()}
        for name, values in rates.items()
    ]
    document = {
        "rows": rows,
        "ratios": [{"a": OURS, "b": PEER, "what": "files/s", **ratio._asdict()}],
        "environment": facts,
    }
    for row in rows:
        print(
            f"{row['name']:12} {row['median']:8,.0f} files/s ({row['p25']:,.0f} to {row['p75']:,.0f})"
        )
    print(
        f"{OURS} / {PEER}: {ratio.median:.2f} ({ratio.p25:.2f} to {ratio.p75:.2f}); bar {BAR:,} files/s, aim {AIM:,}"
    )
    if benchmark.json is not None:
        write_json(benchmark.json, document)
    if benchmark.record:
        what = f"{benchmark.files} files, {benchmark.form}, {benchmark.footprint}"
        lines = [*rows, {"name": f"{OURS} / {PEER}", "unit": "ratio", **ratio._asdict()}]
        common = facts | {"data": what, "threads": benchmark.threads, "runs": benchmark.rounds}
        append_rows(benchmark.results, [common | line for line in lines])
    return document


def make_files(folder: Path, count: int, form: str) -> None:
    """`images/train/<class>/<n>.JPEG` and `labels/<class>/<n>.pt`; classes take turns."""
    rng = np.random.default_rng(0)
    jpeg, maps = io.BytesIO(), []
    Image.new("RGB", (50, 37)).save(jpeg, "JPEG")
    for _ in range(DISTINCT):
        logit = -np.sort(-rng.normal(4, 3, (TOP_K, SIDE, SIDE)), axis=0)
        number = (
            rng.integers(0, CLASSES, (1, SIDE, SIDE)) + 7 * np.arange(TOP_K)[:, None, None]
        ) % CLASSES
        encoded = io.BytesIO()
        tensor = torch.from_numpy(np.stack([logit, number]).astype(np.float16))
        torch.save(tensor, encoded, _use_new_zipfile_serialization=form == "zip")
        maps.append(encoded.getvalue())
    for number in bar(range(count), "make files"):
        name = f"n{number % CLASSES:08d}/{number:07d}"
        for path, content in (
            (folder / "images" / "train" / f"{name}.JPEG", jpeg.getvalue()),
            (folder / "labels" / f"{name}.pt", maps[number % DISTINCT]),
        ):
            if number < CLASSES:
                path.parent.mkdir(parents=True)
            path.write_bytes(content)


def measure(benchmark: Benchmark, folder: Path) -> dict[str, list[float]]:
    """Files a second of each contestant, a value a round."""
    out, paths = folder / "maps.h5", sorted((folder / "labels").rglob("*.pt"))
    wanted = import_labels.Import(
        labels=folder / "labels",
        data=folder / "images",
        out=out,
        footprint=benchmark.footprint,
        threads=benchmark.threads,
        audit=False,
    )

    def by_ours(_: int) -> int:
        with redirect_stdout(io.StringIO()):
            import_labels.main(wanted)
        return benchmark.files

    def by_torch(_: int) -> int:
        for path in paths:
            torch.load(path, weights_only=True)
        return len(paths)

    works = {OURS: by_ours, PEER: by_torch}
    with unpinned_after() as allowed:
        chosen = cores(benchmark.threads, allowed)
        return take_turns(
            works, benchmark.rounds, lambda _: pin(chosen), lambda _: out.unlink(missing_ok=True)
        )


if __name__ == "__main__":
    run(lambda: main(tyro.cli(Benchmark, description=__doc__)))
