"""Pictures of class masks, such as a true one and a predicted one, in the same colors."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageColor

from densefeed.pages.templates import INKS

# Classes of this name are left dark, and so are unlabeled pixels.
DARK = "background"
# The ink of classes beyond those of INKS.
GRAY = "#808080"


def draw_classes(
    image: Image.Image, masks: Sequence[np.ndarray], names: Sequence[str]
) -> tuple[list[Image.Image], list[dict]]:
    """Color an image by each of its masks; return the pictures and the key of their colors.

    Masks are int `[height, width]` of the image's size, -1 unlabeled. The classes of most pixels
    have colors of their own.
    """
    every = np.concatenate([mask.ravel() for mask in masks])
    classes, counts = np.unique(every, return_counts=True)
    order = [int(c) for c in classes[np.argsort(-counts, kind="stable")] if c >= 0]
    colored = [c for c in order if names[c] != DARK]
    key = [
        {"name": names[c], "ink": INKS[n] if n < len(INKS) else GRAY} for n, c in enumerate(colored)
    ]
    # The last row is that of class -1.
    table = np.zeros((len(names) + 1, 3), np.float32)
    for c, entry in zip(colored, key, strict=True):
        table[c] = ImageColor.getrgb(entry["ink"])
    below = 0.4 * np.asarray(image, np.float32)
    return [Image.fromarray((below + 0.6 * table[mask]).astype(np.uint8)) for mask in masks], key
