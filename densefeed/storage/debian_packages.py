"""Pictures of packages of Debian: fetched with apt-get as any user, and compared with a digest."""

import fcntl
import hashlib
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from densefeed.system.errors import UserError, explain_os_error
from densefeed.system.files import create_folder, lock, make_folder, open_own, open_regular
from densefeed.system.terminal import print


class Package(NamedTuple):
    """A package of Debian."""

    name: str
    home: str  # the folder of its pictures
    # SHA-256 of the pictures that are used (`hash_files`). Versions of the package differ between
    # releases of Debian, and so do the bytes of its archive.
    digest: str
    instead: str  # the remedy where it cannot be had


def fetch_package(package: Package, files: Iterable[str], cache: Path) -> Path:
    """Return the folder of a package's pictures below `cache`, where it is unpacked if it is not.

    UserError if it cannot be fetched, or the `files` are not those of its digest.
    """
    home = cache / package.name
    make_folder(cache)
    # One of several processes fetches, and the others wait.
    with open(open_own(cache / "lock", os.O_RDWR | os.O_CREAT)) as file:
        lock(file.fileno(), cache, fcntl.LOCK_EX)
        if not home.is_dir():
            print(f"{package.name} is fetched with apt-get to {home}", flush=True)
            with create_folder(home) as part:
                unpack_package(package, part)
    try:
        found = hash_files(home / package.home, files)
    except OSError as error:
        found = explain_os_error(error)
    if found != package.digest:
        raise UserError(
            f"{home} does not hold the pictures of {package.name} that are expected; remove it to "
            f"fetch it again, or, where Debian has other pictures by now, {package.instead}"
        )
    return home / package.home


def unpack_package(package: Package, folder: Path) -> None:
    """Download a package of Debian and unpack it into a folder. Needs no root."""
    run_tool(package, folder, "apt-get", "download", package.name)
    archive = next(folder.glob("*.deb"), None)
    if archive is None:
        raise UserError(
            f"{package.name} cannot be fetched (apt-get gave no file); {package.instead}"
        )
    run_tool(package, folder, "dpkg", "-x", archive.name, ".")
    archive.unlink()


def run_tool(package: Package, folder: Path, *words: str) -> None:
    """Run a program of Debian in a folder. UserError if it is missing or fails."""
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        problem = (done.stderr.strip().splitlines() or ["no message"])[-1]
    except FileNotFoundError:
        raise UserError(
            f"{package.name} cannot be fetched, because there is no {words[0]}, a program of "
            f"Debian; {package.instead}"
        ) from None
    if done.returncode:
        raise UserError(
            f"{package.name} cannot be fetched ({words[0]} failed: {problem}); run apt-get update "
            f"as root, or {package.instead}"
        )


def hash_files(folder: Path, files: Iterable[str]) -> str:
    """Return the SHA-256 over names and contents of files in a folder, sorted by name."""
    digest = hashlib.sha256()
    for name in sorted(files):
        with open_regular(folder / name) as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{content}  {name}\n".encode())
    return digest.hexdigest()
