"""Recipes of DeiT-S and of the steps to LV-ViT-S (Table 3 of Token Labeling, arXiv 2104.10858)."""

from densefeed.recipes.lvvit import RELABEL, STANDARD, TOKEN_LABEL, S
from densefeed.system.options import with_options
from densefeed.training.config import Config

DEIT_S = dict(model="deit_small_patch16_224", crop_pct=0.875)
# DeiT's code resizes training and evaluation crops bicubically. Token Labeling's text names no
# filter, and its code draws one for each training crop. From row 2 on the steps of Table 3 have the
# default, bilinear, so that no step changes the filter beside what its row names.
BICUBIC = dict(crop_interpolation="bicubic", eval_interpolation="bicubic")


def deit_s_224() -> Config:
    """DeiT-S (arXiv 2012.12877) of timm with image labels, MixUp and CutMix.

    python train.py deit_s_224 --loader ffcv --data train.beton --val val.beton \\
        --out runs/deit_s_224

    Table 3, row 1: 79.9 %. DeiT's code resizes bicubically, as does this recipe. The other rows of
    Table 3 are bilinear, so that no step changes the filter too: for row 1 give
    --crop-interpolation bilinear --eval-interpolation bilinear. DeiT also uses repeated
    augmentation, which Table 2 does not mention: give --repeats 3 --batch 1023 --epochs 100
    --warmup-epochs 1.67, as an epoch here is then three times as long. Not run here.
    """
    return with_options(STANDARD, **DEIT_S, **BICUBIC)


def deit_s_224_token_label() -> Config:
    """DeiT-S with a head on every token, token labels and MixToken.

    python train.py deit_s_224_token_label --loader ffcv --data train.beton --val val.beton \\
        --out runs/deit_s_224_token_label

    No published result. Not run here.
    """
    return with_options(TOKEN_LABEL, model="lvvit_deit_s")


def table3_depth_16() -> Config:
    """DeiT-S with 16 blocks instead of 12: Table 3, row 2.

    python train.py table3_depth_16 --loader ffcv --data train.beton --val val.beton \\
        --out runs/table3_depth_16

    Table 3: 81.2 % (the paper states 28 M parameters; the model has 29.1 M). Not run here.
    """
    return with_options(STANDARD, **DEIT_S, model_kwargs=("depth=16",))


def table3_mlp_ratio_3() -> Config:
    """16 blocks with an MLP ratio of 3 instead of 4: Table 3, row 3, and the base of Table 4.

    python train.py table3_mlp_ratio_3 --loader ffcv --data train.beton --val val.beton \\
        --out runs/table3_mlp_ratio_3

    Table 3: 81.1 %. This is LV-ViT-S of the published code except for its stem and its residual
    scaling: from here on q, k and v have no bias. Not run here.
    """
    return with_options(STANDARD, **S, model_kwargs=("residual_divisor=1.0", "stem=((16,16),)"))


def table3_conv_stem() -> Config:
    """The same with a stem of four convolutions: Table 3, row 4, and the base of Tables 5 and 9.

    python train.py table3_conv_stem --loader ffcv --data train.beton --val val.beton \\
        --out runs/table3_conv_stem

    Table 3: 82.2 %. The next row, with halved residual branches, is lvvit_s_224_standard. Not run
    here.
    """
    return with_options(STANDARD, **S, model_kwargs=("residual_divisor=1.0",))


def table3_relabel() -> Config:
    """LV-ViT-S with one dense label per crop and CutMix: Table 3, row 6.

    python train.py table3_relabel --loader ffcv --data train.beton --val val.beton \\
        --out runs/table3_relabel

    Tables 3 and 6: 82.8 %. The next rows are lvvit_s_224_token_label and lvvit_s_384_fine_tune. Not
    run here.
    """
    return with_options(RELABEL, **S, mixtoken=False, cutmix=1.0)
