"""Hostile names, lists, class maps and folders end every command in one sentence."""

import os

import pytest


def run_campaign(command, tmp_path, cases, seed):
    done = command("tests/hostile_names.py", cases, seed, environment={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{cases:,} cases, 0 failed\n"


def test_commands_survive_hostile_names(command, tmp_path):
    run_campaign(command, tmp_path, 25, 0)


@pytest.mark.slow
def test_commands_survive_many_hostile_names(command, tmp_path):
    run_campaign(command, tmp_path, int(os.environ.get("SOAK_FILES", 150)), 1)
