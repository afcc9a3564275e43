"""Recipes of LV-ViT: token, dense and image labels (Token Labeling, arXiv 2104.10858).

Tables and sections are those of that paper unless another source is named. Accuracies are top-1 on
ImageNet's validation set.
"""

import tyro

from densefeed.recipes.recipe import table
from densefeed.system.options import with_options
from densefeed.training.config import Config

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
# Options and label pipeline of the published commands: learning rates are per 1,024 images and
# change once per epoch, ten epochs follow the cosine. Images are flipped and augmented as a whole,
# then cropped; maps are read where the published code reads them.
PUBLISHED = with_options(
    TOKEN_LABEL,
    lr=1.6e-3,
    lr_batch=1024,
    lr_updates="epoch",
    cooldown_epochs=10,
    token_weight=1.0,
    augment_before_crop=True,
    crop_interpolation="random",
    eval_interpolation="bicubic",
    geometry="published",
    outside="uniform",
)
# Section 1 of the supplementary. The rest is as in training: the cosine, MixToken, token labels.
# The cosine ends at 0: the paper names no floor, and that of training, 1e-5, is above the peak.
FINE_TUNING = dict(
    init=tyro.MISSING, epochs=30, batch=512, lr=5e-6, lr_batch=512, weight_decay=1e-8, ema=0.0
)
FINE_TUNE = with_options(TOKEN_LABEL, **FINE_TUNING, min_lr=0.0)
# The published command, of S alone, keeps the rate at its peak after the warm-up.
FINE_TUNE_PUBLISHED = with_options(PUBLISHED, **FINE_TUNING, min_lr=5e-6)

# Drop-path is that of the published commands (0.1 in the paper, 0.2 for M), the crop that of the
# published evaluation. The EMA is that of the published commands of T, S and M; L has none there.
T, S = dict(model="lvvit_t"), dict(model="lvvit_s")
M = dict(model="lvvit_m", drop_path=0.2, crop_pct=1.0)
L = dict(model="lvvit_l", drop_path=0.3, crop_pct=1.0)
L_PUBLISHED = L | dict(lr=1e-3, ema=0.0, rand_augment="rand-n3-m9-mstd0.5-inc1")

FROM_S, FROM_M, FROM_L = (
    f"runs/lvvit_{name}_token_label/last.pt" for name in ("s_224", "m_224", "l_288")
)

# What no table of the paper has.
UNLISTED = "Label smoothing of 0.1{} are not in the paper's tables, but in its published commands."

RECIPES = {
    # The published command of L has no EMA, and the paper mentions none for any model: --ema 0.
    **table(
        "LV-ViT with token labels and MixToken, 300 epochs.\n\n"
        + UNLISTED.format(" and the EMA of T, S and M"),
        TOKEN_LABEL,
        "Table 8, and Table 10 with ReaL labels (densefeed validate --real timm)",
        lvvit_t_224_token_label=(T, "79.1 %"),
        lvvit_s_224_token_label=(S, "83.3 and 88.1 %"),
        lvvit_m_224_token_label=(M, "84.0 and 88.4 %"),
        lvvit_l_288_token_label=(L | dict(size=288), "85.3 and 89.3 %, without EMA (--ema 0)"),
    ),
    **table(
        "LV-ViT with one dense label per crop (ReLabel, arXiv 2101.05022) and MixToken.\n\n"
        + UNLISTED.format(" and the EMA"),
        RELABEL,
        "Table 6, MixToken with re-labeling",
        lvvit_s_224_relabel=(S, "83.0 %"),
    ),
    **table(
        "LV-ViT with image labels, MixUp and CutMix.\n\n"
        "Table 2 lists neither CutMix, here as in DeiT, nor smoothing of 0.1 nor the EMA.",
        STANDARD,
        "Table 3, the last row with image labels (Table 5, row 2)",
        lvvit_s_224_standard=(S, "82.4 %"),
    ),
    **table(
        """LV-ViT with the published command and label geometry, 310 epochs.

Images are flipped and augmented as a whole, then cropped and resized bilinearly or bicubically at
random; evaluation is bicubic. The token loss has weight 1 (the paper: 0.5). Score maps must be
those of densefeed label --geometry center-crop --absent zero-logit. Three differences
remain: the EMA of T, S and M has a warm-up here; evaluation resizes the crop of an image, not the
image before the crop; and the last images of an epoch, too few for a batch, are trained on (1,252
steps of ImageNet, not 1,251).""",
        PUBLISHED,
        "The published weights",
        lvvit_t_224_token_label_published=(T, "79.1 %"),
        lvvit_s_224_token_label_published=(S, "83.3 %"),
        lvvit_m_224_token_label_published=(M, "84.0 %"),
        lvvit_l_224_token_label_published=(L_PUBLISHED, "none for 224 px"),
    ),
    # Table 10 has L at 448 px with train sizes of 288 and 448 px. In the rows of S and M that is
    # the size before fine-tuning; for L the paper does not state which it is.
    **table(
        """Fine-tune LV-ViT with token labels at a larger size, 30 epochs.

The supplementary's section 1: a cosine from 5e-6, other settings those of training, without EMA.
The published command keeps the rate constant after the warm-up: --min-lr 5e-6.""",
        FINE_TUNE,
        "Table 10, also with ReaL labels (densefeed validate --real timm), or published weights",
        lvvit_s_384_fine_tune=(S | dict(size=384), "84.4 and 88.9 %", FROM_S),
        lvvit_m_384_fine_tune=(M | dict(size=384), "85.4 and 89.5 %", FROM_M),
        lvvit_m_448_fine_tune=(M | dict(size=448), "85.5 %", FROM_M),
        lvvit_l_448_fine_tune=(L | dict(size=448), "85.9 or 86.2, 89.7 or 89.9 %", FROM_L),
        lvvit_l_512_fine_tune=(L | dict(size=512), "86.4 %", FROM_L),
    ),
    # Other sizes have no published command.
    **table(
        """Fine-tune LV-ViT with the published command and label geometry.

The learning rate is 5e-6 to the end after the warm-up; the paper has a cosine. The command names no
number of epochs: here the 30 of the paper and the 10 that the published code adds. Otherwise as
lvvit_s_224_token_label_published, whose help names what remains different.""",
        FINE_TUNE_PUBLISHED,
        "The published weights",
        lvvit_s_384_fine_tune_published=(
            S | dict(size=384),
            "84.4 %",
            "runs/lvvit_s_224_token_label_published/last.pt",
        ),
    ),
}
