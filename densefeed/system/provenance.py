"""What a measurement depends on: date, commit, processor, versions and command line."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from densefeed.system.files import replace_file

ROOT = Path(__file__).parents[2]
RESULTS = Path("benchmarks/results.csv")


def environment(packages: tuple[str, ...]) -> dict[str, str | int]:
    """Date, commit, CPU, cores and versions; never a host's name, a path or an address."""
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
        "cores": len(os.sched_getaffinity(0)),
        "versions": "; ".join(versions),
        "command": command(sys.argv),
    }


def commit() -> str:
    """The checkout's commit, `-dirty` if any file but the results differs from it; `unknown`
    outside a checkout.
    """

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--", ".", f":!{RESULTS}")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_model() -> str:
    """As the kernel names it, e.g. `AMD EPYC 9654 96-Core Processor`; on arm64 the architecture."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def command(argv: list[str]) -> str:
    """The command line with every path cut to its last part, since a row is published and folders
    are private.
    """
    words = [Path(argv[0]).name]
    for word in argv[1:]:
        option, equals, value = word.partition("=")
        words.append(
            f"{option}={Path(value).name}"
            if equals and "/" in value
            else Path(word).name
            if "/" in word
            else word
        )
    return " ".join(words)


def write_json(path: Path, document: dict) -> None:
    """Write `document`, whole or not at all."""
    with replace_file(path) as part:
        part.write_text(json.dumps(document, indent=1) + "\n")
