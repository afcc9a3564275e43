"""What RandAugment costs an image: ours on batches of bytes beside timm's on Pillow images, in one
run on the same crops.

    python -m benchmarks.augment
    python -m benchmarks.augment --policy rand-m9-mstd0.5-inc1 --device cuda --json augment.json

Compared is what differs, bytes in and bytes out. Ours includes choosing on the host and, on a GPU,
the copy of what was chosen; the crops lie on the device, as they do in training. timm's begins and
ends with Pillow images, so it is spared the conversions that a loader pays for. Each round does all
crops with both, on one core, in an order that rotates; the ratio is the median of the rounds' own.
Normalization and erasing, of ours alone, stand beside it.

Pillow 13 refuses to posterize to no bits, which timm's policy asks for in 2 % of its posterizings
at magnitude 9; there its operation is given one bit, at the same cost.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from PIL import Image
from timm.data import auto_augment

from benchmarks.harness import Spread, append_rows, cores, pairwise, pin, take_turns, unpinned_after
from benchmarks.photographs import photographs
from densefeed.pipelines.augment.augmentation import Augmentation
from densefeed.pipelines.augment.settings import Augment
from densefeed.pipelines.batch import Batch
from densefeed.pipelines.plan import EpochPlan
from densefeed.system.errors import UserError, run
from densefeed.system.provenance import RESULTS, environment, write_json

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PACKAGES = ("torch", "timm", "numpy", "pillow")
OURS, TIMMS, WHOLE = "augment", "timm-pillow", "augment+normalize+erase"


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What to measure."""

    policy: str = "rand-m9-mstd0.5-inc1"  # RandAugment, as timm writes it
    device: str = "cpu"  # where ours works: cpu | cuda
    batch: int = 64  # crops
    batches: int = 8  # of a round
    size: int = 224  # side of a crop, pixels
    rounds: int = 15  # after one to warm up
    seed: int = 0  # of what is chosen
    json: Path | None = None  # write rows and ratio there
    record: bool = True  # append rows to --results
    results: Path = RESULTS  # CSV


def main(benchmark: Benchmark) -> dict:
    """Measure, print, record; the document that --json writes."""
    small = [
        name for name in ("batch", "batches", "size", "rounds") if getattr(benchmark, name) < 1
    ]
    if small:
        raise UserError(f"--{small[0]} must be at least 1")
    if benchmark.device not in ("cpu", "cuda"):
        raise UserError(f"--device {benchmark.device} is none of cpu and cuda")
    if benchmark.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device is here; leave it out to measure on the CPU")
    facts = environment(PACKAGES)
    milliseconds = measure(benchmark)
    ratio = pairwise(milliseconds[OURS], milliseconds[TIMMS])
    rows = [
        {"name": name, "unit": "ms/image", **Spread.of(values)._asdict()}
        for name, values in milliseconds.items()
    ]
    document = {
        "rows": rows,
        "ratios": [{"a": OURS, "b": TIMMS, "what": "time", **ratio._asdict()}],
        "environment": facts | {"device": benchmark.device, "policy": benchmark.policy},
    }
    for row in rows:
        print(
            f"{row['name']:24} {row['median']:.3f} ms an image ({row['p25']:.3f} to {row['p75']:.3f})"
        )
    print(f"{OURS} / {TIMMS}: {ratio.median:.3f} ({ratio.p25:.3f} to {ratio.p75:.3f})")
    if benchmark.json is not None:
        write_json(benchmark.json, document)
    if benchmark.record:
        what = f"{benchmark.batch * benchmark.batches} crops of {benchmark.size} px, {benchmark.policy}, {benchmark.device}"
        lines = [*rows, {"name": f"{OURS} / {TIMMS}", "unit": "ratio", **ratio._asdict()}]
        append_rows(
            benchmark.results,
            [
                facts | {"data": what, "threads": 1, "runs": benchmark.rounds} | line
                for line in lines
            ],
        )
    return document


def measure(benchmark: Benchmark) -> dict[str, list[float]]:
    """Milliseconds an image of each contestant, a value a round."""
    device = torch.device(benchmark.device)
    total = benchmark.batch * benchmark.batches
    plan = EpochPlan(
        num_samples=total,
        batch=benchmark.batch,
        seed=benchmark.seed,
        mode="train",
        sizes=((0, benchmark.size),),
    )
    crops = crops_of(photographs(), plan)
    pictures = [Image.fromarray(crop) for crop in crops]
    crops = torch.from_numpy(crops).to(device)
    ours = Augmentation(plan, Augment(rand_augment=benchmark.policy), MEAN, STD).to(device)
    whole = Augmentation(
        plan, Augment(rand_augment=benchmark.policy, erase_probability=0.25), MEAN, STD
    ).to(device)
    policy = auto_augment.rand_augment_transform(benchmark.policy, {"img_mean": ours.fill})
    for op in policy.ops:
        if op.name.startswith("Posterize"):
            op.aug_fn = lambda image, bits, **_: auto_augment.posterize(image, max(bits, 1))

    def batches() -> list[Batch]:
        ids, view = torch.arange(total), torch.eye(3)[:2].expand(total, 2, 3)
        fields = (
            crops,
            ids,
            view.to(device),
            torch.zeros(total, 4),
            ids,
            torch.zeros_like(ids),
            torch.ones(total),
        )
        parts = zip(*(field.split(benchmark.batch) for field in fields), strict=True)
        return [Batch(*part, None, None, None, None) for part in parts]

    cut = batches()

    def by_ours(number: int) -> int:
        for batch in cut:
            choice = ours.choose(number, batch.index, batch.repeat, benchmark.size, benchmark.size)
            ours.crops(batch, choice.to(device))
        return settled(device, total)

    def by_ours_whole(number: int) -> int:
        for batch in cut:
            whole(
                batch,
                whole.choose(number, batch.index, batch.repeat, benchmark.size, benchmark.size),
            )
        return settled(device, total)

    def by_timm(_: int) -> int:
        for picture in pictures:
            policy(picture)
        return total

    with unpinned_after() as allowed:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            works = {OURS: by_ours, TIMMS: by_timm, WHOLE: by_ours_whole}
            rates = take_turns(
                works, benchmark.rounds, lambda _: pin(cores(1, allowed)), lambda _: None
            )
        finally:
            torch.set_num_threads(threads)
    return {name: [1000 / rate for rate in values] for name, values in rates.items()}


def settled(device: torch.device, count: int) -> int:
    """`count`, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return count


def crops_of(originals: list[Image.Image], plan: EpochPlan) -> np.ndarray:
    """One crop for each sample of the plan, by its own first epoch, of the photographs in turn:
    uint8 `[N, size, size, 3]`.
    """
    size, count = plan.size(0), plan.num_samples
    pictures = [originals[number % len(originals)] for number in range(count)]
    boxes, _ = plan.crops(
        0,
        np.arange(count),
        *(np.array(side) for side in zip(*((p.height, p.width) for p in pictures), strict=True)),
    )
    return np.stack(
        [
            np.asarray(
                picture.resize(
                    (size, size), Image.Resampling.BILINEAR, (left, top, left + width, top + height)
                )
            )
            for picture, (top, left, height, width) in zip(pictures, boxes.tolist(), strict=True)
        ]
    )


if __name__ == "__main__":
    run(lambda: main(tyro.cli(Benchmark, description=__doc__)))
