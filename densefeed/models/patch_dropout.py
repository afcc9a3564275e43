"""The check for patch dropout, with which tokens do not keep their positions."""

from timm.layers import PatchDropout, PatchDropoutWithIndices
from torch import nn


def refuse_patch_dropout(model: nn.Module) -> None:
    """Raise ValueError for a timm model with patch dropout.

    It removes tokens in training only, so an evaluation does not reveal it; methods that compare
    tokens by position cannot be used with it.
    """
    if any(
        isinstance(part, PatchDropout | PatchDropoutWithIndices) and part.prob > 0
        for part in model.modules()
    ):
        raise ValueError(
            "it uses patch dropout in training, so its tokens do not keep their positions; "
            "remove patch_drop_rate"
        )
