"""Network: a classifier applied to every cell of its feature map.

Pixels in, logits per cell out. Segmentation networks, which give a map of logits themselves, are
taken as they are.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.relabel.class_map import ClassMap, merge_classes
from densefeed.system.channels import CHANNEL_RANGES, parse_channels
from densefeed.system.errors import UserError

INTERPOLATIONS = ("bilinear", "bicubic", "lanczos")
# timm's names in CaiT and XCiT for blocks in which only the class token changes, by attention to
# cells that the blocks leave as they are.
CLASS_ATTENTION = ("blocks_token_only", "cls_attn_blocks")
# Preprocessing where a model does not state its own.
IMAGENET_CONFIG = {
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "interpolation": "bicubic",
}


def preprocessing_config(module: nn.Module) -> dict:
    """Read a module's preprocessing: `mean`, `std` (for input from 0 to 1) and `interpolation`.

    They are attributes of the module or entries of timm's `pretrained_cfg`; the defaults are
    ImageNet's. Raises UserError for a value that cannot be used.
    """
    pretrained = getattr(module, "pretrained_cfg", None)
    pretrained = pretrained if isinstance(pretrained, dict) else {}
    config = {}
    for name, default in IMAGENET_CONFIG.items():
        value = getattr(module, name, pretrained.get(name))
        config[name] = default if value is None else value
    for name in ("mean", "std"):
        values = parse_channels(name, config[name])
        if values is None:
            raise UserError(
                f"the {name} of {type(module).__name__} must be three numbers, for red, green and "
                f"blue, {CHANNEL_RANGES[name]}"
            )
        config[name] = values
    return config


# Least side of a cell of a segmentation network, in pixels of the input, without --map-side.
CELL_PIXELS = 8


class Network(nn.Module):
    """A classifier that gives logits for every cell of its feature map.

    The classifier, bias included, is applied to each cell as if that cell were the whole feature
    map. Where the head averages and then is linear, as in CNNs, the mean over cells is the model's
    own output. Where something stands between average and classifier (a norm, as in ConvNeXt, BEiT
    and EVA, or a layer and its activation, as in MobileNetV3) it is not; each cell then is the
    output for a picture whose features are this cell's everywhere. Attention over a single cell
    gives that cell's value, and this is what a model that pools by attention computes here. A
    distilled DeiT gives the mean of its two heads. LV-ViT and VOLO have a token head, which is
    used.

    Where the head reads a class token (plain ViT and DeiT), no training has fitted it to the other
    tokens. It is applied to them nevertheless, as in the published generator, and `caveat` is set:
    compare the accuracy of the stored maps with the teacher's own before training on them.

    A segmentation network gives up to a cell per pixel, 5 MB an image of 512 pixels. They are
    averaged, as probabilities, to one per CELL_PIXELS pixels of the input along each axis, or to
    `map_side` a side.

    Args:
        model: has `forward_token_logits` (`[N, 3, H, W]` to `[N, K, h, w]`), or timm's
            `forward_features` (to `[N, C, h, w]`; to `[N, h, w, C]` if its `output_fmt` is NHWC or
            its `num_features` imply it; or to `[N, T, C]` tokens, row-major, after
            `num_prefix_tokens` others) and `forward_head`. Any other is called itself, and gives
            `[N, K, h, w]`: as a tensor, as `logits` of an object (transformers), or as "out" of a
            dictionary (torchvision).
        input_size: side of the square input, pixels.
        config: `mean` and `std` for input from 0 to 1, and `interpolation`, as timm's data config.
        class_map: the class of the data that each of the model's becomes; None if they are equal.
        name: name of the teacher in messages.
        map_side: cells a side of the map, at most as many as the model gives; 0: as many, of a
            segmentation network at most one per CELL_PIXELS pixels.

    Raises UserError, naming the model, if its classifier cannot be applied to cells.
    """

    def __init__(
        self,
        model: nn.Module,
        input_size: int,
        config: dict,
        class_map: ClassMap | None = None,
        name: str = "",
        map_side: int = 0,
    ) -> None:
        super().__init__()
        self.model, self.input_size, self.map_side = model.eval(), input_size, map_side
        self.name = name or type(model).__name__
        # Whether its classes are taken for those of the data without a comparison of names.
        self.by_order = False
        # Or by their numbers, for data without names: the name of its first class; else empty.
        self.by_number = ""
        if config["interpolation"] not in INTERPOLATIONS:
            raise UserError(
                f"{self.name} needs images resized by {config['interpolation']!r}, and only "
                f"{', '.join(INTERPOLATIONS)} are supported; choose another teacher"
            )
        self.interpolation = Image.Resampling[config["interpolation"].upper()]
        # Pictures are uint8: scaling mean and std once saves dividing every picture by 255.
        for key in ("mean", "std"):
            color = torch.tensor(config[key], dtype=self._input_dtype())
            self.register_buffer(key, color.view(1, 3, 1, 1) * 255)
        source, target, self.num_classes = class_map or (None, None, None)
        # Buffers, so that they move to the device with the model.
        self.register_buffer("source", source)
        self.register_buffer("target", target)
        self._check_model()

    def _input_dtype(self) -> torch.dtype:
        """Return float32, or float64 for a model in float64.

        PyTorch's default, which a script may have set, is that of neither.
        """
        weight = next((p for p in self.model.parameters() if p.is_floating_point()), None)
        return torch.float32 if weight is None else torch.promote_types(weight.dtype, torch.float32)

    def _check_model(self) -> None:
        """Raise UserError if the classifier is missing or cannot be applied to cells."""
        # timm makes a model without classifier for num_classes=0.
        if getattr(self.model, "num_classes", None) == 0:
            raise UserError(
                f"{self.name} has no classifier; choose a teacher that was trained to classify"
            )
        if any(hasattr(self.model, block) for block in CLASS_ATTENTION):
            raise UserError(
                f"{self.name} classifies a class token that alone passes its last blocks, so its "
                "classifier fits no cell; choose another teacher"
            )

    @property
    def caveat(self) -> str:
        """One sentence on the limits of this model's cells; empty if there are none."""
        if getattr(self.model, "global_pool", None) != "token" or self._has_token_head():
            return ""
        return (
            f"{self.name} was trained to classify its class token, so its labels of cells may be "
            "poor; compare the accuracy of the stored maps with the teacher's own"
        )

    def _has_token_head(self) -> bool:
        return hasattr(self.model, "forward_token_logits") or isinstance(
            getattr(self.model, "aux_head", None), nn.Linear
        )

    def forward(self, image_NHWC: Tensor) -> Tensor:
        """Compute logits of every cell, float32 `[N, S, S, K]`, of uint8 `[N, side, side, 3]`.

        Images of another size than `input_size` are resized. Raises UserError if the model gives no
        square table of cells.
        """
        size, image_NCHW = self.input_size, image_NHWC.permute(0, 3, 1, 2).float()
        if image_NCHW.shape[2] != size:
            # PyTorch has no Lanczos filter.
            mode = "bilinear" if self.interpolation is Image.Resampling.BILINEAR else "bicubic"
            # Bicubic weights overshoot; Pillow clips to 0..255 too.
            image_NCHW = F.interpolate(image_NCHW, size, mode=mode, antialias=True).clamp(0, 255)
        image_NCHW = (image_NCHW - self.mean) / self.std
        whole = False
        if hasattr(self.model, "forward_token_logits"):
            logits_NSSK = self.model.forward_token_logits(image_NCHW).permute(0, 2, 3, 1)
        elif all(hasattr(self.model, name) for name in ("forward_features", "forward_head")):
            logits_NSSK = self._classify_features(self.model.forward_features(image_NCHW))
        else:
            whole = True
            logits_NSSK = self._find_logits(self.model(image_NCHW)).permute(0, 2, 3, 1)
        height, width = logits_NSSK.shape[1:3]
        if height != width:
            self._refuse(f"gives {height} x {width} cells, and a map must be square")
        # Under autocast they are bfloat16 or float16.
        logits_NSSK = logits_NSSK.float()
        if self.num_classes is not None:
            classes = ClassMap(self.source, self.target, self.num_classes)
            logits_NSSK = merge_classes(logits_NSSK, classes)
        side = self.map_side or height
        if whole and not self.map_side:
            side = min(height, max(1, size // CELL_PIXELS))
        if side > height:
            raise UserError(
                f"{self.name} gives {height} x {height} cells, fewer than --map-side {side}; give "
                "at most as many, or a larger --input-size"
            )
        return average_cells(logits_NSSK, side)

    def _find_logits(self, output: Any) -> Tensor:
        """Return the logits `[N, K, h, w]` of what a segmentation network gives."""
        # Outputs of transformers are dictionaries too.
        found = getattr(output, "logits", output)
        found = found.get("out") if isinstance(found, Mapping) else found
        if not isinstance(found, Tensor) or found.ndim != 4:
            what = f"a {type(output).__name__}"
            what = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else what
            raise UserError(
                f"{self.name} gives {what}, not logits of shape [N, K, h, w]; a teacher is a "
                "segmentation network, or has forward_features and forward_head as in timm, or "
                "forward_token_logits"
            )
        return found

    def _classify_features(self, features: Tensor) -> Tensor:
        """Apply the head to each cell of a feature map, or to each token."""
        model, channels = self.model, getattr(self.model, "num_features", None)
        if not isinstance(features, Tensor) or features.ndim not in (3, 4):
            kind = f"kind {type(features).__name__}"
            if isinstance(features, Tensor):
                kind = f"shape {tuple(features.shape)}"
            self._refuse(f"gives features of {kind}, and a teacher must keep spatial positions")
        if features.ndim == 3:
            return self._classify_tokens(features)
        shape, known = features.shape, channels is not None
        last = getattr(model, "output_fmt", "") == "NHWC" or (known and channels != shape[1])
        if last and known and channels != shape[3]:
            self._refuse(
                f"gives features of shape {tuple(shape)}, none of which is its {channels} channels"
            )
        features_NHWC = features if last else features.permute(0, 2, 3, 1)
        count, height, width, C = features_NHWC.shape
        # Each cell becomes a feature map of 1 x 1, of which the head's pooling is the cell itself.
        cells = features_NHWC.reshape(-1, *((1, 1, C) if last else (C, 1, 1)))
        return model.forward_head(cells).view(count, height, width, -1)

    def _classify_tokens(self, tokens_NTC: Tensor) -> Tensor:
        """Apply the head, or a token head, to each token but the prefix."""
        model = self.model
        # VOLO's head for token labeling; its class token comes first.
        token_head = getattr(model, "aux_head", None)
        prefix = 1 if isinstance(token_head, nn.Linear) else getattr(model, "num_prefix_tokens", 0)
        tokens_NTC = tokens_NTC[:, prefix:]
        count, T, channels = tokens_NTC.shape
        height, width = getattr(getattr(model, "patch_embed", None), "grid_size", None) or (0, 0)
        # The tokens were pooled, or the input has another size than at construction.
        if height * width != T:
            height = width = round(T**0.5)
        if height != width or height * width != T or T < 2:
            self._refuse(f"gives {T} tokens ({height} x {width}), and a map must be a square table")
        if isinstance(token_head, nn.Linear):
            return token_head(tokens_NTC).view(count, height, width, -1)
        # A head that averages skips the prefix, one that reads the class token takes the first
        # token, a distilled one the first two: copies of the cell serve all of them.
        cells = tokens_NTC.reshape(-1, 1, channels).expand(-1, prefix + 1, -1)
        return model.forward_head(cells).view(count, height, width, -1)

    def _refuse(self, reason: str) -> None:
        raise UserError(f"{self.name} {reason}; choose another teacher or input size")


def average_cells(logits_NSSK: Tensor, side: int) -> Tensor:
    """Average a map of logits to `side` cells a side: its probabilities and its logsumexp.

    Where `side` does not divide theirs, a cell covers every smaller one that it touches.
    """
    if logits_NSSK.shape[1] == side:
        return logits_NSSK
    return resize_logits(logits_NSSK, lambda part: F.adaptive_avg_pool2d(part, side))


def interpolate_cells(logits_NSSK: Tensor, side: int) -> Tensor:
    """Interpolate a map of logits to `side` cells a side: its probabilities and its logsumexp."""
    if logits_NSSK.shape[1] == side:
        return logits_NSSK
    return resize_logits(
        logits_NSSK, lambda part: F.interpolate(part, (side, side), mode="bilinear")
    )


def resize_logits(logits_NSSK: Tensor, resize: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `resize`, from `[N, C, S, S]` to `[N, C, s, s]`, to probabilities and logsumexp."""
    logits_NKSS = logits_NSSK.permute(0, 3, 1, 2)
    logsumexp = logits_NKSS.logsumexp(1, keepdim=True)
    probability, logsumexp = map(resize, ((logits_NKSS - logsumexp).exp(), logsumexp))
    # A probability that float32 rounds to 0 would become a logit of minus infinity.
    probability = probability.clamp(min=torch.finfo(probability.dtype).tiny)
    return (probability.log() + logsumexp).permute(0, 2, 3, 1)
