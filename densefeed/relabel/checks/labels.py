"""Check maps against the labels of their images: the class list, and more than chance."""

import math
from typing import NamedTuple

import numpy as np

from densefeed.relabel.checks.outcome import MAX_NAMED, Outcome
from densefeed.relabel.checks.rows import RowScan
from densefeed.relabel.reference_match import ALARM_T, SURE_T, MapCorrelation, paired_t
from densefeed.storage.score_maps import ScoreMapStore

# N rows

# Fewer rows cannot be compared with their labels.
MIN_LABELED_ROWS = 100


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
