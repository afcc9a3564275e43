"""What the examples share: images with their Views, a small student, its schedule, its accuracy."""

import argparse
import math
import os
from pathlib import Path

import timm
import timm.optim
import torch
from torch.optim.lr_scheduler import LambdaLR
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import densefeed
from densefeed import View

TO_TENSOR = (
    v2.ToImage(),
    v2.ToDtype(torch.float32, scale=True),
    v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
)
# Any pipeline of v2: crops of 48 pixels for training, whole images of 64 for evaluation.
CROPS = v2.Compose([v2.RandomResizedCrop(48, scale=(0.25, 1.0)), *TO_TENSOR])
WHOLE = v2.Compose([v2.Resize(64), v2.CenterCrop(64), *TO_TENSOR])


class ViewedImages(ImageFolder):
    """Samples (image, label, path, view): the view says which part of the image is shown."""

    def __getitem__(self, index: int):
        path, label = self.samples[index]
        image = self.loader(path)
        image, view = self.transform(image, View.identity(image))
        return image, label, os.path.relpath(path, self.root), view


def read_options(description: str) -> argparse.Namespace:
    """Parse the command line. Its defaults are those of the recipe quickstart_token_label."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, required=True, help="folder with train/ and val/")
    parser.add_argument("--maps", type=Path, required=True, help="score maps of train/")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    return options


def make_student(num_classes: int, **options: int) -> torch.nn.Module:
    """Return the student of the quickstart; any model with a token head will do."""
    stem = ((7, 2), (3, 2), (4, 2))
    options = {"img_size": 64, "token_head": True, "depth": 3, "stem_width": 32} | options
    return timm.create_model("lvvit_micro", num_classes=num_classes, stem=stem, **options)


def make_optimizer(model: torch.nn.Module, lr: float, epochs: int, steps: int):
    """Return optimizer and schedule, of `steps` steps an epoch: a warm-up, then a cosine."""
    optimizer = timm.optim.create_optimizer_v2(model, "adamuon", lr=lr, weight_decay=0.05)
    warmup, total = 0.3 * steps, epochs * steps

    def factor(step: int) -> float:
        rising = (step + 1) / warmup
        return min(rising, 0.5 + 0.5 * math.cos(math.pi * step / total))

    return optimizer, LambdaLR(optimizer, factor)


def dense_loss(model, labels, image, path, view) -> torch.Tensor:
    """Return the loss of token labeling: the label of the whole crop, and those of its tokens."""
    output = model(image)
    grid = image.shape[-1] // 8
    rules = densefeed.TargetRules(smoothing=0.1)
    whole, tokens = labels.targets(path, view, [1, grid], rules)
    whole_loss, token_loss = (
        densefeed.sparse_loss(logits, targets)
        for logits, targets in ((output.cls, whole), (output.tokens, tokens))
    )
    return whole_loss + 0.5 * token_loss


@torch.inference_mode()
def measure(model: torch.nn.Module, data: Path) -> float:
    """Return the top-1 accuracy on val/, 0 to 1."""
    images = ViewedImages(data / "val", WHOLE)
    device, right = next(model.parameters()).device, 0
    model.eval()
    for image, label, *_ in torch.utils.data.DataLoader(images, batch_size=100):
        right += (model(image.to(device)).argmax(-1).cpu() == label).sum().item()
    model.train()
    return right / len(images)
