"""Parquet files of others: labels of any type, bombs, damaged footers, shards named as files."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.open import DataOptions, open_dataset
from densefeed.storage.images import Images
from densefeed.system.errors import UserError
from densefeed.training.ranks import ALONE
from densefeed.training.setup import align_classes

from ..shard_files import IMAGE, write_parquet, write_tar

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

JPEG = b"\xff\xd8 not decoded here"
TEXTS = ["dog", "ant", "dog", "bee"]


def make_images(count):
    return pa.array([{"bytes": JPEG, "path": f"{n}.jpg"} for n in range(count)], IMAGE)


def write_table(path, label=None, image=None, group=2, **others):
    """Write four rows with these columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {"image": make_images(4) if image is None else image, "label": label, **others}
    columns = {name: values for name, values in columns.items() if values is not None}
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path.parent


# ------------------------------------------------------------------------- labels


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view"])
@pytest.mark.parametrize("encoded", [False, True])
def test_outside_sorted_texts_are_the_classes(tmp_path, kind, encoded):
    labels = pa.array(TEXTS, getattr(pa, kind)())
    if encoded:
        labels = pa.array(TEXTS).cast(pa.large_string() if kind == "large_string" else pa.string())
        # In another order than the sorted one.
        labels = pa.DictionaryArray.from_arrays([1, 2, 1, 0], ["bee", "dog", "ant"])
    images = Images(write_table(tmp_path / "x.parquet", labels))
    assert images.class_names == ["ant", "bee", "dog"]
    assert images.labels.tolist() == [2, 0, 2, 1]
    assert images.labels.dtype == np.int64
    assert images.read(3) == JPEG


def test_outside_texts_of_several_files_are_one_set_of_classes(tmp_path):
    write_table(tmp_path / "a.parquet", pa.array(["dog", "cat"] * 2))
    write_table(tmp_path / "b.parquet", pa.array(["ant", "cat"] * 2).dictionary_encode())
    images = Images(tmp_path)
    assert images.class_names == ["ant", "cat", "dog"]
    assert images.labels.tolist() == [2, 1, 2, 1, 0, 1, 0, 1]
    write_table(tmp_path / "c.parquet", pa.array([0, 1, 2, 0]))
    with pytest.raises(UserError, match=r"c.parquet has other columns or classes than .*a.parquet"):
        Images(tmp_path)


def test_outside_texts_of_validation_are_matched_by_name(tmp_path):
    """It lacks a class, so its own numbers are others."""
    write_table(tmp_path / "x-train.parquet", pa.array(["dog", "ant", "bee", "ant"]))
    write_table(tmp_path / "x-val.parquet", pa.array(["dog", "bee"] * 2))
    data = DataOptions(train=tmp_path, val=tmp_path)
    train, val = (open_dataset(data, mode, batch=2, seed=0) for mode in ("train", "evaluate"))
    assert isinstance(val, ThreadedLoader)
    align_classes(data, train, val, ALONE)
    assert train.class_names == val.class_names == ["ant", "bee", "dog"]
    assert val.source.labels.tolist() == [2, 1, 2, 1]
    train.close(), val.close()


REMEDY = "write an integer or a text for each row to 'label'"
REFUSED = {
    "bool": (pa.array([True, False] * 2), f"of type bool in its column 'label'; {REMEDY}"),
    "float": (pa.array([0.0, 1.0] * 2), f"of type double in its column 'label'; {REMEDY}"),
    "list": (pa.array([[0], [1]] * 2), "of type list<element: int64> in its column 'label'"),
    "null": (pa.nulls(4), f"of type null in its column 'label'; {REMEDY}"),
    "minus one": (
        pa.array([0, 1, 0, -1]),
        "column 'label', row 3 has the label '-1'; a label is an integer from 0 to 65,534: write "
        "the number of its class there, or remove the image",
    ),
    "a null": (pa.array([0, None, 1, 0]), "column 'label', row 1 has no label; write an integer"),
    "a null text": (pa.array(["a", "b", None, "b"]), "row 2 has no label; write an integer or a"),
    "empty text": (pa.array(["a", "", "a", "b"]), "row 1 has no label; write an integer or a text"),
    "null in a dictionary": (
        pa.array(["a", "b", "a", None]).dictionary_encode(),
        "column 'label', row 3 has no label",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_outside_other_labels_name_column_type_and_row(tmp_path, what):
    labels, said = REFUSED[what]
    with pytest.raises(UserError) as error:
        Images(write_table(tmp_path / "x.parquet", labels))
    assert str(error.value).startswith(f"{tmp_path}/x.parquet")
    assert said in str(error.value)


def test_outside_the_columns_that_a_message_offers_can_be_given(tmp_path):
    fine, coarse = pa.array(TEXTS), pa.array([0, 1, 0, 1])
    write_table(tmp_path / "x.parquet", None, fine=fine, coarse=coarse, real=pa.array([0.5] * 4))
    with pytest.raises(UserError, match=r"no column 'label'; give .*coarse or parquet/fine"):
        Images(tmp_path)
    with pytest.raises(UserError, match="of type double in its column 'real'; give --dataset"):
        Images(tmp_path, "parquet/real")
    assert Images(tmp_path, "parquet/coarse").labels.tolist() == [0, 1, 0, 1]
    assert Images(tmp_path, "parquet/fine").class_names == ["ant", "bee", "dog"]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"img": make_images(4)}, r"2 columns of images \(image, img\).*remove_columns\(\['img'\]"),
        (
            {"image": pa.array([JPEG] * 4)},
            r"'image' is of type binary\); write .* cast_column\('image', Image\(\)\)",
        ),
        (
            {"image": pa.array([JPEG] * 4), "photo": make_images(4)},
            r"its images in the column 'photo'; call it 'image'",
        ),
    ],
)
def test_outside_other_columns_of_images_have_a_remedy(tmp_path, columns, said):
    with pytest.raises(UserError, match=said):
        Images(write_table(tmp_path / "x.parquet", pa.array(TEXTS), **columns))


@pytest.mark.parametrize(
    ("name", "content"), [("a.cls", b"cat"), ("a.cls", b"-1"), ("a.json", b'{"label": "0"}')]
)
def test_outside_a_wrong_label_in_a_tar_has_a_remedy(tmp_path, name, content):
    write_tar(tmp_path / "0.tar", [("a.jpg", JPEG), (name, content)])
    with pytest.raises(UserError, match=f"0.tar/{name} has the label .*: write the number of its"):
        Images(tmp_path)


def test_outside_a_shard_given_as_the_data_names_its_folder(tmp_path):
    table = write_table(tmp_path / "x.parquet", pa.array(TEXTS)) / "x.parquet"
    tar = write_tar(tmp_path / "photos-train.tar", [("cat/a.jpg", JPEG)])
    for path in (table, tar):
        with pytest.raises(UserError) as error:
            Images(path)
        assert str(error.value) == f"{path} is a file; give its folder, {tmp_path}"
    with pytest.raises(UserError, match=f"of a tar or Parquet file give {tmp_path}\\)"):
        open_dataset(DataOptions(train=tar, val=tar), "train", batch=1, seed=0)


# ------------------------------------------------------------------------- bombs


# Peak memory (MiB) and error of reading the first and the last image of each folder.
PROBE = """
import json, resource, sys
from pathlib import Path
import pyarrow.parquet
from densefeed.storage.images import Images
from densefeed.system.errors import UserError
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
base, found = peak(), []
for folder in sys.argv[1:]:
    try:
        images = Images(Path(folder))
        found.append(["", len(images), len(images.read(0) + images.read(len(images) - 1))])
    except (UserError, OSError) as error:
        found.append([str(error)])
print(json.dumps([(peak() - base) / 1024, found]))
"""


def probe(*folders):
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *folders], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def write_rows(folder, count, content, name, label=0, **options):
    """Write `count` rows: of one value by a dictionary, or of the values of an array."""

    def column(value, kind):
        if isinstance(value, pa.Array):
            return value
        indices = pa.array(np.zeros(count, np.int32))
        return pa.DictionaryArray.from_arrays(indices, pa.array([value], kind))

    parts = [column(content, pa.binary()), column(name, pa.string())]
    image = pa.StructArray.from_arrays(parts, ["bytes", "path"])
    labels = pa.array(np.full(count, label)) if isinstance(label, int) else label
    folder.mkdir()
    # The types of Arrow would make them dictionaries when they are read.
    options = {"store_schema": False, "row_group_size": count, "compression": "zstd"} | options
    pq.write_table(pa.table({"image": image, "label": labels}), folder / "x.parquet", **options)
    assert (folder / "x.parquet").stat().st_size < 2**20
    return folder


IMAGE_TYPES = pa.binary(), pa.string()
BOMBS = (
    "image.bytes with its repeated values more than",
    "column image.path holds a text of 1,048,576 characters, more than the 4,095 of a path; write",
    "5,000,000 rows in",
    "image.bytes has the encoding DELTA_BYTE_ARRAY, whose size cannot be bounded",
    "column label holds a text of 1,048,576 characters",
    "column label holds a text of 1,048,576 characters",
)


@pytest.mark.slow
def test_outside_bombs_are_refused_within_a_few_hundred_megabytes(tmp_path):
    """Each takes 0.5 to 20 GB decoded. (Footers that lie: test_parquet_pages.py.)"""
    count, mega, nulls = 20_000, 2**20, 5_000_000
    numbers = pa.array([f"{n}" for n in range(count)])
    prefixes = pa.array([bytes(mega)] * 500, pa.binary())
    deltas = {"use_dictionary": False, "column_encoding": {"image.bytes": "DELTA_BYTE_ARRAY"}}
    texts = pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), ["a" * mega])
    ones = numbers.cast(pa.binary())
    folders = [
        write_rows(tmp_path / "0", count, bytes(mega), numbers),
        write_rows(tmp_path / "1", count, b"x", "a" * mega),
        write_rows(tmp_path / "2", nulls, *(pa.nulls(nulls, kind) for kind in IMAGE_TYPES)),
        write_rows(tmp_path / "3", 500, prefixes, numbers[:500], **deltas),
        write_rows(tmp_path / "4", count, ones, numbers, texts),
        # A dictionary when it is read, too.
        write_rows(tmp_path / "5", count, ones, numbers, texts, store_schema=True),
    ]
    # Small images may repeat.
    valid = write_rows(tmp_path / "6", count, JPEG * 200, "a.jpg")
    megabytes, (*found, read) = probe(*folders, valid)
    for folder, (error, *_), words in zip(folders, found, BOMBS, strict=True):
        assert error.startswith(f"{folder}/x.parquet")
        assert words in error
    assert read == ["", count, 2 * 200 * len(JPEG)]
    assert megabytes < 450


# ------------------------------------------------------------------------- damage


# Prints the exceptions that changes of each byte of a file's footer end in. In a process of its
# own: pyarrow ends it at some damage.
FLIP = """
import contextlib, io, sys
from pathlib import Path
from densefeed.storage.images import Images
from densefeed.system.errors import UserError
path = Path(sys.argv[1])
whole = path.read_bytes()
first = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
for place in range(first, len(whole)):
    damaged = bytearray(whole)
    damaged[place] ^= 0x80
    path.write_bytes(damaged)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            images = Images(path.parent)
            for n in range(len(images)):
                images.read(n)
    except (UserError, OSError) as error:
        assert str(path.parent) in str(error), (place, error)
    except Exception as error:
        print(place, repr(error))
print("end")
"""


@pytest.mark.slow
def test_outside_a_changed_byte_of_the_footer_is_one_sentence(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", [("a.jpg", JPEG, 0)], None, store_schema=False)
    done = subprocess.run([sys.executable, "-c", FLIP, path], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("end\n", 0), done.stderr[-500:]


def test_outside_a_name_that_is_not_utf8_is_one_sentence(tmp_path):
    """Of a column in the footer, and a text in a page."""
    path = write_table(tmp_path / "x.parquet", pa.array(TEXTS)) / "x.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"image", b"im\xffge"))
    with pytest.raises(UserError, match=r"x.parquet is not a Parquet file, or is damaged"):
        Images(tmp_path)
    write_table(path, pa.array(TEXTS).cast(pa.binary()).view(pa.string()))
    labels = pa.array([b"\xff", b"a"] * 2).view(pa.string())
    write_table(path, labels)
    with pytest.raises(UserError, match=r"x.parquet: column label is not UTF-8; write it again"):
        Images(Path(tmp_path))
