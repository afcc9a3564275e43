"""Names of weights in the package EfficientNet-PyTorch, as timm's EfficientNets have them.

That package and those derived from it, such as EfficientNet-Lite-PyTorch, number all blocks; timm
numbers stages, and blocks within a stage. Their blocks pad as TensorFlow's do, and timm's models
`tf_efficientnet_*` compute the same. Those named `efficientnet_*` have the same shapes, but another
padding and another epsilon in their norms.
"""

from timm.models import EfficientNet
from torch import Tensor, nn

STEM = "_conv_stem.weight"
OUTER = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
SQUEEZE = {"_se_reduce": "se.conv_reduce", "_se_expand": "se.conv_expand"}
# timm's block without expansion (DepthwiseSeparableConv), and the one with it (InvertedResidual).
SEPARABLE = SQUEEZE | {
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn1",
    "_project_conv": "conv_pw",
    "_bn2": "bn2",
}
INVERTED = SQUEEZE | {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}


def rename_layout(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Rename weights of EfficientNet-PyTorch to those of `model`, if it is an EfficientNet of timm.

    Other weights, and names of blocks that the model does not have, stay as they are.
    """
    if STEM not in weights or not isinstance(model, EfficientNet):
        return weights
    modules = dict(OUTER)
    numbered = [
        (f"blocks.{stage}.{index}", block)
        for stage, blocks in enumerate(model.blocks)
        for index, block in enumerate(blocks)
    ]
    for number, (path, block) in enumerate(numbered):
        parts = INVERTED if hasattr(block, "conv_pwl") else SEPARABLE
        modules |= {f"_blocks.{number}.{part}": f"{path}.{parts[part]}" for part in parts}
    return {_rename(name, modules): tensor for name, tensor in weights.items()}


def _rename(name: str, modules: dict[str, str]) -> str:
    """Return the name of a tensor with its module's name replaced."""
    module, dot, tensor = name.rpartition(".")
    return modules.get(module, module) + dot + tensor
