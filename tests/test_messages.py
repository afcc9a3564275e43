"""Messages name options that exist, of a command that can print them, and commands that exist."""

import ast
import dataclasses
import inspect
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from densefeed.system import errors
from densefeed.system.commands import COMMANDS
from densefeed.system.errors import install_extra
from densefeed.system.options import flag, hints, leaf_name, metadata
from densefeed.training.config import Config

from .test_layout import PACKAGE, SOURCES, module_name, reach

# Starts pytest and the benchmarks, whose options it writes out.
LAUNCHER = PACKAGE / "tools/gpu_check.py"
# Options of torchrun, ray, tar, git and tyro, and of every command.
FOREIGN = {
    *("--nproc-per-node", "--head", "--sparse", "--porcelain", "--short", "--tyro", "--help"),
    "--show-toplevel",
    "--version",
}
# An option that is written out, up to its value; what an f-string inserts is "\0".
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![\w\0-])")


def read_flags(options: type) -> Iterator[str]:
    """Yield the options of a class, with those of its nested classes."""
    for name, hint in hints(options).items():
        if dataclasses.is_dataclass(hint):
            yield from read_flags(hint)
            continue
        leaf = flag(leaf_name(name, hint))
        yield leaf
        if hint is bool:
            yield leaf.replace("--", "--no-", 1)
        for item in metadata(hint):
            yield from getattr(item, "aliases", None) or ()


@cache
def command_options(name: str) -> frozenset[str]:
    """Return the options of a command."""
    if name in ("train", "advise"):
        # Its sections have the classes of the objectives' options, registered by now.
        sections = [getattr(Config(), field.name) for field in dataclasses.fields(Config)]
        return frozenset(option for one in sections for option in read_flags(type(one)))
    module = import_module(f"densefeed.{COMMANDS[name]}")
    if parts := getattr(module, "COMMANDS", None):
        signatures = [inspect.signature(part).parameters for part in parts.values()]
        return frozenset(flag(one) for signature in signatures for one in signature)
    found = inspect.getclosurevars(module.command).nonlocals.get("options")
    return frozenset(read_flags(found)) if found else frozenset()


def read_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of the strings of a file, and its docstring if it is a command's help."""
    tree = ast.parse(path.read_text())
    inner, nodes = set(), list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            inner |= {id(part) for part in ast.walk(node) if part is not node}
        kinds = ast.Module, ast.ClassDef, ast.FunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            is_help = isinstance(node, ast.Module) and "tools" in path.parts
            inner |= set() if is_help else {id(node.body[0].value)}
    for node in nodes:
        if id(node) in inner:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def find_commands(module: str) -> list[str]:
    """Return the commands that can print a module's messages."""
    starts = {name: f"densefeed.{file}" for name, file in COMMANDS.items()}
    found = [name for name, start in starts.items() if module in {start} | reach(start)]
    # Recipes are help of `train`, which finds their modules by name.
    return [*found, "train"] if module.startswith("densefeed.recipes.") else found


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_outside_messages_name_what_exists(path):
    """Commands, and options of a command that prints them or that the message names."""
    own, wrong = FOREIGN.union(*map(command_options, find_commands(module_name(path)))), []
    words = re.compile(r"(?:`|with |with `|by `|see |run )densefeed ([a-z-]+)")
    for line, text in read_texts(path):
        wrong += [(line, name) for name in words.findall(text) if name not in COMMANDS]
        options = set(OPTION.findall(text)) - own if path != LAUNCHER else ()
        if options:
            named = [name for name in COMMANDS if re.search(rf"\b{name}\b", text)]
            known = frozenset().union(*map(command_options, named))
            wrong += [(line, option) for option in options - known]
    assert not wrong


def test_outside_install_hints_name_extras_that_exist():
    """Messages said `pip install "densefeed[cloud]"`, and the package is on no index."""
    root = PACKAGE.parent
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    hints = set()
    for path in SOURCES:
        text = path.read_text()
        assert not re.search(r"densefeed\[\w", text), path
        hints |= set(re.findall(r"install_extra\(['\"](\w+)['\"]\)", text))
    assert {"cloud", "dali", "demo", "export", "parquet", "ray", "wandb"} <= hints
    pages = [root / "README.md", *root.glob("docs/**/*.md"), *root.glob("examples/*.py")]
    written = [re.findall(r"pip install[^`\n]*?([\w.]*)\[(\w+)\]", p.read_text()) for p in pages]
    found = [pair for pairs in written for pair in pairs]
    assert found
    assert {place for place, _ in found} == {".", "densefeed"}
    # The package is on no index before its first release, of which one page tells.
    assert [page.name for page in pages if "densefeed[" in page.read_text()] == ["install.md"]
    assert hints | {extra for _, extra in found} <= extras.keys()
    assert install_extra("ray") == 'run `pip install ".[ray]"` in the checkout of densefeed'


def test_outside_install_hints_of_a_wheel_name_no_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "ROOT", tmp_path)
    assert install_extra("demo") == 'run `pip install "densefeed[demo]"`'
