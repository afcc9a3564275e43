"""What is done to a finished store: looking for faults in every row, and writing it anew in another
form.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from densefeed.storage.row_codecs import (
    ErrorSum,
    Form,
    ScoreMaps,
    levels_of,
    pack,
    row_sizes,
    unpack,
)
from densefeed.storage.score_maps import (
    ScoreMapStore,
    lay_out,
    map_datasets,
    packed_types,
    palette_sizes,
    row_crcs,
    row_types,
    whole_types,
)
from densefeed.system.errors import UserError
from densefeed.system.files import name_errors, replace_file
from densefeed.system.progress import bar

CHUNK = 1024  # rows converted at once: 7 MB raw at S = 18, k = 5
NAMED = 10  # bad rows named for each file
SLACK = 2.0**-11  # a rounding to float16, relative


# ------------------------------------------------------------------------------------------------ other forms


def convert(store: ScoreMapStore, out: Path, form: Form) -> ScoreMapStore:
    """Write the rows of `store` in another form to `out`, and return that store. The same rows give
    the same bytes.

    UserError if `out` is there already, if a row is damaged or impossible, or if the rows are
    compact, from which nothing else can be made. `out` appears when it is whole.
    """
    header, (side, top_k) = store.header, (store.header.side, store.header.top_k)
    if header.form == "compact":
        raise UserError(
            f"{store.path} is compact, and what that lost cannot be had back; convert the store it was made of"
        )
    if header.form == form:
        raise UserError(f"{store.path} is {form} already; choose another --form")
    if out.exists():
        raise UserError(f"{out} exists already; remove it or choose another --out")
    count, paths = len(store), np.array([path.encode() for path in store.paths()])
    types = row_types(side, top_k) if form == "raw" else packed_types()
    types = {name: (dtype, (count, *shape)) for name, (dtype, shape) in types.items()} | {
        "path": (paths.dtype.str, (count,))
    }
    known = {
        "label": store.labels,
        "path": paths,
        "palette": store.palette,
        "done": np.ones(count, np.uint8),
    }
    if form != "raw":
        size = row_sizes(form, side, top_k, store.palette)
        types |= {"rows": ("|u1", (int(size.sum()),))} | whole_types(form)
        known |= {"start": np.cumsum(size) - size}
    if form == "compact":
        known |= {"levels": levels_of(header.absent)}
    with replace_file(out) as part:
        lay_out(part, replace(header, form=form), types, known)
        _, arrays, offsets = map_datasets(part)
        strides = {name: array[:1].nbytes for name, array in arrays.items()}
        with open(part, "r+b", buffering=0) as file:
            for name, first, content in columns(store, form, known):
                with name_errors(part):
                    os.pwrite(file.fileno(), content, offsets[name] + first * strides[name])
    return ScoreMapStore(out)


def columns(
    store: ScoreMapStore, form: Form, known: dict[str, np.ndarray]
) -> Iterator[tuple[str, int, bytes]]:
    """The datasets of a store in another form, piece by piece: name, first element, bytes."""
    header, error = store.header, ErrorSum(store.header.num_classes, store.header.absent)
    for first in bar(range(0, len(store), CHUNK), f"{form}, chunks"):
        ids = np.arange(first, min(first + CHUNK, len(store)))
        maps = store.rows(ids)
        wrong = store.impossible(ids, maps) | {
            "another number of classes than it says": palette_sizes(maps.cls) != store.palette[ids]
        }
        for what, bad in wrong.items():
            if bad.any():
                row = int(ids[bad.argmax()])
                raise UserError(
                    f"{store.path}: the map of {store.path_of(row)} (row {row}) holds {what}; label the images again"
                )
        if form == "raw":
            yield from (
                (name, first, np.ascontiguousarray(part).tobytes())
                for name, part in maps._asdict().items()
            )
            yield "crc32", first, row_crcs(maps).tobytes()
            continue
        rows = [np.frombuffer(row, np.uint8) for row in pack(form, header.absent, maps)]
        yield "rows", int(known["start"][first]), b"".join(row.data for row in rows)
        yield "window", first, np.ascontiguousarray(maps.window).tobytes()
        yield "crc32", first, row_crcs((rows, maps.window)).tobytes()
        if form == "compact":
            back = unpack(
                form, header.side, header.top_k, known["levels"], store.palette[ids], rows
            )
            error.add(maps, ScoreMaps(*back, maps.window))
    if form == "compact":
        yield "error", 0, np.array(error.result(), "<f8").tobytes()


def convert_file(file: Path, /, form: Form, out: Path) -> None:
    """Write a store in another form: `lossless` keeps every bit, `compact` 8 bits of a probability,
    `raw` undoes `lossless`.
    """
    store = convert(ScoreMapStore(file), out, form)
    print(summary(store))


def summary(store: ScoreMapStore) -> str:
    """What a store holds, in a line, with the error of a compact one."""
    header = store.header
    size = store.path.stat().st_size / len(store)
    said = (
        f"{store.path}: {len(store):,} {header.form} maps of {header.side} x {header.side} cells, top {header.top_k} of "
        f"{header.num_classes:,} classes, at most {store.max_palette} in a map, {size:,.0f} bytes an image"
    )
    return f"{said}; {store.error}" if store.error else said


# ------------------------------------------------------------------------------------------------ verifying


def verify(store: ScoreMapStore) -> dict[int, list[str]]:
    """What is wrong with each bad row of a store, rows ascending: its checksum, or values, order
    and counts no labeling gives.
    """
    faults: dict[int, list[str]] = {}
    for ids, stored, maps in store.chunks("verify"):
        damaged = row_crcs(stored) != store.crcs[ids]
        wrong = store.impossible(ids, maps) | disorder(store, ids, maps)
        for n in np.flatnonzero(damaged | np.any(list(wrong.values()), axis=0)).tolist():
            # What a damaged row says is nobody's word.
            said = (
                ["does not match its checksum"]
                if damaged[n]
                else [f"holds {what}" for what, rows in wrong.items() if rows[n]]
            )
            faults[int(ids[n])] = said
    return faults


def disorder(store: ScoreMapStore, ids: np.ndarray, maps: ScoreMaps) -> dict[str, np.ndarray]:
    """What a reader does not stumble over and a labeling does not write, and which of the rows
    `ids` hold it: bool `[len(ids)]`.
    """
    header, count = store.header, len(ids)
    with np.errstate(all="ignore"):  # numbers that are not finite have a fault of their own
        logit, lse = maps.logit.astype(np.float64), maps.lse.astype(np.float64)[..., None]
        rising = (logit[..., 1:] > logit[..., :-1]).reshape(count, -1).any(1)
        over = np.zeros(count, bool)
        if header.absent == "tail":
            # Both numbers were rounded to float16; compact probabilities to half a step of 255
            # between square roots.
            most = np.exp(SLACK * (abs(lse[..., 0]) + abs(logit).max(-1))) + 1e-3
            if header.form == "compact":
                most += (header.top_k**0.5 + 1) / 255
            over = (np.exp(logit - lse).sum(-1) > most).reshape(count, -1).any(1)
    label = store.labels[ids]
    return {
        "logits that do not descend": rising,
        "probabilities that sum to more than 1": over,
        "fewer classes than its palette says": palette_sizes(maps.cls) < store.palette[ids],
        f"a label outside the {len(header.class_names)} classes": (label < 0)
        | (label >= len(header.class_names)),
    }


def verify_files(files: tuple[Path, ...], /) -> None:
    """Read every row and name the first bad ones of each file; UserError, after all files, if there
    is one.
    """
    bad = []
    if not files:
        raise UserError("no file of score maps was named; name one or several")
    for path in files:
        try:
            store = ScoreMapStore(path)
            faults = verify(store)
        except UserError as error:
            print(error)
            bad.append(str(path))
            continue
        print(summary(store))
        what = [] if store.names_sound() else ["labels or paths"]
        if what:
            print(f"{path}: its labels and paths do not match their checksum")
        for row, said in list(faults.items())[:NAMED]:
            print(f"{path}: row {row} ({store.path_of(row)}) {' and '.join(said)}")
        if len(faults) > NAMED:
            print(f"{path}: and {len(faults) - NAMED:,} more bad rows")
        what += [f"{len(faults):,} of {len(store):,} rows"] * bool(faults)
        if what:
            bad.append(f"{path} ({', '.join(what)})")
        else:
            print(f"{path}: sound")
    if bad:
        raise UserError(
            f"faults were found in {', '.join(bad)}; the lines above name them, copy the file again or relabel"
        )
