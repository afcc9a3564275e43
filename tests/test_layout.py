"""The house rules, each a few lines: imports point upstream, no dead config field, one name in site-packages, README is true."""

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "relabel": {"relabel"},
    "pipelines": {"relabel", "pipelines"},
    "models": {"models"},
    "training": {"relabel", "pipelines", "models", "training"},
    "train": {"relabel", "pipelines", "models", "training"},
    "tools": {"relabel", "pipelines", "models", "training", "train", "tools"},
}
SOURCES = [
    *(path for room in ("relabel", "pipelines", "models", "training", "tools") for path in (ROOT / room).rglob("*.py")),
    ROOT / "train.py",
]


def rooms_imported(text: str, folder: Path | str) -> set[str]:
    """The rooms of ours that a file in `folder` (a room, or a folder in one) imports from, absolute or relative, whole or by name."""
    package = Path("densefeed", folder).parts
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = [*above, *([node.module] if node.module else [])]
            names += [".".join([*base, alias.name]) for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("densefeed.")}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_upstream(path):
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    extra = rooms_imported(path.read_text(), path.relative_to(ROOT).parent) - MAY_IMPORT[room]
    assert not extra, f"{path} reaches into {extra}"


@pytest.mark.parametrize(
    "line",
    [
        "from ..pipelines import plan", "from ..pipelines.plan import EpochPlan", "from .. import pipelines",
        "from densefeed import pipelines",
        "from densefeed.pipelines import plan", "import densefeed.pipelines.plan", "import densefeed.pipelines as p",
    ],
)  # fmt: skip
def test_the_rule_sees_every_way_to_import(line):
    assert rooms_imported(line, "models") == {"pipelines"}
    assert rooms_imported("from ...relabel import files\nfrom ..plan import x", "pipelines/native") == {"relabel", "pipelines"}
    assert rooms_imported("from . import lvvit\nfrom .lvvit import LVViT\nimport torch", "models") == {"models"}


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
            if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list):
                declared = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
                assert declared <= read | {"version"}, f"{path}: nobody reads {declared - read}"


COMMANDS = [path for path in SOURCES if "tyro.cli(" in path.read_text() and path.parent.name == "tools"]


@pytest.mark.parametrize("path", [ROOT / "training" / "config.py", *COMMANDS], ids=lambda p: p.stem)
def test_every_option_says_what_it_does(path):
    """tyro takes the comment that ends a field's line, or those above it; within parentheses it sees none."""
    text = path.read_text()
    name = match[1] if (match := re.search(r"tyro\.cli\((\w+)", text)) else "Config"
    (options,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name]
    fields, lines = [node for node in options.body if isinstance(node, ast.AnnAssign)], text.splitlines()
    assert fields
    for field in fields:
        beside = field.lineno == field.end_lineno and "#" in lines[field.lineno - 1][field.end_col_offset :]
        assert beside or lines[field.lineno - 2].lstrip().startswith("#"), field.target.id


def test_only_one_name_reaches_site_packages(tmp_path):
    """Build the wheel as `pip install .` does; it must hold `densefeed` alone, and what is not Python too."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", tmp_path, ROOT],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"densefeed"}
    native = "densefeed/pipelines/native/libdensefeed.so"
    documents = {"densefeed/relabel/FORMAT.md", "densefeed/training/ABLATIONS.md", "densefeed/tools/show.html"}
    documents |= {"densefeed/tools/audit.html", "densefeed/tools/style.html"}
    assert {"densefeed/train.py", native} | documents <= set(names)
    assert not any("tests" in name or name.endswith(("setup.py", "/densefeed.py")) for name in names)


def test_a_checkout_works_without_installing(tmp_path):
    """Nothing but the interpreter may put the checkout on the path, here and in the next test."""
    code = "import densefeed.train, densefeed.tools.show; print(densefeed.train.__file__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {[str(ROOT), *sys.path]!r}; {code}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(ROOT / "train.py")


def test_tools_run_from_a_checkout_that_is_not_installed(tmp_path):
    """The tool's own folder stands first on the path, and the alias beside it wins over whatever is installed."""
    checkout = tmp_path / "densefeed-checkout"
    for name in ("relabel", "pipelines", "models", "training", "tools"):
        shutil.copytree(ROOT / name, checkout / name)
    for name in ("train.py", "densefeed.py"):
        shutil.copy(ROOT / name, checkout / name)
    (checkout / "relabel" / "files.py").write_text(
        (checkout / "relabel" / "files.py").read_text() + "\nprint('this checkout')\n"
    )
    done = subprocess.run(
        [sys.executable, checkout / "tools" / "show.py", "--help"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "this checkout" in done.stdout


def test_no_room_is_called_utils():
    assert not [path for path in SOURCES if path.stem in ("utils", "util", "helpers", "misc", "common")]


def test_no_machine_paths_or_large_files_are_tracked():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        assert path.stat().st_size < 200_000, name
        if path.suffix in (".py", ".md", ".toml", ".yml", ".sh"):
            assert not re.search(r"/(home|work|Users)/[a-z]", path.read_text()), name
