"""Recipes of DeiT-S and the steps to LV-ViT-S (Table 3 of Token Labeling, arXiv 2104.10858)."""

from densefeed.recipes.lvvit import RELABEL, STANDARD, TOKEN_LABEL, S
from densefeed.recipes.recipe import table

DEIT_S = dict(model="deit_small_patch16_224", crop_pct=0.875)
# DeiT's code resizes training and evaluation crops bicubically. Token Labeling's text names no
# filter, and its code draws one for each training crop. From row 2 on the steps of Table 3 have the
# default, bilinear, so that no step changes the filter beside what its row names.
BICUBIC = dict(crop_interpolation="bicubic", eval_interpolation="bicubic")
UNSCALED = "residual_divisor=1.0"

RECIPES = {
    # Row 1 has BICUBIC; ABLATIONS.md has it without. DeiT also uses repeated augmentation, which
    # Table 2 does not mention: --repeats 3 --batch 1023 --epochs 100 --warmup-epochs 1.67, as an
    # epoch is then three times as long. Row 2 has 29.1 M parameters; Table 3 states 28 M. Row 3 is
    # the base of Table 4, row 4 that of Tables 5 and 9. Row 5 is lvvit_s_224_standard. From row 3
    # on q, k and v have no bias.
    **table(
        "DeiT-S (arXiv 2012.12877) and the steps to LV-ViT-S, with image labels, MixUp and CutMix.",
        STANDARD,
        "Table 3",
        deit_s_224=(DEIT_S | BICUBIC, "row 1, 79.9 %"),
        table3_depth_16=(DEIT_S | dict(model_kwargs=("depth=16",)), "row 2, 81.2 %"),
        table3_mlp_ratio_3=(S | dict(model_kwargs=(UNSCALED, "stem=((16,16),)")), "row 3, 81.1 %"),
        table3_conv_stem=(S | dict(model_kwargs=(UNSCALED,)), "row 4, 82.2 %"),
    ),
    **table(
        "LV-ViT-S with one dense label per crop and CutMix.",
        RELABEL,
        "Table 3, row 6, and Table 6",
        table3_relabel=(S | dict(mixtoken=False, cutmix=1.0), "82.8 %"),
    ),
    **table(
        "DeiT-S with a head on every token, token labels and MixToken.",
        TOKEN_LABEL,
        "No published result.",
        deit_s_224_token_label=(dict(model="lvvit_deit_s"),),
    ),
}
