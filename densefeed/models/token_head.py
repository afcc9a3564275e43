"""A head on every token of timm's models, for token labels.

The class output stays the model's own. LV-ViT's head (`token_transformer.py`) is another one: its
maximum over tokens is a part of the prediction, and its MixToken follows the patch embedding.
"""

from collections.abc import Callable, Iterable

import torch
from timm.models import group_parameters
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.models.block_maps import feature_map
from densefeed.models.model_spec import CANNOT_BUILD
from densefeed.models.patch_dropout import refuse_patch_dropout
from densefeed.models.token_transformer import (
    Grid,
    TokenFeatures,
    TokenLogits,
    init_linear,
    name_multiples,
    to_tokens,
)
from densefeed.models.wrapped_model import WrappedModel
from densefeed.system.errors import UserError, first_line, is_out_of_memory

# N images   T tokens   D width   K classes   R x C the grid of tokens, rows and columns

# What any model can do, after the other remedies of a message.
INSTEAD = ", or train with the objective relabel, which needs no tokens"


class TokenHeadModel(WrappedModel):
    """A timm model with a linear layer on every token, or cell of its last map.

    The layer reads `forward_features` without prefix tokens, after the final norm: where timm
    normalizes what it pools (`fc_norm`, `head.norm`), that layer normalizes the tokens too.

    Forward takes images `[N, 3, H, W]`. In evaluation it returns the model's output, in training
    `TokenLogits`, or with `fused_head` `TokenFeatures`. `mix_PP` (bool `[R, C]`; MixToken)
    marks the patches of pixels that are exchanged with those of the batch in reversed order; their
    tokens return to the image that they show. Raises ValueError for an input whose features are not
    a grid of tokens of `patch_size`.

    Attributes:
        model: the timm model, whose state dict has no other names for being here.
        token_head: the linear layer.
        patch_size: pixels along a token.
        fused_head: whether training leaves the layer to a loss that is fused with it, as `Step` and
            `densefeed train` set it from FUSED_FROM classes on. `sparse_loss` needs logits.
    """

    with_token_head = True
    fused_head = False

    def __init__(self, model: nn.Module) -> None:
        """Add the layer, on the device of `model`. ValueError if that has no such features."""
        super().__init__()
        needed = ("forward_features", "forward_head", "num_features", "num_classes")
        # timm's num_classes is 0 for a model without classifier.
        if missing := [name for name in needed if not getattr(model, name, None)]:
            raise ValueError(f"it has no {missing[0]}; choose one of timm's classifiers")
        refuse_patch_dropout(model)
        self.patch_size = read_stride(model)
        self.model, self.networks, self.num_classes = model, (model,), model.num_classes
        self.pretrained_cfg = getattr(model, "pretrained_cfg", None)
        self.token_head = nn.Linear(model.num_features, self.num_classes)
        init_linear(self.token_head)
        like = next(model.parameters())
        self.token_head.to(like.device, like.dtype)

    def group_matcher(self, coarse: bool = False) -> Callable[[str], float]:
        """Return a function from names to depths, for timm's layer-wise learning-rate decay.

        Depths are the model's own; the new layer is as deep as the model's head.
        """
        matcher = self.model.group_matcher(coarse=coarse)
        depths = group_parameters(self.model, matcher, reverse=True)
        last = max(depths.values())
        return lambda name: depths.get(name.removeprefix("model."), last)

    def token_features(self, features: Tensor, image_NCHW: Tensor) -> Tensor:
        """Return the input of the layer, `[N, T, D]`, row by row.

        `features` is the output of `forward_features`. Raises ValueError as forward does.
        """
        (H, W), patch = image_NCHW.shape[2:], self.patch_size
        map_NDRC = feature_map(features, self.model, image_NCHW)
        if partial := [extent for extent in (H, W) if extent % patch]:
            raise ValueError(
                f"inputs of {H} x {W} pixels would have partial tokens, which have no labels; "
                f"choose multiples of {patch}, such as {name_multiples(partial[0], patch)}"
            )
        D, R, C = map_NDRC.shape[1:]
        if (R * patch, C * patch, D) != (H, W, self.token_head.in_features):
            raise ValueError(
                f"its features of {H} x {W} pixels are {D} channels of {R} x {C}, and not "
                f"{self.token_head.in_features} for every {patch} x {patch} pixels; choose another "
                "model"
            )
        x_NTD, norm = to_tokens(map_NDRC), find_pooled_norm(self.model)
        if norm is None:
            return x_NTD
        # Not `norm(x)`: that of a map takes the channels in another place.
        return F.layer_norm(x_NTD, x_NTD.shape[2:], norm.weight, norm.bias, norm.eps)

    def forward(
        self, image_NCHW: Tensor, mix_PP: Tensor | None = None
    ) -> Tensor | TokenLogits | TokenFeatures:
        if mix_PP is not None:
            mix_HW = mix_PP.repeat_interleave(self.patch_size, 0)
            mix_HW = mix_HW.repeat_interleave(self.patch_size, 1)
            image_NCHW = torch.where(mix_HW, image_NCHW.flip(0), image_NCHW)
        features = self.model.forward_features(image_NCHW)
        cls_NK = self.model.forward_head(features)
        if not self.training:
            return cls_NK
        x_NTD = self.token_features(features, image_NCHW)
        if mix_PP is not None:
            x_NTD = torch.where(mix_PP.flatten()[:, None], x_NTD.flip(0), x_NTD)
        if self.fused_head:
            return TokenFeatures(cls_NK, x_NTD.to(cls_NK.dtype), self.token_head)
        return TokenLogits(cls_NK, self.token_head(x_NTD))

    @torch.no_grad()
    def check_shapes(self, shapes: Iterable[Grid], name: str = "") -> None:
        """Raise UserError, which begins with `name`, for an input that forward refuses.

        `shapes` are heights and widths, pixels. Each takes a forward pass of a blank image, in
        evaluation mode, because BatchNorm must not average it.
        """
        name, like = name or type(self.model).__name__, next(self.parameters())
        modes = {part: part.training for part in self.modules()}
        self.eval()
        try:
            for H, W in shapes:
                image_NCHW = like.new_zeros(1, 3, H, W)
                try:
                    features = self.model.forward_features(image_NCHW)
                except CANNOT_BUILD as error:
                    if is_out_of_memory(error):
                        raise
                    raise UserError(
                        f"{name} cannot take inputs of {H} x {W} pixels ({first_line(error)}); "
                        "build it for that size (img_size), or choose another size or model"
                    ) from error
                self.token_features(features, image_NCHW)
        except ValueError as error:
            raise UserError(f"{name}: {error}{INSTEAD}") from error
        finally:
            for part, training in modes.items():
                part.training = training


def read_stride(model: nn.Module) -> int:
    """Return the pixels along a cell of the last features, as timm states them.

    Raises ValueError if the model states none.
    """
    info = getattr(model, "feature_info", None) or [{}]
    stride = info[-1].get("reduction")
    if type(stride) is not int:
        raise ValueError(
            "it does not state the pixels along a token (timm's feature_info); choose another model"
        )
    return stride


def find_pooled_norm(model: nn.Module) -> nn.LayerNorm | None:
    """Return the final norm of a model that applies it to pooled features, None for others."""
    places = (model, "fc_norm"), (getattr(model, "head", None), "norm")
    for norm in (getattr(module, name, None) for module, name in places):
        # That of a head with a hidden layer has another width.
        if isinstance(norm, nn.LayerNorm) and norm.normalized_shape == (model.num_features,):
            return norm
    return None


def with_token_head(model: nn.Module, name: str = "") -> TokenHeadModel:
    """Add a head on every token to a timm model, for token labels.

    Args:
        model: a classifier with timm's `forward_features`, `forward_head` and `feature_info`.
        name: its name in messages; its class by default.

    The result trains with the objective `token-label`; its attribute `model` is the given one, with
    the state dict and the output that it has without the head. Raises UserError for a model that
    has a token head, or no spatial features.
    """
    name = name or type(model).__name__
    if getattr(model, "with_token_head", False):
        raise UserError(f"{name} has a token head; leave out with_token_head")
    try:
        return TokenHeadModel(model)
    except ValueError as error:
        raise UserError(f"{name} cannot have a token head: {error}{INSTEAD}") from error
