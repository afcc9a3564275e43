"""Shards of images for tests, written with tarfile and pyarrow."""

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from densefeed.storage.images import Images

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write_tar(
    path: Path, files: Iterable[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT
) -> Path:
    """Write a tar of these files, (name, content)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def hugging_face(names: list[str] | None, image: str = "image", label: str = "label") -> dict:
    """Return the metadata that Hugging Face writes into the schema."""
    classes = {"names": names, "_type": "ClassLabel"}
    features = {image: {"_type": "Image"}, label: classes}
    return {b"huggingface": json.dumps({"info": {"features": features}}).encode()}


def write_parquet(
    path: Path,
    rows: Iterable[tuple[str | None, bytes | None, int]],
    names: list[str] | None,
    group: int = 3,
    image: str = "image",
    label: str = "label",
    **options: object,
) -> Path:
    """Write a Parquet file of these rows, (path, bytes, label), in row groups of `group`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = list(rows)
    images = pa.array([{"bytes": content, "path": name} for name, content, _ in rows], IMAGE)
    labels = pa.array([number for _, _, number in rows], pa.int64())
    metadata = hugging_face(names, image, label) if names else None
    schema = pa.schema([(image, IMAGE), (label, pa.int64())], metadata)
    pq.write_table(pa.table([images, labels], schema), path, row_group_size=group, **options)
    return path


def write_shards(images: Images, root: Path, split: str, parts: int = 3) -> tuple[Path, Path]:
    """Write images as tar and as Parquet shards with the same paths, in the layouts of the hub.

    Returns the folders `tar` and `parquet` in `root`.
    """
    tars, tables = root / "tar", root / "parquet"
    for number, rows in enumerate(np.array_split(np.arange(len(images)), parts)):
        files, table = [], []
        for row in rows.tolist():
            name, label = images.paths[row], int(images.labels[row])
            files += [(name, images.read(row)), (f"{name.partition('.')[0]}.cls", b"%d" % label)]
            table.append((name, images.read(row), label))
        write_tar(tars / f"photos-{split}-{number:04d}.tar", files)
        name = f"{split}-{number:05d}-of-{parts:05d}.parquet"
        write_parquet(tables / "data" / name, table, images.class_names)
    (tars / "classes.txt").write_text("".join(f"{name}\n" for name in images.class_names))
    return tars, tables
