"""The examples run as their docstrings say, from a folder of images and its score maps."""

import ast
import json
import re
from pathlib import Path

import pytest

import densefeed

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2
LOOPS = ["timm_task", "accelerate_loop", "lightning_module", "hf_trainer"]


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
    run(command, [EXAMPLES / f"{name}.py"], folder, maps, tmp_path, "--workers", 1)


@pytest.mark.slow
def test_two_ranks_with_persistent_workers(folder, maps, tmp_path, command):
    words = [*TORCHRUN, EXAMPLES / "ddp_workers.py"]
    run(command, words, folder, maps, tmp_path, "--workers", 1)


TEACHER = """
import torch

class Means(torch.nn.Module):
    num_classes = 2

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Conv2d(3, 2, 1)

    def forward_token_logits(self, image_NCHW):
        return self.head(torch.nn.functional.avg_pool2d(image_NCHW, 8))

def make():
    torch.manual_seed(0)
    return Means()
"""


@pytest.mark.slow
@pytest.mark.parametrize("bands", [3, 8])
def test_bands_that_the_teacher_does_not_see(bands, folder, tmp_path, command):
    (tmp_path / "means.py").write_text(TEACHER)
    words = EXAMPLES / "bands.py", "label", "--data", folder, "--maps", "bands.h5"
    done = command(*words, "--teacher", "means:make", "--input-size", 64, cwd=tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    words = EXAMPLES / "bands.py", "train", "--data", folder, "--maps", "bands.h5"
    done = command(*words, "--bands", bands, "--epochs", 1, "--batch", 4, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^{bands} bands: top-1 \d+\.\d %$", done.stdout, re.MULTILINE)


def read_notebook():
    """Return the code of the notebook's cells."""
    cells = json.loads((EXAMPLES / "any_loop.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_uses_public_names_alone():
    trees = [ast.walk(ast.parse(cell)) for cell in read_notebook()]
    nodes = [node for tree in trees for node in tree]
    used = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "densefeed"
    }
    imported = {
        name.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("densefeed")
        for name in node.names
    }
    assert {"label", "open_score_maps", "sparse_loss", "View"} <= used | imported
    assert used | imported <= set(densefeed.__all__)


@pytest.mark.slow
def test_the_notebook_trains_to_what_it_shows(tmp_path, command):
    """Its own cells, in plain Python, whole: a minute on one core."""
    (tmp_path / "cells.py").write_text("\n".join(read_notebook()))
    done = command("cells.py", cwd=tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    shown = dict(re.findall(r"^(.+): ([0-9.]+) %$", done.stdout, re.MULTILINE))
    assert list(shown) == ["teacher", "image label alone", "and token labels"]
    # Three seeds gave 87 to 91 % and 94 to 95 %.
    assert float(shown["image label alone"]) > 80
    assert float(shown["and token labels"]) > max(90, float(shown["image label alone"]))
