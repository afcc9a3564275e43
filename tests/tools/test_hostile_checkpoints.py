"""Checkpoints from anywhere: altered dictionaries, flipped bits, bombs.

Every command that loads one succeeds or ends in one sentence, quickly, in little memory, and runs
no code from it. Each attempt is a forked process with limits.
"""

import os
import random
import shutil
from functools import partial
from pathlib import Path

import pytest

import densefeed.train as training
from densefeed.relabel import load_teacher
from densefeed.system import errors
from densefeed.system.options import with_options
from densefeed.tools import export

from ..hostile import children, mutations

# Attempts of the short form; SOAK_FILES=1000 for more.
FIRST = int(os.environ.get("SOAK_FIRST", 0))
SHORT = 5
COUNT = int(os.environ.get("SOAK_FILES", SHORT))
WAYS = *mutations.BY_SUFFIX[".pt"], *[mutations.flip_bits, mutations.cut] * 2


@pytest.fixture(scope="module")
def run(micro, tmp_path_factory):
    """A finished run, and the config that resumes it."""
    out = tmp_path_factory.mktemp("hostile") / "run"
    config = micro(out, epochs=1, resume="auto")
    training.train(config)
    return config


def replace_newest(config, out: Path, damage):
    """Copy a run, damage its newest checkpoint with `damage(path)`, and list its new hash."""
    shutil.copytree(config.run.out, out, symlinks=True)
    newest = out / "checkpoints" / os.readlink(out / "last.pt").rpartition("/")[2]
    damage(newest)
    mutations.list_hash(newest)
    return with_options(config, out=out)


def make_actions(out: Path, config) -> dict:
    """Commands that load the newest checkpoint of the run in `out`, by name."""
    new = with_options(config, out=out / "new", init=out / "last.pt", resume="never")
    actions = {
        "export": lambda: export.main(export.Export(checkpoint=out, out=out / "exported")),
        "teacher": lambda: load_teacher.load_network(str(out), "", 32),
        "resume": lambda: training.train(config),
        "init": lambda: training.train(new),
    }
    return {name: partial(errors.run, action) for name, action in actions.items()}


def test_a_checkpoint_as_written_is_loaded_by_every_command(run, tmp_path):
    """Else the test below could pass because everything is refused."""
    config = replace_newest(run, tmp_path / "run", lambda path: path.touch())
    for name, action in make_actions(tmp_path / "run", config).items():
        outcome = children.run(action, tmp_path)
        assert outcome.code == 0, f"{name}\n{outcome.output}"


def test_altered_checkpoints_end_in_one_sentence(run, tmp_path):
    seen, work = set(), tmp_path / "work"
    work.mkdir()
    for number in range(FIRST, FIRST + COUNT):
        rng = random.Random(number)
        way, out = rng.choice(WAYS), tmp_path / str(number)
        config = replace_newest(run, out, partial(way, rng=rng))
        actions = make_actions(out, config)
        for name in rng.sample(list(actions), 2):
            outcome = children.run(actions[name], work)
            # Code in a checkpoint would write to the working directory.
            fault = children.find_fault(outcome, os.listdir(work))
            assert not fault, f"file {number}, {way.__name__}, {name}: {fault}\n{outcome.output}"
            assert (out / "exported").exists() <= (name == "export" and not outcome.code)
            shutil.rmtree(out / "exported", ignore_errors=True)
            seen.add(outcome.code)
        shutil.rmtree(out)
    if COUNT == SHORT:
        assert seen == {0, 2}
