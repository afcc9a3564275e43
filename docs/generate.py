"""MkDocs hooks: the page of the command line, modules, and links to files outside `docs/`.

The page is made from each command's own `--help`. The files exist on GitHub but not on the site. A
line `::: densefeed.MODULE` becomes the signatures and docstrings of that module.
"""

import os
import posixpath
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from api import write_module
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from densefeed.system.commands import COMMANDS
from densefeed.tools import score_maps

ROOT = Path(__file__).parent.parent
PAGE = "reference/command-line.md"
# Files of the repository, and the page of the site that has their text. The page itself, as GitHub
# shows it, only links to the file.
INCLUDED = {
    "densefeed/storage/FORMAT.md": "formats/index.md",
    "densefeed/recipes/ABLATIONS.md": "reference/ablations.md",
    "records/README.md": "results/records.md",
}
INTRODUCTION = """# Command line

The options of every command, as its `--help` prints them; `densefeed` alone lists the commands.
Those of `densefeed advise RECIPE` are those of `densefeed train RECIPE`.

`densefeed train RECIPE --help` prints the same fields for every recipe, with the recipe's own
defaults. Shown are those of `lvvit_s_224_token_label`; [Recipes](recipes.md) lists all recipes.
"""
# Commands whose own --help has no options: those are of their parts.
PARTS = {
    "advise": (),
    "train": ("lvvit_s_224_token_label",),
    "score-maps": tuple(score_maps.COMMANDS),
    "beton": ("verify",),
}


def commands() -> list[str]:
    """Return the words of every command that has options."""
    return [f"{name} {part}".rstrip() for name in COMMANDS for part in PARTS.get(name, ("",))]


def read_help(command: str) -> str:
    """Return what the command prints for --help. RuntimeError if it fails."""
    # The checkout's package, even where another one is installed. Without COLUMNS the line breaks
    # would depend on the terminal that builds the site.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "88", "NO_COLOR": "1"}
    words = [sys.executable, "-m", "densefeed", *command.split(), "--help"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(f"densefeed {command} --help failed: {done.stderr[-500:]}")
    return done.stdout.rstrip()


# `mkdocs serve` builds again at every change, and the commands take seconds each to import torch.
@cache
def command_line() -> str:
    """Return the page."""
    names = commands()
    # The threads only wait for their processes.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        texts = pool.map(read_help, names)
        parts = [
            f"## `densefeed {n}`\n\n```text\n{t}\n```\n" for n, t in zip(names, texts, strict=True)
        ]
    return "\n".join([INTRODUCTION, *parts])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated page to the site."""
    files.append(File.generated(config, PAGE, content=command_line()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adapt what is written for GitHub.

    Drop paragraphs that begin with "On GitHub, ", include the files of INCLUDED and point links to
    them at their pages, keep only the path of links to other files, and render modules.
    """
    # Links and `src_uri` have forward slashes on every system, unlike os.path on Windows.
    folder = posixpath.dirname(page.file.src_uri)

    def adapt(link: re.Match) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        if path in INCLUDED:
            return f"[{text}]({posixpath.relpath(INCLUDED[path], folder or '.')}{anchor})"
        return link[0] if path.startswith("docs/") else f"`{text}`"

    markdown = re.sub(r"(?m)^On GitHub, (?:.+\n)+\n?", "", markdown)
    markdown += "".join(
        (ROOT / file).read_text() for file, uri in INCLUDED.items() if uri == page.file.src_uri
    )
    # Links with a scheme (https:, mailto:) and links within the page stay as they are.
    markdown = re.sub(r"\[([^\[\]]+)\]\((?![a-z]+:)([^)#\s]+)(#[^)\s]+)?\)", adapt, markdown)
    return re.sub(r"(?m)^::: (\S+)$", lambda line: write_module(line[1]), markdown)
