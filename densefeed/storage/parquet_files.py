"""Images in Parquet files, as Hugging Face writes them; needs pyarrow.

The images of a row group (100 rows in files of Hugging Face, about 10 MB) are usually compressed
together, often as the dictionary of the column, so one of them costs as much to read as all. A
cache of CACHE bytes keeps the row groups read last. Labeling, packing and evaluation read them in
order. Training shuffles a data set that fits in the cache, and others in blocks (`blocks`).
"""

import io
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from densefeed.storage.shard_file import ShardFile, find_state, open_shard
from densefeed.system.errors import UserError, first_line
from densefeed.system.object_url import ObjectURL

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

# Bytes of the row groups that a process keeps in memory.
CACHE = 2**30
# Bytes of a column of a row group. It is in memory two to three times while it is read.
MOST_GROUP = 2**30


class RowGroup(NamedTuple):
    """A row group: its file, its number in it, and the bytes of its images when decompressed."""

    file: int
    number: int
    bytes: int


class Blocks(NamedTuple):
    """An order of training for storage that is slow to read in any other.

    Blocks of `block` neighbors are shuffled, then the images within every `window` blocks.
    """

    block: int
    window: int


class ParquetFile(NamedTuple):
    """A Parquet file whose footer was read."""

    file: ShardFile
    metadata: "pq.FileMetaData"

    @property
    def path(self) -> Path | ObjectURL:
        return self.file.path

    def read(self, column: str, number: int) -> "pa.Array":
        """Read the leaf `column` of row group `number`; a leaf of a struct without the struct.

        Raises OSError if the file changed since it was opened, or is damaged. StorageError if an
        object cannot be read, UserError if it was replaced.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            # Reads of several threads at once are the threads of the caller.
            with (
                self.file.open() as file,
                pq.ParquetFile(file, metadata=self.metadata, pre_buffer=False) as reader,
            ):
                table = reader.read_row_group(number, [column], use_threads=False)
            array = pa.concat_arrays(table.column(0).chunks)
            if len(array) != self.metadata.row_group(number).num_rows:
                raise pa.ArrowInvalid("its rows are not as many as stated")
            # With the nulls of the struct.
            return array.flatten()[0] if pa.types.is_struct(array.type) else array
        # StorageError is an OSError too.
        except UserError:
            raise
        # Errors of Arrow have many types, OSError without a file name among them.
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.filename:
                raise
            problem = f"row group {number} is damaged ({first_line(error)}); copy the file again"
            raise OSError(None, problem, str(self.path)) from error


class ParquetImages:
    """The N images of Parquet files, in the order of the files and rows.

    Args:
        paths: of each image; `rows_named` if they name the row of a file.
        labels: int64 `[N]`.
        files: opened, of the same columns.
        column: the column of encoded images.
    """

    def __init__(
        self,
        paths: list[str],
        labels: np.ndarray,
        class_names: list[str],
        files: Sequence[ParquetFile],
        column: str,
    ) -> None:
        self.paths, self.labels, self.class_names = paths, labels, class_names
        self._files, self._column, self._groups = files, column, []
        # The first row of every row group and of every file.
        self._firsts, self._file_firsts = [], []
        first = 0
        for number, file in enumerate(files):
            self._file_firsts.append(first)
            for group in range(file.metadata.num_row_groups):
                self._groups.append(RowGroup(number, group, count_bytes(file, column, group)))
                self._firsts.append(first)
                first += file.metadata.row_group(group).num_rows
        self._lock, self._reading = Lock(), {}
        self._cache: OrderedDict[int, pa.Array] = OrderedDict()

    def where(self, index: int) -> str:
        """Name of sample `index` for error messages."""
        file = bisect_right(self._file_firsts, index) - 1
        return f"{self._files[file].path}, row {index - self._file_firsts[file]}"

    def open(self, index: int) -> io.BytesIO:
        """Open the encoded bytes of sample `index`. OSError if they are missing or damaged."""
        group = bisect_right(self._firsts, index) - 1
        content = self._read(group)[index - self._firsts[group]].as_buffer()
        if content is None:
            problem = "this row has no image; write the file again without it, or with its bytes"
            raise OSError(None, problem, self.where(index))
        return io.BytesIO(content)

    def blocks(self) -> Blocks | None:
        """Return the order that reads every row group once or twice; None if any order does.

        UserError if the row groups are too large for that.
        """
        size = sum(group.bytes for group in self._groups)
        if size <= CACHE:
            return None
        ends = [*self._firsts[1:], len(self.labels)]
        rows = max(end - first for first, end in zip(self._firsts, ends, strict=True))
        # A block of as many rows lies in two row groups at most. Batches in flight, and threads,
        # may read the next window already.
        window = CACHE // (4 * max(group.bytes for group in self._groups))
        if not window:
            raise UserError(
                f"{self._files[0].path.parent} holds {size / 1e9:,.1f} GB of images in Parquet in "
                "row groups that are too large for training; pack it with densefeed pack"
            )
        return Blocks(rows, window)

    def _read(self, group: int) -> "pa.Array":
        """Return the images of a row group, from the cache if they are there."""
        with self._lock:
            lock = self._reading.setdefault(group, Lock())
        # One thread reads it. Others that need it wait, and those of other row groups do not.
        with lock:
            with self._lock:
                if group in self._cache:
                    self._cache.move_to_end(group)
                    return self._cache[group]
            file, number, _ = self._groups[group]
            images = self._files[file].read(f"{self._column}.bytes", number)
            with self._lock:
                self._keep(group, images)
            return images

    def _keep(self, group: int, images: "pa.Array") -> None:
        """Put a row group into the cache, and remove those read longest ago."""
        self._cache[group] = images
        size = sum(kept.nbytes for kept in self._cache.values())
        while size > CACHE and len(self._cache) > 1:
            gone, dropped = self._cache.popitem(last=False)
            size -= dropped.nbytes
            # A thread that waited for it may have put it back.
            self._reading.pop(gone, None)


def open_parquet(path: Path | ObjectURL) -> ParquetFile:
    """Read the footer of a Parquet file. UserError if it is damaged or pyarrow is missing."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(
            f'{path} needs pyarrow ({first_line(error)}); pip install "densefeed[parquet]"'
        ) from error
    try:
        with open_shard(path) as file:
            state = find_state(file)
            metadata = pq.read_metadata(file)
            # Damage of the schema appears here.
            metadata.schema.to_arrow_schema()
            return ParquetFile(ShardFile(path, state), metadata)
    except UserError:
        raise
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise UserError(
            f"{path} is not a Parquet file, or is damaged ({first_line(error)}); "
            "replace or remove it"
        ) from error


def count_bytes(file: ParquetFile, column: str, number: int) -> int:
    """Return the bytes, decompressed, of all leaves of a column in a row group.

    UserError for more than memory should hold at once.
    """
    group = file.metadata.row_group(number)
    leaves = (group.column(n) for n in range(group.num_columns))
    size = sum(
        leaf.total_uncompressed_size
        for leaf in leaves
        if leaf.path_in_schema.partition(".")[0] == column
    )
    if not 0 <= size <= MOST_GROUP:
        raise UserError(
            f"{file.path}: column {column} of row group {number} has {size:,} bytes, and a row "
            f"group is read as a whole; write row groups of at most {MOST_GROUP:,} bytes"
        )
    return size


def read_column(file: ParquetFile, column: str) -> "pa.ChunkedArray":
    """Read a small column (labels, names) of all row groups. UserError if it is damaged."""
    import pyarrow as pa

    parts = []
    try:
        for number in range(file.metadata.num_row_groups):
            count_bytes(file, column.partition(".")[0], number)
            parts.append(file.read(column, number))
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from error
    return pa.chunked_array(parts) if parts else pa.chunked_array([], pa.null())
