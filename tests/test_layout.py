"""The house rules, each a few lines: imports point upstream, no dead config field, one name in site-packages, README is true."""

import ast
import re
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
    "train": {"relabel", "pipelines", "models"},
    "tools": {"relabel", "pipelines", "models", "train", "tools"},
}
SOURCES = [
    *(path for room in ("relabel", "pipelines", "models", "tools") for path in (ROOT / room).rglob("*.py")),
    ROOT / "train.py",
]


def rooms_imported(path: Path) -> set[str]:
    """The rooms of ours that a file imports from, absolute or relative."""
    found = set()
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = (
                [node.module or ""]
                if node.level == 0
                else [f"densefeed.{room}"]
                if node.level == 1
                else [f"densefeed.{node.module}"]
            )
        found |= {name.split(".")[1] for name in names if name.startswith("densefeed.")}
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_upstream(path):
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    extra = rooms_imported(path) - MAY_IMPORT[room]
    assert not extra, f"{path} reaches into {extra}"


def test_the_rule_would_catch_a_relative_import(tmp_path):
    """The rule's own test: a model that imports a loader."""
    wrong = ROOT / "models" / "_wrong_for_this_test.py"
    wrong.write_text("from ..pipelines import plan\nfrom densefeed.relabel import store\n")
    try:
        assert rooms_imported(wrong) == {"pipelines", "relabel"}
    finally:
        wrong.unlink()


def test_every_config_field_is_read():
    """Attribute reads `.name` anywhere outside the declaring class."""
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if not (isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list)):
                continue
            declared = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
            read = {
                n.attr
                for p in SOURCES
                for n in ast.walk(ast.parse(p.read_text()))
                if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)
            }
            assert declared <= read | {"version"}, f"{path}: nobody reads {declared - read}"


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
    assert {"densefeed/train.py", "densefeed/relabel/FORMAT.md", "densefeed/tools/show.html"} <= set(names)
    assert not any("tests" in name or name.endswith(("setup.py", "densefeed/densefeed.py")) for name in names)


def test_a_checkout_works_without_installing(tmp_path):
    code = "import densefeed.train, densefeed.tools.show; print(densefeed.train.__file__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {[str(ROOT), *sys.path]!r}; {code}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(ROOT / "train.py")


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
