"""Object storage: URLs, errors as one sentence without secrets, and what a fork would hang on."""

import hashlib
import multiprocessing
import os
import pickle
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st

from densefeed.system import object_store
from densefeed.system.errors import UserError
from densefeed.system.object_store import (
    ObjectStore,
    StorageError,
    connect,
    explain,
    name_storage_errors,
)
from densefeed.system.object_url import ObjectURL, find_url, parse_location
from densefeed.system.options import Location, Options, from_dict

from ..object_storage import SECRET, cycle_faults, point_to

obstore = pytest.importorskip("obstore")

# ------------------------------------------------------------------------------------------- URLs


def test_a_url_has_a_bucket_and_a_key():
    url = ObjectURL("s3://bucket/maps/")
    assert url == "s3://bucket/maps"
    assert (url.bucket, url.key) == ("s3://bucket", "maps")
    assert (url / "shards/x.h5").key == "maps/shards/x.h5"
    assert ObjectURL("gs://b").key == ""
    assert pickle.loads(pickle.dumps(url)) == url
    assert isinstance(pickle.loads(pickle.dumps(url)), ObjectURL)


@pytest.mark.parametrize(
    "text", ["s3://", "s3:///x", "s3://b//x", "s3://b/../x", "s3://b/./x", "http://b/x", "b://x"]
)
def test_what_is_no_url_of_object_storage_is_refused(text):
    with pytest.raises(UserError, match="is not a URL of object storage; write s3://BUCKET/FOLDER"):
        parse_location(text)


@pytest.mark.parametrize("text", ["s3://k:PASS@b/x", "az://b/x?sig=PASS", "s3://b/x#PASS"])
def test_a_url_with_credentials_is_refused_and_not_printed(text):
    with pytest.raises(UserError, match="give credentials in the environment") as error:
        parse_location(text)
    assert "PASS" not in str(error.value)


CONTROLS = "".join(map(chr, [*range(32), 127]))
name = st.text(
    st.characters(codec="utf-8", exclude_characters=f"/?#@{CONTROLS}"), min_size=1
).filter(lambda text: text not in (".", ".."))


@settings(max_examples=30)
@given(st.lists(name, min_size=1).filter(lambda names: names[-1].strip("/")))
def test_a_url_that_was_read_as_a_path_is_found(names):
    """Also what a Path did to it."""
    url = ObjectURL(f"s3://bucket/{'/'.join(names)}")
    assert find_url(Path(url)) == url
    assert find_url(Path("/data") / url.key) is None


@dataclass(frozen=True, kw_only=True)
class Place(Options):
    """Options with a place."""

    out: Location  # a place
    more: Location | None = None  # another


def test_an_option_keeps_a_url_and_a_path():
    given = tyro.cli(Place, args=["--out", "s3://bucket/maps", "--more", "maps"])
    assert given == Place(out=ObjectURL("s3://bucket/maps"), more=Path("maps"))
    assert isinstance(given.out, ObjectURL)
    assert isinstance(given.more, Path)
    back = from_dict(given, {"out": "s3://bucket/maps", "more": "maps"})
    assert back == given
    assert isinstance(back.out, ObjectURL)
    with pytest.raises(UserError, match="--out is 3, and must be"):
        Place(out=3)


# ----------------------------------------------------------------------------------------- errors


@pytest.fixture
def few_retries(monkeypatch):
    monkeypatch.setattr(object_store, "RETRIES", object_store.RETRIES | {"max_retries": 1})


def test_a_missing_bucket_is_named(bucket, few_retries):
    missing = ObjectURL("s3://no-such-bucket/maps")
    words = "s3://no-such-bucket/maps: there is no such bucket"
    with pytest.raises(StorageError, match=words), name_storage_errors(missing):
        obstore.put(connect(missing), missing.key, b"x")


def test_an_error_of_storage_is_one_of_the_operating_system_too(bucket, few_retries):
    point_to(9)
    words = "cannot be reached; check the network and the endpoint"
    with pytest.raises(OSError, match=words) as error, name_storage_errors(bucket / "x"):
        obstore.get(connect(bucket), "x")
    assert isinstance(error.value, UserError)
    assert SECRET not in str(error.value)
    # Nor does a traceback show obstore's error.
    assert error.value.__suppress_context__


def reply(status: int, code: str) -> str:
    return (
        "Error performing PUT http://h:1/SlowDown/NoSuchBucket.503 in 1ms - Server returned "
        f"non-2xx status code: {status} X: <Error><Code>{code}</Code><Id>{SECRET}</Id></Error>"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (reply(404, "NoSuchBucket"), "no such bucket"),
        (reply(400, "ExpiredToken"), "expired"),
        (reply(403, "RequestTimeTooSkewed"), "clock"),
        (reply(403, "AccessDenied"), "access was refused"),
        (reply(401, ""), "access was refused"),
        (reply(503, "SlowDown"), "refuses more requests"),
        (reply(429, ""), "refuses more requests"),
        (reply(500, "InternalError"), "the storage failed"),
        (reply(501, "NotImplemented"), "conditional writes"),
        (reply(404, "NoSuchKey"), "there is no such object"),
        (reply(400, "AuthorizationHeaderMalformed"), "AWS_REGION"),
        ("PUT http://169.254.169.254/latest/api/token in 1s: HTTP error", "no credentials"),
        ("HTTP error: builder error", "AWS_ALLOW_HTTP"),
        ("Http(HttpError { kind: Timeout, source: TimedOut })", "AWS_TIMEOUT"),
        ("quite another", "check the URL and endpoint"),
    ],
)
def test_errors_are_one_sentence_without_what_the_server_sent(text, words):
    sentence = explain(ValueError(text))
    assert words in sentence
    assert SECRET not in sentence
    assert "\n" not in sentence


def test_obstore_is_named_if_it_is_missing(bucket, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(UserError, match=r'the package obstore; run `pip install "\.\[cloud'):
        connect(bucket)


@pytest.mark.parametrize("value", ["", "minio:9000", "https://"])
def test_an_endpoint_that_is_no_url_is_refused(bucket, monkeypatch, value):
    monkeypatch.setenv("AWS_ENDPOINT_URL", value)
    with pytest.raises(UserError, match=r"AWS_ENDPOINT_URL is not a URL; set it to https://HOST"):
        connect(bucket)


def test_a_setting_that_cannot_be_read_is_named(bucket, monkeypatch):
    monkeypatch.setenv("AWS_TIMEOUT", "abc")
    with pytest.raises(UserError, match=r"setting in the environment cannot be read; .*AWS"):
        connect(bucket)


def test_a_forked_process_is_refused(bucket):
    """obstore would hang there."""
    connect(bucket)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=exit_if_refused, args=(bucket,))
    child.start()
    child.join(60)
    assert child.exitcode == 7


def exit_if_refused(url: ObjectURL) -> None:
    try:
        connect(url)
    except RuntimeError as error:
        os._exit(7 if "spawn" in str(error) else 1)


# ---------------------------------------------------------------------------------------- objects


@pytest.mark.parametrize("fault", ["lost", "InternalError"])
def test_a_process_that_lost_the_reply_has_created_its_object(bucket, disturb, fault):
    """obstore repeats the request, and finds the object of the first one."""
    proxy = disturb(lambda method, path, number: fault if number == 1 else "")
    objects = ObjectStore(bucket)
    assert objects.create("a", b"ours")
    assert proxy.faults[fault] == 1
    assert not objects.create("a", b"theirs")
    assert objects.read("a") == b"ours"


def test_a_large_file_is_uploaded_in_parts_and_appears_as_a_whole(bucket, disturb, tmp_path):
    """Parts fail, get lost and are cut; what was stored is read back and compared."""
    content = random.Random(0).randbytes(12_000_001)
    path, digest = tmp_path / "rows", hashlib.sha256(content).hexdigest()
    path.write_bytes(content)
    cycle, parts = cycle_faults(3, "InternalError", "SlowDown", "lost", "cut"), []

    def choose(method: str, target: str, number: int) -> str:
        if "partNumber" in target:
            parts.append(target)
            return "half" if len(parts) == 2 else cycle(method, target, number)
        return cycle(method, target, number)

    proxy, objects = disturb(choose), ObjectStore(bucket)
    objects.add_file(path, "shards/a", digest)
    proxy.choose = lambda *_: ""
    assert objects.read("shards/a") == content
    copy = tmp_path / "copy"
    objects.fetch_file("shards/a", copy, digest)
    assert copy.read_bytes() == content
    assert proxy.faults["half"] == 1
    assert len(parts) > 3


def test_a_file_that_is_stored_with_other_bytes_is_an_error(bucket, disturb, tmp_path):
    disturb(lambda method, path, number: "half" if method == "PUT" else "")
    (tmp_path / "rows").write_bytes(b"1234")
    digest = hashlib.sha256(b"1234").hexdigest()
    with pytest.raises(StorageError, match="shards/a is not stored as it was written; run it"):
        ObjectStore(bucket).add_file(tmp_path / "rows", "shards/a", digest)


@pytest.mark.parametrize("name", ["\x1b[2J", "a\nb", "\x7f", "\udc80"])
def test_outside_urls_with_control_characters_are_refused_in_one_sentence(name):
    """The client raises an error of its own for them, and the terminal would obey them."""
    with pytest.raises(UserError, match="has control characters or is not UTF-8; cor") as raised:
        parse_location(f"s3://bucket/{name}/maps")
    assert str(raised.value).isprintable()
