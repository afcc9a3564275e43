"""The kernels of sparse targets against plain PyTorch in float64: in Triton's interpreter, compiled
for GPUs, and on a GPU. Compiling needs no GPU.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from densefeed.pipelines import fused_targets, targets
from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.targets import SparseTargets, TargetRules, palettes, sparse_targets
from densefeed.storage.geometry import crop_views, visible_boxes
from densefeed.storage.score_maps import palette_sizes

from ..interpreter import compile_kernel, interpreted, run_interpreted

triton = pytest.importorskip("triton")

N = 4
# Side of the maps, classes of a cell, classes of the data, and the Window.
MAPS = {
    "whole image": (5, 3, 12, (0, 0, 1, 1)),
    "center": (9, 3, 300, (0.05, 0.2, 1.0, 0.8)),
    "letterbox": (5, 2, 20, (-1 / 6, 0, 7 / 6, 1)),
    "every class": (4, 5, 5, (0, 0, 1, 1)),
    "many classes": (6, 5, 2500, (0, 0, 1, 1)),
}
RULES = {
    "plain": TargetRules(),
    "smoothed": TargetRules(smoothing=0.1, temperature=2.0),
    "outside uniform": TargetRules(smoothing=0.1, outside="uniform"),
    "published": TargetRules(geometry="published", outside="uniform"),
}
CASES = [
    ("whole image", "plain"),
    ("center", "plain"),
    ("center", "outside uniform"),
    ("letterbox", "smoothed"),
    ("every class", "smoothed"),
    ("many classes", "published"),
]


def make_batch(random_maps, name: str, aligned: bool) -> tuple[Batch, ScoreMapSpec]:
    """Make crops and flips of 375 x 500 pixels; rotated and sheared unless `aligned`."""
    side, top_k, classes, window = MAPS[name]
    maps = random_maps(N, side, top_k, classes, window=window)
    plan = EpochPlan(num_samples=N, batch=1, seed=3, mode="train")
    boxes, flips = plan.crops(0, np.arange(N), np.full(N, 375), np.full(N, 500))
    view = crop_views(boxes, flips, np.full(N, 375), np.full(N, 500))
    shown = visible_boxes(view)
    if not aligned:
        rng = np.random.default_rng(0)
        warp = np.tile(np.eye(3), (N, 1, 1))
        # One sample keeps its View.
        warp[1:, :2] += rng.uniform(-0.4, 0.4, (N - 1, 2, 3))
        view = view @ warp
    batch = Batch(
        image=torch.zeros(N, 1, 1, 3, dtype=torch.uint8),
        label=torch.zeros(N, dtype=torch.long),
        view=torch.tensor(view, dtype=torch.float32),
        shown=torch.tensor(shown, dtype=torch.float32),
        index=torch.arange(N),
        repeat=torch.zeros(N, dtype=torch.long),
        weight=torch.linspace(0, 1, N),
        map_logit=torch.from_numpy(maps.logit),
        map_class=torch.from_numpy(maps.cls.astype(np.uint16)),
        map_lse=torch.from_numpy(maps.lse),
        window=torch.tensor(maps.window, dtype=torch.float32),
        axis_aligned=aligned,
    )
    # One slot more than the largest palette has classes.
    slots = int(palette_sizes(maps.cls).max()) + 1
    return batch, ScoreMapSpec(side, top_k, classes, "tail", slots, 0.6)


def in_float64(batch: Batch) -> Batch:
    """Return the batch with its geometry in float64, which plain PyTorch computes in."""
    fields = {"view": batch.view, "shown": batch.shown, "window": batch.window}
    return batch._replace(
        weight=batch.weight.double(), **{name: field.double() for name, field in fields.items()}
    )


def check(got: SparseTargets, want: SparseTargets) -> None:
    """Compare float32 targets with float64 ones; at most 1.6e-6 was measured."""
    assert torch.equal(got.palette, want.palette)
    assert all(field.dtype == torch.float32 for field in got[1:])
    # A point's coordinate, up to 12 cells, is rounded by 1e-6 in two steps; logits of neighboring
    # cells differ by up to 20, and the slope of a softmax is at most 1/4.
    bound = 5e-6
    for name, field in got._asdict().items():
        expected = getattr(want, name).double()
        torch.testing.assert_close(
            field.double(), expected, rtol=0, atol=bound, msg=lambda text, name=name: name + text
        )


@pytest.fixture
def on_cpu(monkeypatch):
    """Run the kernels on a CPU, which the interpreter can."""
    monkeypatch.setattr(targets, "can_run", lambda view, slots: view.dtype == torch.float32)
    monkeypatch.setattr(targets, "spread_maps", fused_targets.run_spread_kernel)
    monkeypatch.setattr(targets, "pool_targets", fused_targets.run_pool_kernel)


@interpreted
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("absent", ["tail", "zero-logit", "background"])
@pytest.mark.parametrize(("maps", "rules"), CASES)
def test_interpreted_kernels_make_the_targets(on_cpu, random_maps, maps, rules, absent, aligned):
    batch, spec = make_batch(random_maps, maps, aligned)
    spec, rules = spec._replace(absent=absent), RULES[rules]
    known = targets.palette_maps(batch, spec, rules)
    assert isinstance(known, fused_targets.SlotMaps)
    palette, slot = palettes(batch.map_class, spec.max_palette, spec.num_classes)
    assert torch.equal(known.palette, palette)
    assert torch.equal(known.slot.flatten(1).long(), slot)
    for grid in (1, (4, 5)):
        got = sparse_targets(batch, spec, grid, rules, known)
        check(got, sparse_targets(in_float64(batch), spec, grid, rules))
        assert 0 < got.weight.mean() <= 1


@interpreted
def test_interpreted_kernels_stay_within_their_memory(on_cpu, random_maps):
    """Whatever a damaged map holds: a class beyond the data's is no class of the palette."""
    batch, spec = make_batch(random_maps, "center", False)
    batch.map_class[2, 3, 4] = torch.tensor([300, 65535, 7], dtype=torch.uint16)
    known = targets.palette_maps(batch, spec._replace(max_palette=5), TargetRules())
    assert (known.palette < 300).all()
    assert known.slot[2, 3, 4, :2].tolist() == [-1, -1]


@pytest.mark.slow
def test_in_the_interpreter_with_whole_maps():
    """And a batch of augmentation, in the same process, whose start takes longest."""
    augmentation = Path(__file__).parent / "augment" / "test_fused.py"
    chosen = "interpreted and (whole or memory or lvvit)"
    assert run_interpreted(__file__, augmentation, chosen=chosen) == 8


@pytest.mark.slow
def test_in_the_interpreter():
    assert run_interpreted(__file__) == 6 * len(CASES) + 1


def test_targets_are_made_without_triton_or_by_few_kernels(monkeypatch, random_maps):
    """The kernels are for float32 on a GPU, and for palettes that a program can hold."""
    view = torch.empty(2, 2, 3)
    assert not fused_targets.can_run(view, 40)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert fused_targets.can_run(view, 40)
    assert not fused_targets.can_run(view.double(), 40)
    assert not fused_targets.can_run(view, 5_000)
    monkeypatch.setattr(fused_targets, "has_triton", lambda: False)
    assert not fused_targets.can_run(view, 40)


TYPES = {
    "map_class": "*u16",
    **dict.fromkeys(("map_logit", "map_lse"), "*fp16"),
    **dict.fromkeys(("rank", "slot"), "*i32"),
    "palette": "*i64",
    **dict.fromkeys(("value", "share", "place", "extra", "base", "weight", "total"), "*fp32"),
    **dict.fromkeys(("temperature", "margin", "edge", "on", "off", "sums_to"), "fp32"),
}
CONSTANTS = {
    "palette_kernel": {"TAIL": True, "BACKGROUND": True, "SOFTENED": True},
    "pool_kernel": {"TAIL": True, "UNIFORM": False, "WHOLE": False, "ROWS": 8, "SLOTS": 64},
    "pool_kernel of one token": {
        "TAIL": False,
        "UNIFORM": True,
        "WHOLE": True,
        "ROWS": 2,
        "SLOTS": 256,
    },
}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    "capability",
    [pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(100, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", CONSTANTS)
def test_compiles_without_a_gpu(name, capability):
    from densefeed.pipelines import fused_targets_triton as subject

    compile_kernel(getattr(subject, name.split()[0]), TYPES, CONSTANTS[name], capability, True)


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("absent", ["tail", "zero-logit", "background"])
@pytest.mark.parametrize(("maps", "rules"), CASES)
def test_gpu_kernels_make_the_targets(random_maps, maps, rules, absent, aligned):
    batch, spec = make_batch(random_maps, maps, aligned)
    spec, rules = spec._replace(absent=absent), RULES[rules]
    for grid in (1, 3, (7, 4)):
        got = sparse_targets(batch.to("cuda"), spec, grid, rules)
        check(
            SparseTargets(*(field.cpu() for field in got)),
            sparse_targets(in_float64(batch), spec, grid, rules),
        )
