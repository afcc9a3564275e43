"""Parts of a run that tests build without training, a labeling pass, and records of runs."""

import json
from collections.abc import Callable
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from densefeed.objectives import build_objective
from densefeed.objectives.base import Objective, StepContext, step_loss
from densefeed.pipelines.augment.augmentation import Augmentation, augment_batches
from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.mixing import Mix, Mixing, MixOptions
from densefeed.pipelines.plan import EpochPlan
from densefeed.relabel.labeling import begin_pass
from densefeed.relabel.workers import label
from densefeed.step import Step
from densefeed.storage.images import Images
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.training.build import build_model
from densefeed.training.compile import compile_step
from densefeed.training.config import Config
from densefeed.training.ranks import ALONE, Ranks
from densefeed.training.setup import build_trainable, open_loader
from densefeed.training.student import Student

CPU = torch.device("cpu")
# Options of a run that trains a small transformer and an agent with shared weights.
SHARED_AGENT = dict(
    model="bootstrapping_vit_micro",
    model_kwargs=("depth=2",),
    objective="ce",
    mixtoken=False,
    drop_path=0.0,
    bootstrap="shared",
)


def mark_slow(cases: dict[str, dict], *fast: str) -> list:
    """Return parameters of a test, of which those that are not named are slow: they are alike."""
    return [
        pytest.param(fields, id=name, marks=[pytest.mark.slow] * (name not in fast))
        for name, fields in cases.items()
    ]


@contextmanager
def default_dtype(dtype: torch.dtype):
    """Set PyTorch's default dtype, as some scripts do."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def objective_for(config: Config) -> Objective:
    return build_objective(config.setting)


def model_for(config: Config, num_classes: int = 2) -> nn.Module:
    return build_model(config.model, config.data, objective_for(config), num_classes)[0]


def wrap(config: Config, model: nn.Module, num_classes: int = 2) -> nn.Module:
    """The model with what its objective adds."""
    return objective_for(config).wrap(model, num_classes, lambda network: network)


def label_images(
    images: Images, teacher: nn.Module, name: str, out: Path, **options
) -> ScoreMapStore | None:
    """Run `begin_pass` with these options, then `label`."""
    return label(begin_pass(images, teacher, name, **options), out)


def train_loader(config: Config) -> ThreadedLoader:
    objective = objective_for(config)
    return open_loader(config.data, config.optim, config.run.seed, objective, "train")


def student_for(config: Config, ranks: Ranks = ALONE) -> Student:
    """The student of a run on data of two classes."""
    sections = config.model, config.optim, config.run
    return build_trainable(*sections, objective_for(config), model_for(config), ranks)


def step_for(config: Config, loader: ThreadedLoader, trainable: nn.Module, dtype=None) -> Step:
    """The step of a run, as train.py builds it."""
    compute = compile_step(config.run.compile, trainable)
    sections = objective_for(config), config.data, config.augment
    return Step(loader, trainable, *sections, dtype, compute)


class Squares:
    """An objective without labels: the mean square of the logits."""

    setting = SimpleNamespace(mix=MixOptions(mixtoken=False))

    def forward(self, network, image, batch, step):
        return network(image)

    def loss(self, output, batch, step):
        return output.square().mean()


def compiled_step(model, mode="blocks"):
    """A compiled step of these squares, as a function of the images."""
    compute = compile_step(mode, model)
    context = StepContext(None, 4, None)
    return lambda image: compute(Squares(), model, SimpleNamespace(image=image), context, None)


class FirstBatch(NamedTuple):
    """The first batch of a run, augmented, and what its loss reads."""

    objective: Objective
    batch: Batch
    spec: ScoreMapSpec | None
    plan: EpochPlan
    mixing: Mixing

    def context(self, grid: int = 4, mix: Mix | None = None, epoch: int = 0) -> StepContext:
        inputs = self.objective.inputs(self.plan, epoch, self.batch)
        return StepContext(self.spec, grid, mix, inputs)

    def loss(
        self, network: nn.Module, grid: int = 4, mix: Mix | None = None, dtype=None, epoch: int = 0
    ) -> Tensor:
        context = self.context(grid, mix, epoch)
        return step_loss(self.objective, network, self.batch, context, dtype)


def first_batch(
    config: Config, device: torch.device = CPU, mean=(0.5,) * 3, std=(0.2,) * 3
) -> FirstBatch:
    with closing(train_loader(config)) as loader:
        augmentation = Augmentation(loader.plan, config.augment, mean, std).to(device)
        batch = next(augment_batches(loader.batches(0), augmentation, device))
        mixing = Mixing(loader.plan, config.mix)
        return FirstBatch(objective_for(config), batch, loader.score_maps, loader.plan, mixing)


def wrapped_and_first_batch(config: Config) -> tuple[nn.Module, FirstBatch]:
    """The model with what its objective adds, and the first batch."""
    torch.manual_seed(0)
    return wrap(config, model_for(config)), first_batch(config)


def records(out: Path, kind: str = "train") -> list[dict]:
    """Read the records of one kind from metrics.jsonl, of which there is at least one."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    found = [line for line in lines if line["kind"] == kind]
    assert found, f"{out} has no records of kind {kind}"
    return found


def stopped_after(steps: int) -> Callable:
    """Make a replacement of `signal_handler` that asks for a stop after `steps` steps."""

    @contextmanager
    def handler():
        polls = iter(range(1, 10**9))
        yield lambda: "SIGTERM" if next(polls) >= steps else ""

    return handler


def label_words(folder: Path, home: Path, *more) -> list:
    """The command that labels with a small teacher, whose weights lie in `home`."""
    torch.manual_seed(0)
    weights = home / "teacher.safetensors"
    save_file(timm.create_model("test_resnet", num_classes=2).state_dict(), weights)
    words = ["tools/relabel_imagenet.py", "--data", folder, "--teacher", weights]
    words += ["--model", "test_resnet", "--top-k", 2, "--threads", 1, "--device", "cpu"]
    return words + list(more)
