"""Measure dense labels beside a torchvision pipeline: what Views and targets add to its time.

    python -m benchmarks.any_loop
    python -m benchmarks.any_loop --images 256 --classes 256 --rounds 3 --json bench/any_loop.json

All on one core, with batches of the same photographs:

- `pipeline`: Pillow decodes, torchvision's v2 crops to 224 px, flips, scales and normalizes, and
  the images are collated: what a worker of a DataLoader does.
- `pipeline with Views`: the same with a View beside each image.
- `targets`: `open_score_maps(...).targets` of one batch of Views, class token and 14 x 14 tokens,
  from a raw store in the page cache.
- `rows`: random rows of the store, read and checked, in batches: what `targets` does first.

A ratio is the time that Views or targets add / the time of the pipeline without them, so smaller is
better: the median of the ratios within a round. Rows are appended to --results.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import default_collate
from torchvision.transforms import v2

from benchmarks.harness import (
    Count,
    Output,
    command,
    environment,
    report,
    spread_rows,
    take_turns,
    use_cores,
)
from benchmarks.photographs import LONG, SHORT, sample_beton
from densefeed import View, open_score_maps
from densefeed.pipelines.batch import ScoreMapSpec
from densefeed.pipelines.folder import locate_rows, map_spec, read_parts
from densefeed.storage.score_maps import ScoreMapStore

# Class token and tokens.
GRIDS = [1, 14]
# Of `targets` and `rows` in a round; the pipeline loads one.
BATCHES = 8
# Most that targets may add, relative to the pipeline.
BAR = "at most 0.05"
ROWS_BAR = "20,000"


@dataclass(frozen=True, kw_only=True)
class LoopBenchmark(Output):
    """Options of this benchmark."""

    images: Count = 1000  # photographs to generate
    classes: Count = 1000  # K, number of classes
    batch: Count = 128  # images of a batch
    rounds: Count = 15  # measured rounds, after one for warm-up
    cache: Path = Path("bench")  # folder of the generated photographs


def make_transform() -> v2.Transform:
    """Return the usual pipeline of ImageNet trainings."""
    return v2.Compose(
        [
            v2.RandomResizedCrop(224, scale=(0.08, 1), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )


def main(benchmark: LoopBenchmark) -> dict:
    """Measure, print and record; return the document that --json writes."""
    folder, maps, _ = sample_beton(benchmark.cache, benchmark.images, benchmark.classes)
    store = ScoreMapStore(maps)
    names, spec = store.paths(), map_spec(store)
    with use_cores(1):
        rates = take_turns(make_works(folder, store, spec, benchmark), benchmark.rounds)
    # Seconds per image of each round.
    time = {name: 1 / np.array(of) for name, of in rates.items()}
    added = {
        "Views, added / pipeline": time["pipeline with Views"] / time["pipeline"] - 1,
        "targets / pipeline": time["targets"] / time["pipeline"],
    }
    ratios = spread_rows(added, "ratio")
    ratios[1]["bar"] = BAR
    rows = spread_rows(rates, "images/s")
    rows[-1] |= {"unit": "rows/s", "bar": ROWS_BAR}
    data = (
        f"{len(names)} photographs of 500 px, maps of {spec.side} x {spec.side} cells, top "
        f"{spec.top_k} of {spec.num_classes}, at most {spec.max_palette} named"
    )
    return report(benchmark, rows, ratios, data, environment() | {"threads": 1}, "any loop ")


def make_works(
    folder: Path, store: ScoreMapStore, spec: ScoreMapSpec, benchmark: LoopBenchmark
) -> dict[str, Callable[[int], int]]:
    """Return what is measured: each takes the number of a round and returns how many images."""
    names, transform, labels = store.paths(), make_transform(), open_score_maps(store.path)

    def load(with_views: bool, number: int) -> int:
        # The round is the seed, so both pipelines load the same crops.
        torch.manual_seed(number)
        samples = []
        for row in torch.randint(len(names), (benchmark.batch,)).tolist():
            image = Image.open(folder / names[row]).convert("RGB")
            samples.append(transform(image, *([View.identity(image)] * with_views)))
        default_collate(samples)
        return len(samples)

    torch.manual_seed(0)
    count = benchmark.batch * BATCHES
    ids = torch.randint(len(names), (count,)).split(benchmark.batch)
    blank = Image.new("RGB", (LONG, SHORT))
    crops = [transform(blank, View.identity(blank))[1].plain for _ in range(count)]
    views = torch.stack(crops).split(benchmark.batch)

    def make_targets(number: int) -> int:
        for part, view in zip(ids, views, strict=True):
            labels.targets(part, view, GRIDS)
        return count

    def read_rows(number: int) -> int:
        for part in ids:
            _, failed = read_parts(locate_rows(store, part.numpy()), spec)
            assert not failed.any()
        return count

    return {
        "pipeline": partial(load, False),
        "pipeline with Views": partial(load, True),
        "targets": make_targets,
        "rows": read_rows,
    }


if __name__ == "__main__":
    command(main, LoopBenchmark, __doc__)
