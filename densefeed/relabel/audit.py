"""Is this store right? What no checksum sees: maps turned, cut, shuffled, of other classes, or
holding other numbers than logits.

Three witnesses are heard, as far as they are there: the store's own rows, the images (their names,
labels and sizes), and a reference, any trained model of the same classes whose maps of a few
hundred images are laid over the stored ones.

Checks say what they found in numbers, and a check that cannot be made is named as such: without a
reference nothing is known of orientation and coverage, because an image's label is the same however
its map is turned.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from densefeed.relabel.reference_match import (
    ALARM_T,
    FEWEST,
    ORIENTATIONS,
    SURE_T,
    MapCorrelation,
    References,
    choose,
    look,
    paired_t,
    what,
)
from densefeed.relabel.teacher import weights_hash
from densefeed.storage.geometry import teacher_window
from densefeed.storage.images import Images
from densefeed.storage.maintenance import disorder
from densefeed.storage.packs import SURE, label_rows
from densefeed.storage.row_codecs import ScoreMaps, cell_targets
from densefeed.storage.score_maps import ScoreMapStore, map_datasets
from densefeed.system.errors import UserError
from densefeed.system.progress import bar

# N rows   S cells along a side   k classes a cell   K classes

Verdict = Literal["fault", "warning", "unchecked", "sound"]

ALL_ROWS = 100_000  # a store of as many rows is read whole; of a larger one
SAMPLED_ROWS = 20_480  # evenly spaced ones are: 20 a class of ImageNet, 145 MB
ROWS_AT_ONCE = 256
NAMED = 5  # rows in a check's evidence

FEWEST_LABELS = 100  # rows, to hold the maps against the labels
OTHER = 0.5  # correlation below which two maps are surely of different things

# in a teacher's name: views, a class map
MANY = re.compile(r", \d+ views [0-9a-f]+$| by \S+ [0-9a-f]{8}\b")

LOGITS_FIRST = "the logits must be put right first"
NOT_YET = "the class list must be put right first"
OVER = "probabilities that sum to more than 1"  # as upkeep.disorder calls it
WHOLE = 1.02  # sum of a cell's probabilities, each rounded to float16, perhaps their logarithms too
ALONE = "only a reference model can tell, and none was given: an image's label is the same however its map lies"


class Check(NamedTuple):
    """One thing that was looked at, and what came out."""

    name: str
    verdict: Verdict
    evidence: str  # with numbers
    remedy: str = ""  # one sentence, of faults and warnings


@dataclass
class Audit:
    """What was found, and the numbers from which a page is made. `plain` is all of it but the
    maps.
    """

    store: ScoreMapStore | None
    checks: list[Check] = field(default_factory=list)
    figures: dict = field(default_factory=dict)
    images: Images | None = None
    # int64 [N]: where each row's image stands in `images`, -1: nowhere
    image_of: np.ndarray | None = None
    # rows held against images
    looked: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def faults(self) -> list[Check]:
        """The checks that found a fault."""
        return [check for check in self.checks if check.verdict == "fault"]

    def plain(self) -> dict:
        """For JSON."""
        return {"checks": [check._asdict() for check in self.checks], **self.figures}


# ------------------------------------------------------------------------------------------------ the whole


def audit(
    path: Path,
    images: Images | None = None,
    references: References | None = None,
    count: int = 300,
    every_row: bool = False,
    threads: int = 2,
) -> Audit:
    """Audit the store at `path`.

    Args:
        images: those the maps were made for; without them names, labels, Windows and all that needs
            a picture are unchecked.
        references: a model of the same classes by geometry, `squash` and `center-crop`; needs
            `images`.
        count: images that the reference looks at.
        every_row: read all rows also of a store of more than 100,000.

    Raises UserError if the file is no store at all, or an image that is looked at cannot be read.
    """
    unfinished = missing_rows(path)
    if unfinished is not None:
        return Audit(None, [unfinished], {"file": str(path)})
    store = ScoreMapStore(path)
    result = Audit(store, images=images)
    rows = len(store)
    some = rows > ALL_ROWS and not every_row
    ids = np.linspace(0, rows - 1, SAMPLED_ROWS).astype(np.int64) if some else np.arange(rows)
    seen = survey(store, ids)
    add = result.checks.append
    add(Check("finished", "sound", f"all {rows:,} rows are labeled"))
    logits = numbers(store, seen)
    add(values(store, seen, logits.verdict == "fault"))
    add(logits)
    add(rounded_classes(store, seen))
    if images is None:
        add(Check("images", "unchecked", "no images were given"))
        result.image_of = None
    else:
        result.image_of, checks = against_images(store, images)
        result.checks += checks
    add(duplicates(store, images, result.image_of))
    wait = LOGITS_FIRST if logits.verdict == "fault" else ""
    names, mapping = class_list(store, seen, wait)
    add(names)
    wait = wait or (NOT_YET if names.verdict == "fault" else "")
    looks = None
    usable = np.setdiff1d(seen.ids, [*seen.faults])
    if images is not None:
        usable = usable[result.image_of[usable] >= 0]
        result.looked = neighbors(store.labels, usable, count)
        if len(result.looked):
            add(windows(store, images, result.image_of, result.looked))
        if references and len(result.looked) and not wait:
            looks = look(
                store.rows,
                store.header,
                images,
                result.image_of,
                result.looked,
                references,
                threads,
            )
    maker = made_by(store, references)
    labels = labels_known(store, seen, looks, wait)
    result.checks += geometry(store, looks, wait, maker or labels.verdict == "fault")
    add(rows_in_place(store, looks, maker, wait))
    add(labels)
    order = {"fault": 0, "warning": 1, "unchecked": 2, "sound": 3}
    result.checks.sort(key=lambda check: order[check.verdict])
    result.figures = figures(store, seen, looks, mapping)
    return result


def made_by(store: ScoreMapStore, references: References | None) -> bool:
    """Is the reference the very model that made this store, alone and in one view? Its header ends
    with a hash of the weights.
    """
    known = (references or {}).get(store.header.geometry)
    model = getattr(known, "model", None)
    same_input = getattr(known, "input_size", None) == store.header.input_size
    otherwise = MANY.search(store.header.teacher)
    return (
        model is not None
        and same_input
        and not otherwise
        and store.header.teacher.endswith(f" {weights_hash(model)}")
    )


# ------------------------------------------------------------------------------------------------ the store's own rows


def missing_rows(path: Path) -> Check | None:
    """The fault of a store that is not finished, with the first missing rows; None if it is."""
    _, arrays, _ = map_datasets(path)
    missing = np.flatnonzero(arrays["done"] == 0)
    if not len(missing):
        return None
    named = ", ".join(arrays["path"][row].decode(errors="replace") for row in missing[:NAMED])
    return Check(
        "finished",
        "fault",
        f"{len(missing):,} of {len(arrays['done']):,} rows are not labeled, the first: {named}",
        "Run the command that labels or imports again; it does only these rows.",
    )


@dataclass
class Survey:
    """What one pass over rows gathers. Arrays stand in the order of `ids`; of rows with faults they
    hold nothing of use.
    """

    ids: np.ndarray
    top: np.ndarray  # int64: the class of the greatest mean probability over the cells
    top_p: np.ndarray  # that probability
    label_p: np.ndarray  # the same of the image's label
    entropy: np.ndarray  # mean over the cells, nats
    constant: np.ndarray  # bool: all cells, of more than one, say the same
    faults: dict[int, list[str]] = field(default_factory=dict)
    # classes that any cell names
    named: np.ndarray = field(default_factory=lambda: np.zeros(2**16, bool))
    # [N, 2]: the least logit and the greatest, NaN of rows whose logits cannot be judged
    range: np.ndarray = field(init=False)
    # [N, 2]: the greatest sums of a cell's logits and of their exponentials
    sums: np.ndarray = field(init=False)
    shares: np.ndarray = field(init=False)  # [N, 3]: of the cells, see `sums_of_probabilities`
    # [N]: greatest probability of a class in a cell, 0 of rows with faults
    surest: np.ndarray = field(init=False)

    def __post_init__(self):
        N = len(self.ids)
        self.range, self.sums, self.shares = (
            np.full((N, 2), np.nan),
            np.zeros((N, 2)),
            np.zeros((N, 3)),
        )
        self.surest = np.zeros(N)

    def good(self) -> np.ndarray:
        """Which rows have no fault, bool."""
        return ~np.isin(self.ids, [*self.faults])


def survey(store: ScoreMapStore, ids: np.ndarray) -> Survey:
    """Read these rows once. A damaged row is a fault of that row."""
    header, count = store.header, len(ids)
    seen = Survey(
        ids,
        np.zeros(count, np.int64),
        np.zeros(count),
        np.zeros(count),
        np.zeros(count),
        np.zeros(count, bool),
    )
    K, at_once = header.num_classes, max(1, min(ROWS_AT_ONCE, 2**23 // header.num_classes))
    starts = range(0, count, at_once)
    for start in bar(starts, "audit, chunks of rows") if len(starts) > 16 else starts:
        at, maps = readable(store, np.arange(start, min(start + at_once, count)), seen)
        if not len(at):
            continue
        wrong = store.impossible(ids[at], maps) | disorder(store, ids[at], maps)
        bad = np.any(list(wrong.values()), axis=0)
        for n in np.flatnonzero(bad).tolist():
            seen.faults[int(ids[at[n]])] = [what for what, rows in wrong.items() if rows[n]]
        # Probabilities beside logsumexps of logits add up to anything: such rows are no witness but
        # of what was stored.
        bad_otherwise = np.any([rows for what, rows in wrong.items() if what != OVER], axis=0)
        gather_logits(seen, at[~bad_otherwise], maps.logit[~bad_otherwise], header.num_classes)
        at, maps = at[~bad], ScoreMaps(*(part[~bad] for part in maps))
        if not len(at):
            continue
        named, other = cell_targets(maps, K, header.absent)
        mean_NK = mean_over_cells(named, other, maps.cls, K)
        seen.top[at] = mean_NK.argmax(1)
        seen.top_p[at] = mean_NK.max(1)
        label = store.labels[ids[at]]
        seen.label_p[at] = np.where(
            label < K, mean_NK[np.arange(len(at)), np.minimum(label, K - 1)], 0
        )
        seen.entropy[at] = (-_plogp(named).sum(-1) - (K - header.top_k) * _plogp(other)).mean(
            (1, 2)
        )
        same = (maps.cls == maps.cls[:, :1, :1]) & (maps.logit == maps.logit[:, :1, :1])
        seen.constant[at] = same.reshape(len(at), -1).all(1) & (header.side > 1)
        seen.named[np.unique(maps.cls)] = True
        seen.surest[at] = named.max((1, 2, 3))
    return seen


def gather_logits(seen: Survey, at: np.ndarray, logit_NSSk: np.ndarray, num_classes: int) -> None:
    """What `numbers` asks of rows, for those of `seen.ids[at]`. A row that says the same
    everywhere, as of an image labeled by its class, is left out where a map has cells.
    """
    differ = (logit_NSSk != logit_NSSk[:, :1, :1]).any((1, 2, 3)) | (logit_NSSk.shape[1] == 1)
    at, logit = at[differ], logit_NSSk[differ].astype(np.float32)
    if not len(at):
        return
    seen.range[at] = np.stack([logit.min((1, 2, 3)), logit.max((1, 2, 3))], 1)
    with np.errstate(over="ignore"):
        seen.sums[at] = np.stack([logit.sum(-1).max((1, 2)), np.exp(logit).sum(-1).max((1, 2))], 1)
    seen.shares[at] = sums_of_probabilities(logit, num_classes)


def sums_of_probabilities(logit_NSSk: np.ndarray, num_classes: int) -> np.ndarray:
    """Shares of a row's cells, `[N, 3]`, whose logits add up to more than 1, to 1, and to less than
    the k greatest of K probabilities can, which is k / K; all but for roundings.
    """
    sums = logit_NSSk.sum(-1)
    thin = sums < logit_NSSk.shape[-1] / num_classes / WHOLE
    kinds = (sums > WHOLE, (sums >= 1 / WHOLE) & (sums <= WHOLE), thin)
    return np.stack([kind.mean((1, 2)) for kind in kinds], 1)


def readable(
    store: ScoreMapStore, at: np.ndarray, seen: Survey
) -> tuple[np.ndarray, ScoreMaps | None]:
    """Those of the rows `seen.ids[at]` that match their checksums, and their maps; the others
    become faults.
    """
    try:
        return at, store.rows(seen.ids[at])
    except UserError:
        whole = []
        for n in at.tolist():
            try:
                store.rows(seen.ids[n : n + 1])
                whole.append(n)
            except UserError:
                seen.faults[int(seen.ids[n])] = ["does not match its checksum"]
        at = np.array(whole, np.int64)
        return at, store.rows(seen.ids[at]) if len(at) else None


def mean_over_cells(
    named: np.ndarray, other: np.ndarray, cls: np.ndarray, num_classes: int
) -> np.ndarray:
    """Mean probability of every class over the cells, float64 `[N, K]`, of what `cell_targets`
    gives.
    """
    N = len(named)
    key = np.arange(N)[:, None] * num_classes + cls.reshape(N, -1)
    more = (named - other[..., None]).reshape(-1)
    total = np.bincount(key.reshape(-1), more, N * num_classes).reshape(N, num_classes)
    return (total + other.sum((1, 2))[:, None]) / other[0].size


def _plogp(p: np.ndarray) -> np.ndarray:
    return p * np.log(np.maximum(p, 1e-300))


def values(store: ScoreMapStore, seen: Survey, no_logits: bool) -> Check:
    """Damaged rows, NaN, classes there are not, a disorder of ranks: what `verify` finds, counted
    by kind.
    """
    if not seen.faults:
        return Check(
            "values",
            "sound",
            f"{len(seen.ids):,} of {len(store):,} rows were read: checksums, ranges and order hold",
        )
    kinds = Counter(what for said in seen.faults.values() for what in said)
    first = {what: next(row for row, said in seen.faults.items() if what in said) for what in kinds}
    told = "; ".join(
        f"{n:,} {'row' if n == 1 else 'rows'}: {what} (the first: row {first[what]}, {store.path_of(first[what])})"
        for what, n in kinds.most_common()
    )
    return Check(
        "values",
        "fault",
        f"bad are {len(seen.faults):,} of {len(seen.ids):,} rows read; {told}",
        "Put the logits right first: such sums follow from them."
        if no_logits and set(kinds) == {OVER}
        else "Copy the file again; if that does not help, label or import these images again.",
    )


def numbers(store: ScoreMapStore, seen: Survey) -> Check:
    """Are the numbers logits? Probabilities in their place lie in [0, 1] and a cell's add up to at
    most 1; logs of probabilities, where classes not named have logit 0, make the named classes the
    least likely.
    """
    name, header = "logits", store.header
    judged = ~np.isnan(seen.range[:, 0])
    if not judged.any():
        if not seen.good().any():
            return Check(name, "unchecked", "no row could be read")
        return Check(
            name, "unchecked", "every map says the same in all its cells, as maps made of labels do"
        )
    low, high = float(seen.range[judged, 0].min()), float(seen.range[judged, 1].max())
    fullest, whole = seen.sums[judged].max(0)
    said = f"logits lie from {low:.3g} to {high:.3g}"
    if (
        low >= 0
        and high <= WHOLE
        and are_probabilities(high, seen.shares[judged].mean(0), header.top_k)
    ):
        share = 100 * (1 - seen.shares[judged, 0].mean())
        evidence = (
            f"{said}, and of {'all' if fullest <= WHOLE else f'{share:.4g} % of the'} cells they add up to no more than 1 (at most "
            f"{fullest:.3g}): these are probabilities, not logits"
        )
        return Check(
            name,
            "fault",
            evidence,
            "Take the logarithm of what was stored, or label or import again from raw logits.",
        )
    if (
        header.absent == "zero-logit"
        and high <= 0
        and whole <= WHOLE
        and header.num_classes > header.top_k
    ):
        evidence = (
            f"{said} and their exponentials add up to at most {whole:.3g} a cell: these are logs of probabilities, "
            "beside which a class not named, at logit 0, would be the likeliest"
        )
        return Check(
            name, "fault", evidence, "Import again from raw logits, or store with absent = tail."
        )
    if not (judged & seen.good()).any():
        return Check(name, "unchecked", "no row could be read")
    # Of logits in [0, 1] the likeliest class has at most e times the probability of any other.
    surest, flattest = float(seen.surest[judged].max()), math.e / (header.num_classes - 1 + math.e)
    if surest <= flattest:
        evidence = (
            f"{said}; the surest cell gives its class {100 * surest:.2g} %, no more than probabilities in the place of logits "
            f"would ({100 * flattest:.2g} %)"
        )
        return Check(
            name,
            "warning",
            evidence,
            "Hold a few rows against the teacher's own logits before training on them.",
        )
    return Check(name, "sound", f"{said}; the surest cell gives its class {100 * surest:.1f} %")


def are_probabilities(high: float, shares: np.ndarray, top_k: int) -> bool:
    """Of numbers in [0, 1]: does the sum of a cell's say that they are probabilities? `shares` are
    those of `sums_of_probabilities`.

    An untrained model's logits are small too, but then none comes near 1, as the probability of
    some cell of hundreds does; or sums of several, mostly alike, pass 1; or they fall short of what
    k of K probabilities must reach.
    """
    over, full, thin = shares
    if high < 0.5 or thin > 0.01:
        return False
    if top_k * high >= 2 and over == 0:  # several as great as the greatest would pass 1 by far
        return True
    # Made of logits that were float16, sums pass 1 by up to a tenth where logits pass 100: in 1 of
    # 10,000 cells of digit scenes by more than 2 %, where 27 % add up to 1. Sums of logits do not
    # pile up there and end: what passes 1 is then as much.
    return bool(high >= 0.9 and full >= 0.05 and over <= min(0.01, full / 10))


def rounded_classes(store: ScoreMapStore, seen: Survey) -> Check:
    """float16 holds whole numbers up to 2,048, then even ones, from 4,096 on multiples of 4, and so
    on.
    """
    name, most = "class numbers", store.header.num_classes
    if most <= 2049:
        return Check(name, "sound", f"float16 tells all {most:,} classes apart")
    classes = np.flatnonzero(seen.named[:most])
    beyond = classes[classes > 2048]
    step = 2.0 ** (np.floor(np.log2(np.maximum(beyond, 1))) - 10)
    on_grid = beyond % step == 0
    # How likely that classes drawn blindly all lie on the grid: a half, a quarter, ... for each.
    bits = float(np.log2(step).sum())
    told = f"{len(beyond):,} different classes above 2,048 are named, {int(on_grid.sum()):,} of them such as float16 can hold"
    if on_grid.all() and bits >= 20:
        return Check(
            name,
            "fault",
            f"{told}; by chance all would be once in 2^{bits:.0f} stores",
            "Class numbers went through float16: label or import again from whole numbers or float32.",
        )
    if on_grid.all():
        return Check(name, "unchecked", f"{told}: too few to tell")
    return Check(name, "sound", told)


def duplicates(store: ScoreMapStore, images: Images | None, image_of: np.ndarray | None) -> Check:
    """Different images with one map. Images that are there twice have it rightly, and so have
    images that were labeled by their class.
    """
    name = "duplicates"
    order = np.argsort(store.crcs, kind="stable")
    again = np.flatnonzero(store.crcs[order][1:] == store.crcs[order][:-1])
    pairs, filled = [], set()
    for at in again[:2000].tolist():  # the checksums of 1.28 million rows agree by chance 190 times
        one, other = order[at : at + 2]
        try:
            first, second = store.rows(np.array([one])), store.rows(np.array([other]))
        except UserError:  # told under `values`
            continue
        if any((a != b).any() for a, b in zip(first, second, strict=True)):
            continue
        by_label = label_rows(
            store.labels[[one]], store.header.num_classes, store.header.side, store.header.top_k
        )
        if (
            store.labels[one] == store.labels[other]
            and (first.cls == by_label.cls).all()
            and first.logit[0, 0, 0, 0] >= SURE - 0.5
        ):
            filled |= {int(one), int(other)}
        else:
            pairs.append((int(one), int(other)))
    scale = len(again) / max(min(len(again), 2000), 1)
    told = (
        f"; {len(filled):,} name nothing but their label in every cell, as where a pack had no map"
        if filled
        else ""
    )
    if not pairs:
        return Check(name, "sound", f"no two images share a map{told}")
    remedy = "Find out which of the images the map is of, and label or import the others again."
    a, b = pairs[0]
    shown = f"row {a} ({store.path_of(a)}) and row {b} ({store.path_of(b)})"
    if images is None or image_of is None:
        share = len(pairs) * scale / len(store)
        # ImageNet's training set holds some images twice; a store of which a hundredth is double
        # has a fault of its own.
        verdict: Verdict = "fault" if share > 0.01 or len(pairs) == len(store) - 1 else "warning"
        return Check(
            name,
            verdict,
            f"about {len(pairs) * scale:,.0f} maps stand there twice, such as {shown}; are the images the same?{told}",
            remedy
            if verdict == "fault"
            else "Give --data: only the images tell whether they are there twice.",
        )
    different = [
        (one, other)
        for one, other in pairs
        if image_of[one] >= 0
        and image_of[other] >= 0
        and images.read(int(image_of[one])) != images.read(int(image_of[other]))
    ]
    if not different:
        return Check(
            name, "sound", f"{len(pairs):,} maps stand there twice, as their images do{told}"
        )
    a, b = different[0]
    shown = f"row {a} ({store.path_of(a)}) and row {b} ({store.path_of(b)})"
    return Check(
        name,
        "fault",
        f"about {len(different) * scale:,.0f} maps are the same for different images, such as {shown}{told}",
        remedy,
    )


# ------------------------------------------------------------------------------------------------ names, labels, sizes


def against_images(store: ScoreMapStore, images: Images) -> tuple[np.ndarray, list[Check]]:
    """Where each row's image stands in `images`, int64 `[N]` (-1: nowhere), and the checks of
    names, labels and files.
    """
    paths = store.paths()
    place = {path: index for index, path in enumerate(images.paths)}
    image_of = np.array([place.get(path, -1) for path in paths], np.int64)
    without = sorted(place.keys() - set(paths))
    gone = [path for path, at in zip(paths, image_of, strict=True) if at < 0]
    moved = np.flatnonzero(image_of != np.arange(len(store)))
    remedy = "Name the folder the maps were made for, or label the images again."
    parts = (
        [f"{len(without):,} of {len(images):,} images have no row ({', '.join(without[:NAMED])})"]
        if without
        else []
    )
    parts += (
        [f"{len(gone):,} of {len(store):,} rows have no image ({', '.join(gone[:NAMED])})"]
        if gone
        else []
    )
    if not parts and len(moved):
        parts = [f"all are there, but in another order, from row {moved[0]} ({paths[moved[0]]}) on"]
    if not parts and images.fingerprint() != store.header.fingerprint:
        parts = [
            f"all {len(images):,} names agree, but the fingerprint does not: files or labels have changed"
        ]
    files = Check(
        "images",
        "sound",
        f"a row for each of {len(images):,} images, in their order, files unchanged",
    )
    if parts:
        files = Check("images", "fault", "; ".join(parts), remedy)

    names, there = list(store.header.class_names), np.flatnonzero(image_of >= 0)
    others = there[images.labels[image_of[there]] != store.labels[there]]
    classes = Check("class names", "sound", f"{len(names):,} names and all labels are the folder's")
    if names != images.class_names:
        shared = sum(a == b for a, b in zip(names, images.class_names, strict=False))
        told = f"{shared:,} of {len(names):,} class names are, at their places, those of the folder's {len(images.class_names):,}"
        classes = Check("class names", "fault", told, remedy)
    elif len(others):
        told = f"{len(others):,} rows have another label than their image, the first is {paths[others[0]]}"
        classes = Check("class names", "fault", told, remedy)
    return image_of, [files, classes]


def neighbors(labels: np.ndarray, usable: np.ndarray, count: int) -> np.ndarray:
    """About `count` of the rows `usable`, evenly spaced, in pairs of neighbors ([0] and [1], [2]
    and [3]), of one label if possible.
    """
    if len(usable) < 2 or count < 2:
        return np.empty(0, np.int64)
    pairs = max(1, min(count // 2, len(usable) // 2))
    at = np.linspace(0, len(usable) - 2, pairs).astype(np.int64)
    back = (
        (at > 0)
        & (labels[usable[at]] != labels[usable[at + 1]])
        & (labels[usable[at]] == labels[usable[at - 1]])
    )
    return np.stack([usable[at], usable[np.where(back, at - 1, at + 1)]], 1).reshape(-1)


def windows(store: ScoreMapStore, images: Images, image_of: np.ndarray, rows: np.ndarray) -> Check:
    """Does the stored Window follow from the image's size and the geometry that the header
    names?
    """
    name, geometry = "windows", store.header.geometry
    if geometry not in ("squash", "center-crop", "letterbox"):
        return Check(name, "unchecked", f"of geometry {geometry} only its maker knows the Windows")
    said = store.rows(rows).window
    want = np.array(
        [teacher_window(geometry, *size) for size in map(images.size, image_of[rows].tolist())],
        np.float32,
    )
    # Who cuts at whole pixels misses ours by up to half of one: 1/600 of an image of 300.
    wrong = np.flatnonzero(np.abs(said - want).max(1) > 2e-3)
    if not len(wrong):
        return Check(
            name,
            "sound",
            f"of {len(rows):,} images looked at each has the Window of geometry {geometry}",
        )
    n = wrong[0]
    return Check(
        name,
        "fault",
        f"{len(wrong):,} of {len(rows):,} rows do not have the Window of geometry {geometry}: {store.path_of(rows[n])} has "
        f"{tuple(said[n].round(3).tolist())}, not {tuple(want[n].round(3).tolist())}",
        "Label the images again, or import the pack again with the --footprint it was made with.",
    )


# ------------------------------------------------------------------------------------------------ labels


class Renaming(NamedTuple):
    """What the maps call the images of each label, learned on half of the rows and tried on the
    other.
    """

    called: np.ndarray  # int64 [classes]: the most frequent top class of a label's rows, -1: no row
    own: float  # share of the rows tried whose top class is the label
    mapped: float  # the same of `called`


class Agreement(NamedTuple):
    """How often two columns of classes agree."""

    share: float
    chance: float  # as often they would by chance, made of both columns' frequencies
    error: float  # standard deviation of a share that is chance

    def known(self) -> bool:
        """Is it more than chance?"""
        return self.share > self.chance + SURE_T * self.error


def agreement(label: np.ndarray, top: np.ndarray) -> Agreement:
    """Of classes int64 `[N]`, N > 0."""
    N, most = len(label), max(int(label.max()), int(top.max())) + 1
    chance = float(
        (np.bincount(label, minlength=most) / N * (np.bincount(top, minlength=most) / N)).sum()
    )
    return Agreement(
        float((label == top).mean()), chance, math.sqrt(max(chance * (1 - chance), 1 / N) / N)
    )


def class_list(store: ScoreMapStore, seen: Survey, wait: str) -> tuple[Check, Renaming | None]:
    """Are the classes of the maps those of the labels? If whole labels are called by another
    class's name, they are not.

    `wait`, here and below, is why the check cannot be made before another fault is mended, or "".
    """
    name, good = "class list", seen.good() & ~seen.constant
    if wait:
        return Check(name, "unchecked", wait), None
    label, top = store.labels[seen.ids[good]], seen.top[good]
    if len(label) < FEWEST_LABELS:
        return Check(
            name, "unchecked", f"{len(label):,} rows are too few to hold against their labels"
        ), None
    classes = max(store.header.num_classes, int(label.max()) + 1)
    turn = np.zeros(len(label), np.int64)  # every other row of each label learns
    order = np.argsort(label, kind="stable")
    starts = np.searchsorted(label[order], label[order])
    turn[order] = (np.arange(len(label)) - starts) % 2
    learn, tried = turn == 0, turn == 1
    if not tried.any():
        return Check(name, "unchecked", "no class has two rows"), None
    called = np.full(classes, -1, np.int64)
    pairs, counts = np.unique(label[learn] * classes + top[learn], return_counts=True)
    ascending = np.argsort(counts, kind="stable")
    # the most frequent is written last
    called[pairs[ascending] // classes] = pairs[ascending] % classes
    own_N, mapped_N = label[tried] == top[tried], called[label[tried]] == top[tried]
    mapping = Renaming(called, float(own_N.mean()), float(mapped_N.mean()))
    # A class that its own name hardly ever fits and another's mostly does. Twins of ImageNet
    # (maillot, missile) split evenly.
    moved = [
        c
        for c in np.unique(label[tried])
        if called[c] != c
        and (here := label[tried] == c).sum() >= 5
        and own_N[here].mean() < 0.1
        and mapped_N[here].mean() > 0.5
    ]
    t = paired_t(mapped_N.astype(float) - own_N)
    all_moved = t >= ALARM_T and mapping.mapped > 5 * mapping.own
    names = store.header.class_names
    told = f"the maps' likeliest class is the label of {100 * mapping.own:.1f} % of {tried.sum():,} images"
    if (moved and t >= ALARM_T) or all_moved:
        moved = moved or [c for c in np.unique(label[tried]) if called[c] != c]
        examples = ", ".join(
            f"{names[c]} is called {named(names, called[c])}" for c in moved[:NAMED]
        )
        evidence = (
            f"{told}, but of {100 * mapping.mapped:.1f} % after {len(moved):,} classes are renamed ({examples}; learned on as many other "
            f"images, t = {t:.1f})"
        )
        return Check(
            name,
            "fault",
            evidence,
            "Label or import again with the class list of the teacher in the order of the folders.",
        ), mapping
    if not (known := agreement(label, top)).known():
        return Check(
            name,
            "unchecked",
            f"{told}; of all {len(label):,} it is of {100 * known.share:.1f} %, by chance it would be of "
            f"{100 * known.chance:.1f} %, too near to tell whose classes they are",
        ), mapping
    return Check(
        name,
        "sound",
        f"{told}, and no class is called by another's name (best renaming: {100 * mapping.mapped:.1f} %)",
    ), mapping


def named(names: tuple[str, ...], number: int) -> str:
    """The name of a class, or its number where there is no name."""
    return names[number] if 0 <= number < len(names) else f"class {number}"


def labels_known(
    store: ScoreMapStore, seen: Survey, looks: MapCorrelation | None, wait: str
) -> Check:
    """Do the maps know anything of the labels? By chance they agree as often as both columns'
    frequencies make them.
    """
    name, good = "labels", seen.good() & ~seen.constant
    label, top = store.labels[seen.ids[good]], seen.top[good]
    if wait:
        return Check(name, "unchecked", wait)
    if len(label) < FEWEST_LABELS:
        return Check(
            name, "unchecked", f"{len(label):,} rows are too few to hold against their labels"
        )
    known = agreement(label, top)
    told = (
        f"the likeliest class of {100 * known.share:.1f} % of {len(label):,} maps is the image's label; by chance it would be of "
        f"{100 * known.chance:.1f} %"
    )
    if known.known():
        return Check(name, "sound", told)
    if known.chance + SURE_T * known.error > 0.8:
        return Check(name, "unchecked", f"{told}, too near to tell")
    if looks is not None and looks.reproduced():
        return Check(
            name,
            "warning",
            f"{told}; the reference makes the same maps, so it is the teacher that knows no better",
            "Choose a teacher that was trained on these classes.",
        )
    return Check(
        name,
        "fault",
        f"{told}: they are maps of other images or classes, or of an untrained teacher",
        "Label or import again with each map at its image, and print the teacher's accuracy.",
    )


# ------------------------------------------------------------------------------------------------ the reference


def geometry(
    store: ScoreMapStore, looks: MapCorrelation | None, wait: str, foreign: bool
) -> list[Check]:
    """The checks of orientation and coverage. `foreign` says that maps unlike the reference's can
    only be of other images: it made these, or they know nothing of their labels.
    """
    names, declared = ("orientation", "coverage"), store.header.geometry
    if looks is None:
        return [Check(name, "unchecked", wait or ALONE) for name in names]
    return [orientation(looks, foreign), coverage(looks, declared, foreign)]


def unlike(foreign: bool) -> str:
    """Why maps that the reference's are not like do not tell how they lie."""
    if foreign:
        return "the maps do not fit what is in these images, see rows"
    return "the reference does not say where in these images things are, or the maps are of others of the same classes"


def orientation(looks: MapCorrelation, foreign: bool) -> Check:
    """Which of the 8 ways the maps lie, under the footprint that fits best."""
    g, _ = looks.best()
    choice = choose(looks.own[:, g])
    name, best, second = "orientation", choice.best, choice.runner_up()
    told = (
        f"maps correlate with the reference's at {choice.mean[0]:.3f} as they lie"
        + (f", at {choice.mean[best]:.3f} if they are {ORIENTATIONS[best]}" if best else "")
        + f"; the next best is {ORIENTATIONS[second]} at {choice.mean[second]:.3f} (against each other way t is at least "
        f"{choice.over.min():.1f}, {choice.count} images)"
    )
    if choice.count < FEWEST:
        return Check(
            name,
            "unchecked",
            f"only {choice.count} images have maps that are not flat; {FEWEST} are needed",
        )
    if not looks.located():
        return Check(name, "unchecked", f"{told}: {unlike(foreign)}")
    if best == 0:
        sure = choice.sure(SURE_T)
        return Check(
            name, "sound" if sure else "unchecked", told if sure else f"{told}: too near to tell"
        )
    if not choice.sure_against(0, ALARM_T):
        return Check(name, "unchecked", f"{told}: too near to tell")
    remedy = (
        "Import the pack again with --axes column-row."
        if best == 4
        else f"Put the maps upright (they are {ORIENTATIONS[best]}) before the import, or label the images again."
    )
    if not choice.sure(SURE_T):
        others = [
            ORIENTATIONS[h] for h in range(8) if h != best and not choice.sure_against(h, SURE_T)
        ]
        told, remedy = (
            f"{told}: they may as well be {' or '.join(others)}",
            "Give more --images to tell which, then import or label again.",
        )
    return Check(name, "fault", told, remedy)


def coverage(looks: MapCorrelation, declared: str, foreign: bool) -> Check:
    """Whole image or center square: by images whose sides differ."""
    name, (_, o) = "coverage", looks.best()
    long = looks.elongated
    if declared not in looks.footprints or len(looks.footprints) < 2:
        return Check(name, "unchecked", f"of geometry {declared} there is nothing to compare")
    if long.sum() < FEWEST:
        return Check(
            name,
            "unchecked",
            f"{int(long.sum())} of {len(long)} images have sides that differ by a tenth; of square images the whole is the center",
        )
    choice = choose(looks.own[long][:, :, o])
    at, best = looks.footprints.index(declared), choice.best
    told = ", ".join(
        f"{choice.mean[g]:.3f} if they cover {what(footprint)}"
        for g, footprint in enumerate(looks.footprints)
    )
    told = f"maps of {choice.count} images that are not square correlate with the reference's at {told} (t = {choice.over.min():.1f})"
    if choice.count < FEWEST:
        return Check(name, "unchecked", f"{told}: too few images; {FEWEST} are needed")
    if not looks.located():
        return Check(name, "unchecked", f"{told}: {unlike(foreign)}")
    if best == at:
        sure = choice.sure(SURE_T)
        return Check(
            name, "sound" if sure else "unchecked", told if sure else f"{told}: too near to tell"
        )
    if not choice.sure_against(at, ALARM_T):
        return Check(name, "unchecked", f"{told}: too near to tell")
    return Check(
        name,
        "fault",
        f"{told}, but they are taken to cover {what(declared)}",
        f"Import the pack again with --footprint {looks.footprints[best]}, or label the images again.",
    )


def rows_in_place(
    store: ScoreMapStore, looks: MapCorrelation | None, maker: bool, wait: str
) -> Check:
    """Is a map more like the reference's of its own image than like that of the neighbor, which
    mostly is of the same class?

    `maker` says that the reference is the very teacher of this store, whose maps of the same images
    can only be the same.
    """
    name = "rows"
    if looks is None:
        return Check(name, "unchecked", wait or ALONE)
    own, other = looks.of_best(looks.own), looks.of_best(looks.other)
    valid = ~np.isnan(own) & ~np.isnan(other)
    rows, own, other = looks.rows[valid], own[valid], other[valid]
    if len(own) < FEWEST:
        return Check(
            name,
            "unchecked",
            f"only {len(own)} images have maps that are not flat; {FEWEST} are needed",
        )
    t = paired_t(own - other)
    told = (
        f"a map correlates at {own.mean():.3f} with the reference's of its own image and at {other.mean():.3f} with that of a "
        f"neighbor (t = {t:.1f}, {len(own)} images)"
    )
    if maker or looks.reproduced():
        foreign = np.unique(rows[own < OTHER])
        if not len(foreign):
            return Check(name, "sound", told)
        shown = ", ".join(f"row {row} ({store.path_of(row)})" for row in foreign[:NAMED])
        which = (
            "the store's own teacher"
            if maker
            else "a reference that makes most of these maps itself"
        )
        return Check(
            name,
            "fault",
            f"{told}; {which} gives {len(foreign)} of {len(np.unique(rows))} images other maps, the first: {shown}",
            "Import or label again with each map at its image.",
        )
    if looks.located():
        return Check(name, "sound", told)
    return Check(
        name,
        "warning",
        f"{told}: the maps are of other images, or the reference does not know where things are",
        "Give the store's own teacher, or a student that was trained with token labels.",
    )


# ------------------------------------------------------------------------------------------------ numbers for a page


def figures(
    store: ScoreMapStore, seen: Survey, looks: MapCorrelation | None, mapping: Renaming | None
) -> dict:
    """Plain numbers: of the store, histograms, agreement by class, and the images whose label the
    maps doubt most.
    """
    header, good = store.header, seen.good()
    label, top = store.labels[seen.ids[good]], seen.top[good]
    ids, doubt = seen.ids[good], (seen.top_p - seen.label_p)[good]
    worst = np.argsort(-np.where(label != top, doubt, -1), kind="stable")[:60]
    classes = [
        {
            "name": header.class_names[c],
            "images": int(n),
            "agree": float((top[label == c] == c).mean()),
        }
        for c, n in enumerate(
            np.bincount(label, minlength=len(header.class_names))[: len(header.class_names)]
        )
        if n
    ]
    entropy_top = math.log(max(header.num_classes, 2))
    histogram = np.histogram(seen.entropy[good], bins=24, range=(0, entropy_top))[0]
    sizes_found, counts = np.unique(store.palette, return_counts=True)
    return {
        "file": str(store.path),
        "rows": len(store),
        "rows_read": len(seen.ids),
        "header": {
            "side": header.side,
            "top_k": header.top_k,
            "classes": header.num_classes,
            "absent": header.absent,
            "teacher": header.teacher,
            "input_size": header.input_size,
            "geometry": header.geometry,
            "form": header.form,
        },
        "agreement": float((label == top).mean()) if len(label) else None,
        "classes": classes,
        "entropy": {
            "nats_most": entropy_top,
            "mean": float(seen.entropy[good].mean()) if good.any() else None,
            "histogram": histogram.tolist(),
        },
        "palette": {
            "sizes": sizes_found.tolist(),
            "counts": counts.tolist(),
            "mean": float(store.palette.mean()),
        },
        "classes_named": int(seen.named[: header.num_classes].sum()),
        "same_in_every_cell": int(seen.constant[good].sum()),
        "looks": None
        if looks is None
        else {
            "images": len(looks.rows),
            "elongated": int(looks.elongated.sum()),
            "reference_agreement": float((looks.reference_top == looks.labels).mean()),
            "correlation": {
                footprint: dict(
                    zip(ORIENTATIONS, np.nanmean(looks.own[:, g], axis=0).tolist(), strict=True)
                )
                for g, footprint in enumerate(looks.footprints)
            },
            "neighbor": float(np.nanmean(looks.other[:, looks.best()[0], looks.best()[1]])),
        },
        "renaming": None if mapping is None else {"own": mapping.own, "best": mapping.mapped},
        "disagreements": [
            {
                "row": int(ids[n]),
                "path": store.path_of(int(ids[n])),
                "label": named(header.class_names, int(label[n])),
                "says": named(header.class_names, int(top[n])),
                "probability": float(seen.top_p[good][n]),
                "label_probability": float(seen.label_p[good][n]),
            }
            for n in worst.tolist()
            if label[n] != top[n]
        ],
    }
