"""Whether a network's tokens stay where they were: what compares them place by place cannot do
without.
"""

from timm.layers import PatchDropout, PatchDropoutWithIndices
from torch import nn


def refuse_patch_dropout(model: nn.Module) -> None:
    """ValueError for a network of timm's that leaves out patches in training, which at evaluation
    it does not show.
    """
    if any(
        isinstance(part, PatchDropout | PatchDropoutWithIndices) and part.prob > 0
        for part in model.modules()
    ):
        raise ValueError(
            "it leaves out patches in training, so its tokens do not keep their places; leave patch_drop_rate away"
        )
