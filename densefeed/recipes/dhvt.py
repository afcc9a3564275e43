"""Recipes of DHVT, for small datasets (arXiv 2210.05958)."""

import tyro

from densefeed.recipes.lvvit import STANDARD
from densefeed.recipes.recipe import table
from densefeed.system.options import with_options

# Tables and sections are those of DHVT's supplementary. It takes mixing, RandAugment, erasing,
# smoothing and bicubic resizing from DeiT, and its published commands set drop-path 0.1, min_lr
# 1e-5 and no EMA; the base has all of these. CIFAR's images are shifted by up to 4 pixels with a
# black border, not random-resized-cropped, as in the published code. The published code
# synchronizes the BatchNorm of the embedding over its two devices; --sync-batchnorm synchronizes
# every BatchNorm, and has no effect on one device.
DHVT = with_options(
    STANDARD,
    lr_batch=512,
    drop_path=0.1,
    ema=0.0,
    crop_pct=0.875,
    crop_interpolation="bicubic",
    eval_interpolation="bicubic",
)
CIFAR = with_options(
    DHVT,
    size=32,
    shift=4,
    shift_border="black",
    crop_scale=(1.0, 1.0),
    crop_pct=1.0,
    batch=512,
    lr=1e-3,
    warmup_epochs=5,
)
DOMAIN = with_options(DHVT, batch=256, lr=1e-3, warmup_epochs=20)
IMAGENET = with_options(DHVT, batch=512, lr=5e-4, warmup_epochs=10)
# Table 10: the scheme of DRLoc (arXiv 2106.03746), whose public code clips gradients. DHVT's own
# code does not: --clip-grad 0.
HUNDRED = with_options(
    DHVT, batch=1024, lr=1e-3, lr_batch=1024, warmup_epochs=20, epochs=100, clip_grad=5.0
)
# Tables 1 and 8, with min_lr of the published command. That command also halves the learning rate
# (--lr 2.5e-4) and trains in evaluation mode (--frozen-statistics).
TRANSFER = with_options(
    DHVT,
    init=tyro.MISSING,
    batch=256,
    lr=5e-4,
    lr_batch=256,
    min_lr=1e-6,
    weight_decay=1e-8,
    warmup_epochs=2,
    epochs=100,
)
T, S = dict(model="dhvt_tiny_domain_patch16"), dict(model="dhvt_small_domain_patch16")
# Trained on ImageNet with a stem of its own.
T_IMAGENET = dict(model="dhvt_tiny_imagenet_patch16")
S_IMAGENET = dict(model="dhvt_small_imagenet_patch16")
FROM_T, FROM_S = (f"runs/dhvt_{size}_imagenet/last.pt" for size in "ts")

# What the published accuracies have beside these settings.
UNLISTED = """The published commands also repeat each image three times, unlike the paper: --repeats
3 with a batch that 3 divides, and a third of the epochs and of the warm-up. The published
accuracies are those of the best epoch on the test set."""

RECIPES = {
    # Section 2.1 does not name the model of its figure; it is the largest one's.
    **table(
        "DHVT on CIFAR-10 or CIFAR-100 at 32 pixels, patches of 4 or 2 pixels, 300 epochs.\n\n"
        + UNLISTED,
        CIFAR,
        "Tables 4, 5 and 11 and Section 2.1, CIFAR-100",
        dhvt_t_cifar_patch4=(
            dict(model="dhvt_tiny_cifar_patch4"),
            "80.98 % (80.85, 80.90 in others)",
        ),
        dhvt_t_cifar_patch2=(dict(model="dhvt_tiny_cifar_patch2"), "no accuracy"),
        dhvt_s_cifar_patch4=(dict(model="dhvt_small_cifar_patch4"), "82.82 %"),
        dhvt_s_cifar_patch2=(dict(model="dhvt_small_cifar_patch2"), "85.68 %"),
    ),
    # The other rows of Table 7 are --model resnet50, resnext50_32x4d and cvt_13, with --drop-path 0
    # for the first two.
    **table(
        f"DHVT on one of the six sets of DomainNet at 224 pixels, 300 epochs.\n\n{UNLISTED}",
        DOMAIN,
        "Table 7, clipart / painting / sketch / infograph / real / quickdraw",
        dhvt_t_domain=(T, "71.73 / 63.34 / 66.60 / 32.60 / 81.31 / 74.41 %"),
        dhvt_s_domain=(S, "73.89 / 66.08 / 68.72 / 35.11 / 83.64 / 74.38 %"),
    ),
    **table(
        f"DHVT on ImageNet, 300 epochs.\n\n{UNLISTED}",
        IMAGENET,
        "Table 9",
        dhvt_t_imagenet=(T_IMAGENET, "76.5 %"),
        dhvt_s_imagenet=(S_IMAGENET, "82.3 %"),
    ),
    # The other rows of Table 10 are those of drloc.py.
    **table(
        f"DHVT at 224 pixels, 100 epochs, with the schedule of DRLoc.\n\n{UNLISTED}",
        HUNDRED,
        "Table 10, CIFAR-100 / clipart / painting / sketch",
        dhvt_t_100_epochs=(T, "74.78 / 58.94 / 52.64 / 56.66 %"),
        dhvt_s_100_epochs=(S, "78.64 / 64.75 / 56.42 / 61.35 %"),
    ),
    **table(
        f"Fine-tune DHVT from ImageNet on a small set at 224 pixels, 100 epochs.\n\n{UNLISTED}",
        TRANSFER,
        "Tables 1 and 8, CIFAR-100 / clipart / painting / sketch",
        dhvt_t_fine_tune=(T_IMAGENET, "86.73 / 77.88 / 72.05 / 70.79 %", FROM_T),
        dhvt_s_fine_tune=(S_IMAGENET, "88.87 / 80.06 / 74.18 / 73.32 %", FROM_S),
    ),
}
