"""Packages of Debian, fetched by programs that stand in for apt-get and dpkg."""

import hashlib
import os

import pytest

from densefeed.storage.debian_packages import Package, fetch_package
from densefeed.system.errors import UserError

INSTEAD = "give folders of your own"


def write_tools(folder, **scripts):
    """Write programs that stand in for those of Debian; each logs its words to `log`."""
    folder.mkdir(exist_ok=True)
    for name, script in scripts.items():
        path = folder / name.replace("_", "-")
        path.write_text(f'#!/bin/sh\necho "$0" "$@" >> {folder}/log\n{script}\n')
        path.chmod(0o755)


def test_a_package_is_fetched_once_and_compared(tmp_path, monkeypatch):
    content = b"a picture"
    line = f"{hashlib.sha256(content).hexdigest()}  a/b.png\n"
    package = Package("stamps", "usr/pictures", hashlib.sha256(line.encode()).hexdigest(), INSTEAD)
    unpack = "mkdir -p usr/pictures/a; printf 'a picture' > usr/pictures/a/b.png"
    write_tools(tmp_path / "bin", apt_get=": > stamps_1.0_all.deb", dpkg=unpack)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for _ in range(2):
        home = fetch_package(package, ["a/b.png"], tmp_path / "cache")
        assert (home / "a/b.png").read_bytes() == content
    calls = [line.split("/")[-1] for line in (tmp_path / "bin/log").read_text().splitlines()]
    assert calls == ["apt-get download stamps", "dpkg -x stamps_1.0_all.deb ."]
    assert sorted(os.listdir(tmp_path / "cache")) == ["lock", "stamps"]
    assert os.listdir(tmp_path / "cache/stamps") == ["usr"]
    for damage in (lambda path: path.write_bytes(b"another"), lambda path: path.unlink()):
        damage(home / "a/b.png")
        with pytest.raises(UserError, match=r"cache/stamps does not hold .*remove it.*give fold"):
            fetch_package(package, ["a/b.png"], tmp_path / "cache")


def test_a_download_that_fails_leaves_nothing(tmp_path, monkeypatch):
    failing = "echo 'E: Unable to locate package stamps' >&2; exit 100"
    write_tools(tmp_path / "bin", apt_get=failing)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(UserError, match=r"\(apt-get failed: E: Unable.*apt-get update.*give"):
        fetch_package(Package("stamps", "usr", "", INSTEAD), [], tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == ["lock"]


def test_a_download_without_a_file_is_refused(tmp_path, monkeypatch):
    write_tools(tmp_path / "bin", apt_get="exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(UserError, match=r"stamps cannot be fetched \(apt-get gave no file\); give"):
        fetch_package(Package("stamps", "usr", "", INSTEAD), [], tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == ["lock"]
