"""Draw docs/images/labels.svg: from an image over its score map to the labels of a crop's tokens.

    python docs/figure.py

The scene is drawn, so no photograph is needed, and its score map is exact: a cell has the shares of
the classes that cover it. Crop and token labels come from the code that trainings use
(`crop_views`, `sparse_targets`).
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from densefeed.pages.tokens import label_tokens
from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.storage.geometry import WHOLE, crop_views, visible_boxes

OUT = Path(__file__).parent / "images" / "labels.svg"
NAMES = ("background", "circle", "triangle", "square")
MARKS = ("", "C", "T", "S")
# Okabe and Ito's colors, which color-blind readers can tell apart; letters repeat what they say.
INKS = ("#e3e7ea", "#0072b2", "#d55e00", "#009e73")
# Pixels of the image, of a panel and of what is around it.
IMAGE, PANEL, GAP, TOP = 240, 218, 40, 66
WIDTH, HEIGHT = 4 * PANEL + 5 * GAP - 32, TOP + PANEL + 78
CELLS, GRID = 12, 7  # of the map and of tokens, along a side
CROP_TLHW = (26.0, 97.0, 137.0, 137.0)
# A class is where its function of x and y, in pixels of the image, is true.
SHAPES: dict[int, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    1: lambda x, y: (x - 76) ** 2 + (y - 148) ** 2 < 66**2,
    2: lambda x, y: (y < 118) & (y - 34 > 1.75 * abs(x - 172)),
    3: lambda x, y: (abs(x - 199) < 30) & (abs(y - 198) < 30),
}
DRAWN = (
    f'<circle cx="76" cy="148" r="66" fill="{INKS[1]}"/>'
    f'<path d="M172 34L220 118H124Z" fill="{INKS[2]}"/>'
    f'<rect x="169" y="168" width="60" height="60" fill="{INKS[3]}"/>'
)


def score_map() -> np.ndarray:
    """Return the share of each class in each cell, `[S, S, K]`."""
    at = (np.arange(IMAGE) + 0.5)[None], (np.arange(IMAGE) + 0.5)[:, None]
    classes = np.zeros((IMAGE, IMAGE), int)
    for number, is_in in SHAPES.items():
        classes[is_in(*at)] = number
    one_hot = np.eye(len(NAMES))[classes]
    side = IMAGE // CELLS
    return one_hot.reshape(CELLS, side, CELLS, side, len(NAMES)).mean((1, 3))


def make_batch(share_SSK: np.ndarray) -> tuple[Batch, ScoreMapSpec]:
    """Return the crop as a loader would deliver it, with this score map."""
    logit = np.log(share_SSK.clip(1e-3))
    order = np.argsort(-logit, axis=-1, kind="stable")
    size = np.array([IMAGE])
    view = crop_views(np.array([CROP_TLHW]), np.array([False]), size, size)
    one = torch.zeros(1, dtype=torch.int64)
    batch = Batch(
        image=torch.zeros(1, PANEL, PANEL, 3, dtype=torch.uint8),
        label=one + 1,
        view=torch.from_numpy(view),
        shown=torch.from_numpy(visible_boxes(view)),
        index=one,
        repeat=one,
        weight=torch.ones(1),
        map_logit=torch.from_numpy(np.take_along_axis(logit, order, -1)).half()[None],
        map_class=torch.from_numpy(order.astype(np.uint16))[None],
        map_lse=torch.from_numpy(np.log(np.exp(logit).sum(-1))).half()[None],
        window=torch.tensor([WHOLE]),
        axis_aligned=True,
    )
    count = len(NAMES)
    return batch, ScoreMapSpec(CELLS, count, count, "tail", count, 1.0)


def cells(class_T: np.ndarray, side: int) -> str:
    """Draw a table of classes, row by row: a color and a letter for each, in a panel."""
    step, parts = PANEL / side, []
    for at, number in enumerate(class_T.tolist()):
        y, x = divmod(at, side)
        parts.append(
            f'<rect x="{x * step:.1f}" y="{y * step:.1f}" width="{step:.1f}" height="{step:.1f}" '
            f'fill="{INKS[number]}" stroke="#ffffff" stroke-width="1.5"/>'
        )
        if MARKS[number]:
            middle = f'x="{(x + 0.5) * step:.1f}" y="{(y + 0.5) * step:.1f}"'
            parts.append(
                f'<text {middle} fill="#ffffff" font-weight="700" font-size="{0.62 * step:.1f}" '
                f'text-anchor="middle" dominant-baseline="central">{MARKS[number]}</text>'
            )
    return "".join(parts)


def frame() -> str:
    """Draw the crop's border over the image or its map."""
    top, left, height, width = (value * PANEL / IMAGE for value in CROP_TLHW)
    box = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" fill="none"'
    return (
        f'<rect {box} stroke="#ffffff" stroke-width="6"/>'
        f'<rect {box} stroke="#1f2328" stroke-width="3" stroke-dasharray="9 5"/>'
    )


def scene(view_box: str) -> str:
    """Draw the part of the scene that `view_box` names, as large as a panel."""
    ground = f'<rect width="{IMAGE}" height="{IMAGE}" fill="{INKS[0]}"/>'
    return f'<svg width="{PANEL}" height="{PANEL}" viewBox="{view_box}">{ground}{DRAWN}</svg>'


def draw() -> str:
    """Return the figure, an SVG."""
    share_SSK = score_map()
    batch, spec = make_batch(share_SSK)
    token_NT, _ = label_tokens(batch, spec, GRID)
    top, left, height, width = CROP_TLHW
    panels = (
        ("1  Image", 'its label: "circle"', scene(f"0 0 {IMAGE} {IMAGE}") + frame()),
        ("2  Score map", "teacher, once", cells(share_SSK.argmax(-1).ravel(), CELLS) + frame()),
        ("3  Random crop", "what the student sees", scene(f"{left} {top} {width} {height}")),
        ("4  Token labels", "read from 2 at the crop", cells(token_NT[0], GRID)),
    )
    parts = []
    for at, (title, note, body) in enumerate(panels):
        x = GAP - 16 + at * (PANEL + GAP)
        parts.append(
            f'<text x="{x}" y="28" font-weight="700" font-size="22" fill="#1f2328">{title}</text>'
            f'<text x="{x}" y="52" font-size="18" fill="#59636e">{note}</text>'
            f'<g transform="translate({x} {TOP})">{body}<rect width="{PANEL}" height="{PANEL}" '
            'fill="none" stroke="#59636e"/></g>'
        )
        if at:
            y, end = TOP + PANEL / 2, x - 8
            parts.append(
                f'<path d="M{end - 22} {y}h18m-9 -8l10 8l-10 8" fill="none" stroke="#1f2328" '
                'stroke-width="3"/>'
            )
    x, y = GAP - 16, TOP + PANEL + 44
    for ink, name, mark in zip(INKS, NAMES, MARKS, strict=True):
        parts.append(
            f'<rect x="{x}" y="{y - 14}" width="28" height="28" fill="{ink}" stroke="#59636e"/>'
            f'<text x="{x + 14}" y="{y}" fill="#ffffff" font-weight="700" font-size="18" '
            f'text-anchor="middle" dominant-baseline="central">{mark}</text>'
            f'<text x="{x + 38}" y="{y}" font-size="18" fill="#1f2328" '
            f'dominant-baseline="central">{name}</text>'
        )
        x += 78 + 10 * len(name)
    parts.append(
        f'<path d="M{x} {y}h44" stroke="#1f2328" stroke-width="3" stroke-dasharray="9 5"/>'
        f'<text x="{x + 54}" y="{y}" font-size="18" fill="#1f2328" dominant-baseline="central">the '
        "crop</text>"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui, Helvetica, Arial, sans-serif">'
        "<title>From an image over its score map to the labels of a crop's tokens</title>"
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    )
    return "\n".join([head, *parts, "</svg>\n"])


if __name__ == "__main__":
    OUT.write_text(draw())
