"""Check maps against those of a reference model: orientation, coverage and rows."""

import re

import numpy as np

from densefeed.relabel.checks.outcome import MAX_NAMED, Outcome, name_rows
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
    paired_t,
)
from densefeed.relabel.teacher import Teacher, weights_hash
from densefeed.storage.score_maps import ScoreMapStore, StoreHeader

# Correlation below which two maps are certainly of different images.
OTHER_IMAGE = 0.5
# How the teacher's name in a header ends, if it labeled at less than float32. Its maps differ by
# rounding then, far less than those of other images.
PRECISION = re.compile(r" (bf16|fp16)$")
# How the teacher's name in a header ends after several views or a class map.
VIEWS_OR_CLASS_MAP = re.compile(r", \d+ views [0-9a-f]+$| by \S+ [0-9a-f]{8}\b")


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
