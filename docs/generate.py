"""MkDocs hook: write the page of the command line from each command's own `--help`."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGE = "reference/command-line.md"
INTRODUCTION = """# Command line

The options of every command, as its `--help` prints them. An installed package has these commands
under the names in [Installation](../start/install.md#as-a-package).

`python train.py RECIPE --help` prints the same fields for every recipe, with the recipe's own
defaults. Shown are those of `lvvit_s_224_token_label`; [Recipes](recipes.md) lists all recipes.
"""
# Tools whose own --help has no options: those are of their subcommands.
SUBCOMMANDS = {"score_maps": ("verify", "convert", "merge"), "beton": ("verify",)}


def commands() -> list[str]:
    """Return the words of every command that has options."""
    words = ["train.py lvvit_s_224_token_label"]
    for path in sorted((ROOT / "densefeed" / "tools").glob("*.py")):
        if 'if __name__ == "__main__"' in path.read_text():
            parts = SUBCOMMANDS.get(path.stem, ("",))
            words += [f"tools/{path.name} {part}".rstrip() for part in parts]
    return words


def read_help(command: str) -> str:
    """Return what the command prints for --help. RuntimeError if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "88", "NO_COLOR": "1"}
    words = [sys.executable, *command.split(), "--help"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(f"python {command} --help failed: {done.stderr[-500:]}")
    return done.stdout.rstrip()


@cache  # `mkdocs serve` builds again at every change
def command_line() -> str:
    """Return the page."""
    names = commands()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        texts = pool.map(read_help, names)
        parts = [f"## `{n}`\n\n```text\n{t}\n```\n" for n, t in zip(names, texts, strict=True)]
    return "\n".join([INTRODUCTION, *parts])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated page to the site."""
    files.append(File.generated(config, PAGE, content=command_line()))
    return files
