"""Measure how many token labels are correct on photo scenes, by how they are made.

    densefeed label --data photos/scenes --teacher densefeed.models.efficientnet_lite:lite2 \
        --input-size 320 --class-map photos/scenes/class_map.csv --top-k 50 --out maps50.h5
    python -m benchmarks.label_truth --scenes photos/scenes --maps maps50.h5

Crops are those of training, 15 to 100 % of a scene, half of them mirrored. Compared are geometry
(exact and published), one label for a token or for a crop, the classes kept of a cell, a compact
store, and the teacher run on the crop itself. Intervals are over scenes.
Of maps by `--unmapped keep` it prints the weight of the tokens too.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from rich.table import Table

from benchmarks.online_teacher import label_crops
from densefeed import open_loader
from densefeed.pages.label_truth import PARTS, PUBLISHED, find_owners_in_mask, measure_labels
from densefeed.pages.tokens import label_tokens
from densefeed.pages.true_objects import Truth, read_mask, read_objects
from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.targets import PLAIN, TargetRules, sparse_targets
from densefeed.relabel.class_map import read_class_map
from densefeed.relabel.load_teacher import load_network
from densefeed.relabel.network import Network
from densefeed.storage.images import Images
from densefeed.storage.row_codecs import ScoreMaps, code_levels, pack, unpack
from densefeed.storage.scenes import BOXES
from densefeed.system.errors import make_command
from densefeed.system.options import Count, Options
from densefeed.system.progress import bar
from densefeed.system.provenance import write_json
from densefeed.system.terminal import print, print_table

# Tokens along a crop's side, as of a student at 64 px.
GRID = 8


@dataclass(frozen=True, kw_only=True)
class LabelTruth(Options):
    """The scenes and their maps."""

    scenes: Path  # folder of densefeed photo-scenes
    maps: Path  # maps of its training scenes, with as many classes a cell as are to be compared
    teacher: str = "densefeed.models.efficientnet_lite:lite2"
    input_size: Count = 320  # side of the teacher's input for a crop, pixels
    top_k: tuple[int, ...] = (1, 5, 10, 50)  # classes a cell to compare
    crops: Count = 3600  # crops to label
    seed: int = 0  # seed of the crops
    json: Path | None = None  # write the result to this JSON file


def main(options: LabelTruth) -> None:
    """Measure, print the table and write the JSON file."""
    images = Images(options.scenes)
    truths = list(read_objects(options.scenes / BOXES, images, "train"))
    loader = open_loader(
        options.scenes,
        batch=24,
        size=options.input_size,
        seed=options.seed,
        score_maps=options.maps,
        loader="folder",
        crop_scale=(0.15, 1.0),
        hflip=0.5,
    )
    spec = loader.score_maps
    network = load_network(options.teacher, "", options.input_size)
    names = [*images.class_names]
    class_map = read_class_map(
        options.scenes / "class_map.csv", network.class_names, network.model.num_classes, names
    )
    teacher = Network(network.model, options.input_size, network.config, class_map, "").eval()
    kinds = {"image": lambda batch: batch.label.numpy()[:, None]}
    for k in options.top_k:
        if k <= spec.top_k:
            kinds[f"token, top {k}"] = read_top(spec, k, GRID, PLAIN)
            kinds[f"crop, top {k}"] = read_top(spec, k, 1, PLAIN)
            kinds[f"token, top {k}, published"] = read_top(spec, k, GRID, PUBLISHED)
    kinds["token, compact, top 5"] = read_compact(spec, 5)

    @torch.no_grad()
    def ask(batch: Batch) -> np.ndarray:
        labeled, own = label_crops(teacher, batch.image.permute(0, 3, 1, 2).float(), batch)
        return label_tokens(labeled, own, GRID)[0]

    kinds["token, teacher on the crop"] = ask
    found = measure_labels(draw(loader, options.crops), truths, GRID, kinds)
    if spec.absent == "background":
        found["weight"] = measure_weights(draw(loader, options.crops), truths, spec)
    if options.json:
        write_json(options.json, found)
    table = Table("label", title=f"Correct labels, {found['scenes']} scenes", title_justify="left")
    parts = [part for part in PARTS if part in found["tokens"]]
    for part in parts:
        table.add_column(part, justify="right")
    table.add_row("tokens", *(f"{found['tokens'][part]:,}" for part in parts))
    for kind in kinds:
        shares = (
            f"{100 * found[kind][part]:.1f} ± {100 * found['intervals'][kind][part]:.1f}"
            for part in parts
        )
        table.add_row(kind, *shares)
    # A table that is as wide as a terminal would lose the ends of its numbers.
    print_table(table, least_width=150)
    if "weight" in found:
        weights = (f"{name} {weight:.3f}" for name, weight in found["weight"].items())
        print(f"mean weight of tokens: {', '.join(weights)}")


def draw(loader: ThreadedLoader, crops: int) -> Iterator[Batch]:
    """Yield batches of the crops of as many epochs as it takes."""
    batches = -(-crops // loader.plan.batch)
    epochs = (batch for epoch in range(1000) for batch in loader.batches(epoch))
    yield from bar(islice(epochs, batches), "label, batches", batches)


def measure_weights(
    batches: Iterable[Batch], truths: Sequence[Truth], spec: ScoreMapSpec
) -> dict[str, float]:
    """Return the mean weight of tokens on one object, by whether their label is right, and of those
    on the background.
    """
    sums, counts = {}, {}
    for batch in batches:
        weight_NT = sparse_targets(batch, spec, GRID).weight.numpy()
        label_NT, _ = label_tokens(batch, spec, GRID)
        for n in np.nonzero(batch.weight.numpy())[0]:
            truth, view = truths[int(batch.index[n])], batch.view[n].numpy()
            mask_HW = read_mask(truth)
            owner_T = find_owners_in_mask(mask_HW, view, GRID)
            right_T = truth.classes[owner_T] == label_NT[n]
            empty_T = find_owners_in_mask((mask_HW == 0).astype(np.uint8), view, GRID) == 0
            parts = {
                "right label": (owner_T >= 0) & right_T,
                "wrong label": (owner_T >= 0) & ~right_T,
                "background": empty_T,
            }
            for name, part_T in parts.items():
                sums[name] = sums.get(name, 0.0) + float(weight_NT[n][part_T].sum())
                counts[name] = counts.get(name, 0) + int(part_T.sum())
    return {name: sums[name] / max(counts[name], 1) for name in sums}


def take(batch: Batch, spec: ScoreMapSpec, k: int) -> tuple[Batch, ScoreMapSpec]:
    """Return a batch with the first k classes of each cell, and how to read it."""
    maps = (field[..., :k].contiguous() for field in (batch.map_logit, batch.map_class))
    logit, classes = maps
    return batch._replace(map_logit=logit, map_class=classes), spec._replace(top_k=k)


def read_top(
    spec: ScoreMapSpec, k: int, grid: int, rules: TargetRules
) -> Callable[[Batch], np.ndarray]:
    """Return what labels a batch by the first k classes of each cell."""
    return lambda batch: label_tokens(*take(batch, spec, k), grid, rules)[0]


def read_compact(spec: ScoreMapSpec, k: int) -> Callable[[Batch], np.ndarray]:
    """Return what labels a batch by maps that a compact store has kept."""

    def label(batch: Batch) -> np.ndarray:
        few, own = take(batch, spec, k)
        fields = few.map_logit, few.map_class, few.map_lse, few.window
        maps = ScoreMaps(*(field.numpy() for field in fields))
        rows = [np.frombuffer(row, np.uint8) for row in pack("compact", spec.absent, maps)]
        sizes = np.array([len(np.unique(row)) for row in maps.cls])
        decoded = unpack("compact", own.side, k, code_levels(spec.absent), sizes, rows)
        logit, cls, lse = map(torch.from_numpy, decoded)
        few = few._replace(map_logit=logit, map_class=cls, map_lse=lse)
        return label_tokens(few, own, GRID)[0]

    return label


command = make_command(main, LabelTruth, __doc__)


if __name__ == "__main__":
    command()
