"""Recipes of segmentation: UperNet on classifiers' blocks, for photo scenes and ADE20K."""

import tyro

from densefeed.recipes.photos import DENSE
from densefeed.recipes.quickstart import STUDENT as MICRO
from densefeed.recipes.recipe import ADE20K, SCENE_FOLDERS, table
from densefeed.system.options import with_options
from densefeed.training.config import Config

# What all have: no mixing of images, whose masks would not follow, and masks as labels.
MASKS = dict(objective="segment", dataset="masks", mixtoken=False, smoothing=0.0, ema=0.0)
# OpenMMLab's common schedule of 160,000 steps: 127 epochs of 1,264 steps of 16 images. Its rate
# falls linearly, here by the cosine that all recipes have; its photometric distortion has each of
# four parts with a probability of a half.
FINE_TUNE = dict(
    **MASKS,
    model="upernet",
    init=tyro.MISSING,
    size=512,
    crop_scale=(0.25, 1.0),
    zoom_out=0.5,
    color_jitter=(0.125, 0.5, 0.5, 0.05),
    epochs=127,
    warmup_epochs=1.19,
    batch=16,
    lr=6e-5,
    lr_batch=16,
    min_lr=0.0,
    weight_decay=0.01,
    # The published batch is 2 images on each of 8 devices.
    sync_batchnorm=True,
    eval_every=16,
)
ALL_SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
SWIN_T = dict(
    model_kwargs=("backbone='swin_tiny_patch4_window7_224'",), drop_path=0.2, eval_scales=ALL_SCALES
)
LVVIT_S, LVVIT_M, LVVIT_L = (
    dict(
        model_kwargs=(f"backbone='lvvit_{name}'", f"decoder_width={width}", f"auxiliary={width}"),
        drop_path=0.0,
    )
    for name, width in (("s", 256), ("m", 256), ("l", 512))
)
PHOTOS = dict(
    **DENSE,
    **MASKS,
    model="upernet",
    model_kwargs=(
        "backbone='lvvit_micro'",
        "decoder_width=32",
        "auxiliary=0",
        *MICRO["model_kwargs"],
    ),
)

ON_SCENES = """UperNet on students of photo scenes, true masks of 61 classes: minutes on a CPU.

Give a run of photos_ce or photos_token_label to --init, or train from scratch."""

RECIPES = {
    **table(
        ON_SCENES,
        with_options(Config(), **PHOTOS),
        data=SCENE_FOLDERS,
        segment_photos=({}, "Hard masks."),
    ),
    **table(
        ON_SCENES,
        with_options(Config(), **PHOTOS),
        data=f"{SCENE_FOLDERS} --score-maps maps.h5",
        segment_photos_soft=(
            dict(objective="segment-soft"),
            "Hard masks mixed with a segmenter's maps.",
        ),
    ),
    **table(
        """UperNet on Swin-T, 127 epochs of ADE20K (160,000 steps of 16 images).

Fine-tuned without DRLoc's loss, from a run with it or without (section 4 of the supplementary).
Different here: the rate falls by a cosine, not linearly; crops may be squeezed by up to 4 / 3; a
multi-scale evaluation does not flip.""",
        with_options(Config(), **FINE_TUNE),
        "Tables 12 and 13, mIoU / mAcc at six scales",
        data=ADE20K,
        segment_ade20k_swin_t=(
            SWIN_T,
            "ImageNet-1k 44.33 / 55.74 (43.87 / 55.22 without DRLoc), ImageNet-100 37.83 / 48.69 "
            "(36.93 / 47.76)",
            "runs/swin_t_drloc/last.pt",
        ),
    ),
    **table(
        """UperNet on LV-ViT, 127 epochs of ADE20K (160,000 steps of 16 images).

The settings are those of the published configs (README of Token Labeling). Different here: the
rate falls by a cosine, not linearly; crops may be squeezed by up to 4 / 3; norms add 1e-5, as in
training on ImageNet, not 1e-6; the residual branches of L keep their divisor; and no dropout takes
the place of drop-path.""",
        with_options(Config(), **FINE_TUNE),
        "Published mIoU / multi-scale / pixel accuracy",
        data=ADE20K,
        segment_ade20k_lvvit_s=(
            LVVIT_S,
            "47.9 / 48.6 / 83.1 %",
            "runs/lvvit_s_224_token_label_published/last.pt",
        ),
        segment_ade20k_lvvit_m=(
            LVVIT_M,
            "49.4 / 50.6 / 83.5 %",
            "runs/lvvit_m_224_token_label_published/last.pt",
        ),
        segment_ade20k_lvvit_l=(
            LVVIT_L,
            "50.9 / 51.8 / 84.1 %",
            "runs/lvvit_l_448_fine_tune/last.pt",
        ),
    ),
}
