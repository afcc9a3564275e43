"""Published score maps, one small file an image, into a store: TokenLabeling's and ReLabel's trees,
and folders of NumPy arrays.

A pack is a folder `<class>/<name>.pt` (or `.npy`) beside an ImageFolder of the same classes and
names. Each file holds one array `[2, k, S, S]`: [0] the logits of the cell's top k classes, [1]
their numbers, as floats. TokenLabeling's are float16 with S = 18 and k = 5, ReLabel's float32 with
S = 15. What a class not named has is by convention logit 0 (`absent` = `zero-logit`); the logsumexp
stored is that of this convention, since packs do not tell the teacher's own.

The files do not say what part of an image they cover, nor which axis comes first, so whoever
imports them declares it.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple, TextIO

import numpy as np

from densefeed.storage.geometry import WHOLE, Footprint, teacher_window
from densefeed.storage.images import Images
from densefeed.storage.score_maps import (
    ScoreMaps,
    ScoreMapStore,
    ScoreMapWriter,
    StoreHeader,
    not_finite,
    repeats,
    undone_batches,
)
from densefeed.storage.tensor_files import TensorError, TensorFiles
from densefeed.system.errors import UserError
from densefeed.system.files import replace_file
from densefeed.system.prefetch import ordered_map
from densefeed.system.progress import steps_bar

# N images   S cells along a side of a map   k classes a cell   K classes

Axes = Literal["row-column", "column-row"]
SUFFIXES = (".pt", ".npy")
CHUNK = 256  # files read at once by a thread: 1.8 MB of maps at S = 18, k = 5
PROBES = 64  # files that are looked at to learn S and k
NAMED = 5  # of each kind of problem, in messages
# by bytes of a float: up to here it holds every whole number
EXACT = {2: 2**11, 4: 2**24, 8: 2**53}
# logit of the image's label where there is no map: probability 1 - 2e-6 among 1,000 classes
SURE = 20.0
MOST_CLASSES = 65535


class Published(NamedTuple):
    """What is known of a published pack that its files do not say (reference: TokenLabeling's and
    ReLabel's code).
    """

    teacher: str
    input_size: int  # of the teacher, pixels
    footprint: Footprint


PUBLISHED = {  # by (S, k)
    (18, 5): Published("dm_nfnet_f6", 576, "center-crop"),
    (15, 5): Published("tf_efficientnet_l2_ns_475", 475, "squash"),
}


# ------------------------------------------------------------------------- which file belongs to which image

NONE, WHOLE_STEM, FIRST_DOT, SHARED = range(4)


@dataclass
class Matching:
    """The file of each image: `rule` uint8 `[N]` is one of NONE (there is none), WHOLE_STEM
    (`a.b.jpg` has `a.b.pt`), FIRST_DOT (`a.b.jpg` has `a.pt`, as published code names it) and
    SHARED (so has another image: nobody knows whose it is).
    """

    root: Path
    suffix: str  # .pt | .npy
    rule: np.ndarray
    extra: int = 0  # files that belong to no image
    extra_names: list[str] = field(default_factory=list)  # the first of them

    def file(self, path: str, rule: int) -> Path:
        """The file of an image of this path."""
        return self.root / (stem_of(path, rule == WHOLE_STEM) + self.suffix)


def stem_of(path: str, whole: bool) -> str:
    """`class/name` of an image's path: up to its last dot, or, as published code cuts, to the first
    of `class/file`.
    """
    last_two = "/".join(path.replace(os.sep, "/").split("/")[-2:])
    return os.path.splitext(last_two)[0] if whole else last_two.partition(".")[0]


def match(images: Images, labels: Path) -> Matching:
    """Find every image's file, folder by folder. UserError if `labels` is no folder, or holds no
    maps or two kinds of files.
    """
    if not labels.is_dir():
        raise UserError(
            f"{labels} is not a folder; give the folder of class folders with .pt or .npy files in it"
        )
    kinds: Counter = Counter()
    # where published code looks if a class folder has a dot in its name
    at_root = listing(labels, "", kinds)
    folders = defaultdict(list)
    for index, path in enumerate(images.paths):
        folders[stem_of(path, True).rpartition("/")[0]].append(index)
    found = Matching(labels, "", np.zeros(len(images), np.uint8))
    root_claims: dict[str, list[int]] = defaultdict(list)

    def leave(unclaimed: set[str]) -> None:
        found.extra += len(unclaimed)
        found.extra_names += sorted(unclaimed)[: NAMED - len(found.extra_names)]

    for folder, members in folders.items():
        there, claims = listing(labels, folder, kinds) if folder else set(), defaultdict(list)
        for index in members:
            for rule in (WHOLE_STEM, FIRST_DOT):
                stem = stem_of(images.paths[index], rule == WHOLE_STEM)
                if stem in there or stem in at_root:
                    found.rule[index] = rule
                    (claims if stem in there else root_claims)[stem].append(index)
                    break
        share(found, claims)
        leave(there - claims.keys())
    share(found, root_claims)
    leave(at_root - root_claims.keys())
    for entry in sorted(os.scandir(labels), key=lambda entry: entry.name):
        if entry.is_dir() and entry.name not in folders:
            leave(listing(labels, entry.name, kinds))
    if not kinds:
        raise UserError(
            f"{labels} holds no .pt or .npy files in class folders; give the folder above the class folders"
        )
    if len(kinds) > 1:
        raise UserError(f"{labels} holds both .pt and .npy files; move one kind away")
    (found.suffix,) = kinds
    return found


def share(found: Matching, claims: dict[str, list[int]]) -> None:
    """Images that claim one file are SHARED."""
    for indices in claims.values():
        if len(indices) > 1:
            found.rule[indices] = SHARED


def listing(root: Path, folder: str, kinds: Counter) -> set[str]:
    """`folder/stem` of the maps in a folder of `root`, which may not be there; their suffixes are
    counted in `kinds`.
    """
    stems = set()
    try:
        with os.scandir(root / folder) as entries:
            for entry in entries:
                stem, suffix = os.path.splitext(entry.name)
                if suffix in SUFFIXES:
                    stems.add(f"{folder}/{stem}" if folder else stem)
                    kinds[suffix] += 1
    except (FileNotFoundError, NotADirectoryError):
        pass
    return stems


# ------------------------------------------------------------------------- what a file holds


def shape_of(array: np.ndarray) -> tuple[int, int]:
    """(S, k) of a map `[2, k, S, S]`; TensorError if it is no such thing."""
    if array.dtype.kind != "f" or array.dtype.itemsize not in EXACT:
        raise TensorError(f"holds {array.dtype}, which is none of float16, float32, float64")
    if array.ndim != 4 or array.shape[0] != 2 or array.shape[2] != array.shape[3] or not array.size:
        raise TensorError(f"has the shape {list(array.shape)}, and a map has [2, k, S, S]")
    return array.shape[2], array.shape[1]


def to_rows(
    array_N2kSS: np.ndarray, num_classes: int, axes: Axes = "row-column"
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Maps as published into `logit` float16 `[N, S, S, k]` descending, `cls` uint16 alike, `lse`
    float16 `[N, S, S]`, and which of them, bool `[N]`, no teacher can have said, by what is wrong
    with them.

    `axes` says which of the last two comes first. Numbers of float32 are rounded to float16; ranks
    that do not descend are put in order. `lse` is ln(K - k + sum e^logit): the classes not named at
    logit 0.
    """
    if axes == "column-row":
        array_N2kSS = array_N2kSS.swapaxes(3, 4)
    # each N S S k
    value, number = np.ascontiguousarray(np.moveaxis(array_N2kSS, 2, 4).swapaxes(0, 1))
    N, k = len(value), value.shape[3]
    with np.errstate(over="ignore", invalid="ignore"):
        logit, cls = value.astype(np.float16), number.astype(np.uint16)
        fractional = (cls != number).reshape(N, -1).any(1)
    rising = (logit[..., 1:] > logit[..., :-1]).reshape(N, -1).any(1)
    infinite = not_finite(logit.reshape(N, -1))
    for row in np.flatnonzero(rising & ~infinite):
        order = np.argsort(-logit[row], axis=-1, kind="stable")
        logit[row], cls[row] = (np.take_along_axis(part[row], order, -1) for part in (logit, cls))
    with np.errstate(over="ignore", invalid="ignore"):
        peak = (
            np.maximum(logit[..., 0], 0).astype(np.float32)
            if num_classes > k
            else logit[..., 0].astype(np.float32)
        )
        total = np.exp(logit.astype(np.float32) - peak[..., None]).sum(-1) + (
            num_classes - k
        ) * np.exp(-peak)
        lse = (peak + np.log(total)).astype(np.float16)
    beyond = f"a class number that is none of 0 to {num_classes - 1:,}, the classes of the images"
    wrong = {
        "a logit that is NaN, or no finite number in float16": infinite,
        beyond: fractional | (cls.reshape(N, -1).max(1) >= num_classes),
    }
    wrong["a class twice in one cell"] = repeats(cls) & ~np.logical_or.reduce(list(wrong.values()))
    return logit, cls, lse, wrong


# ------------------------------------------------------------------------- the pass


@dataclass
class Report:
    """What an import met. `problems` counts, by kind, the images without a usable map; `examples`
    names the first of each kind.
    """

    kept: int = 0  # images whose map was read in this pass
    earlier: int = 0  # in the passes before, which were stopped
    problems: Counter = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    log: TextIO | None = None  # where every one of them is written, a line each

    def add(self, kind: str, sentence: str) -> None:
        """One image more without a usable map."""
        self.problems[kind] += 1
        if self.log is not None:
            print(kind, sentence, sep="\t", file=self.log, flush=True)
        if len(self.examples[kind]) < NAMED:
            self.examples[kind].append(sentence)

    def __str__(self) -> str:
        kinds = []
        for kind, count in self.problems.most_common():
            named = "; ".join(self.examples[kind]) + ("; ..." if count > NAMED else "")
            kinds.append(f"{kind}: {count:,} ({named})")
        return f"{self.problems.total():,} images have no usable map - {', '.join(kinds)}"


@dataclass(frozen=True, kw_only=True)
class Pack:
    """A pack and what is declared of it."""

    matching: Matching
    side: int  # S
    top_k: int  # k
    footprint: Footprint  # what part of each image a map covers
    axes: Axes  # which of a file's last two axes comes first
    teacher: str
    input_size: int  # of the teacher, pixels

    def header(self, images: Images) -> StoreHeader:
        """Of the store; it names what was declared, so that a killed import goes on with the same
        declarations only.
        """
        name = self.matching.root.resolve().name
        return StoreHeader(
            side=self.side,
            top_k=self.top_k,
            num_classes=len(images.class_names),
            absent="zero-logit",
            teacher=f"{self.teacher} (pack {name}, axes {self.axes})",
            input_size=self.input_size,
            geometry=self.footprint,
            fingerprint=images.fingerprint(),
            class_names=tuple(images.class_names),
        )


class Part(NamedTuple):
    """What a thread made of neighboring images."""

    ids: np.ndarray  # of those whose map is good
    maps: ScoreMaps | None
    problems: list[tuple[str, str]]  # kind, sentence
    tried: int


def probe(images: Images, matching: Matching) -> tuple[int, int]:
    """(S, k) of most of the maps, of up to 64 files over the whole pack. UserError if none can be
    read.
    """
    matched = np.flatnonzero((matching.rule == WHOLE_STEM) | (matching.rule == FIRST_DOT))
    if not len(matched):
        raise UserError(
            f"{matching.root} has no map of any image in {images.root}; class folders and names must be the same in both"
        )
    files, forms, reason = TensorFiles(), Counter(), ""
    for index in matched[np.linspace(0, len(matched) - 1, min(len(matched), PROBES)).astype(int)]:
        path = matching.file(images.paths[index], matching.rule[index])
        try:
            forms[shape_of(files.read(path))] += 1
        except (TensorError, OSError) as error:
            reason = reason or f"{path} {error}"
    if not forms:
        raise UserError(f"{matching.root} holds no maps that can be read: {reason}; copy it again")
    return forms.most_common(1)[0][0]


def import_pack(
    images: Images,
    pack: Pack,
    out: Path,
    threads: int,
    missing: Literal["raise", "label"] = "raise",
    log: TextIO | None = None,
) -> tuple[ScoreMapStore, Report]:
    """Every map of the pack into a store for `images`; the finished store, and what was met.

    Each file is opened once, `threads` of them at a time, and at most 2 * threads * 256 maps are in
    memory. A killed import goes on at its first undone row. Images without a usable map (no file,
    one that several images ask for, a damaged one, another shape, a number that is not finite, a
    class there is not) are counted and named when all files were tried: with `raise` in a
    UserError, while `<out>.part` keeps the others, so that the same command tries only these again;
    with `label` each cell of such a map names the image's own label alone, as a token's label is
    where there are no maps. All of them are written to `log`, kind TAB what.
    """
    num_classes, report = len(images.class_names), Report(log=log)
    if threads < 1:
        raise UserError("--threads must be at least 1")
    if not pack.top_k <= num_classes <= MOST_CLASSES:
        raise UserError(
            f"{images.root} has {num_classes:,} classes; maps of {pack.top_k} classes a cell need {pack.top_k} to {MOST_CLASSES:,}"
        )
    writer = ScoreMapWriter(out, pack.header(images), images.paths, images.labels)
    # What a run wrote that was killed while it filled in labels must not pass for maps in the next.
    filled = Path(f"{writer.part}.labeled.npy")
    if filled.exists() and writer.done.any():
        writer.done[np.load(filled, allow_pickle=False)] = False
    try:
        report.earlier = int(writer.done.sum())
        files, work = TensorFiles(), list(undone_batches(writer.done, CHUNK))

        def load(ids: np.ndarray) -> Part:
            return read_part(images, pack, ids, files)

        with (
            ThreadPoolExecutor(threads) as pool,
            closing(ordered_map(load, work, pool, ahead=2 * threads)) as parts,
            steps_bar("import maps", len(images), report.earlier) as advance,
        ):
            for part in parts:
                for rows in runs(part.ids):
                    writer.write(part.ids[rows], ScoreMaps(*(column[rows] for column in part.maps)))
                for kind, sentence in part.problems:
                    report.add(kind, sentence)
                report.kept += len(part.ids)
                advance(
                    part.tried,
                    f"{report.problems.total():,} without a map" if report.problems else "",
                )
        if report.problems and missing == "raise":
            raise UserError(
                f"{report}; mend these files and run this again, which reads only them, or add --missing label: "
                "images without a map are then labeled by their class folder"
            )
        if report.problems:
            with replace_file(filled) as path, open(path, "wb") as file:
                np.save(file, np.flatnonzero(~writer.done))
        for ids in list(undone_batches(writer.done, CHUNK)):
            writer.write(ids, label_rows(images.labels[ids], num_classes, pack.side, pack.top_k))
        writer.finish()
        filled.unlink(missing_ok=True)
    finally:
        writer.close()
    return ScoreMapStore(out), report


def runs(ids: np.ndarray) -> Iterator[slice]:
    """Where `ids`, ascending, are neighbors."""
    ends = [0, *(np.flatnonzero(np.diff(ids) > 1) + 1).tolist(), len(ids)]
    return (slice(start, stop) for start, stop in pairwise(ends) if start < stop)


def read_part(images: Images, pack: Pack, ids: np.ndarray, files: TensorFiles) -> Part:
    """Read the maps of some images."""
    num_classes, problems = len(images.class_names), []
    read: dict[np.dtype, list[tuple[int, np.ndarray, tuple[float, ...]]]] = defaultdict(list)
    for index in ids.tolist():
        rule, path = pack.matching.rule[index], images.paths[index]
        if rule in (NONE, SHARED):
            problems.append(("no file" if rule == NONE else "one file for several images", path))
            continue
        file = pack.matching.file(path, rule)
        try:
            array = files.read(file)
            form = shape_of(array)
            if form != (pack.side, pack.top_k):
                have, most = (
                    f"{side} x {side} cells of {top_k} classes"
                    for side, top_k in (form, (pack.side, pack.top_k))
                )
                problems.append(("another shape", f"{file} has {have}, not {most}"))
            elif num_classes > EXACT[array.itemsize]:
                bits, most = array.itemsize * 8, EXACT[array.itemsize]
                lost = f"{file} numbers {num_classes:,} classes in float{bits}, which is exact only to {most:,}"
                problems.append(("classes beyond the exact range of their type", lost))
            else:
                read[array.dtype].append((index, array, window(images, index, pack.footprint)))
        except TensorError as error:
            problems.append(("damaged or no map", f"{file} {error}"))
        except OSError as error:
            problems.append(
                ("not readable", f"{error.filename or file}: {error.strerror or error}")
            )
    good, columns = [], []
    for members in read.values():  # one type at a time; a pack has only one
        indices, arrays, windows = zip(*members, strict=True)
        logit, cls, lse, wrong = to_rows(np.stack(arrays), num_classes, pack.axes)
        kept = np.ones(len(indices), bool)
        for what, rows in wrong.items():
            for row in np.flatnonzero(rows & kept):
                path = images.paths[indices[row]]
                problems.append(
                    (what, str(pack.matching.file(path, pack.matching.rule[indices[row]])))
                )
            kept &= ~rows
        good.append(np.array(indices)[kept])
        columns.append(
            ScoreMaps(*(part[kept] for part in (logit, cls, lse, np.array(windows, np.float32))))
        )
    if not good:
        return Part(np.empty(0, np.int64), None, problems, len(ids))
    found, order = np.concatenate(good), np.argsort(np.concatenate(good))
    maps = ScoreMaps(*(np.concatenate(parts)[order] for parts in zip(*columns, strict=True)))
    return Part(found[order], maps, problems, len(ids))


def window(images: Images, index: int, footprint: Footprint) -> tuple[float, float, float, float]:
    """The Window of a map. A center crop's depends on the image's size."""
    return WHOLE if footprint == "squash" else teacher_window(footprint, *images.size(index))


def label_rows(label_N: np.ndarray, num_classes: int, side: int, top_k: int) -> ScoreMaps:
    """Rows whose every cell names the image's label alone: as sure of it as float32 is, the other
    ranks at logit 0.
    """
    # of 0 .. k-1 the label's own place goes to class 0 instead
    others = np.tile(np.arange(top_k), (len(label_N), 1))
    cls_Nk = np.concatenate([label_N[:, None], others[:, 1:]], 1)
    cls_Nk[:, 1:] = np.where(cls_Nk[:, 1:] == label_N[:, None], 0, cls_Nk[:, 1:])
    logit_k = np.zeros(top_k, np.float16)
    logit_k[0] = SURE
    shape = (len(label_N), side, side, top_k)
    lse = np.log(np.exp(SURE) + num_classes - 1)
    return ScoreMaps(
        np.broadcast_to(logit_k, shape),
        np.broadcast_to(cls_Nk[:, None, None], shape).astype(np.uint16),
        np.full(shape[:3], lse, np.float16),
        np.tile(np.array(WHOLE, np.float32), (len(label_N), 1)),
    )


def to_published(maps: ScoreMaps) -> np.ndarray:
    """Rows as TokenLabeling's files hold them: float16 `[N, 2, k, S, S]`, logits and class numbers,
    rows before columns.

    Exact up to class 2,048. `lse` and `window` have no place there.
    """
    return np.stack(
        [np.moveaxis(part, 3, 1).astype(np.float16) for part in (maps.logit, maps.cls)], 1
    )
