"""Recipes of detection: Mask R-CNN on classifiers' blocks, for photo scenes and COCO."""

import tyro

from densefeed.recipes.photos import DENSE
from densefeed.recipes.quickstart import STUDENT as MICRO
from densefeed.recipes.recipe import COCO, SCENE_FOLDERS, table
from densefeed.system.options import with_options
from densefeed.training.config import Config

# No mixing of images, whose objects would not follow.
DETECT = dict(objective="detect", model="mask_rcnn", mixtoken=False, smoothing=0.0, ema=0.0)
PHOTOS = dict(
    **DENSE,
    **DETECT,
    dataset="instances",
    # With 512 regions an image a step took 1.5 s of a CPU core, with 64 0.5.
    model_kwargs=(
        "backbone='lvvit_micro'",
        "decoder_width=32",
        "samples=64",
        *MICRO["model_kwargs"],
    ),
)
# Swin's common schedule 1x, of 7,330 steps an epoch. Its images are whole, with shorter sides of
# 480 to 800 pixels; here crops of half the image or more, shown smaller by up to 0.6.
COCO_1X = dict(
    **DETECT,
    dataset="coco/coco/annotations/instances_train2017.json",
    init=tyro.MISSING,
    size=800,
    crop_scale=(0.5, 1.0),
    zoom_out=0.4,
    hflip=0.5,
    epochs=12,
    warmup_epochs=0.14,
    batch=16,
    optimizer="adamw",
    lr=1e-4,
    lr_batch=16,
    min_lr=0.0,
    weight_decay=0.05,
    eval_every=4,
)

RECIPES = {
    **table(
        """Mask R-CNN on the student of photo scenes, with the boxes and masks of 60 classes.

Minutes on a CPU. Give a run of photos_ce or photos_token_label to --init.""",
        with_options(Config(), **PHOTOS),
        data=SCENE_FOLDERS,
        detect_photos=({},),
    ),
    **table(
        """Mask R-CNN on Swin-T: Swin's schedule 1x on COCO 2017.

Fine-tuned without DRLoc's loss, from a run with it or without (section 4 of the supplementary).
Different here: the rate falls by a cosine, not in two steps; crops have one size, not whole images
many; proposals and heads are those of torchvision, not mmdetection.""",
        with_options(Config(), **COCO_1X),
        "Tables 10 and 11, AP, AP50 and AP75 of boxes, then of masks",
        data=COCO,
        detect_coco_swin_t=(
            dict(model_kwargs=("backbone='swin_tiny_patch4_window7_224'",), drop_path=0.1),
            "ImageNet-1k 43.8 / 66.5 / 48.0 / 39.7 / 63.1 / 42.5 (43.4 / 66.2 / 47.4 / 39.6 / 63.0 "
            "/ 42.6 without DRLoc), ImageNet-100 42.7 / 61.3 / 45.9 / 37.2 / 58.4 / 40.0 (41.8 / "
            "60.3 / 45.1 / 36.7 / 57.4 / 39.4)",
            "runs/swin_t_drloc/last.pt",
        ),
    ),
}
