"""Recipes of the quickstart's students, which differ in supervision, and the speedrun's."""

from densefeed.recipes.recipe import SCENES, table
from densefeed.training.config import Config

STUDENT = dict(
    model="lvvit_micro",
    # A stride in every convolution: 5 points in the ablations, and fewer operations.
    model_kwargs=("depth=3", "stem=((7,2),(3,2),(4,2))", "stem_width=32"),
    size=64,
    sizes=((0, 48),),
    mixtoken=False,
    drop_path=0.0,
    crop_scale=(0.25, 1.0),
    hflip=0.0,
    crop_pct=1.0,
    epochs=2,
    # With Muon a student on image labels reached 96 % in four epochs, with AdamW 80 % in eight (one
    # seed). Muon with steps of 16 images gave `ce` 93.2 ± 1.8 % in ten runs, of 12 93.9 ± 1.6, of 8
    # 91.2 ± 3.3; AdaMuon with steps of 12 93.7 ± 1.2.
    batch=12,
    optimizer="adamuon",
    lr=6e-3,
    lr_batch=12,
    min_lr=1e-5,
    warmup_epochs=0.3,
    ema=0.0,
    eval_every=1,
    log_every=25,
)
TEACHER = dict(
    model="nfnet_micro",
    model_kwargs=(),
    # Evaluated on scenes at their own size, trained on crops that show digits 0.7 to 1.3 times as
    # large.
    size=96,
    sizes=((0, 64),),
    objective="ce",
    smoothing=0.0,
    epochs=8,
    batch=32,
    optimizer="muon",
    lr=1e-2,
    lr_batch=32,
    warmup_epochs=0.5,
    eval_every=2,
)
SPEEDRUN = dict(
    sizes=((0, 24), (1, 48)),
    # Smaller crops take longer to learn: with steps of 24 images the lowest of five seeds had
    # 92.5 % with crops from 25 % of a scene, 93.1 from 35. With steps of 40 it had 88 %.
    crop_scale=(0.45, 1.0),
    batch=36,
    optimizer="muon",
    lr=2.2e-2,
    lr_batch=36,
    # Its time is measured.
    eval_every=10,
)

RECIPES = table(
    """The quickstart's student with token labels: digit scenes, 16 to 38 s on one CPU core.

Crops of 48 px, of 25 to 100 % of a scene, show digits about as large as the whole scene does at 64
px, where the student is evaluated. No MixToken and no drop-path, which regularize long runs.""",
    Config(),
    data=SCENES,
    quickstart_token_label=(STUDENT,),
)
RECIPES |= table(
    "The quickstart's student with MixToken, the published label geometry, or other labels.",
    RECIPES["quickstart_token_label"],
    data=SCENES,
    quickstart_token_label_mixtoken=(dict(mixtoken=True),),
    quickstart_token_label_published=(dict(geometry="published", outside="uniform"),),
    quickstart_relabel=(dict(objective="relabel"), "One dense label per crop (arXiv 2101.05022)."),
    quickstart_ce=(dict(objective="ce"), "Image labels only."),
)
RECIPES |= table(
    "The quickstart's teacher: nfnet_micro, a small NFNet, with cross entropy.",
    RECIPES["quickstart_token_label"],
    data="--loader folder --data quickstart/scenes --val quickstart/scenes",
    quickstart_teacher=(TEACHER,),
)
RECIPES |= table(
    """The micro track of the speedrun, to 90 % top-1 in every seed (records/README.md).

`make record` prepares its data, 3,000 scenes for training.""",
    RECIPES["quickstart_token_label"],
    data="--loader ffcv --data speedrun/seed-0/train.beton --val speedrun/seed-0/val.beton",
    speedrun_micro=(SPEEDRUN,),
)
