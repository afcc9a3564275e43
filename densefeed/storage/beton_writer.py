"""Write FFCV datasets (.beton) image by image, with resume after a kill."""

import hashlib
import json
import os
import weakref
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from densefeed.storage.beton import CHUNK, close_all
from densefeed.storage.beton_format import (
    ALIGN,
    ALLOCATION,
    FIELD,
    HEADER,
    INT,
    JPEG,
    MARK,
    NOTES,
    NOTES_VERSION,
    PAGE,
    PLANES,
    PLANES_VERSION,
    RGB,
    VERSION,
    Field,
    arrays_crc,
    describe_field,
    metadata_dtype,
    notes_place,
)
from densefeed.system.errors import BusyError, UserError
from densefeed.system.files import (
    check_absent,
    check_regular,
    create_locked,
    make_folder,
    name_errors,
    open_own,
    sync_folder,
    write_at,
)
from densefeed.system.json_files import parse_json
from densefeed.system.progress import bar

# Bytes written between two fsyncs. After a power loss twice as many are read back.
SYNC_BYTES = 2**30


class Sample(NamedTuple):
    """One image to write: its bytes, size in pixels, label, and arrays in field order.

    `mode` is the kind of bytes: JPEG, RAW (uint8 `[height, width, 3]`, which have no checksum)
    or PLANES (of `native.planes`).
    """

    encoded: bytes
    height: int
    width: int
    label: int
    arrays: tuple[np.ndarray, ...] = ()
    mode: int = JPEG


# A record of the journal: the result for one image. `ptr` is the offset of its first array; the
# image is last. `block` is the CRC-32 of all bytes written for it, `arrays` that of its arrays,
# `crc` that of this record.
ROW = np.dtype(
    [
        ("index", "<u8"),
        ("ptr", "<u8"),
        ("label", "<i8"),
        ("size", "<u4"),
        ("height", "<u2"),
        ("width", "<u2"),
        ("block", "<u4"),
        ("arrays", "<u4"),
        ("state", "u1"),
        ("tag", "u1"),
        ("mode", "u1"),
        # Fills the record to 48 bytes, with the CRC at a multiple of 4.
        ("unused", "u1"),
        ("crc", "<u4"),
    ]
)
# An image without a record in the journal is UNTRIED: the rows begin as zeros.
UNTRIED, PACKED, FAILED = 0, 1, 2
# The CRC-32s of the note `crc32`; beside them it holds the offset of the samples' checksums.
CHECKSUMS = ("metadata", "table", "samples")


class BetonWriter:
    """Write a .beton image by image, under the name `<path>.part` until it is complete.

    Args:
        path: the file to make.
        num_samples: number of images.
        arrays: fields of type NDARRAY of every image, in addition to `image` and `label`.
        notes: JSON that readers find in `Beton.notes`; DenseFeed needs `class_names` and
            `fingerprint`.
        identity: JSON, not stored in the file, that must be equal for a `.part` to be resumed:
            images and options.

    The journal is `<path>.part.rows`: a JSON line and then ROWs. A writer that finds the `.part` of
    an earlier one resumes after its last complete image, and the finished file has the same bytes
    as without the interruption. Images that could not be read before are tried again and, if they
    can be read now, are last in the file. A ROW is written after its image, so after a kill every
    image in the journal is complete. After a power loss this holds for all but the last 1 to 2 GiB,
    which are read back and compared.

    Raises UserError if `path` exists, another process is writing it, the `.part` is of another
    packing, or num_samples is 0.

    Attributes:
        state: uint8 `[num_samples]`, UNTRIED, PACKED or FAILED.
        tags, modes: uint8 `[num_samples]`, the tags and modes given to `write`.
        room: maximum bytes of an image, because a sample does not cross a page.
    """

    def __init__(
        self,
        path: Path | str,
        num_samples: int,
        arrays: list[Field],
        notes: dict,
        identity: dict | None = None,
    ) -> None:
        self.path, self.part = Path(path), Path(f"{path}.part")
        self.journal = Path(f"{path}.part.rows")
        if num_samples < 1:
            raise UserError(f"{path} would hold no images")
        self.arrays, self.notes = arrays, {"densefeed": NOTES_VERSION} | notes
        self._fields = [Field(RGB, "image"), Field(INT, "label"), *arrays]
        self._dtype = metadata_dtype(self._fields)
        self._starts = np.cumsum([0, *(round_up(field.nbytes, ALIGN) for field in arrays)]).tolist()
        self.room = PAGE - self._starts[-1]
        # `finish` adds to the notes: checksums, a longer fingerprint, the number of images left
        # out. Reserve space for the longest.
        longest = self.notes | {"fingerprint": "0" * 64, "left_out": num_samples}
        longest["crc32"] = dict.fromkeys(CHECKSUMS, 2**32) | {"samples_at": 2**64}
        self._metadata = HEADER.itemsize + FIELD.itemsize * len(self._fields)
        # The 4 bytes are the sample's checksum.
        front = self._metadata + num_samples * (self._dtype.itemsize + 4) + len(json.dumps(longest))
        self._first_page = self._at = self._synced = round_up(front, PAGE)
        self._rows = np.zeros(num_samples, ROW)
        self.state, self.tags, self.modes = (self._rows[name] for name in ("state", "tag", "mode"))
        same = {"num_samples": num_samples, "arrays": arrays, "page": PAGE} | (identity or {})
        self.descriptors = []
        self._close = weakref.finalize(self, close_all, self.descriptors)
        try:
            with name_errors(self.path):
                # As the journal gives it back: JSON makes lists of tuples.
                self._begin(json.loads(json.dumps(same | self.notes)))
        except BaseException:
            self.close()
            raise

    def todo(self) -> np.ndarray:
        """Return the images to write, those not tried yet first, then those that failed before."""
        return np.concatenate([np.flatnonzero(self.state == kind) for kind in (UNTRIED, FAILED)])

    def _begin(self, identity: dict) -> None:
        make_folder(self.path.parent)
        for path in (self.journal, self.part):
            check_regular(path)
        if not self.journal.exists():
            # Only the journal describes what is in a `.part`, so this one is not ours to
            # overwrite.
            if self.part.exists():
                raise UserError(
                    f"{self.part} exists and is not from an earlier packing; "
                    "remove it or choose another --out"
                )
            check_absent(self.path)
        try:
            self.descriptors.append(create_locked(self.journal))
        except BusyError:
            raise UserError(
                f"{self.path} is being packed by another process; "
                "wait for it or choose another --out"
            ) from None
        # An earlier run was killed after the rename and before it removed the journal.
        if self.path.exists() and not self.part.exists():
            self.journal.unlink()
        check_absent(self.path)
        # Under the lock: before it, another writer may have added records.
        line, _, records = self.journal.read_bytes().partition(b"\n")
        # An earlier run was killed, or out of space, before its first image.
        if not self.part.exists():
            os.ftruncate(self.descriptors[0], 0)
            line, records = json.dumps(identity).encode(), b""
            write_at(self.descriptors[0], line + b"\n", 0)
        self.descriptors.append(open_own(self.part, os.O_RDWR | os.O_CREAT))
        self._next_row = len(line) + 1
        self._resume(line, records, identity)

    def _resume(self, line: bytes, records: bytes, identity: dict) -> None:
        rows = valid_rows(records)
        self._check_identity(line, rows, identity)
        self._check_rows(rows)
        rows = rows[: self._count_complete(rows)]
        # If an image has two records, the later one is used.
        self._rows[rows["index"]] = rows
        packed = rows[rows["state"] == PACKED]
        if len(packed):
            self._at = int(packed[-1]["ptr"]) + self._starts[-1] + int(packed[-1]["size"])
        self._next_row += rows.nbytes
        # What follows the last complete image is written again.
        os.ftruncate(self.descriptors[0], self._next_row)
        os.ftruncate(self.descriptors[1], self._at if len(packed) else 0)
        self._synced = self._at

    def _check_identity(self, line: bytes, rows: np.ndarray, identity: dict) -> None:
        """Raise UserError unless the journal, which begins with `line`, is of the same packing."""
        try:
            begun = parse_json(line)
        except ValueError:
            begun = None
        if not isinstance(begun, dict):
            raise self._damaged()
        differ = {
            key for key in begun.keys() | identity.keys() if begun.get(key) != identity.get(key)
        }
        # The fingerprint covers file sizes, which change if files that failed are repaired.
        if (rows["state"] == FAILED).any():
            differ.discard("fingerprint")
        if differ:
            name = min(differ).replace("_", " ")
            raise UserError(
                f"{self.part} was started by a packing that differs in {name}; remove it and "
                f"{self.journal.name}, or choose another --out"
            )

    def _check_rows(self, rows: np.ndarray) -> None:
        """Raise UserError for records that no packing writes, although their CRCs are right."""
        state, packed = rows["state"], rows[rows["state"] == PACKED]
        valid = (rows["index"] < len(self._rows)).all() and np.isin(state, (PACKED, FAILED)).all()
        # An image is tried again only if it failed.
        if not valid or len(np.unique(packed["index"])) < len(packed):
            raise self._damaged()
        ptr, length = packed["ptr"].astype(np.int64), packed["size"] + np.int64(self._starts[-1])
        before = np.concatenate([[self._first_page], (ptr + length)[:-1]])[: len(ptr)]
        if (length > PAGE).any() or (ptr != place(before, length)).any():
            raise self._damaged()

    def _damaged(self) -> UserError:
        return UserError(
            f"{self.journal}, left by an earlier packing, is damaged; remove it and {self.part}"
        )

    def _count_complete(self, rows: np.ndarray) -> int:
        """Return the number of leading records whose images are complete in `.part`.

        Only images that may not have reached the disk before a power loss are read.
        """
        packed = np.flatnonzero(rows["state"] == PACKED)
        if not len(packed):
            return len(rows)
        sizes = self._starts[-1] + rows["size"]
        ends = rows["ptr"] + sizes
        # Less than SYNC_BYTES and one image follow the last fsync.
        recent = packed[ends[packed] + 2 * SYNC_BYTES > ends[packed[-1]]]
        for n in bar(recent.tolist(), "check packed images"):
            block = os.pread(self.descriptors[1], int(sizes[n]), int(rows[n]["ptr"]))
            # The images after it are written again too, so the file gets the bytes of a packing
            # without the power loss.
            if zlib.crc32(block) != rows[n]["block"]:
                return n
        return len(rows)

    def _encode(self, index: int, sample: Sample, tag: int) -> tuple[np.ndarray, bytes]:
        """Encode a sample: its record without `ptr`, and its bytes: padded arrays, then image."""
        pieces = []
        for array, field in zip(sample.arrays, self.arrays, strict=True):
            if array.shape != field.shape:
                raise ValueError(f"{field.name} is {array.shape}, not {field.shape}")
            pieces.append(np.ascontiguousarray(array, field.dtype).tobytes())
        # Readers view the arrays without a copy, so each begins at a multiple of ALIGN.
        padded = (piece.ljust(round_up(len(piece), ALIGN), b"\0") for piece in pieces)
        block = b"".join([*padded, sample.encoded])
        row = np.zeros((), ROW)
        row["index"], row["label"], row["size"] = index, sample.label, len(sample.encoded)
        row["height"], row["width"] = sample.height, sample.width
        # `block` also covers padding and image, for the journal. `arrays` goes into the file, and
        # equals the row's CRC in a raw HDF5 store.
        row["block"], row["arrays"] = zlib.crc32(block), arrays_crc(pieces)
        row["state"], row["tag"], row["mode"] = PACKED, tag, sample.mode
        return row, block

    def check(self, index: int, sample: Sample) -> None:
        """Raise UserError unless image `index` was packed from this sample."""
        row, _ = self._encode(index, sample, int(self.tags[index]))
        same = ["label", "size", "height", "width", "mode", "block"]
        if row[same] != self._rows[index][same]:
            raise self.changed(index)

    def changed(self, index: int) -> UserError:
        """Return the error if image `index` is not the one that was packed."""
        return UserError(
            f"{self.part} holds another version of image {index}; remove it and {self.journal.name}"
        )

    def write(self, index: int, sample: Sample, tag: int = 0) -> None:
        """Append image `index`; UserError if it does not fit a page (8 MiB).

        `tag`, 0 to 255, is kept in the journal, for `tags` only.
        """
        if len(sample.encoded) > self.room:
            raise UserError(
                f"sample {index}: an image of {len(sample.encoded):,} bytes does not fit a page of "
                f"{PAGE:,}; make this image smaller"
            )
        row, block = self._encode(index, sample, tag)
        at = row["ptr"] = int(place(self._at, len(block)))
        with name_errors(self.path):
            # The image before its record, which marks the image as complete. The place is moved
            # on last: after an error the next image overwrites this one.
            write_at(self.descriptors[1], block, at)
            self._record(row)
            self._at = at + len(block)
            if self._at - self._synced > SYNC_BYTES:
                self._sync()

    def fail(self, index: int) -> None:
        """Record that image `index` cannot be packed; a later run tries it again."""
        row = np.zeros((), ROW)
        row["index"], row["state"] = index, FAILED
        with name_errors(self.path):
            self._record(row)

    def _record(self, row: np.ndarray) -> None:
        # The last four bytes of a record are the CRC itself.
        row["crc"] = zlib.crc32(row.tobytes()[:-4])
        write_at(self.descriptors[0], row.tobytes(), self._next_row)
        self._next_row += ROW.itemsize
        self._rows[row["index"]] = row

    def _sync(self) -> None:
        # The images must be on disk before their records.
        for descriptor in reversed(self.descriptors):
            os.fsync(descriptor)
        self._synced = self._at

    def finish(self) -> None:
        """Write table, metadata, notes and header, and rename the file to its final name.

        Images that failed are left out: the note `left_out` is their number, and the fingerprint is
        another one. Raises UserError if no image is left.
        """
        untried = self.state == UNTRIED
        if untried.any():
            raise ValueError(f"image {int(untried.argmax())} was neither written nor failed")
        kept = np.flatnonzero(self.state == PACKED)
        if not len(kept):
            raise UserError(
                f"{self.path}: none of the {len(self._rows)} images can be packed; "
                "there is nothing to write"
            )
        with name_errors(self.path):
            self._write_front(kept, self._final_notes())
            # The bytes must be on disk before the file gets its name.
            os.fsync(self.descriptors[1])
            check_absent(self.path)
            os.replace(self.part, self.path)
            # On disk before the journal goes: a `.part` without its journal is refused.
            sync_folder(self.path.parent)
            self.journal.unlink()
        self.close()

    def _final_notes(self) -> dict:
        """Return the notes, with `left_out` and another fingerprint if images failed."""
        missing = np.flatnonzero(self.state != PACKED).tolist()
        if not missing:
            return self.notes
        # Score maps of all images do not fit the images that are left.
        changed = f"{self.notes.get('fingerprint')} without {missing}"
        fingerprint = hashlib.sha256(changed.encode()).hexdigest()
        return self.notes | {"left_out": len(missing), "fingerprint": fingerprint}

    def _write_front(self, kept: np.ndarray, notes: dict) -> None:
        out, count = self.descriptors[1], len(kept)
        table = round_up(self._at, PAGE)
        # Fills the last page with zeros: ffcv reads whole pages if `os_cache` is False.
        os.ftruncate(out, table)
        sums_at = self._metadata + count * self._dtype.itemsize
        sums = self._write_records(kept, table, sums_at)
        text = json.dumps(notes | {"crc32": sums}).encode()
        notes_at = sums_at + (4 * count if self.arrays else 0)
        assert notes_at + len(text) <= self._first_page, "the notes grew into the first page"
        version = PLANES_VERSION if (self._rows["mode"][kept] == PLANES).any() else VERSION
        header = np.array((version, len(self._fields), PAGE, count, table), HEADER).tobytes()
        head = bytearray(header + b"".join(describe_field(field) for field in self._fields))
        # A view: what is assigned to it is written to `head`.
        place = np.frombuffer(head, NOTES, 1, notes_place(HEADER.itemsize))
        place[0] = MARK, notes_at, len(text), 0
        # The checksum covers the header with zeros in its own place.
        place["crc"] = zlib.crc32(text, zlib.crc32(head))
        # A run killed in this method may have written notes that are some digits longer. Zeros
        # overwrite their end.
        padded = text.ljust(min(len(text) + 256, self._first_page - notes_at), b"\0")
        write_at(out, padded, notes_at)
        # The header last: the version in a new `.part` is 0 until then, which no reader opens.
        write_at(out, bytes(head), 0)

    def _write_records(self, kept: np.ndarray, table: int, sums_at: int) -> dict[str, int]:
        """Write allocation table, metadata and the samples' checksums; return the note `crc32`.

        `kept` are the images in the file; `table` and `sums_at` are offsets.
        """
        crcs = dict.fromkeys(CHECKSUMS, 0)
        for at in range(0, len(kept), CHUNK):
            rows = self._rows[kept[at : at + CHUNK]]
            entries = np.zeros((len(rows), 1 + len(self.arrays)), ALLOCATION)
            entries["sample"] = np.arange(at, at + len(rows))[:, None]
            # numpy would convert the sum of uint64 and int64 to float64.
            entries["ptr"] = rows["ptr"][:, None] + np.array(self._starts, np.uint64)
            entries["size"][:, :-1] = [field.nbytes for field in self.arrays]
            entries["size"][:, -1] = rows["size"]
            metadata = np.zeros(len(rows), self._dtype)
            image, metadata["f1"] = metadata["f0"], rows["label"]
            image["ptr"] = entries["ptr"][:, -1]
            for name in ("mode", "height", "width"):
                image[name] = rows[name]
            for n in range(len(self.arrays)):
                metadata[f"f{n + 2}"] = entries["ptr"][:, n]
            written = {
                "table": (entries, table + at * entries[0].nbytes),
                "metadata": (metadata, self._metadata + at * metadata.itemsize),
            }
            if self.arrays:
                written["samples"] = rows["arrays"], sums_at + 4 * at
            for name, (records, offset) in written.items():
                content = records.tobytes()
                write_at(self.descriptors[1], content, offset)
                crcs[name] = zlib.crc32(content, crcs[name])
        return crcs | {"samples_at": sums_at}

    def close(self) -> None:
        """Close the files and release the lock; packed images stay in `.part`."""
        with name_errors(self.path):
            self._close()

    def __enter__(self) -> "BetonWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def valid_rows(records: bytes) -> np.ndarray:
    """Return the ROWs of a journal before the first one that does not match its CRC."""
    # A kill may leave the last record incomplete.
    rows = np.frombuffer(records, ROW, len(records) // ROW.itemsize)
    valid = [zlib.crc32(row.tobytes()[:-4]) == row["crc"] for row in rows]
    return rows[: [*valid, False].index(False)]


def place(at: int | np.ndarray, length: int | np.ndarray) -> np.ndarray:
    """Return where the next `length` bytes begin, behind a sample that ends at `at`."""
    start = round_up(at, ALIGN)
    # A sample never crosses a page.
    return np.where(start % PAGE + length <= PAGE, start, round_up(start, PAGE))


def round_up(size: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-size // multiple) * multiple
