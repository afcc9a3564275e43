"""Recipes of small models on the quickstart's digit scenes, for ablations and small datasets."""

from densefeed.system.options import with_options
from densefeed.training.config import Config


def lvvit_micro_token_label() -> Config:
    """A small LV-ViT with token labels: digit scenes at 64 px, a minute on two CPU cores.

    python train.py lvvit_micro_token_label --loader ffcv --data quickstart/train.beton \\
        --val quickstart/val.beton --out runs/token-label

    No MixToken and no drop-path: they regularize runs of hundreds of epochs, and slow down one of
    eight.
    """
    return with_options(
        Config(),
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


def lvvit_micro_token_label_mixtoken() -> Config:
    """A small LV-ViT with token labels and MixToken; otherwise as lvvit_micro_token_label.

    python train.py lvvit_micro_token_label_mixtoken --loader ffcv --data quickstart/train.beton \\
        --val quickstart/val.beton --out runs/mix
    """
    return with_options(lvvit_micro_token_label(), mixtoken=True)


def lvvit_micro_relabel() -> Config:
    """A small LV-ViT with one dense label per crop (ReLabel, arXiv 2101.05022).

    Otherwise as lvvit_micro_token_label.

    python train.py lvvit_micro_relabel --loader ffcv --data quickstart/train.beton \\
        --val quickstart/val.beton --out runs/relabel
    """
    return with_options(lvvit_micro_token_label(), objective="relabel")


def lvvit_micro_ce() -> Config:
    """A small LV-ViT with image labels only; otherwise as lvvit_micro_token_label.

    python train.py lvvit_micro_ce --loader ffcv --data quickstart/train.beton \\
        --val quickstart/val.beton --out runs/ce
    """
    return with_options(lvvit_micro_token_label(), objective="ce")


def lvvit_micro_drloc() -> Config:
    """A small LV-ViT with image labels and DRLoc (arXiv 2106.03746) on its 8 x 8 tokens.

    Otherwise as lvvit_micro_ce.

    python train.py lvvit_micro_drloc --loader ffcv --data quickstart/train.beton \\
        --val quickstart/val.beton --out runs/drloc
    """
    return with_options(lvvit_micro_ce(), drloc="l1", drloc_grid=0)


def lvvit_micro_token_label_drloc() -> Config:
    """A small LV-ViT with token labels and DRLoc; otherwise as lvvit_micro_token_label.

    python train.py lvvit_micro_token_label_drloc --loader ffcv --data quickstart/train.beton \\
        --val quickstart/val.beton \\
        --out runs/token-label-drloc
    """
    return with_options(lvvit_micro_token_label(), drloc="l1", drloc_grid=0)


def nfnet_micro_ce() -> Config:
    """A small NFNet with cross entropy, a minute on two CPU cores.

    python train.py nfnet_micro_ce --loader ffcv --data quickstart/train.beton \\
        --val quickstart/val.beton --out runs/teacher
    """
    return with_options(
        lvvit_micro_token_label(),
        model="nfnet_micro",
        objective="ce",
        smoothing=0.0,
        epochs=16,
        lr=5e-3,
        eval_every=4,
    )


def dhvt_micro_ce() -> Config:
    """A small DHVT on digit scenes; otherwise as lvvit_micro_ce.

    python train.py dhvt_micro_ce --loader ffcv --data quickstart/train.beton \\
        --val quickstart/val.beton --out runs/dhvt
    """
    return with_options(lvvit_micro_ce(), model="dhvt_micro")


def bootstrapping_micro_scratch() -> Config:
    """A small vision transformer alone on digit scenes, 40 epochs.

    No label smoothing; otherwise as lvvit_micro_ce.

    python train.py bootstrapping_micro_scratch --loader ffcv --data quickstart/train.beton \\
        --val quickstart/val.beton --out runs/vit
    """
    # In a run of 8 epochs the agent's features harm the transformer: 45 % alone, 22 % with it.
    return with_options(
        lvvit_micro_ce(), model="bootstrapping_vit_micro", smoothing=0.0, epochs=40, eval_every=5
    )


def bootstrapping_micro_joint() -> Config:
    """bootstrapping_micro_scratch with an agent CNN, each with its own weights.

    python train.py bootstrapping_micro_joint --loader ffcv --data quickstart/train.beton \\
        --val quickstart/val.beton --out runs/joint
    """
    return with_options(bootstrapping_micro_scratch(), bootstrap="joint")


def bootstrapping_micro_shared() -> Config:
    """bootstrapping_micro_scratch with an agent CNN, with one set of weights.

    python train.py bootstrapping_micro_shared --loader ffcv --data quickstart/train.beton \\
        --val quickstart/val.beton --out runs/shared
    """
    return with_options(bootstrapping_micro_scratch(), bootstrap="shared")


def bootstrapping_micro_agent() -> Config:
    """The agent CNN of bootstrapping_micro_joint alone.

    python train.py bootstrapping_micro_agent --loader ffcv --data quickstart/train.beton \\
        --val quickstart/val.beton --out runs/agent
    """
    return with_options(bootstrapping_micro_scratch(), model="agent_micro")
