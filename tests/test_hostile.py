"""Damaged and malicious files of every kind, through the commands that read them (tests/hostile).

`make soak` tries thousands of random ones.
"""

import os

import pytest

FILES = int(os.environ.get("SOAK_FILES", 0))


@pytest.mark.slow
def test_hostile_files_end_in_one_sentence(tmp_path, command):
    """Run a few fixed cases; each takes about 0.3 s of processor time."""
    seed = int.from_bytes(os.urandom(4)) if FILES else 1
    options = "--files", FILES or 150, "--seed", seed, "--out", tmp_path
    done = command("-m", "tests.hostile", *options)
    print(f"seed {seed}\n{done.stdout}")
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}{done.stderr[-3000:]}"
