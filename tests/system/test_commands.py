"""The command `densefeed`: its list without PyTorch, its subcommands, and words that are none."""

import re
import runpy
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint, PackageNotFoundError, version
from pathlib import Path

import pytest

import densefeed
from densefeed.system import commands
from densefeed.system.commands import COMMANDS

ROOT = Path(__file__).parents[2]
SCRIPT = "import sys; from densefeed.system.commands import main; main(); "


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
@pytest.mark.parametrize("start", ["script", "module"])
def test_the_list_needs_no_pytorch(words, start, tmp_path):
    """As the console script that pip writes, and as `python -m densefeed`."""
    script = tmp_path / "densefeed"
    script.write_text(SCRIPT + "assert 'torch' not in sys.modules")
    program = [str(script)] if start == "script" else ["-X", "importtime", "-m", "densefeed"]
    done = subprocess.run(
        [sys.executable, *program, *words],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "torch" not in done.stderr
    found = re.findall(r"^  (\S+) +(\S.+)$", done.stdout, re.M)
    assert [name for name, _ in found] == list(COMMANDS)
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert dict(found)["train"] == "Train a vision transformer from dense teacher score maps."


@pytest.mark.parametrize(
    ("words", "whole"),
    [("densefeed", False), ("densefeed train", True), ("run.py densefeed", True), ("run.py", True)],
)
def test_a_program_of_this_name_imports_the_package(words, whole, monkeypatch):
    """With words of its own, or where `densefeed` is only its argument."""
    monkeypatch.setattr(sys, "argv", words.split())
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, *words.split()])
    assert ("open_loader" in runpy.run_path(densefeed.__file__)) == whole


def test_every_command_has_its_function_and_the_wheel_has_one_script():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert list(project["scripts"]) == ["densefeed"]
    place = project["scripts"]["densefeed"]
    assert EntryPoint("densefeed", place, "console_scripts").load() is commands.main
    for module in COMMANDS.values():
        assert callable(EntryPoint("x", f"densefeed.{module}:command", "x").load()), module


def test_the_version_is_that_of_the_installed_package(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/densefeed", "--version"])
    commands.main()
    assert capsys.readouterr().out == f"densefeed {version('densefeed')}\n"


def test_code_that_is_not_installed_has_no_version(monkeypatch, capsys):
    """As on a GPU machine to which a checkout was copied: trainings write the version too."""

    def fail(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", fail)
    monkeypatch.setattr(sys, "argv", ["densefeed", "--version"])
    commands.main()
    assert capsys.readouterr().out == "densefeed unknown\n"


@pytest.mark.parametrize("name", ["costs", "score-maps"])
def test_a_command_prints_its_own_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/densefeed", name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        commands.main()
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: densefeed {name} ")


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("trian", "try train, or see densefeed --help"),
        ("relabel", "try label"),
        ("model-costs", "try costs"),
        ("exprt", "try export, report, export-labels, or see densefeed --help"),
        ("x", "see all with densefeed --help"),
    ],
)
def test_outside_an_unknown_command_is_one_sentence(name, like, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["densefeed", name])
    with pytest.raises(SystemExit) as stopped:
        commands.main()
    assert stopped.value.code == 2
    sentence = f"error: densefeed has no command '{name}'; {like}"
    assert capsys.readouterr().err.startswith(sentence)
