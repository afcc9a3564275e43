"""How fast images are labeled: our pass beside a stand-in for the published generator, with the
same teacher on the same cores.

    python -m benchmarks.relabel
    python -m benchmarks.relabel --teacher resnet10t --input-size 224 --rounds 5

The generator of TokenLabeling's maps reads an ImageFolder through timm's evaluation transform
(shorter side resized by Pillow, center square) and PyTorch's DataLoader, runs the teacher in fp32
in batches, takes the top k logits of every cell, opens each image file again to learn its name, and
saves float16 [2, k, S, S] by torch.save, a file an image, in the order batches come. `stand-in`
does this with --threads worker processes. `pass` is what tools/relabel_imagenet.py does once it has
begun: decode natively, score, write one store, sync it; --compile and --precision are its own, the
stand-in knows none. Neither lists the folder, loads or compiles within the clock. Both show the
teacher the center square at --input-size. Teachers have random weights, which take as long;
`teacher` scores a batch again and again, what no pass can exceed. Each round does all three in
turns on --threads cores; the ratio is the median of the rounds' own. The images, in the page cache,
are crops of real photographs (photographs.py): 500 pixels on the longer side, 33 kB.
"""

import io
import shutil
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import timm
import torch
import tyro
from timm.data import ImageDataset, create_transform

from benchmarks.harness import Spread, append_rows, cores, pairwise, pin, take_turns, unpinned_after
from benchmarks.photographs import write_crops
from densefeed.models import nfnet  # noqa: F401  (registers)
from densefeed.relabel.labeling import begin_pass, finish_pass
from densefeed.relabel.rendering import NativeRender
from densefeed.relabel.teacher import Teacher
from densefeed.storage.images import Images
from densefeed.system.errors import UserError, run
from densefeed.system.provenance import RESULTS, environment, write_json

PACKAGES = ("torch", "torchvision", "timm", "numpy", "pillow")
OURS, PEER, FLOOR = "pass", "stand-in", "teacher"
BAR, AIM = 2.0, 4.0
# the published teacher's
CONFIG = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "interpolation": "bicubic"}


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What to measure."""

    images: int = 1024  # parts of photographs, 500 pixels on the longer side
    classes: int = 1000  # of the teacher, and of the folder
    teacher: str = "nfnet_micro"  # a cheap one, so that what surrounds it is measured
    input_size: int = 112  # pixels
    top_k: int = 5  # classes kept of a cell
    batch: int = 32  # as the published command
    threads: int = 2  # decoding threads of ours, worker processes of the stand-in, and cores
    compile: bool = False  # our teacher
    precision: Literal["fp32", "bf16"] = "fp32"  # of ours
    rounds: int = 5  # after one to warm up
    work: Path | None = None  # folder for the files; none: a temporary one
    json: Path | None = None  # write rows and ratios there
    record: bool = True  # append rows to --results
    results: Path = RESULTS  # CSV


def main(benchmark: Benchmark) -> dict:
    """Make the images, measure, print, record; the document that --json writes."""
    small = [
        name
        for name in ("images", "classes", "top_k", "batch", "threads", "rounds")
        if getattr(benchmark, name) < 1
    ]
    if small:
        raise UserError(f"--{small[0].replace('_', '-')} must be at least 1")
    if benchmark.images < benchmark.classes:
        raise UserError(
            f"--images {benchmark.images} are fewer than --classes {benchmark.classes}, of which each has a folder"
        )
    if not timm.is_model(benchmark.teacher):
        raise UserError(
            f"--teacher {benchmark.teacher} is not a timm model; timm.list_models() lists them"
        )
    facts = environment(PACKAGES)
    with tempfile.TemporaryDirectory(dir=benchmark.work) as folder:
        Path(folder, "images").mkdir()
        write_crops(Path(folder, "images"), benchmark.images, benchmark.classes)
        bytes_each = (
            sum(path.stat().st_size for path in Path(folder, "images").rglob("*.jpg"))
            / benchmark.images
        )
        rates = measure(Path(folder), benchmark)
    rows = [
        {"name": name, "unit": "images/s", **Spread.of(values)._asdict()}
        for name, values in rates.items()
    ]
    ratios = [
        {"a": a, "b": b, "what": "images/s", **pairwise(rates[a], rates[b])._asdict()}
        for a, b in ((OURS, PEER), (OURS, FLOOR))
    ]
    document = {"rows": rows, "ratios": ratios, "environment": facts}
    ours = f"{benchmark.precision}{', compiled' if benchmark.compile else ''}"
    what = f"{benchmark.images} JPEGs of {bytes_each / 1e3:.0f} kB, {benchmark.teacher} at {benchmark.input_size}, ours {ours}"
    print(what)
    for row in rows:
        print(
            f"{row['name']:10} {row['median']:8,.1f} images/s ({row['p25']:,.1f} to {row['p75']:,.1f})"
        )
    for ratio in ratios:
        print(
            f"{ratio['a']} / {ratio['b']}: {ratio['median']:.2f} ({ratio['p25']:.2f} to {ratio['p75']:.2f})"
        )
    print(f"bar of {OURS} / {PEER} {BAR}, aim {AIM}")
    if benchmark.json is not None:
        write_json(benchmark.json, document)
    if benchmark.record:
        common = facts | {"data": what, "threads": benchmark.threads, "runs": benchmark.rounds}
        spreads = [
            {
                "name": f"{r['a']} / {r['b']}",
                "unit": "ratio",
                **{k: r[k] for k in ("median", "p25", "p75")},
            }
            for r in ratios
        ]
        lines = [line | {"name": f"relabel {line['name']}"} for line in [*rows, *spreads]]
        append_rows(benchmark.results, [common | line for line in lines])
    return document


def generate(
    dataset: ImageDataset, root: Path, out: Path, teacher: Teacher, benchmark: Benchmark
) -> int:
    """The stand-in: a .pt file an image, as the published generator makes them; how many."""
    options = {name: CONFIG[name] for name in ("mean", "std", "interpolation")}
    dataset.transform = create_transform(
        benchmark.input_size, is_training=False, crop_pct=1.0, **options
    )
    loader = torch.utils.data.DataLoader(dataset, benchmark.batch, num_workers=benchmark.threads)
    paths, done = dataset.filenames(), 0
    for image_NCHW, _ in loader:
        with torch.no_grad():
            features, classifier = (
                teacher.model.forward_features(image_NCHW),
                teacher.model.get_classifier(),
            )
            logits_NKSS = torch.nn.functional.conv2d(
                features, classifier.weight[:, :, None, None], classifier.bias
            )
            top = logits_NKSS.topk(benchmark.top_k, dim=1)
        both = torch.stack([top.values, top.indices.float()], 1).half()
        for maps in both:
            # the published code asks its dataset for the file, which opens it
            with open(root / paths[done], "rb"):
                target = out / Path(paths[done]).with_suffix(".pt")
            target.parent.mkdir(parents=True, exist_ok=True)
            torch.save(maps.clone(), target)
            done += 1
    return done


def measure(folder: Path, benchmark: Benchmark) -> dict[str, list[float]]:
    """Images a second of each contestant, a value a round."""
    torch.manual_seed(0)
    model = timm.create_model(benchmark.teacher, num_classes=benchmark.classes)
    teacher = Teacher(model, benchmark.input_size, "center-crop", CONFIG)
    images, dataset = Images(folder / "images"), ImageDataset(str(folder / "images"))
    work = begin_pass(
        images,
        teacher,
        benchmark.teacher,
        top_k=benchmark.top_k,
        batch=benchmark.batch,
        threads=benchmark.threads,
        absent="tail",
        render=NativeRender(images, teacher),
        precision=benchmark.precision,
        compiled=benchmark.compile,
    )
    example = torch.zeros(
        benchmark.batch, 1, benchmark.input_size, benchmark.input_size, 3, dtype=torch.uint8
    )

    def by_ours(_: int) -> int:
        with redirect_stdout(io.StringIO()):
            finish_pass(work, folder / "maps.h5")
        return benchmark.images

    def by_teacher(_: int) -> int:
        runs = -(-benchmark.images // benchmark.batch)
        for _ in range(runs):
            work.scorer.begin(example, benchmark.batch, benchmark.top_k)
        return runs * benchmark.batch

    def clear(_: str) -> None:
        (folder / "maps.h5").unlink(missing_ok=True)
        shutil.rmtree(folder / "pt", ignore_errors=True)

    works = {
        OURS: by_ours,
        PEER: lambda _: generate(dataset, folder / "images", folder / "pt", teacher, benchmark),
        FLOOR: by_teacher,
    }
    with unpinned_after() as allowed:
        chosen, before = cores(benchmark.threads, allowed), torch.get_num_threads()
        torch.set_num_threads(benchmark.threads)
        try:
            return take_turns(works, benchmark.rounds, lambda _: pin(chosen), clear)
        finally:
            torch.set_num_threads(before)


if __name__ == "__main__":
    run(lambda: main(tyro.cli(Benchmark, description=__doc__)))
