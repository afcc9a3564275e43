"""Find the images of class folders in object storage, for labeling and packing.

A listing gives the names and sizes of all images; each image is one request when it is read, made
again by the rules of object_store.py when it fails. Nothing is kept on disk.
"""

import io
from functools import partial
from typing import NamedTuple

import numpy as np

from densefeed.storage.dataset_names import choose_home, number_folders, sort_images
from densefeed.storage.image_shards import check_folders
from densefeed.system.errors import UserError
from densefeed.system.object_ranges import FetchedFile
from densefeed.system.object_store import (
    ObjectStore,
    StorageError,
    attempt,
    connect,
    list_folder,
    name_storage_errors,
)
from densefeed.system.object_url import ObjectURL


class ObjectImages(NamedTuple):
    """The N images of class folders in object storage, in the order of such folders on a disk."""

    paths: list[str]
    labels: np.ndarray  # int64 [N]
    class_names: list[str]
    store: ObjectStore
    sizes: list[int]  # bytes

    def where(self, index: int) -> str:
        """Name of sample `index` for error messages."""
        return f"{self.store.root}/{self.paths[index]}"

    def open(self, index: int) -> io.BufferedReader:
        """Open the encoded bytes of sample `index`."""
        size = self.sizes[index]
        return FetchedFile(partial(self._fetch, self.paths[index], size), size).buffered()

    def _fetch(self, name: str, size: int) -> bytes:
        """Read an object. StorageError if it is gone, or has another size now."""
        content = self.store.read(name)
        if content is None or len(content) != size:
            raise StorageError(
                f"{self.store.root}/{name} is gone or has another size since it was listed; run it "
                "again"
            )
        return content


def read_objects(root: ObjectURL, split: str) -> ObjectImages:
    """Find the images of class folders below `root`, or of the folder of `split` in it.

    Paths, labels and order are those of `read_folder`. Prints how many objects were left out.
    UserError if there are no images.
    """
    there = set(list_folder(root)[1])
    if "/" in split and any(list_folder(root / split)):
        there.add(split)
    check_folders(root, there, split)
    home = choose_home(root, there, split)
    sizes = list_objects(home)
    paths = sort_images(home, sizes)
    if not paths:
        raise UserError(
            f"{home} holds no images; name a folder, not an object or a pattern, with one folder "
            "of images per class, or with tar or Parquet files"
        )
    found = [sizes[path] for path in paths]
    return ObjectImages(paths, *number_folders(paths, home), ObjectStore(home), found)


def list_objects(root: ObjectURL) -> dict[str, int]:
    """Return the bytes of all objects below a folder by their names in it."""
    import obstore

    def find() -> dict[str, int]:
        with name_storage_errors(root):
            parts = obstore.list(connect(root), root.key or None, chunk_size=1000)
            start = len(root.key) + 1 if root.key else 0
            return {o["path"][start:]: o["size"] for part in parts for o in part}

    # Marks of empty folders are not images.
    return {name: size for name, size in attempt(find).items() if name and not name.endswith("/")}
