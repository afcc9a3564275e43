"""Places in object storage by URL, without the client that opens them (object_store.py)."""

import re
from pathlib import Path, PurePosixPath

from densefeed.system.errors import UserError
from densefeed.system.terminal import escape_controls

BUCKET = re.compile(r"(s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]*")
# What is left of a URL that was read as a path, which collapses its slashes.
URL = re.compile(r"(https?|ftp|file|hdfs|s3[an]?|gs|gcs|az|abfss?|hf):/(?=[^/])", re.IGNORECASE)
# Control characters, which the client refuses, and halves of surrogate pairs, which are not UTF-8.
UNUSABLE = re.compile("[\0-\x1f\x7f\ud800-\udfff]")


class ObjectURL(str):
    """A place in object storage: `s3://bucket/folder/name`, or `s3://bucket`.

    It is not a Path, which would write `s3:/bucket`. Raises UserError for another form.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> "ObjectURL":
        """Check a URL; slashes at its end are dropped."""
        text = text.rstrip("/")
        # These may be credentials or a signature, which are not printed.
        if re.search(r"[?#]|://[^/]*@", text):
            raise UserError(
                "a URL of object storage has no credentials and no ? or # in it; give credentials "
                "in the environment"
            )
        if UNUSABLE.search(text):
            raise UserError(
                f"{escape_controls(text)} has control characters or is not UTF-8; correct the URL, "
                "or rename the object"
            )
        bucket = BUCKET.match(text)
        names = text[bucket.end() :].split("/") if bucket else ["x"]
        if names[0] or {"", ".", ".."} & set(names[1:]):
            raise UserError(f"{text} is not a URL of object storage; write s3://BUCKET/FOLDER")
        return super().__new__(cls, text)

    def __truediv__(self, name: str) -> "ObjectURL":
        return ObjectURL(f"{self}/{name}")

    @property
    def bucket(self) -> str:
        """The URL of the bucket."""
        return BUCKET.match(self)[0]

    @property
    def key(self) -> str:
        """The name in the bucket; empty for the bucket itself."""
        return self[len(self.bucket) + 1 :]

    @property
    def name(self) -> str:
        """The last part, as of a Path."""
        return self.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The last part without its ending, as of a Path."""
        return PurePosixPath(self.name).stem

    @property
    def parent(self) -> "ObjectURL":
        """The folder that it lies in."""
        return ObjectURL(self.rpartition("/")[0])


def parse_location(text: str) -> Path | ObjectURL:
    """Return the place that a word of the command line names: a URL, or a local path."""
    return ObjectURL(text) if "://" in text else Path(text)


def find_url(path: Path) -> ObjectURL | None:
    """Return the URL that was read as a path, as by an option that takes only paths.

    UserError for one that `parse_location` refuses.
    """
    text = str(path)
    return ObjectURL(URL.sub(r"\1://", text, count=1)) if URL.match(text) else None


def check_local(path: Path) -> None:
    """Raise UserError for a URL that was read as a path, where only local files are read."""
    if url := find_url(path):
        raise UserError(
            f"{url} is in object storage, which is not read here; copy it to a local disk and name "
            "the copy"
        )
