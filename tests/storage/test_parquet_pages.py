"""Headers of Parquet's pages: those of every writer's options, hostile ones, and stated sizes."""

from contextlib import suppress
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from densefeed.storage.images import Images
from densefeed.storage.parquet_files import open_parquet
from densefeed.storage.parquet_pages import read_header, read_pages
from densefeed.system.errors import UserError

from ..shard_files import IMAGE
from .test_outside_parquet import probe, write_rows

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

COUNT = 40
# A fifth are equal, so that dictionaries are of use.
CONTENTS = [np.random.default_rng(n % 32).bytes(300) for n in range(COUNT)]


def write_images(path, **options):
    """Write COUNT rows in two row groups, in pages of ten rows if they are not a dictionary's."""
    path.parent.mkdir(exist_ok=True)
    rows = [{"bytes": content, "path": f"{n}.jpg"} for n, content in enumerate(CONTENTS)]
    table = pa.table({"image": pa.array(rows, IMAGE), "label": [n % 3 for n in range(COUNT)]})
    options = {"row_group_size": COUNT // 2, "data_page_size": 1, "write_batch_size": 10} | options
    pq.write_table(table, path, **options)
    return path


def find_chunks(path):
    """The metadata of every column chunk and its bytes, where the footer says that they are."""
    whole, metadata = path.read_bytes(), pq.read_metadata(path)
    for group, column in product(range(metadata.num_row_groups), range(metadata.num_columns)):
        chunk = metadata.row_group(group).column(column)
        first = chunk.dictionary_page_offset or chunk.data_page_offset
        yield chunk, whole[first : first + chunk.total_compressed_size]


def find_headers(content):
    """The first and the last byte of each header of a column chunk."""
    at = 0
    while at < len(content):
        fields, end = read_header(content, at)
        yield at, end
        at = end + fields[3,]


# ------------------------------------------------------------------------- writers


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "zstd", "brotli", "lz4"])
def test_files_of_every_codec_and_page_are_read(tmp_path, codec, version, dictionary, statistics):
    """The pages and their headers have the bytes that pyarrow's footer states."""
    path = write_images(
        tmp_path / "x.parquet",
        compression=codec,
        data_page_version=version,
        use_dictionary=dictionary,
        write_statistics=statistics,
        write_page_checksum=statistics,
    )
    for chunk, content in find_chunks(path):
        headers = list(find_headers(content))
        assert len(headers) == 2 + chunk.has_dictionary_page
        total = read_pages(content, COUNT).size + sum(end - at for at, end in headers)
        assert total == chunk.total_uncompressed_size
    images = Images(tmp_path)
    assert [images.read(n) for n in range(COUNT)] == CONTENTS
    assert images.labels.tolist() == [n % 3 for n in range(COUNT)]
    assert images.paths[-1] == "39.jpg"


def test_incompressible_and_small_pages_are_read(tmp_path):
    """Their compressed form is longer."""
    rng = np.random.default_rng(0)
    for codec, size in product(["snappy", "gzip", "zstd", "brotli", "lz4"], [0, 1, 100, 2**17]):
        rows = pa.array([{"bytes": rng.bytes(size), "path": ""}], IMAGE)
        table = pa.table({"image": rows, "label": [0]})
        pq.write_table(table, tmp_path / "x.parquet", compression=codec, use_dictionary=False)
        assert len(Images(tmp_path).read(0)) == size


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip"])
def test_row_groups_without_rows_are_read(tmp_path, codec):
    rows = pa.table({"image": pa.array([{"bytes": b"x", "path": "a"}], IMAGE), "label": [0]})
    with pq.ParquetWriter(tmp_path / "x.parquet", rows.schema, compression=codec) as writer:
        for table in (rows[:0], rows, rows[:0], rows, rows[:0]):
            writer.write_table(table)
    assert pq.read_metadata(tmp_path / "x.parquet").num_row_groups == 5
    images = Images(tmp_path)
    assert [images.read(n) for n in range(len(images))] == [b"x", b"x"]


def test_pyarrow_reads_a_column_chunk_by_one_call(tmp_path, monkeypatch):
    """So the check of its pages needs no request of its own, and sees all of them."""
    path = write_images(tmp_path / "x.parquet")
    seen = []
    monkeypatch.setattr(
        "densefeed.storage.parquet_files.read_pages",
        lambda content, most: seen.append(content) or read_pages(content, most),
    )
    file = open_parquet(path)
    for group, column in product(range(2), ["image.bytes", "image.path", "label"]):
        assert sum(len(array) for array in file.read(column, group)) == COUNT // 2
    assert seen == [content for _, content in find_chunks(path)]


# ------------------------------------------------------------------------- stated sizes


def varint(value):
    """A positive integer as Thrift writes it."""
    value, content = 2 * value, b""
    while value > 127:
        content, value = content + bytes([value & 127 | 128]), value >> 7
    return content + bytes([value])


def restate(path, first, last, old, new):
    """Replace an integer in the bytes `first` to `last` by one of as many bytes."""
    whole, old, new = path.read_bytes(), varint(old), varint(new)
    new = new[:-1] + bytes([new[-1] | 128] + [128] * (len(old) - len(new) - 1) + [0])
    part = whole[first:last]
    assert len(new) == len(old)
    assert old in part
    path.write_bytes(whole[:first] + part.replace(old, new) + whole[last:])


def understate(folder, size):
    """Let a file's footer state `size` bytes for its row group and its images."""
    path = folder / "x.parquet"
    first = -8 - int.from_bytes(path.read_bytes()[-8:-4], "little")
    group = pq.read_metadata(path).row_group(0)
    columns = {group.column(n).total_uncompressed_size for n in range(group.num_columns)}
    for stated in {group.total_byte_size, *columns}:
        if stated > size:
            restate(path, first, -8, stated, size)
    assert pq.read_metadata(path).row_group(0).total_byte_size == size
    return folder


@pytest.mark.slow
def test_outside_a_footer_that_states_too_few_bytes_takes_no_memory(tmp_path):
    """These take 0.4 GB decoded: many rows name an image, or one has many bytes."""
    count, mega = 400, 2**20
    numbers = pa.array([f"{n}" for n in range(count)])
    zeros, plain = pa.array([bytes(200 * mega)], pa.binary()), {"use_dictionary": False}
    folders = [
        understate(write_rows(tmp_path / "0", count, bytes(mega), numbers), 20_000),
        understate(write_rows(tmp_path / "1", 1, zeros, numbers[:1], **plain), 20_000),
    ]
    megabytes, found = probe(*folders)
    for folder, (error, *_), size in zip(folders, found, ["1,048,", "209,715,"], strict=True):
        assert error.startswith(f"{folder}/x.parquet: row group 0 has 20,000 bytes by its footer")
        assert f"and the pages of image.bytes {size}" in error
        assert error.endswith("; write the file again")
    assert megabytes < 100


def test_outside_a_column_of_labels_is_compared_with_the_footer(tmp_path):
    texts = pa.array(["a" * 4000, "b" * 4000] * 3)
    folder = write_rows(tmp_path / "0", 6, b"x", pa.array(["p"] * 6), texts)
    with pytest.raises(UserError, match=r"has 1,000 bytes by its footer, and the pages of label"):
        Images(understate(folder, 1000))


def test_outside_a_page_longer_than_its_header_states_is_refused(tmp_path):
    """Pages that are not compressed are read whatever their header states."""
    path = write_images(tmp_path / "x.parquet", compression="none", use_dictionary=False)
    chunk, content = next(find_chunks(path))
    first, size = chunk.data_page_offset, read_header(content, 0)[0][2,]
    # The first of the two equal numbers is of the decompressed page.
    end = first + 1 + content.index(varint(size)) + len(varint(size))
    restate(path, first, end, size, 9)
    said = r"row group 0 is damaged \(the header of a page states wrong sizes\); copy .*x.parquet"
    with pytest.raises(OSError, match=said):
        Images(tmp_path).read(0)


# ------------------------------------------------------------------------- hostile headers


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("encoding", ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"])
def test_outside_encodings_that_state_a_count_within_the_page_are_refused(
    tmp_path, encoding, version
):
    """By changing that count, a file of some kilobytes takes 8 GB."""
    path = write_images(
        tmp_path / "p/train.parquet",
        data_page_version=version,
        use_dictionary=False,
        column_encoding={"image.bytes": encoding, "image.path": "PLAIN", "label": "PLAIN"},
    )
    images = Images(path.parent)
    with pytest.raises(UserError, match=f"image.bytes has the encoding {encoding}, whose size"):
        images.read(0)


def page(size=0, compressed=0, others=b"", body=b""):
    """A page of type 0 with these sizes and the other fields of its header as bytes."""
    return b"\x15\0\x15" + varint(size) + b"\x15" + varint(compressed) + others + b"\0" + body


HUGE = b"\xff" * 9 + b"\x01"
HOSTILE = {
    "empty header": (b"\0", "states wrong sizes"),
    "no end": (page()[:-1], "the header of a page is truncated"),
    "half a varint": (b"\x15\0\x15\xff", "the header of a page is truncated"),
    "endless varint": (b"\x15" + b"\x80" * 1000, "an integer that is too large"),
    "33 bits": (b"\x15\0\x15\x80\x80\x80\x80\x10\x15\0\0", "an integer that is too large"),
    "negative size": (b"\x15\0\x15\x01\x15\0\0", "states wrong sizes"),
    "negative compressed": (b"\x15\0\x15\0\x15\x01\0", "states wrong sizes"),
    "64 bits for 32": (b"\x15\0\x16\0\x15\0\0", "states wrong sizes"),
    "deep": (b"\x1c" * 10**6, "the header of a page is damaged"),
    "many fields": (b"\x11" * 10**6, "the header of a page is damaged"),
    "a list": (page(others=b"\x19\xf5" + HUGE), "the header of a page is damaged"),
    "unknown type": (page(others=b"\x1d"), "the header of a page is damaged"),
    "long text": (page(others=b"\x18\xff\xff\xff\xff\x0f"), "the header of a page is truncated"),
    "longer text": (page(others=b"\x18" + HUGE), "an integer that is too large"),
    "high id": (page(others=b"\x05" + HUGE), "an integer that is too large"),
    "truncated page": (page(9, 9, body=b"8 bytes!"), "a page is truncated"),
    "many pages": (page() * 1000, "it has more pages than rows"),
    "many entries": (
        page(others=b"\x4c\x15" + varint(2**22 + 1) + b"\0"),
        "a dictionary has more than 4,194,304 entries",
    ),
    "decompressed is less": (page(1, 100, body=bytes(100)), "states wrong sizes"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_headers_are_refused(what):
    content, said = HOSTILE[what]
    with pytest.raises(OSError, match=said):
        read_pages(content, 100)


def test_fields_that_are_not_known_are_skipped():
    """Of all types that a later version may add, and a size that is stated twice."""
    others = [b"\x13\x07", b"\x17" + bytes(8), b"\x18\x03abc", b"\x16\x10", b"\x1c\x15\x04\x11\0"]
    content = page(5, 0, b"".join(others) + b"\x05\x04" + varint(7))
    assert read_pages(content + page(1), 2).size == 7 + 1


@pytest.fixture(scope="module")
def chunks(tmp_path_factory):
    """Column chunks with pages of both versions."""
    root, found = tmp_path_factory.mktemp("pages"), []
    for version in ("1.0", "2.0"):
        path = write_images(root / f"{version}.parquet", data_page_version=version)
        found += [content for _, content in find_chunks(path)]
    return found


@given(st.data())
def test_outside_changed_bytes_of_headers_are_one_sentence(chunks, data):
    content = bytearray(data.draw(st.sampled_from(chunks)))
    places = [place for at, end in find_headers(content) for place in range(at, end)]
    for place in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    with suppress(OSError):
        assert read_pages(bytes(content), COUNT).size >= 0


# Prints the exceptions that a changed byte of a header ends in, of the file of argv[1] at the
# places of argv[2:]. In a process of its own: pyarrow might end it.
FLIP = """
import sys
from pathlib import Path
from densefeed.storage.parquet_files import open_parquet
from densefeed.system.errors import UserError
path, places = Path(sys.argv[1]), map(int, sys.argv[2:])
whole = path.read_bytes()
for place in places:
    for bit in range(8):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        file = open_parquet(path)
        for column in "image.bytes", "image.path", "label":
            try:
                list(file.read(column, 0))
            except (UserError, OSError) as error:
                assert str(path) in str(error), (place, error)
                assert "\\n" not in str(error), (place, error)
            except Exception as error:
                print(place, bit, repr(error))
print("end")
"""


@pytest.mark.parametrize(
    ("version", "every"),
    [
        ("1.0", 4),
        pytest.param("1.0", 1, marks=pytest.mark.slow),
        pytest.param("2.0", 1, marks=pytest.mark.slow),
    ],
)
def test_outside_a_file_with_a_changed_header_is_one_sentence(tmp_path, command, version, every):
    options = {"data_page_version": version, "write_statistics": False}
    path, places = write_images(tmp_path / "x.parquet", **options), []
    for chunk, content in list(find_chunks(path))[:3]:
        first = chunk.dictionary_page_offset
        places += [first + n for at, end in find_headers(content) for n in range(at, end)]
    done = command("-c", FLIP, path, *places[::every])
    assert (done.stdout, done.returncode) == ("end\n", 0), done.stdout + done.stderr[-500:]
