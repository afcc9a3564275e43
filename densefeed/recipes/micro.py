"""Recipes of small models on the quickstart's digit scenes, for ablations and small datasets."""

from densefeed.recipes.recipe import SCENES, table
from densefeed.training.config import Config

# No MixToken and no drop-path: they regularize runs of hundreds of epochs, and slow down one of
# eight.
STUDENT = dict(
    model="lvvit_micro",
    size=64,
    mixtoken=False,
    drop_path=0.0,
    crop_scale=(0.25, 1.0),
    hflip=0.0,
    crop_pct=1.0,
    epochs=8,
    batch=32,
    lr=1e-3,
    lr_batch=32,
    min_lr=1e-5,
    warmup_epochs=1,
    ema=0.0,
    eval_every=2,
    log_every=25,
)
CE, DRLOC = dict(objective="ce"), dict(drloc="l1", drloc_grid=0)
# In a run of 8 epochs the agent's features harm the transformer: 45 % alone, 22 % with it.
LONG = dict(smoothing=0.0, epochs=40, eval_every=5)

RECIPES = table(
    "A small LV-ViT with token labels: digit scenes at 64 px, a minute on two CPU cores.",
    Config(),
    data=SCENES,
    lvvit_micro_token_label=(STUDENT,),
)
RECIPES |= table(
    "A small LV-ViT with MixToken, other labels or DRLoc (arXiv 2106.03746) on its 8 x 8 tokens.",
    RECIPES["lvvit_micro_token_label"],
    data=SCENES,
    lvvit_micro_token_label_mixtoken=(dict(mixtoken=True),),
    lvvit_micro_relabel=(dict(objective="relabel"),),
    lvvit_micro_ce=(CE,),
    lvvit_micro_drloc=(CE | DRLOC,),
    lvvit_micro_token_label_drloc=(DRLOC,),
)
RECIPES |= table(
    "A small NFNet with cross entropy, a minute on two CPU cores.",
    RECIPES["lvvit_micro_ce"],
    data=SCENES,
    nfnet_micro_ce=(dict(model="nfnet_micro", smoothing=0.0, epochs=16, lr=5e-3, eval_every=4),),
)
RECIPES |= table(
    "A small DHVT, or a small vision transformer for 40 epochs, with cross entropy.",
    RECIPES["lvvit_micro_ce"],
    data=SCENES,
    dhvt_micro_ce=(dict(model="dhvt_micro"),),
    bootstrapping_micro_scratch=(dict(model="bootstrapping_vit_micro") | LONG,),
)
RECIPES |= table(
    "The small vision transformer with an agent CNN, or the agent alone.",
    RECIPES["bootstrapping_micro_scratch"],
    data=SCENES,
    bootstrapping_micro_joint=(dict(bootstrap="joint"), "Each has its own weights."),
    bootstrapping_micro_shared=(dict(bootstrap="shared"), "Both have one set of weights."),
    bootstrapping_micro_agent=(dict(model="agent_micro"),),
)
