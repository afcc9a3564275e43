"""Import published score maps, one small file per image, into a store.

A pack is a folder `<class>/<name>.pt` (or `.npy`) beside an ImageFolder of the same classes and
names, or beside tar or Parquet files of images with the same names. TokenLabeling's and ReLabel's
packs have this form, and folders of NumPy arrays may. Each file holds one array `[2, k, S, S]`: [0]
the logits of the cell's top k classes, [1] the class ids, as floats. TokenLabeling's arrays are
float16 with S = 18 and k = 5, ReLabel's float32 with S = 15. By convention a class that is not
named has logit 0 (`absent` = `zero-logit`). The stored logsumexp is the one of this convention,
because packs do not contain the teacher's own.

The files do not contain which part of an image they cover, nor which axis comes first, so both are
declared at import.
"""

import io
import os
import re
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np

from densefeed.storage.dataset_names import MOST_CLASSES
from densefeed.storage.geometry import TLBR, WHOLE, Footprint, teacher_window
from densefeed.storage.images import Images, sample_evenly
from densefeed.storage.score_maps import (
    ScoreMaps,
    ScoreMapStore,
    ScoreMapWriter,
    StoreHeader,
    find_duplicate_classes,
    find_non_finite,
    split_runs,
)
from densefeed.storage.selection import take_name
from densefeed.storage.tensor_files import TensorError, TensorFiles
from densefeed.system.errors import UserError
from densefeed.system.files import replace_file
from densefeed.system.object_url import check_local
from densefeed.system.prefetch import ordered_map
from densefeed.system.progress import steps_bar
from densefeed.system.terminal import escape_controls

# Shape letters: N images, S cells along a side of a map, k classes per cell, K classes

Axes = Literal["row-column", "column-row"]
SUFFIXES = (".pt", ".npy")
# Files that a thread reads at once: 1.8 MB of maps at S = 18, k = 5.
CHUNK = 256
# Files that are read to find S and k.
PROBES = 64
# Examples of each kind of problem in messages.
NAMED = 5
# Number of integers from 0 that a float represents exactly, by its bytes.
EXACT = {2: 2**11, 4: 2**24, 8: 2**53}
# How the header of a store states what a comparison with a reference found, by the verdict of the
# audit's check.
FOUND = {"sound": "by", "unchecked": "unconfirmed by", "fault": "contradicted by"}
# The end of the entry `teacher` of imported maps.
IMPORTED = re.compile(
    rf"\(pack .*, axes (?:{'|'.join(get_args(Axes))})"
    rf"(?: (?P<found>{'|'.join(FOUND.values())}) reference .*)?\)$"
)
# For names that do not identify an image.
REMEDY = "give the class folders of images and maps the same names, or each image a name of its own"
# Logit of the image's label where there is no map: probability 1 - 2e-6 among 1,000 classes.
SURE = 20.0


class Published(NamedTuple):
    """Properties of a published pack that are not in its files.

    They are from the code of TokenLabeling and ReLabel.
    """

    teacher: str
    input_size: int  # of the teacher, pixels
    footprint: Footprint


# By (S, k).
PUBLISHED = {
    (18, 5): Published("dm_nfnet_f6", 576, "center-crop"),
    (15, 5): Published("tf_efficientnet_l2_ns_475", 475, "squash"),
}


# ------------------------------------------------------------------------- files of images

NONE, WHOLE_STEM, FIRST_DOT, SHARED, NAME_ALONE = range(5)


@dataclass
class Matching:
    """The file of each image.

    `rule` uint8 `[N]` is one of NONE (no file), WHOLE_STEM (`a.b.jpg` has `a.b.pt`), FIRST_DOT
    (`a.b.jpg` has `a.pt`, as the published code names it), SHARED (several images match this file,
    so its image is not known) and NAME_ALONE (in whatever folders image and file are).
    """

    root: Path
    suffix: str  # .pt | .npy
    rule: np.ndarray
    extra: int = 0  # number of files that belong to no image
    extra_names: list[str] = field(default_factory=list)  # the first of them
    # the folder of each file by its name, where images and files match by names alone
    folders: dict[str, str] = field(default_factory=dict)

    @property
    def matched(self) -> np.ndarray:
        """Images that have a file, int64."""
        return np.flatnonzero((self.rule != NONE) & (self.rule != SHARED))

    def file(self, path: str, rule: int) -> Path:
        """Return the file of an image, given the image's path."""
        if rule == NAME_ALONE:
            name = take_name(path)
            return self.root / self.folders[name] / (name + self.suffix)
        return self.root / (map_stem(path, rule == WHOLE_STEM) + self.suffix)


def map_stem(path: str, whole: bool) -> str:
    """Return `class/name` of an image's path.

    It ends at the last dot if `whole`, else at the first dot of `class/file`, as in the published
    code.
    """
    last_two = "/".join(path.replace(os.sep, "/").split("/")[-2:])
    return os.path.splitext(last_two)[0] if whole else last_two.partition(".")[0]


def match(images: Images, labels: Path) -> Matching:
    """Find the file of every image, folder by folder; if no image has one, by the names alone.

    Raises UserError if `labels` is not a folder, or holds no maps or two kinds of files, or if
    images match by names alone and a name is that of several images or files.
    """
    check_local(labels)
    if not labels.is_dir():
        raise UserError(
            f"{labels} is not a folder; give the folder of class folders with .pt or .npy files"
        )
    kinds = Counter()
    # If the name of a class folder contains a dot, the published code looks in the root.
    at_root = list_maps(labels, "", kinds)
    folders = defaultdict(list)
    for index, path in enumerate(images.paths):
        folders[map_stem(path, True).rpartition("/")[0]].append(index)
    found = Matching(labels, "", np.zeros(len(images), np.uint8))
    root_claims = defaultdict(list)

    def settle(there: set[str], claims: dict[str, list[int]]) -> None:
        """Mark files of several images, and count those of none."""
        for indices in claims.values():
            if len(indices) > 1:
                found.rule[indices] = SHARED
        unclaimed = there - claims.keys()
        found.extra += len(unclaimed)
        found.extra_names += sorted(unclaimed)[: NAMED - len(found.extra_names)]

    for folder, members in folders.items():
        there, claims = list_maps(labels, folder, kinds) if folder else set(), defaultdict(list)
        for index in members:
            # The exact name first: by the first dot `a.b.jpg` and `a.c.jpg` would share `a.pt`.
            for rule in (WHOLE_STEM, FIRST_DOT):
                stem = map_stem(images.paths[index], rule == WHOLE_STEM)
                if stem in there or stem in at_root:
                    found.rule[index] = rule
                    (claims if stem in there else root_claims)[stem].append(index)
                    break
        settle(there, claims)
    settle(at_root, root_claims)
    for entry in sorted(os.scandir(labels), key=lambda entry: entry.name):
        if entry.is_dir() and entry.name not in folders:
            settle(list_maps(labels, entry.name, kinds), {})
    if not kinds:
        deeper = find_tree(labels)
        raise UserError(
            f"{labels} holds no .pt or .npy files in class folders; give the folder above the "
            "class folders" + (f": --labels {deeper}" if deeper else "")
        )
    if len(kinds) > 1:
        raise UserError(f"{labels} holds both .pt and .npy files; move one kind away")
    (found.suffix,) = kinds
    if not len(found.matched):
        match_names_alone(found, images)
    return found


def find_tree(root: Path) -> Path | None:
    """Return the first folder in `root` whose folders hold maps, as that of a split; else None."""
    for entry in sorted(path for path in root.iterdir() if path.is_dir()):
        if any(list_maps(entry, folder.name, Counter()) for folder in entry.iterdir()):
            return entry
    return None


def match_names_alone(found: Matching, images: Images) -> None:
    """Find the file of every image by its name without folders, which is WebDataset's key.

    Changes `found` if there is one. UserError if a name is that of several images or files.
    """
    names = [take_name(path) for path in images.paths]
    wanted, extra = Counter(names), []
    folders = ["", *sorted(entry.name for entry in os.scandir(found.root) if entry.is_dir())]
    for folder in folders:
        for stem in sorted(list_maps(found.root, folder, Counter())):
            name = stem.rpartition("/")[2]
            if name not in wanted:
                extra.append(stem)
            elif wanted[name] > 1:
                raise UserError(
                    f"{found.root} has {stem}{found.suffix}, and {wanted[name]:,} images of "
                    f"{images.root} are called {name}; {REMEDY}"
                )
            elif name in found.folders:
                raise UserError(
                    f"{found.root} has {found.folders[name]}/{name}{found.suffix} and "
                    f"{stem}{found.suffix}, and one image of {images.root} is called {name}; "
                    f"{REMEDY}"
                )
            else:
                found.folders[name] = folder
    if found.folders:
        there = np.array([name in found.folders for name in names])
        found.rule[:] = np.where(there, NAME_ALONE, NONE)
        found.extra, found.extra_names = len(extra), extra[:NAMED]


def list_maps(root: Path, folder: str, kinds: Counter) -> set[str]:
    """Return `folder/stem` of the maps in a folder of `root`, which need not exist.

    Their suffixes are counted in `kinds`.
    """
    stems = set()
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(root / folder) as entries:
        for entry in entries:
            stem, suffix = os.path.splitext(entry.name)
            if suffix in SUFFIXES:
                stems.add(f"{folder}/{stem}" if folder else stem)
                kinds[suffix] += 1
    return stems


# ------------------------------------------------------------------------- content of a file


def map_shape(array: np.ndarray) -> tuple[int, int]:
    """Return (S, k) of a map `[2, k, S, S]`; TensorError for any other array."""
    if array.dtype.kind != "f" or array.dtype.itemsize not in EXACT:
        raise TensorError(f"holds {array.dtype}, which is none of float16, float32, float64")
    if array.ndim != 4 or array.shape[0] != 2 or array.shape[2] != array.shape[3] or not array.size:
        raise TensorError(f"has the shape {list(array.shape)}, but a map has [2, k, S, S]")
    return array.shape[2], array.shape[1]


def to_rows(
    array_N2kSS: np.ndarray, num_classes: int, axes: Axes = "row-column"
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Convert published maps to rows of a store.

    Returns `logit` float16 `[N, S, S, k]` descending over k, `cls` uint16 `[N, S, S, k]`, `lse`
    float16 `[N, S, S]`, and the rows that no teacher can produce, bool `[N]` by fault.

    `axes` is the order of the last two axes of the input. Logits are rounded to float16 and sorted
    where they do not descend. `lse` is ln(K - k + sum e^logit): classes not named have logit 0.
    """
    if axes == "column-row":
        array_N2kSS = array_N2kSS.swapaxes(3, 4)
    value_NSSk, number_NSSk = np.ascontiguousarray(np.moveaxis(array_N2kSS, (1, 2), (0, 4)))
    N, k = len(value_NSSk), value_NSSk.shape[3]
    # Numbers that their type cannot hold are faults of their row.
    with np.errstate(over="ignore", invalid="ignore"):
        logit, cls = value_NSSk.astype(np.float16), number_NSSk.astype(np.uint16)
        fractional = (cls != number_NSSk).reshape(N, -1).any(1)
        rising = (logit[..., 1:] > logit[..., :-1]).reshape(N, -1).any(1)
        infinite = find_non_finite(logit.reshape(N, -1))
        # Infinities and NaN are faults of their row, which needs no order then.
        for row in np.flatnonzero(rising & ~infinite):
            order = np.argsort(-logit[row], axis=-1, kind="stable")
            for part in (logit, cls):
                part[row] = np.take_along_axis(part[row], order, -1)
        peak, others = logit[..., 0].astype(np.float32), num_classes - k
        # Classes that are not named have logit 0, which may be the largest.
        if others:
            peak = np.maximum(peak, 0)
        total = np.exp(logit.astype(np.float32) - peak[..., None]).sum(-1)
        # exp(-peak) overflows below -88, and 0 * inf would be NaN.
        if others:
            total += others * np.exp(-peak)
        lse = (peak + np.log(total)).astype(np.float16)
    beyond = fractional | (cls.reshape(N, -1).max(1) >= num_classes)
    classes = f"0 to {num_classes - 1:,}, the classes of the images"
    wrong = {
        "a logit that is NaN, or no finite number in float16": infinite,
        f"a class number that is none of {classes}": beyond,
        "a class twice in one cell": find_duplicate_classes(cls) & ~infinite & ~beyond,
    }
    return logit, cls, lse, wrong


# ------------------------------------------------------------------------- import


@dataclass
class ImportReport:
    """Result of an import; `problems` are the images without a usable map: kind and sentence."""

    kept: int = 0  # images whose map was read in this run
    earlier: int = 0  # images whose map was read in interrupted runs before
    problems: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        sentences, kinds = defaultdict(list), []
        for kind, sentence in self.problems:
            sentences[kind].append(sentence)
        for kind, found in sorted(sentences.items(), key=lambda item: -len(item[1])):
            named = "; ".join(found[:NAMED]) + ("; ..." if len(found) > NAMED else "")
            kinds.append(f"{kind}: {len(found):,} ({named})")
        total = len(self.problems)
        images = "1 image has" if total == 1 else f"{total:,} images have"
        return f"{images} no usable map - {', '.join(kinds)}"


@dataclass(frozen=True, kw_only=True)
class Pack:
    """A pack and its declared properties."""

    matching: Matching
    side: int  # S
    top_k: int  # k
    footprint: Footprint  # part of each image that a map covers
    axes: Axes  # order of a file's last two axes
    teacher: str
    input_size: int  # of the teacher, pixels
    reference: str = ""  # the model that the maps are compared with
    # what that comparison found about the axes
    orientation: Literal["sound", "unchecked", "fault"] = "unchecked"

    def header(self, images: Images) -> StoreHeader:
        """Return the header of the store.

        It contains the declared properties, so a killed import is resumed only with the same ones.
        """
        # A JSON text cannot hold bytes of a name that are not UTF-8.
        name = escape_controls(self.matching.root.resolve().name)
        axes = f"axes {self.axes}"
        if self.reference:
            # The name alone: the same maps give the same file in another folder.
            found = FOUND[self.orientation]
            axes += f" {found} reference {escape_controls(Path(self.reference).name)}"
        return StoreHeader(
            side=self.side,
            top_k=self.top_k,
            num_classes=len(images.class_names),
            absent="zero-logit",
            teacher=f"{escape_controls(self.teacher)} (pack {name}, {axes})",
            input_size=self.input_size,
            geometry=self.footprint,
            fingerprint=images.fingerprint(),
            class_names=tuple(images.class_names),
        )


def describe_doubt(teacher: str, where: object) -> str:
    """Describe why the maps of `where` may not be upright, by a header's `teacher`, and the remedy.

    Empty for maps that were not imported, and for those that a reference has shown to be upright.
    """
    imported = IMPORTED.search(teacher)
    if imported is None or imported["found"] == FOUND["sound"]:
        return ""
    again = "remove the imported file and import again with densefeed import"
    if imported["found"] == FOUND["fault"]:
        return (
            f"the reference of their import shows that the maps of {where} are not oriented as "
            f"declared; {again} --axes find"
        )
    if imported["found"] == FOUND["unchecked"]:
        return (
            f"the reference of their import did not show how the maps of {where} are oriented, and "
            f"transposed ones train without an error; {again} --reference MODEL, another one than "
            "before, or with more --audit-images"
        )
    return (
        f"it was not checked how the maps of {where} are oriented, and transposed ones train "
        f"without an error; {again} --reference MODEL, a model of the same classes that locates "
        "objects"
    )


class Part(NamedTuple):
    """Maps of consecutive images, read by one thread."""

    ids: np.ndarray  # of images with a usable map
    maps: ScoreMaps | None
    problems: list[tuple[str, str]]  # kind, sentence
    tried: int  # number of images


class UnusableError(Exception):
    """An image has no usable map; the arguments are kind and sentence."""


def probe(images: Images, matching: Matching) -> tuple[int, int]:
    """Find the most frequent (S, k) of up to 64 files spread over the pack.

    Raises UserError if none can be read.
    """
    matched = matching.matched
    if not len(matched):
        shared = np.flatnonzero(matching.rule == SHARED)
        why = "the names of maps and images, without their endings, must be the same"
        if len(shared):
            why = f"several images would have one map, as {images.paths[shared[0]]}; rename them"
        raise UserError(
            f"{matching.root} has no map of any image in {images.root}, as {images.paths[0]}; {why}"
        )
    files, shapes, reason = TensorFiles(), Counter(), ""
    for index in matched[sample_evenly(len(matched), PROBES)]:
        path = matching.file(images.paths[index], matching.rule[index])
        try:
            shapes[map_shape(files.read(path))] += 1
        except (TensorError, OSError) as error:
            reason = reason or f"{path} {error}"
    if not shapes:
        raise UserError(f"{matching.root} holds no maps that can be read: {reason}; copy it again")
    return shapes.most_common(1)[0][0]


def import_pack(
    images: Images,
    pack: Pack,
    out: Path,
    threads: int,
    missing: Literal["raise", "label"] = "raise",
    log: Path | None = None,
) -> tuple[ScoreMapStore, ImportReport]:
    """Import every map of the pack into a store for `images`; return the store and a report.

    Each file is opened once, `threads` files at a time, and at most 2 * threads * 256 maps are in
    memory. A killed import is resumed at its first missing row. Images without a usable map (no
    file, a file that several images match, a damaged file, another shape, a number that is not
    finite, a class out of range) are counted and named after all files were read.

    With `missing` = `raise` they are named in a UserError. `<out>.part` keeps the other maps, so
    the same command reads only these files again. With `label` every cell of such an image names
    its label alone, which is a token's label where there are no maps. All of them are written to
    `log`, one line "kind TAB sentence" each, when all files are read.
    """
    num_classes, report = len(images.class_names), ImportReport()
    if not pack.top_k <= num_classes <= MOST_CLASSES:
        raise UserError(
            f"{images.root} has {num_classes:,} classes; maps of {pack.top_k} classes per cell "
            f"need {pack.top_k} to {MOST_CLASSES:,}"
        )
    writer = ScoreMapWriter(out, pack.header(images), images.paths, images.labels)
    # If a run is killed while it fills in labels, the next run must not take them for maps.
    filled = Path(f"{writer.part}.labeled.npy")
    if filled.exists() and writer.done.any():
        writer.done[read_filled(filled, writer.part, len(images))] = False
    try:
        report.earlier = int(writer.done.sum())
        read_maps(images, pack, writer, threads, report)
        if log is not None:
            with replace_file(log) as part:
                # The bytes of a name stay as they are, also if it is not UTF-8 or the locale ASCII.
                lines = "".join(f"{kind}\t{sentence}\n" for kind, sentence in report.problems)
                part.write_bytes(lines.encode(errors="surrogateescape"))
        if report.problems and missing == "raise":
            raise UserError(
                f"{report}; fix these files and run this again, which reads only them, "
                "or add --missing label: images without a map are then labeled by their class"
            )
        lacking = np.flatnonzero(~writer.done)
        if report.problems:
            # On disk before the first of these rows gets its label.
            # np.save itself would write with C's stdio, and ignore the error of its last write.
            encoded = io.BytesIO()
            np.save(encoded, lacking)
            with replace_file(filled) as path:
                path.write_bytes(encoded.getbuffer())
        for ids in split_runs(lacking, CHUNK):
            writer.write(ids, label_rows(images.labels[ids], num_classes, pack.side, pack.top_k))
        writer.finish()
    finally:
        writer.close()
        # Kept until the store has its name: a run killed before that is resumed.
        if out.exists():
            filled.unlink(missing_ok=True)
    return ScoreMapStore(out), report


def read_filled(path: Path, part: Path, count: int) -> np.ndarray:
    """Read the rows, int64, that a killed run filled with labels; UserError for another file.

    `part` are the rows that were written, and `count` is their number.
    """
    try:
        rows = TensorFiles().read(path)
        if rows.dtype == np.int64 and rows.ndim == 1 and (rows >= 0).all() and (rows < count).all():
            return rows
        reason = "does not hold rows of the images"
    except TensorError as error:
        reason = str(error)
    raise UserError(f"{path} {reason}; remove it and {part}, and run this again")


def read_maps(
    images: Images, pack: Pack, writer: ScoreMapWriter, threads: int, report: ImportReport
) -> None:
    """Read the maps that `writer` lacks, with `threads` threads, and write them."""
    # One for all threads, so the layout of a pickle is found once.
    files, work = TensorFiles(), list(split_runs(np.flatnonzero(~writer.done), CHUNK))
    with (
        ThreadPoolExecutor(threads) as pool,
        # If a write fails, `closing` cancels the parts that have not started.
        closing(
            ordered_map(lambda ids: read_part(images, pack, ids, files), work, pool, 2 * threads)
        ) as parts,
        steps_bar("import maps", len(images), report.earlier) as advance,
    ):
        for part in parts:
            # The writer takes consecutive rows only, and some maps may be missing.
            for ids in split_runs(part.ids, CHUNK):
                writer.write(ids, part.maps.select(np.searchsorted(part.ids, ids)))
            report.problems += part.problems
            report.kept += len(part.ids)
            lost = len(report.problems)
            advance(part.tried, f"{lost:,} without a map" if lost else "")


def read_part(images: Images, pack: Pack, ids: np.ndarray, files: TensorFiles) -> Part:
    """Read the maps of the images `ids`."""
    read, problems = [], []
    for index in ids.tolist():
        try:
            read.append((index, *load_map(images, pack, index, files)))
        except UnusableError as error:
            problems.append(error.args)
    if not read:
        return Part(np.empty(0, np.int64), None, problems, len(ids))
    indices, arrays, windows = zip(*read, strict=True)
    # Maps of several float types are stacked as the widest of them, which holds all numbers.
    logit, cls, lse, wrong = to_rows(np.stack(arrays), len(images.class_names), pack.axes)
    found, kept = np.array(indices), np.ones(len(indices), bool)
    for fault, rows in wrong.items():
        for index in found[rows & kept]:
            file = pack.matching.file(images.paths[index], pack.matching.rule[index])
            problems.append((fault, str(file)))
        kept &= ~rows
    maps = ScoreMaps(logit, cls, lse, np.array(windows, np.float32))
    return Part(found[kept], maps.select(kept), problems, len(ids))


def load_map(images: Images, pack: Pack, index: int, files: TensorFiles) -> tuple[np.ndarray, TLBR]:
    """Load the array and the Window of image `index`; UnusableError if there is no usable map."""
    rule, path = pack.matching.rule[index], images.paths[index]
    if rule in (NONE, SHARED):
        raise UnusableError("no file" if rule == NONE else "one file for several images", path)
    file = pack.matching.file(path, rule)
    try:
        array = files.read(file)
        check_map(array, pack, file, len(images.class_names))
        # Only a squashed image has its Window without a look at the image's size.
        squash = pack.footprint == "squash"
        return array, WHOLE if squash else teacher_window(pack.footprint, *images.size(index))
    except TensorError as error:
        raise UnusableError("damaged or no map", f"{file} {error}") from error
    except OSError as error:
        reason = f"{error.filename or file}: {error.strerror or error}"
        raise UnusableError("not readable", reason) from error


def check_map(array: np.ndarray, pack: Pack, file: Path, num_classes: int) -> None:
    """Raise UnusableError for another shape than the pack's, or floats that round its classes.

    Raises TensorError if the array is not a map.
    """
    shape, wanted, most = map_shape(array), (pack.side, pack.top_k), EXACT[array.itemsize]
    if shape != wanted:
        have, need = (f"{side} x {side} cells of {k} classes" for side, k in (shape, wanted))
        raise UnusableError("another shape", f"{file} has {have}, not {need}")
    if num_classes > most:
        raise UnusableError(
            "classes beyond the exact range of their type",
            f"{file} numbers {num_classes:,} classes in float{array.itemsize * 8}, "
            f"which is exact only to {most:,}",
        )


def label_rows(label_N: np.ndarray, num_classes: int, side: int, top_k: int) -> ScoreMaps:
    """Return rows whose every cell names only the image's label.

    The label has logit 20, the other ranks logit 0.
    """
    # The other ranks are classes 1 to k - 1; where one of them is the label, class 0 replaces it.
    ranks = np.arange(top_k)
    cls_Nk = np.where(ranks == label_N[:, None], 0, ranks)
    cls_Nk[:, 0] = label_N
    logit_k = np.where(ranks == 0, SURE, 0).astype(np.float16)
    shape = (len(label_N), side, side, top_k)
    lse = np.log(np.exp(SURE) + num_classes - 1)
    return ScoreMaps(
        np.broadcast_to(logit_k, shape),
        np.broadcast_to(cls_Nk[:, None, None], shape).astype(np.uint16),
        np.full(shape[:3], lse, np.float16),
        np.tile(np.array(WHOLE, np.float32), (len(label_N), 1)),
    )


def to_published(maps: ScoreMaps) -> np.ndarray:
    """Convert rows to the arrays of TokenLabeling's files: float16 `[N, 2, k, S, S]`.

    They hold logits and class ids, rows before columns, and are exact up to class 2,048. `lse` and
    `window` are dropped.
    """
    parts = [np.moveaxis(part, 3, 1).astype(np.float16) for part in (maps.logit, maps.cls)]
    return np.stack(parts, 1)
