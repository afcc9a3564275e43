"""The papers' ablations in small, on digit scenes: rows of Token Labeling's Tables 3 to 7 and 9
(arXiv 2104.10858), of the Table 6 of DRLoc's supplementary (arXiv 2106.03746), of Bootstrapping
ViTs' Tables 1, 4 and 5 (arXiv 2112.03552), and DHVT beside DeiT.

    python tools/ablations.py --out ablations --seeds 0 1 2
    python tools/ablations.py --out ablations --seeds 0 1 2 --rows ce drloc token-label token-label-drloc

Trains `lvvit_micro` (or `dhvt_micro`), 4 blocks at 64 pixels, eight epochs a row, a minute or two
each on two CPU cores; rows of Bootstrapping have forty epochs of `bootstrapping_vit_micro`, six
minutes, beside an agent fifteen. It prints a table: means and standard deviations over the seeds,
which change scenes, teacher and students alike, and each seed's figure. What is there already is
kept, also of `tools/quickstart.py --seeds`, so a killed call goes on. Trainings so short tell that
a row works and in which direction it may point; differences within the deviations tell nothing, and
regularizers cost accuracy.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from densefeed.system.errors import UserError, run
from densefeed.tools.quickstart import Quickstart, call, common, prepared, spread

CE, RELABEL, TOKENS = "lvvit_micro_ce", "lvvit_micro_relabel", "lvvit_micro_token_label"
MIXTOKEN = f"{TOKENS}_mixtoken"
DRLOC = "lvvit_micro_drloc"
PLAIN = "stem=((8,8),)"  # as 16 / 16 of the paper: one convolution cuts the patches
VIT, JOINT, SHARED = (f"bootstrapping_micro_{name}" for name in ("scratch", "joint", "shared"))
DHVT, DEIT = "dhvt_micro_ce", "deit_tiny_patch16_224"
# dhvt_micro's
DEIT_SIZES = ("img_size=64", "patch_size=8", "embed_dim=96", "depth=4", "num_heads=4")
ERASE, OPERATIONS = ("--erase-probability", "0.25"), ("--rand-augment", "rand-m9-mstd0.5-inc1")


def model(*arguments: str) -> tuple[str, ...]:
    """A row of Tables 3, 4, 5 and 9: image labels, and another model."""
    return CE, "--model-kwargs", *arguments


# A name, the recipe, and what differs. The base (`ce`) has four blocks, MLPs of ratio 3, four
# convolutions as stem, LayerNorm, and residual branches that nothing divides.
RUNS = {
    "deit": model("depth=3", "mlp_ratio=4.0", "qkv_bias=True", PLAIN),
    "depth-4": model("mlp_ratio=4.0", "qkv_bias=True", PLAIN),
    "mlp-ratio-3": model(PLAIN),
    "ce": (CE,),
    "residual-2": model("residual_divisor=2.0"),
    "residual-2-relabel": (RELABEL, "--model-kwargs", "residual_divisor=2.0"),
    "residual-2-token-label": (TOKENS, "--model-kwargs", "residual_divisor=2.0"),
    "stem-2": model("stem=((7,2),(4,4))"),
    "stem-3": model("stem=((7,2),(3,1),(4,4))"),
    "stem-3-strides": model("stem=((7,2),(3,2),(4,2))"),
    "stem-4-strides": model("stem=((7,2),(3,2),(3,1),(4,2))"),
    "stem-6": model("stem=((7,2),(3,1),(3,1),(3,1),(3,1),(4,4))"),
    "residual-3": model("residual_divisor=3.0"),
    "token-label-mixtoken": (MIXTOKEN,),
    "relabel-mixtoken": (RELABEL, "--mixtoken"),
    "relabel-cutmix": (RELABEL, "--cutmix", "1.0"),
    "augmented": (MIXTOKEN, *ERASE, *OPERATIONS),
    "augmented-no-mixtoken": (TOKENS, *ERASE, *OPERATIONS),
    "augmented-mixup": (MIXTOKEN, *ERASE, *OPERATIONS, "--mixup", "0.8"),
    "augmented-no-erasing": (MIXTOKEN, *OPERATIONS),
    "augmented-no-operations": (MIXTOKEN, *ERASE),
    "groups-1": model("norm_groups=1"),
    "groups-2": model("norm_groups=2"),
    "groups-3": model("norm_groups=3"),
    "groups-6": model("norm_groups=6"),
    "post-norm": model("post_norm=True"),
    "drloc": (DRLOC,),
    "drloc-signed": (DRLOC, "--drloc", "signed"),
    "drloc-ce": (DRLOC, "--drloc", "ce"),
    "drloc-reg": (DRLOC, "--drloc", "reg"),
    "drloc-all": (DRLOC, "--drloc", "all"),
    "token-label": (TOKENS,),
    "token-label-drloc": (f"{TOKENS}_drloc",),
    "deit-tiny": (DHVT, "--model", DEIT, "--model-kwargs", *DEIT_SIZES),
    "deit-tiny-head-tokens": (
        DHVT,
        "--model-kwargs",
        "embedding='patch'",
        "pos_embed=True",
        "feed_forward='mlp'",
        "aggregate='none'",
    ),
    "dhvt-no-head-tokens": (DHVT, "--model-kwargs", "head_tokens=False"),
    "dhvt": (DHVT,),
    "vit": (VIT,),
    "vit-agent": ("bootstrapping_micro_agent",),
    "vit-joint": (JOINT,),
    "vit-shared": (SHARED,),
    "vit-shared-unaligned": (SHARED, "--align", "none"),
    "vit-joint-answers": (JOINT, "--feature-weight", "0"),
    "vit-joint-features": (JOINT, "--distill-weight", "0"),
    "vit-joint-constant": (JOINT, "--feature-decay", "none"),
    "vit-joint-squares": (JOINT, "--feature-adapt", "pool-2d"),
    "vit-joint-published": (JOINT, "--feature-norm", "layernorm"),
    "vit-joint-base": (JOINT, "--agent", "base"),
}
TABLES = {
    "Table 3, path": (
        "deit",
        "depth-4",
        "mlp-ratio-3",
        "ce",
        "residual-2",
        "residual-2-relabel",
        "residual-2-token-label",
    ),
    "Table 4, stem": (
        "mlp-ratio-3",
        "stem-2",
        "stem-3-strides",
        "stem-3",
        "ce",
        "stem-4-strides",
        "stem-6",
    ),
    "Table 5, residual": ("ce", "residual-2", "residual-3"),
    "Table 6, mixing": ("token-label-mixtoken", "relabel-mixtoken", "relabel-cutmix"),
    "Table 7, augmentation": (
        "augmented",
        "augmented-no-mixtoken",
        "augmented-mixup",
        "augmented-no-erasing",
        "augmented-no-operations",
    ),
    "Table 9, norms": ("ce", "groups-1", "groups-2", "groups-3", "groups-6", "post-norm"),
    "DRLoc's Table 6, variants": (
        "ce",
        "drloc",
        "drloc-signed",
        "drloc-ce",
        "drloc-reg",
        "drloc-all",
    ),
    "DRLoc, beside token labels": ("token-label", "token-label-drloc"),
    "DHVT's Figures 1 and 2": ("deit-tiny", "deit-tiny-head-tokens", "dhvt-no-head-tokens", "dhvt"),
    "Bootstrapping, Table 1": (
        "vit",
        "vit-agent",
        "vit-joint",
        "vit-shared",
        "vit-shared-unaligned",
    ),
    "Bootstrapping, Table 4": (
        "vit-joint-answers",
        "vit-joint-features",
        "vit-joint-constant",
        "vit-joint-squares",
        "vit-joint-published",
    ),
    "Bootstrapping, Table 5": ("vit-joint-base",),
}


@dataclass(frozen=True, kw_only=True)
class Ablations:
    """What to run."""

    out: Path = Path("ablations")  # folder for everything, a folder seed-N of it for each seed
    seeds: tuple[int, ...] = (0,)  # each with its own scenes, teacher and students
    rows: tuple[str, ...] = tuple(RUNS)  # which of them
    train: int = 3000  # training scenes
    val: int = 1000  # validation scenes
    epochs: int | None = None  # of every training; default: the recipes'


def main(options: Ablations) -> None:
    """Run what is missing and print the table."""
    unknown = [name for name in options.rows if name not in RUNS]
    if unknown:
        raise UserError(f"--rows {unknown[0]}: there is no such row; choose of {', '.join(RUNS)}")
    settings = Quickstart(
        out=options.out, train=options.train, val=options.val, epochs=options.epochs
    )
    top1: dict[str, list[float]] = {name: [] for name in options.rows}
    for seed in options.seeds:
        folder = options.out / f"seed-{seed}"
        packed, val = prepared(folder, seed, settings)
        for name in options.rows:
            recipe, *words = RUNS[name]
            result = folder / "runs" / name / "result.json"
            call(
                result,
                "train.py",
                recipe,
                "--loader",
                "ffcv",
                "--data",
                packed,
                "--val",
                val,
                "--out",
                result.parent,
                *common(seed, settings),
                *words,
            )
            top1[name].append(json.loads(result.read_text())["top1"])
    many = len(options.seeds)
    table = Table(title=f"Digit scenes, {many} seed{'s' * (many > 1)}", title_justify="left")
    for column in ("table", "row"):
        table.add_column(column)
    for column in ("top-1", "of each seed"):
        table.add_column(column, justify="right")
    for title, names in TABLES.items():
        chosen = [name for name in names if name in options.rows]
        for name in chosen:
            seeds = ", ".join(f"{100 * value:.1f}" for value in top1[name])
            table.add_row(
                title if name == chosen[0] else "",
                name,
                spread(top1[name]),
                seeds,
                end_section=name == chosen[-1],
            )
    console = Console()
    console.print()
    console.print(table)


if __name__ == "__main__":
    run(lambda: main(tyro.cli(Ablations, description=__doc__)))
