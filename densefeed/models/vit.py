"""The vision transformers of Bootstrapping ViTs (arXiv 2112.03552), Table 2: timm's network in the
paper's sizes.

ViT-S is not DeiT's: 6 blocks of width 288 with 9 heads. ViT-B is the size that DeiT calls S.
Parameters are those of the paper's Table 1, to the unit of the published code (6,302,404 and
21,704,164 at 100 classes). Initialization is timm's; the published code draws the patch embedding
and the biases of the MLPs with a deviation of 1, evidently by mistake, and that is not repeated.
"""

from functools import partial

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import nn


def _cfg(size: int) -> dict:
    return {
        "input_size": (3, size, size),
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "num_classes": 1000,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }


default_cfgs = generate_default_cfgs(
    {
        "bootstrapping_vit_micro": _cfg(64),
        "bootstrapping_vit_s": _cfg(224),
        "bootstrapping_vit_b": _cfg(224),
    }
)


def _build(name: str, pretrained: bool, sizes: dict, kwargs: dict) -> VisionTransformer:
    return build_model_with_cfg(
        VisionTransformer,
        name,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        **(sizes | kwargs),
    )


@register_model
def bootstrapping_vit_micro(pretrained: bool = False, **kwargs) -> VisionTransformer:
    """For demonstrations at 64 px on a CPU: patch 8, 4 blocks of width 108; 9 heads, as ViT-S, for
    a whole 3 x 3 CONV.
    """
    sizes = dict(img_size=64, patch_size=8, embed_dim=108, depth=4, num_heads=9)
    return _build("bootstrapping_vit_micro", pretrained, sizes, kwargs)


@register_model
def bootstrapping_vit_s(pretrained: bool = False, **kwargs) -> VisionTransformer:
    """ViT-S of Table 2: 6.3 M parameters. Dropout, 0.1 in the published code, is up to the
    recipe.
    """
    sizes = dict(embed_dim=288, depth=6, num_heads=9, norm_layer=partial(nn.LayerNorm, eps=1e-5))
    return _build("bootstrapping_vit_s", pretrained, sizes, kwargs)


@register_model
def bootstrapping_vit_b(pretrained: bool = False, **kwargs) -> VisionTransformer:
    """ViT-B of Table 2: 21.7 M parameters."""
    return _build(
        "bootstrapping_vit_b", pretrained, dict(embed_dim=384, depth=12, num_heads=6), kwargs
    )
