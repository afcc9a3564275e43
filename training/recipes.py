"""The recipes: each a function that states its command, its source and what to expect."""

from dataclasses import replace

from .config import Config


def lvvit_s_224_token_label() -> Config:
    """LV-ViT-S on ImageNet-1k with token labels, 300 epochs; needs a GPU.

    python train.py lvvit_s_224_token_label --loader ffcv --data train.beton --val val.beton --out runs/lvvit_s

    Paper: 83.3 % top-1 (Table 10). Not run here.
    """
    return Config(model="lvvit_s", rand_augment="rand-m9-mstd0.5-inc1", erase_probability=0.25)


def lvvit_s_160_to_224_token_label() -> Config:
    """lvvit_s_224_token_label in growing sizes: 160 px, from epoch 100 on 192 px, from epoch 200 on 224 px.

    python train.py lvvit_s_160_to_224_token_label --loader ffcv --data train.beton --val val.beton --out runs/lvvit_s

    An epoch of 160 px has half the tokens of one of 224 px (100 instead of 196), one of 192 px three quarters (144), so the
    whole run 75 % of them. Not run here.
    """
    return replace(lvvit_s_224_token_label(), sizes=((0, 160), (100, 192), (200, 224)))


def lvvit_micro_token_label() -> Config:
    """The demo's student with token labels: digit scenes at 64 px, a minute on two CPU cores.

    python train.py lvvit_micro_token_label --loader ffcv --data quickstart/train.beton --val quickstart/val.beton --out runs/token-label

    No MixToken and no drop-path: they regularise trainings of hundreds of epochs and slow one of eight.
    """
    return Config(
        model="lvvit_micro", size=64, mixtoken=False, drop_path=0.0, crop_scale=(0.25, 1.0), hflip=0.0, crop_pct=1.0,
        epochs=8, batch=32, lr=1e-3, lr_batch=32, min_lr=1e-5, warmup_epochs=1, ema=0.0, eval_every=2, log_every=25,
    )  # fmt: skip


def lvvit_micro_token_label_mixtoken() -> Config:
    """The demo's student with token labels and MixToken; all else as lvvit_micro_token_label.

    python train.py lvvit_micro_token_label_mixtoken --loader ffcv --data quickstart/train.beton --val quickstart/val.beton --out runs/mix
    """
    return replace(lvvit_micro_token_label(), mixtoken=True)


def lvvit_micro_token_label_compatible() -> Config:
    """The demo's student with labels read where the published code reads them; all else as lvvit_micro_token_label.

    python train.py lvvit_micro_token_label_compatible --loader ffcv --data quickstart/train.beton \
        --val quickstart/val.beton --out runs/compatible
    """
    return replace(lvvit_micro_token_label(), geometry="compatible", outside="uniform")


def lvvit_micro_relabel() -> Config:
    """The demo's student with one dense label a crop (ReLabel, arXiv 2101.05022); all else as lvvit_micro_token_label.

    python train.py lvvit_micro_relabel --loader ffcv --data quickstart/train.beton --val quickstart/val.beton --out runs/relabel
    """
    return replace(lvvit_micro_token_label(), objective="relabel")


def lvvit_micro_ce() -> Config:
    """The demo's student with image labels only; all else as lvvit_micro_token_label.

    python train.py lvvit_micro_ce --loader ffcv --data quickstart/train.beton --val quickstart/val.beton --out runs/ce
    """
    return replace(lvvit_micro_token_label(), objective="ce")


def nfnet_micro_ce() -> Config:
    """The demo's teacher: a small normaliser-free network with plain cross entropy, a minute on two CPU cores.

    python train.py nfnet_micro_ce --loader ffcv --data quickstart/train.beton --val quickstart/val.beton --out runs/teacher
    """
    return replace(
        lvvit_micro_token_label(), model="nfnet_micro", objective="ce", smoothing=0.0, epochs=16, lr=5e-3, eval_every=4
    )  # fmt: skip


RECIPES = (
    lvvit_s_224_token_label,
    lvvit_s_160_to_224_token_label,
    lvvit_micro_token_label,
    lvvit_micro_token_label_mixtoken,
    lvvit_micro_token_label_compatible,
    lvvit_micro_relabel,
    lvvit_micro_ce,
    nfnet_micro_ce,
)
