"""Read ranges of objects in object storage, of one version of each object."""

from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from densefeed.system.errors import UserError
from densefeed.system.object_store import (
    ObjectURL,
    StorageError,
    attempt,
    connect,
    name_storage_errors,
)


class RemoteFile(NamedTuple):
    """One version of an object."""

    url: ObjectURL
    size: int  # bytes
    version: str  # its ETag, or the time of its last change if the provider has no ETags


def find_remote_files(url: ObjectURL) -> list[RemoteFile]:
    """Return the object of this URL, or all that match a pattern such as `s3://b/train-*.beton`.

    A pattern is in the last part of the URL; matches are in the order of their names. Raises
    UserError if there is none.
    """
    import obstore

    folder, _, name = url.key.rpartition("/")
    is_pattern = any(sign in name for sign in "*[")

    def find() -> list[Any]:
        with name_storage_errors(url):
            if not is_pattern:
                return [obstore.head(connect(url), url.key)]
            found = obstore.list_with_delimiter(connect(url), folder or None)["objects"]
        return [o for o in found if fnmatchcase(o["path"].rpartition("/")[2], name)]

    if not name:
        raise UserError(f"{url} names no object; write s3://BUCKET/NAME.beton")
    metas = sorted(attempt(find), key=lambda meta: meta["path"])
    if not metas:
        raise UserError(f"{url} matches no object; check the URL")
    return [
        RemoteFile(ObjectURL(f"{url.bucket}/{meta['path']}"), meta["size"], version(meta))
        for meta in metas
    ]


def version(meta: Any) -> str:
    """Return the version of an object, from obstore's metadata."""
    return meta["e_tag"] or meta["last_modified"].isoformat()


def read_range(file: RemoteFile, start: int, stop: int) -> memoryview:
    """Read the bytes `start` to `stop` - 1 of an object.

    Raises StorageError if that fails after all attempts, UserError if the object was replaced.
    """
    import obstore

    url = file.url
    replaced = UserError(
        f"{url} was replaced while it was read; run the command again, which starts a new copy"
    )

    def read() -> memoryview:
        with name_storage_errors(url):
            reply = obstore.get(connect(url), url.key, options={"range": (start, stop)})
            meta, content = reply.meta, memoryview(reply.bytes())
        # The reply's own ETag: some servers ignore the condition If-Match.
        if version(meta) != file.version or meta["size"] != file.size:
            raise replaced
        if len(content) != stop - start:
            raise StorageError(f"{url}: a reply was cut; run the command again")
        return content

    return attempt(read)
