"""What reading one random score map costs: from our stores, and as the published tree keeps it, a
.pt file an image.

    python -m benchmarks.store
    python -m benchmarks.store --images 20000 --json bench/store.json

The published way is torch.load of float16 `[2, k, S, S]`, logits and class numbers, and a cast to
float32, with `weights_only=True` (`torch.load`) and without, as that code does (`torch.load,
unpickled`). `raw`, `lossless` and `compact` are what the loaders do: random rows, each read from
the file, checked against its CRC and expanded, in batches of --batch. `raw, memory map` is the row
alone: a copy out of a memory map, one at a time, no CRC looked at; `raw, one by one` a call of
`ScoreMapStore.rows` for every row. All read the same maps in random order on one core; everything
is in the page cache. The maps are made up: --palette classes an image, in patches.

A ratio is torch.load / ours, so large is good: the median of the rounds' own. Bytes an image are
the whole file's, path and label included. Rows are appended to --results.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch
import tyro

from benchmarks.harness import Spread, append_rows, cores, pairwise, pin, take_turns, unpinned_after
from densefeed.native import read_maps
from densefeed.pipelines.folder import store_rows
from densefeed.pipelines.loader import Memory
from densefeed.relabel.scoring import keep_top
from densefeed.storage.maintenance import convert
from densefeed.storage.row_codecs import ScoreMaps
from densefeed.storage.score_maps import ScoreMapStore, ScoreMapWriter, StoreHeader
from densefeed.system.errors import UserError, run
from densefeed.system.provenance import RESULTS, environment, write_json

PACKAGES = ("torch", "numpy", "h5py")
FORMS = ("raw", "lossless", "compact")
MAPPED, SINGLE, THEIRS, UNPICKLED = (
    "raw, memory map",
    "raw, one by one",
    "torch.load",
    "torch.load, unpickled",
)
OFTEN = 32
BAR, AIM = 100, 170  # times torch.load
MOST_BYTES, AIM_BYTES = 8069 / 2, 8069 / 2.8  # of a compact map; a published .pt file has 8,069


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What to measure."""

    images: int = 2000  # maps
    # random files of a round; of rows OFTEN as many, or the clock would see a few milliseconds only
    reads: int = 1000
    batch: int = 128  # rows that a loader reads at once
    side: int = 18  # S, cells along a side of a map
    top_k: int = 5  # k, classes a cell names
    classes: int = 1000  # K
    palette: int = 32  # classes that the map of an image names, more or less
    rounds: int = 15  # after one to warm up
    json: Path | None = None  # write rows and ratios there
    record: bool = True  # append rows to --results
    results: Path = RESULTS  # CSV


def main(benchmark: Benchmark) -> dict:
    """Measure, print, record; the document that --json writes."""
    small = [
        name
        for name in ("images", "reads", "batch", "side", "top_k", "rounds")
        if getattr(benchmark, name) < 1
    ]
    if small:
        raise UserError(f"--{small[0].replace('_', '-')} must be at least 1")
    if not benchmark.top_k <= benchmark.palette <= benchmark.classes <= 2048:
        raise UserError(
            "--palette must lie between --top-k and --classes, and --classes below 2,049, which float16 can count"
        )
    with tempfile.TemporaryDirectory() as folder:
        stores = make_stores(Path(folder), benchmark)
        rates = measure(Path(folder), stores, benchmark)
        sizes = {form: store.path.stat().st_size / len(store) for form, store in stores.items()}
        sizes[THEIRS] = float(
            np.mean([path.stat().st_size for path in Path(folder, "pt").iterdir()])
        )
        error, palette = stores["compact"].error, int(np.median(stores["raw"].palette))
    rows = [
        {"name": name, "unit": "rows/s", **Spread.of(values)._asdict()}
        for name, values in rates.items()
    ]
    ratios = [
        {"a": theirs, "b": ours, "what": "time", **pairwise(rates[ours], rates[theirs])._asdict()}
        for theirs in (THEIRS, UNPICKLED)
        for ours in (*FORMS, MAPPED, SINGLE)
    ]
    document = {
        "rows": rows,
        "ratios": ratios,
        "bytes": sizes,
        "error": error._asdict(),
        "environment": environment(PACKAGES),
    }
    shape = f"{benchmark.side} x {benchmark.side} cells"
    what = f"{benchmark.images} maps of {shape}, top {benchmark.top_k} of {benchmark.classes}, {palette} named"
    print(what)
    for row in rows:
        size = f", {sizes[row['name']]:,.0f} bytes an image" if row["name"] in sizes else ""
        print(f"{row['name']:22} {1e6 / row['median']:8.2f} us a row{size}")
    for ratio in ratios:
        print(
            f"{ratio['a']} / {ratio['b']}: {ratio['median']:.0f} ({ratio['p25']:.0f} to {ratio['p75']:.0f})"
        )
    print(
        f"bar of time {BAR}, aim {AIM}; of bytes {MOST_BYTES:,.0f}, aim {AIM_BYTES:,.0f}; compact: {error}"
    )
    if benchmark.json is not None:
        write_json(benchmark.json, document)
    if benchmark.record:
        facts = document["environment"] | {"data": what, "threads": 1}
        lines = [{**row, "name": f"store {row['name']}", "runs": benchmark.rounds} for row in rows]
        for ratio in ratios:
            spread = {name: ratio[name] for name in ("median", "p25", "p75")}
            lines.append(
                {
                    "name": f"store {ratio['a']} / {ratio['b']}",
                    "unit": "ratio",
                    "runs": benchmark.rounds,
                    **spread,
                }
            )
        for name, size in sizes.items():
            lines.append(
                {
                    "name": f"store {name}",
                    "unit": "bytes/image",
                    "runs": 1,
                    "median": size,
                    "p25": size,
                    "p75": size,
                }
            )
        append_rows(benchmark.results, [facts | line for line in lines])
    return document


def made_up(count: int, benchmark: Benchmark, seed: int) -> ScoreMaps:
    """Maps in which an image's likely classes take patches of neighboring cells, as a teacher's
    do.
    """
    rng = torch.Generator().manual_seed(seed)
    side, classes, palette = benchmark.side, benchmark.classes, benchmark.palette
    coarse = torch.randn(count, palette, 4, 4, generator=rng)
    patches = 3 * torch.nn.functional.interpolate(
        coarse, size=(side, side), mode="bicubic", align_corners=False
    )
    likely = patches + torch.linspace(8, 2, palette)[:, None, None]
    logits = torch.zeros(count, classes, side, side).sub_(4)
    named = torch.rand(count, classes, generator=rng).topk(palette).indices
    logits.scatter_(1, named[:, :, None, None].expand(-1, -1, side, side), likely)
    return keep_top(
        logits.permute(0, 2, 3, 1),
        benchmark.top_k,
        np.tile(np.array([[0, 0, 1, 1]], np.float32), (count, 1)),
    )


def make_stores(folder: Path, benchmark: Benchmark) -> dict[str, ScoreMapStore]:
    """The same maps in a store of every form, and as .pt files in `pt/`."""
    count = benchmark.images
    header = StoreHeader(
        side=benchmark.side,
        top_k=benchmark.top_k,
        num_classes=benchmark.classes,
        absent="tail",
        teacher="none",
        input_size=576,
        geometry="squash",
        fingerprint="none",
        class_names=tuple(map(str, range(benchmark.classes))),
    )
    # as long as ImageNet's
    paths = [f"n{n % 1000:08d}/n{n % 1000:08d}_{n}.JPEG" for n in range(count)]
    writer = ScoreMapWriter(folder / "raw.h5", header, paths, np.arange(count) % benchmark.classes)
    (folder / "pt").mkdir()
    for first in range(0, count, 64):
        ids = np.arange(first, min(first + 64, count))
        maps = made_up(len(ids), benchmark, first)
        writer.write(ids, maps)
        for n, logit, cls in zip(ids, maps.logit, maps.cls, strict=True):
            both = np.stack([logit, cls.astype(np.float16)]).transpose(0, 3, 1, 2)
            torch.save(torch.from_numpy(np.ascontiguousarray(both)), folder / "pt" / f"{n}.pt")
    writer.finish()
    raw = ScoreMapStore(folder / "raw.h5")
    return {"raw": raw} | {form: convert(raw, folder / f"{form}.h5", form) for form in FORMS[1:]}


def measure(
    folder: Path, stores: dict[str, ScoreMapStore], benchmark: Benchmark
) -> dict[str, list[float]]:
    """Rows a second of each contestant, a value a round."""
    memory = Memory()

    def order(number: int, often: int) -> np.ndarray:
        return np.random.default_rng(number).integers(0, benchmark.images, often * benchmark.reads)

    def by_loader(form: str, number: int) -> int:
        ids = order(number, OFTEN)
        for first in range(0, len(ids), benchmark.batch):
            assert not read_maps(
                store_rows(stores[form], ids[first : first + benchmark.batch], memory).parts
            ).any()
        return len(ids)

    with h5py.File(stores["raw"].path) as file:  # as anybody can who has read FORMAT.md
        parts = [
            (part.dtype, part.id.get_offset(), part.shape) for part in (file["logit"], file["cls"])
        ]
    mapped = [
        np.asarray(np.memmap(stores["raw"].path, dtype, "r", offset, shape))
        for dtype, offset, shape in parts
    ]

    def by_map(number: int) -> int:
        ids = order(number, OFTEN)
        for n in ids.tolist():
            for part in mapped:
                part[n].copy()
        return len(ids)

    def one_by_one(number: int) -> int:
        ids = order(number, 1)
        for at in range(len(ids)):
            stores["raw"].rows(ids[at : at + 1])
        return len(ids)

    def by_torch(weights_only: bool, number: int) -> int:
        ids = order(number, 1)
        for n in ids.tolist():
            torch.load(folder / "pt" / f"{n}.pt", weights_only=weights_only).float()
        return len(ids)

    works = {form: lambda number, form=form: by_loader(form, number) for form in FORMS}
    works |= {MAPPED: by_map, SINGLE: one_by_one}
    works |= {
        THEIRS: lambda number: by_torch(True, number),
        UNPICKLED: lambda number: by_torch(False, number),
    }
    with unpinned_after() as allowed:
        return take_turns(works, benchmark.rounds, lambda _: pin(cores(1, allowed)), lambda _: None)


if __name__ == "__main__":
    run(lambda: main(tyro.cli(Benchmark, description=__doc__)))
