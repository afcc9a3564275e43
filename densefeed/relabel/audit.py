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
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from densefeed.relabel.checks.images import check_class_names, check_files, check_windows, neighbors
from densefeed.relabel.checks.labels import Renaming, check_class_list, check_labels, class_name
from densefeed.relabel.checks.outcome import VERDICTS, Check, Verdict
from densefeed.relabel.checks.reference import check_layout
from densefeed.relabel.checks.rows import (
    RowScan,
    check_class_numbers,
    check_duplicates,
    check_finished,
    check_logits,
    check_values,
    describe_background,
    measure_background,
    scan_rows,
)
from densefeed.relabel.reference_match import MapCorrelation, References, look
from densefeed.storage.images import Images, sample_evenly
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError
from densefeed.system.terminal import print

# A store of up to 100,000 rows is read whole. In a larger one, 20,480 evenly spaced rows are read:
# 20 a class of ImageNet, 145 MB.
ALL_ROWS = 100_000
SAMPLED_ROWS = 20_480
LOGITS_FIRST = "the fault of the logits must be fixed first"
NO_REFERENCE = (
    "this check needs a reference model, and none was given: the label of an image is the same "
    "however its map is oriented"
)


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
        # A list may name an image several times, so a row's own place comes first.
        image_of = np.array(
            [
                row if images.paths[row : row + 1] == [path] else place.get(path, -1)
                for row, path in enumerate(store.paths())
            ]
        )
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
