"""Weights of trained models by the names of other packages' backbones.

Facts on the layouts, with the file that states each:

- transformers 5.24, models/swin/modeling_swin.py and conversion_mapping.py: files have the names of
  version 4, which version 5 renames when it loads. Query, key and value are three layers.
- mmdetection 3, mmdet/models/backbones/swin.py and layers/transformer/utils.py: patches are merged
  by nn.Unfold, which puts the four neighbors of a channel beside each other. `init_cfg` loads names
  that begin with `backbone.` alone. mmsegmentation 1, mmseg/models/backbones/swin.py, has the same
  names and accepts them with and without that beginning.
- timm 1.0.31, models/swin_transformer.py: patches are merged at the beginning of a stage; in both
  others at the end of the one before. Its order of the four neighbors, (row, column) = (0, 0),
  (1, 0), (0, 1), (1, 1), is that of transformers. The index of relative positions is the same in
  all three.

Both others normalize each output. A network of segmentation or detection on a Swin has a norm for
each too. A classifier has one after the last stage alone; the other norms get a scale of 1 and a
shift of 0, with which both packages begin.
"""

import re
from collections.abc import Sequence

import timm
import torch
from timm.models import SwinTransformer
from torch import Tensor, nn

from densefeed.models.model_spec import CANNOT_BUILD
from densefeed.models.on_backbone import OnBackbone, find_backbone
from densefeed.system.errors import UserError, first_line

# Replaced in this order.
HF_NAMES = (
    ("patch_embed.proj.", "embeddings.patch_embeddings.projection."),
    ("patch_embed.norm.", "embeddings.norm."),
    ("layers.", "encoder.layers."),
    (".norm1.", ".layernorm_before."),
    (".norm2.", ".layernorm_after."),
    (".attn.proj.", ".attention.output.dense."),
    (".attn.", ".attention.self."),
    (".mlp.fc1.", ".intermediate.dense."),
    (".mlp.fc2.", ".output.dense."),
)
MM_NAMES = (
    ("patch_embed.proj.", "patch_embed.projection."),
    ("layers.", "stages."),
    (".attn.", ".attn.w_msa."),
    (".mlp.fc1.", ".ffn.layers.0.0."),
    (".mlp.fc2.", ".ffn.layers.1."),
)


def measure_swin(model: nn.Module, subject: str) -> dict:
    """Return the sizes of a Swin, by the names of transformers' SwinConfig.

    `subject` is what messages call the model. Raises UserError if these sizes do not describe it.
    """
    # Models that derive from it, or resemble it, have other layers.
    if type(model) is not SwinTransformer:
        raise UserError(
            f"{subject} is not a Swin, as timm's swin_transformer.py has it (Swin V2 is another), "
            "and this format holds no other model; use --to timm-features"
        )
    blocks = [block for stage in model.layers for block in stage.blocks]
    windows = sorted({tuple(block.window_size) for block in blocks})
    if len(windows) > 1 or windows[0][0] != windows[0][1]:
        smallest = min(min(window) for window in windows)
        raise UserError(
            f"{subject} has windows of {' and '.join(f'{h} x {w}' for h, w in windows)}, and this "
            "format holds one square window for all stages, also where a map is smaller; train it "
            f"with --model-kwargs window_size={smallest}, or use --to timm-features"
        )
    ratios = {block.mlp_ratio for block in blocks}
    whole = all(block.attn.qkv.out_features == 3 * block.dim for block in blocks)
    patch = tuple(model.patch_embed.patch_size)
    if len(ratios) > 1 or not whole or patch[0] != patch[1]:
        raise UserError(
            f"{subject} has patches that are not square, or stages whose heads or MLPs differ in "
            "their share of the width, which this format does not hold; use --to timm-features"
        )
    [ratio] = ratios
    return {
        "image_size": model.patch_embed.img_size[0],
        "patch_size": patch[0],
        "num_channels": model.patch_embed.proj.in_channels,
        "embed_dim": blocks[0].dim,
        "depths": [len(stage.blocks) for stage in model.layers],
        "num_heads": [stage.blocks[0].attn.num_heads for stage in model.layers],
        "window_size": windows[0][0],
        # mmdetection multiplies a width by it, and needs an integer.
        "mlp_ratio": int(ratio) if ratio == int(ratio) else ratio,
        "qkv_bias": blocks[0].attn.qkv.bias is not None,
    }


def shifts_everywhere(model: SwinTransformer) -> bool:
    """Whether every second block shifts its windows, as both other packages do at any size.

    timm leaves the shift out where a map is one window.
    """
    blocks = [block for stage in model.layers for block in stage.blocks]
    return all(any(block.shift_size) for block in blocks if any(block.target_shift_size))


def rename(
    network: SwinTransformer | OnBackbone, names: Sequence[tuple[str, str]], norm: str, first: int
) -> dict[str, Tensor]:
    """Return the weights without heads, by other names; `norm` is that of a stage's output.

    Stages are counted from `first` in it. Patch merging becomes the end of the stage before.
    """
    model = find_backbone(network)
    if isinstance(network, OnBackbone):
        norms = dict(zip(network.taken, network.branches, strict=True))
    else:
        norms = {len(model.layers) - 1: model.norm}
    state = model.state_dict()
    for i, stage in enumerate(model.layers):
        for j, block in enumerate(stage.blocks):
            index = f"layers.{i}.blocks.{j}.attn.relative_position_index"
            state[index] = block.attn.relative_position_index
    renamed = {}
    for name, tensor in state.items():
        if name.startswith(("head.", "norm.")):
            continue
        name = re.sub(
            r"^layers\.(\d+)\.downsample", lambda m: f"layers.{int(m[1]) - 1}.downsample", name
        )
        for old, new in names:
            name = name.replace(old, new)
        renamed[name] = tensor
    for i, stage in enumerate(model.layers):
        layer = norms.get(i) or nn.LayerNorm(stage.blocks[0].dim)
        renamed |= {f"{norm}{first + i}.{key}": value for key, value in layer.state_dict().items()}
    return renamed


def to_hf_swin(network: SwinTransformer | OnBackbone) -> dict[str, Tensor]:
    """Return the weights by the names of transformers' SwinBackbone, an output for each stage."""
    state = {}
    for name, tensor in rename(network, HF_NAMES, "hidden_states_norms.stage", 1).items():
        if ".qkv." in name:
            parts = zip(("query", "key", "value"), tensor.chunk(3), strict=True)
            state |= {name.replace("qkv", part): rows.clone() for part, rows in parts}
        else:
            state[name] = tensor
    return state


def to_mm_swin(network: SwinTransformer | OnBackbone) -> dict[str, Tensor]:
    """Return the weights by the names of mmdetection's and mmsegmentation's SwinTransformer."""
    state = {}
    for name, tensor in rename(network, MM_NAMES, "norm", 0).items():
        if ".downsample." in name:
            # From [column, row, channel] to [channel, row, column].
            tensor = tensor.unflatten(-1, (2, 2, -1)).transpose(-1, -3).flatten(-3)
        # A view would take the rest of its storage into the file.
        state[f"backbone.{name}"] = tensor.clone(memory_format=torch.contiguous_format)
    return state


def to_features(model: nn.Module, subject: str, name: str) -> dict[str, Tensor]:
    """Return the weights of timm's `features_only` of the model `name`, by its names.

    They are those of all layers up to the last output, without final norm and heads. Raises
    UserError if timm has no such form of the model, or one with other weights.
    """
    state = model.state_dict()
    # timm's getter holds the model in an attribute; its list makes the members of a Sequential its
    # own and joins both names, as in `layers_0`.
    own = {f"model.{key}": tensor for key, tensor in state.items()}
    own |= {key.replace(".", "_", 1): tensor for key, tensor in state.items()} | state
    try:
        twin = timm.create_model(name, features_only=True, **timm.models.get_model_args(model))
        taken = {key: own[key] for key in twin.state_dict()}
        twin.load_state_dict(taken)
    except CANNOT_BUILD as error:
        raise UserError(
            f"{subject} has no form with features_only in timm that takes these weights "
            f"({type(error).__name__}: {first_line(error)}); leave out --to and export it whole"
        ) from error
    return taken
