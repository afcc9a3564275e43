"""Rows of the ablations of the papers, at small scale: `densefeed ablations` trains them.

They follow Tables 3 to 7 and 9 of Token Labeling (arXiv 2104.10858), Table 6 of DRLoc's
supplementary material (arXiv 2106.03746), Tables 1, 4 and 5 of Bootstrapping ViTs (arXiv
2112.03552), and Figures 1 and 2 of DHVT's supplementary material (arXiv 2210.05958), which is also
compared with DeiT.
"""

CE, RELABEL, TOKENS = "lvvit_micro_ce", "lvvit_micro_relabel", "lvvit_micro_token_label"
MIXTOKEN = f"{TOKENS}_mixtoken"
DRLOC = "lvvit_micro_drloc"
# One convolution embeds the patches, as with patch size 16 in the paper.
PLAIN = "stem=((8,8),)"
VIT, JOINT, SHARED = (f"bootstrapping_micro_{name}" for name in ("scratch", "joint", "shared"))
DHVT, DEIT = "dhvt_micro_ce", "deit_tiny_patch16_224"
# The size of dhvt_micro.
DEIT_SIZES = ("img_size=64", "patch_size=8", "embed_dim=96", "depth=4", "num_heads=4")
# DeiT's parts in DHVT: its patch embedding instead of SOPE, its MLP instead of DAFF.
PATCH, MLP = "embedding='patch'", ("feed_forward='mlp'", "aggregate='none'")
POSITIONS, NO_HEAD_TOKENS = "pos_embed=True", "head_tokens=False"
# Values of the published commands of Token Labeling; random erasing is the paper's CutOut.
ERASE, OPERATIONS = ("--erase-probability", "0.25"), ("--rand-augment", "rand-m9-mstd0.5-inc1")


def model(*arguments: str) -> tuple[str, ...]:
    """Return a row of Tables 3, 4, 5 or 9: image labels, and model arguments that differ."""
    return CE, "--model-kwargs", *arguments


def curve(*arguments: str) -> tuple[str, ...]:
    """Return a curve of DHVT's figures, with model arguments and an evaluation in each epoch."""
    return DHVT, "--eval-every", "1", *(("--model-kwargs", *arguments) if arguments else ())


# Each row: its name, its recipe and the options that differ from the recipe. The base (`ce`) has
# four blocks, MLP ratio 3, a stem of four convolutions, LayerNorm, and undivided residual branches.
RUNS = {
    # Token Labeling, Table 3: each row adds one step of the way from DeiT to LV-ViT.
    "deit": model("depth=3", "mlp_ratio=4.0", "qkv_bias=True", PLAIN),
    "depth-4": model("mlp_ratio=4.0", "qkv_bias=True", PLAIN),
    "mlp-ratio-3": model(PLAIN),
    "ce": (CE,),
    "residual-2": model("residual_divisor=2.0"),
    "residual-2-relabel": (RELABEL, "--model-kwargs", "residual_divisor=2.0"),
    "residual-2-token-label": (TOKENS, "--model-kwargs", "residual_divisor=2.0"),
    # Table 4: (kernel, stride) of each convolution. The strides multiply to 8, the patch size here,
    # where the paper has 16.
    "stem-2": model("stem=((7,2),(4,4))"),
    "stem-3": model("stem=((7,2),(3,1),(4,4))"),
    "stem-3-strides": model("stem=((7,2),(3,2),(4,2))"),
    "stem-4-strides": model("stem=((7,2),(3,2),(3,1),(4,2))"),
    "stem-6": model("stem=((7,2),(3,1),(3,1),(3,1),(3,1),(4,4))"),
    # Table 5; the divisors 1 and 2 are the rows `ce` and `residual-2`.
    "residual-3": model("residual_divisor=3.0"),
    "token-label-mixtoken": (MIXTOKEN,),
    "relabel-mixtoken": (RELABEL, "--mixtoken"),
    "relabel-cutmix": (RELABEL, "--cutmix", "1.0"),
    # Table 7: all augmentations, then each removed, or MixUp added.
    "augmented": (MIXTOKEN, *ERASE, *OPERATIONS),
    "augmented-no-mixtoken": (TOKENS, *ERASE, *OPERATIONS),
    "augmented-mixup": (MIXTOKEN, *ERASE, *OPERATIONS, "--mixup", "0.8"),
    "augmented-no-erasing": (MIXTOKEN, *OPERATIONS),
    "augmented-no-operations": (MIXTOKEN, *ERASE),
    # Table 9; in the paper post-norm diverges (section 4.3).
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
    # DHVT's Figures 1 and 2: head tokens, SOPE and DAFF, the latter two with and without a position
    # table. The first row is a ViT, the last DHVT.
    "dhvt-plain": curve(PATCH, *MLP, POSITIONS, NO_HEAD_TOKENS),
    "dhvt-head-tokens": curve(PATCH, *MLP, POSITIONS),
    "dhvt-sope-positions": curve(*MLP, POSITIONS, NO_HEAD_TOKENS),
    "dhvt-sope": curve(*MLP, NO_HEAD_TOKENS),
    "dhvt-daff-positions": curve(PATCH, POSITIONS, NO_HEAD_TOKENS),
    "dhvt-daff": curve(PATCH, NO_HEAD_TOKENS),
    "dhvt-no-head-tokens-positions": curve(POSITIONS, NO_HEAD_TOKENS),
    "dhvt-no-head-tokens": curve(NO_HEAD_TOKENS),
    "dhvt": curve(),
    "vit": (VIT,),
    "vit-agent": ("bootstrapping_micro_agent",),
    "vit-joint": (JOINT,),
    "vit-shared": (SHARED,),
    "vit-shared-unaligned": (SHARED, "--align", "none"),
    # Bootstrapping ViTs, Table 4: one part of the joint training changed in each row.
    "vit-joint-answers": (JOINT, "--feature-weight", "0"),
    "vit-joint-features": (JOINT, "--distill-weight", "0"),
    "vit-joint-constant": (JOINT, "--feature-decay", "none"),
    "vit-joint-squares": (JOINT, "--feature-adapt", "pool-2d"),
    "vit-joint-published": (JOINT, "--feature-norm", "layernorm"),
    "vit-joint-base": (JOINT, "--agent", "base"),
}
TABLES = {
    title: tuple(names.split())
    for title, names in {
        "Table 3, path": "deit depth-4 mlp-ratio-3 ce residual-2 residual-2-relabel "
        "residual-2-token-label",
        "Table 4, stem": "mlp-ratio-3 stem-2 stem-3-strides stem-3 ce stem-4-strides stem-6",
        "Table 5, residual": "ce residual-2 residual-3",
        "Table 6, mixing": "token-label-mixtoken relabel-mixtoken relabel-cutmix",
        "Table 7, augmentation": "augmented augmented-no-mixtoken augmented-mixup "
        "augmented-no-erasing augmented-no-operations",
        "Table 9, norms": "ce groups-1 groups-2 groups-3 groups-6 post-norm",
        "DRLoc's Table 6, variants": "ce drloc drloc-signed drloc-ce drloc-reg drloc-all",
        "DRLoc, beside token labels": "token-label token-label-drloc",
        "DHVT, beside DeiT": "deit-tiny dhvt",
        "DHVT's Figures 1 and 2": "dhvt-plain dhvt-head-tokens dhvt-sope-positions dhvt-sope "
        "dhvt-daff-positions dhvt-daff dhvt-no-head-tokens-positions dhvt-no-head-tokens dhvt",
        "Bootstrapping, Table 1": "vit vit-agent vit-joint vit-shared vit-shared-unaligned",
        "Bootstrapping, Table 4": "vit-joint-answers vit-joint-features vit-joint-constant "
        "vit-joint-squares vit-joint-published",
        "Bootstrapping, Table 5": "vit-joint-base",
    }.items()
}
