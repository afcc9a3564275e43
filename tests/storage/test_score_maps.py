"""ScoreMapStore and ScoreMapWriter against h5py, and on damaged files."""

import errno
import json
import os
import random
import struct
import zlib
from dataclasses import replace

import h5py
import numpy as np
import pytest

from densefeed.storage.maintenance import convert, verify, verify_files
from densefeed.storage.score_maps import (
    ScoreMaps,
    ScoreMapStore,
    ScoreMapWriter,
    find_duplicate_classes,
    row_crcs,
    split_runs,
)
from densefeed.storage.store_file import StoreFile
from densefeed.system.errors import UserError
from densefeed.system.files import remove_orphans

from ..stores import make_header

HEADER = make_header()
PATHS, LABELS = [f"a/{n}.jpg" for n in range(10)], np.arange(10) % 2


def fill(path, random_maps, rows=slice(0, 10), finish=True, header=HEADER):
    maps = random_maps(10, 4, 3, 9)
    writer = ScoreMapWriter(path, header, PATHS, LABELS)
    ids = np.arange(10)[rows]
    writer.write(ids, ScoreMaps(*(part[rows] for part in maps)))
    writer.finish() if finish else writer.close()
    return maps


def test_rows_round_trip_and_equal_h5py(tmp_path, random_maps):
    path = tmp_path / "maps.h5"
    written = fill(path, random_maps)
    store = ScoreMapStore(path)
    ids = np.array([7, 0, 7, 3])
    for got, want in zip(store.rows(ids), written, strict=True):
        np.testing.assert_array_equal(got, want[ids])
    assert store.paths() == PATHS
    np.testing.assert_array_equal(store.labels, LABELS)
    with h5py.File(path) as file:
        assert json.loads(file.attrs["densefeed"])["num_classes"] == 9
        np.testing.assert_array_equal(file["logit"][:], written.logit)
        np.testing.assert_array_equal(file["cls"][:], written.cls)
        assert store.max_palette == max(len(np.unique(row)) for row in file["cls"][:])
        row = 4
        by_hand = zlib.crc32(
            b"".join(file[name][row].tobytes() for name in ("logit", "cls", "lse", "window"))
        )
        assert file["crc32"][row] == by_hand


def test_a_killed_run_resumes(tmp_path, random_maps):
    path = tmp_path / "maps.h5"
    fill(path, random_maps, slice(0, 4), finish=False)
    assert not path.exists()
    writer = ScoreMapWriter(path, HEADER, PATHS, LABELS)
    assert [list(ids) for ids in split_runs(np.flatnonzero(~writer.done), 4)] == [
        [4, 5, 6, 7],
        [8, 9],
    ]
    maps = random_maps(10, 4, 3, 9)
    writer.write(np.arange(4, 10), ScoreMaps(*(part[4:] for part in maps)))
    writer.finish()
    whole = tmp_path / "whole.h5"
    fill(whole, random_maps)
    assert path.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("name", ["logit", "palette"])
def test_a_torn_row_counts_as_not_done(tmp_path, random_maps, name):
    """A power cut may leave any of its datasets unwritten; the CRC covers the map alone."""
    path = tmp_path / "maps.h5"
    fill(path, random_maps, slice(0, 6), finish=False)
    with h5py.File(f"{path}.part", "r+") as file:
        file[name][2] += 1
    writer = ScoreMapWriter(path, HEADER, PATHS, LABELS)
    assert [list(ids) for ids in split_runs(np.flatnonzero(~writer.done), 8)] == [[2], [6, 7, 8, 9]]
    writer.close()


@pytest.mark.parametrize("name", ["label", "path"])
def test_a_part_with_other_labels_or_paths_is_not_resumed(tmp_path, random_maps, name):
    path = tmp_path / "maps.h5"
    fill(path, random_maps, slice(0, 6), finish=False)
    with h5py.File(f"{path}.part", "r+") as file:
        file[name][3] = {"label": 0, "path": b"a/x.jpg"}[name]
    with pytest.raises(UserError, match=r"maps.h5.part is damaged; remove it and run again"):
        ScoreMapWriter(path, HEADER, PATHS, LABELS)


@pytest.mark.parametrize("name", ["logit", "palette", "done", "label"])
def test_what_is_not_on_disk_as_written_gets_no_final_name(tmp_path, random_maps, name):
    path = tmp_path / "maps.h5"
    maps, writer = random_maps(10, 4, 3, 9), ScoreMapWriter(path, HEADER, PATHS, LABELS)
    writer.write(np.arange(10), maps)
    with h5py.File(f"{path}.part", "r", locking=False) as file:
        offset = file[name].id.get_offset()
    with open(f"{path}.part", "r+b") as file:
        file.seek(offset)
        file.write(b"\x77")
    with pytest.raises(UserError, match=r"is damaged|1 rows are not on disk as they were written"):
        writer.finish()
    writer.close()
    assert not path.exists()
    if name != "label":
        again = ScoreMapWriter(path, HEADER, PATHS, LABELS)
        again.write(np.arange(1), ScoreMaps(*(part[:1] for part in maps)))
        again.finish()
        assert ScoreMapStore(path).names_match()


def test_a_new_file_is_no_orphan_before_it_has_its_name(tmp_path, random_maps, monkeypatch):
    """Another process that begins at the same time removes what nobody has locked."""
    path, link = tmp_path / "maps.h5", os.link

    def late(*names):
        remove_orphans(path)
        link(*names)

    monkeypatch.setattr(os, "link", late)
    fill(path, random_maps)
    assert len(ScoreMapStore(path)) == 10


def test_a_part_of_another_process_is_kept_where_there_are_no_hard_links(tmp_path, monkeypatch):
    path = tmp_path / "maps.h5"

    def link(*_):
        (tmp_path / "maps.h5.part").write_bytes(b"of another process")
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(UserError, match="is damaged"):
        ScoreMapWriter(path, HEADER, PATHS, LABELS)
    assert (tmp_path / "maps.h5.part").read_bytes() == b"of another process"


def test_a_part_of_another_labeling_is_refused(tmp_path, random_maps):
    path = tmp_path / "maps.h5"
    fill(path, random_maps, slice(0, 4), finish=False)
    other = replace(HEADER, teacher="another")
    with pytest.raises(UserError, match=r"started with another teacher .*; remove it"):
        ScoreMapWriter(path, other, PATHS, LABELS)


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("logit", np.nan, "a logit that is not finite"),
        ("logit", -np.inf, "a logit that is not finite"),
        ("lse", np.inf, "a logsumexp that is not finite"),
        ("cls", 9, "class 9 of 9"),
        ("window", np.nan, "a Window that is not part of the image"),
        ("window", 1.5, "a Window that is not part of the image"),
        ("window", 0.0, "a Window that is not part of the image"),
    ],
)
def test_invalid_values_are_named(tmp_path, random_maps, field, value, what):
    """Row 6 is written with the invalid value and a valid CRC.

    Rows damaged after they were written are left to the reader.
    """
    maps = random_maps(10, 4, 3, 9)
    getattr(maps, field)[6].flat[-1] = value
    writer = ScoreMapWriter(tmp_path / "maps.h5", HEADER, PATHS, LABELS)
    writer.write(np.arange(10), maps)
    writer.finish()
    with pytest.raises(
        UserError,
        match=rf"maps.h5: the map of a/6.jpg \(row 6\) holds {what}; label the images again",
    ):
        ScoreMapStore(tmp_path / "maps.h5").check_values()


def test_a_duplicate_class_in_a_cell_and_a_too_small_palette_are_named(tmp_path, random_maps):
    maps = random_maps(10, 4, 3, 9)
    maps.cls[4, 2, 1] = (5, 7, 5)
    writer = ScoreMapWriter(tmp_path / "twice.h5", HEADER, PATHS, LABELS)
    writer.write(np.arange(10), maps)
    writer.finish()
    with pytest.raises(
        UserError, match=r"the map of a/4.jpg \(row 4\) holds a class twice in one cell"
    ):
        ScoreMapStore(tmp_path / "twice.h5").check_values()
    fill(tmp_path / "small.h5", random_maps)
    with h5py.File(tmp_path / "small.h5", "r+") as file:
        file["palette"][7] -= 1
    with pytest.raises(
        UserError, match=r"the map of a/7.jpg \(row 7\) holds more classes than its palette size"
    ):
        ScoreMapStore(tmp_path / "small.h5").check_values()


@pytest.mark.parametrize("change", [{"side": 5}, {"top_k": 2}, {"side": 5, "top_k": 2}])
def test_rows_that_do_not_match_the_header_are_refused(tmp_path, random_maps, change):
    path = tmp_path / "maps.h5"
    fill(path, random_maps)
    change_header(path, **change)
    with pytest.raises(
        UserError,
        match=r"maps.h5: its header requires 'logit' to be .* but it is \(10, 4, 4, 3\).*; label",
    ):
        ScoreMapStore(path)
    with h5py.File(path, "r+") as file:
        del file["lse"]
    with pytest.raises(UserError, match=r"maps.h5: its header"):
        ScoreMapStore(path)


def test_values_are_checked_in_chunks_and_damaged_rows_are_left_to_the_reader(
    tmp_path, random_maps, monkeypatch
):
    written = fill(tmp_path / "maps.h5", random_maps)
    monkeypatch.setattr(
        "densefeed.storage.score_maps.CHUNK_BYTES", 3 * sum(part[:1].nbytes for part in written)
    )
    store = ScoreMapStore(tmp_path / "maps.h5")
    store.check_values()
    with h5py.File(tmp_path / "maps.h5", "r+") as file:
        file["logit"][8, 0, 0, 0] = np.nan
    store.check_values()
    with pytest.raises(UserError, match=r"row 8 .* is damaged"):
        store.rows(np.array([8]))


def test_errors_name_the_file_and_the_remedy(tmp_path, random_maps):
    with pytest.raises(UserError, match=r"nowhere.h5: there is no such file; make it"):
        ScoreMapStore(tmp_path / "nowhere.h5")
    path = tmp_path / "maps.h5"
    fill(path, random_maps)
    with pytest.raises(UserError, match=r"exists already; remove it"):
        ScoreMapWriter(path, HEADER, PATHS, LABELS)
    with pytest.raises(UserError, match=r"another dataset"):
        ScoreMapStore(path).check("other", LABELS, PATHS, tmp_path)
    unfinished = tmp_path / "unfinished.h5"
    fill(unfinished, random_maps, slice(0, 4), finish=False)
    os.rename(f"{unfinished}.part", unfinished)
    with h5py.File(unfinished, "r+") as file:
        file["done"][9] = 7
    with pytest.raises(UserError, match=r"6 rows are not labeled"):
        ScoreMapStore(unfinished)
    foreign = tmp_path / "foreign.h5"
    h5py.File(foreign, "w").close()
    with pytest.raises(UserError, match=r"is not a score map file"):
        ScoreMapStore(foreign)


def test_rows_of_the_imagenet_shape_have_the_documented_size():
    """6,480 bytes of maps and 648 bytes of lse at S=18, k=5, as in FORMAT.md."""
    maps = ScoreMaps(
        np.zeros((1, 18, 18, 5), np.float16),
        np.zeros((1, 18, 18, 5), np.uint16),
        np.zeros((1, 18, 18), np.float16),
        np.zeros((1, 4), np.float32),
    )
    assert maps.logit.nbytes + maps.cls.nbytes == 6480
    assert maps.lse.nbytes == 648
    assert row_crcs(maps)[0] == zlib.crc32(bytes(6480 + 648 + 16))


# ------------------------------------------------------------------------- hostile files


def change_header(path, **changes):
    """Change entries of the header of a store; the value "gone" removes one."""
    with h5py.File(path, "r+") as file:
        values = json.loads(file.attrs["densefeed"]) | changes
        file.attrs["densefeed"] = json.dumps({k: v for k, v in values.items() if v != "gone"})


def replace_path(file, **dataset):
    del file["path"]
    file.create_dataset("path", **dataset)


DATASETS = {
    "variable-length strings": (
        lambda file: replace_path(file, data=PATHS, dtype=h5py.string_dtype()),
        "requires 'path' to be .* but it is .* of another type",
    ),
    "object references": (
        lambda file: replace_path(file, data=[file.ref] * 10, dtype=h5py.ref_dtype),
        "requires 'path' to be .* but it is .* of another type",
    ),
    "integers for paths": (
        lambda file: replace_path(file, data=np.arange(10)),
        "requires 'path' to be .* but it is .* of int64",
    ),
    "paths longer than any": (
        lambda file: replace_path(file, data=np.array([b"a" * 5000] * 10)),
        r"requires 'path' to be \(10,\) of \|S4096",
    ),
    "chunks": (
        lambda file: replace_path(file, data=np.array(PATHS, "S"), chunks=(2,)),
        "'path' is not contiguous",
    ),
    "storage in another file": (
        lambda file: replace_path(file, shape=10, dtype="S8", external=[("/etc/passwd", 0, 80)]),
        "'path' has filters or lies in another file",
    ),
    "a soft link": (lambda file: file.update(x=h5py.SoftLink("/path")), "'x' is a link"),
    "an external link": (
        lambda file: file.update(x=h5py.ExternalLink("/etc/passwd", "/x")),
        "root group is not stored as a symbol table",
    ),
    "a group": (lambda file: file.create_group("x"), "'x' is not a dataset"),
    "another dataset": (lambda file: file.update(x=np.zeros(3)), "holds 'x', which is not part"),
    "a checksum of another type": (
        lambda file: file.attrs.update(names_crc32="x"),
        "is not a score map file",
    ),
}


@pytest.mark.parametrize("what", DATASETS)
def test_other_datasets_are_refused_before_they_are_read(tmp_path, random_maps, what):
    path, (change, problem) = tmp_path / "maps.h5", DATASETS[what]
    fill(path, random_maps)
    with h5py.File(path, "r+") as file:
        change(file)
    with pytest.raises(UserError, match=rf"maps.h5.*{problem}"):
        ScoreMapStore(path)


@pytest.mark.parametrize("target", ["nowhere", "mine"])
def test_a_link_in_place_of_an_unfinished_store_is_refused(tmp_path, target):
    """A link to nothing can be neither opened nor created; a link to a file leads to it."""
    (tmp_path / "mine").write_text("mine")
    part = tmp_path / "maps.h5.part"
    part.symlink_to(target)
    with pytest.raises(UserError, match=rf"^{part} is not a regular file; remove it or choose"):
        ScoreMapWriter(tmp_path / "maps.h5", HEADER, PATHS, LABELS)
    assert sorted(os.listdir(tmp_path)) == ["maps.h5.part", "mine"]
    assert (tmp_path / "mine").read_text() == "mine"


def test_datasets_that_share_bytes_are_refused(tmp_path, random_maps):
    path = tmp_path / "maps.h5"
    fill(path, random_maps)
    offsets, content = StoreFile(path).offsets, path.read_bytes()
    # Address and size of the contiguous bytes of a dataset.
    own = struct.pack("<QQ", offsets["crc32"], 40)
    assert content.count(own) == 1
    path.write_bytes(content.replace(own, struct.pack("<QQ", offsets["label"], 40)))
    with pytest.raises(UserError, match="has datasets that overlap"):
        ScoreMapStore(path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"side": "4"}, "side is '4', but must be a number from 1 to 1,024"),
        ({"side": True}, "side is True"),
        ({"side": 10**9}, "side is 1000000000"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 10}, "maps of 4 x 4 cells of 10 of 9 classes are impossible"),
        ({"num_classes": 65_536}, "num_classes is 65536, but must be a number from 1 to 65,535"),
        ({"input_size": -1}, "input_size is -1"),
        ({"version": True}, "score maps have version True"),
        ({"version": 3}, "score maps have version 3, this program reads versions 1 and 2"),
        ({"version": 2, "form": "tiny"}, "version 2 has no form 'tiny'"),
        ({"version": 2, "form": ["lossless"]}, r"version 2 has no form \['lossless'\]"),
        ({"absent": {}}, "absent is {}, but must be one of tail, zero-logit, background"),
        ({"absent": "foo"}, "absent is 'foo', but must be one of tail, zero-logit, background"),
        ({"teacher": None}, "teacher is None, but must be text"),
        ({"class_names": "ab"}, "class_names must be a list of texts"),
        ({"class_names": ["a", 2]}, "class_names must be a list of texts"),
        ({"fingerprint": "gone"}, "its header lacks fingerprint"),
        ({"run": "x"}, "its header has an unknown entry 'run'"),
    ],
)
def test_headers_that_no_store_has_are_refused(tmp_path, random_maps, changes, problem):
    path = tmp_path / "maps.h5"
    fill(path, random_maps)
    change_header(path, **changes)
    with pytest.raises(UserError, match=rf"maps.h5:? {problem}.*; label the images again"):
        ScoreMapStore(path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (dict(side=600, num_classes=9), "maps of 600 x 600 cells of 3 of 9 classes are impossible"),
        (dict(input_size=5000), "input_size is 5000, but must be a number from 1 to 4,096"),
        (dict(top_k=10), "maps of 4 x 4 cells of 10 of 9 classes are impossible"),
    ],
)
def test_a_header_that_could_not_be_read_back_is_not_written(tmp_path, changes, problem):
    path = tmp_path / "maps.h5"
    header = replace(HEADER, **changes)
    with pytest.raises(
        UserError, match=rf"maps.h5 cannot be written: {problem}; choose a smaller --in"
    ):
        ScoreMapWriter(path, header, PATHS, LABELS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    ["[]", "{", "NaN", '{"a":' * 100_000, "[" * 10**6, "1" * 5000, b"\xff", "", '["\\ud800"]'],
)
def test_a_header_that_is_no_json_object_is_refused(tmp_path, random_maps, text):
    path = tmp_path / "maps.h5"
    fill(path, random_maps)
    with h5py.File(path, "r+") as file:
        kind = h5py.string_dtype()
        file.attrs.create("densefeed", text, dtype=kind)
    with pytest.raises(UserError, match=r"maps.h5.* (header is not|is not a complete)"):
        ScoreMapStore(path)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("label", 2, "has label 2, but it must be from 0 to 1"),
        ("label", -1, "has label -1"),
        ("palette", 0, "has palette size 0, but it must be from 1 to 48"),
        ("palette", 49, "has palette size 49"),
    ],
)
def test_columns_with_impossible_values_are_refused(tmp_path, random_maps, name, value, problem):
    path = tmp_path / "maps.h5"
    fill(path, random_maps)
    with h5py.File(path, "r+") as file:
        file[name][6] = value
    with pytest.raises(UserError, match=rf"maps.h5: row 6 \(a/6.jpg\) {problem}"):
        ScoreMapStore(path)


@pytest.mark.parametrize(
    ("path", "problem"), [(b"", "empty"), (b"a/\0b", "zero"), (b"\xff", "UTF")]
)
def test_paths_that_no_file_can_have_are_refused(tmp_path, random_maps, path, problem):
    fill(tmp_path / "maps.h5", random_maps)
    with h5py.File(tmp_path / "maps.h5", "r+") as file:
        file["path"][3] = path
    with pytest.raises(UserError, match=rf"maps.h5: its image paths are .*{problem}"):
        ScoreMapStore(tmp_path / "maps.h5").paths()


def test_windows_of_damaged_rows_do_not_count(tmp_path, random_maps):
    path = tmp_path / "maps.h5"
    fill(path, random_maps)
    smallest = ScoreMapStore(path).min_window_side
    with h5py.File(path, "r+") as file:
        file["window"][3] = np.nan, 0, 1, 1
        file["window"][4] = 0.5, 0, 0.5, 1
    assert ScoreMapStore(path).min_window_side >= smallest
    with h5py.File(path, "r+") as file:
        file["window"][:] = np.inf
    with pytest.raises(UserError, match="has no valid Window"):
        ScoreMapStore(path)


def test_only_regular_files_are_opened(tmp_path):
    """Opening a named pipe would wait for its writer."""
    os.mkfifo(tmp_path / "pipe.h5")
    for path in (tmp_path / "pipe.h5", "/dev/zero"):
        with pytest.raises(UserError, match=rf"{path}: this is not a regular file"):
            ScoreMapStore(path)
    with pytest.raises(UserError, match="is a folder"):
        ScoreMapStore(tmp_path)


@pytest.mark.parametrize("form", ["raw", "compact"])
def test_a_store_that_is_cut_while_it_is_open_ends_in_one_sentence(tmp_path, random_maps, form):
    """Reading a memory map beyond the end of the file kills the process (SIGBUS)."""
    fill(tmp_path / "raw.h5", random_maps)
    store, ids = ScoreMapStore(tmp_path / "raw.h5"), np.array([9, 1])
    if form == "compact":
        store = convert(store, tmp_path / "compact.h5", form)
    os.truncate(store.path, 3000)
    for read in (
        lambda: store.rows(ids),
        lambda: store.check_values(),
        lambda: verify(store),
        lambda: store.paths(),
        lambda: store.image_path(3),
        lambda: store.names_match(),
    ):
        with pytest.raises(UserError, match=rf"{form}.h5 was truncated while it was open; copy it"):
            read()
    store.close()
    with pytest.raises(UserError, match="was closed; open it again"):
        store.rows(ids)


def change_bytes(content: bytes, rng: random.Random) -> bytes:
    """Change one to five bytes, anywhere or in the first 2 kB, where most of the metadata lie."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(rng.choice([len(changed), 2048]))
        changed[at] = rng.choice([0, 127, 255, changed[at] ^ 1 << rng.randrange(8)])
    return bytes(changed)


@pytest.mark.parametrize("form", ["raw", "lossless", "compact"])
def test_changed_bytes_end_in_one_sentence_or_leave_the_maps_as_they_were(
    tmp_path, random_maps, form
):
    """100 files with one to five changed bytes each; none may end in another exception."""
    fill(tmp_path / "raw.h5", random_maps)
    store = ScoreMapStore(tmp_path / "raw.h5")
    if form != "raw":
        store = convert(store, tmp_path / f"{form}.h5", form)
    rng, ids, sound = random.Random(0), np.arange(10), 0
    maps, whole, path = store.rows(ids), store.path.read_bytes(), tmp_path / "changed.h5"
    for _ in range(100):
        path.write_bytes(change_bytes(whole, rng))
        try:
            verify_files((path,))
        except UserError:
            continue
        sound += 1
        for ours, theirs in zip(ScoreMapStore(path).rows(ids), maps, strict=True):
            assert ours.tobytes() == theirs.tobytes()
    # Bytes without meaning, such as free space of HDF5's structures.
    assert 0 < sound < 90


@pytest.mark.parametrize("top_k", [3, 16, 17, 4000])
def test_duplicate_classes_are_found_among_any_number(top_k):
    """Comparing all pairs of 65,535 classes took hours, for a file of 1 MB."""
    cls = np.random.default_rng(0).permutation(65_535).astype(np.uint16)[: 4 * top_k]
    cls = np.stack([cls.reshape(2, 2, top_k)] * 2)
    cls[1, 1, 0, -1] = cls[1, 1, 0, 0]
    assert find_duplicate_classes(cls).tolist() == [False, True]
