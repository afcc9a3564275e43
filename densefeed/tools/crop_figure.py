"""Draw a training crop beside the same crop with the dense label of every token over it.

    python tools/crop_figure.py quickstart/train.beton --index 1933 --grid 8 --out crop.png

Crop, View and labels come from the loader that training uses; only the picture is decoded with
more pixels than a network's input has.
"""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from PIL import Image, ImageDraw, ImageFont

from densefeed.pages.tokens import label_tokens
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
from densefeed.system.errors import UserError, make_command
from densefeed.system.files import replace_file
from densefeed.system.options import Count, Options

# Pixels of the figure, which is drawn at twice the size at which it is shown.
SIDE, GAP, TOP, FOOT = 640, 40, 84, 96
# Okabe and Ito's colors, which color-blind readers can tell apart.
INKS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5b5b5b")
DARK, GRAY, NONE = "#1f2328", "#59636e", "#d9dde1"


@dataclass(frozen=True, kw_only=True)
class CropFigure(Options):
    """What to draw."""

    source: tyro.conf.Positional[Path]  # a .beton file with score maps
    index: int = 0  # the sample
    grid: Count = 14  # tokens along each side
    out: Path = Path("crop.png")  # the PNG to write


def draw_figure(options: CropFigure) -> Image.Image:
    """Return the crop and its token labels, with captions and a legend."""
    source, grid = FfcvSource(options.source), options.grid
    if source.score_maps is None or not 0 <= options.index < len(source.labels):
        raise UserError(
            f"{options.source} has no score maps, or no sample {options.index}; name another"
        )
    # No flip, and no crop of less than a quarter of the image: both keep the picture readable.
    plan = EpochPlan(
        num_samples=len(source.labels),
        batch=32,
        seed=0,
        mode="train",
        sizes=((0, SIDE),),
        crop_scale=(0.25, 1.0),
        hflip=0.0,
    )
    # The plan shuffles: the sample is in some batch of epoch 0.
    step, row = np.argwhere(plan.rank_rows(0).index == options.index)[0].tolist()
    with closing(ThreadedLoader(source, plan, threads=1)) as loader:
        batch = next(loader.batches(0, step))
    class_NT, probability_NT = label_tokens(batch, loader.score_maps, grid)
    label_T, sure_T = class_NT[row], probability_NT[row]
    named = np.unique(label_T[sure_T > 0.5]).tolist()
    ink, names = {c: INKS[at % len(INKS)] for at, c in enumerate(named)}, source.class_names
    tokens = [
        # The probability as opacity, at most 200 of 255, so that the crop stays visible.
        (names[c], ink[c] + f"{round(200 * sure):02x}") if sure > 0.5 else None
        for c, sure in zip(label_T.tolist(), sure_T.tolist(), strict=True)
    ]
    crop = Image.fromarray(batch.image[row].numpy())

    figure = Image.new("RGB", (2 * SIDE + 3 * GAP, TOP + SIDE + FOOT), "white")
    pen, font, x, y = ImageDraw.Draw(figure), ImageFont.load_default(30), GAP, TOP + SIDE + 54
    pen.text((x, y), f"Label of the image: {names[int(batch.label[row])]}", GRAY, font, "lm")
    cover = cover_with_labels(crop, tokens, grid)
    for part, caption in (crop, "The random crop"), (cover, "The label of every token"):
        figure.paste(part, (x, TOP))
        pen.text((x, TOP - 24), caption, DARK, font, "ls")
        x += SIDE + GAP
    x = SIDE + 2 * GAP
    for color, text in [(ink[c], names[c]) for c in named] + [(NONE, "no class above 50 %")]:
        pen.rounded_rectangle([x, y - 15, x + 30, y + 15], 6, color)
        pen.text((x + 42, y), text, GRAY, font, "lm")
        x += 72 + round(pen.textlength(text, font))
    return figure


def cover_with_labels(
    crop: Image.Image, tokens: list[tuple[str, str] | None], grid: int
) -> Image.Image:
    """Return the crop in gray with a square on each token: its name and color, or nothing."""
    white = Image.new("RGB", crop.size, "white")
    cover = Image.blend(crop.convert("L").convert("RGB"), white, 0.35)
    pen, side = ImageDraw.Draw(cover, "RGBA"), SIDE / grid
    for at, token in enumerate(tokens):
        y, x = divmod(at, grid)
        name, fill = token or ("", None)
        box = [round(edge * side) for edge in (x, y, x + 1, y + 1)]
        pen.rectangle(box, fill=fill, outline="#ffffff90", width=1)
        # A longer name would not fit into a token.
        if token and len(name) < 3:
            middle = (x + 0.5) * side, (y + 0.5) * side
            pen.text(middle, name, "white", ImageFont.load_default(0.5 * side), "mm")
    return cover


def main(options: CropFigure) -> None:
    """Write the figure as a PNG of 256 colors, which keeps it small."""
    with replace_file(options.out) as part:
        draw_figure(options).quantize(256, kmeans=1).save(part, format="PNG", optimize=True)


command = make_command(main, CropFigure, __doc__)

if __name__ == "__main__":
    command()
