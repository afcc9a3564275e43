"""Recipes of DRLoc, for small datasets (arXiv 2106.03746)."""

import tyro

from densefeed.recipes.lvvit import STANDARD
from densefeed.recipes.recipe import table
from densefeed.system.options import with_options

# Tables are those of DRLoc's supplementary, whose section 6 has the schedule: 100 epochs with a
# batch of 1,024 images at 224 pixels, 20 of them warm-up. Mixing, RandAugment, erasing, smoothing,
# bicubic resizing, the maximum gradient norm and Swin's drop-path are those of the public code,
# which is Swin's trainer. The published results are those of the best epoch on the test set;
# baselines are these recipes with --drloc none. Weights of the loss are the paper's, whose offsets
# are fractions of 7 positions. The public code counts positions, so there the same weight counts 7
# times as much: the published results are those of weights of 3.5 (Swin-T), 0.7 (CvT-13,
# T2T-ViT-14) and, as ViT-B's grid is not pooled there, 0.14. DHVT's Table 10 (arXiv 2210.05958)
# quotes the paper's results on CIFAR-100, clipart, painting and sketch, which its supplementary
# does not have.
DRLOC = with_options(
    STANDARD,
    drop_path=0.0,
    epochs=100,
    warmup_epochs=20,
    clip_grad=5.0,
    ema=0.0,
    crop_pct=0.875,
    crop_interpolation="bicubic",
    eval_interpolation="bicubic",
    drloc="l1",
    drloc_weight=0.1,
)
# Section 6.
FINE_TUNE = with_options(DRLOC, init=tyro.MISSING, lr=5e-4, warmup_epochs=10)
SWIN = dict(model="swin_tiny_patch4_window7_224", drop_path=0.2, drloc_weight=0.5)
SWIN_CODE = dict(epochs=300, drloc_published=True)
# The public code's class token and position table have a standard deviation of 1, timm's of 0.02
# or less, and its norms add 1e-5, not 1e-6.
VIT = dict(model="vit_base_patch16_224", drloc_weight=0.01)
CVT, T2T, RESNET = (dict(model=name) for name in ("cvt_13_drloc", "t2t_vit_14", "resnet50"))

RECIPES = {
    # docs/results/papers.md has all figures: Tables 6 to 8 and 16, DHVT's Table 10, variants of the
    # loss (--drloc) and of its heads (--drloc-hidden), 300 epochs (--epochs 300).
    **table(
        """A model with DRLoc on 7 x 7 positions, to which larger grids are pooled, 100 epochs.

The public code does not divide offsets by the positions of the grid. In its scale the weight of the
loss is --drloc-weight 3.5 for Swin-T and --drloc-weight 0.7 for CvT-13, as in the DRLoc code, and
T2T-ViT-14. --drloc-published is the code's loss. The weight for ResNet-50 is not published. The
published accuracies are those of the best epoch on the test set.""",
        DRLOC,
        "CIFAR-100 / clipart / painting / sketch, of DHVT's Table 10",
        swin_t_drloc=(SWIN, "66.23 / 47.47 / 41.86 / 38.55 %; Table 6, IN-100: 84.02 %"),
        cvt_drloc=(CVT, "74.51 / 60.64 / 55.26 / 57.56 %"),
        t2t_drloc=(T2T, "68.03 / 52.36 / 42.78 / 51.95 %"),
        resnet_50_drloc=(RESNET, "72.94 / 63.93 / 53.52 / 59.62 %"),
    ),
    **table(
        """ViT-B/16 with DRLoc on its 14 x 14 tokens pooled to 7 x 7, 100 epochs.

The public code does not pool and counts positions: --drloc-grid 0 --drloc-weight 0.14. Its ViT has
no bias on q, k and v, and dropout after the attention's projection and both layers of the MLP:
--model-kwargs qkv_bias=False proj_drop_rate=0.1, 86,540,008 parameters, not 86,567,656.""",
        DRLOC,
        "Table 9, CIFAR-10 / CIFAR-100 / Infograph",
        vit_b_drloc=(VIT, "73.91 / 61.42 / 12.22 %"),
    ),
    **table(
        """Swin-T with DRLoc as in its public code: offsets in positions, a weight schedule.

The weight rises, then falls. That code plans 300 epochs and stops after 101 of them; stop this run
there with SIGTERM.""",
        DRLOC,
        "The author's latest published results, CIFAR-10 with a batch of 128, single runs",
        swin_t_drloc_published=(SWIN | SWIN_CODE, "88.29 % (86.17 without)"),
    ),
    # The weights of CvT's authors are of another network: --model cvt_13.
    **table(
        """Fine-tune a model from ImageNet with DRLoc, 100 epochs.

Section 6 of the supplementary; the published results are in the paper itself. The heads are
initialized randomly.""",
        FINE_TUNE,
        "DHVT's Table 1 quotes of CIFAR-100, without the loss (--drloc none)",
        swin_t_drloc_fine_tune=(SWIN, "88.22 %", "runs/swin_t_drloc/last.pt"),
        cvt_drloc_fine_tune=(CVT, "none", "runs/cvt_drloc/last.pt"),
        t2t_drloc_fine_tune=(T2T, "87.33 %", "runs/t2t_drloc/last.pt"),
        resnet_50_drloc_fine_tune=(RESNET, "85.44 %", "runs/resnet_50_drloc/last.pt"),
    ),
}
