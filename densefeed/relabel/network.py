"""Network: a classifier as a dense scorer. Pixels in, logits of every cell of its feature map
out.
"""

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.relabel.class_map import ClassMap, merge_classes
from densefeed.system.errors import UserError

INTERPOLATIONS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
# Blocks in which only a class token changes, by attention to cells that they leave alone: CaiT's
# and XCiT's names for them.
CLASS_ATTENTION = ("blocks_token_only", "cls_attn_blocks")


def preprocessing_config(module: nn.Module) -> dict:
    """What a module says of its preprocessing: `mean` and `std` (of input from 0 to 1) and
    `interpolation`, else ImageNet's.

    A timm model's `pretrained_cfg` is heard too. UserError if a value cannot be used.
    """
    config = {
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "interpolation": "bicubic",
    }
    said = getattr(module, "pretrained_cfg", None)
    for name in config:
        value = getattr(module, name, said.get(name) if isinstance(said, dict) else None)
        config[name] = config[name] if value is None else value
    for name in ("mean", "std"):
        try:
            config[name] = tuple(
                float(part) for part in torch.as_tensor(config[name], dtype=torch.float64).flatten()
            )
        except (TypeError, ValueError, RuntimeError):
            config[name] = ()
        if len(config[name]) != 3:
            raise UserError(
                f"the {name} of {type(module).__name__} must be three numbers, for red, green and blue"
            )
    return config


class Network(nn.Module):
    """A classifier that gives logits for every cell of its feature map.

    The classifier, bias included, is applied to each cell as if that cell were the whole feature
    map. For a head that averages and then is linear, as CNNs' are, the mean over cells is the
    model's own answer. For one with something between average and classifier (a norm, as ConvNeXt,
    BEiT and EVA have, or a layer and its activation, as MobileNetV3) it is not, but each cell is
    what the model would say of a picture that looked like this cell everywhere. Attention over a
    single cell gives that cell's value, which is what a model that pools by attention is asked for
    here. A distilled DeiT answers with the mean of its two heads. LV-ViT and VOLO have a head of
    their own for tokens, and that one answers.

    Where the head reads a class token (plain ViT and DeiT), nothing in training has made it fit the
    other tokens, to which it is applied all the same, as the published generator does; `caveat`
    then says so. Compare the accuracy of the stored maps with the teacher's own before training on
    them.

    Args:
        model: gives `forward_token_logits` (`[N, K, h, w]` of `[N, 3, H, W]`), or timm's pair
            `forward_features` (`[N, C, h, w]`; `[N, h, w, C]` if its `output_fmt` is NHWC or its
            `num_features` say so; or `[N, T, C]` tokens, row-major, after `num_prefix_tokens`
            others) and `forward_head`.
        input_size: side of the square input, pixels.
        config: `mean` and `std` of input from 0 to 1, and `interpolation`, as timm's data config.
        class_map: which class of the data each of the model's becomes; None: they are the same.
        name: what the teacher is called in messages.

    Raises UserError, naming the model, if its classifier cannot be applied to cells.
    """

    def __init__(
        self,
        model: nn.Module,
        input_size: int,
        config: dict,
        class_map: ClassMap | None = None,
        name: str = "",
    ) -> None:
        super().__init__()
        self.model, self.input_size, self.name = (
            model.eval(),
            input_size,
            name or type(model).__name__,
        )
        if config["interpolation"] not in INTERPOLATIONS:
            raise UserError(
                f"{self.name} wants images resized by {config['interpolation']!r}, known are {', '.join(INTERPOLATIONS)}; "
                "choose another teacher"
            )
        self.interpolation = INTERPOLATIONS[config["interpolation"]]
        self.register_buffer("mean", torch.tensor(config["mean"]).view(1, 3, 1, 1) * 255)
        self.register_buffer("std", torch.tensor(config["std"]).view(1, 3, 1, 1) * 255)
        self.num_classes = class_map.classes if class_map else None
        self.register_buffer("source", class_map.source if class_map else None)
        self.register_buffer("target", class_map.target if class_map else None)
        if getattr(model, "num_classes", None) == 0:
            raise UserError(
                f"{self.name} has no classifier; choose a teacher that was trained to classify"
            )
        if any(hasattr(model, block) for block in CLASS_ATTENTION):
            raise UserError(
                f"{self.name} answers from a class token that alone passes its last blocks, so its classifier fits no cell; "
                "choose another teacher"
            )
        missing = [way for way in ("forward_features", "forward_head") if not hasattr(model, way)]
        if missing and not hasattr(model, "forward_token_logits"):
            raise UserError(
                f"{self.name} has neither forward_token_logits nor {missing[0]}, one of which a teacher must have"
            )

    @property
    def caveat(self) -> str:
        """One sentence on what this model's cells are not; empty if there is nothing to say."""
        if getattr(self.model, "global_pool", None) != "token" or self._own_token_head():
            return ""
        return (
            f"{self.name} was trained to answer from its class token, so what it says of a cell may be poor; "
            "compare the accuracy of the stored maps with its own"
        )

    def _own_token_head(self) -> bool:
        return hasattr(self.model, "forward_token_logits") or isinstance(
            getattr(self.model, "aux_head", None), nn.Linear
        )

    def forward(self, image_NHWC: Tensor) -> Tensor:
        """Logits of every cell, float32 `[N, S, S, K]`, of uint8 images `[N, side, side, 3]`,
        resized if `side` is not its own.

        UserError if the model keeps no square table of cells.
        """
        image_NCHW = image_NHWC.permute(0, 3, 1, 2).float()
        if image_NCHW.shape[2] != self.input_size:
            # PyTorch has no lanczos
            mode = "bilinear" if self.interpolation is Image.Resampling.BILINEAR else "bicubic"
            image_NCHW = F.interpolate(
                image_NCHW, (self.input_size, self.input_size), mode=mode, antialias=True
            ).clamp(0, 255)
        image_NCHW = (image_NCHW - self.mean) / self.std
        if hasattr(self.model, "forward_token_logits"):
            logits_NSSK = self.model.forward_token_logits(image_NCHW).permute(0, 2, 3, 1)
        else:
            logits_NSSK = self._of_features(self.model.forward_features(image_NCHW))
        if logits_NSSK.shape[1] != logits_NSSK.shape[2]:
            self._refuse(
                f"gives {logits_NSSK.shape[1]} x {logits_NSSK.shape[2]} cells, and a map is square"
            )
        logits_NSSK = logits_NSSK.float()
        if self.num_classes is None:
            return logits_NSSK
        return merge_classes(logits_NSSK, ClassMap(self.source, self.target, self.num_classes))

    def _of_features(self, features: Tensor) -> Tensor:
        model, channels = self.model, getattr(self.model, "num_features", None)
        if not isinstance(features, Tensor) or features.ndim not in (3, 4):
            shape = (
                f"shape {tuple(features.shape)}"
                if isinstance(features, Tensor)
                else f"kind {type(features).__name__}"
            )
            self._refuse(f"gives features of {shape}, and a teacher must keep space")
        if features.ndim == 3:
            return self._of_tokens(features)
        last = getattr(model, "output_fmt", "") == "NHWC" or channels not in (
            None,
            features.shape[1],
        )
        if last and channels not in (None, features.shape[3]):
            self._refuse(
                f"gives features of shape {tuple(features.shape)}, none of which is its {channels} channels"
            )
        count, height, width = features.shape[:3] if last else (len(features), *features.shape[2:])
        one = (1, 1, features.shape[3]) if last else (features.shape[1], 1, 1)
        cells = (features if last else features.permute(0, 2, 3, 1)).reshape(-1, *one)
        return model.forward_head(cells).view(count, height, width, -1)

    def _of_tokens(self, tokens_NTC: Tensor) -> Tensor:
        model = self.model
        # VOLO's, of token labeling; its class token comes first
        token_head = getattr(model, "aux_head", None)
        prefix = 1 if isinstance(token_head, nn.Linear) else getattr(model, "num_prefix_tokens", 0)
        tokens_NTC = tokens_NTC[:, prefix:]
        count, T, channels = tokens_NTC.shape
        height, width = getattr(getattr(model, "patch_embed", None), "grid_size", None) or (0, 0)
        # another number of tokens than at the start: pooled, or of an input of another size
        if height * width != T:
            height = width = round(T**0.5)
        if height != width or height * width != T or T < 2:
            self._refuse(
                f"gives {T} tokens ({height} x {width}), which are no square table of cells"
            )
        if isinstance(token_head, nn.Linear):
            return token_head(tokens_NTC).view(count, height, width, -1)
        # A head that averages skips the prefix, one that reads the class token takes the first, a
        # distilled one the first two: copies serve them all.
        cells = tokens_NTC.reshape(-1, 1, channels).expand(-1, prefix + 1, -1)
        return model.forward_head(cells).view(count, height, width, -1)

    def _refuse(self, reason: str) -> None:
        raise UserError(f"{self.name} {reason}; choose another teacher or input size")
