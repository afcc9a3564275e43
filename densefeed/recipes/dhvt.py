"""Recipes of DHVT, for small datasets (arXiv 2210.05958)."""

import tyro

from densefeed.recipes.lvvit import STANDARD, TOKEN_LABEL
from densefeed.system.options import with_options
from densefeed.training.config import Config

# Tables and sections are those of DHVT's supplementary. It takes mixing, RandAugment, erasing,
# smoothing and bicubic resizing from DeiT, and its published commands set drop-path 0.1, min_lr
# 1e-5 and no EMA; the base has all of these. The commands also use repeated augmentation, which the
# paper does not mention: give --repeats 3 with a batch that 3 divides, and divide epochs and
# warm-up by 3. The published results are those of the best epoch on the test set. CIFAR's images
# are shifted by up to 4 pixels with a black border, not random-resized-cropped, as in the published
# code. The published code synchronizes the BatchNorm of the embedding over its two devices;
# --sync-batchnorm synchronizes every BatchNorm, and has no effect on one device.
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


def dhvt_t_cifar_patch4() -> Config:
    """DHVT-T on CIFAR-10 or CIFAR-100 at 32 pixels, 8 x 8 tokens, 300 epochs.

    python train.py dhvt_t_cifar_patch4 --loader ffcv --data train.beton --val val.beton \\
        --out runs/dhvt_t_cifar_patch4

    Table 5: 80.98 % on CIFAR-100 (other tables have 80.85 and 80.90). Not run here.
    """
    return with_options(CIFAR, model="dhvt_tiny_cifar_patch4")


def dhvt_t_cifar_patch2() -> Config:
    """DHVT-T on CIFAR-10 or CIFAR-100 at 32 pixels, 16 x 16 tokens, 300 epochs.

    python train.py dhvt_t_cifar_patch2 --loader ffcv --data train.beton --val val.beton \\
        --out runs/dhvt_t_cifar_patch2

    Table 11 lists this model; no table has its accuracy. Not run here.
    """
    return with_options(CIFAR, model="dhvt_tiny_cifar_patch2")


def dhvt_s_cifar_patch4() -> Config:
    """DHVT-S on CIFAR-10 or CIFAR-100 at 32 pixels, 8 x 8 tokens, 300 epochs.

    python train.py dhvt_s_cifar_patch4 --loader ffcv --data train.beton --val val.beton \\
        --out runs/dhvt_s_cifar_patch4

    Table 4: 82.82 % on CIFAR-100. Not run here.
    """
    return with_options(CIFAR, model="dhvt_small_cifar_patch4")


def dhvt_s_cifar_patch2() -> Config:
    """DHVT-S on CIFAR-10 or CIFAR-100 at 32 pixels, 16 x 16 tokens, 300 epochs.

    python train.py dhvt_s_cifar_patch2 --loader ffcv --data train.beton --val val.beton \\
        --out runs/dhvt_s_cifar_patch2

    Section 2.1: 85.68 % on CIFAR-100, for a model that it does not name; this is the largest model
    of Table 11 for CIFAR. Not run here.
    """
    return with_options(CIFAR, model="dhvt_small_cifar_patch2")


def dhvt_t_domain() -> Config:
    """DHVT-T on one of the six sets of DomainNet at 224 pixels, 300 epochs.

    python train.py dhvt_t_domain --loader ffcv --data train.beton --val val.beton \\
        --out runs/dhvt_t_domain

    Table 7, clipart, painting, sketch, infograph, real, quickdraw: 71.73 / 63.34 / 66.60 / 32.60 /
    81.31 / 74.41 %. For its other rows give --model resnet50, resnext50_32x4d or cvt_13, with
    --drop-path 0 for the first two. Not run here.
    """
    return with_options(DOMAIN, model="dhvt_tiny_domain_patch16")


def dhvt_s_domain() -> Config:
    """DHVT-S on one of the six sets of DomainNet at 224 pixels, 300 epochs.

    python train.py dhvt_s_domain --loader ffcv --data train.beton --val val.beton \\
        --out runs/dhvt_s_domain

    Table 7, clipart, painting, sketch, infograph, real, quickdraw: 73.89 / 66.08 / 68.72 / 35.11 /
    83.64 / 74.38 %. Not run here.
    """
    return with_options(DOMAIN, model="dhvt_small_domain_patch16")


def dhvt_t_imagenet() -> Config:
    """DHVT-T on ImageNet, 300 epochs.

    python train.py dhvt_t_imagenet --loader ffcv --data train.beton --val val.beton \\
        --out runs/dhvt_t_imagenet

    Table 9: 76.5 %. Not run here.
    """
    return with_options(IMAGENET, model="dhvt_tiny_imagenet_patch16")


def dhvt_s_imagenet() -> Config:
    """DHVT-S on ImageNet, 300 epochs.

    python train.py dhvt_s_imagenet --loader ffcv --data train.beton --val val.beton \\
        --out runs/dhvt_s_imagenet

    Table 9: 82.3 %. Not run here.
    """
    return with_options(IMAGENET, model="dhvt_small_imagenet_patch16")


def dhvt_t_imagenet_token_label() -> Config:
    """DHVT-T with a head on every token, token labels and MixToken.

    python train.py dhvt_t_imagenet_token_label --loader ffcv --data train.beton --val val.beton \\
        --out runs/dhvt_t_imagenet_token_label

    Settings of Token Labeling; no published result. Not run here.
    """
    return with_options(TOKEN_LABEL, model="dhvt_tiny_imagenet_patch16", crop_pct=0.875)


def dhvt_s_imagenet_token_label() -> Config:
    """DHVT-S with a head on every token, token labels and MixToken.

    python train.py dhvt_s_imagenet_token_label --loader ffcv --data train.beton --val val.beton \\
        --out runs/dhvt_s_imagenet_token_label

    Settings of Token Labeling; no published result. Not run here.
    """
    return with_options(TOKEN_LABEL, model="dhvt_small_imagenet_patch16", crop_pct=0.875)


def dhvt_t_100_epochs() -> Config:
    """DHVT-T at 224 pixels, 100 epochs, with the schedule of DRLoc.

    python train.py dhvt_t_100_epochs --loader ffcv --data train.beton --val val.beton \\
        --out runs/dhvt_t_100_epochs

    Table 10, CIFAR-100, clipart, painting, sketch: 74.78 / 58.94 / 52.64 / 56.66 %. Its other rows
    are the recipes swin_t_drloc, cvt_drloc, t2t_drloc and resnet_50_drloc. Not run here.
    """
    return with_options(HUNDRED, model="dhvt_tiny_domain_patch16")


def dhvt_s_100_epochs() -> Config:
    """DHVT-S at 224 pixels, 100 epochs, with the schedule of DRLoc.

    python train.py dhvt_s_100_epochs --loader ffcv --data train.beton --val val.beton \\
        --out runs/dhvt_s_100_epochs

    Table 10, CIFAR-100, clipart, painting, sketch: 78.64 / 64.75 / 56.42 / 61.35 %. Its other rows
    are the recipes swin_t_drloc, cvt_drloc, t2t_drloc and resnet_50_drloc. Not run here.
    """
    return with_options(HUNDRED, model="dhvt_small_domain_patch16")


def dhvt_t_fine_tune() -> Config:
    """Fine-tune DHVT-T from ImageNet on a small set at 224 pixels, 100 epochs.

    python train.py dhvt_t_fine_tune --loader ffcv --data train.beton --val val.beton \\
        --out runs/dhvt_t_fine_tune \\
        --init runs/dhvt_t_imagenet/last.pt

    Table 1, CIFAR-100: 86.73 %. Table 8, clipart, painting, sketch: 77.88 / 72.05 / 70.79 %. Not
    run here.
    """
    return with_options(TRANSFER, model="dhvt_tiny_imagenet_patch16")


def dhvt_s_fine_tune() -> Config:
    """Fine-tune DHVT-S from ImageNet on a small set at 224 pixels, 100 epochs.

    python train.py dhvt_s_fine_tune --loader ffcv --data train.beton --val val.beton \\
        --out runs/dhvt_s_fine_tune \\
        --init runs/dhvt_s_imagenet/last.pt

    Table 1, CIFAR-100: 88.87 %. Table 8, clipart, painting, sketch: 80.06 / 74.18 / 73.32 %. Not
    run here.
    """
    return with_options(TRANSFER, model="dhvt_small_imagenet_patch16")
