"""A dataset of your own: images listed with class names in a CSV file.

python dataset.py --data DATA --dataset csv/labels.csv --out train.beton
"""

import csv
from pathlib import Path

import numpy as np

from densefeed import UserError, register_dataset
from densefeed.storage.listed import Listed
from densefeed.tools import pack_dataset


def read_csv(root: Path, name: str, split: str) -> Listed:
    """Find the samples of a split in a table of the columns path, class, split."""
    try:
        with open(root / name, newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["split"] == split]
        paths, classes = zip(*((row["path"], row["class"]) for row in rows), strict=True)
    except (OSError, KeyError, ValueError) as error:
        message = f"{root / name} lists no images of {split}; give columns path, class, split"
        raise UserError(message) from error
    names = sorted(set(classes))
    labels = np.array([names.index(word) for word in classes])
    return Listed(list(paths), labels, names, root)


register_dataset("csv", read_csv)

if __name__ == "__main__":
    pack_dataset.command()
