"""Draw docs/images: from an image over its score map to the labels of a crop's tokens.

    python docs/figure.py

photograph.svg and labels.svg show it in four steps, any-loop.svg what a loop of one's own passes
along. photograph.svg has two photographs of scikit-image, both CC0, as one image, and the score map
of EfficientNet-Lite2: it needs the extra `photos`. The other scene is drawn, and its score map is
exact: a cell has the shares of the classes that cover it. Crops and token labels come from the code
that trainings use (`crop_views`, `View`, `sparse_targets`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timm.data import ImageNetInfo
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from densefeed.pages.templates import picture
from densefeed.pages.tokens import draw_labels, label_tokens
from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.views import View
from densefeed.relabel.load_teacher import load_teacher
from densefeed.storage.geometry import WHOLE, crop_views, visible_boxes
from densefeed.storage.scenes import load_photographs

OUT = Path(__file__).parent / "images"
NAMES = ("background", "circle", "triangle", "square")
MARKS = ("", "C", "T", "S")
# Okabe and Ito's colors, which color-blind readers can tell apart; letters repeat what they say.
INKS = ("#e3e7ea", "#0072b2", "#d55e00", "#009e73")
# Pixels of the image, of a panel and of what is around it.
IMAGE, PANEL, GAP, TOP = 240, 218, 40, 66
WIDTH, HEIGHT = 4 * PANEL + 5 * GAP - 32, TOP + PANEL + 78
CELLS, GRID = 12, 7  # of the map and of tokens, along a side
CROP_TLHW = (26.0, 97.0, 137.0, 137.0)
# The crop of any-loop.svg, of the image rotated by this angle in degrees.
ANGLE, ROTATED_TLHW = 20.0, (44, 84, 124, 124)
# What photograph.svg shows of its two photographs: left, top, right and bottom in pixels.
PHOTOGRAPHS = {"chelsea": (0, 20, 451, 245.5), "coffee": (0, 60, 600, 360)}
TEACHER, TEACHER_SIZE = "densefeed.models.efficientnet_lite:lite2", 448
# The crop of photograph.svg, and its tokens along a side.
COFFEE_TLHW, COFFEE_GRID = (76.0, 34.0, 152.0, 152.0), 8
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


def make_batch(
    share_SSK: np.ndarray, view_N23: Tensor, shown_N4: Tensor
) -> tuple[Batch, ScoreMapSpec]:
    """Return a crop as a loader would deliver it, with this score map."""
    logit = np.log(share_SSK.clip(1e-4))
    order = np.argsort(-logit, axis=-1, kind="stable")
    one, (side, _, count) = torch.zeros(1, dtype=torch.int64), share_SSK.shape
    batch = Batch(
        image=torch.zeros(1, PANEL, PANEL, 3, dtype=torch.uint8),
        label=one + 1,
        view=view_N23.float(),
        shown=shown_N4.float(),
        index=one,
        repeat=one,
        weight=torch.ones(1),
        map_logit=torch.from_numpy(np.take_along_axis(logit, order, -1)).half()[None],
        map_class=torch.from_numpy(order.astype(np.uint16))[None],
        map_lse=torch.from_numpy(np.log(np.exp(logit).sum(-1))).half()[None],
        window=torch.tensor([WHOLE]),
        axis_aligned=not view_N23[:, [0, 1], [1, 0]].any(),
    )
    return batch, ScoreMapSpec(side, count, count, "tail", count, 1.0)


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


def crop_view(box_tlhw: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Return the view of an upright crop, `[1, 2, 3]`, and what it shows, `[1, 4]`."""
    size = np.array([IMAGE])
    view = crop_views(np.array([box_tlhw]), np.array([False]), size, size)
    return torch.from_numpy(view), torch.from_numpy(visible_boxes(view))


def rotated_view() -> tuple[Tensor, Tensor]:
    """Return the view of the crop of any-loop.svg, as torchvision's functionals leave it."""
    view = F.rotate(View.identity(torch.empty(3, IMAGE, IMAGE)), ANGLE)
    view = F.resized_crop(view, *ROTATED_TLHW, [PANEL, PANEL])
    return view.matrix[None], view.shown[None]


def frame(view_23: Tensor) -> str:
    """Draw the crop's border over the image or its map."""
    corners = torch.tensor([[0, 0, 1], [1, 0, 1], [1, 1, 1], [0, 1, 1]]).to(view_23.dtype)
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (PANEL * corners @ view_23.mT).tolist())
    polygon = f'<polygon points="{points}" fill="none"'
    return (
        f'{polygon} stroke="#ffffff" stroke-width="6"/>'
        f'{polygon} stroke="#1f2328" stroke-width="3" stroke-dasharray="9 5"/>'
    )


def scene(view_23: Tensor, content: str = DRAWN) -> str:
    """Draw the part of a scene that a view shows, as large as a panel."""
    rows = torch.cat([view_23.double(), torch.tensor([[0.0, 0, 1]]).double()])
    # From pixels of the image to those of the panel, column by column as SVG writes a matrix.
    pixels = torch.tensor([IMAGE, IMAGE, 1]).double()
    matrix = (PANEL * rows.inverse()[:2] / pixels).mT.flatten().tolist()
    ground = f'<rect width="{IMAGE}" height="{IMAGE}" fill="{INKS[0]}"/>'
    numbers = " ".join(f"{number:.5g}" for number in matrix)
    return (
        f'<svg width="{PANEL}" height="{PANEL}"><g transform="matrix({numbers})">{ground}{content}'
        "</g></svg>"
    )


def panel(x: float, y: float, title: str, note: str, body: str) -> str:
    """Draw a panel whose upper left corner is at (x, y), with its title above."""
    return (
        f'<text x="{x}" y="{y - 38}" font-weight="700" font-size="22" fill="#1f2328">{title}</text>'
        f'<text x="{x}" y="{y - 14}" font-size="18" fill="#59636e">{note}</text>'
        f'<g transform="translate({x} {y})">{body}<rect width="{PANEL}" height="{PANEL}" '
        'fill="none" stroke="#59636e"/></g>'
    )


def arrow(x: float, y: float, length: float, turn: int = 0) -> str:
    """Draw an arrow from (x, y) to the right, turned clockwise by degrees."""
    return (
        f'<path d="M0 0h{length - 4}m-9 -8l10 8l-10 8" fill="none" stroke="#1f2328" '
        f'stroke-width="3" transform="translate({x} {y}) rotate({turn})"/>'
    )


def text(x: float, y: float, words: str, how: str = "") -> str:
    """Draw a line of text whose left or, as `how` says, middle is at (x, y)."""
    return f'<text x="{x}" y="{y}" font-size="18" fill="#1f2328" {how}>{words}</text>'


def key(y: float) -> str:
    """Draw the colors and letters of the classes, and the line of a crop."""
    x, parts = GAP - 16, []
    for ink, name, mark in zip(INKS, NAMES, MARKS, strict=True):
        parts.append(
            f'<rect x="{x}" y="{y - 14}" width="28" height="28" fill="{ink}" stroke="#59636e"/>'
            f'<text x="{x + 14}" y="{y}" fill="#ffffff" font-weight="700" font-size="18" '
            f'text-anchor="middle" dominant-baseline="central">{mark}</text>'
            + text(x + 38, y, name, 'dominant-baseline="central"')
        )
        x += 78 + 10 * len(name)
    line = f'<path d="M{x} {y}h44" stroke="#1f2328" stroke-width="3" stroke-dasharray="9 5"/>'
    return "".join([*parts, line, text(x + 54, y, "the crop", 'dominant-baseline="central"')])


def wrap(width: float, height: float, title: str, parts: list[str]) -> str:
    """Return an SVG of these parts. Its ground is white, also on a dark page."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="system-ui, Helvetica, Arial, sans-serif">'
        f'<title>{title}</title><rect width="{width}" height="{height}" fill="#ffffff"/>'
    )
    return "\n".join([head, *parts, "</svg>\n"])


def row_of_panels(panels: Sequence[tuple[str, str, str]]) -> list[str]:
    """Draw panels, each of a title, a note and a body, with arrows between them."""
    parts = []
    for at, content in enumerate(panels):
        x = GAP - 16 + at * (PANEL + GAP)
        parts.append(panel(x, TOP, *content))
        if at:
            parts.append(arrow(x - 30, TOP + PANEL / 2, 23))
    return parts


def washes(labels: dict) -> str:
    """Draw the cells of `draw_labels` over a panel, more opaque at higher probabilities."""
    return "".join(
        f'<rect x="{PANEL * cell["x"]:.1f}" y="{PANEL * cell["y"]:.1f}" '
        f'width="{PANEL * cell["w"]:.1f}" height="{PANEL * cell["h"]:.1f}" '
        f'fill="{cell["ink"]}" fill-opacity="{cell["opacity"]}" stroke="#ffffff" '
        'stroke-opacity="0.5" stroke-width="0.7"/>'
        for cell in labels["cells"]
    )


def draw_photograph() -> str:
    """Return photograph.svg."""
    side = 2 * IMAGE
    image, info = Image.new("RGB", (side, side)), ImageNetInfo("imagenet-1k")
    for at, (photograph, box) in enumerate(
        zip(load_photographs(tuple(PHOTOGRAPHS)), PHOTOGRAPHS.values(), strict=True)
    ):
        image.paste(photograph.resize((side, side // 2), box=box), (0, at * side // 2))
    names, size = info.label_names(), (TEACHER_SIZE, TEACHER_SIZE)
    teacher, _ = load_teacher([TEACHER], [], size[:1], (), names, "squash", 1, 1)
    pixels = torch.from_numpy(np.array(image.resize(size, teacher.interpolation)))
    with torch.no_grad():
        share_SSK = teacher.eval()(pixels[None, None])[0].softmax(-1).numpy()
    view, shown = crop_view(COFFEE_TLHW)
    token_NT, probability_NT = label_tokens(*make_batch(share_SSK, view, shown), COFFEE_GRID)
    tokens = [part[0].reshape(COFFEE_GRID, -1) for part in (token_NT, probability_NT)]
    short = [info.label_name_to_description(name).split(",")[0] for name in names]
    labels = draw_labels(share_SSK.argmax(-1), share_SSK.max(-1), short, beside=[tokens])
    # Twice as many pixels as units: screens of high density show it at its full size.
    content = f'<image width="{IMAGE}" height="{IMAGE}" href="{picture(image, "JPEG")}"/>'
    whole, line = torch.eye(2, 3), frame(view[0])
    used = '<use href="#photograph"/>'
    panels = (
        ("1  Image", 'its label: "Egyptian cat"', scene(whole, used) + line),
        ("2  Score map", "teacher, once", scene(whole, used) + washes(labels) + line),
        ("3  Random crop", "what the student sees", scene(view[0], used)),
        (
            "4  Token labels",
            "read from 2 at the crop",
            scene(view[0], used) + washes(labels["beside"][0]),
        ),
    )
    y, x = TOP + PANEL + 44, GAP - 16
    parts = [f'<defs><g id="photograph">{content}</g></defs>', *row_of_panels(panels)]
    named = {}
    for cell in labels["cells"]:
        row, column = (round(cell[at] * len(share_SSK)) for at in "yx")
        named.setdefault(short[share_SSK[row, column].argmax()], cell["ink"])
    for name, ink in named.items():
        parts.append(
            f'<rect x="{x}" y="{y - 14}" width="28" height="28" fill="{ink}" '
            'stroke="#59636e"/>' + text(x + 38, y, name, 'dominant-baseline="central"')
        )
        x += 78 + 10 * len(name)
    parts.append(text(x, y, "more opaque: more probable", 'dominant-baseline="central"'))
    title = "A cat and an espresso in one image: its label, score map, crop and token labels"
    return wrap(WIDTH, HEIGHT, title, parts)


def draw_shapes() -> str:
    """Return labels.svg."""
    share_SSK, (view, shown) = score_map(), crop_view(CROP_TLHW)
    token_NT, _ = label_tokens(*make_batch(share_SSK, view, shown), GRID)
    map_cells = cells(share_SSK.argmax(-1).ravel(), CELLS)
    panels = (
        ("1  Image", 'its label: "circle"', scene(torch.eye(2, 3)) + frame(view[0])),
        ("2  Score map", "teacher, once", map_cells + frame(view[0])),
        ("3  Random crop", "what the student sees", scene(view[0])),
        ("4  Token labels", "read from 2 at the crop", cells(token_NT[0], GRID)),
    )
    title = "From an image over its score map to the labels of a crop's tokens"
    return wrap(WIDTH, HEIGHT, title, [*row_of_panels(panels), key(TOP + PANEL + 44)])


def draw_any_loop() -> str:
    """Return any-loop.svg."""
    share_SSK, (view, shown) = score_map(), rotated_view()
    token_NT, _ = label_tokens(*make_batch(share_SSK, view, shown), GRID)
    map_cells = cells(share_SSK.argmax(-1).ravel(), CELLS)
    left, middle, right = GAP - 16, GAP - 16 + PANEL, 2 * PANEL + 240
    lower, end = TOP + PANEL + 120, right + PANEL
    above, below = TOP + PANEL / 2, lower + PANEL / 2
    centered = 'text-anchor="middle"'
    between = (middle + right) / 2
    parts = [
        panel(
            left, TOP, "Image", "item 7 of your dataset", scene(torch.eye(2, 3)) + frame(view[0])
        ),
        panel(right, TOP, "Crop", "the input of your model", scene(view[0])),
        panel(left, lower, "Score map", "row 7 of the store", map_cells + frame(view[0])),
        panel(right, lower, "Targets", "a label for every token", cells(token_NT[0], GRID)),
        arrow(middle + 12, above, right - middle - 24),
        text(between, above - 14, "your transform", centered),
        arrow(between, above + 10, 102, 90),
        text(between, above + 138, "View", f'font-weight="700" {centered}'),
        text(between, above + 162, "where the crop is", centered),
        arrow(between, above + 176, below - above - 190, 90),
        arrow(middle + 12, below, right - middle - 24),
        text(between, below + 28, "labels.targets()", centered),
        arrow(end + 12, above, 56),
        text(end + 78, above + 6, "model, logits"),
        arrow(end + 12, below, 56),
        text(end + 78, below + 6, "loss"),
        arrow(end + 98, above + 24, below - above - 46, 90),
    ]
    title = (
        "A View says where the crop is; the score map is read there for the labels of its tokens"
    )
    return wrap(end + 210, lower + PANEL + 78, title, [*parts, key(lower + PANEL + 44)])


FIGURES = {
    "photograph.svg": draw_photograph,
    "labels.svg": draw_shapes,
    "any-loop.svg": draw_any_loop,
}


if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (OUT / name).write_text(draw())
