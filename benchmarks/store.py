"""Measure random reads of one score map: our stores, and TokenLabeling's one .pt file per image.

    python -m benchmarks.store
    python -m benchmarks.store --images 20000 --json bench/store.json

The published way is torch.load of float16 `[2, k, S, S]`, logits and class ids, and a cast to
float32: with `weights_only=True` (`torch.load`), and without it as in that code (`torch.load,
unpickled`). `raw`, `lossless` and `compact` do what the loaders do: random rows, each read from the
file, checked against its CRC and expanded, in batches of --batch. All read the same maps in random
order on one core, from the page cache. The maps are synthetic: --palette classes per image, in
patches.

A ratio is torch.load's time / ours, so larger is better: the median of the ratios within a round.
Bytes per image are those of the whole file, path and label included. Rows are appended to
--results.
"""

import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import (
    Count,
    Output,
    Series,
    command,
    compare,
    environment,
    report,
    spread_rows,
    take_turns,
    use_cores,
)
from densefeed.native import read_maps
from densefeed.pipelines.batch import allocate_maps
from densefeed.pipelines.folder import locate_rows
from densefeed.pipelines.loader import Memory
from densefeed.relabel.scoring import keep, to_maps
from densefeed.storage.geometry import WHOLE
from densefeed.storage.maintenance import convert
from densefeed.storage.packs import to_published
from densefeed.storage.row_codecs import ScoreMaps
from densefeed.storage.score_maps import ScoreMapStore, ScoreMapWriter, StoreHeader
from densefeed.system.errors import UserError

FORMS = ("raw", "lossless", "compact")
# Name: weights_only, the default since PyTorch 2.6; the published code is older.
PEERS = {"torch.load": True, "torch.load, unpickled": False}
PEER = "torch.load"
# Our rows per file that torch.load reads in a round: as few of ours would take only milliseconds.
ROWS_PER_FILE = 32
# Times the speed of torch.load.
BAR = "100, goal 170"
# Largest bytes of a compact map, and the goal: a published .pt file has 8,069.
MOST_BYTES, AIM_BYTES = 8069 / 2, 8069 / 2.8


@dataclass(frozen=True, kw_only=True)
class StoreBenchmark(Output):
    """Options of this benchmark."""

    images: Count = 2000  # number of maps
    # .pt files that torch.load reads per round; from our stores 32 times as many rows are read
    reads: Count = 1000
    batch: Count = 128  # rows that a loader reads at once
    side: Count = 18  # S, cells along a side of a map
    top_k: Count = 5  # k, classes stored per cell
    classes: Count = 1000  # K, number of classes
    palette: Count = 32  # distinct classes in an image's map, approximately
    rounds: Count = 15  # measured rounds, after one for warm-up


def main(benchmark: StoreBenchmark) -> dict:
    """Measure, print and record; return the document that --json writes."""
    if not benchmark.top_k <= benchmark.palette <= benchmark.classes <= 2048:
        raise UserError(
            "--palette must lie between --top-k and --classes, and --classes below 2,049, "
            "the integers that float16 holds exactly"
        )
    with tempfile.TemporaryDirectory() as folder:
        stores = make_stores(Path(folder), benchmark)
        rates = measure(Path(folder), stores, benchmark)
        sizes = {form: store.path.stat().st_size / len(store) for form, store in stores.items()}
        files = [path.stat().st_size for path in Path(folder, "pt").iterdir()]
        sizes[PEER] = float(np.mean(files))
        error, palette = stores["compact"].error, int(np.median(stores["raw"].palette))
    data = (
        f"{benchmark.images} maps of {benchmark.side} x {benchmark.side} cells, "
        f"top {benchmark.top_k} of {benchmark.classes}, {palette} named"
    )
    rows = spread_rows(rates, "rows/s")
    rows += spread_rows({name: [size] for name, size in sizes.items()}, "bytes/image")
    # Times are the inverse of rates.
    ratios = [
        compare(peer, ours, rates[ours], rates[peer], bar=BAR) for peer in PEERS for ours in FORMS
    ]
    facts, found = environment() | {"threads": 1}, error._asdict()
    document = report(benchmark, rows, ratios, data, facts, "store ", error=found)
    print(f"compact: {error}; its bytes/image: required {MOST_BYTES:,.0f}, goal {AIM_BYTES:,.0f}")
    return document


def make_maps(count: int, benchmark: StoreBenchmark, seed: int) -> ScoreMaps:
    """Draw `count` maps whose likely classes form patches of neighboring cells, as a teacher's."""
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
    windows = np.tile(np.array([WHOLE], np.float32), (count, 1))
    return to_maps(keep(logits.permute(0, 2, 3, 1), benchmark.top_k), windows)


def make_header(benchmark: StoreBenchmark) -> StoreHeader:
    """Return the metadata of the stores."""
    return StoreHeader(
        side=benchmark.side,
        top_k=benchmark.top_k,
        num_classes=benchmark.classes,
        # The mass of the classes outside the top k is known from the stored logsumexp.
        absent="tail",
        teacher="none",
        input_size=576,
        geometry="squash",
        fingerprint="none",
        class_names=tuple(map(str, range(benchmark.classes))),
    )


def make_stores(folder: Path, benchmark: StoreBenchmark) -> dict[str, ScoreMapStore]:
    """Write the same maps to a store of every form, and as .pt files to `pt/`."""
    count, header = benchmark.images, make_header(benchmark)
    # As long as ImageNet's paths.
    paths = [f"n{n % 1000:08d}/n{n % 1000:08d}_{n}.JPEG" for n in range(count)]
    writer = ScoreMapWriter(folder / "raw.h5", header, paths, np.arange(count) % benchmark.classes)
    (folder / "pt").mkdir()
    # In parts: the dense logits of 2,000 maps of 1,000 classes would take 2.6 GB.
    for first in range(0, count, 64):
        ids = np.arange(first, min(first + 64, count))
        maps = make_maps(len(ids), benchmark, first)
        writer.write(ids, maps)
        for n, map_2kSS in zip(ids, torch.from_numpy(to_published(maps)), strict=True):
            # Without clone() the slice would be saved with the storage of all.
            torch.save(map_2kSS.clone(), folder / "pt" / f"{n}.pt")
    writer.finish()
    raw = ScoreMapStore(folder / "raw.h5")
    return {"raw": raw} | {form: convert(raw, folder / f"{form}.h5", form) for form in FORMS[1:]}


def measure(folder: Path, stores: dict[str, ScoreMapStore], benchmark: StoreBenchmark) -> Series:
    """Return rows per second of each contestant, one value per round."""
    memory, batch = Memory(), benchmark.batch

    def draw_ids(number: int, per_file: int) -> np.ndarray:
        # The round is the seed, so that all contestants of a round draw the same rows.
        count = per_file * benchmark.reads
        return np.random.default_rng(number).integers(0, benchmark.images, count)

    def read_batches(form: str, number: int) -> int:
        ids = draw_ids(number, ROWS_PER_FILE)
        for first in range(0, len(ids), batch):
            part, store = ids[first : first + batch], stores[form]
            fields = allocate_maps(len(part), store.header, memory.empty)
            parts = replace(locate_rows(store, part), to=[field.numpy() for field in fields])
            # A status other than 0 is a read that failed or a row that does not match its CRC.
            assert not read_maps(parts).any()
        return len(ids)

    def load_files(weights_only: bool, number: int) -> int:
        ids = draw_ids(number, 1)
        for n in ids.tolist():
            torch.load(folder / "pt" / f"{n}.pt", weights_only=weights_only).float()
        return len(ids)

    works = {form: partial(read_batches, form) for form in FORMS}
    works |= {peer: partial(load_files, weights_only) for peer, weights_only in PEERS.items()}
    with use_cores(1):
        return take_turns(works, benchmark.rounds)


if __name__ == "__main__":
    command(main, StoreBenchmark, __doc__)
