"""The accuracy of stored maps against the image labels, and what such maps were worth."""

import numpy as np

from densefeed.storage.row_codecs import cell_targets
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.progress import bar
from densefeed.system.terminal import print

# N rows   S cells along a side   k classes a cell   K classes

# Accuracy of maps from which token labels gained in every run of the quickstart's recipes.
GOOD = 0.985
# Least accuracy of the maps with which they did no harm there.
FAIR = 0.93


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


def print_accuracy(store: ScoreMapStore, caveat: str = "") -> None:
    """Print the accuracy of stored maps and what such maps were worth in trainings.

    `caveat` is a line about this accuracy; it stands between the two.
    The figures are those of docs/results/quickstart.md and docs/results/photographs.md.
    """
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
