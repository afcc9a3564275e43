"""Recipes of LV-ViT: token, dense and image labels (Token Labeling, arXiv 2104.10858).

Tables and sections are those of that paper unless another source is named. Accuracies are top-1 on
ImageNet's validation set.
"""

import tyro

from densefeed.system.options import with_options
from densefeed.training.config import Config

# ---------------------------------------------------------------- bases

# One base for each column of Table 2: 300 epochs with a batch of 1,024 images, AdamW, weight decay
# 0.05, 5 epochs of warm-up. Learning rates are per 640 images with token labels and per 1,024
# otherwise. Dense labels are combined with MixToken. For hard labels the table lists MixUp alone;
# CutMix is added as in DeiT (the caption of Table 7 has both).
TOKEN_LABEL = with_options(
    Config(), lr=1e-3, lr_batch=640, rand_augment="rand-m9-mstd0.5-inc1", erase_probability=0.25
)
RELABEL = with_options(TOKEN_LABEL, objective="relabel", lr_batch=1024)
STANDARD = with_options(
    TOKEN_LABEL, objective="ce", lr_batch=1024, mixtoken=False, mixup=0.8, cutmix=1.0
)

# Drop-path is that of the published commands (0.1 in the paper, 0.2 for M), the crop that of the
# published evaluation. The EMA is that of the published commands of T, S and M; L has none there.
T, S = dict(model="lvvit_t"), dict(model="lvvit_s")
M = dict(model="lvvit_m", drop_path=0.2, crop_pct=1.0)
L = dict(model="lvvit_l", drop_path=0.3, crop_pct=1.0)


def as_published(config: Config, **fields: object) -> Config:
    """Return a config with the options and the label pipeline of the published commands.

    Learning rates are per 1,024 images and change once per epoch, ten epochs follow the cosine, and
    the token loss has weight 1 instead of the paper's 0.5. Images are flipped and augmented as a
    whole, then cropped and resized bilinearly or bicubically at random; maps are read where the
    published code reads them. Evaluation is bicubic. The recipes' own docstrings, which --help
    prints, name the score maps that they need and the differences that remain.
    """
    run = dict(lr=1.6e-3, lr_batch=1024, lr_updates="epoch", cooldown_epochs=10, token_weight=1.0)
    images = dict(
        augment_before_crop=True, crop_interpolation="random", eval_interpolation="bicubic"
    )
    labels = dict(geometry="published", outside="uniform")
    return with_options(config, **(run | images | labels | fields))


def fine_tune(config: Config, size: int) -> Config:
    """Return a config that fine-tunes at `size` pixels; `init` must be given.

    30 epochs, batch 512, learning rate 5e-6, weight decay 1e-8 (section 1 of the supplementary).
    The rest is as in training, including MixToken and token labels. The learning rate stays at its
    peak after the warm-up and there is no EMA, as in the published command.
    """
    return with_options(
        config,
        size=size,
        init=tyro.MISSING,
        epochs=30,
        batch=512,
        lr=5e-6,
        lr_batch=512,
        min_lr=5e-6,
        weight_decay=1e-8,
        ema=0.0,
    )


# ---------------------------------------------------------------- 224 pixels


def lvvit_t_224_token_label() -> Config:
    """LV-ViT-T with token labels and MixToken, 300 epochs.

    python train.py lvvit_t_224_token_label --loader ffcv --data train.beton --val val.beton \\
        --out runs/lvvit_t_224_token_label

    Table 8: 79.1 %. Not run here.
    """
    return with_options(TOKEN_LABEL, **T)


def lvvit_s_224_token_label() -> Config:
    """LV-ViT-S with token labels and MixToken, 300 epochs.

    python train.py lvvit_s_224_token_label --loader ffcv --data train.beton --val val.beton \\
        --out runs/lvvit_s_224_token_label

    Table 8: 83.3 %. Table 10, with ReaL labels (tools/validate.py --real timm): 88.1 %. Not run
    here.
    """
    return with_options(TOKEN_LABEL, **S)


def lvvit_m_224_token_label() -> Config:
    """LV-ViT-M with token labels and MixToken, 300 epochs.

    python train.py lvvit_m_224_token_label --loader ffcv --data train.beton --val val.beton \\
        --out runs/lvvit_m_224_token_label

    Table 8: 84.0 %. Table 10, with ReaL labels (tools/validate.py --real timm): 88.4 %. Not run
    here.
    """
    return with_options(TOKEN_LABEL, **M)


def lvvit_l_224_token_label() -> Config:
    """LV-ViT-L with token labels and MixToken, 300 epochs.

    python train.py lvvit_l_224_token_label --loader ffcv --data train.beton --val val.beton \\
        --out runs/lvvit_l_224_token_label

    No published result: L of Table 8 is lvvit_l_288_token_label. The published command of L has no
    EMA, and the paper mentions none for any model: --ema 0. Not run here.
    """
    return with_options(TOKEN_LABEL, **L)


def lvvit_t_224_relabel() -> Config:
    """LV-ViT-T with one dense label per crop (ReLabel, arXiv 2101.05022) and MixToken.

    python train.py lvvit_t_224_relabel --loader ffcv --data train.beton --val val.beton \\
        --out runs/lvvit_t_224_relabel

    Settings of the second column of Table 2; no published result. Not run here.
    """
    return with_options(RELABEL, **T)


def lvvit_s_224_relabel() -> Config:
    """LV-ViT-S with one dense label per crop (ReLabel, arXiv 2101.05022) and MixToken.

    python train.py lvvit_s_224_relabel --loader ffcv --data train.beton --val val.beton \\
        --out runs/lvvit_s_224_relabel

    Table 6, MixToken with re-labeling: 83.0 %. Not run here.
    """
    return with_options(RELABEL, **S)


def lvvit_m_224_relabel() -> Config:
    """LV-ViT-M with one dense label per crop (ReLabel, arXiv 2101.05022) and MixToken.

    python train.py lvvit_m_224_relabel --loader ffcv --data train.beton --val val.beton \\
        --out runs/lvvit_m_224_relabel

    Settings of the second column of Table 2; no published result. Not run here.
    """
    return with_options(RELABEL, **M)


def lvvit_l_224_relabel() -> Config:
    """LV-ViT-L with one dense label per crop (ReLabel, arXiv 2101.05022) and MixToken.

    python train.py lvvit_l_224_relabel --loader ffcv --data train.beton --val val.beton \\
        --out runs/lvvit_l_224_relabel

    Settings of the second column of Table 2; no published result. Not run here.
    """
    return with_options(RELABEL, **L)


def lvvit_t_224_standard() -> Config:
    """LV-ViT-T with image labels, MixUp and CutMix.

    python train.py lvvit_t_224_standard --loader ffcv --data train.beton --val val.beton \\
        --out runs/lvvit_t_224_standard

    Settings of the first column of Table 2; no published result. Not run here.
    """
    return with_options(STANDARD, **T)


def lvvit_s_224_standard() -> Config:
    """LV-ViT-S with image labels, MixUp and CutMix.

    python train.py lvvit_s_224_standard --loader ffcv --data train.beton --val val.beton \\
        --out runs/lvvit_s_224_standard

    Table 3, the last row with image labels (Table 5, row 2): 82.4 %. Not run here.
    """
    return with_options(STANDARD, **S)


def lvvit_m_224_standard() -> Config:
    """LV-ViT-M with image labels, MixUp and CutMix.

    python train.py lvvit_m_224_standard --loader ffcv --data train.beton --val val.beton \\
        --out runs/lvvit_m_224_standard

    Settings of the first column of Table 2; no published result. Not run here.
    """
    return with_options(STANDARD, **M)


def lvvit_l_224_standard() -> Config:
    """LV-ViT-L with image labels, MixUp and CutMix.

    python train.py lvvit_l_224_standard --loader ffcv --data train.beton --val val.beton \\
        --out runs/lvvit_l_224_standard

    Settings of the first column of Table 2; no published result. Not run here.
    """
    return with_options(STANDARD, **L)


def lvvit_s_160_to_224_token_label() -> Config:
    """lvvit_s_224_token_label with growing inputs: 160 px, then 192 px, then 224 px.

    python train.py lvvit_s_160_to_224_token_label --loader ffcv --data train.beton \\
        --val val.beton --out runs/lvvit_s_160_to_224

    192 px begin at epoch 100, 224 px at epoch 200. An epoch at 160 px has half the tokens of one at
    224 px (100 instead of 196), at 192 px three quarters (144), so the whole run has 75 % of them.
    Not run here.
    """
    return with_options(TOKEN_LABEL, **S, sizes=((0, 160), (100, 192), (200, 224)))


def lvvit_l_288_token_label() -> Config:
    """LV-ViT-L with token labels and MixToken at 288 pixels, the start of lvvit_l_448_fine_tune.

    python train.py lvvit_l_288_token_label --loader ffcv --data train.beton --val val.beton \\
        --out runs/lvvit_l_288_token_label

    Table 8: 85.3 %. Table 10, with ReaL labels (tools/validate.py --real timm): 89.3 %. The
    published command of L has no EMA, and the paper mentions none for any model: --ema 0. Not run
    here.
    """
    return with_options(TOKEN_LABEL, **L, size=288)


# ---------------------------------------------------------------- published commands


def lvvit_t_224_token_label_published() -> Config:
    """LV-ViT-T with the published command and label geometry, 310 epochs.

    Images are flipped and augmented as a whole, then cropped and resized bilinearly or bicubically
    at random; evaluation is bicubic. The token loss has weight 1 (the paper: 0.5). Score maps must
    be those of tools/relabel_imagenet.py --geometry center-crop --absent zero-logit. Three
    differences remain: the EMA has a warm-up here; evaluation resizes the crop of an image, not the
    image before the crop; and the last images of an epoch, too few for a batch, are trained on
    (1,252 steps of ImageNet, not 1,251).

    python train.py lvvit_t_224_token_label_published --loader ffcv --data train.beton \\
        --val val.beton --out runs/lvvit_t_published

    The published weights reach 79.1 %. Not run here.
    """
    return as_published(with_options(TOKEN_LABEL, **T))


def lvvit_s_224_token_label_published() -> Config:
    """LV-ViT-S with the published command and label geometry, 310 epochs.

    Images are flipped and augmented as a whole, then cropped and resized bilinearly or bicubically
    at random; evaluation is bicubic. The token loss has weight 1 (the paper: 0.5). Score maps must
    be those of tools/relabel_imagenet.py --geometry center-crop --absent zero-logit. Three
    differences remain: the EMA has a warm-up here; evaluation resizes the crop of an image, not the
    image before the crop; and the last images of an epoch, too few for a batch, are trained on
    (1,252 steps of ImageNet, not 1,251).

    python train.py lvvit_s_224_token_label_published --loader ffcv --data train.beton \\
        --val val.beton --out runs/lvvit_s_published

    The published weights reach 83.3 %. Not run here.
    """
    return as_published(with_options(TOKEN_LABEL, **S))


def lvvit_m_224_token_label_published() -> Config:
    """LV-ViT-M with the published command and label geometry, 310 epochs.

    Images are flipped and augmented as a whole, then cropped and resized bilinearly or bicubically
    at random; evaluation is bicubic. The token loss has weight 1 (the paper: 0.5). Score maps must
    be those of tools/relabel_imagenet.py --geometry center-crop --absent zero-logit. Three
    differences remain: the EMA has a warm-up here; evaluation resizes the crop of an image, not the
    image before the crop; and the last images of an epoch, too few for a batch, are trained on
    (1,252 steps of ImageNet, not 1,251).

    python train.py lvvit_m_224_token_label_published --loader ffcv --data train.beton \\
        --val val.beton --out runs/lvvit_m_published

    The published weights reach 84.0 %. Not run here.
    """
    return as_published(with_options(TOKEN_LABEL, **M))


def lvvit_l_224_token_label_published() -> Config:
    """LV-ViT-L with the published command and label geometry, 310 epochs.

    Images are flipped and augmented as a whole, by three operations of RandAugment, then cropped
    and resized bilinearly or bicubically at random; evaluation is bicubic. The token loss has
    weight 1 (the paper: 0.5), the learning rate is lower than that of T, S and M, and there is no
    EMA. Score maps must be those of tools/relabel_imagenet.py --geometry center-crop --absent
    zero-logit. Two differences remain: evaluation resizes the crop of an image, not the image
    before the crop; and the last images of an epoch, too few for a batch, are trained on (1,252
    steps of ImageNet, not 1,251).

    python train.py lvvit_l_224_token_label_published --loader ffcv --data train.beton \\
        --val val.beton --out runs/lvvit_l_published

    No result is published for 224 px. Not run here.
    """
    return as_published(
        with_options(TOKEN_LABEL, **L), lr=1e-3, ema=0.0, rand_augment="rand-n3-m9-mstd0.5-inc1"
    )


# ---------------------------------------------------------------- larger inputs


def lvvit_l_288_fine_tune() -> Config:
    """Fine-tune LV-ViT-L at 288 pixels with token labels, 30 epochs.

    python train.py lvvit_l_288_fine_tune --loader ffcv --data train.beton --val val.beton \\
        --out runs/lvvit_l_288_fine_tune \\
        --init runs/lvvit_l_224_token_label/last.pt

    No published result: the paper trains at 288 px from scratch, lvvit_l_288_token_label. Not run
    here.
    """
    return fine_tune(with_options(TOKEN_LABEL, **L), 288)


def lvvit_s_384_fine_tune() -> Config:
    """Fine-tune LV-ViT-S at 384 pixels with token labels, 30 epochs.

    python train.py lvvit_s_384_fine_tune --loader ffcv --data train.beton --val val.beton \\
        --out runs/lvvit_s_384_fine_tune \\
        --init runs/lvvit_s_224_token_label/last.pt

    Table 3, last row: 84.4 %. Table 10, with ReaL labels (tools/validate.py --real timm): 88.9 %.
    Not run here.
    """
    return fine_tune(with_options(TOKEN_LABEL, **S), 384)


def lvvit_m_384_fine_tune() -> Config:
    """Fine-tune LV-ViT-M at 384 pixels with token labels, 30 epochs.

    python train.py lvvit_m_384_fine_tune --loader ffcv --data train.beton --val val.beton \\
        --out runs/lvvit_m_384_fine_tune \\
        --init runs/lvvit_m_224_token_label/last.pt

    Table 10: 85.4 %, with ReaL labels (tools/validate.py --real timm) 89.5 %. Not run here.
    """
    return fine_tune(with_options(TOKEN_LABEL, **M), 384)


def lvvit_m_448_fine_tune() -> Config:
    """Fine-tune LV-ViT-M at 448 pixels with token labels, 30 epochs.

    python train.py lvvit_m_448_fine_tune --loader ffcv --data train.beton --val val.beton \\
        --out runs/lvvit_m_448_fine_tune \\
        --init runs/lvvit_m_224_token_label/last.pt

    The published weights reach 85.5 %. Not run here.
    """
    return fine_tune(with_options(TOKEN_LABEL, **M), 448)


def lvvit_l_448_fine_tune() -> Config:
    """Fine-tune LV-ViT-L at 448 pixels with token labels, 30 epochs.

    python train.py lvvit_l_448_fine_tune --loader ffcv --data train.beton --val val.beton \\
        --out runs/lvvit_l_448_fine_tune \\
        --init runs/lvvit_l_288_token_label/last.pt

    Table 10: 85.9 % with a train size of 288 px, 86.2 % with 448 px; with ReaL labels
    (tools/validate.py --real timm) 89.7 and 89.9 %. In the rows of S and M the train size is that
    before fine-tuning; for L the paper does not state which it is. Not run here.
    """
    return fine_tune(with_options(TOKEN_LABEL, **L), 448)


def lvvit_l_512_fine_tune() -> Config:
    """Fine-tune LV-ViT-L at 512 pixels with token labels, 30 epochs.

    python train.py lvvit_l_512_fine_tune --loader ffcv --data train.beton --val val.beton \\
        --out runs/lvvit_l_512_fine_tune \\
        --init runs/lvvit_l_288_token_label/last.pt

    The published weights reach 86.4 %. Not run here.
    """
    return fine_tune(with_options(TOKEN_LABEL, **L), 512)
