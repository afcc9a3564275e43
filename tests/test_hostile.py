"""Hostile files of every kind, through the commands that read them (tests/hostile).

`make soak` tries thousands of random ones.
"""

import os

import pytest

FILES = int(os.environ.get("SOAK_FILES", 0))


def run_campaign(command, out, campaign, files, seed):
    options = "--campaign", campaign, "--files", files, "--seed", seed, "--out", out
    done = command("-m", "tests.hostile", *options)
    print(f"seed {seed}\n{done.stdout}")
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}{done.stderr[-3000:]}"


def test_hostile_names_end_in_one_sentence(tmp_path, command):
    run_campaign(command, tmp_path, "names", 3, 0)


@pytest.mark.slow
@pytest.mark.parametrize("campaign", ["files", "names"])
def test_hostile_files_end_in_one_sentence(tmp_path, command, campaign):
    """Run a few fixed cases; each takes about 0.3 s of processor time."""
    seed = int.from_bytes(os.urandom(4)) if FILES else 1
    run_campaign(command, tmp_path, campaign, FILES or 150, seed)
