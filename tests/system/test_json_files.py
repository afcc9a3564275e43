"""JSON files: valid ones equal Python's parser, every fault gets one sentence, nothing hangs."""

import json
import os
import re

import pytest

from densefeed.system.errors import UserError
from densefeed.system.json_files import read_json

DEEP = b"[" * 100_000 + b"]" * 100_000
FAULTS = {
    b"": "Expecting value",
    b'{"a": 1': "Expecting ',' delimiter",
    b"[1]": "it does not hold an object",
    b'{"a": NaN}': "NaN is not a finite number",
    b'{"a": -Infinity}': "-Infinity is not a finite number",
    b'{"a": 1e999}': "1e999 is not a finite number",
    b'{"a": %s}' % (b"7" * 5000): "it has an integer of 5,000 digits",
    b'{"a": %s}' % (b"7" * 21): "it has an integer of 21 digits",
    b'{"a": %s}' % DEEP: "it is nested too deeply",
    b'{"a": ' * 100_000: "it is nested too deeply",
    b'{"a": "\xff"}': "can't decode byte 0xff",
    b'{"a": "\\ud800"}': "surrogates not allowed",
    b'{"a": "\0"}': "Invalid control character",
    '{"a": 1}'.encode("utf-16"): "can't decode byte",
}


@pytest.mark.parametrize("content", FAULTS, ids=range(len(FAULTS)))
def test_every_fault_is_one_sentence_that_names_the_file(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    want = rf"^{path} is damaged \(.*{re.escape(FAULTS[content])}.*\); copy it again$"
    with pytest.raises(UserError, match=want) as error:
        read_json(path, "copy it again")
    assert len(str(error.value)) < 250


def test_what_json_can_hold_is_read_as_by_python(tmp_path):
    value = {"a": [1, -2.5, 2**64, 1e308, None, True], "b": {"ü": '\\u"\0\N{GRINNING FACE}'}}
    path = tmp_path / "x.json"
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        path.write_text(text)
        assert read_json(path, "") == value
    path.write_text("[]")
    assert read_json(path, "", list) == []
    # A byte order mark, and a name that an object has twice.
    path.write_text('\N{ZERO WIDTH NO-BREAK SPACE}{"a": 1, "a": 2}')
    assert read_json(path, "") == {"a": 2}


def test_a_file_beyond_the_limit_is_not_parsed(tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(b"{}" + b" " * 2**20)
    with pytest.raises(UserError, match=r"is damaged \(it has more than 1 MiB\); copy"):
        read_json(path, "copy it again", largest=2**20)
    path.write_bytes(b"{}" + b" " * (2**20 - 2))
    assert read_json(path, "", largest=2**20) == {}


def test_pipes_and_devices_do_not_hang(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("fifo", "zero"):
        with pytest.raises(OSError, match="this is not a regular file") as error:
            read_json(tmp_path / name, "")
        assert error.value.filename == str(tmp_path / name)
