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
either, it is the first folder of the image in the tar, below those that all images share. So
layouts of WebDataset, of timm (imagenet-1k-wds), of CLIP benchmark, of img2dataset with a label
column, and of plain `tar`.

Parquet: the column of images is a struct of `bytes` and `path`, and that of labels holds integers
or texts. The metadata of Hugging Face name both, and the classes. Different texts, sorted, are the
classes.

Shards lie on a disk or in object storage.

Otherwise classes are named by the lines of `classes.txt` or `classnames.txt`, beside the shards or
in the root, or by their numbers.
"""

import os
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from densefeed.storage.dataset_names import (
    ENDINGS,
    MOST_CLASSES,
    NAMED,
    SPLITS,
    begin_at_classes,
    check_label,
    describe_system,
    find_synonyms,
    find_system_entry,
    list_some,
    natural_key,
    number_folders,
)
from densefeed.storage.parquet_files import (
    ParquetFile,
    ParquetImages,
    check_rows,
    open_parquet,
    read_column,
    read_texts,
)
from densefeed.storage.shard_file import ShardFile, open_shard
from densefeed.storage.tar_files import TarImages
from densefeed.storage.tar_index import TarIndex, index_tar
from densefeed.system.errors import UserError
from densefeed.system.files import find_path_fault, is_folder, read_lines
from densefeed.system.json_files import parse_json
from densefeed.system.object_store import list_folder
from densefeed.system.object_url import ObjectURL
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
# Tars in object storage that are indexed at once.
INDEXED = 8
# The name of one of several files up to its number, the number, and how many there are.
NUMBERED = re.compile(r"(.*?)([0-9]{1,9})([-_]of[-_])([0-9]{1,9})(?![0-9])")
# Columns of images where the metadata of Hugging Face are missing.
IMAGE_COLUMNS = "image", "img"


# ------------------------------------------------------------------------- which files


def recognize(root: Path | ObjectURL, split: str) -> str:
    """Return the kind of the shards in `root`, or an empty string for folders of images.

    A place that holds folders too, other than hidden ones and those of systems, is one of class
    folders. UserError for one that holds shards and images, and for a shard.
    """
    endings = {ending for known in SHARDS.values() for ending in known}
    if find_ending(root.name) in endings and isinstance(root, Path) and root.is_file():
        raise UserError(f"{root} is a file; give its folder, {root.parent}")
    for place in list_places(root, split):
        names, folders = list_names(place)
        endings = set(map(find_ending, names))
        kinds = [kind for kind, known in SHARDS.items() if endings.intersection(known)]
        if len(kinds) > 1:
            raise UserError(
                f"{place} holds tar and Parquet files; give --dataset tar or parquet, or, where a "
                "command has no --dataset, move one kind to a folder of its own"
            )
        if kinds and not folders:
            if endings.intersection(ENDINGS):
                raise UserError(
                    f"{place} holds images beside {kinds[0]} files; move the images into class "
                    f"folders elsewhere, or, to label or pack the files, give --dataset {kinds[0]}"
                )
            return kinds[0]
        # The folder of the split is where class folders are looked for.
        if place.name in find_synonyms(split):
            return ""
    return ""


def list_places(root: Path | ObjectURL, split: str) -> list[Path | ObjectURL]:
    """List the folders that may hold the shards of a split, the most specific first."""
    words, folders = find_synonyms(split), list_names(root)[1]
    homes, data = [root / name for name in words if name in folders], []
    if "data" in folders:
        data, folders = [root / "data"], list_names(root / "data")[1]
        homes += [root / "data" / name for name in words if name in folders]
    return [*homes, *data, root]


def list_names(place: Path | ObjectURL) -> tuple[list[str], list[str]]:
    """List the files and the folders in a folder; not hidden ones, nor those of systems."""
    if isinstance(place, ObjectURL):
        objects, folders = list_folder(place)
        names = [meta["path"].rpartition("/")[2] for meta in objects]
        return tuple([n for n in found if not find_system_entry(n)] for found in (names, folders))
    # An error is raised where the folder is read for its images.
    with suppress(OSError):
        entries = [entry for entry in os.scandir(place) if not find_system_entry(entry.name)]
        folders = {entry.name for entry in entries if is_folder(entry)}
        return [entry.name for entry in entries if entry.name not in folders], sorted(folders)
    return [], []


def find_ending(name: str) -> str:
    """Return the ending of a file's name in lower case, with both parts of `.tar.gz`."""
    found = re.search(r"(\.tar)?\.[^.]+$", name.lower())
    return found[0] if found else ""


def find_shards(root: Path | ObjectURL, kind: str, split: str) -> list[Path | ObjectURL]:
    """Find the shards of a split, which lie in one folder. UserError if there are none."""
    if isinstance(root, Path) and not root.is_dir():
        raise UserError(f"{root} is not a folder; give that of the {kind} files, {root.parent}")
    for place in list_places(root, split):
        names = [name for name in list_names(place)[0] if find_ending(name) in SHARDS[kind]]
        if not names:
            continue
        own = place != root and place.name in find_synonyms(split)
        chosen = names if own else choose_split(names, split)
        if not own:
            check_other_shards(place, sorted(names), split)
        if not chosen:
            raise UserError(
                f"{place} holds {kind} files of other splits but none of {split!r}; check --data"
            )
        for name in chosen:
            if fault := find_path_fault(name):
                raise UserError(f"{place / name}: this name {fault}; rename it")
        chosen.sort(key=lambda name: (natural_key(name), name))
        check_complete(place, chosen)
        return [place / name for name in chosen]
    raise UserError(f"{root} holds no {kind} files of the split {split!r}; check --data")


def choose_split(names: list[str], split: str) -> list[str]:
    """Return the names that contain the split as a word; all, if none contains any split."""
    words = [find_split(name, split) for name in names]
    if not any(words):
        return names
    wanted = find_synonyms(split)
    return [name for name, word in zip(names, words, strict=True) if word in wanted]


def find_split(name: str, split: str) -> str:
    """Return the word in a name that is a split; `split` is one too. Empty if there is none."""
    words = "|".join(map(re.escape, sorted({split}.union(*SPLITS), key=len, reverse=True)))
    # Whole words only: `tested` contains no split. The last one counts, as for lists.
    return next(iter(re.findall(rf"(?<![A-Za-z])({words})(?![A-Za-z])", name)[::-1]), "")


def check_folders(root: Path | ObjectURL, there: set[str], split: str) -> None:
    """Check the folders of `there` that hold images beside those of splits; see `check_beside`."""
    words = there & set().union(*SPLITS)
    # The user named another split.
    if not words or "/" in split or split in there - words:
        return
    siblings = (name for name in sorted(there - words) if not find_system_entry(name))
    others = (name for name in siblings if has_images(root / name))
    # One more than a message lists.
    own, some = min(words), list(islice(others, NAMED + 1))
    check_beside(root, words, own, some, f"give {root / own} itself")


def has_images(place: Path | ObjectURL) -> bool:
    """Return whether a folder, or the first folder in it, and so on, holds images."""
    # The tree may be large, so one folder of a level is listed. Sessions are alike.
    while place:
        files, folders = list_names(place)
        if any(os.path.splitext(name)[1].lower() in ENDINGS for name in files):
            return True
        place = place / min(folders) if folders else None
    return False


def check_beside(
    place: Path | ObjectURL, words: set[str], own: str, others: Sequence[str], remedy: str
) -> None:
    """Raise UserError if `own`, called as a split, may be a class like `others` beside it.

    That is where the `words` there are of one split, as train alone. Where they are of several, as
    train and val, the others are printed, because they are not read. `remedy` is for a split.
    """
    if not others:
        return
    if sum(not words.isdisjoint(names) for names in SPLITS) > 1:
        print(f"{place}: images beside the splits are left out: {list_some(others)}")
        return
    raise UserError(
        f"{place} holds images in {list_some(others)} beside {own}, which may be a split or a "
        f"class; if it is a split, {remedy}, and if it is a class, rename it"
    )


def check_other_shards(place: Path | ObjectURL, names: list[str], split: str) -> None:
    """Check the shards whose names have no split, beside those that have one; see check_beside."""
    words = {name: find_split(name, split) for name in names}
    own = next((name for name in names if words[name]), None)
    if own and split in set().union(*SPLITS):
        others = [name for name in names if not words[name]]
        remedy = "move the others to another folder"
        check_beside(place, set(words.values()), own, others, remedy)


def check_complete(
    place: Path | ObjectURL, names: Sequence[str], there: Sequence[str] | None = None
) -> None:
    """Raise UserError if files are missing of a number that names state, as 00000-of-00003.

    `there` are the names of all files in `place`, by default `names`: a pattern may choose some of
    the files that are there.
    """
    chosen = {found[0] for name in names if (found := split_number(name))}
    groups: dict[tuple[str, ...], dict[int, str]] = {}
    for name in names if there is None else there:
        if (found := split_number(name)) and found[0] in chosen:
            group, number = found
            groups.setdefault(group, {})[int(number)] = number
    for (begin, of, count, ending), numbers in groups.items():
        width = max(map(len, numbers.values()))
        # Some count from 1.
        first = int(0 not in numbers and int(count) in numbers)
        shards = range(first, first + int(count))
        lack = len(shards) - sum(number in shards for number in numbers)
        if lack:
            missing = islice((n for n in shards if n not in numbers), NAMED + 1)
            named = list_some([f"{begin}{n:0{width}d}{of}{count}{ending}" for n in missing])
            raise UserError(
                f"{place} lacks {lack:,} of {int(count):,} {ending} files: {named}; copy them "
                f"there, or rename the others without {of}{count} to read them alone"
            )


def split_number(name: str) -> tuple[tuple[str, ...], str] | None:
    """Split a name as x-00000-of-00003.tar into the group of its files and its number in it.

    None for a name without such a number.
    """
    if found := NUMBERED.match(name):
        begin, number, of, count = found.groups()
        # What follows may be a checksum.
        return (begin, of, count, find_ending(name)), number
    return None


def name_classes(folders: Sequence[Path | ObjectURL], labels: np.ndarray) -> list[str]:
    """Return the class names in a file of these folders, or else the numbers of the labels."""
    there = [(folder, set(list_names(folder)[0])) for folder in folders]
    files = (folder / name for folder, names in there for name in CLASS_FILES if name in names)
    file = next(files, None)
    if file is None:
        return [*map(str, range(int(labels.max(initial=-1)) + 1))]
    names = [name for _, name in read_lines(file, open_shard)]
    if not names or len(set(names)) < len(names):
        fault = "names a class twice" if names else "is empty"
        raise UserError(f"{file} {fault}; give it a line with another name for each class")
    return names


# ------------------------------------------------------------------------- tar


def read_tar(root: Path | ObjectURL, rest: str, split: str) -> TarImages:
    """Find the images in the tar shards of a split, see above.

    Prints how many files and samples were left out. UserError if a shard cannot be read, or samples
    have no labels.
    """
    if rest:
        raise UserError(f"--dataset tar/{rest} is unknown; the dataset is called tar")
    files, left_out = find_shards(root, "tar", split), Counter()
    system = []
    tars, names, labels, numbers, offsets, sizes = [], [], [], [], [], []
    for number, (tar, index) in enumerate(index_tars(files)):
        tars.append(tar)
        left_out.update(index.left_out)
        system += index.system
        names += index.names
        labels += index.labels
        numbers += [number] * len(index.names)
        offsets += index.offsets
        sizes += index.sizes
    if left_out:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in left_out.items())
        print(f"{files[0].parent}: left out of the tar files: {kinds}")
    if system:
        print(f"{files[0].parent}: {describe_system(system)}")
    places = [np.array(values) for values in (numbers, offsets, sizes)]
    paths = name_samples(files, numbers, names, names)
    own = any(label is not None for label in labels)
    unlabeled = [
        label is None if own else "/" not in n for label, n in zip(labels, names, strict=True)
    ]
    if any(unlabeled):
        n = unlabeled.index(True)
        raise UserError(
            f"{tars[numbers[n]].path}/{names[n]} has no label; write the tar with a .cls file (or "
            "a .json with `label`) for every image, or with class folders"
        )
    if own:
        label_N = np.array(labels, np.int64)
        return TarImages(
            paths, label_N, name_classes((files[0].parent, root), label_N), tars, *places
        )
    home = files[0].parent
    label_N, class_names = number_folders(*begin_at_classes([names], home), home)
    # Class folders have the order of such folders on a disk.
    order = sorted(range(len(paths)), key=lambda n: (natural_key(paths[n]), paths[n]))
    paths, places = [paths[n] for n in order], [values[order] for values in places]
    return TarImages(paths, label_N[order], class_names, tars, *places)


def index_tars(paths: Sequence[Path | ObjectURL]) -> list[tuple[ShardFile, TarIndex]]:
    """Index tars; objects at once, as each is waited for most of the time."""
    pool = ThreadPoolExecutor(1 if isinstance(paths[0], Path) else INDEXED)
    try:
        jobs = [pool.submit(index_tar, path) for path in paths]
        # After an error the bar ends here, not when it is collected as garbage.
        with closing(bar(jobs, "index of tar files")) as waited:
            return [job.result() for job in waited]
    finally:
        pool.shutdown(cancel_futures=True)


def name_samples(
    files: Sequence[Path | ObjectURL], numbers: list[int], names: list[str], others: list[str]
) -> list[str]:
    """Return the paths of samples: `names`, if none is empty and all are different.

    Else those of `others` behind the names of their files, whose numbers are `numbers`.
    """
    if len(set(names)) == len(names) and all(names):
        return names
    return [f"{files[number].stem}/{name}" for number, name in zip(numbers, others, strict=True)]


# ------------------------------------------------------------------------- Parquet


def read_parquet(root: Path | ObjectURL, column: str, split: str) -> ParquetImages:
    """Find the images in the Parquet files of a split, see above; `column` is that of the labels.

    UserError if a file cannot be read, or has other columns.
    """
    places, files, columns = find_shards(root, "parquet", split), [], None
    names, rows, numbers, labels, count = [], [], [], [], 0
    for number, path in enumerate(bar(places, "index of Parquet files")):
        file = open_parquet(path)
        if columns not in (None, found := find_columns(file, column)):
            raise UserError(
                f"{path} has other columns or classes than {places[0]}; give files of one dataset"
            )
        columns = found
        files.append(file)
        count += sum(file.rows)
        check_rows(files, count)
        labels.append(read_labels(file, found))
        # Nothing is opened under these names.
        texts = read_texts(file, f"{found.image}.path")
        names += ["" if not text or find_path_fault(text) else text for text in texts]
        rows += [f"{row:06d}" for row in range(len(texts))]
        numbers += [number] * len(texts)
    label_N, paths = np.concatenate(labels), name_samples(places, numbers, names, rows)
    class_names = columns.class_names
    if columns.text:
        class_names, label_N = np.unique(label_N, return_inverse=True)
        class_names = class_names.tolist()
    class_names = class_names or name_classes((places[0].parent, root), label_N)
    return ParquetImages(paths, label_N, class_names, files, columns.image)


class Columns(NamedTuple):
    """The columns of the images and labels of a Parquet file."""

    image: str
    label: str
    text: bool  # whether labels are texts
    class_names: list[str] | None  # of a ClassLabel


def find_columns(file: ParquetFile, column: str) -> Columns:
    """Find the columns of the images and labels of a file, and the names of its classes, if any.

    UserError if they are not there.
    """
    import pyarrow as pa

    schema, features = file.metadata.schema.to_arrow_schema(), read_features(file)
    marked = [name for name, kind in features.items() if kind.get("_type") == "Image"]
    images = [
        field.name
        for field in schema
        if field.name in (marked or IMAGE_COLUMNS) and is_image(field.type)
    ]
    types = {field.name: field.type for field in schema}
    integers = [name for name, kind in types.items() if pa.types.is_integer(kind)]
    usable = [*integers, *(name for name, kind in types.items() if is_text(kind))]
    classes = [name for name in integers if features.get(name, {}).get("_type") == "ClassLabel"]
    labels = [column] if column else ["label"] if "label" in usable else classes
    if len(images) != 1:
        raise UserError(f"{file.path} has {describe_images(images, types)}")
    if len(labels) != 1 or labels[0] not in usable:
        problem = describe_labels(column or "label", types, classes or usable)
        raise UserError(f"{file.path} has {problem}")
    label = labels[0]
    class_names = read_names(features.get(label, {}), file.path)
    return Columns(images[0], label, label not in integers, class_names)


def describe_images(images: list[str], types: "dict[str, pa.DataType]") -> str:
    """Describe what is wrong with the columns of `images`, which are none or several.

    `types` are those of all columns.
    """
    if images:
        return (
            f"{len(images)} columns of images ({', '.join(images)}), and one is read; write the "
            f"file again with one, as Hugging Face's remove_columns({images[1:]}) does"
        )
    if others := [name for name, kind in types.items() if is_image(kind)]:
        return (
            f"its images in the column {others[0]!r}; call it {IMAGE_COLUMNS[0]!r}, as Hugging "
            f"Face's rename_column({others[0]!r}, {IMAGE_COLUMNS[0]!r}) does"
        )
    name = next((name for name in IMAGE_COLUMNS if name in types), IMAGE_COLUMNS[0])
    found = f" ({name!r} is of type {str(types[name])[:80]})" if name in types else ""
    return (
        f"0 columns of images, structs of the binary `bytes` and the string `path`{found}; write "
        f"one called {name!r}, as Hugging Face's cast_column({name!r}, Image()) does"
    )


def describe_labels(column: str, types: "dict[str, pa.DataType]", usable: list[str]) -> str:
    """Describe why `column` cannot be that of the labels, and what can be done.

    `types` are those of all columns, `usable` are those that hold labels.
    """
    fault = f"no column {column!r}"
    if column in types:
        fault = f"labels of type {str(types[column])[:80]} in its column {column!r}"
    choice = f"give --dataset parquet/{' or parquet/'.join(usable)}, or " if usable else ""
    return f"{fault}; {choice}write an integer or a text for each row to {column!r}"


def is_text(kind: "pa.DataType") -> bool:
    """Whether a column holds texts, as they are or by a dictionary."""
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return any(
        test(kind)
        for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    )


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


def read_names(feature: dict[str, Any], path: Path | ObjectURL) -> list[str] | None:
    """Return the class names of a ClassLabel; None of another feature."""
    names = feature.get("names")
    if names is None or feature.get("_type") != "ClassLabel":
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path} has class names that are not text; write it again")
    if not names or len(set(names)) < len(names):
        raise UserError(f"{path} names no classes, or one twice; write it again")
    return names


def read_labels(file: ParquetFile, columns: Columns) -> np.ndarray:
    """Read the labels of a file: int64 `[N]`, or texts, object `[N]`.

    UserError that names a row with another one.
    """
    column = columns.label
    where = f"{file.path}, column {column!r}"
    if columns.text:
        values = np.array(read_texts(file, column), object)
        missing = np.equal(values, None) | np.equal(values, "")
    else:
        read = read_column(file, column)
        missing, values = read.is_null().to_numpy(), read.fill_null(0).to_numpy()
    if missing.any():
        raise UserError(
            f"{where}, row {missing.argmax()} has no label; write an integer or a text there, or "
            "remove the row"
        )
    if columns.text:
        return values
    if (bad := (values < 0) | (values >= MOST_CLASSES)).any():
        row = int(bad.argmax())
        check_label(int(values[row]), f"{where}, row {row}")
    return values.astype(np.int64)
