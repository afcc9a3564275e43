"""What a training asks of a CUDA device: waits, launches and memory, counted without a GPU.

The pretended runtime (runtime.cpp) runs PyTorch's real host code and no kernel.
"""

import json
import re

import pytest
import torch

from densefeed.models.kernels.levers import LEVERS, VARIABLE
from densefeed.objectives import OBJECTIVES
from densefeed.recipes import RECIPES
from densefeed.training.optimizers import FUSED

from . import build

# The most launches outside of CUDA graphs that a batch (copy and augmentation) and a step (losses,
# gradients, update, EMA) of RECIPE may make, by --compile. Lower a number as soon as the code makes
# fewer; `python -m tests.pretended.steps RECIPE --compile MODE --kernels 20` names them.
RECIPE, IMAGES = "lvvit_s_224_token_label", 256
LAUNCHES = {
    "never": {"batch": 7, "step": 1247},
    "blocks": {"batch": 7, "step": 576},
    "graph": {"batch": 7, "step": 9},
}
# The most kernels in the graph of a captured step, and with all forms of layers under test.
KERNELS, WITH_LEVERS = 918, 764
# They are those of this release of PyTorch.
MEASURED = "2.14."
# Epochs, each with an evaluation and a checkpoint, of trainings whose memory is compared.
EPOCHS = 3
# Trainings whose steps are watched, and their options.
TRAININGS = {
    "eager": {"epochs": EPOCHS},
    "microbatches, float16, maps on the device": {
        "microbatch": 2,
        "precision": "fp16",
        "clip_grad": 1.0,
        "on_nonfinite": "skip",
        "maps_on_device": True,
    },
    "sam, sgd": {"sam_rho": 0.1, "optimizer": "sgd", "on_nonfinite": "skip"},
    "blocks": {"compile": "blocks", "epochs": EPOCHS},
    "graph": {"compile": "graph", "epochs": EPOCHS},
    "microbatches, graph": {"compile": "graph", "microbatch": 2, "precision": "fp16"},
    "sgd, graph": {"compile": "graph", "optimizer": "sgd", "epochs": EPOCHS},
}
# All but detectors, which have as many boxes as they find, and wait for their number.
STEPS = [n for n, recipe in RECIPES.items() if not OBJECTIVES[recipe().objective.name].waits]
# How names of jobs end that compile, which takes minutes, are like a fast one, or count launches of
# a large model, 5 s.
SLOW = ("blocks", "graph", "on the device", "sgd", "never", "levers", "kernels")
LIMIT, SLOW_LIMIT = 600, 2400


measured = pytest.mark.skipif(
    not torch.__version__.startswith(MEASURED),
    reason=f"the limits are those of PyTorch {MEASURED}x, and this is {torch.__version__}",
)


def mark_slow(names):
    return [pytest.param(n, marks=[pytest.mark.slow] * n.endswith(SLOW)) for n in names]


@pytest.fixture
def result(runtime, run_once, tmp_path, request):
    """`result(NAME)` returns what a job did (runs.py); those that compile nothing share a process.

    A name is a training's, a recipe's, `cuda:1`, `calls`, `kernels`, `head` or `launches MODE`.
    """

    def describe(name):
        if name in ("calls", "kernels", "head"):
            return {"name": name, "kind": name}
        if name in RECIPES:
            return {"name": name, "kind": "step", "recipe": name, "options": {"compile": "never"}}
        if name.startswith("launches"):
            fields = {"recipe": RECIPE, "images": IMAGES, "options": {"compile": name.split()[1]}}
            return {"name": name, "kind": "step"} | fields
        default = {"device": "cuda", "compile": "never", "epochs": 2, "log_every": 1000}
        options = default | TRAININGS.get(name, {"device": "cuda:1", "epochs": 1})
        # An epoch has 11 steps.
        config = request.getfixturevalue("micro")(tmp_path / name, repeats=4, **options)
        kind = "steady" if name in TRAININGS else "whole"
        return {"name": name, "kind": kind, "config": config.to_dict()}

    def run(names):
        jobs, found = tmp_path / "jobs.json", tmp_path / "results.json"
        jobs.write_text(json.dumps([describe(name) for name in names]))
        limit = SLOW_LIMIT if names == STEPS or names[0].endswith(SLOW) else LIMIT
        done = build.run(["-m", "tests.pretended.runs", jobs, found], runtime, limit, devices=2)
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        return json.loads(found.read_text())

    def get(name):
        # The second device last: it remains the current one.
        fast = [n for n in TRAININGS if not n.endswith(SLOW)]
        fast += ["calls", "head", "cuda:1"]
        names = STEPS if name in RECIPES else [name] if name.endswith(SLOW) else fast
        return run_once(names[0].replace(" ", "-"), lambda: run(names))[name]

    return get


def take_waits(seen):
    """Remove the waits for an earlier step, which bound the host's lead; return their number."""
    calls = seen["calls"]
    found = [text for text in calls if text.startswith("cudaEventSynchronize at ")]
    return sum(calls.pop(text) for text in found if "< densefeed/pipelines/batch.py:" in text)


def write_calls(seen):
    return "".join(f"\n{n} x {text}" for text, n in seen["calls"].items())


@pytest.mark.parametrize("name", mark_slow(TRAININGS))
def test_steady_steps_neither_wait_nor_allocate_nor_capture(result, name):
    seen = result(name)
    assert seen["counts"]["launch"] > 0
    assert take_waits(seen) == seen["steps"]
    assert not seen["calls"], write_calls(seen)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", STEPS)
@pytest.mark.parametrize("half", ["batch", "step"])
def test_steps_of_all_recipes_neither_wait_nor_allocate(result, recipe, half):
    seen = result(recipe)[half]
    assert seen["counts"]["launch"] > 0
    # PyTorch's fused optimizers read on the device whether an update is skipped. Others, such as
    # Muon, wait for it once per step.
    fused = RECIPES[recipe]().optim.optimizer in FUSED
    assert take_waits(seen) == (half == "batch")
    waits = [text for text in seen["calls"] if "training/optimizers.py" in text.split(" < ")[0]]
    assert [seen["calls"].pop(text) for text in waits] == [1] * (half == "step" and not fused)
    assert not seen["calls"], write_calls(seen)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("item", "cudaStreamSynchronize"),
        ("synchronize", "cudaDeviceSynchronize"),
        ("event", "cudaEventSynchronize"),
        ("allocation", "cudaMalloc"),
        ("pinned allocation", "cudaHostAlloc"),
        ("large copy", "large copy from pageable memory"),
        ("mask", "cudaStreamSynchronize"),
        ("capture", "cudaStreamBeginCapture"),
        # The check before the first step reads it right after the call.
        ("batch to the host", "cudaStreamSynchronize"),
    ],
)
def test_calls_that_a_steady_step_must_not_make_are_found(result, name, call):
    found = [text for text in result("calls")[name] if text.startswith(f"{call} at ")]
    assert found
    assert all("tests/pretended/runs.py:" in text for text in found)


def test_an_evaluation_waits_once_for_each_model(result):
    """It has the model and its EMA; what it waits for is the sums of their metrics."""
    seen = result("eager")["evaluation"]
    waits = {text: n for text, n in seen["calls"].items() if "Synchronize at " in text}
    assert sum(waits.values()) == 2, write_calls(seen)
    assert all("densefeed/training/evaluation.py" in text for text in waits), write_calls(seen)


@pytest.mark.parametrize("name", mark_slow(["eager", "blocks", "graph"]))
def test_a_training_reserves_no_more_memory_after_its_second_epoch(result, name):
    _, *later = result(name)["reserved"]
    assert len(later) == EPOCHS - 1
    assert len(set(later)) == 1, f"bytes reserved after each epoch but the first: {later}"


def test_a_training_on_the_second_device_leaves_the_first_alone(result):
    counts = result("cuda:1")["counts"]
    assert counts["launch on device 1"] > 0
    assert counts["cudaMalloc on device 1"] > 0
    assert [name for name in counts if name.endswith("on device 0")] == []


@pytest.mark.slow
def test_kernels_run_on_the_device_of_their_tensors(result):
    """Triton launches on the current device, whatever the tensors' device is."""
    counts = result("kernels")["counts"]
    assert counts["launch on device 1"] >= 10
    assert "launch on device 0" not in counts


def test_outside_a_fused_head_adds_to_its_weight_gradient_without_a_temporary(result):
    """One product for each chunk; another launch would add a product that 16 bits rounded."""
    found = result("head")
    assert found["chunks"] == 2
    # They begin with zeros.
    assert found["with"] - found["without"] == found["chunks"] + 1


@measured
@pytest.mark.parametrize("mode", mark_slow(LAUNCHES))
def test_launches_of_a_step_do_not_increase(result, mode):
    halves = result(f"launches {mode}")
    launches = {half: halves[half]["counts"]["launch"] for half in LAUNCHES[mode]}
    assert all(launches[half] <= most for half, most in LAUNCHES[mode].items()), launches
    # A batch is augmented on the stream of the copies, beside the step before it.
    beside = {half: halves[half]["counts"].get("launch on a side stream", 0) for half in launches}
    assert beside == {"batch": launches["batch"], "step": 0}


@measured
@pytest.mark.slow
def test_outside_kernels_of_a_captured_step_do_not_increase(result, monkeypatch):
    """The whole step compiles, and is captured, with all forms under test."""
    plain = result("launches graph")["step"]["counts"]
    monkeypatch.setenv(VARIABLE, " ".join(LEVERS))
    seen = result("launches graph with levers")["step"]["counts"]
    assert (seen["launch"], seen["graph launch"]) == (plain["launch"], 1)
    kernels = plain["kernels in graphs"], seen["kernels in graphs"]
    assert kernels[0] <= KERNELS, kernels
    assert kernels[1] <= WITH_LEVERS, kernels


def test_the_results_page_has_these_numbers_of_launches():
    page = (build.ROOT / "docs" / "results" / "steps.md").read_text()
    text = " ".join(page.split())
    rows = re.findall(r"^\| `--compile (\w+)` \| ([\d,]+)", page, re.MULTILINE)
    found = {mode: int(launches.replace(",", "")) for mode, launches in rows}
    assert found == {mode: halves["step"] for mode, halves in LAUNCHES.items()}
    (batch,) = {halves["batch"] for halves in LAUNCHES.values()}
    assert f"without the batch's augmentation, which is {batch}." in text
    page = (build.ROOT / "docs" / "results" / "gpu.md").read_text()
    text = " ".join(page.split())
    assert f"launches {KERNELS} kernels in its graph without them and {WITH_LEVERS} with" in text


@pytest.mark.slow
def test_a_captured_step_is_one_graph(result):
    """Nothing is launched beside a capture, which the graph would lack."""
    halves = result("launches graph")
    first, step = halves["first"]["counts"], halves["step"]["counts"]
    assert (first["cudaStreamBeginCapture"], step["graph launch"]) == (1, 1)
    assert "work beside a capture" not in first
    assert step["kernels in graphs"] > step["launch"]
