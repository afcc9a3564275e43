"""Audit a store of score maps for faults that no checksum detects.

Such faults are maps that are mirrored, rotated, transposed or shuffled, that cover another part of
the image than declared, that follow another class list, or that hold numbers other than logits.

Evidence comes from up to three sources: the rows of the store; the images (their names, labels and
sizes); and a reference, which is any trained model of the same classes whose maps of a few hundred
images are compared with the stored ones.

Every check reports its evidence in numbers. A check that cannot be made is reported as unchecked:
without a reference nothing is known of orientation and coverage, because the label of an image is
the same however its map is oriented.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np

from densefeed.relabel.reference_match import (
    ALARM_T,
    FOOTPRINT_WORDS,
    MIN_IMAGES,
    ORIENTATIONS,
    SURE_T,
    BestHypothesis,
    MapCorrelation,
    References,
    choose_best,
    look,
    paired_t,
)
from densefeed.relabel.teacher import Teacher, weights_hash
from densefeed.storage.geometry import teacher_window
from densefeed.storage.images import Images, sample_evenly
from densefeed.storage.maintenance import disorder
from densefeed.storage.packs import SURE, label_rows
from densefeed.storage.row_codecs import ScoreMaps, cell_targets
from densefeed.storage.score_maps import ScoreMapStore, StoreHeader
from densefeed.storage.store_folder import open_rows
from densefeed.system.errors import UserError
from densefeed.system.progress import bar
from densefeed.system.terminal import print

# N rows   S cells along a side   k classes a cell   K classes

Verdict = Literal["fault", "warning", "unchecked", "sound"]
VERDICTS = {"fault": "Fault", "warning": "Warning", "unchecked": "Not checked", "sound": "Sound"}

# A store of up to 100,000 rows is read whole. In a larger one, 20,480 evenly spaced rows are read:
# 20 a class of ImageNet, 145 MB.
ALL_ROWS = 100_000
SAMPLED_ROWS = 20_480
ROWS_AT_ONCE = 256
# Rows listed in the evidence of a check.
MAX_NAMED = 5
# Accuracy of maps from which token labels gained in every run of the quickstart's recipes.
GOOD = 0.985
# Least accuracy of the maps with which they did no harm there.
FAIR = 0.93

# Fewer rows cannot be compared with their labels.
MIN_LABELED_ROWS = 100
# Correlation below which two maps are certainly of different images.
OTHER_IMAGE = 0.5
# Rows with equal checksums that are compared, in pairs. The checksums of 1.28 million different
# rows agree by chance 190 times. In a store whose rows are all equal, every row would be compared.
MAX_PAIRS = 2000

# How the teacher's name in a header ends, if it labeled at less than float32. Its maps differ by
# rounding then, far less than those of other images.
PRECISION = re.compile(r" (bf16|fp16)$")
# How the teacher's name in a header ends after several views or a class map.
VIEWS_OR_CLASS_MAP = re.compile(r", \d+ views [0-9a-f]+$| by \S+ [0-9a-f]{8}\b")

OTHER_FOLDER = "Pass the folder that the maps were made for, or label the images again."
LOGITS_FIRST = "the fault of the logits must be fixed first"
# A key of storage.maintenance.disorder.
OVER = "probabilities that sum to more than 1"
# Greatest sum of the probabilities of a cell, each rounded to float16, and perhaps their logarithms
# too.
MOST_SUM = 1.02
NO_REFERENCE = (
    "this check needs a reference model, and none was given: the label of an image is the same "
    "however its map is oriented"
)


# What a check returns: verdict, evidence and, for faults and warnings, a remedy.
Outcome = tuple[str, ...]


class Check(NamedTuple):
    """One check of a store and its outcome."""

    name: str
    verdict: Verdict
    evidence: str  # with numbers
    remedy: str = ""  # one sentence, for faults and warnings


@dataclass
class AuditResult:
    """The checks of a store, and the numbers from which the page is made."""

    store: ScoreMapStore | None
    checks: list[Check]
    figures: dict
    images: Images | None = None
    # int64 [N]: index of each row's image in `images`, -1: none
    image_of: np.ndarray | None = None
    compared: np.ndarray | None = None  # rows whose images were read

    def faults(self) -> list[Check]:
        """Return the checks that found a fault."""
        return [check for check in self.checks if check.verdict == "fault"]

    def to_dict(self) -> dict:
        """Return everything but the maps, for JSON."""
        return {"checks": [check._asdict() for check in self.checks], **self.figures}


# ---------------------------------------------------------------------------------- the whole audit


def audit(
    path: Path,
    images: Images | None = None,
    references: References | None = None,
    count: int = 300,
    every_row: bool = False,
    threads: int = 2,
) -> AuditResult:
    """Audit the store at `path`.

    Args:
        images: those the maps were made for; without them only the rows themselves are checked.
        references: a model of the same classes for `squash` and `center-crop`; needs `images`.
        count: images that are shown to the reference.
        every_row: read all rows even of a store of more than 100,000.

    Raises UserError if the file is not a store, or if an image that is needed cannot be read.
    """
    # ScoreMapStore refuses an unfinished file, so this check reads the file itself, before it.
    missing = check_finished(path)
    if missing[0] == "fault":
        return AuditResult(None, [Check("finished", *missing)], {"file": str(path)})
    store = ScoreMapStore(path)
    # Rows are in the order of the class folders, so even spacing takes its share of every class.
    sampled = len(store) > ALL_ROWS and not every_row
    scan = scan_rows(store, sample_evenly(len(store), SAMPLED_ROWS if sampled else len(store)))
    # Before the other checks: probabilities in the place of logits also give sums above 1, and make
    # every probability computed from them meaningless.
    logits = check_logits(store, scan)
    image_of, match, rows = None, None, np.empty(0, np.int64)
    outcomes = {
        "finished": missing,
        "values": check_values(store, scan, logits[0] == "fault"),
        "logits": logits,
        "class numbers": check_class_numbers(store, scan),
        "images": ("unchecked", "no images were given"),
    }
    if images is not None:
        # By path and not by row number: in a store of another order each map is still compared with
        # its own image, and `check_files` reports the order.
        place = {path: index for index, path in enumerate(images.paths)}
        image_of = np.array([place.get(path, -1) for path in store.paths()])
        outcomes["images"] = check_files(store, images, image_of)
        outcomes["class names"] = check_class_names(store, images, image_of)
    if store.header.absent == "background":
        outcomes["background"] = describe_background(scan)
    outcomes["duplicates"] = check_duplicates(store, images, image_of)
    blocked_by = LOGITS_FIRST if logits[0] == "fault" else ""
    outcomes["class list"], renaming = check_class_list(store, scan, blocked_by)
    if outcomes["class list"][0] == "fault":
        blocked_by = "the fault of the class list must be fixed first"
    if images is not None:
        # `store.rows` raises for rows whose checksum does not match.
        usable = scan.ids[scan.good()]
        rows = neighbors(store.labels, usable[image_of[usable] >= 0], count)
        if len(rows):
            outcomes["windows"] = check_windows(store, images, image_of, rows)
        # Correlations are of probabilities by class, so they need logits and the right class list.
        if references and len(rows) and not blocked_by:
            match = look(store.rows, store.header, images, image_of, rows, references, threads)
    labels = check_labels(store, scan, match, blocked_by)
    unchecked = "unchecked", blocked_by or NO_REFERENCE
    outcomes |= dict.fromkeys(("orientation", "coverage", "rows"), unchecked)
    if match:
        outcomes |= check_layout(store, match, references, labels[0] == "fault")
    outcomes["labels"] = labels
    checks = [Check(name, *outcome) for name, outcome in outcomes.items()]
    # The verdicts are declared with the worst first. The sort is stable, so checks of one verdict
    # keep their order.
    checks.sort(key=lambda check: get_args(Verdict).index(check.verdict))
    figures = summarize(store, scan, match, renaming)
    return AuditResult(store, checks, figures, images, image_of, rows)


def is_own_teacher(store: ScoreMapStore, references: References) -> bool:
    """Whether the reference is the model that made this store, alone and in a single view."""
    header, reference = store.header, references.get(store.header.geometry)
    return (
        reference is not None
        and reference.input_size == header.input_size
        # With several views or merged classes the same weights give other maps.
        and not VIEWS_OR_CLASS_MAP.search(PRECISION.sub("", header.teacher))
        # Last, because it reads all weights.
        and has_own_weights(header, reference)
    )


def has_own_weights(header: StoreHeader, reference: Teacher) -> bool:
    """Whether the reference has the weights of the teacher that made the maps.

    The teacher's name in the header ends with a hash of its weights, before the precision.
    """
    return PRECISION.sub("", header.teacher).endswith(f" {weights_hash(reference.model)}")


def name_rows(store: ScoreMapStore, rows: Iterable[int]) -> str:
    """List rows with their paths."""
    return ", ".join(f"row {row} ({store.image_path(row)})" for row in rows)


# ------------------------------------------------------------------------------ the rows themselves


def check_finished(path: Path) -> Outcome:
    """Check that every row is labeled; else name the first missing rows."""
    file = open_rows(path)
    # Up to the first block that lacks some: a sparse file of a few kilobytes may state billions.
    for first, done in file.blocks("done"):
        missing, count = first + np.flatnonzero(done == 0), first + len(done)
        if len(missing):
            break
    else:
        return "sound", f"all {file.rows:,} rows are labeled"
    (paths,) = file.take(("path",), missing[:MAX_NAMED])
    names = ", ".join(path.decode(errors="replace") for path in paths)
    return (
        "fault",
        f"{len(missing):,} of {count:,} rows are not labeled yet (first: {names})",
        "Run the command that labels or imports again; it does only the missing rows.",
    )


class RowScan:
    """Statistics gathered in one pass over the rows `ids`, int64 `[N]`.

    Arrays are in the order of `ids`. Their values for rows with faults are meaningless.
    """

    def __init__(self, ids: np.ndarray) -> None:
        count = len(ids)
        self.ids = ids
        # The names of the faults of each row that has some.
        self.faults = {}
        # The class of the greatest mean probability over the cells, that probability, and the mean
        # probability of the image's label.
        self.top, self.top_p, self.label_p = np.zeros(count, np.int64), *np.zeros((2, count))
        # Mean over the cells, nats.
        self.entropy = np.zeros(count)
        # Whether a map of several cells is the same in all of them.
        self.constant = np.zeros(count, bool)
        # Classes that occur in any cell. `cls` is uint16, so this has a place for every number.
        self.named = np.zeros(2**16, bool)
        # Least and greatest logit, NaN in rows whose logits cannot be judged.
        self.range = np.full((count, 2), np.nan)
        # Greatest sums of a cell's logits and of their exponentials.
        self.sums = np.zeros((count, 2))
        # Shares of the cells, see `share_sums`.
        self.shares = np.zeros((count, 3))
        # Greatest probability of a class in a cell; 0 in rows with faults.
        self.max_p = np.zeros(count)
        # With `background`: mean over the cells of the probability of the data's classes together,
        # and the share of cells where it is less than half.
        self.mass, self.mostly_none = np.zeros((2, count))

    def good(self) -> np.ndarray:
        """Return which rows have no fault, bool `[N]`."""
        return ~np.isin(self.ids, [*self.faults])


def scan_rows(store: ScoreMapStore, ids: np.ndarray) -> RowScan:
    """Read the rows `ids` once. A damaged row is recorded as a fault of that row."""
    scan = RowScan(ids)
    # `mean_over_cells` makes float64 [N, K]: 64 MiB at 2**23 numbers.
    at_once = max(1, min(ROWS_AT_ONCE, 2**23 // store.header.num_classes))
    starts = range(0, len(ids), at_once)
    for start in bar(starts, "audit, chunks of rows") if len(starts) > 16 else starts:
        at, maps = read_undamaged(store, np.arange(start, min(start + at_once, len(ids))), scan)
        if not len(at):
            continue
        wrong = store.impossible(ids[at], maps) | disorder(store, ids[at], maps)
        bad = np.any(list(wrong.values()), axis=0)
        for n in np.flatnonzero(bad).tolist():
            scan.faults[int(ids[at[n]])] = [kind for kind, rows in wrong.items() if rows[n]]
        # Probabilities beside logsumexps of logits can sum to anything. Rows with no other fault
        # still show which kind of number was stored.
        usable = ~np.any([rows for kind, rows in wrong.items() if kind != OVER], axis=0)
        scan_logits(scan, at[usable], maps.logit[usable], store.header.num_classes)
        if not bad.all():
            scan_probabilities(store, at[~bad], maps.select(~bad), scan)
    return scan


def read_undamaged(
    store: ScoreMapStore, at: np.ndarray, scan: RowScan
) -> tuple[np.ndarray, ScoreMaps | None]:
    """Read those of the rows `scan.ids[at]` that match their checksums; the others become faults.

    Returns the places of these rows in `scan.ids`, and their maps.
    """
    # One damaged row fails the whole chunk. Only then are its rows read one by one.
    try:
        return at, store.rows(scan.ids[at])
    except UserError:
        whole = []
        for n in at.tolist():
            try:
                store.rows(scan.ids[n : n + 1])
                whole.append(n)
            except UserError:
                scan.faults[int(scan.ids[n])] = ["a checksum that does not match"]
        at = np.array(whole, np.int64)
        return at, store.rows(scan.ids[at]) if len(at) else None


def scan_logits(scan: RowScan, at: np.ndarray, logit_NSSk: np.ndarray, num_classes: int) -> None:
    """Gather what `check_logits` needs of the rows `scan.ids[at]`.

    A row with the same logits in every one of several cells, such as an image that was labeled by
    its class, is left out.
    """
    # A map of a single cell has nothing to differ from, and is judged.
    differ = (logit_NSSk != logit_NSSk[:, :1, :1]).any((1, 2, 3)) | (logit_NSSk.shape[1] == 1)
    at, logit = at[differ], logit_NSSk[differ].astype(np.float32)
    if not len(at):
        return
    scan.range[at] = np.stack([logit.min((1, 2, 3)), logit.max((1, 2, 3))], 1)
    # In float32 exp overflows from 89 on. Infinity is above every bound that the sums meet.
    with np.errstate(over="ignore"):
        scan.sums[at] = np.stack([logit.sum(-1).max((1, 2)), np.exp(logit).sum(-1).max((1, 2))], 1)
    scan.shares[at] = share_sums(logit, num_classes)


def share_sums(logit_NSSk: np.ndarray, num_classes: int) -> np.ndarray:
    """Compute the shares of a row's cells whose logits sum to more than 1, to 1, and to too little.

    Too little is less than k / K, which the k greatest of K probabilities always reach. Roundings
    are allowed for. Float64 `[N, 3]`.
    """
    sums = logit_NSSk.sum(-1)
    thin = sums < logit_NSSk.shape[-1] / num_classes / MOST_SUM
    kinds = (sums > MOST_SUM, (sums >= 1 / MOST_SUM) & (sums <= MOST_SUM), thin)
    return np.stack([kind.mean((1, 2)) for kind in kinds], 1)


def scan_probabilities(
    store: ScoreMapStore, at: np.ndarray, maps: ScoreMaps, scan: RowScan
) -> None:
    """Gather classes, probabilities and entropies of the rows `scan.ids[at]`, which are good."""
    header, K = store.header, store.header.num_classes
    named, other = cell_targets(maps, K, header.absent)
    mean_NK = mean_over_cells(named, other, maps.cls, K)
    scan.top[at], scan.top_p[at] = mean_NK.argmax(1), mean_NK.max(1)
    label = store.labels[scan.ids[at]]
    # A label need not be a class of the teacher; its probability is 0 then.
    label_p = mean_NK[np.arange(len(at)), np.minimum(label, K - 1)]
    scan.label_p[at] = np.where(label < K, label_p, 0)
    if header.absent == "background":
        mass_NSS = named.sum(-1)
        scan.mass[at] = mass_NSS.mean((1, 2))
        scan.mostly_none[at] = (mass_NSS < 0.5).mean((1, 2))
        # From here on given that a cell shows one of the classes.
        named = named / np.maximum(mass_NSS, np.finfo(float).tiny)[..., None]
    entropy_NSS = -_plogp(named).sum(-1) - (K - header.top_k) * _plogp(other)
    scan.entropy[at] = entropy_NSS.mean((1, 2))
    same = (maps.cls == maps.cls[:, :1, :1]) & (maps.logit == maps.logit[:, :1, :1])
    scan.constant[at] = same.reshape(len(at), -1).all(1) & (header.side > 1)
    scan.named[np.unique(maps.cls)] = True
    scan.max_p[at] = named.max((1, 2, 3))


def mean_over_cells(
    named: np.ndarray, other: np.ndarray, cls: np.ndarray, num_classes: int
) -> np.ndarray:
    """Average the probability or logit of every class over the cells, float64 `[N, K]`.

    `named` `[N, S, S, k]` are the values of the classes `cls`, `other` `[N, S, S]` is that of each
    other class, as `cell_targets` returns them.
    """
    N = len(named)
    # One bincount over pairs of row and class avoids a dense [N, S, S, K]. Each class starts with
    # the sum of `other`, so only what the named ones have more is counted.
    key = np.arange(N)[:, None, None, None] * num_classes + cls
    more = named - other[..., None]
    total = np.bincount(key.ravel(), more.ravel(), N * num_classes).reshape(N, num_classes)
    return (total + other.sum((1, 2))[:, None]) / other[0].size


def _plogp(p: np.ndarray) -> np.ndarray:
    # p log p is 0 at p = 0; the bound keeps 0 times infinity out.
    return p * np.log(np.maximum(p, 1e-300))


def check_values(store: ScoreMapStore, scan: RowScan, no_logits: bool) -> Outcome:
    """Count damaged rows by kind: checksums, NaN, impossible classes and ranks out of order.

    These are the faults that `maintenance.verify` finds. `no_logits`: `check_logits` found a fault.
    """
    read = len(scan.ids)
    if not scan.faults:
        return "sound", (
            f"checksums, ranges and order hold in the {read:,} of {len(store):,} rows read"
        )
    kinds = Counter(kind for found in scan.faults.values() for kind in found)
    parts = []
    for kind, count in kinds.most_common():
        first = next(row for row, found in scan.faults.items() if kind in found)
        parts.append(
            f"{count:,} row{'s' * (count > 1)} with {kind} (first: {name_rows(store, [first])})"
        )
    evidence = f"{len(scan.faults):,} of {read:,} rows read are bad: {'; '.join(parts)}"
    remedy = "Copy the file again; if that does not help, label or import these images again."
    if no_logits and set(kinds) == {OVER}:
        remedy = "Fix the fault of the logits first: these sums follow from it."
    return "fault", evidence, remedy


def check_logits(store: ScoreMapStore, scan: RowScan) -> Outcome:
    """Find probabilities, or their logarithms, where logits belong.

    Probabilities lie in [0, 1], and those of a cell sum to at most 1. Logarithms of probabilities
    make the named classes the least likely ones where a class that is not named has logit 0.
    """
    header = store.header
    judged, good = ~np.isnan(scan.range[:, 0]), scan.good()
    if not judged.any():
        constant = "every map is the same in all of its cells, as maps made from labels are"
        return "unchecked", constant if good.any() else "no row could be read"
    low, high = scan.range[judged, 0].min(), scan.range[judged, 1].max()
    max_sum, max_exp_sum = scan.sums[judged].max(0)
    shares = scan.shares[judged].mean(0)
    span = f"the logits range from {low:.3g} to {high:.3g}"
    if low >= 0 and high <= MOST_SUM and are_probabilities(high, shares, header.top_k):
        part = "all" if max_sum <= MOST_SUM else f"{100 * (1 - shares[0]):.4g} % of the"
        return (
            "fault",
            f"{span}, and in {part} cells they sum to no more than 1 (greatest sum {max_sum:.3g}): "
            "these are probabilities, not logits",
            "Store the logarithms of these numbers, or label or import again from raw logits.",
        )
    zero_logit = header.absent == "zero-logit" and header.num_classes > header.top_k
    if zero_logit and high <= 0 and max_exp_sum <= MOST_SUM:
        return (
            "fault",
            f"{span}, and the exponentials of a cell sum to at most {max_exp_sum:.3g}: these are "
            "logarithms of probabilities, and a class that is not named, at logit 0, would be the "
            "likeliest",
            "Import again from raw logits, or label with --absent tail.",
        )
    if not (judged & good).any():
        return "unchecked", "no row could be read"
    # If logits lie in [0, 1], the likeliest class has at most e times the probability of any other.
    max_p, limit = scan.max_p[judged].max(), math.e / (header.num_classes - 1 + math.e)
    if max_p > limit:
        return "sound", f"{span}, and the most confident cell gives its class {100 * max_p:.1f} %"
    return (
        "warning",
        f"{span}, and the most confident cell gives its class {100 * max_p:.2g} %, no more than if "
        f"probabilities had been stored as logits ({100 * limit:.2g} %)",
        "Compare a few rows with the teacher's own logits before training on them.",
    )


def describe_background(scan: RowScan) -> Outcome:
    """State how much of the cells shows classes of the data; any sum up to 1 is sound."""
    mass, mostly_none = measure_background(scan)
    if mass is None:
        return "unchecked", "no row could be read"
    return "sound", (
        f"the probability of the data's classes together is {100 * mass:.1f} % on average, and "
        f"less than half in {100 * mostly_none:.1f} % of the cells"
    )


def measure_background(scan: RowScan) -> tuple[float, float] | tuple[None, None]:
    """Average `mass` and `mostly_none` over the good rows; None if there are none."""
    good = scan.good()
    if not good.any():
        return None, None
    return float(scan.mass[good].mean()), float(scan.mostly_none[good].mean())


def are_probabilities(high: float, shares: np.ndarray, top_k: int) -> bool:
    """Decide by the sums of cells whether numbers in [0, 1] are probabilities.

    `high` is the greatest number, `shares` the mean of `share_sums` over the rows.

    The logits of an untrained model are small too. But then none comes near 1, as the probability
    of some cell among hundreds does; or sums of several, mostly similar ones, pass 1; or they fall
    short of what k of K probabilities must reach.
    """
    over, full, thin = shares
    if high < 0.5 or thin > 0.01:
        return False
    # Several logits as great as the greatest would pass 1 by far.
    if top_k * high >= 2 and over == 0:
        return True
    # Probabilities computed from float16 logits can sum to 1.1 where logits pass 100. In digit
    # scenes 1 cell of 10,000 passes 1 by more than 2 %, where 27 % of the cells sum to 1. Sums of
    # logits do not pile up at 1 and end there: as many pass it.
    return bool(high >= 0.9 and full >= 0.05 and over <= min(0.01, full / 10))


def check_class_numbers(store: ScoreMapStore, scan: RowScan) -> Outcome:
    """Find class numbers that were rounded to float16."""
    num_classes = store.header.num_classes
    # Numbers start at 0, so the last of 2,049 classes is 2,048.
    if num_classes <= 2049:
        return "sound", f"float16 represents all {num_classes:,} class numbers exactly"
    beyond = 2049 + np.flatnonzero(scan.named[2049:num_classes])
    # float16 has 11 significant bits: from 2**n on it represents the multiples of 2**(n - 10).
    lost_bits = np.floor(np.log2(beyond)) - 10
    on_grid = beyond % 2**lost_bits == 0
    evidence = (
        f"{len(beyond):,} different classes above 2,048 are named, and {on_grid.sum():,} of them "
        "are exact in float16"
    )
    if not on_grid.all():
        return "sound", evidence
    # All are exact by chance (1/2, 1/4, ... for a class, by its size) once in a million stores.
    bits = lost_bits.sum()
    if bits < 20:
        return "unchecked", f"{evidence}: too few to decide"
    return (
        "fault",
        f"{evidence}; by chance all would be once in 2^{bits:.0f} stores",
        "Class numbers were rounded to float16: label or import again from integers or float32.",
    )


def find_equal_maps(store: ScoreMapStore) -> tuple[list[list[int]], set[int], float]:
    """Compare the maps of rows with equal checksums, at most MAX_PAIRS pairs.

    Returns the pairs of rows with equal maps; the rows that name nothing but their label in every
    cell; and the number of rows with equal checksums per pair that was compared.
    """
    header, order = store.header, np.argsort(store.crcs, kind="stable")
    again = np.flatnonzero(np.diff(store.crcs[order]) == 0)
    compared = again[:MAX_PAIRS]
    pairs, filled = [], set()
    for pair in (order[at : at + 2] for at in compared):
        try:
            maps = store.rows(pair)
        # Reported by `check_values`.
        except UserError:
            continue
        if any((first != second).any() for first, second in maps):
            continue
        # Imports give images without a map their label in every cell, at logit SURE (packs.py).
        by_label = label_rows(store.labels[pair], header.num_classes, header.side, header.top_k)
        if maps.logit[0, 0, 0, 0] >= SURE - 0.5 and (maps.cls == by_label.cls).all():
            filled.update(pair.tolist())
        else:
            pairs.append(pair.tolist())
    return pairs, filled, len(again) / max(len(compared), 1)


def check_duplicates(
    store: ScoreMapStore, images: Images | None, image_of: np.ndarray | None
) -> Outcome:
    """Find different images that share a map.

    Images that occur twice may share one, and so may images that were labeled by their class.
    """
    pairs, filled, scale = find_equal_maps(store)
    note = ""
    if filled:
        note = (
            f"; {len(filled):,} maps name only the label in every cell, as imports do for images "
            "without a map"
        )
    if not pairs:
        return "sound", f"no two images share a map{note}"
    remedy = "Find out which image the map belongs to, and label or import the others again."
    if images is None:
        evidence = (
            f"about {len(pairs) * scale:,.0f} maps occur twice, such as those of "
            f"{name_rows(store, pairs[0])}; whether the images are equal is not known{note}"
        )
        # The training set of ImageNet holds some images twice. A store of which a hundredth is
        # double has a fault of its own.
        if len(pairs) * scale / len(store) > 0.01 or len(pairs) == len(store) - 1:
            return "fault", evidence, remedy
        remedy = "Pass --data: only the images show whether they occur twice too."
        return "warning", evidence, remedy
    different = [
        pair
        for pair in pairs
        if image_of[pair].min() >= 0
        and len({images.read(index) for index in image_of[pair].tolist()}) > 1
    ]
    if not different:
        return "sound", f"{len(pairs):,} maps occur twice, and so do their images{note}"
    evidence = (
        f"about {len(different) * scale:,.0f} maps are shared by different images, such as "
        f"{name_rows(store, different[0])}{note}"
    )
    return "fault", evidence, remedy


# ------------------------------------------------------------------------ names, labels and windows


def check_files(store: ScoreMapStore, images: Images, image_of: np.ndarray) -> Outcome:
    """Check that rows and image files correspond, in order, and that the files are unchanged."""
    paths, parts = store.paths(), []
    without = sorted(set(images.paths) - set(paths))
    if without:
        parts.append(
            f"{len(without):,} of {len(images):,} images have no row "
            f"({', '.join(without[:MAX_NAMED])})"
        )
    gone = [path for path, at in zip(paths, image_of, strict=True) if at < 0]
    if gone:
        parts.append(
            f"{len(gone):,} of {len(store):,} rows have no image ({', '.join(gone[:MAX_NAMED])})"
        )
    # A missing image or row shifts all that follow, so the order is judged only if none is.
    moved = np.flatnonzero(image_of != np.arange(len(store)))
    if not parts and len(moved):
        parts = [
            f"every image has its row, but the order differs, from {name_rows(store, moved[:1])} on"
        ]
    # The fingerprint does not show what has changed, so the other comparisons go first.
    if not parts and not store.describes(images.fingerprint()):
        parts = [
            f"all {len(images):,} names agree, but the fingerprint does not: files or labels have "
            "changed"
        ]
    if parts:
        return "fault", "; ".join(parts), OTHER_FOLDER
    return "sound", f"each of {len(images):,} images has its row, in order, files unchanged"


def check_class_names(store: ScoreMapStore, images: Images, image_of: np.ndarray) -> Outcome:
    """Check that class names and labels are those of `images`."""
    names, known = list(store.header.class_names), np.flatnonzero(image_of >= 0)
    if names != images.class_names:
        shared = sum(a == b for a, b in zip(names, images.class_names, strict=False))
        return (
            "fault",
            f"{shared:,} of {len(names):,} class names equal, place by place, those of the "
            f"folder, which has {len(images.class_names):,}",
            OTHER_FOLDER,
        )
    others = known[images.labels[image_of[known]] != store.labels[known]]
    if not len(others):
        return "sound", f"all {len(names):,} names and all labels are the folder's"
    first = name_rows(store, others[:1])
    return (
        "fault",
        f"rows whose label is not that of their image: {len(others):,} (first: {first})",
        OTHER_FOLDER,
    )


def neighbors(labels: np.ndarray, usable: np.ndarray, count: int) -> np.ndarray:
    """Choose about `count` evenly spaced rows of `usable`, in pairs of neighbors.

    Rows [0] and [1] of the result are a pair, [2] and [3], and so on; a pair has one label if
    possible. Int64.
    """
    if len(usable) < 2 or count < 2:
        return np.empty(0, np.int64)
    pairs = min(count, len(usable)) // 2
    # The last place is len - 2, because a pair needs the row after it.
    at = sample_evenly(len(usable) - 1, pairs)
    label = labels[usable]
    # The last row of a class is paired with the row before it.
    back = (at > 0) & (label[at] != label[at + 1]) & (label[at] == label[at - 1])
    return usable[np.stack([at, np.where(back, at - 1, at + 1)], 1).ravel()]


def check_windows(
    store: ScoreMapStore, images: Images, image_of: np.ndarray, rows: np.ndarray
) -> Outcome:
    """Compare stored windows with those that follow from image sizes and the header's geometry."""
    geometry = store.header.geometry
    if geometry not in ("squash", "center-crop", "letterbox"):
        return "unchecked", (
            f"the windows of geometry {geometry} do not follow from the image sizes"
        )
    stored = store.rows(rows).window
    sizes = map(images.size, image_of[rows].tolist())
    want = np.array([teacher_window(geometry, *size) for size in sizes], np.float32)
    # A generator that crops at whole pixels differs by up to half of one: 1/600 of an image of 300.
    wrong = np.flatnonzero(np.abs(stored - want).max(1) > 2e-3)
    if not len(wrong):
        return "sound", f"all {len(rows):,} rows compared have the window of geometry {geometry}"
    n = wrong[0]
    have, expected = (tuple(part[n].round(3).tolist()) for part in (stored, want))
    return (
        "fault",
        f"{len(wrong):,} of {len(rows):,} rows do not have the window of geometry {geometry}: "
        f"{store.image_path(rows[n])} has {have}, not {expected}",
        "Remove the maps and label again, or import the pack again with its --footprint.",
    )


# -------------------------------------------------------------------------- maps against the labels


class Renaming(NamedTuple):
    """The class that the maps name for each label, learned on half of the rows, tested on the rest.

    Results of the test are bool, one per row tested.
    """

    names: np.ndarray  # int64 [classes]: most frequent top class of a label's rows, -1: no row
    label: np.ndarray  # int64, labels of the rows tested
    own: np.ndarray  # the top class is the label
    renamed: np.ndarray  # the top class is the one in `names`

    def moved(self) -> list[int]:
        """Return the classes whose maps rarely name them, and mostly name one other class.

        A class needs 5 rows. Twins of ImageNet (maillot, missile) split evenly.
        """
        return [
            c
            for c in np.unique(self.label)
            if self.names[c] != c
            and (here := self.label == c).sum() >= 5
            and self.own[here].mean() < 0.1
            and self.renamed[here].mean() > 0.5
        ]


def learn_renaming(label: np.ndarray, top: np.ndarray, classes: int) -> Renaming:
    """Learn on every other row of each label which class the maps name; test on the others."""
    # Learned and tested on different rows: on the rows it was learned from, the renaming always
    # agrees at least as often as the labels.
    learn = np.zeros(len(label), bool)
    order = np.argsort(label, kind="stable")
    # Rows are counted from 0 within each label, so half of every class is for learning.
    starts = np.searchsorted(label[order], label[order])
    learn[order] = (np.arange(len(label)) - starts) % 2 == 0
    pairs, counts = np.unique(label[learn] * classes + top[learn], return_counts=True)
    ascending = pairs[np.argsort(counts, kind="stable")]
    # The most frequent pair of a label is written last.
    names = np.full(classes, -1, np.int64)
    names[ascending // classes] = ascending % classes
    label, top = label[~learn], top[~learn]
    return Renaming(names, label, label == top, names[label] == top)


class Agreement(NamedTuple):
    """How often two columns of classes agree."""

    share: float
    chance: float  # share expected by chance, from the class frequencies of both columns
    error: float  # standard deviation of a share that is due to chance

    def is_significant(self) -> bool:
        """Whether the columns agree more often than by chance."""
        return self.share > self.chance + SURE_T * self.error


def measure_agreement(label: np.ndarray, top: np.ndarray) -> Agreement:
    """Compare two columns of classes, int64 `[N]`, N > 0."""
    N, classes = len(label), max(int(label.max()), int(top.max())) + 1
    label_share, top_share = (np.bincount(c, minlength=classes) / N for c in (label, top))
    chance = float((label_share * top_share).sum())
    # Where the columns share no class, chance is 0. The bound 1 / N makes its error one image.
    error = math.sqrt(max(chance * (1 - chance), 1 / N) / N)
    return Agreement(float((label == top).mean()), chance, error)


def labels_and_tops(
    store: ScoreMapStore, scan: RowScan, blocked_by: str
) -> tuple[np.ndarray, np.ndarray, str]:
    """Return labels and top classes of the usable rows, and why they cannot be compared, or ""."""
    # Maps that are the same in every cell may have been filled from the label.
    good = scan.good() & ~scan.constant
    label, top = store.labels[scan.ids[good]], scan.top[good]
    if not blocked_by and len(label) < MIN_LABELED_ROWS:
        blocked_by = (
            f"{len(label):,} rows are too few to compare with their labels; "
            f"{MIN_LABELED_ROWS} are needed"
        )
    return label, top, blocked_by


def check_class_list(
    store: ScoreMapStore, scan: RowScan, blocked_by: str
) -> tuple[Outcome, Renaming | None]:
    """Find a class list of other classes or order: whole labels are called by other names.

    `blocked_by`, here and below, is why the check cannot be made before another fault is fixed, or
    "".
    """
    names = store.header.class_names
    label, top, blocked_by = labels_and_tops(store, scan, blocked_by)
    if blocked_by:
        return ("unchecked", blocked_by), None
    renaming = learn_renaming(label, top, max(store.header.num_classes, int(label.max()) + 1))
    _, tested, own_N, renamed_N = renaming
    if not len(tested):
        return ("unchecked", "no class has two rows"), None
    t, moved = paired_t(renamed_N.astype(float) - own_N), renaming.moved()
    evidence = (
        f"the class of a map's highest mean probability is the label of the image for "
        f"{100 * own_N.mean():.1f} % of {len(tested):,} images"
    )
    renamed = f"{100 * renamed_N.mean():.1f} %"
    is_other = moved or renamed_N.mean() > 5 * own_N.mean()
    moved = moved or [c for c in np.unique(tested) if renaming.names[c] != c]
    # Another list gives each class a name of its own; a weak teacher has favorites.
    is_other = is_other and len(np.unique(renaming.names[moved])) >= 0.9 * len(moved)
    if t >= ALARM_T and is_other:
        examples = ", ".join(
            f"{names[c]} is called {class_name(names, renaming.names[c])}"
            for c in moved[:MAX_NAMED]
        )
        outcome = (
            "fault",
            f"{evidence}, but for {renamed} once {len(moved):,} classes are renamed ({examples}; "
            f"learned on as many other images, t = {t:.1f})",
            "Remove the maps and label or import again, with the teacher's classes in this order.",
        )
        return outcome, renaming
    agreement = measure_agreement(label, top)
    if agreement.is_significant():
        evidence += (
            f", and no class is called by the name of another (the best renaming gives {renamed})"
        )
        return ("sound", evidence), renaming
    evidence += (
        f"; over all {len(label):,} it is {100 * agreement.share:.1f} %, and by chance it would be "
        f"{100 * agreement.chance:.1f} %: too close to decide whose classes these are"
    )
    return ("unchecked", evidence), renaming


def class_name(names: tuple[str, ...], number: int) -> str:
    """Return the name of a class, or its number where there is no name."""
    return names[number] if 0 <= number < len(names) else f"class {number}"


def measure_accuracy(store: ScoreMapStore, batch: int = 1024) -> float:
    """Compute the top-1 accuracy of stored maps, by the class of the highest mean logit.

    The mean is over the cells, and the accuracy is against the image labels. That mean is the
    output of a teacher with a linear head, so the result should be close to the teacher's own
    accuracy; if it is not, the maps are wrong. A class that a cell does not name counts there with
    the logit it is stored with: 0, or its even share of the remaining probability (of at least
    1e-3, below which float16 keeps nothing of it). With `background` it is the class of the highest
    mean probability instead: a cell counts by how much of it shows classes of the data.
    """
    header, right = store.header, 0
    others = max(header.num_classes - header.top_k, 1)
    for ids in bar(np.array_split(np.arange(len(store)), -(-len(store) // batch)), "read back"):
        maps = store.rows(ids)
        if header.absent == "background":
            named, unnamed = cell_targets(maps, header.num_classes, header.absent)
        else:
            named, lse = maps.logit.astype(np.float64), maps.lse.astype(np.float64)
            remainder = np.maximum(1 - np.exp(named - lse[..., None]).sum(-1), 1e-3) / others
            unnamed = lse + np.log(remainder) if header.absent == "tail" else np.zeros_like(lse)
        mean_NK = mean_over_cells(named, unnamed, maps.cls, header.num_classes)
        right += int((mean_NK.argmax(1) == store.labels[ids]).sum())
    return right / len(store)


def print_accuracy(store: ScoreMapStore, caveat: str = "") -> None:
    """Print the accuracy of stored maps and what such maps were worth in trainings.

    Nothing is printed of images without labels, which a dataset of masks stores as class 0.
    `caveat` is a line about this accuracy; it stands between the two.
    The figures are those of docs/results/quickstart.md and docs/results/photographs.md.
    """
    if store.header.num_classes > 1 and not store.labels.any():
        return
    accuracy = measure_accuracy(store)
    # The audit's is that of the highest mean probability.
    mean = "probability" if store.header.absent == "background" else "logit"
    text = f"accuracy of the stored maps (highest mean {mean}) against the image labels"
    print(f"{text}: {100 * accuracy:.1f} %")
    if caveat:
        print(caveat)
    if accuracy >= GOOD:
        print(
            "good: digit scenes with maps of 99 % gave token-label 0.8 to 3.5 points more than ce"
        )
    elif accuracy >= FAIR:
        print(
            "fair: digit scenes with maps of 94 and 97 % gave token-label no more than ce "
            "(docs/results/quickstart.md); train the same recipe with --objective ce beside it"
        )
    else:
        print(
            f"{100 * accuracy:.1f} % is too low for token labels alone: on photo scenes, maps of "
            "79 % gave token-label 2 to 7 points less than ce, and 1 to 9 more than ce with "
            "--ground-truth intended (docs/results/photographs.md); add it, or take a better "
            "teacher, and train the same recipe with --objective ce beside it"
        )


def check_labels(
    store: ScoreMapStore, scan: RowScan, match: MapCorrelation | None, blocked_by: str
) -> Outcome:
    """Check that maps agree with the labels more often than by chance.

    By chance they agree as often as the class frequencies of both make them.
    """
    label, top, blocked_by = labels_and_tops(store, scan, blocked_by)
    if blocked_by:
        return "unchecked", blocked_by
    agreement = measure_agreement(label, top)
    evidence = (
        f"the class of the highest mean probability of {100 * agreement.share:.1f} % of "
        f"{len(label):,} maps is the label of the image, and by chance it would be "
        f"{100 * agreement.chance:.1f} %"
    )
    if agreement.is_significant():
        return "sound", evidence
    # Where one class has most of the images, maps of other images agree nearly as often too.
    if agreement.chance + SURE_T * agreement.error > 0.8:
        return "unchecked", f"{evidence}: too close to decide"
    if match and match.is_reproduced():
        return (
            "warning",
            f"{evidence}; the reference makes the same maps, so the teacher itself is no better",
            "Choose a teacher that was trained on these classes.",
        )
    return (
        "fault",
        f"{evidence}: these are maps of other images or classes, or of an untrained teacher",
        "Remove the maps, check the teacher's accuracy, and label or import each map at its image.",
    )


# ------------------------------------------------------------------------- maps against a reference


def check_layout(
    store: ScoreMapStore, match: MapCorrelation, references: References, wrong_labels: bool
) -> dict[str, Outcome]:
    """Check orientation, coverage and rows.

    If the reference made these maps, or if the maps do not agree with their labels, maps that do
    not match the reference's can only be of other images (`foreign`).
    """
    own_teacher = is_own_teacher(store, references)
    foreign = own_teacher or wrong_labels
    return {
        "orientation": check_orientation(match, foreign),
        "coverage": check_coverage(match, store.header.geometry, foreign),
        "rows": check_rows(store, match, own_teacher),
    }


def confirm_layout(
    match: MapCorrelation, choice: BestHypothesis, declared: int, evidence: str, foreign: bool
) -> Outcome | None:
    """Return the outcome unless another hypothesis than the declared one is surely better.

    3 standard errors confirm a layout, 5 are a fault.
    """
    if choice.count < MIN_IMAGES:
        return "unchecked", too_few_images(choice.count)
    if not match.is_located():
        if foreign:
            reason = "the maps do not fit the content of these images, see the check of rows"
        else:
            reason = (
                "the reference does not locate objects in these images, or the maps are of other "
                "images of the same classes"
            )
        return "unchecked", f"{evidence}: {reason}"
    if choice.best == declared and choice.is_sure(SURE_T):
        return "sound", evidence
    if choice.best == declared or not choice.beats(declared, ALARM_T):
        return "unchecked", f"{evidence}: too close to decide"
    return None


def check_orientation(match: MapCorrelation, foreign: bool) -> Outcome:
    """Find which of the 8 orientations the maps have, under the footprint that fits best."""
    g, _ = match.best()
    choice = choose_best(match.own[:, g])
    best, second = choice.best, choice.runner_up()
    turned = f", at {choice.mean[best]:.3f} if they are {ORIENTATIONS[best]}" if best else ""
    evidence = (
        f"the maps correlate with the reference's at {choice.mean[0]:.3f} as stored{turned}; the "
        f"next best is {ORIENTATIONS[second]} at {choice.mean[second]:.3f} (t is at least "
        f"{choice.t_over.min():.1f} against every other orientation, {choice.count} images)"
    )
    if outcome := confirm_layout(match, choice, 0, evidence, foreign):
        return outcome
    # The best surely beats the stored orientation, but perhaps not these.
    ties = [ORIENTATIONS[h] for h in range(8) if h != best and not choice.beats(h, SURE_T)]
    if ties:
        evidence += f": they could also be {' or '.join(ties)}"
        remedy = (
            "Compare more images (--images, or --audit-images of an import) to find out which, "
            "then import or label again."
        )
    # --axes column-row exchanges rows and columns, and corrects no other orientation.
    elif best == 4:
        remedy = "Remove the maps and import again with --axes column-row, or label again."
    else:
        remedy = (
            f"Turn the maps upright before the import (they are {ORIENTATIONS[best]}), or label "
            "the images again."
        )
    return "fault", evidence, remedy


def too_few_images(count: int) -> str:
    """Explain that `count` images do not suffice for a verdict."""
    return f"only {count} images have maps that are not flat; {MIN_IMAGES} are needed"


def check_coverage(match: MapCorrelation, declared: str, foreign: bool) -> Outcome:
    """Find whether maps cover the whole image or its center square.

    Only images that are not square show the difference.
    """
    _, o = match.best()
    elongated = match.elongated
    if declared not in match.footprints or len(match.footprints) < 2:
        return "unchecked", f"there is no alternative to compare geometry {declared} with"
    if elongated.sum() < MIN_IMAGES:
        return "unchecked", (
            f"{int(elongated.sum())} of {len(elongated)} images have sides that differ by a tenth, "
            f"and {MIN_IMAGES} are needed; the center square of a square image is the whole image"
        )
    choice = choose_best(match.own[elongated][:, :, o])
    means = ", ".join(
        f"{mean:.3f} if they cover {FOOTPRINT_WORDS[footprint]}"
        for mean, footprint in zip(choice.mean, match.footprints, strict=True)
    )
    evidence = (
        f"the maps of {choice.count} images that are not square correlate with the reference's at "
        f"{means} (t = {choice.t_over.min():.1f})"
    )
    at = match.footprints.index(declared)
    if outcome := confirm_layout(match, choice, at, evidence, foreign):
        return outcome
    found = match.footprints[choice.best]
    return (
        "fault",
        f"{evidence}, but the store declares that they cover {FOOTPRINT_WORDS[declared]}",
        f"Remove the maps and import again with --footprint {found}, or label again.",
    )


def check_rows(store: ScoreMapStore, match: MapCorrelation, own_teacher: bool) -> Outcome:
    """Check that each map is more like the reference's map of its own image than of a neighbor.

    Neighbors are mostly of the same class. `own_teacher`: the reference is the teacher that made
    this store, whose maps of the same images can only be the same.
    """
    own, other = match.in_best_layout(match.own), match.in_best_layout(match.other)
    valid = ~np.isnan(own + other)
    rows, own, other = match.rows[valid], own[valid], other[valid]
    if len(own) < MIN_IMAGES:
        return "unchecked", too_few_images(len(own))
    evidence = (
        f"a map correlates at {own.mean():.3f} with the reference's map of its own image and at "
        f"{other.mean():.3f} with that of a neighbor (t = {paired_t(own - other):.1f}, {len(own)} "
        "images)"
    )
    # Only a model that makes these maps itself shows which single rows are of other images: the
    # maps of another model differ from them in the other rows too.
    if own_teacher or match.is_reproduced():
        # A row can be in two pairs.
        foreign = np.unique(rows[own < OTHER_IMAGE])
        if not len(foreign):
            return "sound", evidence
        maker = "a reference that makes most of these maps itself"
        if own_teacher:
            maker = "the store's own teacher"
        return (
            "fault",
            f"{evidence}; {maker} gives {len(foreign)} of {len(np.unique(rows))} images other maps "
            f"(first: {name_rows(store, foreign[:MAX_NAMED])})",
            "Remove the maps and import or label again, each map at its image.",
        )
    if match.is_located():
        return "sound", evidence
    return (
        "warning",
        f"{evidence}: the maps are of other images, or the reference does not locate objects",
        "Use the store's own teacher as reference, or a student trained with token labels.",
    )


# ---------------------------------------------------------------------------- numbers for the page


def summarize(
    store: ScoreMapStore, scan: RowScan, match: MapCorrelation | None, renaming: Renaming | None
) -> dict:
    """Collect plain numbers for the page and JSON.

    They describe the store, histograms, the agreement by class, and the images whose maps disagree
    most with their labels.
    """
    header, good = store.header, scan.good()
    label, top = store.labels[scan.ids[good]], scan.top[good]
    # With one class log(K) is 0, which is not a range for a histogram.
    entropy, max_entropy = scan.entropy[good], math.log(max(header.num_classes, 2))
    histogram = np.histogram(entropy, bins=24, range=(0, max_entropy))[0]
    sizes, counts = np.unique(store.palette, return_counts=True)
    return {
        "file": str(store.path),
        "rows": len(store),
        "rows_read": len(scan.ids),
        "header": {
            "side": header.side,
            "top_k": header.top_k,
            "classes": header.num_classes,
            "absent": header.absent,
            "teacher": header.teacher,
            "input_size": header.input_size,
            "geometry": header.geometry,
            "form": header.form,
            "fingerprint": header.fingerprint,
        },
        "agreement": float((label == top).mean()) if len(label) else None,
        "classes": [
            {"name": name, "images": int(here.sum()), "agree": float((top[here] == c).mean())}
            for c, name in enumerate(header.class_names)
            if (here := label == c).any()
        ],
        "entropy": {
            "nats_most": max_entropy,
            "mean": float(entropy.mean()) if good.any() else None,
            "histogram": histogram.tolist(),
        },
        "palette": {
            "sizes": sizes.tolist(),
            "counts": counts.tolist(),
            "mean": float(store.palette.mean()),
        },
        "classes_named": int(scan.named[: header.num_classes].sum()),
        "background": dict(zip(("mass", "mostly_none"), measure_background(scan), strict=True))
        if header.absent == "background"
        else None,
        "same_in_every_cell": int(scan.constant[good].sum()),
        "reference": match and match.summarize(),
        "renaming": renaming
        and {"own": float(renaming.own.mean()), "best": float(renaming.renamed.mean())},
        "disagreements": find_disagreements(store, scan),
    }


def find_disagreements(store: ScoreMapStore, scan: RowScan) -> list[dict]:
    """List up to 60 rows, those first whose maps prefer another class most over the label."""
    names, label = store.header.class_names, store.labels[scan.ids]
    disagrees = scan.good() & (label != scan.top)
    # -1 sorts the rows that agree behind all others.
    excess = np.where(disagrees, scan.top_p - scan.label_p, -1)
    return [
        {
            "row": int(scan.ids[n]),
            "path": store.image_path(scan.ids[n]),
            "label": class_name(names, label[n]),
            "top_class": class_name(names, scan.top[n]),
            "probability": float(scan.top_p[n]),
            "label_probability": float(scan.label_p[n]),
        }
        for n in np.argsort(-excess, kind="stable")[:60]
        if disagrees[n]
    ]


# ------------------------------------------------------------------------------------ the terminal


def print_checks(result: AuditResult) -> None:
    """Print a line for each check, faults first."""
    for check in result.checks:
        remedy = f". {check.remedy}" if check.remedy else ""
        print(f"{VERDICTS[check.verdict].lower():>12}  {check.name}: {check.evidence}{remedy}")


def raise_on_faults(result: AuditResult, path: Path, hint: str) -> None:
    """Raise UserError, for exit code 2, if a fault was found; `hint` says where remedies are."""
    faults = result.faults()
    if faults:
        names = ", ".join(check.name for check in faults)
        raise UserError(
            f"{path}: the audit found {len(faults)} "
            f"fault{'s' * (len(faults) > 1)} ({names}); {hint}"
        )
