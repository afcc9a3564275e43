"""Find the samples of a dataset of shards: tar files in WebDataset's layout, or Parquet files.

Shards are the files of one split: all in a folder `train/` (or `data/train/`), or those in the root
or its folder `data/` whose names contain the split, as `photos-train-0003.tar` and
`train-00000-of-00294.parquet`; if no name contains a split, all of them.

The images keep the order of the shards, sorted by name, and of what they hold; those of class
folders in a tar have the order of the folder. The path of an image is its name in the tar, or in
Parquet its `path`, if these are unique over all shards; then score maps of a folder with the same
paths, labels and order fit too. Otherwise it begins with the shard's name:
`photos-train-0003/000017.jpg`.

tar: the files of a sample have the same name up to the first dot (the key). One is an image; the
label is the integer in its `.cls`, or `label` in its `.json`; where no sample of the split has
either, it is the folder of the image in the tar. So layouts of WebDataset, of timm
(imagenet-1k-wds), of CLIP benchmark, of img2dataset with a label column, and of plain `tar`.

Parquet: the column of images is a struct of `bytes` and `path`, and that of labels holds integers.
The metadata of Hugging Face name both, and the classes.

Otherwise classes are named by the lines of `classes.txt` or `classnames.txt`, beside the shards or
in the root, or by their numbers.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from io import BufferedReader
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from densefeed.storage.dataset_names import (
    ENDINGS,
    MOST_CLASSES,
    SPLITS,
    find_synonyms,
    natural_key,
    number_folders,
)
from densefeed.storage.parquet_files import ParquetFile, ParquetImages, open_parquet, read_column
from densefeed.storage.tar_files import Member, TarFile, TarImages, find_state, read_members
from densefeed.system.errors import UserError
from densefeed.system.files import find_path_fault, is_folder, open_regular, read_lines
from densefeed.system.json_files import parse_json
from densefeed.system.progress import bar
from densefeed.system.terminal import print

if TYPE_CHECKING:
    import pyarrow as pa

# Endings of shards. Compressed tars are found, to be refused by name.
SHARDS = {
    "tar": (".tar", ".tgz", *(f".tar.{how}" for how in ("gz", "bz2", "xz", "zst", "lz4"))),
    "parquet": (".parquet",),
}
CLASS_FILES = "classes.txt", "classnames.txt"
# Bytes of a label's `.cls` and `.json`.
MOST_CLS, MOST_JSON = 32, 2**20
# Columns of images where the metadata of Hugging Face are missing.
IMAGE_COLUMNS = "image", "img"


class Sample:
    """The files of a sample in a tar."""

    __slots__ = ("cls", "image", "json")

    def __init__(self) -> None:
        self.image: Member | None = None
        self.cls: Member | None = None
        self.json: Member | None = None


class Shards(NamedTuple):
    """The shards of a split, and the folders that may hold the names of its classes."""

    files: list[Path]
    folders: list[Path]


class Columns(NamedTuple):
    """The columns that are read of Parquet files; `names` is None if the file has none."""

    image: str
    label: str
    names: list[str] | None


# ------------------------------------------------------------------------- which files


def recognize(root: Path, split: str) -> str:
    """Return the kind of the shards in `root`, or an empty string for folders of images.

    A place that holds images too, or folders other than hidden ones, is one of class folders.
    """
    for place in list_places(root, split):
        names, folders = list_names(place)
        endings = set(map(find_ending, names))
        kinds = [kind for kind, known in SHARDS.items() if endings.intersection(known)]
        if len(kinds) > 1:
            raise UserError(f"{place} holds tar and Parquet files; give --dataset tar or parquet")
        if kinds and not folders and not endings.intersection(ENDINGS):
            return kinds[0]
        # The folder of the split is where class folders are looked for.
        if place.name in find_synonyms(split):
            return ""
    return ""


def list_places(root: Path, split: str) -> list[Path]:
    """List the folders that may hold the shards of a split, the most specific first."""
    homes = [home / name for home in (root, root / "data") for name in find_synonyms(split)]
    return [place for place in (*homes, root / "data", root) if place.is_dir()]


def list_names(place: Path) -> tuple[list[str], list[str]]:
    """List the files and the folders in a folder that are not hidden."""
    # An error is raised where the folder is read for its images.
    with suppress(OSError):
        entries = [entry for entry in os.scandir(place) if not entry.name.startswith(".")]
        folders = {entry.name for entry in entries if is_folder(entry)}
        return [entry.name for entry in entries if entry.name not in folders], sorted(folders)
    return [], []


def find_ending(name: str) -> str:
    """Return the ending of a file's name in lower case, with both parts of `.tar.gz`."""
    found = re.search(r"(\.tar)?\.[^.]+$", name.lower())
    return found[0] if found else ""


def find_shards(root: Path, kind: str, split: str) -> Shards:
    """Find the shards of a split. UserError if there are none."""
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; give the folder of the {kind} files")
    for place in list_places(root, split):
        names = [name for name in list_names(place)[0] if find_ending(name) in SHARDS[kind]]
        if not names:
            continue
        own = place != root and place.name in find_synonyms(split)
        chosen = names if own else choose_split(names, split)
        if not chosen:
            raise UserError(
                f"{place} holds {kind} files of other splits but none of {split!r}; check --data"
            )
        for name in chosen:
            if fault := find_path_fault(name):
                raise UserError(f"{place / name}: this name {fault}; rename it")
        chosen.sort(key=lambda name: (natural_key(name), name))
        return Shards([place / name for name in chosen], [place, root])
    raise UserError(f"{root} holds no {kind} files of the split {split!r}; check --data")


def choose_split(names: list[str], split: str) -> list[str]:
    """Return the names that contain the split as a word; all, if none contains any split."""
    words = "|".join(map(re.escape, sorted({split}.union(*SPLITS), key=len, reverse=True)))
    # Whole words only: `tested` contains no split. The last one counts, as for lists.
    found = [re.findall(rf"(?<![A-Za-z])({words})(?![A-Za-z])", name) for name in names]
    if not any(found):
        return names
    wanted = find_synonyms(split)
    return [name for name, words in zip(names, found, strict=True) if words and words[-1] in wanted]


def name_classes(shards: Shards, labels: np.ndarray) -> list[str]:
    """Return the class names in the file beside the shards, or else the numbers of the labels."""
    files = [folder / name for folder in shards.folders for name in CLASS_FILES]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return [*map(str, range(int(labels.max(initial=-1)) + 1))]
    names = [name for _, name in read_lines(file)]
    if not names or len(set(names)) < len(names):
        fault = "names a class twice" if names else "is empty"
        raise UserError(f"{file} {fault}; give it a line with another name for each class")
    return names


def check_label(label: object, where: str) -> int:
    """Return `label`. UserError if it is none, before names are made for all up to the highest."""
    if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < MOST_CLASSES:
        raise UserError(
            f"{where} has the label {str(label)[:24]!r}; a label is an integer from 0 to "
            f"{MOST_CLASSES - 1:,}"
        )
    return label


# ------------------------------------------------------------------------- tar


def read_tar(root: Path, rest: str, split: str) -> TarImages:
    """Find the images in the tar shards of a split, see above.

    Prints how many files and samples were left out. UserError if a shard cannot be read, or samples
    have no labels.
    """
    if rest:
        raise UserError(f"--dataset tar/{rest} is unknown; the dataset is called tar")
    shards, left_out = find_shards(root, "tar", split), Counter()
    tars, names, labels, numbers, offsets, sizes = [], [], [], [], [], []
    for number, path in enumerate(bar(shards.files, "index of tar files")):
        with open_regular(path) as file:
            tars.append(TarFile(path, find_state(file)))
            for sample in read_samples(file, path, left_out):
                name, offset, size = sample.image
                names.append(name)
                labels.append(read_label(file, path, sample))
                numbers.append(number)
                offsets.append(offset)
                sizes.append(size)
    home = shards.files[0].parent
    if left_out:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in left_out.items())
        print(f"{home}: left out of the tar files: {kinds}")
    if not names:
        raise UserError(f"{home} holds no images in its tar files; check --data")
    places = [np.array(values) for values in (numbers, offsets, sizes)]
    paths = name_samples(shards.files, names, numbers)
    if any(label is not None for label in labels):
        labels, class_names = number_labels(shards, names, numbers, labels)
        return TarImages(paths, labels, class_names, tars, *places)
    labels, class_names = label_by_folder(shards, names, numbers)
    order = sorted(range(len(paths)), key=lambda n: natural_key(paths[n]))
    paths, places = [paths[n] for n in order], [values[order] for values in places]
    return TarImages(paths, labels[order], class_names, tars, *places)


def read_samples(file: BufferedReader, path: Path, left_out: Counter) -> Iterable[Sample]:
    """Return the samples of a tar that have an image, and count what is left out.

    UserError for a name that no folder could have, and for two images or labels of a sample.
    """
    samples: dict[str, Sample] = {}
    for member in read_members(file, path):
        if fault := find_path_fault(member.name):
            raise UserError(f"{path}: the name {member.name[:80]!r} {fault}; write the tar again")
        key, kind = split_name(member.name)
        if not kind:
            left_out["other files"] += 1
            continue
        sample = samples.setdefault(key, Sample())
        if other := getattr(sample, kind):
            raise UserError(
                f"{path} holds {other.name} and {member.name}, two files of one sample (its key is "
                "the name up to the first dot); rename one of them"
            )
        setattr(sample, kind, member)
    found = [sample for sample in samples.values() if sample.image]
    if len(found) < len(samples):
        left_out["samples without an image"] += len(samples) - len(found)
    return found


def split_name(name: str) -> tuple[str, str]:
    """Return the key of a member, and which file of a sample it is: image, cls, json or none."""
    folder, slash, file = name.rpartition("/")
    stem, _, extensions = file.partition(".")
    ending = "." + extensions.rpartition(".")[2].lower()
    kind = {".cls": "cls", ".json": "json"}.get(ending, "image" if ending in ENDINGS else "")
    # Hidden files, such as those that macOS adds for its attributes, have no key.
    return folder + slash + stem, kind if stem else ""


def read_label(file: BufferedReader, path: Path, sample: Sample) -> int | None:
    """Return the label of a sample, None if it has no file of one. UserError if it is invalid."""
    if sample.cls:
        where, text = f"{path}/{sample.cls.name}", read_content(file, path, sample.cls, MOST_CLS)
        digits = text.strip()
        return check_label(int(digits) if digits.isdigit() else digits.decode("latin-1"), where)
    if not sample.json:
        return None
    where = f"{path}/{sample.json.name}"
    try:
        values = parse_json(read_content(file, path, sample.json, MOST_JSON))
    except ValueError as error:
        raise UserError(f"{where} is no JSON ({error}); write the tar again") from None
    if not isinstance(values, dict) or "label" not in values:
        return None
    return check_label(values["label"], where)


def read_content(file: BufferedReader, path: Path, member: Member, most: int) -> bytes:
    """Read a small member. UserError if it has more than `most` bytes."""
    if member.size > most:
        raise UserError(
            f"{path}/{member.name} has {member.size:,} bytes, more than the {most:,} of a label; "
            "write the tar again"
        )
    file.seek(member.offset)
    return file.read(member.size)


def number_labels(
    shards: Shards, names: list[str], numbers: list[int], labels: list[int | None]
) -> tuple[np.ndarray, list[str]]:
    """Return the labels of samples, int64 `[N]`, and the class names. UserError if one is None."""
    if None in labels:
        raise refuse_unlabeled(shards, names, numbers, labels.index(None))
    given = np.array(labels, np.int64)
    return given, name_classes(shards, given)


def label_by_folder(
    shards: Shards, names: list[str], numbers: list[int]
) -> tuple[np.ndarray, list[str]]:
    """Label samples by their folders. UserError if one has none."""
    folders = [name.rpartition("/")[0].rpartition("/")[2] for name in names]
    if "" in folders:
        raise refuse_unlabeled(shards, names, numbers, folders.index(""))
    return number_folders(folders)


def refuse_unlabeled(shards: Shards, names: list[str], numbers: list[int], index: int) -> UserError:
    """Return the error of a sample without a label."""
    return UserError(
        f"{shards.files[numbers[index]]}/{names[index]} has no label; write the tar with a .cls "
        "file (or a .json with `label`) for every image, or with class folders"
    )


def name_samples(files: Sequence[Path], names: list[str], numbers: list[int]) -> list[str]:
    """Return the paths of samples: their names, if all are different; else after the shard's."""
    if len(set(names)) == len(names):
        return names
    return [f"{files[number].stem}/{name}" for number, name in zip(numbers, names, strict=True)]


# ------------------------------------------------------------------------- Parquet


def read_parquet(root: Path, column: str, split: str) -> ParquetImages:
    """Find the images in the Parquet files of a split, see above; `column` is that of the labels.

    UserError if a file cannot be read, or has other columns.
    """
    shards, files, columns = find_shards(root, "parquet", split), [], None
    paths, labels = [], []
    for number, path in enumerate(bar(shards.files, "index of Parquet files")):
        file = open_parquet(path)
        if columns not in (None, found := find_columns(file, column)):
            raise UserError(
                f"{path} has other columns or classes than {shards.files[0]}; give files of one "
                "dataset"
            )
        columns = found
        files.append(file)
        labels.append(read_labels(file, columns.label))
        paths += [(number, name) for name in read_column(file, f"{columns.image}.path").to_pylist()]
    label_N = np.concatenate(labels)
    if not len(label_N):
        raise UserError(
            f"{shards.files[0].parent} holds no rows in its Parquet files; check --data"
        )
    names = columns.names or name_classes(shards, label_N)
    return ParquetImages(name_rows(shards.files, paths), label_N, names, files, columns.image)


def find_columns(file: ParquetFile, column: str) -> Columns:
    """Find the columns of the images and labels of a file. UserError if they are not there."""
    import pyarrow as pa

    schema, features = file.metadata.schema.to_arrow_schema(), read_features(file)
    marked = [name for name, kind in features.items() if kind.get("_type") == "Image"]
    images = [
        field.name
        for field in schema
        if field.name in (marked or IMAGE_COLUMNS) and is_image(field.type)
    ]
    integers = [field.name for field in schema if pa.types.is_integer(field.type)]
    classes = [name for name in integers if features.get(name, {}).get("_type") == "ClassLabel"]
    labels = [column] if column else ["label"] if "label" in integers else classes
    if len(images) != 1:
        raise UserError(
            f"{file.path} has {len(images)} columns of images (a struct of the binary `bytes` and "
            "the string `path`), and should have one"
        )
    if len(labels) != 1 or labels[0] not in integers:
        raise UserError(
            f"{file.path} has no column of integers {column or 'label'!r}; give --dataset "
            f"parquet/COLUMN, one of {', '.join(classes or integers) or 'none'}"
        )
    return Columns(images[0], labels[0], read_names(features.get(labels[0], {}), file.path))


def is_image(kind: "pa.DataType") -> bool:
    """Whether a column holds images as Hugging Face writes them."""
    import pyarrow as pa

    fields = {field.name: field.type for field in kind} if pa.types.is_struct(kind) else {}
    content, name = fields.get("bytes", pa.null()), fields.get("path", pa.null())
    return pa.types.is_binary(content) and pa.types.is_string(name)


def read_features(file: ParquetFile) -> dict[str, dict[str, Any]]:
    """Return the features that Hugging Face describes in a file's metadata, by column."""
    text = (file.metadata.metadata or {}).get(b"huggingface", b"{}")
    try:
        features = parse_json(text).get("info", {}).get("features", {})
        return {name: kind for name, kind in features.items() if isinstance(kind, dict)}
    except (ValueError, AttributeError) as error:
        raise UserError(
            f"{file.path} has damaged metadata of Hugging Face ({error}); write it again"
        ) from None


def read_names(feature: dict[str, Any], path: Path) -> list[str] | None:
    """Return the class names of a ClassLabel; None of another feature."""
    names = feature.get("names")
    if names is None or feature.get("_type") != "ClassLabel":
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path} has class names that are no texts; write it again")
    if not names or len(set(names)) < len(names):
        raise UserError(f"{path} names no classes, or one twice; write it again")
    return names


def read_labels(file: ParquetFile, column: str) -> np.ndarray:
    """Read the labels of a file, int64 `[N]`. UserError for one that is none."""
    labels = read_column(file, column)
    if labels.null_count:
        raise UserError(f"{file.path} has {labels.null_count:,} rows without a {column}")
    values = labels.to_numpy()
    for label in (values.min(), values.max()) if len(values) else ():
        check_label(int(label), f"{file.path}, column {column},")
    return values.astype(np.int64)


def name_rows(files: Sequence[Path], paths: list[tuple[int, str | None]]) -> list[str]:
    """Return the paths of rows, of (file, `path`): these, if they are paths and all different.

    Otherwise file and row. Nothing is opened under these names.
    """
    names = [name or "" for _, name in paths]
    unfit = any(not name or find_path_fault(name) for name in names)
    if not unfit and len(set(names)) == len(names):
        return names
    rows = (row for _, group in groupby(paths, lambda pair: pair[0]) for row, _ in enumerate(group))
    return [f"{files[n].stem}/{row:06d}" for (n, _), row in zip(paths, rows, strict=True)]
