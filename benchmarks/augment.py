"""Time RandAugment per image: ours on uint8 batches and timm's on Pillow images, on the same crops.

    python -m benchmarks.augment
    python -m benchmarks.augment --policy rand-m9-mstd0.5-inc1 --device cuda --json augment.json

The clock covers only what differs between the two, from uint8 pixels to uint8 pixels. Ours includes
drawing the operations on the host and, on a GPU, copying them there; the crops are already on the
device, as in training. timm's starts and ends with Pillow images, so it is spared the conversions
of a data loader. Each round processes all crops with both, on one core, in rotating order; the
ratio is the median of the ratios within a round. A third row adds normalization and random erasing
to ours, on a GPU in bfloat16 as in training. There a fourth row is the time that this takes the GPU
alone: in a training the host draws while the GPU is busy with an earlier step.

Pillow 13 rejects posterization to 0 bits, which timm's policy requests in 2 % of its
posterizations at magnitude 9; there its operation gets 1 bit, at the same cost.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Literal

import numpy as np
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, auto_augment

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
from benchmarks.photographs import load_photographs
from densefeed.pipelines.augment.augmentation import Augmentation
from densefeed.pipelines.augment.settings import Augment
from densefeed.pipelines.batch import Batch
from densefeed.pipelines.plan import EpochPlan
from densefeed.storage.images import crop_resize
from densefeed.system.devices import choose_device, synchronize
from densefeed.system.errors import UserError

OURS, TIMM, WHOLE = "augment", "timm-pillow", "augment+normalize+erase"
ON_GPU = f"{WHOLE}, GPU alone"
# Clock cycles for which a GPU is busy before a batch of ON_GPU, and their least seconds: no GPU has
# a clock of 2.5 GHz. The host queues the batch meanwhile.
BUSY_CYCLES, BUSY_SECONDS = 5 * 10**8, 0.2


@dataclass(frozen=True, kw_only=True)
class AugmentBenchmark(Output):
    """Options of this benchmark."""

    policy: str = "rand-m9-mstd0.5-inc1"  # RandAugment policy in timm's notation
    device: Literal["cpu", "cuda"] = "cpu"  # of our augmentation
    batch: Count = 64  # crops per batch
    batches: Count = 8  # batches per round
    size: Count = 224  # side of a crop, pixels
    rounds: Count = 15  # measured rounds, after one for warm-up


def main(benchmark: AugmentBenchmark) -> dict:
    """Measure, print and record; return the document that --json writes."""
    device, facts = choose_device(benchmark.device), environment()
    facts |= {"device": benchmark.device, "policy": benchmark.policy, "threads": 1}
    milliseconds = measure(benchmark, device)
    data = (
        f"{benchmark.batch * benchmark.batches} crops of {benchmark.size} px, {benchmark.policy}, "
        f"{device_name(device)}"
    )
    ratio = compare(OURS, TIMM, milliseconds[OURS], milliseconds[TIMM])
    return report(benchmark, spread_rows(milliseconds, "ms/image"), [ratio], data, facts)


def measure(benchmark: AugmentBenchmark, device: torch.device) -> Series:
    """Return milliseconds per image of each contestant, one value per round."""
    total, size = benchmark.batch * benchmark.batches, benchmark.size
    plan = EpochPlan(
        num_samples=total, batch=benchmark.batch, seed=0, mode="train", sizes=((0, size),)
    )
    crops = make_crops(load_photographs(), plan)
    pictures = [Image.fromarray(crop) for crop in crops]
    batches = make_batches(torch.from_numpy(crops).to(device), benchmark.batches)
    # 0.25 is the erasing probability of the LV-ViT recipes.
    ours, whole = (
        Augmentation(
            plan,
            Augment(rand_augment=benchmark.policy, erase_probability=erased),
            IMAGENET_DEFAULT_MEAN,
            IMAGENET_DEFAULT_STD,
            torch.bfloat16 if device.type == "cuda" else torch.float32,
        ).to(device)
        for erased in (0.0, 0.25)
    )
    # timm fills what a warp uncovers with `img_mean`, so it gets the color that ours uses.
    policy = build_timm_policy(benchmark.policy, ours.fill)

    def run_ours(augmentation: Augmentation, apply: Callable, number: int) -> int:
        for batch in batches:
            choice = augmentation.choose(number, batch.index, batch.repeat, size, size)
            apply(batch, choice)
        # One wait per round: a training step does not wait for its augmentation either.
        synchronize(device)
        return total

    def run_timm(_: int) -> int:
        for picture in pictures:
            policy(picture)
        return total

    with use_cores(1):
        works = {
            OURS: partial(run_ours, ours, ours.crops),
            TIMM: run_timm,
            WHOLE: partial(run_ours, whole, whole),
        }
        rates = take_turns(works, benchmark.rounds)
        found = {name: [1000 / rate for rate in values] for name, values in rates.items()}
        if device.type == "cuda":
            one = cycle(batches)
            found[ON_GPU] = [time_gpu(whole, next(one), n) for n in range(benchmark.rounds)]
    return found


def time_gpu(augmentation: Augmentation, batch: Batch, epoch: int) -> float:
    """Return milliseconds per image of an augmentation on a GPU that does not wait for the host.

    Raises UserError if the host needs longer to queue it than the GPU is busy before.
    """
    size = batch.image.shape[1:3]
    choice = augmentation.choose(epoch, batch.index, batch.repeat, *size)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # A single batch: for more, the host may have to pin new memory, which waits for the GPU.
    start = time.perf_counter()
    torch.cuda._sleep(BUSY_CYCLES)
    began.record()
    augmentation(batch, choice)
    ended.record()
    if time.perf_counter() - start > BUSY_SECONDS:
        raise UserError(f"the host needs over {BUSY_SECONDS} s for a batch; give a smaller --batch")
    ended.synchronize()
    return began.elapsed_time(ended) / len(batch.index)


def build_timm_policy(policy: str, fill: tuple[int, ...]) -> auto_augment.RandAugment:
    """Return timm's RandAugment, which keeps at least 1 bit when it posterizes."""
    augment = auto_augment.rand_augment_transform(policy, {"img_mean": fill})
    # With mstd0.5 the magnitude reaches 10 in 2 % of the draws, and there timm keeps 4 - 4 bits.
    for op in augment.ops:
        if op.name.startswith("Posterize"):
            op.aug_fn = lambda image, bits, **_: auto_augment.posterize(image, max(bits, 1))
    return augment


def make_crops(originals: list[Image.Image], plan: EpochPlan) -> np.ndarray:
    """Return one crop per sample, uint8 `[N, size, size, 3]`: the plan's boxes of its first epoch.

    The samples take the photographs in turn.
    """
    (size, _), count = plan.shape(0, 0), plan.num_samples
    pictures = list(islice(cycle(originals), count))
    heights, widths = np.array([(p.height, p.width) for p in pictures]).T
    boxes, _ = plan.crops(0, np.arange(count), heights, widths)
    crops = [
        crop_resize(picture, (left, top, left + width, top + height), size)
        for picture, (top, left, height, width) in zip(pictures, boxes.tolist(), strict=True)
    ]
    return np.stack(crops)


def make_batches(crops: torch.Tensor, count: int) -> list[Batch]:
    """Split `crops` into `count` batches, with label and view of each but without score maps."""
    total = len(crops)
    # The crops are made already, so the view of each is its whole picture.
    ids, view = torch.arange(total), torch.eye(3)[:2].expand(total, 2, 3).to(crops.device)
    rest = torch.zeros(total, 4), ids, torch.zeros_like(ids), torch.ones(total)
    return Batch(crops, ids, view, *rest, None, None, None, None).split(count)


if __name__ == "__main__":
    command(main, AugmentBenchmark, __doc__)
