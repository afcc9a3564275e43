"""The examples run as their docstrings say, from a folder of images and its score maps."""

import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2
LOOPS = ["torchvision_loop", "timm_task", "accelerate_loop", "lightning_module", "hf_trainer"]


def run(command, words, folder, store, tmp_path, *more):
    """Run an example for an epoch of two batches."""
    numbers = ("--epochs", 1, "--batch", 4, "--workers", 0, *more)
    done = command(*words, "--data", folder, "--maps", store, *numbers, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^top-1 \d+\.\d %$", done.stdout, re.MULTILINE)


def test_the_loop_of_torchvision(folder, maps, tmp_path, command):
    run(command, [EXAMPLES / "torchvision_loop.py"], folder, maps, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_loops_of_other_libraries(name, folder, maps, tmp_path, command):
    pytest.importorskip("transformers" if name == "hf_trainer" else "torch")
    run(command, [EXAMPLES / f"{name}.py"], folder, maps, tmp_path, "--workers", 1)


@pytest.mark.slow
def test_two_ranks_with_persistent_workers(folder, maps, tmp_path, command):
    words = [*TORCHRUN, EXAMPLES / "ddp_workers.py"]
    run(command, words, folder, maps, tmp_path, "--workers", 1)
