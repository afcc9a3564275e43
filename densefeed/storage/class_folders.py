"""The class folders of a dataset in object storage, each of which is listed when it is needed.

A dataset of a billion images takes a million requests to list and 130 GB of memory to hold. Here
only the names of the classes are listed at first, and memory holds the images of one class.

Images are in the order of `Images`, class folder by class folder. timm sorts whole paths, and all
paths of a folder `cat/` stand together in this order: they are compared with those of another
folder by the characters up to the slash. Only folders that differ in case or in leading zeros alone
(`Cat/`, `cat/`) may be mixed, and are refused.
"""

from itertools import pairwise
from os.path import splitext

import numpy as np

from densefeed.storage.dataset_names import ENDINGS, MOST_CLASSES, natural_key, number_folders
from densefeed.storage.images import Images
from densefeed.storage.object_images import ObjectImages, choose_home, find_images
from densefeed.system.errors import UserError
from densefeed.system.object_store import ObjectStore, ObjectURL, list_folder

REMEDY = "label with --listing whole"


class ClassFolders:
    """The folders directly below a folder in object storage; each is a class.

    Args:
        root: the folder, or one that holds that of `split`.

    Raises UserError if there are none, or more than stores hold, if two of them would be mixed (see
    above), or if images lie beside them.

    Attributes:
        folders: names in the order of their images.
        class_names: the same names in label order.
    """

    def __init__(self, root: ObjectURL, split: str = "train") -> None:
        self.root, self._home = root, choose_home(root, split)
        objects, names = list_folder(self._home)
        self.folders = sorted(names, key=order_folder)
        self._check([meta["path"].rpartition("/")[2] for meta in objects])
        labels, self.class_names = number_folders(self.folders)
        self._labels = labels.tolist()

    def _check(self, beside: list[str]) -> None:
        if not 1 <= len(self.folders) <= MOST_CLASSES:
            raise UserError(
                f"{self._home} holds {len(self.folders):,} folders; it should hold one folder of "
                f"images per class, at most {MOST_CLASSES:,}"
            )
        for one, other in pairwise(self.folders):
            if order_folder(one) == order_folder(other):
                raise UserError(
                    f"{self._home}: the folders {one} and {other} differ only in case or zeros; "
                    f"rename one, or {REMEDY}"
                )
        for name in beside:
            if splitext(name)[1].lower() in ENDINGS:
                raise UserError(
                    f"{self._home}/{name} is in no class folder; move it into one, or {REMEDY}"
                )

    def __len__(self) -> int:
        return len(self.folders)

    def read(self, number: int) -> Images:
        """List the images of folder `number`, with their labels and paths in the dataset.

        UserError if there are none, or if some are in folders below it, which are other classes.
        """
        name = self.folders[number]
        paths, sizes = find_images(self._home, name)
        if not paths:
            raise UserError(f"{self._home}/{name} holds no images; remove it, or {REMEDY}")
        below = next((path for path in paths if path.count("/") > 1), None)
        if below:
            raise UserError(
                f"{self._home}/{below} is in a folder below {name}, which is another class; move "
                f"it, or {REMEDY}"
            )
        labels = np.full(len(paths), self._labels[number], np.int64)
        found = ObjectImages(paths, labels, self.class_names, ObjectStore(self._home), sizes)
        return Images.from_found(self.root, found)


def order_folder(name: str) -> list[str | int]:
    """Return a key that sorts folders as timm sorts the paths of their images."""
    return natural_key(f"{name}/")
