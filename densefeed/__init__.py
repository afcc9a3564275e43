"""Train vision transformers from dense teacher score maps.

Importing this package registers its models with timm.
"""

import sys as _sys
from pathlib import Path as _Path

from densefeed.system.collector import pause as _pause

# What was started, and its arguments, for scripts and for `python -m`.
_started = [_Path(word).name for word in _sys.orig_argv[-len(_sys.argv) :]]
# The command `densefeed`, or a file of this package, as `python tools/pack_dataset.py` is.
if _started[:1] == ["densefeed"] or "script_start" in _sys.modules:
    try:
        from densefeed.system.errors import end_at_interrupt as _end_at_interrupt
    except ModuleNotFoundError as _error:
        _sys.stderr.write(
            f"error: {_sys.executable} lacks the package {_error.name}; activate the environment "
            "that `make test` makes (source .venv/bin/activate), or run pip install .\n"
        )
        _sys.exit(2)
    _end_at_interrupt()
# To list its subcommands, or its version, the command `densefeed` needs nothing of this: it takes
# 0.1 s instead of the 2 s of importing PyTorch.
if _started[:1] != ["densefeed"] or _started[1:] not in ([], ["-h"], ["--help"], ["--version"]):
    with _pause():
        from densefeed import models as models
        from densefeed.api import Loader, build_step, label, open_loader
        from densefeed.models.token_head import with_token_head
        from densefeed.objectives import register as register_objective
        from densefeed.objectives.base import Method, Objective
        from densefeed.objectives.losses import sparse_loss
        from densefeed.pipelines.augment.settings import register_operation
        from densefeed.pipelines.batch import Batch, ScoreMapSpec
        from densefeed.pipelines.dense_labels import open_score_maps
        from densefeed.pipelines.masks import sample_masks
        from densefeed.pipelines.open import register_loader
        from densefeed.pipelines.plan import EpochPlan
        from densefeed.pipelines.targets import SparseTargets, TargetRules, sparse_targets
        from densefeed.pipelines.views import View
        from densefeed.step import Step
        from densefeed.storage.datasets import register_dataset
        from densefeed.storage.mask_folder import MaskFolder
        from densefeed.storage.score_maps import ScoreMapStore
        from densefeed.system.errors import UserError
        from densefeed.system.options import Options
        from densefeed.training.config import Config

__all__ = [
    "Batch",
    "Config",
    "EpochPlan",
    "Loader",
    "MaskFolder",
    "Method",
    "Objective",
    "Options",
    "ScoreMapSpec",
    "ScoreMapStore",
    "SparseTargets",
    "Step",
    "TargetRules",
    "UserError",
    "View",
    "build_step",
    "label",
    "open_loader",
    "open_score_maps",
    "register_dataset",
    "register_loader",
    "register_objective",
    "register_operation",
    "sample_masks",
    "sparse_loss",
    "sparse_targets",
    "with_token_head",
]
