"""Train vision transformers from dense teacher score maps.

Importing this package registers its models with timm.
"""

from densefeed.system.collector import pause as _pause

with _pause():
    from densefeed import models as models
    from densefeed.api import Loader, build_step, open_loader
    from densefeed.objectives import register as register_objective
    from densefeed.objectives.base import Method, Objective
    from densefeed.pipelines.augment.settings import register_operation
    from densefeed.pipelines.batch import Batch, ScoreMapSpec
    from densefeed.pipelines.open import register_loader
    from densefeed.pipelines.plan import EpochPlan
    from densefeed.pipelines.targets import SparseTargets, TargetRules, sparse_targets
    from densefeed.step import Step
    from densefeed.storage.datasets import register_dataset
    from densefeed.storage.score_maps import ScoreMapStore
    from densefeed.system.errors import UserError
    from densefeed.system.options import Options
    from densefeed.training.config import Config

__all__ = [
    "Batch",
    "Config",
    "EpochPlan",
    "Loader",
    "Method",
    "Objective",
    "Options",
    "ScoreMapSpec",
    "ScoreMapStore",
    "SparseTargets",
    "Step",
    "TargetRules",
    "UserError",
    "build_step",
    "open_loader",
    "register_dataset",
    "register_loader",
    "register_objective",
    "register_operation",
    "sparse_targets",
]
