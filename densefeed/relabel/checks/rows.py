"""Check the rows of a store by themselves: damage, values, class numbers, equal maps."""

import math
from collections import Counter
from pathlib import Path

import numpy as np

from densefeed.relabel.accuracy import mean_over_cells
from densefeed.relabel.checks.outcome import MAX_NAMED, Outcome, name_rows
from densefeed.storage.images import Images
from densefeed.storage.maintenance import disorder
from densefeed.storage.packs import SURE, label_rows
from densefeed.storage.row_codecs import ScoreMaps, cell_targets
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.storage.store_folder import open_rows
from densefeed.system.errors import UserError
from densefeed.system.progress import bar

# N rows   S cells along a side   k classes a cell   K classes

ROWS_AT_ONCE = 256
# Rows with equal checksums that are compared, in pairs. The checksums of 1.28 million different
# rows agree by chance 190 times. In a store whose rows are all equal, every row would be compared.
MAX_PAIRS = 2000
# A key of storage.maintenance.disorder.
OVER = "probabilities that sum to more than 1"
# Greatest sum of the probabilities of a cell, each rounded to float16, and perhaps their logarithms
# too.
MOST_SUM = 1.02


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
