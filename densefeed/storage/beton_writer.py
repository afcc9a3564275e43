"""Writing FFCV datasets (.beton): image by image, resumed after a kill, and under the final name
only when whole.
"""

import fcntl
import hashlib
import json
import os
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from densefeed.storage.beton import (
    ALIGN,
    ALLOCATION,
    CHUNK,
    FIELD,
    HEADER,
    INT,
    JPEG,
    MARK,
    NOTES,
    NOTES_VERSION,
    PAGE,
    RAW,
    RGB,
    VERSION,
    Field,
    arrays_crc,
    close_all,
    describe_field,
    metadata_dtype,
    notes_place,
)
from densefeed.system.errors import UserError
from densefeed.system.files import name_errors, sync
from densefeed.system.progress import bar

SYNC_BYTES = 2**30  # the packer makes its work durable this often


class Sample(NamedTuple):
    """What is written for one image: encoded JPEG, its height and width, its class, and arrays in
    the order of the fields. If it is `raw`, its pixels uint8 `[height, width, 3]` in place of a
    JPEG; no checksum covers them.
    """

    jpeg: bytes
    height: int
    width: int
    label: int
    arrays: tuple[np.ndarray, ...] = ()
    raw: bool = False


# A line of the journal: what was done with one image. `block` is the CRC-32 of all that was written
# for it, `arrays` that of its arrays, `crc` that of this record. `ptr` is where its first array
# stands; the JPEG is last.
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
        ("unused", "u1"),
        ("crc", "<u4"),
    ]
)
UNTRIED, PACKED, FAILED = 0, 1, 2


class BetonWriter:
    """Writes a .beton image by image, under the name `<path>.part` until it is whole;
    `<path>.part.rows` is its journal.

    Args:
        path: the file to make.
        num_samples: how many images there are.
        arrays: fields of type NDARRAY that come with every image, beside `image` and `label`.
        notes: JSON that readers find in `Beton.notes`; `class_names` and `fingerprint` are ours to
            expect.
        identity: JSON, not stored in the file, that must be equal for a `.part` to be continued:
            which images, which options.

    A writer that finds the `.part` of an earlier one goes on behind its last whole image, and the
    finished file has the same bytes as if it had not been interrupted. Images that earlier could
    not be read are tried again, and stand last if they can. The journal is a JSON line and then
    ROWs; a ROW is written after its image, so what it names is whole after a kill; after a power
    cut, too, before the last 1 to 2 GiB, and those are read back and compared.

    Raises UserError if `path` exists, another process is writing it, the `.part` is not of this
    packing, or num_samples is 0.

    Attributes:
        state: uint8 `[num_samples]`, UNTRIED, PACKED or FAILED. tags: uint8 alike, what `write` was
            given.
        room: the most bytes a JPEG may have, since a sample does not cross a page.
    """

    def __init__(
        self,
        path: Path | str,
        num_samples: int,
        arrays: list[Field],
        notes: dict,
        identity: dict | None = None,
    ) -> None:
        self.path, self.part, self.journal = (
            Path(path),
            Path(f"{path}.part"),
            Path(f"{path}.part.rows"),
        )
        if num_samples < 1:
            raise UserError(f"{path} would hold no images")
        self.arrays, self.notes = arrays, {"densefeed": NOTES_VERSION} | notes
        self._fields = [Field(RGB, "image"), Field(INT, "label"), *arrays]
        self._dtype = metadata_dtype([field.type for field in self._fields])
        self._starts = np.cumsum(
            [0] + [-(-field.nbytes // ALIGN) * ALIGN for field in arrays]
        ).tolist()
        self.room = PAGE - self._starts[-1]
        # The notes may still grow by what `finish` finds: checksums, a longer fingerprint, how many
        # images are missing.
        longest = self.notes | {
            "fingerprint": "0" * 64,
            "left_out": num_samples,
            "crc32": checksums(2**32, 2**32, 2**32, 2**64),
        }
        self._metadata = HEADER.itemsize + FIELD.itemsize * len(self._fields)
        front = self._metadata + num_samples * (self._dtype.itemsize + 4) + len(json.dumps(longest))
        self._first_page = -(-front // PAGE) * PAGE
        self._rows = np.zeros(num_samples, ROW)
        self._at, self._synced = self._first_page, self._first_page
        same = {
            "num_samples": num_samples,
            "arrays": [list(field) for field in arrays],
            "page": PAGE,
        } | (identity or {})
        self.descriptors: list[int] = []
        self._close = weakref.finalize(self, close_all, self.descriptors)
        try:
            with name_errors(self.path):
                self._begin(json.loads(json.dumps(same | self.notes)))
        except BaseException:
            self.close()
            raise

    @property
    def state(self) -> np.ndarray:
        return self._rows["state"]

    @property
    def tags(self) -> np.ndarray:
        return self._rows["tag"]

    def todo(self) -> np.ndarray:
        """The images to write, in the order they should come: those never tried, then those that
        failed before.
        """
        return np.concatenate([np.nonzero(self.state == kind)[0] for kind in (UNTRIED, FAILED)])

    def _begin(self, identity: dict) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not self.journal.exists()
        if fresh and self.part.exists():
            raise UserError(
                f"{self.part} is in the way, and no packing left it; remove it or choose another --out"
            )
        if fresh and self.path.exists():
            raise UserError(f"{self.path} exists already; remove it or choose another --out")
        self._lock()
        if self.path.exists():
            if not self.part.exists():  # killed between giving the name and removing the journal
                self.journal.unlink()
            raise UserError(f"{self.path} exists already; remove it or choose another --out")
        line, _, records = read_all(self.descriptors[0]).partition(b"\n")
        if not self.part.exists():  # killed, or out of space, before the first image
            os.ftruncate(self.descriptors[0], 0)
            line, records = json.dumps(identity).encode(), b""
            write_at(self.descriptors[0], line + b"\n", 0)
        self.descriptors.append(os.open(self.part, os.O_RDWR | os.O_CREAT, 0o666))
        self._next_row = len(line) + 1
        self._resume(line, records, identity)

    def _lock(self) -> None:
        """Open the journal for us alone; the system drops the lock when the process ends, however
        it ends.
        """
        while True:
            self.descriptors[:] = [os.open(self.journal, os.O_RDWR | os.O_CREAT, 0o666)]
            try:
                fcntl.flock(self.descriptors[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{self.path} is being packed by another process; wait for it or choose another --out"
                ) from None
            try:
                if os.path.samestat(os.fstat(self.descriptors[0]), os.stat(self.journal)):
                    return
            except FileNotFoundError:
                pass
            # the other process finished, and removed the file, between our two calls
            close_all(self.descriptors)

    def _resume(self, line: bytes, records: bytes, identity: dict) -> None:
        rows = np.frombuffer(records[: len(records) // ROW.itemsize * ROW.itemsize], ROW)
        starts = range(0, rows.nbytes, ROW.itemsize)
        whole = rows["crc"] == np.fromiter(
            (zlib.crc32(records[at : at + ROW.itemsize - 4]) for at in starts), "<u4", len(rows)
        )
        rows = rows[: len(rows) if whole.all() else whole.argmin()]
        try:
            begun = json.loads(line)
        except ValueError:
            raise UserError(
                f"{self.journal}, left by an earlier packing, is damaged; remove it and {self.part}"
            ) from None
        differ = [
            key for key in begun.keys() | identity.keys() if begun.get(key) != identity.get(key)
        ]
        if "fingerprint" in differ and (rows["state"] == FAILED).any():
            # it covers file sizes, and files that failed are there to be mended
            differ.remove("fingerprint")
        if differ:
            key = min(differ).replace("_", " ")
            raise UserError(
                f"{self.part} was begun with another {key}; remove it and {self.journal.name}, or choose another --out"
            )
        rows = rows[: self._sound(rows)]
        self._rows[rows["index"]] = rows  # of two records of one image the later wins
        packed = rows[rows["state"] == PACKED]
        if len(packed):
            self._at = int(packed[-1]["ptr"]) + self._starts[-1] + int(packed[-1]["size"])
        self._next_row += rows.nbytes
        os.ftruncate(self.descriptors[0], self._next_row)
        os.ftruncate(self.descriptors[1], self._at if len(packed) else 0)
        self._synced = self._at

    def _sound(self, rows: np.ndarray) -> int:
        """How many records name images that are really there. Only those that may not have reached
        the disk are read.
        """
        packed = np.nonzero(rows["state"] == PACKED)[0]
        if not len(packed):
            return len(rows)
        ends = rows["ptr"] + self._starts[-1] + rows["size"]
        recent = packed[ends[packed] + 2 * SYNC_BYTES > ends[packed[-1]]]
        for n in bar(recent.tolist(), "check what is packed"):
            block = os.pread(
                self.descriptors[1], self._starts[-1] + int(rows[n]["size"]), int(rows[n]["ptr"])
            )
            if zlib.crc32(block) != rows[n]["block"]:
                return n
        return len(rows)

    def _block(self, index: int, sample: Sample, tag: int) -> tuple[np.ndarray, bytes]:
        """The record of a sample, without its place, and its bytes: arrays, each padded, then the
        JPEG.
        """
        arrays = [
            np.ascontiguousarray(a, f.dtype)
            for a, f in zip(sample.arrays, self.arrays, strict=True)
        ]
        for array, field in zip(arrays, self.arrays, strict=True):
            if array.shape != field.shape:
                raise ValueError(f"{field.name} is {array.shape}, not {field.shape}")
        pieces = [array.tobytes() for array in arrays]
        block = b"".join(
            [
                *(piece.ljust(-(-len(piece) // ALIGN) * ALIGN, b"\0") for piece in pieces),
                sample.jpeg,
            ]
        )
        row = np.zeros((), ROW)
        row["index"], row["label"], row["size"] = index, sample.label, len(sample.jpeg)
        row["height"], row["width"], row["state"], row["tag"] = (
            sample.height,
            sample.width,
            PACKED,
            tag,
        )
        row["block"], row["arrays"], row["mode"] = (
            zlib.crc32(block),
            arrays_crc(pieces),
            RAW if sample.raw else JPEG,
        )
        return row, block

    def check(self, index: int, sample: Sample) -> None:
        """UserError unless what is packed of image `index` is this sample."""
        row, _ = self._block(index, sample, int(self.tags[index]))
        if any(
            row[name] != self._rows[index][name]
            for name in ("label", "size", "height", "width", "mode", "block")
        ):
            raise self.changed(index)

    def changed(self, index: int) -> UserError:
        """What to raise where image `index` is not what was packed."""
        return UserError(
            f"{self.part} holds image {index} otherwise than it is now; remove it and {self.journal.name}"
        )

    def write(self, index: int, sample: Sample, tag: int = 0) -> None:
        """Append image `index`; `tag`, 0 to 255, is kept for `tags` only. UserError if it does not
        fit a page (8 MiB).
        """
        if len(sample.jpeg) > self.room:
            raise UserError(
                f"sample {index}: a JPEG of {len(sample.jpeg):,} bytes does not fit a page of {PAGE:,}; make this image smaller"
            )
        row, block = self._block(index, sample, tag)
        at = -(-self._at // ALIGN) * ALIGN
        if at % PAGE + len(block) > PAGE:
            at = -(-at // PAGE) * PAGE
        row["ptr"] = at
        with name_errors(self.path):
            write_at(self.descriptors[1], block, at)
            self._record(row)
            self._at = at + len(block)
            if self._at - self._synced > SYNC_BYTES:
                self._sync()

    def fail(self, index: int) -> None:
        """Note that image `index` cannot be packed; a later packing tries it again."""
        row = np.zeros((), ROW)
        row["index"], row["state"] = index, FAILED
        with name_errors(self.path):
            self._record(row)

    def _record(self, row: np.ndarray) -> None:
        row["crc"] = zlib.crc32(row.tobytes()[:-4])
        write_at(self.descriptors[0], row.tobytes(), self._next_row)
        self._next_row += ROW.itemsize
        self._rows[row["index"]] = row

    def _sync(self) -> None:
        # images before the records that vouch for them
        for descriptor in reversed(self.descriptors):
            os.fsync(descriptor)
        self._synced = self._at

    def finish(self) -> None:
        """Write table, metadata, notes and header, and give the file its name. Images that failed
        are left out, in the notes `left_out` says how many, and the fingerprint is then another
        one; UserError if none is left.
        """
        if (self.state == UNTRIED).any():
            raise ValueError(
                f"image {int((self.state == UNTRIED).argmax())} was neither written nor failed"
            )
        kept = np.nonzero(self.state == PACKED)[0]
        if not len(kept):
            raise UserError(
                f"{self.path}: none of the {len(self._rows)} images can be packed; there is nothing to write"
            )
        notes = dict(self.notes)
        if len(kept) < len(self._rows):
            notes["left_out"] = len(self._rows) - len(kept)
            missing = np.nonzero(self.state != PACKED)[0].tolist()
            notes["fingerprint"] = hashlib.sha256(
                f"{notes.get('fingerprint')} without {missing}".encode()
            ).hexdigest()
        with name_errors(self.path):
            self._write_front(kept, notes)
            os.fsync(self.descriptors[1])
            if self.path.exists():
                raise UserError(f"{self.path} exists already; remove it, and run this again")
            os.replace(self.part, self.path)
            sync(self.path.parent)
            self.journal.unlink()
        self.close()

    def _write_front(self, kept: np.ndarray, notes: dict) -> None:
        out, count = self.descriptors[1], len(kept)
        table = -(-self._at // PAGE) * PAGE
        os.ftruncate(out, table)
        sums_at = self._metadata + count * self._dtype.itemsize
        width = 1 + len(self.arrays)
        table_crc = metadata_crc = samples_crc = 0
        for at in range(0, count, CHUNK):
            rows = self._rows[kept[at : at + CHUNK]]
            metadata = np.zeros(len(rows), self._dtype)
            metadata["f0"]["mode"], metadata["f0"]["ptr"] = (
                rows["mode"],
                rows["ptr"] + self._starts[-1],
            )
            metadata["f0"]["height"], metadata["f0"]["width"] = rows["height"], rows["width"]
            metadata["f1"] = rows["label"]
            entries = np.zeros((len(rows), width), ALLOCATION)
            entries["sample"] = np.arange(at, at + len(rows))[:, None]
            entries["ptr"] = rows["ptr"][:, None] + np.array(self._starts, np.uint64)
            entries["size"] = [[field.nbytes for field in self.arrays] + [0]]
            entries["size"][:, -1] = rows["size"]
            for n in range(len(self.arrays)):
                metadata[f"f{n + 2}"] = entries["ptr"][:, n]
            sums = rows["arrays"].tobytes() if self.arrays else b""
            write_at(out, entries.tobytes(), table + at * width * ALLOCATION.itemsize)
            write_at(out, metadata.tobytes(), self._metadata + at * self._dtype.itemsize)
            write_at(out, sums, sums_at + 4 * at)
            table_crc, metadata_crc = (
                zlib.crc32(entries.tobytes(), table_crc),
                zlib.crc32(metadata.tobytes(), metadata_crc),
            )
            samples_crc = zlib.crc32(sums, samples_crc)
        notes["crc32"] = checksums(metadata_crc, table_crc, samples_crc, sums_at)
        text = json.dumps(notes).encode()
        notes_at = sums_at + (4 * count if self.arrays else 0)
        assert notes_at + len(text) <= self._first_page, "the notes grew into the first page"
        header = np.array((VERSION, len(self._fields), PAGE, count, table), HEADER).tobytes()
        head = bytearray(header + b"".join(describe_field(field) for field in self._fields))
        place = np.array((MARK, notes_at, len(text), 0), NOTES)
        place_at = notes_place(HEADER.itemsize)
        head[place_at : place_at + NOTES.itemsize] = place.tobytes()
        place["crc"] = zlib.crc32(text, zlib.crc32(head))
        head[place_at : place_at + NOTES.itemsize] = place.tobytes()
        # A packing killed in here leaves notes that may reach some digits further: the numbers in
        # them differ.
        write_at(
            out, text.ljust(min(len(text) + 256, self._first_page - notes_at), b"\0"), notes_at
        )
        write_at(out, bytes(head), 0)

    def close(self) -> None:
        """Close the files and drop the lock; what is packed stays in `.part`."""
        self._close()

    def __enter__(self) -> "BetonWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_beton(path: Path, samples: Sequence[Sample], arrays: list[Field], notes: dict) -> None:
    """Write a .beton of samples that are in memory; on an error nothing stays, after a kill it is
    continued. Raises as `BetonWriter`.
    """
    with BetonWriter(path, len(samples), arrays, notes) as writer:
        try:
            for index, sample in enumerate(samples):
                if writer.state[index] == PACKED:
                    writer.check(index, sample)
                else:
                    writer.write(index, sample)
            writer.finish()
        except BaseException:
            writer.part.unlink(missing_ok=True)
            writer.journal.unlink(missing_ok=True)
            raise


def checksums(metadata: int, table: int, samples: int, samples_at: int) -> dict[str, int]:
    """The `crc32` of the notes: of metadata, table, and the samples' own checksums, and where those
    stand.
    """
    return {"metadata": metadata, "table": table, "samples": samples, "samples_at": samples_at}


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """pwrite all of it; a disk that fills in the middle takes a part, and the next call says
    why.
    """
    view = memoryview(data)
    while len(view):
        put = os.pwrite(descriptor, view, offset)
        view, offset = view[put:], offset + put


def read_all(descriptor: int) -> bytes:
    """The whole file."""
    with open(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return file.read()
