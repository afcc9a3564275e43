"""Find the images of class folders in object storage, for labeling and packing.

A listing gives the names and sizes of all images; each image is one request when it is read, made
again by the rules of object_store.py when it fails. Nothing is kept on disk.
"""

import io
from collections import Counter
from functools import partial
from os.path import splitext
from typing import NamedTuple

import numpy as np

from densefeed.storage.dataset_names import (
    ENDINGS,
    SPLITS,
    describe_others,
    find_synonyms,
    natural_key,
    number_folders,
)
from densefeed.system.errors import UserError
from densefeed.system.files import find_path_fault
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
from densefeed.system.terminal import print


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
            fault = "is gone" if content is None else "has another size"
            raise StorageError(
                f"{self.store.root}/{name} {fault} since it was listed; run it again"
            )
        return content


def read_objects(root: ObjectURL, split: str) -> ObjectImages:
    """Find the images of class folders below `root`, or of the folder of `split` in it.

    Paths, labels and order are those of `read_folder`. Prints how many objects were left out.
    UserError if there are no images.
    """
    home = choose_home(root, split)
    paths, sizes = find_images(home)
    if not paths:
        raise UserError(
            f"{home} holds no images; name a folder, not an object or a pattern, with one folder "
            "of images per class, or with tar or Parquet files"
        )
    folders = [path.rpartition("/")[0].rpartition("/")[2] for path in paths]
    labels, names = number_folders(folders)
    return ObjectImages(paths, labels, names, ObjectStore(home), sizes)


def find_images(home: ObjectURL, folder: str = "") -> tuple[list[str], list[int]]:
    """List the images below `home`, or below one folder in it: paths in `home`, and bytes.

    They are in the order of timm. Prints how many objects were left out. UserError for a name that
    no path can have.
    """
    place, found, others = home / folder if folder else home, [], Counter()
    for name, size in list_objects(place).items():
        path, ending = f"{folder}/{name}" if folder else name, splitext(name)[1].lower()
        if ending not in ENDINGS:
            others[ending] += 1
        elif fault := find_path_fault(path):
            raise UserError(f"{home}/{path}: this name {fault}; rename it")
        else:
            found.append((path, size))
    if others:
        print(f"{place}: {describe_others(others)}")
    found.sort(key=lambda pair: natural_key(pair[0]))
    return [path for path, _ in found], [size for _, size in found]


def choose_home(root: ObjectURL, split: str) -> ObjectURL:
    """Return the folder of `split`, or `root`. UserError if it holds other splits but not this."""
    there = set(list_folder(root)[1])
    name = next((name for name in find_synonyms(split) if name in there), None)
    if name is None and there & set().union(*SPLITS):
        raise UserError(
            f"{root} holds {', '.join(sorted(there))} but no folder {split!r}; name one of them, "
            "or the folder of classes"
        )
    return root / name if name else root


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
