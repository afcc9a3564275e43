"""Draw a training crop beside the same crop with the dense label of every token over it.

    python tools/crop_figure.py quickstart/train.beton --index 1933 --grid 8 --out crop.png

Crop, View and labels come from the loader that training uses; only the picture is decoded with
more pixels than a network's input has. A run folder stands for its data, seed and crop settings.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from PIL import Image, ImageDraw, ImageFont

from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.open import DataOptions
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.targets import sparse_targets
from densefeed.system.errors import UserError, run
from densefeed.system.files import replace_file
from densefeed.training.config import Config

# Pixels of the figure, which is drawn at twice the size at which it is shown.
SIDE, GAP, TOP, FOOT = 640, 40, 84, 96
# Okabe and Ito's colors, which color-blind readers can tell apart.
INKS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5b5b5b")
DARK, GRAY, NONE = "#1f2328", "#59636e", "#d9dde1"


@dataclass(frozen=True, kw_only=True)
class CropFigure:
    """What to draw."""

    # a .beton file with score maps, or a run folder of train.py --loader ffcv
    source: Annotated[Path, tyro.conf.Positional]
    index: int = 0  # the sample
    epoch: int = 0  # the epoch whose random crop is drawn
    grid: int = 14  # tokens along each side
    out: Path = Path("crop.png")  # the PNG to write


def draw_figure(options: CropFigure) -> Image.Image:
    """Return the crop and its token labels, with captions and a legend."""
    folder, data, seed = options.source, DataOptions(hflip=0.0, crop_scale=(0.25, 1.0)), 0
    if folder.is_dir():
        config = Config.from_dict(json.loads((folder / "config.json").read_text()))
        data, seed = config.data, config.run.seed
    source = FfcvSource(data.train if folder.is_dir() else folder, None)
    if source.score_maps is None or not 0 <= options.index < len(source.labels):
        raise UserError(f"{folder} has no score maps, or no sample {options.index}; name another")
    plan = EpochPlan(
        num_samples=len(source.labels),
        batch=32,
        seed=seed,
        mode="train",
        sizes=((0, SIDE),),
        crop_scale=data.crop_scale,
        hflip=data.hflip,
    )
    at, row = np.argwhere(plan.shard(options.epoch).index == options.index)[0].tolist()
    loader, names = ThreadedLoader(source, plan, threads=1), source.class_names
    batch = next(loader.batches(options.epoch, at))
    loader.close()
    targets = sparse_targets(batch, source.score_maps, options.grid)
    best = (targets.extra + targets.base[..., None])[row].max(-1)
    label_T = targets.palette[row][best.indices].tolist()
    sure_T = (best.values * targets.weight[row]).tolist()
    named = sorted({c for c, sure in zip(label_T, sure_T, strict=True) if sure > 0.5})
    ink = {c: INKS[at % len(INKS)] for at, c in enumerate(named)}

    crop = Image.fromarray(batch.image[row].numpy())
    cover = Image.blend(
        crop.convert("L").convert("RGB"), Image.new("RGB", crop.size, "white"), 0.35
    )
    pen, step = ImageDraw.Draw(cover, "RGBA"), SIDE / options.grid
    for at, (label, sure) in enumerate(zip(label_T, sure_T, strict=True)):
        y, x = divmod(at, options.grid)
        fill = ink[label] + f"{round(200 * sure):02x}" if sure > 0.5 else None
        box = [round(edge * step) for edge in (x, y, x + 1, y + 1)]
        pen.rectangle(box, fill=fill, outline="#ffffff90", width=1)
        if fill and len(names[label]) < 3:
            middle = (x + 0.5) * step, (y + 0.5) * step
            pen.text(middle, names[label], "white", ImageFont.load_default(0.5 * step), "mm")

    figure = Image.new("RGB", (2 * SIDE + 3 * GAP, TOP + SIDE + FOOT), "white")
    pen, font, x, y = ImageDraw.Draw(figure), ImageFont.load_default(30), GAP, TOP + SIDE + 54
    pen.text((x, y), f"Label of the image: {names[int(batch.label[row])]}", GRAY, font, "lm")
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


def main(options: CropFigure) -> None:
    """Write the figure as a PNG of 256 colors, which keeps it small."""
    with replace_file(options.out) as part:
        draw_figure(options).quantize(256, kmeans=1).save(part, format="PNG", optimize=True)


if __name__ == "__main__":
    run(lambda: main(tyro.cli(CropFigure, description=__doc__)))
