"""Everything that a page shows of a model and a batch of images, and files of the same maps."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from densefeed.explain.attention_maps import class_map, head_token_maps, mean_map
from densefeed.explain.capture import (
    AttentionMatrix,
    TokenLayout,
    attention_layers,
    forward_attention,
)
from densefeed.explain.features import block_features, feature_picture
from densefeed.explain.heat_maps import gray, matrix_picture, overlay
from densefeed.explain.refusals import Refusals
from densefeed.explain.relevance import attention_rollout, class_relevance, gradient_attention
from densefeed.system.errors import UserError

# Layers whose whole matrix and features are shown, unless the user names some.
FEW_LAYERS = 4
# Classes of the greatest probability that are explained.
TOP = 2

# N images   J classes explained   L classes of the model   M heads   Q queries   K keys
# D channels   R x C a grid, rows and columns


class LayerMaps(NamedTuple):
    """The attention of one layer, mean over heads."""

    name: str  # of the module
    layout: TokenLayout
    # From what the classifier reads: the class token, else the mean of the patches. [N, R, C]
    class_map: Tensor
    mean_map: Tensor  # from all tokens, [N, R, C]
    head_maps: Tensor | None  # from each of DHVT's head tokens, in its own head, [N, M, R, C]
    matrix: Tensor | None  # [N, Q, K], of chosen layers that do not attend in windows


class Explanation(NamedTuple):
    """The maps of N images; None, or no layers, where the model refuses a kind."""

    probability: Tensor  # [N, L], of the model's own output
    target: Tensor  # int64 [N, J], may name a class twice
    relevance: Tensor | None  # [N, J, R, C]
    gradient: Tensor | None  # gradient x attention, [N, J, R, C]
    rollout: Tensor | None  # [N, R, C]
    layers: dict[int, LayerMaps]  # by number, from 1
    features: dict[int, Tensor]  # by number of the block, from 1, [N, D, R, C]


class Explainer:
    """Computes the maps of a model.

    Args:
        model: in evaluation mode, on the device of the images.
        chosen: numbers from 1 of the layers whose matrix and features are kept; empty: FEW_LAYERS,
            evenly spaced.
        classes: classes to explain beside the most probable ones.

    Raises UserError for numbers of layers that the model does not have.

    Attributes:
        refused: what the model cannot be shown by, as far as it was tried, and the reasons.
    """

    def __init__(self, model: nn.Module, chosen: Sequence[int], classes: Sequence[int]) -> None:
        # Derivatives of attention matrices need none of weights.
        self.model, self.chosen = model.requires_grad_(False), set(chosen)
        self.classes, self.refused = list(classes), Refusals()
        names = self.refused.attempt("attention", attention_layers, model) or []
        if not names:
            self.refused["rollout"] = self.refused["attention"]
        if names:
            self._check_chosen(len(names), "layers")

    def __call__(self, image_NCHW: Tensor) -> Explanation:
        model, attempt = self.model, self.refused.attempt
        with torch.no_grad():
            captured = attempt("attention", forward_attention, model, image_NCHW) or []
            logits_NL = model(image_NCHW)
            features = attempt("features", block_features, model, image_NCHW) or {}
        # Without attention only a forward pass shows the number of blocks.
        if features and not captured:
            self._check_chosen(len(features), "blocks")
        target_NJ = self._choose_classes(logits_NL)
        rollout = attempt("rollout", attention_rollout, captured) if captured else None
        layers = {
            n: self._read_layer(n, record, len(captured)) for n, record in enumerate(captured, 1)
        }
        # The matrices of all layers take as much memory as the gradients to come.
        captured.clear()
        asked = model, image_NCHW, target_NJ
        return Explanation(
            probability=logits_NL.float().softmax(-1),
            target=target_NJ,
            relevance=attempt("relevance", class_relevance, *asked),
            gradient=attempt("gradient x attention", gradient_attention, *asked),
            rollout=rollout,
            layers=layers,
            features={
                n + 1: f for n, f in features.items() if self._is_chosen(n + 1, len(features))
            },
        )

    def _choose_classes(self, logits_NL: Tensor) -> Tensor:
        """Return the most probable classes of each image, and those asked for; `[N, J]`."""
        top_NJ = logits_NL.topk(min(TOP, logits_NL.shape[1])).indices
        asked = torch.tensor(self.classes, dtype=torch.int64, device=top_NJ.device)
        return torch.cat([top_NJ, asked.expand(len(top_NJ), -1)], 1)

    def _check_chosen(self, count: int, what: str) -> None:
        """Raise UserError for numbers of layers, or of blocks, that the model does not have."""
        if not self.chosen <= set(range(1, count + 1)):
            raise UserError(
                f"--layers {' '.join(map(str, sorted(self.chosen)))}: {type(self.model).__name__} "
                f"has {what} 1 to {count}"
            )

    def _is_chosen(self, n: int, count: int) -> bool:
        few = np.linspace(1, count, min(FEW_LAYERS, count)).round().astype(int).tolist()
        return n in (self.chosen or few)

    def _read_layer(self, n: int, record: AttentionMatrix, count: int) -> LayerMaps:
        layout = record.layout
        keeps = self._is_chosen(n, count) and layout.windows is None
        heads = head_token_maps(record) if layout.head_tokens else None
        matrix = record.weights.mean(1) if keeps else None
        return LayerMaps(record.layer, layout, class_map(record), mean_map(record), heads, matrix)


def list_classes(found: Explanation, n: int) -> dict[int, int]:
    """Return the classes that are explained for image `n`, each once, and their places in J."""
    places = {}
    for j, c in enumerate(found.target[n].tolist()):
        places.setdefault(c, j)
    return places


# ------------------------------------------------------------------------- files


def collect_arrays(found: Explanation, n: int) -> dict[str, np.ndarray]:
    """Return the raw arrays of image `n` for an .npz file, by names that the guide lists."""
    classes = list_classes(found, n)
    arrays = {"probability": found.probability[n], "classes": torch.tensor(list(classes))}
    for name, maps in (("relevance", found.relevance), ("gradient_attention", found.gradient)):
        if maps is not None:
            arrays[name] = maps[n, list(classes.values())]
    if found.rollout is not None:
        arrays["rollout"] = found.rollout[n]
    for layer, maps in found.layers.items():
        for name, part in zip(LayerMaps._fields[2:], maps[2:], strict=True):
            if part is not None:
                arrays[f"layer_{layer:02d}_{name}"] = part[n]
    for block, maps in found.features.items():
        arrays[f"block_{block:02d}_features"] = maps[n]
    return {name: array.cpu().numpy() for name, array in arrays.items()}


def list_pictures(
    found: Explanation, n: int, image: Image.Image
) -> Iterator[tuple[str, Image.Image]]:
    """Yield name and picture of everything about image `n`; `image` is the model's input."""
    yield "input", image
    for name, maps in (("relevance", found.relevance), ("gradient-attention", found.gradient)):
        if maps is not None:
            for c, j in list_classes(found, n).items():
                yield f"{name}-class-{c}", overlay(image, maps[n, j])
    if found.rollout is not None:
        yield "rollout", overlay(image, found.rollout[n])
    for layer, maps in found.layers.items():
        yield f"layer-{layer:02d}-class-row", overlay(image, maps.class_map[n])
        yield f"layer-{layer:02d}-mean-row", overlay(image, maps.mean_map[n])
        if maps.head_maps is not None:
            for head, map_RC in enumerate(maps.head_maps[n], 1):
                yield f"layer-{layer:02d}-head-token-{head}", overlay(image, map_RC)
        if maps.matrix is not None:
            yield f"layer-{layer:02d}-matrix", matrix_picture(maps.matrix[n])
    for block, maps in found.features.items():
        yield f"block-{block:02d}-features", gray(feature_picture(maps[n : n + 1])[0])


def save_arrays(path: Path, found: Explanation, n: int, name: str) -> None:
    """Write the arrays of image `n`, whose file is called `name`."""
    np.savez_compressed(path, path=np.array(name), **collect_arrays(found, n))


def save_pictures(folder: Path, stem: str, found: Explanation, n: int, image: Image.Image) -> None:
    """Write the pictures of image `n` as PNG files `STEM-NAME.png`."""
    for name, drawn in list_pictures(found, n, image):
        drawn.save(folder / f"{stem}-{name}.png")
