"""Names and messages from files are printed without the characters that control a terminal."""

import ast
import io
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from densefeed.system import terminal
from densefeed.system.errors import UserError, run
from densefeed.system.progress import bar, tally
from densefeed.tools.validate import table

PACKAGE = Path(terminal.__file__).parents[1]
HOSTILE = "a\x1b[2J\x9b31m\x7f\r\n\u202egpj\u2066\udcff[/b].jpg"
ESCAPED = r"a\x1b[2J\x9b31m\x7f\r\n\u202egpj\u2066\udcff[/b].jpg"


def test_control_characters_are_escaped_and_nothing_else():
    assert terminal.escape_controls(HOSTILE) == ESCAPED
    harmless = "".join(map(chr, range(32, 127))) + "é猫😀\u0301 ×—"
    assert terminal.escape_controls(harmless) == harmless


def test_a_line_stays_one_line(capsys):
    terminal.print("left out:", HOSTILE)
    terminal.print(HOSTILE, 1, sep="\t", file=sys.stderr, flush=True)
    assert capsys.readouterr() == (f"left out: {ESCAPED}\n", f"{ESCAPED}\t1\n")


@pytest.mark.parametrize("kind", [UserError, lambda text: OSError(None, "is bad", text)])
def test_the_sentence_of_an_error_is_escaped(kind, capsys):
    def main():
        raise kind(HOSTILE.replace("\r\n", ""))

    with pytest.raises(SystemExit) as stopped:
        run(main)
    assert stopped.value.code == 2
    assert ESCAPED.replace(r"\r\n", "") in capsys.readouterr().err


def test_a_bar_shows_a_name_that_is_markup(capsys):
    assert list(bar([1, 2], f"verify {HOSTILE}")) == [1, 2]
    with tally(f"verify {HOSTILE}", 2, 0) as update:
        update(2)
    printed = capsys.readouterr().out
    assert "[/b].jpg" in printed
    assert "\x1b[2J" not in printed


def test_the_line_of_a_tally_in_a_log_is_escaped(capsys, monkeypatch):
    monkeypatch.setattr("densefeed.system.progress.LOG_INTERVAL", 0.0)
    with tally(HOSTILE, 2, 0) as update:
        update(1)
    assert f"{ESCAPED}: 1 of 2" in capsys.readouterr().out.replace("\n", "")


def test_a_table_shows_a_name_that_is_markup():
    numbers = ["top1", "top5", "loss", "size", "crop_pct", "images_per_s", "model_images_per_s"]
    counts = ["images", "classes", "model_classes", "parameters", "batch", "threads"]
    texts = ["weights", "data", "classes_by", "device", "precision", "eval_interpolation"]
    row = dict.fromkeys(numbers + counts, 1) | dict.fromkeys(texts, "x") | {"real_top1": None}
    console = Console(file=io.StringIO(), width=200)
    console.print(table(row | {"model": HOSTILE}))
    assert ESCAPED in console.file.getvalue()


def test_every_module_that_prints_escapes():
    for path in PACKAGE.rglob("*.py"):
        calls = [
            node.func
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
        ]
        prints = any(isinstance(call, ast.Name) and call.id == "print" for call in calls)
        if prints and path != PACKAGE / "system/terminal.py":
            imported = r"^from densefeed\.system\.terminal import (\w+, )*print(, \w+)*$"
            assert re.search(imported, path.read_text(), re.MULTILINE), path
