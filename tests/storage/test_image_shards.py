"""Datasets of tar and Parquet shards, against the files that they were written from.

Hostile ones end in one sentence.
"""

import gzip
import json
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from densefeed.storage import parquet_files
from densefeed.storage.image_shards import choose_split
from densefeed.storage.images import Images
from densefeed.storage.tar_files import read_members
from densefeed.system.errors import UserError

from ..shard_files import IMAGE, write_parquet, write_shards, write_tar

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

JPEG = b"\xff\xd8 not decoded here"


@pytest.fixture(scope="module")
def shards(folder, tmp_path_factory):
    """The folders of tar and of Parquet shards of both splits of `folder`."""
    root = tmp_path_factory.mktemp("shards")
    for split in ("train", "val"):
        tars, tables = write_shards(Images(folder, split=split), root, split)
    return {"tar": tars, "parquet": tables}


@pytest.mark.parametrize("kind", ["tar", "parquet"])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_shards_are_recognized_and_equal_the_folder(folder, shards, kind, split):
    want = Images(folder, split=split)
    for got in (Images(shards[kind], split=split), Images(shards[kind], kind, split)):
        assert got.paths == want.paths
        assert got.class_names == want.class_names
        np.testing.assert_array_equal(got.labels, want.labels)
        assert [got.read(n) for n in range(len(got))] == [want.read(n) for n in range(len(want))]
        assert got.size(3) == want.size(3)
        assert got.fingerprint() == want.fingerprint()


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_a_split_may_be_a_folder_of_its_own(folder, shards, tmp_path, kind):
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        for number, file in enumerate(sorted(shards[kind].rglob(f"*{split}-*"))):
            (tmp_path / split / f"{number}{file.suffix}").write_bytes(file.read_bytes())
    (tmp_path / "classnames.txt").write_text("cat\ndog\n")
    got, want = Images(tmp_path, split="val"), Images(folder, split="val")
    assert (got.paths, got.class_names) == (want.paths, want.class_names)


def test_a_folder_of_images_stays_one(tmp_path, folder):
    """Tars beside or in class folders are left out, as before."""
    for path in ("cat/a.jpg", "dog/b.jpg"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_bytes(JPEG)
    for path in ("all.tar", "dog/dogs.parquet"):
        (tmp_path / path).write_bytes(b"")
    assert Images(tmp_path).paths == ["cat/a.jpg", "dog/b.jpg"]


@given(st.lists(st.sampled_from(["a-train-0", "train", "x_val-1", "tested", "b", "val-train-2"])))
def test_split_words_select_names(names):
    chosen = choose_split(names, "train")
    with_words = [name for name in names if name not in ("tested", "b")]
    want = [name for name in names if name.endswith(("train-0", "train", "train-2"))]
    assert chosen == (want if with_words else names)


# ------------------------------------------------------------------------- tar


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_equal_those_of_tarfile(tmp_path, form):
    """Long names, names that are not ASCII, empty files and folders, in every format."""
    names = ["a.jpg", "n01/ü.jpg", f"{'d' * 90}/{'e' * 60}.jpg", "empty.jpg", "x/" * 30 + "y.jpg"]
    if form != tarfile.USTAR_FORMAT:
        names += [f"{'f' * 180}.jpg", f"{'g' * 200}/{'h' * 200}/i.jpg"]
    files = [
        (name, b"" if name[0] == "e" else bytes([n]) * (500 + n)) for n, name in enumerate(names)
    ]
    path = write_tar(tmp_path / "x.tar", files, form)
    with tarfile.open(path, "a", format=form) as tar:
        tar.add(tmp_path, "folder", recursive=False)
    with tarfile.open(path) as tar, open(path, "rb") as file:
        want = [(m.name, m.offset_data, m.size) for m in tar if m.isreg()]
        assert [tuple(member) for member in read_members(file, path)] == want
    assert [name for name, _, _ in want] == names


def test_class_folders_in_a_tar_equal_the_folder(folder, tmp_path):
    """Whatever order `tar` writes them in; its names begin with ./ here."""
    for split, form in (("train", "gnu"), ("val", "posix")):
        options = "--sort=none", f"--format={form}", "-C", folder / split
        subprocess.run(["tar", "-cf", tmp_path / f"{split}.tar", *options, "."], check=True)
        got, want = Images(tmp_path, split=split), Images(folder, split=split)
        assert (got.paths, got.class_names) == (want.paths, want.class_names)
        assert got.fingerprint() == want.fingerprint()
        assert [got.read(n) for n in range(len(got))] == [want.read(n) for n in range(len(want))]


@pytest.mark.parametrize("above", ["", "./", "train/", "photos/train/"])
def test_outside_the_class_in_a_tar_is_the_first_folder(tmp_path, above, capsys):
    names = ["bee/s1/0.jpg", "ant/s2/0.jpg", "ant/s1/0.jpg"]
    write_tar(tmp_path / "0.tar", [(above + name, JPEG) for name in names])
    images = Images(tmp_path)
    assert (images.class_names, images.labels.tolist()) == (["ant", "bee"], [0, 0, 1])
    assert "3 images lie deeper, as bee/s1/0.jpg of class 'bee'" in capsys.readouterr().out


def test_outside_splits_in_a_tar_are_no_classes(tmp_path):
    names = ["train/cat/0.jpg", "train/dog/0.jpg", "val/cat/0.jpg"]
    write_tar(tmp_path / "0.tar", [(name, JPEG) for name in names])
    with pytest.raises(UserError, match="holds splits where class folders should be: train, val;"):
        Images(tmp_path)


def test_outside_what_systems_put_into_a_tar_is_left_out(tmp_path, capsys):
    names = ["ant/0.jpg", "bee/0.jpg", "ant/.ipynb_checkpoints/0.jpg", "__MACOSX/ant/._0.jpg"]
    write_tar(tmp_path / "0.tar", [(name, JPEG) for name in (*names, "bee/@eaDir/0.jpg/a.jpg")])
    # Nor do they hide the shards.
    (tmp_path / "lost+found").mkdir()
    images = Images(tmp_path)
    assert (images.class_names, images.paths) == (["ant", "bee"], names[:2])
    said = "3 hidden or system names were left out: .ipynb_checkpoints 1, @eaDir 1, __MACOSX 1\n"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_outside_images_beside_shards_are_refused(shards, tmp_path, kind):
    (tmp_path / "data").mkdir()
    for file in shards[kind].rglob("*train-*"):
        (tmp_path / "data" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "data" / "0.jpg").write_bytes(JPEG)
    with pytest.raises(UserError, match=f"/data holds images beside {kind} files; move .*{kind}$"):
        Images(tmp_path)
    assert Images(tmp_path, kind).class_names


def write_shard(path):
    """Write a shard, tar or Parquet, of an image of each of two classes."""
    if path.suffix == ".parquet":
        return write_parquet(
            path, [(f"{path.stem}.{n}", JPEG, n) for n in range(2)], ["cat", "dog"]
        )
    return write_tar(path, [(f"{name}/{path.stem}.jpg", JPEG) for name in ("cat", "dog")])


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_outside_a_shard_of_a_class_may_be_called_as_a_split(tmp_path, kind, capsys):
    """Of airplane, car and train only train was read."""
    for name in ("airplane", "car", "train"):
        write_shard(tmp_path / f"{name}.{kind}")
    said = (
        rf"{tmp_path} holds images in airplane.{kind}, car.{kind} beside train.{kind}, which may "
        "be a split or a class; if it is a split, move the others to another folder, and if it is "
        "a class, rename it"
    )
    for split in ("train", "val"):
        with pytest.raises(UserError, match=said):
            Images(tmp_path, split=split)
    (tmp_path / f"car.{kind}").rename(tmp_path / f"val.{kind}")
    assert len(Images(tmp_path)) == 2
    said = f"{tmp_path}: images beside the splits are left out: airplane.{kind}\n"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["tar", "parquet"])
@pytest.mark.parametrize(
    ("there", "missing"),
    [
        (["a-train-00000-of-00003", "a-train-00002-of-00003"], "a-train-00001-of-00003"),
        # Numbered from 1, and with checksums behind.
        (["s_02_of_03", "s_03_of_03"], "s_01_of_03"),
        (["train-00001-of-00002-5c4ff8f8"], "train-00000-of-00002"),
        (["1-of-9"], "0-of-9.tar, 2-of-9.tar, 3-of-9.tar, 4-of-9.tar, 5-of-9.tar, ..."),
        (["0-of-999999999"], "1-of-999999999.tar, 2-of-999999999.tar"),
    ],
)
def test_outside_missing_shards_are_named(tmp_path, kind, there, missing):
    """A part of an interrupted download was trained on."""
    for name in there:
        write_shard(tmp_path / f"{name}.{kind}")
    with pytest.raises(UserError) as error:
        Images(tmp_path)
    assert f".{kind} files: {missing.replace('.tar', f'.{kind}')}" in str(error.value)
    assert "copy them there, or rename the others without " in str(error.value)


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_outside_all_shards_or_none_of_a_number_are_read(tmp_path, kind):
    names = ("x_1_of_2", "x_2_of_2", "y-0-of-1", "y-4", "z-0-of-2-ab", "z-1-of-2-cd", "1-of-a-kind")
    for name in names:
        write_shard(tmp_path / f"{name}.{kind}")
    assert len(Images(tmp_path)) == 2 * len(names)


def test_outside_a_class_of_the_metadata_without_images_is_named(tmp_path, capsys):
    write_parquet(tmp_path / "a.parquet", [("1", JPEG, 0), ("2", JPEG, 2)], ["cat", "dog", "emu"])
    assert Images(tmp_path).labels.tolist() == [0, 2]
    said = f"{tmp_path} has no images of 1 of its 3 classes: dog\n"
    assert said in capsys.readouterr().out


def test_outside_equal_names_in_a_tar_have_the_order_of_the_folder(tmp_path):
    names = [f"{c}/{n}.jpg" for c in ("cat", "dog") for n in ("1", "01", "B", "b")]
    for name in names:
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_bytes(JPEG)
    write_tar(tmp_path / "t" / "a.tar", [(name, JPEG) for name in names])
    got, want = Images(tmp_path / "t"), Images(tmp_path / "d")
    assert got.paths == want.paths
    assert got.fingerprint() == want.fingerprint()


def test_numbered_names_in_a_tar_have_the_order_of_the_folder(tmp_path):
    names = ["b/10.jpg", "b/2.jpg", "a/1.jpg"]
    write_tar(tmp_path / "0.tar", [(name, name.encode()) for name in names])
    images = Images(tmp_path)
    assert images.paths == ["a/1.jpg", "b/2.jpg", "b/10.jpg"]
    assert images.labels.tolist() == [0, 1, 1]
    assert [images.read(n).decode() for n in range(3)] == images.paths


def test_labels_of_json_and_numbers_as_names(tmp_path, capsys):
    """img2dataset's layout; keys that several shards have begin with the shard's name."""
    for number in (10, 9):
        files = []
        for key, label in (("000", 3), ("001", 1)):
            files += [(f"{key}.jpg", JPEG + key.encode()), (f"{key}.txt", b"a caption")]
            files += [(f"{key}.json", b'{"label": %d, "url": {"x": 1, "x": 2}}' % label)]
        write_tar(tmp_path / f"{number}.tar", [*files, ("002.json", b"{}"), ("._000.jpg", b"")])
    images = Images(tmp_path)
    assert images.paths == ["9/000.jpg", "9/001.jpg", "10/000.jpg", "10/001.jpg"]
    assert images.labels.tolist() == [3, 1, 3, 1]
    assert images.class_names == ["0", "1", "2", "3"]
    assert images.read(3) == JPEG + b"001"
    assert "4 other files, 2 samples without an image" in capsys.readouterr().out
    assert images.where(2) == f"{tmp_path}/10.tar/10/000.jpg"


def test_a_tar_that_changed_is_not_read(tmp_path):
    path = write_tar(tmp_path / "0.tar", [("cat/a.jpg", JPEG)])
    images = Images(tmp_path)
    write_tar(path, [("cat/b.jpg", JPEG), ("cat/c.jpg", JPEG)])
    with pytest.raises(OSError, match="changed while it was in use"):
        images.read(0)


def with_type(kind: bytes, **values: object):
    """Return what writes a tar of one member of this type."""

    def write(path):
        with tarfile.open(path, "w") as tar:
            member = tarfile.TarInfo("cat/a.jpg")
            member.type, member.linkname = kind, "b.jpg"
            member.pax_headers = values
            tar.addfile(member)

    return write


def files(*names: str, **contents: bytes):
    """Return what writes a tar of these files."""
    return lambda path: write_tar(path, [(name, contents.get(name[-3:], JPEG)) for name in names])


def changed(write, change):
    """Return what writes a tar and changes its bytes."""

    def rewrite(path):
        write(path)
        path.write_bytes(change(bytearray(path.read_bytes())))

    return rewrite


def with_header(change):
    """Return a change of the first header, whose checksum is then right."""

    def rewrite(content):
        change(content)
        content[148:156] = b" " * 8
        content[148:156] = b"%06o\0 " % sum(content[:512])
        return content

    return rewrite


ONE, NO_TAR = files("cat/a.jpg"), "is not an uncompressed tar file; decompress, replace or"
HOSTILE_TARS = {
    "absolute": (files("/etc/a.jpg"), "the name '/etc/a.jpg' is absolute"),
    "outside": (files("cat/../../a.jpg"), r"leaves its folder by `\.\.`"),
    "symbolic link": (with_type(tarfile.SYMTYPE), "cat/a.jpg is a link"),
    "hard link": (with_type(tarfile.LNKTYPE), "cat/a.jpg is a link"),
    "device": (with_type(tarfile.CHRTYPE), "is neither a file nor a folder"),
    "sparse": (with_type(tarfile.GNUTYPE_SPARSE), "cat/a.jpg is a sparse file"),
    "pax sparse": (
        with_type(tarfile.REGTYPE, **{"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}),
        "holds a sparse file",
    ),
    "pax size": (with_type(tarfile.REGTYPE, size="99999999"), "a member ends behind its end"),
    "negative pax size": (
        with_type(tarfile.REGTYPE, size="-5"),
        "an extended header that is damaged",
    ),
    "key twice": (
        files("cat/a.jpg", "cat/a.jpg"),
        "holds cat/a.jpg and cat/a.jpg, two files of one",
    ),
    "two images": (files("cat/a.jpg", "cat/a.mask.png"), "two files of one sample"),
    "not UTF-8": (changed(ONE, with_header(lambda c: c.__setitem__(4, 255))), "is not UTF-8"),
    "gzip": (changed(ONE, lambda c: gzip.compress(bytes(c))), NO_TAR),
    "cut in a file": (
        changed(files("cat/a.jpg", cat=JPEG * 99), lambda c: c[:600]),
        "has no end mark|is truncated",
    ),
    "cut in a header": (changed(ONE, lambda c: c[:1300]), "has no end mark"),
    "cut between files": (changed(ONE, lambda c: c[:1024]), "has no end mark"),
    "empty": (changed(ONE, lambda c: b""), NO_TAR),
    "no tar": (changed(ONE, lambda c: b"x" * 5000), NO_TAR),
    "joined": (changed(ONE, lambda c: c + c), "holds data behind its end mark"),
    "bit": (changed(ONE, lambda c: c[:3] + b"\1" + c[4:]), NO_TAR),
    "huge": (
        changed(ONE, with_header(lambda c: c.__setitem__(slice(124, 136), b"7" * 11 + b"\0"))),
        "a member ends behind its end",
    ),
    "negative": (
        changed(ONE, with_header(lambda c: c.__setitem__(slice(124, 136), b"\xff" * 12))),
        NO_TAR,
    ),
    "binary size": (
        changed(ONE, with_header(lambda c: c.__setitem__(slice(124, 136), b"\x80" + b"\x7f" * 11))),
        "a member ends behind its end",
    ),
    "long header": (files("x" * 70_000), "an extended header of 70,001 bytes"),
    "no images": (files("a.txt"), "holds no images of the split"),
    "no label": (files("a.jpg"), r"0.tar/a.jpg has no label; write the tar with a .cls file"),
    "some labels": (files("a.jpg", "a.cls", "cat/b.jpg", cls=b"1"), "cat/b.jpg has no label"),
    "label of text": (files("a.jpg", "a.cls", cls=b"cat"), "a.cls has the label 'cat'"),
    "negative label": (files("a.jpg", "a.cls", cls=b"-1"), "a.cls has the label '-1'"),
    "high label": (files("a.jpg", "a.cls", cls=b"65535"), "a label is an integer from 0 to 65,534"),
    "many digits": (files("a.jpg", "a.cls", cls=b"1" * 32), "a.cls has the label '1111"),
    "long label": (files("a.jpg", "a.cls", cls=b"1" * 99), "a.cls has 99 bytes, more than the 32"),
    "true label": (files("a.jpg", "a.json", son=b'{"label": true}'), "has the label 'True'"),
    "no JSON": (files("a.jpg", "a.json", son=b"{"), "a.json is not JSON"),
    "deep JSON": (files("a.jpg", "a.json", son=b"[" * 100_000), "nested too deeply"),
    "long JSON": (files("a.jpg", "a.json", son=b" " * 2**21), "a.json has 2,097,152 bytes"),
}


@pytest.mark.parametrize("what", HOSTILE_TARS)
def test_hostile_tars_are_refused(tmp_path, what):
    write, said = HOSTILE_TARS[what]
    options = {"format": tarfile.GNU_FORMAT} if what == "long header" else {}
    if options:
        write_tar(tmp_path / "0.tar", [("x" * 70_000, b"")], tarfile.GNU_FORMAT)
    else:
        write(tmp_path / "0.tar")
    with pytest.raises(UserError, match=said) as error:
        Images(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_tars_named_as_compressed_ones_are_refused(tmp_path):
    write_tar(tmp_path / "0.tar.gz", [("cat/a.jpg", JPEG)])
    assert Images(tmp_path).paths == ["cat/a.jpg"]
    with tarfile.open(tmp_path / "0.tar.gz", "w:gz") as tar:
        tar.add(__file__, "a.jpg")
    with pytest.raises(UserError, match=NO_TAR):
        Images(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [("cat\ncat\n", "names a class twice"), ("\n", "is empty"), ("cat\n", "outside its 1 classes")],
)
def test_wrong_class_names_are_refused(tmp_path, text, said):
    write_tar(tmp_path / "0.tar", [("a.jpg", JPEG), ("a.cls", b"1")])
    (tmp_path / "classes.txt").write_text(text)
    with pytest.raises(UserError, match=said):
        Images(tmp_path)


def test_missing_splits_and_mixed_kinds_are_refused(tmp_path):
    write_tar(tmp_path / "a-train-0.tar", [("cat/a.jpg", JPEG)])
    with pytest.raises(UserError, match="holds tar files of other splits but none of 'val'"):
        Images(tmp_path, split="val")
    with pytest.raises(UserError, match="holds no parquet files of the split 'train'"):
        Images(tmp_path, "parquet")
    with pytest.raises(UserError, match="the dataset is called tar"):
        Images(tmp_path, "tar/x")
    with pytest.raises(UserError, match="is not a folder; give that of the tar files, /"):
        Images(tmp_path / "a-train-0.tar", "tar")
    write_parquet(tmp_path / "x.parquet", [("a.jpg", JPEG, 0)], ["cat"])
    with pytest.raises(UserError, match="holds tar and Parquet files; give --dataset tar or"):
        Images(tmp_path)


# ------------------------------------------------------------------------- Parquet


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "zstd", "use_dictionary": False},
        {"compression": "none", "data_page_size": 100},
        {"data_page_version": "2.0", "write_page_index": True},
    ],
)
def test_every_form_of_column_is_read(tmp_path, options):
    rng = np.random.default_rng(0)
    rows = [(None, rng.bytes(int(size)), n % 2) for n, size in enumerate(rng.integers(1, 4000, 50))]
    for part in range(2):
        write_parquet(tmp_path / f"{part}.parquet", rows, ["cat", "dog"], group=7, **options)
    images = Images(tmp_path)
    assert images.paths[:2] == ["0/000000", "0/000001"]
    assert images.paths[-1] == "1/000049"
    assert images.labels.tolist() == [label for _, _, label in rows] * 2
    order = rng.permutation(len(images))
    assert [images.read(n) for n in order] == [rows[n % 50][1] for n in order]
    assert images.where(52) == f"{tmp_path}/1.parquet, row 2"


def test_other_columns_and_plain_parquet(tmp_path):
    """CIFAR-100's two labels; files without the metadata of Hugging Face."""
    write_parquet(
        tmp_path / "a" / "x.parquet", [("p", JPEG, 1)], ["x", "y"], image="img", label="fine"
    )
    images = Images(tmp_path / "a")
    assert (images.paths, images.class_names) == (["p"], ["x", "y"])
    assert Images(tmp_path / "a", "parquet/fine").labels.tolist() == [1]
    with pytest.raises(UserError, match=r"no column 'coarse'; give --dataset parquet/fine, or"):
        Images(tmp_path / "a", "parquet/coarse")
    write_parquet(tmp_path / "b" / "x.parquet", [("../p", JPEG, 1)], None)
    images = Images(tmp_path / "b")
    assert (images.paths, images.class_names) == (["x/000000"], ["0", "1"])
    (tmp_path / "b" / "classes.txt").write_text("cat\ndog\n")
    assert Images(tmp_path / "b").class_names == ["cat", "dog"]


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """Sixty rows in six row groups, and the numbers of the row groups that are read."""
    rows = [(None, bytes([n]) * 1000, 0) for n in range(60)]
    write_parquet(tmp_path / "x.parquet", rows, ["cat"], group=10)
    images, reads, read = Images(tmp_path), [], parquet_files.ParquetFile.read
    counting = lambda *words: reads.append(words[2]) or read(*words)  # noqa: E731
    monkeypatch.setattr(parquet_files.ParquetFile, "read", counting)
    return images, [content for _, content, _ in rows], reads


def test_threads_read_a_row_group_once(counted):
    images, want, reads = counted
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(images.read, range(60))) == want
    assert sorted(reads) == [*range(6)]


def test_a_full_cache_forgets_the_row_groups_read_longest_ago(counted, monkeypatch):
    images, want, reads = counted
    monkeypatch.setattr(parquet_files, "CACHE", 25_000)
    assert [images.read(n) for n in range(60)] == want
    assert reads == [*range(6)]
    images.read(59), images.read(49)
    assert len(reads) == 6
    images.read(0), images.read(49)
    assert reads[6:] == [0]
    with pytest.raises(UserError, match=r"too large for training; pack it with densefeed pack"):
        images.blocks()
    # Room for four row groups, with the headers of Parquet's pages.
    monkeypatch.setattr(parquet_files, "CACHE", 50_000)
    assert images.blocks() == (10, 1)
    monkeypatch.setattr(parquet_files, "CACHE", 10**6)
    assert images.blocks() is None


def test_a_row_without_bytes_is_named(tmp_path):
    """Hugging Face writes only a path for images that it did not embed."""
    write_parquet(tmp_path / "x.parquet", [("a", JPEG, 0), ("b", None, 0)], ["cat"])
    images = Images(tmp_path)
    assert images.read(0) == JPEG
    with pytest.raises(OSError, match="this row has no image"):
        images.read(1)


def table(path, fields, columns, metadata=None):
    pq.write_table(pa.table(columns, pa.schema(fields, metadata)), path)


def column(kind, value):
    return lambda path: table(path, [("image", kind), ("label", pa.int64())], [[value], [0]])


def labels(kind, value):
    fields = [("image", IMAGE), ("label", kind)]
    return lambda path: table(path, fields, [[{"bytes": JPEG, "path": "a"}], [value]])


def metadata(text: bytes):
    fields = [("image", IMAGE), ("label", pa.int64())]
    row = [[{"bytes": JPEG, "path": "a"}], [0]]
    return lambda path: table(path, fields, row, {b"huggingface": text})


HOSTILE_TABLES = {
    "text": (column(pa.string(), "a.jpg"), "has 0 columns of images"),
    "struct of texts": (
        column(pa.struct([("bytes", pa.string()), ("path", pa.string())]), None),
        "has 0 columns of images",
    ),
    "list": (column(pa.list_(pa.uint8()), [1]), "has 0 columns of images"),
    "no label": (labels(pa.int64(), None), "row 0 has no label; write an integer or a text"),
    "negative label": (labels(pa.int64(), -1), "has the label '-1'"),
    "high label": (labels(pa.uint64(), 2**64 - 1), "has the label '18446744073709551615'"),
    "names": (
        metadata(b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": 3}}}}'),
        "class names that are not text",
    ),
    "one name twice": (
        metadata(
            json.dumps(
                {"info": {"features": {"label": {"_type": "ClassLabel", "names": ["a", "a"]}}}}
            ).encode()
        ),
        "names no classes, or one twice",
    ),
    "no JSON": (metadata(b"{"), "has damaged metadata of Hugging Face"),
    "a list": (metadata(b"[]"), "has damaged metadata of Hugging Face"),
    "empty": (lambda path: path.write_bytes(b""), "is not a Parquet file, or is damaged"),
    "no Parquet": (lambda path: path.write_bytes(b"PAR1" + b"x" * 99), "is not a Parquet file, or"),
    "no rows": (lambda path: write_parquet(path, [], ["cat"]), "holds no images of the split"),
}


@pytest.mark.parametrize("what", HOSTILE_TABLES)
def test_hostile_tables_are_refused(tmp_path, what):
    write, said = HOSTILE_TABLES[what]
    write(tmp_path / "x.parquet")
    with pytest.raises(UserError, match=said) as error:
        Images(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_other_classes_in_another_file_are_refused(tmp_path):
    for name, classes in (("a", ["x", "y"]), ("b", ["y", "x"])):
        write_parquet(tmp_path / f"{name}.parquet", [(name, JPEG, 0)], classes)
    with pytest.raises(UserError, match=r"b.parquet has other columns or classes than .*a.parquet"):
        Images(tmp_path)


def test_a_large_row_group_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_files, "MOST_GROUP", 1000)
    write_parquet(tmp_path / "x.parquet", [("a", bytes(2000), 0)], ["cat"])
    with pytest.raises(UserError, match=r"row group 0 has 6,... bytes, and is read as a whole"):
        Images(tmp_path)


def test_a_damaged_or_changed_row_group_is_an_error_of_its_images(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", [("a", bytes(range(256)) * 99, 0)], ["cat"])
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56
    path.write_bytes(content)
    with pytest.raises((OSError, UserError), match=r"x.parquet|row group 0 is damaged"):
        Images(tmp_path).read(0)


def test_parquet_without_pyarrow_is_one_sentence(tmp_path, monkeypatch):
    write_parquet(tmp_path / "x.parquet", [("a", JPEG, 0)], ["cat"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r'needs pyarrow .*; run `pip install "\.\[parquet\]"`'):
        Images(tmp_path)
