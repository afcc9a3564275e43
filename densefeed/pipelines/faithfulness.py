"""Measure what cached labels cost: stored maps beside the teacher that looks at each crop itself.

A stored map labels every crop of its image, but the teacher that made it saw the whole image: the
crop's objects smaller, and with their surroundings. Here random-resized crops are labeled both
ways, by `sparse_targets` and by the teacher on the enlarged crop, and compared token by token.

A map names only the top k classes of a cell. Both distributions are compared over the classes that
the map names in any cell, and the sum of all others. The divergence over all classes is therefore
at least the one reported here. Of maps that keep unmapped classes both distributions are those of
the data's classes, given that a token shows one of them, and a token counts by the probability of
it in the map.
"""

import math
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from densefeed.pipelines.batch import Batch, crop_batch
from densefeed.pipelines.folder import map_spec
from densefeed.pipelines.plan import CROP_RATIO, EpochPlan, RankRows
from densefeed.pipelines.targets import SparseTargets, sparse_targets
from densefeed.relabel.checks.reference import has_own_weights
from densefeed.relabel.teacher import Teacher
from densefeed.storage.images import Images, crop_resize, decode
from densefeed.storage.score_maps import ScoreMapStore, StoreHeader
from densefeed.system.prefetch import ordered_map
from densefeed.system.progress import bar

# N images   C crops of each   T tokens of a crop   M classes that a map names   K classes

# Crops through the teacher at once.
BATCH = 16
SEED = 0
# Share of both distributions that is spread evenly before the divergence is computed: float16 keeps
# nothing of a smaller remainder, and where a map has 0 the divergence would be infinite.
FLOOR = 1e-3
MEASURES = ("agreement", "divergence", "correlation")
RANGES = {"agreement": (0, 1), "divergence": (0, math.inf), "correlation": (-1, 1)}
# Shares of the image's area.
AREAS = (1 / 4, 1 / 2)
# Width by height: thirds of the range of RandomResizedCrop on its logarithmic axis.
ASPECTS = tuple(math.exp(math.log(ratio) / 3) for ratio in CROP_RATIO)
# Ranges of the area that the curve has a point for.
CURVE = 8
# In the teacher's name of a header.
VIEWS = re.compile(r", (\d+) views ")


class Crops(NamedTuple):
    """Random-resized crops of one image, and what the teacher is shown of them."""

    picture: np.ndarray  # uint8 [C, size, size, 3]
    box_tlhw: np.ndarray  # float64 [C, 4], pixels of the image
    flip: np.ndarray  # bool [C]
    size: tuple[int, int]  # height and width of the image, pixels


def draw_crops(images: Images, index: int, count: int, teacher: Teacher) -> Crops:
    """Draw `count` crops of an image, as training does, and enlarge them to the teacher's input."""
    image = decode(images.read(index), images.where(index))
    plan = EpochPlan(num_samples=len(images), batch=1, seed=SEED, mode="train")
    ids, ones = np.full(count, index), np.ones(count, np.int64)
    box, flip = plan.crops(0, ids, image.height * ones, image.width * ones, np.arange(count))
    side = teacher.input_size
    picture = np.empty((count, side, side, 3), np.uint8)
    for n, (top, left, height, width) in enumerate(box.tolist()):
        shown = left, top, left + width, top + height
        pixels = crop_resize(image, shown, side, teacher.interpolation, teacher.fill)
        picture[n] = pixels[:, ::-1] if flip[n] else pixels
    return Crops(picture, box, flip, (image.height, image.width))


def read_crops(store: ScoreMapStore, row: int, crops: Crops) -> Batch:
    """Make the batch that a loader would make of these crops of the image of a row."""
    count = len(crops.flip)
    maps = store.rows(np.full(count, row))
    height_N, width_N = (np.full(count, extent) for extent in crops.size)
    rows = RankRows(np.full(count, row), np.arange(count), np.ones(count, np.float32))
    return crop_batch(
        torch.from_numpy(crops.picture),
        torch.full((count,), int(store.labels[row])),
        (crops.box_tlhw, crops.flip, height_N, width_N),
        rows,
        [torch.from_numpy(part) for part in maps],
    )


def compare_tokens(
    named_CTM: Tensor, top_CT: Tensor, targets: SparseTargets, num_classes: int
) -> Tensor:
    """Compare the targets of tokens with the teacher's distributions: float64 `[3, C, T]`.

    The first axis is MEASURES: whether the likeliest class is the same; the Kullback-Leibler
    divergence of the target from the teacher's distribution, nats; and Pearson's correlation of the
    probabilities, NaN where a distribution is flat. It is not one of logarithms, in which classes
    that both call impossible, and of which a map keeps nothing, would count as much as the others.

    Args:
        named_CTM: the teacher's probabilities of the classes of the palette.
        top_CT: the teacher's likeliest class, of all.
        targets: without smoothing, with a palette that has each class once.
    """
    named, base = named_CTM.double(), targets.base.double()[..., None]
    stored = targets.extra.double() + base
    best = stored.max(-1)
    label = targets.palette.gather(1, best.indices)
    # Where every named class has less than the others, the likeliest is an unknown one of these.
    agree = (label == top_CT) & (best.values >= base[..., 0])
    rest = (1 - named.sum(-1, keepdim=True)).clamp(min=0)
    others = num_classes - targets.palette.shape[1]
    p, q = torch.cat([named, rest], -1), torch.cat([stored, others * base], -1).clamp(min=0)
    p, q = ((1 - FLOOR) * share + FLOOR / p.shape[-1] for share in (p, q))
    divergence = (p * (p / q).log()).sum(-1)
    p, q = (share - share.mean(-1, keepdim=True) for share in (p, q))
    size = (p.square().sum(-1) * q.square().sum(-1)).sqrt()
    correlation = torch.where(size > 1e-9, (p * q).sum(-1) / size, math.nan)
    return torch.stack([agree.double(), divergence, correlation])


@torch.inference_mode()
def compare_image(
    store: ScoreMapStore, row: int, crops: Crops, teacher: Teacher
) -> tuple[np.ndarray, np.ndarray]:
    """Compare the crops of one image.

    Returns the weights of MEASURES and the weighted sums over the tokens, both float64 `[C, 3]`.
    """
    spec = map_spec(store)._replace(max_palette=int(store.palette[row]))
    weights, sums = [], []
    for start in range(0, len(crops.flip), BATCH):
        part = Crops(*(field[start : start + BATCH] for field in crops[:3]), crops.size)
        batch = read_crops(store, row, part)
        probability = teacher(batch.image[:, None].to(teacher.mean.device)).softmax(-1)
        probability, side = probability.flatten(1, 2), probability.shape[1]
        targets = sparse_targets(batch, spec, side)
        # All crops are of one map, and so have one palette.
        named = probability[..., targets.palette[0].to(probability.device)].cpu()
        top = probability.argmax(-1).cpu()
        found = compare_tokens(named, top, targets, spec.num_classes)
        weight = targets.weight.double() * found.isfinite()
        weights.append(weight.sum(-1).T.numpy())
        sums.append((weight * found.nan_to_num()).sum(-1).T.numpy())
    return np.concatenate(weights), np.concatenate(sums)


def measure_crops(
    store: ScoreMapStore,
    images: Images,
    image_of: np.ndarray,
    rows: np.ndarray,
    teacher: Teacher,
    count: int,
    threads: int,
) -> dict:
    """Label `count` random-resized crops of the image of each row both ways; return plain numbers.

    Crops are those of training: area from 0.08 to 1, aspect from 3/4 to 4/3, half of them mirrored.
    Means are over images, of the image's own mean over the tokens of its crops by their weights. An
    interval of 95 % treats images as independent.

    Args:
        image_of: index in `images` of each row.
        teacher: shows whole pictures, of geometry `squash`, in one view; of the maps' classes.
    """
    shape = len(rows), count
    weight, total = np.zeros((2, *shape, len(MEASURES)))
    area, aspect, flip = np.zeros(shape), np.zeros(shape), np.zeros(shape, bool)

    def load(index: int) -> Crops:
        return draw_crops(images, index, count, teacher)

    with (
        # As in reference_match.look: images that no thread has begun are dropped at an error.
        ThreadPoolExecutor(threads) as pool,
        closing(ordered_map(load, image_of[rows].tolist(), pool, threads + 1)) as loaded,
    ):
        for n in bar(range(len(rows)), "audit, crops"):
            crops = next(loaded)
            height, width = crops.box_tlhw.T[2:]
            area[n], aspect[n] = height * width / math.prod(crops.size), width / height
            flip[n] = crops.flip
            weight[n], total[n] = compare_image(store, int(rows[n]), crops, teacher)
    low, high = AREAS
    narrow, wide = ASPECTS
    parts = [
        ("all", "all", np.ones(shape, bool)),
        ("area", "below 1/4 of the image", area < low),
        ("area", "1/4 to 1/2", (area >= low) & (area <= high)),
        ("area", "above 1/2", area > high),
        ("width / height", f"below {narrow:.2f}", aspect < narrow),
        ("width / height", f"{narrow:.2f} to {wide:.2f}", (aspect >= narrow) & (aspect <= wide)),
        ("width / height", f"above {wide:.2f}", aspect > wide),
        ("mirrored", "no", ~flip),
        ("mirrored", "yes", flip),
    ]
    groups = [
        {"by": by, "crops_are": name} | summarize(weight, total, part) for by, name, part in parts
    ]
    step = np.minimum((area * CURVE).astype(int), CURVE - 1)
    curve = [
        {"area": float(area[step == at].mean())} | summarize(weight, total, step == at)
        for at in range(CURVE)
        if (step == at).any()
    ]
    figures = {
        "images": len(rows),
        "crops_per_image": count,
        "input_size": teacher.input_size,
        "own_teacher": has_own_weights(store.header, teacher),
        "groups": groups,
        "curve": curve,
    }
    return figures | {"sentence": describe(figures, store.header)}


def summarize(weight_NC3: np.ndarray, total_NC3: np.ndarray, part_NC: np.ndarray) -> dict:
    """Return the number of images and crops of a part of the crops, and means and intervals."""
    part = part_NC[..., None]
    weight_N3, total_N3 = (weight_NC3 * part).sum(1), (total_NC3 * part).sum(1)
    found = {
        # A crop beyond the map's Window has no token with a weight.
        "images": int((weight_N3[:, 0] > 0).sum()),
        "crops": int((part_NC & (weight_NC3[..., 0] > 0)).sum()),
    }
    for n, name in enumerate(MEASURES):
        known = weight_N3[:, n] > 0
        found[name] = mean_interval(total_N3[known, n] / weight_N3[known, n], *RANGES[name])
    return found


def mean_interval(value_N: np.ndarray, least: float, most: float) -> dict[str, float]:
    """Return the mean and its interval of 95 %, by the normal approximation; NaN if unknown."""
    if not len(value_N):
        return dict.fromkeys(("mean", "low", "high"), math.nan)
    mean, error = float(value_N.mean()), math.nan
    if len(value_N) > 1:
        error = 1.96 * float(value_N.std(ddof=1)) / math.sqrt(len(value_N))
    low, high = mean - error, mean + error
    return {"mean": mean, "low": max(low, least), "high": min(high, most)}


def describe(figures: dict, header: StoreHeader) -> str:
    """Say in one sentence what the cached label costs."""
    groups = {group["crops_are"]: group for group in figures["groups"]}
    if not groups["all"]["crops"]:
        return "no crop shows a part of its image that its map covers, so nothing was compared"
    phrases = {
        "below 1/4 of the image": "on crops below a quarter of the image",
        "above 1/2": "on crops above half of it",
        "all": "on all crops",
    }
    who = "the teacher" if figures["own_teacher"] else "the reference"
    shares, reasons = [], []
    for name, phrase in phrases.items():
        if not (group := groups[name])["crops"]:
            continue
        share, low, high = (100 * group["agreement"][end] for end in ("mean", "low", "high"))
        interval = "" if math.isnan(low) else f"95 % interval {low:.0f} to {high:.0f} %, "
        verb, of = "", ""
        if not shares:
            verb, of = f" the stored map and {who} on the crop agree", " of tokens"
        kl = group["divergence"]["mean"]
        shares.append(f"{phrase}{verb} on {share:.0f} %{of} ({interval}KL {kl:.2f})")
    if not figures["own_teacher"]:
        reasons.append("the reference is not recognized as the maps' teacher")
    ways = [header.geometry] if header.geometry.startswith("tile") else []
    if views := VIEWS.search(header.teacher):
        ways.append(f"{views[1]} views")
    if ways:
        reasons.append(f"{who} sees each crop once, and the maps are of {' and '.join(ways)}")
    if figures["input_size"] != header.input_size:
        sizes = figures["input_size"], header.input_size
        reasons.append("{} sees crops at {} px, and the maps are of {} px".format(who, *sizes))
    if header.absent == "zero-logit":
        reasons.append("classes that the maps do not keep have logit 0")
    if header.absent == "background":
        reasons.append("a token counts by what it shows of the data's classes, by the map")
    return "; ".join([", ".join(shares), *reasons])
