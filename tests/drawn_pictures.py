"""Cut-outs and backgrounds of photo scenes that are drawn, each in a color of its own."""

from pathlib import Path

import numpy as np
from PIL import Image

# The color of each cut-out, of which all opaque pixels have one.
COLORS = {
    f"{name}/{n}.png": np.array(color)
    for name, n, color in [
        ("disc", 0, (230, 30, 30)),
        ("disc", 1, (120, 10, 10)),
        ("disc", 2, (250, 140, 140)),
        ("ring", 0, (30, 200, 30)),
        ("ring", 1, (0, 90, 0)),
        ("ring", 2, (150, 255, 150)),
        ("bar", 0, (40, 40, 220)),
        ("bar", 1, (0, 0, 110)),
        ("bar", 2, (150, 150, 255)),
    ]
}
# Ratios of the channels, which brightness keeps.
BACKGROUNDS = {"a": (180, 180, 0), "b": (0, 180, 180), "c": (180, 0, 180), "d": (180, 180, 180)}


def draw_shape(name: str, color: tuple) -> Image.Image:
    """A soft shape on transparent black; 90 x 70 pixels with margins."""
    y, x = np.mgrid[:70, :90]
    far = np.hypot(x - 45, y - 35)
    inside = {
        "disc": 26 - far,
        "ring": 9 - abs(far - 21),
        "bar": np.minimum(36 - abs(x - 45), 10 - abs(y - 35)),
    }[name]
    alpha = (inside / 6 + 0.5).clip(0, 1)
    rgba = np.zeros((70, 90, 4))
    rgba[..., :3] = np.array(color) * (alpha > 0)[..., None]
    rgba[..., 3] = 255 * alpha
    return Image.fromarray(rgba.round().astype(np.uint8))


def draw_pictures(root: Path) -> None:
    """Write the folders cutouts and backgrounds."""
    for name, color in COLORS.items():
        path = root / "cutouts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        draw_shape(name.split("/")[0], color).save(path)
    (root / "backgrounds/more").mkdir(parents=True)
    for name, color in BACKGROUNDS.items():
        folder = root / "backgrounds" / ("more" if name == "d" else "")
        Image.new("RGB", (200, 150), color).save(folder / f"{name}.png")
