"""Train on images that the teacher cannot see: eight bands of 16 bits, here simulated from RGB.

The teacher labels a rendering of three bands in 8 bits; the student trains on all bands, with the
labels of each of its crops:

    python bands.py label --data photos/scenes --maps bands.h5
    python bands.py train --data photos/scenes --maps bands.h5 --bands 8
"""

import argparse
from pathlib import Path

import numpy as np
import scenes
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import densefeed
from densefeed import View

# The share of red, green and blue in each band: bells along the spectrum.
PLACES = np.linspace(-0.5, 2.5, 8)[:, None]
RESPONSE = np.exp(-2 * (PLACES - np.arange(3)) ** 2)
RESPONSE = np.float32(RESPONSE / RESPONSE.sum(1, keepdims=True))
# The bands of the rendering: red, green, blue.
RENDERED = [1, 4, 6]
# Standard deviation of a band's noise, as a share of the brightest value; independent in each band.
NOISE = 0.15


class Bands(Dataset):
    """Items (uint16 array [8, H, W], label) of a folder of images. Yours would read TIFF or .npy"""

    def __init__(self, folder: Path) -> None:
        self.images = ImageFolder(folder)
        self.classes, self.targets = self.images.classes, self.images.targets

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        image, label = self.images[index]
        bands = np.moveaxis(np.asarray(image, np.float32) / 255 @ RESPONSE.T, 2, 0)
        bands += NOISE * np.random.default_rng(index).standard_normal(bands.shape, np.float32)
        return (np.clip(bands, 0, 1) * 65535).astype(np.uint16), label


class Rendering(Bands):
    """What the teacher sees: items (Pillow image, label) of the same numbers."""

    def __getitem__(self, index: int):
        bands, label = super().__getitem__(index)
        return Image.fromarray((bands[RENDERED] >> 8).astype(np.uint8).transpose(1, 2, 0)), label


class Crops(Bands):
    """What the student sees: (float tensor [bands, 64, 64], label, number, view)."""

    def __init__(self, folder: Path, bands: list[int], *transforms) -> None:
        super().__init__(folder)
        self.bands, self.transform = bands, v2.Compose(transforms)

    def __getitem__(self, index: int):
        bands, label = super().__getitem__(index)
        image = torch.from_numpy(bands[self.bands].astype(np.float32) / 65535 - 0.5)
        image, view = self.transform(image, View.identity(image))
        return image, label, index, view


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("step", choices=["label", "train"])
parser.add_argument("--data", type=Path, required=True, help="folder with train/ and val/")
parser.add_argument("--maps", type=Path, required=True)
parser.add_argument("--teacher", default="densefeed.models.efficientnet_lite:lite2")
parser.add_argument("--class-map", default="-")
parser.add_argument("--input-size", type=int, default=320)
parser.add_argument("--bands", type=int, choices=[3, 8], default=8)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch", type=int, default=24)
parser.add_argument("--workers", type=int, default=1)
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()

if options.step == "label":
    densefeed.label(
        Rendering(options.data / "train"),
        options.teacher,
        options.maps,
        input_size=options.input_size,
        class_map=options.class_map,
    )
else:
    torch.manual_seed(options.seed)
    bands = RENDERED if options.bands == 3 else list(range(8))
    crop = v2.RandomResizedCrop(64, scale=(0.15, 1.0)), v2.RandomHorizontalFlip()
    images = Crops(options.data / "train", bands, *crop)
    loader = DataLoader(
        images, options.batch, shuffle=True, num_workers=options.workers, drop_last=True
    )
    student = scenes.make_student(len(images.classes), in_chans=len(bands), img_size=96)
    optimizer, schedule = scenes.make_optimizer(student, 6e-3, options.epochs, len(loader))
    # Maps of another dataset would be refused.
    labels = densefeed.open_score_maps(options.maps, Rendering(options.data / "train"))
    for _ in range(options.epochs):
        for image, _label, index, view in loader:
            scenes.dense_loss(student, labels, image, index, view).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    student.eval()
    whole = Crops(options.data / "val", bands, v2.Resize(96), v2.CenterCrop(96))
    with torch.inference_mode():
        right = [
            (student(image).argmax(-1) == label).sum()
            for image, label, *_ in DataLoader(whole, 100, num_workers=options.workers)
        ]
    print(f"{len(bands)} bands: top-1 {100 * sum(right) / len(whole):.1f} %")
