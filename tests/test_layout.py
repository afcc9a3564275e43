"""The house rules, each a few lines: imports point upstream, no dead config field, one name in
site-packages, README is true.
"""

import ast
import os
import re
import subprocess
import sys
import zipfile
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# In the order of the data flow: a room imports from those before it.
ROOMS = (
    "system",
    "native",
    "storage",
    "relabel",
    "pipelines",
    "models",
    "objectives",
    "training",
    "recipes",
    "api",
    "train",
    "tools",
)
PACKAGE = ROOT / "densefeed"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def modules_imported(text: str) -> set[str]:
    """The modules of ours that a file imports from, at its top or later. AssertionError for a
    relative import.
    """
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, ast.unparse(node)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.startswith("densefeed.")}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_upstream(path):
    imported = {name.split(".")[1] for name in modules_imported(path.read_text())}
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room != "__init__":
        assert imported <= set(ROOMS[: ROOMS.index(room) + 1]), f"{path} reaches downstream"


def test_no_module_imports_itself_in_a_circle():
    """Late imports count too."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES}
    modules = {name.removesuffix(".__init__") for name in names.values()} - {"densefeed"}

    def module_of(imported: str) -> str | None:
        """The module that a dotted name is, or is a part of."""
        while imported not in modules and "." in imported:
            imported = imported.rpartition(".")[0]
        return imported if imported in modules else None

    graph = {}
    for path, name in names.items():
        found = set(map(module_of, modules_imported(path.read_text())))
        graph[name.removesuffix(".__init__")] = found - {None, name.removesuffix(".__init__")}
    TopologicalSorter(graph).prepare()  # CycleError names the circle


@pytest.mark.parametrize(
    "line",
    [
        "from densefeed import pipelines",
        "from densefeed.pipelines import plan",
        "import densefeed.pipelines.plan as p",
        "def f():\n    from densefeed.pipelines.plan import EpochPlan",
    ],
)
def test_the_rule_sees_every_way_to_import(line):
    assert {name.split(".")[1] for name in modules_imported(line)} == {"pipelines"}
    with pytest.raises(AssertionError):
        modules_imported("from ..relabel import files")


def test_every_config_field_is_read():
    """Attribute reads `.name` anywhere outside the declaring class."""
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
                assert declared <= read | {"version"}, f"{path}: nobody reads {declared - read}"


COMMANDS = [
    path for path in SOURCES if "tyro.cli(" in path.read_text() and path.parent.name == "tools"
]


@pytest.mark.parametrize(
    "path", [PACKAGE / "training" / "config.py", *COMMANDS], ids=lambda p: p.stem
)
def test_every_option_says_what_it_does(path):
    """tyro takes the comment that ends a field's line, or those above it; within parentheses it
    sees none.
    """
    text = path.read_text()
    name = match[1] if (match := re.search(r"tyro\.cli\((\w+)", text)) else "Config"
    (options,) = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    fields, lines = (
        [node for node in options.body if isinstance(node, ast.AnnAssign)],
        text.splitlines(),
    )
    assert fields
    for field in fields:
        beside = (
            field.lineno == field.end_lineno
            and "#" in lines[field.lineno - 1][field.end_col_offset :]
        )
        assert beside or lines[field.lineno - 2].lstrip().startswith("#"), field.target.id


def test_only_one_name_reaches_site_packages(tmp_path):
    """Build the wheel as `pip install .` does; it must hold `densefeed` alone, and what is not
    Python too.
    """
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "-q",
            "-w",
            tmp_path,
            ROOT,
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"densefeed"}
    data = {
        "native/libdensefeed.so",
        "storage/FORMAT.md",
        "recipes/ABLATIONS.md",
        "tools/report.html",
        "tools/audit.html",
        "tools/style.html",
    }
    assert {f"densefeed/{name}" for name in ("train.py", *data)} <= set(names)
    assert not any(name.endswith((".c", "setup.py")) for name in names)


def test_the_wheel_works_beside_files_of_the_same_names(tmp_path):
    """In a folder whose own models.py, tools.py and train.py would break whoever imports them."""
    for name in ("models", "tools", "train", "pipelines", "relabel"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    code = "import densefeed.train, densefeed.tools.report, densefeed.models.lvvit, densefeed.recipes; print('imported')"
    path = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **path},
    )
    assert (done.returncode, done.stdout) == (0, "imported\n"), done.stderr


@pytest.mark.parametrize("name", ["relabel", "pipelines", "models", "tools", "train.py"])
def test_what_stands_at_the_top_level_is_the_package(name):
    assert (ROOT / name).is_symlink() and (ROOT / name).resolve() == PACKAGE / name


def test_no_room_is_called_utils():
    assert not [
        path for path in SOURCES if path.stem in ("utils", "util", "helpers", "misc", "common")
    ]


def test_no_machine_paths_or_large_files_are_tracked():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        assert path.stat().st_size < 200_000, name
        if path.suffix in (".py", ".md", ".toml", ".yml", ".sh"):
            assert not re.search(r"/(home|work|Users)/[a-z]", path.read_text()), name
