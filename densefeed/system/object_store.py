"""Object storage (S3, Google Cloud Storage, Azure) by URL, through the package obstore.

Credentials, endpoint and region come from the environment, with the names that obstore knows:
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL,
AWS_ALLOW_HTTP, AWS_TIMEOUT, GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_NAME and others; on
machines of a cloud, from its metadata service. A URL holds none of them, and obstore's messages,
which quote requests and replies, are never printed.

obstore repeats a request whose reply is an error of the server (5xx), throttling (429, 503) or a
lost connection at most 8 times, with pauses that grow from 0.1 to 10 s, and not after 60 s. A
request may take 30 s (AWS_TIMEOUT=60s changes that).
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from densefeed.system.errors import UserError, install_extra
from densefeed.system.files import scratch_folder
from densefeed.system.object_url import ObjectURL

Result = TypeVar("Result")

# A lease lasts 60 s: a renewal that takes longer is of no use.
RETRIES = {
    "max_retries": 8,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=10),
        "base": 2,
    },
}
# Attempts at what obstore does not repeat, and seconds between them: a request whose reply was
# truncated, or did not come in time.
ATTEMPTS, PAUSE_SECONDS = 3, 0.3
ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
# Why a request failed, by the provider's code or obstore's words, and the remedy. The first counts.
REASONS = {
    r"NoSuchBucket|ContainerNotFound|bucket does not exist": (
        "there is no such bucket; create it, or correct the URL or the endpoint (AWS_ENDPOINT_URL)"
    ),
    r"ExpiredToken|TokenRefreshRequired|token .{0,40}expired": (
        "the credentials have expired; renew them in the environment and run it again"
    ),
    r"RequestTimeTooSkewed|RequestExpired": (
        "the clock of this machine differs from that of the storage; set it and run it again"
    ),
    r"169\.254\.|metadata\.google|Missing credentials|CredentialNotFound": (
        "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or those of "
        "the provider, in the environment"
    ),
    r"Account must be specified": (
        "the account is not known; set AZURE_STORAGE_ACCOUNT_NAME in the environment"
    ),
    r"Generic Config error": (
        "a setting in the environment cannot be read; correct AWS_TIMEOUT (such as 120s) and others"
    ),
    r"builder error": (
        "the endpoint is not an https URL; correct AWS_ENDPOINT_URL, or set AWS_ALLOW_HTTP=true "
        "for a server in your own network"
    ),
    r"PermanentRedirect|AuthorizationHeaderMalformed|Received redirect without LOCATION": (
        "the bucket is in another region; set AWS_REGION in the environment"
    ),
    r"code: 501|NotImplemented|NotSupported": (
        "the storage lacks a request that is needed; workers need conditional writes "
        "(If-None-Match), as S3, Google Cloud Storage, Azure and MinIO have"
    ),
    r"code: 40[13]|Unauthenticated|PermissionDenied": (
        "access was refused; check the credentials in the environment, and what they may do"
    ),
    r"SlowDown|TooManyRequests|code: (429|503)": (
        "the storage refuses more requests, also after pauses; run it again later, with fewer "
        "workers"
    ),
    r"TimedOut|kind: Timeout|timed out": (
        "the storage did not reply in time; check the network, or set AWS_TIMEOUT=120s, and run it "
        "again"
    ),
    r"kind: Connect|error sending request": (
        "the storage cannot be reached; check the network and the endpoint (AWS_ENDPOINT_URL)"
    ),
    r"code: 5\d\d": "the storage failed, also after pauses; run it again later",
    r"NotFoundError|code: 404": "there is no such object; check the URL",
}
UNKNOWN = "the storage refused the request or its reply was damaged; check the URL and endpoint"


class StorageError(UserError, OSError):
    """A request to object storage failed after all attempts.

    It is an OSError too: code that tolerates a disk that fails for a while tolerates this.
    """


# ------------------------------------------------------------------------------------ requests


_user: list[int] = []


def connect(url: ObjectURL) -> Any:
    """Return obstore's store of the URL's bucket, in which `url.key` is an object.

    A process opens a bucket once. Raises UserError if obstore is missing. In a process that was
    forked from one that has called this, obstore would wait without end: RuntimeError.
    """
    if _user and _user[0] != os.getpid():
        raise RuntimeError(
            "object storage was used before this process was forked; start it with the method "
            "spawn or forkserver, or use threads"
        )
    _user[:] = [os.getpid()]
    return open_bucket(url.bucket)


@cache
def open_bucket(bucket: str) -> Any:
    """Open a bucket, by its URL."""
    try:
        from obstore.store import from_url
    except ImportError:
        raise UserError(f"{bucket} needs the package obstore; {install_extra('cloud')}") from None
    for name in ENDPOINTS:
        # obstore would panic.
        if not re.match(r"https?://[\w\[]", os.environ.get(name, "https://x")):
            raise UserError(f"{name} is not a URL; set it to https://HOST or http://HOST:PORT")
    # Options of the client would replace those of the environment.
    with name_storage_errors(bucket):
        return from_url(bucket, retry_config=RETRIES)


@contextmanager
def name_storage_errors(url: str) -> Iterator[None]:
    """Raise obstore's errors as StorageError: one sentence with the URL and the remedy."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError) as error:
        if isinstance(error, StorageError) or getattr(error, "errno", None):
            raise
        # Without obstore's error, whose text may hold what belongs to the credentials.
        raise StorageError(f"{url}: {explain(error)}") from None


def explain(error: Exception) -> str:
    """Return why a request failed, and the remedy."""
    text = f"{type(error).__name__} {error}"
    # Names of objects, which the error quotes too, are not a reason.
    text = re.sub(r"https?://(?!169\.254\.|metadata\.google)\S+|path:? \S+|location \S+", "", text)
    return next((why for words, why in REASONS.items() if re.search(words, text)), UNKNOWN)


def attempt(call: Callable[[], Result]) -> Result:
    """Call what can be repeated without harm until it succeeds, at most `ATTEMPTS` times."""
    for _ in range(ATTEMPTS - 1):
        try:
            return call()
        except StorageError:
            time.sleep(PAUSE_SECONDS)
    return call()


def request(url: ObjectURL, call: Callable[[Any], Result]) -> Result:
    """`attempt` a call of obstore's store of the URL's bucket; StorageError names the URL."""

    def try_once() -> Result:
        store = connect(url)
        with name_storage_errors(url):
            return call(store)

    return attempt(try_once)


def list_folder(url: ObjectURL) -> tuple[list[Any], list[str]]:
    """List what lies directly in a folder: obstore's metadata of objects, and names of folders."""
    found = request(url, lambda store: store.list_with_delimiter(url.key or None))
    folders = [path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]
    return found["objects"], folders


def find_metadata(url: ObjectURL) -> Any:
    """Return obstore's metadata of an object. Raises StorageError if there is none."""

    def find(store: Any) -> Any:
        from obstore.exceptions import BaseError

        try:
            return store.head(url.key)
        except (BaseError, OSError):
            # The reply to HEAD has no body that gives the reason; that to GET has one.
            return store.get(url.key, options={"range": (0, 1)}).meta

    return request(url, find)


def download(store: Any, key: str, path: Path | str) -> str:
    """Write the content of an object to a file; return its SHA-256."""
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for chunk in store.get(key).stream():
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


# ------------------------------------------------------------------------------------- objects


class ObjectStore:
    """The objects below `root`, with the calls of ObjectFolder (object_folder.py).

    A process may share it among threads.
    """

    # Longest time between looks at what others do: each is a few paid requests for every shard that
    # is not finished.
    poll_seconds = 5.0
    # Rows of unfinished shards are lost with the disk of their worker.
    make_parts = staticmethod(scratch_folder)

    def __init__(self, root: ObjectURL) -> None:
        self.root = root

    def create(self, name: str, content: bytes) -> bool:
        """Write an object and return True, unless there is one of that name already.

        Of several processes that create one name with different contents, one gets True.
        """

        def create(store: Any) -> bool:
            from obstore.exceptions import AlreadyExistsError

            try:
                store.put(url.key, content, mode="create")
                return True
            except AlreadyExistsError:
                found = self.read(name)
            if found is None:
                # Another process creates it at this moment, or has removed it.
                raise StorageError(f"{url}: other processes write it too; run it again")
            # obstore repeats a request whose reply was lost, and then finds its own object.
            return found == content

        url = self.root / name
        return request(url, create)

    def replace(self, name: str, content: bytes) -> None:
        """Write an object, in place of one of that name if there is one."""
        url = self.root / name
        request(url, lambda store: store.put(url.key, content))

    def read(self, name: str) -> bytes | None:
        """Return the content of an object; None if there is none."""
        url = self.root / name
        return find_or_none(url, lambda store: bytes(store.get(url.key).bytes()))

    def size(self, name: str) -> int | None:
        """Return the bytes of an object; None if there is none."""
        url = self.root / name
        return find_or_none(url, lambda store: store.head(url.key)["size"])

    def list(self, folder: str) -> dict[str, float]:
        """Return the objects of a folder: the time of their last change by name, seconds."""
        found = list_folder(self.root / folder)[0]
        return {o["path"].rpartition("/")[2]: o["last_modified"].timestamp() for o in found}

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of the objects of a folder by name."""
        found = list_folder(self.root / folder)[0]
        return {o["path"].rpartition("/")[2]: o["size"] for o in found}

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        url = self.root / name
        find_or_none(url, lambda store: store.delete(url.key))

    def remove_all(self, folder: str, names: re.Pattern[str]) -> None:
        """Remove the objects of a folder whose names match."""
        for name in self.list(folder):
            if names.fullmatch(name):
                self.remove(f"{folder}/{name}")

    def add_file(self, path: Path, name: str, sha256: str) -> None:
        """Upload a file whose SHA-256 is given, by one atomic request, and read it back.

        An object of this name has the same bytes. Raises StorageError if what is read back has
        others, also after `ATTEMPTS` uploads.
        """

        def upload(store: Any) -> None:
            store.put(url.key, path)
            if download(store, url.key, os.devnull) != sha256:
                raise StorageError(f"{url} is not stored as it was written; run it again")

        url = self.root / name
        request(url, upload)

    def fetch_file(self, name: str, path: Path, sha256: str) -> None:
        """Download an object whose SHA-256 is given; StorageError if it has another."""

        def fetch(store: Any) -> None:
            if download(store, url.key, path) != sha256:
                raise StorageError(
                    f"{url} does not match its checksum; remove it and run the labeling again"
                )

        url = self.root / name
        request(url, fetch)


def find_or_none(url: ObjectURL, call: Callable[[Any], Result]) -> Result | None:
    """`request` that returns None if there is no such object in the bucket."""

    def find(store: Any) -> Result | None:
        try:
            return call(store)
        except FileNotFoundError as error:
            # Not only the object but its bucket is missing.
            if re.search(next(iter(REASONS)), str(error)):
                raise
            return None

    return request(url, find)
