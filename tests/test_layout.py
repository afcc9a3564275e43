"""Rules of the repository layout: import order, no unread config field, one installed package."""

import ast
import dataclasses
import inspect
import re
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest
import tyro

from densefeed.system.devices import DeviceOptions, ThreadOptions
from densefeed.system.options import hints, leaf_name, leaves, metadata
from densefeed.training.config import Config

ROOT = Path(__file__).parent.parent
# Packages in the order of the data flow: each may import from those before it.
ORDER = (
    "system",
    "native",
    "storage",
    "models",
    "relabel",
    "pipelines",
    "pages",
    "explain",
    "objectives",
    "step",
    "training",
    "recipes",
    "api",
    "train",
    "tools",
    "__main__",
    "script_start",
)
# Names at the top level that are links into the package.
LINKS = ("relabel", "pipelines", "models", "tools", "train.py")
PACKAGE = ROOT / "densefeed"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def modules_imported(text: str) -> set[str]:
    """Return the densefeed modules that a file imports anywhere.

    AssertionError for a relative import, and for one of a link at the top level: a user's working
    directory may have a module of that name.
    """
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, ast.unparse(node)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    links = {name.removesuffix(".py") for name in LINKS}
    assert not {name.partition(".")[0] for name in names} & links
    return {name for name in names if name.startswith("densefeed.")}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_upstream(path):
    imported = {name.split(".")[1] for name in modules_imported(path.read_text())}
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if name != "__init__":
        assert imported <= set(ORDER[: ORDER.index(name) + 1]), f"{path} imports downstream"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path) for path in SOURCES}


@cache
def import_graph() -> dict[str, set[str]]:
    """The modules that each module imports, also inside functions."""
    modules, graph = MODULES - {"densefeed"}, {}
    for path in SOURCES:
        imported = [f"{name}." for name in modules_imported(path.read_text())]
        found = {m for m in modules if any(name.startswith(f"{m}.") for name in imported)}
        # `densefeed.a.b` also matches its package `densefeed.a`: keep the innermost modules.
        inner = {m for m in found if not any(other.startswith(f"{m}.") for other in found)}
        graph[module_name(path)] = inner - {module_name(path)}
    return graph


def test_no_circular_imports():
    # CycleError names the modules of a cycle.
    TopologicalSorter(import_graph()).prepare()


def reach(start: str) -> set[str]:
    """The modules that importing a module may import, directly or not."""
    found, stack = set(), [start]
    while stack:
        new = import_graph()[stack.pop()] - found
        found |= new
        stack += new
    return found


MAPS = "score_maps store_file store_folder hdf5_layout row_codecs tensor_files torch_files geometry"


@pytest.mark.parametrize("name", MAPS.split())
def test_score_maps_stand_without_images_and_object_storage(name):
    reached = {module.removeprefix("densefeed.") for module in reach(f"densefeed.storage.{name}")}
    images = r"storage\.(images|datasets|image_shards|tar_|parquet_|object_|beton)"
    others = images + r"|system\.object_(?!url)"
    assert not [module for module in reached if re.match(others, module)]
    assert "storage.datasets" in {m.removeprefix("densefeed.") for m in reach("densefeed.api")}


def test_models_do_not_import_the_labeling():
    models = [module_name(path) for path in SOURCES if path.parent.name == "models"]
    reached = set().union(*map(reach, models))
    assert not [module for module in reached if module.startswith("densefeed.relabel")]


@pytest.mark.parametrize(
    "line",
    [
        "from densefeed import pipelines",
        "from densefeed.pipelines import plan",
        "import densefeed.pipelines.plan as p",
        "def f():\n    from densefeed.pipelines.plan import EpochPlan",
    ],
)
def test_every_form_of_import_is_found(line):
    assert {name.split(".")[1] for name in modules_imported(line)} == {"pipelines"}
    for wrong in ("from ..relabel import files", "import models.lvvit", "from train import train"):
        with pytest.raises(AssertionError):
            modules_imported(wrong)


# Also in programs that a test starts as text and in the examples of the pages.
FROM_IMPORT = re.compile(r"from (densefeed[\w.]*) import (\([^)]*\)|[\w, ]+)")


def test_every_imported_name_exists():
    """Also of files that run only where an optional package is installed, as examples do."""
    files = subprocess.check_output(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, text=True)
    for path in files.split():
        for module, names in FROM_IMPORT.findall((ROOT / path).read_text()):
            for name in re.findall(r"(\w+)(?: as \w+)?", re.sub("#.*", "", names)):
                found = hasattr(import_module(module), name) or f"{module}.{name}" in MODULES
                assert found, f"{path}: {module} has no {name}"


def test_every_config_field_is_read():
    """Each field of a dataclass is read as an attribute `.name` somewhere."""
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    read = {
        n.attr
        for tree in trees.values()
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)
    }
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and any(
                "dataclass" in ast.unparse(d) for d in node.decorator_list
            ):
                declared = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
                # A lease's `number` only makes each renewal's content another one.
                kept = read | {"version", "number"}
                assert declared <= kept, f"{path}: {declared - kept} is never read"


# Commands of tools/, without what its files import when they are started as scripts.
LIBRARIES = "__init__", "script_start"
TOOLS = [path for path in SOURCES if path.parent.name == "tools" and path.stem not in LIBRARIES]
# Libraries that leave tools/ with the labeling's plan.
COMMANDS = [path for path in TOOLS if "make_command(" in path.read_text()]


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: path.stem)
def test_every_tool_is_a_command_and_imports_no_other(path):
    """What several commands use is a library, and stands in a room before them."""
    text = path.read_text()
    names = {
        name.id if isinstance(name, ast.Name) else name
        for node in ast.parse(text).body
        for name in (*getattr(node, "targets", ()), getattr(node, "name", ""))
    }
    assert "command" in names
    # Before imports, which take seconds and fail in a Python without the packages.
    assert '"""\n\nif not __package__:\n    import script_start ' in text
    assert 'if __name__ == "__main__":\n    command()\n' in text
    assert not [name for name in modules_imported(text) if name.startswith("densefeed.tools")]


def options_of(path: Path) -> tuple[Path, str]:
    """The file and the class of a command's options."""
    text = path.read_text()
    name = re.search(r"make_command\(main, (\w+)", text)[1]
    # Options that the Python API has too stand in a library.
    if found := re.search(rf"^from (\S+) import .*\b{name}\b", text, re.MULTILINE):
        path = ROOT / f"{found[1].replace('.', '/')}.py"
    return path, name


def sections(options: object) -> Iterator[type]:
    """The classes of nested options."""
    for value in vars(options).values():
        if dataclasses.is_dataclass(value):
            yield type(value)
            yield from sections(value)


SECTIONS = list(sections(Config()))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *((Path(inspect.getfile(section)), section.__name__) for section in SECTIONS),
        *map(options_of, COMMANDS),
        *((Path(inspect.getfile(one)), one.__name__) for one in (ThreadOptions, DeviceOptions)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.stem,
)
def test_every_option_has_a_help_text(path, name):
    """tyro takes the comment at the end of a field's line or above it.

    It does not find comments inside parentheses. The type MaxPixels has the text of its options.
    """
    text = path.read_text()
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    (options,) = [node for node in classes if node.name == name]
    fields = [
        node
        for node in options.body
        if isinstance(node, ast.AnnAssign)
        and "default_factory" not in ast.unparse(node)
        and ast.unparse(node.annotation) != "MaxPixels"
    ]
    lines = text.splitlines()
    assert fields
    for field in fields:
        rest = lines[field.lineno - 1][field.end_col_offset :]
        beside = field.lineno == field.end_lineno and "#" in rest
        assert beside or lines[field.lineno - 2].lstrip().startswith("#"), field.target.id


def find_unexplained(names: Iterable[str]) -> list[str]:
    """The options that no page names, as `--option`, `--no-option` or in `option=value`."""
    paths = [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(path.read_text() for path in paths)
    known = set(re.findall(r"--(?:no-)?([a-z][a-z0-9-]*)", text))
    known |= {name.replace("_", "-") for name in re.findall(r"\b([a-z_]+)=", text)}
    return [name for name in names if name.replace("_", "-") not in known]


def test_every_option_of_train_is_on_a_page():
    names = {name for name, _ in leaves(Config())}
    assert not find_unexplained(names)
    # Three of segmentation, which classification has no use for.
    assert len(names) <= 98


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_every_option_of_a_command_is_on_a_page(path):
    path, name = options_of(path)
    options = getattr(import_module(module_name(path)), name)
    names = (
        leaf_name(field, hint)
        for field, hint in hints(options).items()
        # What is given without its name.
        if tyro.conf.Positional[str].__metadata__[0] not in metadata(hint)
    )
    assert not find_unexplained(names)


@pytest.mark.parametrize("name", LINKS)
def test_top_level_names_link_into_the_package(name):
    assert (ROOT / name).is_symlink()
    assert (ROOT / name).resolve() == PACKAGE / name


def test_no_module_is_called_utils():
    names = {"utils", "util", "helpers", "misc", "common"}
    assert not [path for path in SOURCES if path.stem in names]


def test_no_machine_paths_or_large_files_are_tracked():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        assert path.stat().st_size < 200_000, name
        if path.suffix in (".py", ".md", ".toml", ".yml", ".sh"):
            assert not re.search(r"/(home|work|Users)/[a-z]", path.read_text()), name
