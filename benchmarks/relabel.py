"""Measure images labeled per second by our pass and by a stand-in for the published generator.

    python -m benchmarks.relabel
    python -m benchmarks.relabel --teacher resnet10t --input-size 224 --rounds 5
    python -m benchmarks.relabel --teacher dm_nfnet_f6 --input-size 576 --compile --precision bf16

Both use the same teacher on the same device and cores. TokenLabeling's map generator reads an
ImageFolder through timm's evaluation transform (shorter side resized by Pillow, center square) and
PyTorch's DataLoader. It runs the teacher in fp32 in batches, takes the top k logits of every cell,
opens each image file again to get its name, and saves float16 [2, k, S, S] with torch.save, one
file per image, in the order of the batches. `stand-in` does this with --threads worker processes.
`pass` is the work of densefeed label after its setup: decode natively, score, write one
store and sync it. --compile and --precision apply to `pass` only; the stand-in has no such options.
Listing the folder, loading and compiling the teacher are not timed for either. Both give the
teacher the center square at --input-size. Teachers have random weights, which take equally long.
`teacher` scores the same batch repeatedly, which is an upper bound of any pass. --no-stand-in
measures these two alone: in fp32 on a GPU, which is exact here, the stand-in takes minutes with a
large teacher. Each round runs all in turns on --threads cores; the ratio is the median of the
ratios within a round. The images are in the page cache: crops of real photographs (photographs.py),
500 pixels on the longer side, 33 kB, in the folder for temporary files.
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
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, ImageDataset, create_transform

from benchmarks.harness import (
    Count,
    Output,
    Series,
    command,
    compare,
    device_name,
    environment,
    report,
    spread_rows,
    take_turns,
    use_cores,
)
from benchmarks.photographs import write_crops
from densefeed.models import nfnet  # noqa: F401  (registers its models with timm)
from densefeed.models.model_spec import is_registered
from densefeed.relabel.labeling import begin_pass
from densefeed.relabel.rendering import NativeRender
from densefeed.relabel.teacher import Teacher
from densefeed.relabel.workers import label
from densefeed.storage.images import Images
from densefeed.system.devices import choose_device
from densefeed.system.errors import UserError

OURS, PEER, TEACHER = "pass", "stand-in", "teacher"
# Required ratio of OURS to PEER.
BAR = "2, goal 4"
# The published teacher.
CONFIG = {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD, "interpolation": "bicubic"}


@dataclass(frozen=True, kw_only=True)
class RelabelBenchmark(Output):
    """Options of this benchmark."""

    images: Count = 1024  # crops of photographs, 500 pixels on the longer side
    classes: Count = 1000  # of the teacher, and of the folder
    teacher: str = "nfnet_micro"  # a cheap one, so that mainly the rest of the pass is measured
    input_size: Count = 112  # pixels
    top_k: Count = 5  # classes kept per cell
    batch: Count = 32  # as in the published command
    threads: Count = 2  # our decoding threads, the stand-in's worker processes, and cores
    compile: bool = False  # compile our teacher
    precision: Literal["fp32", "bf16"] = "fp32"  # of our teacher
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if available, else cpu
    stand_in: bool = True  # also measure the stand-in
    rounds: Count = 5  # measured rounds, after one for warm-up


def main(benchmark: RelabelBenchmark) -> dict:
    """Write the images, measure, print and record; return the document that --json writes."""
    check(benchmark)
    device, facts = choose_device(benchmark.device), environment()
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder, "images")
        images.mkdir()
        write_crops(images, benchmark.images, benchmark.classes)
        total_bytes = sum(path.stat().st_size for path in images.rglob("*.jpg"))
        rates = measure(Path(folder), benchmark, device)
    jpegs = f"{benchmark.images} JPEGs of {total_bytes / benchmark.images / 1e3:.0f} kB"
    data = (
        f"{jpegs}, {benchmark.teacher} at {benchmark.input_size}, "
        f"ours {benchmark.precision}{', compiled' if benchmark.compile else ''}; "
        f"{device_name(device)}"
    )
    ratios = [compare(OURS, TEACHER, rates[OURS], rates[TEACHER])]
    if benchmark.stand_in:
        ratios.insert(0, compare(OURS, PEER, rates[OURS], rates[PEER], bar=BAR))
    facts |= {"threads": benchmark.threads}
    return report(benchmark, spread_rows(rates, "images/s"), ratios, data, facts, "relabel ")


def check(benchmark: RelabelBenchmark) -> None:
    """Raise UserError for invalid options."""
    if benchmark.images < benchmark.classes:
        raise UserError(
            f"--images {benchmark.images} are fewer than --classes {benchmark.classes}; "
            "give at least one image per class"
        )
    if not is_registered(benchmark.teacher):
        raise UserError(
            f"--teacher {benchmark.teacher} is not a timm model; "
            "timm.list_models(include_tags=True) lists them"
        )


def generate(
    dataset: ImageDataset, root: Path, out: Path, teacher: Teacher, benchmark: RelabelBenchmark
) -> int:
    """Write one .pt file per image as the published generator does; return their number."""
    # crop_pct 1.0 is the center square of the whole shorter side, which our teacher sees too.
    dataset.transform = create_transform(benchmark.input_size, crop_pct=1.0, **CONFIG)
    # Not shuffled, so that batches come in the order of the file names below.
    loader = torch.utils.data.DataLoader(dataset, benchmark.batch, num_workers=benchmark.threads)
    paths = iter(dataset.filenames())
    for image_NCHW, _ in loader:
        image_NCHW = image_NCHW.to(teacher.mean.device)
        for maps in score_images(teacher.model, image_NCHW, benchmark.top_k).cpu():
            path = next(paths)
            # The published code gets the name from its dataset, which opens the file.
            with open(root / path, "rb"):
                target = (out / path).with_suffix(".pt")
            target.parent.mkdir(parents=True, exist_ok=True)
            # Without clone() the slice would be saved with the storage of its batch.
            torch.save(maps.clone(), target)
    return len(dataset)


@torch.no_grad()
def score_images(model: torch.nn.Module, image_NCHW: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return each cell's largest logits and their class ids, float16 `[N, 2, k, S, S]`."""
    features, classifier = model.forward_features(image_NCHW), model.get_classifier()
    # As in the published generator, the classifier is a 1 x 1 convolution over the cells before
    # pooling, and class ids are float16 too, which is exact up to 2,048.
    weight = classifier.weight[:, :, None, None]
    logits_NKSS = torch.nn.functional.conv2d(features, weight, classifier.bias)
    top = logits_NKSS.topk(top_k, dim=1)
    return torch.stack([top.values, top.indices.float()], 1).half()


def measure(folder: Path, benchmark: RelabelBenchmark, device: torch.device) -> Series:
    """Return images per second of each contestant, one value per round."""
    torch.manual_seed(0)
    model = timm.create_model(benchmark.teacher, num_classes=benchmark.classes)
    teacher = Teacher(model, benchmark.input_size, "center-crop", CONFIG).to(device)
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
    batch, size = benchmark.batch, benchmark.input_size
    # Pinned, as the buffers of a pass are.
    pinned = device.type == "cuda"
    example = torch.zeros(batch, 1, size, size, 3, dtype=torch.uint8, pin_memory=pinned)

    def run_ours(_: int) -> int:
        with redirect_stdout(io.StringIO()):
            label(work, folder / "maps.h5")
        return benchmark.images

    def run_peer(_: int) -> int:
        return generate(dataset, folder / "images", folder / "pt", teacher, benchmark)

    def run_teacher(_: int) -> int:
        # Only whole batches are scored, so the last one may go beyond the images; its rows count.
        runs = -(-benchmark.images // batch)
        for _ in range(runs):
            scored = work.scorer.begin(example, batch, benchmark.top_k)
        scored.wait_sync()
        return runs * batch

    def clear(_: str) -> None:
        # A pass refuses to replace a finished store.
        (folder / "maps.h5").unlink(missing_ok=True)
        shutil.rmtree(folder / "pt", ignore_errors=True)

    # Each run writes all files again.
    with use_cores(benchmark.threads):
        works = {OURS: run_ours, PEER: run_peer, TEACHER: run_teacher}
        if not benchmark.stand_in:
            del works[PEER]
        return take_turns(works, benchmark.rounds, done=clear)


if __name__ == "__main__":
    command(main, RelabelBenchmark, __doc__)
