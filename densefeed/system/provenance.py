"""Record the environment of a measurement: date, commit, CPU, versions and command line."""

import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from densefeed.system.devices import CORES
from densefeed.system.errors import UserError
from densefeed.system.files import replace_file
from densefeed.system.json_files import read_json

ROOT = Path(__file__).parents[2]
RESULTS = Path("benchmarks/results.csv")


def own_version() -> str:
    """Return the version of this package; `unknown` for code that is used without installing it."""
    try:
        return importlib.metadata.version("densefeed")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def environment(packages: tuple[str, ...]) -> dict[str, str | int]:
    """Return the date, commit, CPU, cores, versions and command; no host name, path or address."""
    versions = [f"python {platform.python_version()}"]
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "commit": commit(),
        "cpu": cpu_model(),
        # Those that this process may use, not all of the machine.
        "cores": CORES,
        "versions": "; ".join(versions),
        "command": command(sys.argv, os.environ),
    }


def commit() -> str:
    """Return the commit of the checkout, with `-dirty` if any file but the results differs from it.

    Without a checkout it is what the environment variable DENSEFEED_COMMIT says, or `unknown`.
    """

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    fallback = os.environ.get("DENSEFEED_COMMIT", "unknown")
    try:
        # An installed package may lie in a repository of the user, whose commit git would give.
        if Path(git("rev-parse", "--show-toplevel")) != ROOT.resolve():
            return fallback
        # Every measurement adds a row to the results, so they alone do not make a checkout dirty.
        dirty = git("status", "--porcelain", "--", ".", f":!{RESULTS}")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return fallback


def cpu_model() -> str:
    """Return the kernel's name of the CPU and its numbers, else the architecture.

    E.g. `AMD EPYC (family 26, model 2)`: virtual machines often leave out which EPYC it is.
    """
    known = {}
    # arm64's file has no such lines, macOS has no such file.
    with suppress(FileNotFoundError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            known.setdefault(name.strip(), value.strip())
    if not (name := known.get("model name")):
        return platform.machine()
    if {"cpu family", "model"} <= known.keys():
        return f"{name} (family {known['cpu family']}, model {known['model']})"
    return name


def command(argv: list[str], variables: Mapping[str, str]) -> str:
    """Join the command line, with every path shortened to its last part.

    Results are published, folder names are private. Settings of glibc's memory precede it: they can
    double a ratio.
    """
    words = [f"{name}={value}" for name, value in variables.items() if name.startswith("MALLOC_")]
    words.append(Path(argv[0]).name)
    for word in argv[1:]:
        option, equals, value = word.partition("=")
        if equals and "/" in value:
            word = f"{option}={Path(value).name}"
        elif "/" in word:
            word = Path(word).name
        words.append(word)
    return " ".join(words)


def check_replaceable(path: Path, key: str, option: str) -> None:
    """Raise UserError if writing a JSON file would lose one that this command did not write.

    Only documents of this command have `key`. The config of a run, and the run with it, could be
    lost, or an input of the command.
    """
    remedy = f"choose another {option}"
    if os.path.lexists(path) and key not in read_json(path, remedy):
        raise UserError(f"{path} is not an earlier output, and would be replaced; {remedy}")


def write_json(path: Path, document: dict | list) -> None:
    """Write `document` as JSON, atomically, with `replace_invalid`."""
    with replace_file(path) as part:
        text = json.dumps(replace_invalid(document), indent=1, allow_nan=False)
        part.write_text(text + "\n")


def replace_invalid(value: object) -> object:
    """Return a document without what JSON cannot hold.

    Numbers that are not finite become None, and bytes of names that are not UTF-8 escapes.
    """
    if isinstance(value, dict):
        return {name: replace_invalid(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_invalid(item) for item in value]
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    return None if isinstance(value, float) and not math.isfinite(value) else value
