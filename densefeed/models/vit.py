"""The vision transformers of Bootstrapping ViTs (arXiv 2112.03552): timm's ViT at Table 2's sizes.

ViT-S is not DeiT-S: it has 6 blocks of width 288 with 9 heads. ViT-B has the size of DeiT-S. The
parameter counts are those of the paper's Table 1 and equal the published code's exactly (6,302,404
and 21,704,164 at 100 classes). Initialization is timm's. The published code draws the patch
embedding and the MLP biases with a standard deviation of 1, evidently by mistake; that is not
repeated here.
"""

from functools import partial

from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import nn

from densefeed.models.registration import pretrained_cfg, register_family
from densefeed.models.sparse_attention import SparseAttention

_cfg = partial(pretrained_cfg, "patch_embed.proj", "head")
# ViT-S of Table 2: 6.3 M parameters. Dropout, 0.1 in the published code, is set by the recipe.
VIT_S = dict(embed_dim=288, depth=6, num_heads=9, norm_layer=partial(nn.LayerNorm, eps=1e-5))
# ViT-B of Table 2: 21.7 M parameters
VIT_B = dict(embed_dim=384, depth=12, num_heads=6)

register_family(
    __name__,
    VisionTransformer,
    {
        # For demonstrations at 64 px on a CPU. It has 9 heads like ViT-S, so that its agent has a
        # full 3 x 3 CONV.
        "bootstrapping_vit_micro": (
            _cfg(64),
            dict(img_size=64, patch_size=8, embed_dim=108, depth=4, num_heads=9),
        ),
        "bootstrapping_vit_s": (_cfg(), VIT_S),
        "bootstrapping_vit_b": (_cfg(), VIT_B),
        # ViT-Sparse of Table 1, with a parameter more per block.
        "bootstrapping_vit_s_sparse": (_cfg(), VIT_S | dict(attn_layer=SparseAttention)),
        "bootstrapping_vit_b_sparse": (_cfg(), VIT_B | dict(attn_layer=SparseAttention)),
    },
    checkpoint_filter_fn,
)
