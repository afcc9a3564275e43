"""`--dry-run`: loss and gradient of the first images, and the memory of a whole step."""

import math
import os
from contextlib import closing, suppress

import torch
from torch import Tensor, nn

from densefeed.models.drop_path import skip_dropped
from densefeed.pipelines.batch import Batch
from densefeed.pipelines.loader import Source
from densefeed.pipelines.shapes import bucket_shape
from densefeed.step import Step
from densefeed.system.devices import free_memory
from densefeed.system.errors import UserError
from densefeed.system.options import with_options
from densefeed.system.terminal import print, warn
from densefeed.training.compile import compile_step
from densefeed.training.setup import Run, open_loader
from densefeed.training.speed import ActivationBytes

# Files of a data set whose sizes are looked at. On a network disk they take seconds.
SIZED_FILES = 2**14


def dry_run(run: Run) -> None:
    """Print the loss of the first images and the memory of a step.

    UserError for empty files of images, and if less memory is free.
    """
    config, ranks, optim = run.config, run.ranks, run.config.optim
    for source in (run.loader.source, run.val.source):
        if fault := describe_empty(source):
            if config.data.on_bad_sample == "raise":
                raise UserError(
                    f"{fault}; replace or remove them, or give --on-bad-sample skip; `densefeed "
                    "beton verify FOLDER` lists all files that are damaged"
                )
            if ranks.is_first:
                warn(f"{fault}; they are skipped")
    # The plan takes multiples of the repeats, and mixing needs a partner.
    images = 2 * config.data.repeats
    loss, kept, per_image = first_loss(run, images)
    if not math.isfinite(loss):
        raise UserError(
            f"the loss of the first {images} images is {loss}; check --model-kwargs and --init, or "
            "give --precision fp32"
        )
    fixed = fixed_bytes(run) + kept
    needed, free = fixed + per_image * optim.microbatch, free_memory(ranks.device)
    takes = f"{optim.microbatch} images per forward pass take about {needed / 1e9:.2f} GB"
    if ranks.is_first:
        maps = ", all score maps" * config.data.maps_on_device
        print(
            f"dry run: data, labels and recipe fit together, {run.described_images}, "
            f"{config.data.described_sizes}; loss {loss:.3f} of {images} images; "
            f"gradients, moments{maps} and {takes}, and {free / 1e9:.2f} GB are free on "
            f"{ranks.device}"
        )
    if needed > free:
        local = optim.batch // ranks.size
        # Even numbers, because an image and its mixing partner share a part.
        parts = (n for n in range(2, optim.microbatch, 2) if local % n == 0)
        fits = [n for n in parts if fixed + per_image * n < free]
        remedy = (
            f"--microbatch {fits[-1]}"
            if fits
            else "a smaller --size or --model, or --grad-checkpointing"
        )
        raise UserError(
            f"{takes} on {ranks.device}, of which {free / 1e9:.2f} GB are free; give {remedy}"
        )


def describe_empty(source: Source) -> str:
    """Name the first empty file of images, and count them among up to 16,384 files."""
    sizes = {}
    for path in source.files(SIZED_FILES):
        # Images in files of several have no file of their own, and one that is missing is an error
        # when its turn comes.
        with suppress(OSError):
            sizes[path] = os.path.getsize(path)
    empty = [path for path, size in sizes.items() if not size]
    if not empty:
        return ""
    counts = f"{len(empty):,} of {len(sizes):,} image files"
    return f"{counts} are empty (0 bytes), the first is {empty[0]}"


def first_loss(run: Run, images: int) -> tuple[float, float, float]:
    """Compute loss and gradient of the first images.

    Returns the loss, and the bytes kept for a backward pass: those of any batch, and per image.
    """
    config, data, trainable = run.config, run.config.data, run.student.trainable
    # The largest inputs of the run take the most memory.
    side = data.sides[-1]
    areas = {a: math.prod(bucket_shape(side, a, data.side_multiple)) for a in data.aspects}
    few = with_options(
        data,
        threads=1,
        size=side,
        sizes=(),
        multi_scale=(),
        aspects=(max(areas, key=areas.get),) if areas else (),
        maps_on_device=False,
    )
    optim = with_options(config.optim, batch=images, microbatch=images)
    run.student.train()
    # Every rank computes the same images by itself, so no all-reduce is needed.
    with closing(
        open_loader(few, optim, config.run.seed, run.objective, "train", beside=run.loader.source)
    ) as loader:
        compute = compile_step("never", trainable)
        sections = few, config.augment
        # How many samples drop-path leaves out differs from draw to draw, and so would the bytes.
        skip_dropped(trainable, False)
        step = Step(loader, trainable, run.objective, *sections, run.dtype, compute)
        batch = next(step.batches(0))
        loss, once = measure(step, trainable, batch)
        loss.backward()
        # Autocast keeps copies of the weights too, whatever the number of images: 52 MB in LV-ViT-S
        # and bfloat16. So bytes per image are the slope between two numbers of images.
        _, twice = measure(step, trainable, batch.map_tensors(lambda field: torch.cat([field] * 2)))
    return loss.item(), 2 * once - twice, (twice - once) / images


def measure(step: Step, trainable: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """Return the loss of a batch, and the bytes kept for its backward pass."""
    (compute,), activations = step.losses(trainable, batch), ActivationBytes(trainable)
    with activations:
        loss = compute()
    return loss, activations.bytes


def fixed_bytes(run: Run) -> int:
    """Sum the bytes that do not depend on the batch, without the weights themselves."""
    student, optim = run.student, run.config.optim
    # Gradients, two moments, the EMA and SAM's copy are each as large as the weights. Weights that
    # networks share have a second gradient.
    copies = 3 + (optim.ema > 0) + (optim.sam_rho > 0)
    total = sum(p.nbytes for p in student.trainable.parameters()) * copies
    total += sum(tensor.nbytes for tensor in getattr(student.trainable, "aliases", ()))
    if run.config.data.maps_on_device and run.loader.score_maps:
        total += run.loader.plan.num_samples * run.loader.score_maps.nbytes
    return total
