"""Convert a finished store to another form, and verify every row of a store."""

import math
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from densefeed.storage.dataset_names import hash_images, same_images
from densefeed.storage.row_codecs import (
    ErrorSum,
    Form,
    ScoreMaps,
    code_levels,
    pack,
    row_sizes,
    unpack,
)
from densefeed.storage.score_maps import (
    Arrays,
    ScoreMapStore,
    allocate_store,
    dataset_types,
    palette_sizes,
    row_crcs,
)
from densefeed.storage.shard_plan import PLAN, read_plan
from densefeed.storage.store_file import StoreFile, StoreHeader
from densefeed.storage.store_folder import REMEDY, check_local_rows, find_changed, read_manifest
from densefeed.system.errors import UserError
from densefeed.system.files import check_absent, drop_cache, replace_file, write_at
from densefeed.system.object_folder import ObjectFolder
from densefeed.system.progress import bar
from densefeed.system.terminal import print

# Rows converted or copied at once: 7 MB raw at S = 18, k = 5.
CHUNK = 1024
# Bad rows named per file.
NAMED = 10
# Relative rounding error of float16.
SLACK = 2.0**-11

# Chunks of datasets: name, first element, bytes.
Chunks = Iterator[tuple[str, int, bytes]]


# ------------------------------------------------------------------------------- conversion


def check_form(path: Path, header: StoreHeader, form: Form) -> None:
    """Raise UserError for compact rows in another form, which lacks what they have lost."""
    if header.form == "compact" != form:
        raise UserError(f"{path} is compact, which is lossy; convert the store it was made from")


def convert(store: ScoreMapStore, out: Path, form: Form) -> ScoreMapStore:
    """Write the rows of `store` to the file `out` in another form, and return the new store.

    The rows of a folder of the same form are copied. The same rows give the same bytes. `out`
    appears only when it is complete. Raises UserError if `out` exists, if a row is damaged (in a
    conversion also if it is invalid), or if `store` is compact, which is lossy, and `form` is not.
    """
    header = store.header
    check_form(store.path, header, form)
    if header.form == form and not store.path.is_dir():
        raise UserError(f"{store.path} is {form} already; choose another --form")
    if header.form == form:
        return copy(store, out, header, np.arange(len(store)), store.labels, store.paths())
    header = replace(header, form=form)
    known = known_arrays(header, store.labels, store.paths(), store.palette)
    return write_copy(store, out, header, known, encode_chunks(store, form, known))


def copy(
    store: ScoreMapStore,
    out: Path,
    header: StoreHeader,
    rows: np.ndarray,
    labels: np.ndarray,
    paths: list[str],
) -> ScoreMapStore:
    """Write rows of `store` as they are stored to the file `out`, and return the new store.

    `header`, of the form of `store`, `labels` and `paths` are those of the new store. `out` appears
    only when it is complete. Raises UserError if it exists or if a row is damaged.
    """
    known = known_arrays(header, labels, paths, store.palette[rows]) | {"crc32": store.crcs[rows]}
    # That of all rows of the store: it was measured against maps that are not here.
    if store.error:
        known["error"] = np.array(store.error)
    chunks = copy_chunks(store, rows, known.get("start"))
    return write_copy(store, out, header, known, chunks)


def copy_chunks(store: ScoreMapStore, rows: np.ndarray, start: np.ndarray | None) -> Chunks:
    """Yield the datasets of these rows as they are stored, in chunks; `start` of packed rows."""
    for first in bar(range(0, len(rows), CHUNK), "copy, chunks"):
        parts = store.stored(rows[first : first + CHUNK])
        if start is None:
            names = zip(ScoreMaps._fields, parts, strict=True)
            yield from ((name, first, part.tobytes()) for name, part in names)
        else:
            packed, window = parts
            yield "rows", int(start[first]), b"".join(row.tobytes() for row in packed)
            yield "window", first, window.tobytes()


def known_arrays(
    header: StoreHeader, labels: np.ndarray, paths: list[str], palette: np.ndarray
) -> Arrays:
    """Return the datasets that are known before the rows; those of a packed store follow from it.

    `palette` is the palette sizes.
    """
    names, form = np.array([path.encode() for path in paths]), header.form
    known = {"label": labels, "path": names, "palette": palette, "done": np.ones(len(paths))}
    if form != "raw":
        size = row_sizes(form, header.side, header.top_k, palette)
        known["start"] = np.cumsum(size) - size
    if form == "compact":
        known["levels"] = code_levels(header.absent)
    return known


def write_copy(
    store: ScoreMapStore, out: Path, header: StoreHeader, known: Arrays, chunks: Chunks
) -> ScoreMapStore:
    """Write rows of `store` to `out` and return the new store.

    `known` are the arrays that are known before, `chunks` the other ones. `out` appears only when
    it is complete. Raises UserError if `out` exists, or if labels or paths of `store` are damaged.
    """
    check_absent(out)
    if not store.names_match():
        raise UserError(
            f"{store.path}: its labels and paths do not match their checksum; copy it again or "
            "relabel"
        )
    # All sizes follow from the palettes, so a full disk shows before the first row is encoded.
    packed = 0
    if header.form != "raw":
        packed = int(row_sizes(header.form, header.side, header.top_k, known["palette"]).sum())
    types = dataset_types(header, len(known["label"]), known["path"].dtype.str, (packed,))
    with replace_file(out) as part:
        with open(part, "r+b", buffering=0) as file:
            offsets = allocate_store(file.fileno(), header, types, known)
            crcs = {name: zlib.crc32(known[name].astype(types[name][0])) for name in known}
            for name, first, content in chunks:
                dtype, shape = types[name]
                stride = math.prod(shape[1:], start=np.dtype(dtype).itemsize)
                write_at(file.fileno(), content, offsets[name] + first * stride)
                # The chunks of a dataset follow each other.
                crcs[name] = zlib.crc32(content, crcs.get(name, 0))
            os.fsync(file.fileno())
            drop_cache(file.fileno())
        read_back(part, out, crcs)
        # It may have appeared meanwhile.
        check_absent(out)
    return ScoreMapStore(out)


def read_back(part: Path, out: Path, crcs: dict[str, int]) -> None:
    """Read a finished file; UserError, which names `out`, if a dataset has another CRC-32."""
    written = StoreFile(part)
    for name, expected in crcs.items():
        crc = 0
        for _, block in written.blocks(name):
            crc = zlib.crc32(block, crc)
        if crc != expected:
            raise UserError(
                f"{out}: {name} is not on disk as it was written; check the disk, and run the "
                "same command again"
            )


def encode_chunks(store: ScoreMapStore, form: Form, known: Arrays) -> Chunks:
    """Yield the datasets of a store in another form, in chunks: name, first element, bytes."""
    header, error = store.header, ErrorSum(store.header.num_classes, store.header.absent)
    for first in bar(range(0, len(store), CHUNK), f"{form}, chunks"):
        ids = np.arange(first, min(first + CHUNK, len(store)))
        maps = store.checked_rows(ids)
        # Readers compute the lengths of packed rows from the palette sizes: a wrong one would move
        # all rows after it.
        other = palette_sizes(maps.cls) != store.palette[ids]
        if other.any():
            fault = "another number of classes than its palette size"
            raise store.invalid_map(int(ids[other.argmax()]), fault)
        if form == "raw":
            for name, part in maps._asdict().items():
                yield name, first, part.tobytes()
            yield "crc32", first, row_crcs(maps).tobytes()
            continue
        rows = [np.frombuffer(row, np.uint8) for row in pack(form, header.absent, maps)]
        yield "rows", int(known["start"][first]), b"".join(rows)
        yield "window", first, maps.window.tobytes()
        yield "crc32", first, row_crcs((rows, maps.window)).tobytes()
        # The error is measured on the rows as a reader will see them.
        if form == "compact":
            palette = store.palette[ids]
            back = unpack(form, header.side, header.top_k, known["levels"], palette, rows)
            error.add(maps, ScoreMaps(*back, maps.window))
    # It is over all rows, so it is known only now.
    if form == "compact":
        yield "error", 0, np.array(error.result(), "<f8").tobytes()


def convert_file(file: Path, /, form: Form, out: Path) -> None:
    """Write a store in another form.

    `lossless` keeps every bit, `compact` keeps 8 bits of each probability, `raw` undoes `lossless`.

    Args:
        file: score maps, a file or a finished folder.
        form: the form to write.
        out: the file to write, which must not exist.
    """
    store = convert(ScoreMapStore(file), out, form)
    print(summary(store))


def summary(store: ScoreMapStore) -> str:
    """Describe a store in one line, with the error of a compact one."""
    header = store.header
    size = store.size / len(store)
    rest = " and background" if header.absent == "background" else ""
    line = (
        f"{store.path}: {len(store):,} {header.form} maps of {header.side} x {header.side} cells, "
        f"top {header.top_k} of {header.num_classes:,} classes{rest}, at most {store.max_palette} "
        f"in a map, {size:,.0f} bytes per image"
    )
    return f"{line}; {store.error}" if store.error else line


# ------------------------------------------------------------------------------- verification


def verify(store: ScoreMapStore) -> dict[int, list[str]]:
    """Find the faults of each bad row, by row: a wrong checksum, or values no labeling writes."""
    faults = {}
    for ids, stored, maps in store.chunks("verify"):
        damaged = row_crcs(stored) != store.crcs[ids]
        wrong = store.impossible(ids, maps) | disorder(store, ids, maps)
        for n in np.flatnonzero(damaged | np.any(list(wrong.values()), axis=0)).tolist():
            # The values of a damaged row mean nothing.
            found = ["does not match its checksum"]
            if not damaged[n]:
                found = [f"holds {fault}" for fault, rows in wrong.items() if rows[n]]
            faults[int(ids[n])] = found
    return faults


def disorder(store: ScoreMapStore, ids: np.ndarray, maps: ScoreMaps) -> dict[str, np.ndarray]:
    """Find faults that readers do not detect and no labeling writes, and the rows with each.

    Returns bool `[len(ids)]` by the name of the fault.
    """
    header, count = store.header, len(ids)
    # Numbers that are not finite are a fault of their own.
    with np.errstate(all="ignore"):
        logit, lse = maps.logit.astype(np.float64), maps.lse.astype(np.float64)[..., None]
        rising = (logit[..., 1:] > logit[..., :-1]).reshape(count, -1).any(1)
        over = np.zeros(count, bool)
        if header.absent != "zero-logit":
            # Logit and logsumexp were both rounded to float16. Compact probabilities were rounded
            # to half a step of 1/255 between their square roots.
            most = np.exp(SLACK * (abs(lse[..., 0]) + abs(logit).max(-1))) + 1e-3
            if header.form == "compact":
                most += (header.top_k**0.5 + 1) / 255
            over = (np.exp(logit - lse).sum(-1) > most).reshape(count, -1).any(1)
    return {
        "logits that do not descend": rising,
        "probabilities that sum to more than 1": over,
        "fewer classes than its palette size": palette_sizes(maps.cls) < store.palette[ids],
    }


def has_other_rows(store: ScoreMapStore) -> bool | None:
    """Whether the rows are not those of the fingerprint, by their labels and paths in order.

    None where that is not known: the fingerprint also covers the sizes of sampled files, which are
    in the plan of a labeling. A file or a copy has no plan, and another labeling may have begun.
    """
    if not store.path.is_dir() or not (store.path / PLAN).exists():
        return None
    plan = read_plan(ObjectFolder(store.path))
    if plan.header.fingerprint != store.header.fingerprint:
        return None
    found = hash_images(store.paths(), store.labels, plan.sizes.values())
    return not same_images(found, store.header.fingerprint)


def verify_files(files: tuple[Path, ...], /) -> None:
    """Read every row of score map files and name the first bad rows of each.

    If any row is bad, the exit code is 2, after the last file.

    Args:
        files: score maps, files or finished folders.
    """
    bad = []
    if not files:
        raise UserError("no file of score maps was named; name one or several")
    for path in files:
        check_local_rows(path)
        changed = {}
        with suppress(UserError):
            changed = find_changed(path, read_manifest(path)) if path.is_dir() else {}
        for shard, fault in changed.items():
            print(f"{shard} {fault}; {'remove it and ' * shard.exists()}{REMEDY}")
        try:
            store = ScoreMapStore(path)
            faults, named = verify(store), store.names_match()
            other_rows = has_other_rows(store) if named else False
        except UserError as error:
            bad.append(str(path))
            # What to do about a shard that cannot be opened was said.
            if not changed:
                print(error)
            continue
        print(summary(store))
        parts = [] if named else ["labels or paths"]
        if parts:
            print(f"{path}: its labels and paths do not match their checksum")
        parts += [f"{len(changed):,} shards"] * bool(changed)
        if other_rows:
            parts.append("rows of other images")
            print(f"{path}: its rows are not the images of its fingerprint in order; {REMEDY}")
        for row, found in list(faults.items())[:NAMED]:
            print(f"{path}: row {row} ({store.image_path(row)}) {' and '.join(found)}")
        if len(faults) > NAMED:
            print(f"{path}: and {len(faults) - NAMED:,} more bad rows")
        parts += [f"{len(faults):,} of {len(store):,} rows"] * bool(faults)
        if parts:
            bad.append(f"{path} ({', '.join(parts)})")
        else:
            rest = "; `densefeed audit` with --data compares the order of its rows with the images"
            print(f"{path}: no faults{rest if other_rows is None else ''}")
    if bad:
        raise UserError(
            f"faults were found in {', '.join(bad)}; they are listed above, copy the file again or "
            "relabel, and of a folder do what is said of each shard"
        )
