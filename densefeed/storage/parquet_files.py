"""Images in Parquet files, as Hugging Face writes them; needs pyarrow.

The images of a row group (100 rows in files of Hugging Face, about 10 MB) are usually compressed
together, often as the dictionary of the column, so one of them costs as much to read as all. A
cache of CACHE bytes keeps the row groups read last. Labeling, packing and evaluation read them in
order. Training shuffles a data set that fits in the cache, and others in blocks (`blocks`).

Files are exchanged, and what they hold is bounded after decompression and decoding: a footer states
too few bytes, a dictionary's entry is stored once, however many rows name it, and a row of nulls
takes no bytes at all.
"""

import io
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from densefeed.storage.parquet_pages import CheckedFile, read_pages
from densefeed.storage.shard_file import ShardFile, find_state, open_shard
from densefeed.system.errors import UserError, first_line, install_extra
from densefeed.system.files import MOST_PATH
from densefeed.system.object_url import ObjectURL

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

# Bytes of the row groups that a process keeps in memory.
CACHE = 2**30
# Bytes of a row group. It is in memory two to three times while it is read.
MOST_GROUP = 2**30
# Bytes of a row group per byte of its file, above SPARE. Photographs have about 1.
PACKED = 32
# Bytes decoded at once. With 2**26 a row group of 60,000 images of 300 bytes takes 2.6 times
# as long.
BATCH = 2**27
# Bytes that a column of a row group may decode to beyond those that are stored, where rows repeat
# entries of a dictionary: more than a batch. Least bytes of a file's labels, or names, that are
# too many.
SPARE = 3 * 2**26
# Rows of a file of any size, and bytes of a file per row beyond them. A PNG of one pixel has 67.
MOST_ROWS, ROW_BYTES = 2**18, 32


class RowGroup(NamedTuple):
    """A row group: its file, its number in it, and its bytes when decompressed."""

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

    @property
    def rows(self) -> list[int]:
        """The number of rows of each row group."""
        return [self.metadata.row_group(n).num_rows for n in range(self.metadata.num_row_groups)]

    def read(self, column: str, number: int, whole: bool = False) -> Iterator["pa.Array"]:
        """Yield the leaf `column` of row group `number` in parts, without the struct around it.

        `whole`: in one part, because its values have a few bytes each. By default a part has as
        many rows as take BATCH bytes at most, also if each has all bytes of the row group.

        Raises OSError if the file changed since it was opened, or is damaged. StorageError if an
        object cannot be read. UserError if it was replaced, if the pages of the column take more
        bytes than the footer states for the row group, and if the parts take more than SPARE bytes
        beyond those of the row group and of the file.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        size, rows = count_bytes(self, number), self.metadata.row_group(number).num_rows
        # pyarrow writes a wrong place of the pages of a row group without rows.
        if not rows:
            return
        # Every row may name an entry of a dictionary that has nearly all of these bytes.
        at_once = max(1, rows if whole else min(rows, BATCH // max(1, size)))
        most = max(size, self.file.state[0]) + SPARE
        found, left = 0, most

        def check(content: bytes) -> None:
            # One page beyond a row each is a dictionary, and one may be without rows.
            pages = read_pages(content, rows + 2)
            if pages.size > size:
                raise UserError(
                    f"{self.path}: row group {number} has {size:,} bytes by its footer, and the "
                    f"pages of {column} {pages.size:,}; write the file again"
                )
            if pages.delta:
                raise UserError(
                    f"{self.path}: {column} has the encoding {pages.delta}, whose size cannot be "
                    "bounded before it is decoded; write the file again without it"
                )

        try:
            # Reads of several threads at once are the threads of the caller.
            with (
                self.file.open() as file,
                pq.ParquetFile(
                    CheckedFile(file, check), metadata=self.metadata, pre_buffer=False
                ) as reader,
            ):
                for batch in reader.iter_batches(at_once, [number], [column], use_threads=False):
                    array = batch.column(0)
                    # With the nulls of the struct.
                    array = array.flatten()[0] if pa.types.is_struct(array.type) else array
                    found, left = found + len(array), left - array.nbytes
                    if left < 0:
                        raise UserError(
                            f"{self.path}: row group {number} has {size:,} bytes, and {column} "
                            f"with its repeated values more than {most:,}; write the file again "
                            "in row groups of 100 rows"
                        )
                    yield array
            if found != rows:
                raise pa.ArrowInvalid("its rows are not as many as stated")
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
        paths: of each image.
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
            for group, rows in enumerate(file.rows):
                self._groups.append(RowGroup(number, group, count_bytes(file, group)))
                self._firsts.append(first)
                first += rows
        self._lock, self._reading = Lock(), {}
        self._cache: OrderedDict[int, pa.ChunkedArray] = OrderedDict()

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

    def _read(self, group: int) -> "pa.ChunkedArray":
        """Return the images of a row group, from the cache if they are there."""
        import pyarrow as pa

        with self._lock:
            lock = self._reading.setdefault(group, Lock())
        # One thread reads it. Others that need it wait, and those of other row groups do not.
        with lock:
            with self._lock:
                if group in self._cache:
                    self._cache.move_to_end(group)
                    return self._cache[group]
            file, number, _ = self._groups[group]
            images = pa.chunked_array(self._files[file].read(f"{self._column}.bytes", number))
            with self._lock:
                self._keep(group, images)
            return images

    def _keep(self, group: int, images: "pa.ChunkedArray") -> None:
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
            f"{path} needs pyarrow ({first_line(error)}); {install_extra('parquet')}"
        ) from error
    try:
        with open_shard(path) as file:
            state = find_state(file)
            found = ParquetFile(ShardFile(path, state), pq.read_metadata(file))
            # Damage of the schema, and of names that are not UTF-8, appears here.
            found.metadata.schema.to_arrow_schema()
            if any(rows < 0 for rows in found.rows):
                raise pa.ArrowInvalid("a row group has fewer than no rows")
            return found
    except UserError:
        raise
    except (pa.ArrowException, OSError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise UserError(
            f"{path} is not a Parquet file, or is damaged ({first_line(error)}); "
            "replace or remove it"
        ) from error


def check_rows(files: Sequence[ParquetFile], rows: int) -> None:
    """Raise UserError if the files state more rows than their bytes can hold images.

    A row of nulls, or one that repeats another, takes no bytes.
    """
    size = sum(file.file.state[0] for file in files)
    if rows > max(MOST_ROWS, size // ROW_BYTES):
        raise UserError(
            f"{files[-1].path}: {rows:,} rows in {size:,} bytes are more than images can be; "
            "remove the rows without an image, and those that repeat others"
        )


def count_bytes(file: ParquetFile, number: int) -> int:
    """Return the bytes, decompressed, that the footer states for a row group.

    UserError for more than memory should hold at once. (pyarrow has the bytes of each column too,
    but ends the process where that part of the footer is damaged.)
    """
    size = file.metadata.row_group(number).total_byte_size
    most = min(MOST_GROUP, max(SPARE, PACKED * file.file.state[0]))
    if not 0 <= size <= most:
        raise UserError(
            f"{file.path}: row group {number} has {size:,} bytes, and is read as a whole; write "
            f"row groups of at most {most:,} bytes"
        )
    return size


def read_column(file: ParquetFile, column: str) -> "pa.ChunkedArray":
    """Read a column of integers of all row groups. UserError as `read_groups`."""
    import pyarrow as pa

    parts = list(read_groups(file, column, whole=True))
    return pa.chunked_array(parts) if parts else pa.chunked_array([], pa.int64())


def read_texts(file: ParquetFile, column: str) -> list[str | None]:
    """Read a column of texts, or of a dictionary of texts, of all row groups.

    UserError as `read_groups`, and for a text that is not UTF-8 or longer than a path.
    """
    import pyarrow as pa

    types = {field.name: field.type for field in file.metadata.schema.to_arrow_schema()}
    encoded, texts = pa.types.is_dictionary(types.get(column, pa.null())), []
    for array in read_groups(file, column, encoded):
        try:
            values = (array.dictionary if encoded else array).to_pylist()
        except UnicodeDecodeError:
            raise UserError(f"{file.path}: column {column} is not UTF-8; write it again") from None
        longest = max((len(text) for text in values if text), default=0)
        if longest > MOST_PATH:
            raise UserError(
                f"{file.path}: column {column} holds a text of {longest:,} characters, more than "
                f"the {MOST_PATH:,} of a path; write it with shorter ones"
            )
        if encoded:
            values = [None if n is None else values[n] for n in array.indices.to_pylist()]
        texts += values
    return texts


def read_groups(file: ParquetFile, column: str, whole: bool = False) -> Iterator["pa.Array"]:
    """Yield a column of labels or names of all row groups in parts, `whole` as `ParquetFile.read`.

    UserError if it is damaged, or takes more than SPARE bytes and than the file with its images.
    """
    left = most = max(SPARE, file.file.state[0])
    fault = UserError(
        f"{file.path}: column {column} takes more than {most:,} bytes, and a column of labels or "
        "names less than the images; write it with shorter texts"
    )
    try:
        for number in range(file.metadata.num_row_groups):
            for array in file.read(column, number, whole):
                left -= array.nbytes
                if left < 0:
                    raise fault
                yield array
    # StorageError is an OSError too.
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from error
