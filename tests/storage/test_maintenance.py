"""Conversions round-trip or are refused, and `verify` names every planted fault."""

import json
import os
import zlib
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from densefeed.storage import maintenance, shards
from densefeed.storage.maintenance import convert, verify, verify_files
from densefeed.storage.score_maps import ScoreMapStore, ScoreMapWriter, row_crcs
from densefeed.system.errors import UserError

from ..stores import make_header

FORMS = ("raw", "lossless", "compact")
COUNT = 10


def write(path, maps, absent="tail", num_classes=20):
    """Write a raw store of these maps."""
    header = make_header(num_classes=num_classes, absent=absent)
    count = len(maps.logit)
    writer = ScoreMapWriter(
        path, header, [f"a/{n}.jpg" for n in range(count)], np.arange(count) % 2
    )
    writer.write(np.arange(count), maps)
    writer.finish()
    return ScoreMapStore(path)


@pytest.fixture
def stores(tmp_path, random_maps, monkeypatch):
    """The same ten maps in every form, {form: store}.

    They are converted in chunks of 3, which does not divide 10.
    """
    monkeypatch.setattr(maintenance, "CHUNK", 3)
    raw = write(tmp_path / "raw.h5", random_maps(COUNT, 4, 3, 20))
    return {"raw": raw} | {form: convert(raw, tmp_path / f"{form}.h5", form) for form in FORMS[1:]}


def test_lossless_keeps_every_bit(stores, tmp_path):
    ids = np.array([7, 0, 7, 3])
    for got, want in zip(stores["lossless"].rows(ids), stores["raw"].rows(ids), strict=True):
        assert got.dtype == want.dtype
        assert got.tobytes() == want.tobytes()
    again = convert(stores["lossless"], tmp_path / "again.h5", "raw")
    assert again.path.read_bytes() == stores["raw"].path.read_bytes()


def test_the_error_of_a_compact_store_is_the_stored_one(stores):
    ids = np.arange(COUNT)
    got, want, error = stores["compact"].rows(ids), stores["raw"].rows(ids), stores["compact"].error
    np.testing.assert_array_equal(got.cls, want.cls)
    np.testing.assert_array_equal(got.window, want.window)
    off = np.abs(
        np.exp(got.logit.astype(float))
        - np.exp(want.logit.astype(float) - want.lse.astype(float)[..., None])
    )
    # Where rounding makes a sum exceed 1, targets differ slightly.
    assert off.max() == pytest.approx(error.probability_max, rel=0.01)
    assert 0 < off.mean() < error.variation_max < 0.02
    assert off.mean() == pytest.approx(error.probability_mean, rel=0.01)
    assert stores["raw"].error is stores["lossless"].error is None


@pytest.mark.parametrize("form", FORMS)
def test_other_datasets_are_equal_and_h5py_reads_them(stores, form):
    store, raw = stores[form], stores["raw"]
    assert store.paths() == raw.paths()
    for name in ("labels", "palette"):
        np.testing.assert_array_equal(getattr(store, name), getattr(raw, name))
    assert (store.max_palette, store.min_window_side) == (raw.max_palette, raw.min_window_side)
    store.check_values()
    assert verify(store) == {}
    with h5py.File(store.path) as file:
        assert json.loads(file.attrs["densefeed"])["version"] == (1 if form == "raw" else 2)
        if form != "raw":
            ends = [*file["start"][1:], len(file["rows"])]
            rows = [file["rows"][start:end] for start, end in zip(file["start"], ends, strict=True)]
            np.testing.assert_array_equal(file["crc32"][:], row_crcs((rows, file["window"][:])))


@pytest.mark.parametrize("form", FORMS[1:])
def test_the_same_rows_give_the_same_bytes(stores, tmp_path, form):
    other = convert(stores["raw"], tmp_path / "other.h5", form)
    assert other.path.read_bytes() == stores[form].path.read_bytes()


def test_invalid_conversions_are_refused(stores, tmp_path, random_maps):
    with pytest.raises(
        UserError, match=r"compact.h5 is compact, which is lossy; convert the store it"
    ):
        convert(stores["compact"], tmp_path / "new.h5", "raw")
    with pytest.raises(UserError, match=r"raw.h5 is raw already"):
        convert(stores["raw"], tmp_path / "new.h5", "raw")
    with pytest.raises(UserError, match=r"lossless.h5 exists already; remove it"):
        convert(stores["raw"], tmp_path / "lossless.h5", "lossless")
    maps = random_maps(4, 4, 3, 20)
    maps.logit[2, 0, 0, 0] = np.inf
    with pytest.raises(
        UserError, match=r"the map of a/2.jpg \(row 2\) holds a logit that is not finite"
    ):
        convert(write(tmp_path / "bad.h5", maps), tmp_path / "new.h5", "compact")
    with h5py.File(tmp_path / "raw.h5", "r+") as file:
        file["lse"][5, 0, 0] += 1
    with pytest.raises(UserError, match=r"row 5 \(a/5.jpg\) is damaged"):
        convert(ScoreMapStore(tmp_path / "raw.h5"), tmp_path / "new.h5", "lossless")
    assert not [path for path in tmp_path.iterdir() if "new" in path.name]


def test_a_merge_to_a_form_that_compact_rows_lack_writes_nothing(tmp_path, monkeypatch):
    plan = SimpleNamespace(header=SimpleNamespace(form="compact"))
    monkeypatch.setattr(shards, "find_shards", lambda folders: (plan, {}))
    monkeypatch.setattr(shards, "check_local_rows", lambda folder: None)
    parts = tmp_path / "one", tmp_path / "two"
    with pytest.raises(UserError, match="one is compact, which is lossy; convert the store"):
        shards.merge_folders(parts, out=tmp_path / "maps.h5", form="raw")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_conversion_that_is_killed_leaves_no_file(tmp_path, random_maps, command):
    """SIGKILL after 1 and 5 chunks; a complete conversion then gives the usual bytes."""
    raw = write(tmp_path / "raw.h5", random_maps(40, 4, 3, 20))
    slow = (
        "import sys, time; from densefeed.storage import maintenance; pack = maintenance.pack\n"
        "def wait(*words):\n    print('chunk', flush=True); time.sleep(0.05); return pack(*words)\n"
        "maintenance.pack, maintenance.CHUNK = wait, 4\n"
        f"store, out = maintenance.ScoreMapStore({str(raw.path)!r}), {str(tmp_path / 'out.h5')!r}\n"
        "maintenance.convert(store, maintenance.Path(out), 'compact')"
    )
    for chunks in (1, 5):
        with command.start("-c", slow) as process:
            for _ in range(chunks):
                assert process.stdout.readline() == "chunk\n"
            process.kill()
        assert not (tmp_path / "out.h5").exists()
    out = convert(raw, tmp_path / "out.h5", "compact")
    assert out.path.read_bytes() == convert(raw, tmp_path / "other.h5", "compact").path.read_bytes()


@pytest.mark.parametrize("form", FORMS[1:])
def test_a_conversion_that_is_not_on_disk_as_written_gets_no_name(
    stores, tmp_path, monkeypatch, form
):
    def lossy(descriptor, content, offset):
        written = content if len(content) < 200 else content[:-1] + bytes([content[-1] ^ 1])
        write_at(descriptor, written, offset)

    write_at, out = maintenance.write_at, tmp_path / "new" / "out.h5"
    monkeypatch.setattr(maintenance, "write_at", lossy)
    with pytest.raises(UserError, match=r"out\.h5: rows is not on disk as it was written"):
        convert(stores["raw"], out, form)
    assert list(out.parent.iterdir()) == []


def test_damaged_labels_get_no_new_checksum(stores, tmp_path):
    path = stores["raw"].path
    with h5py.File(path, "r+") as file:
        file["label"][3] = 0
    with pytest.raises(UserError, match="labels and paths do not match their checksum; copy it"):
        convert(ScoreMapStore(path), tmp_path / "out.h5", "lossless")


# ------------------------------------------------------------------------- verify


@pytest.mark.parametrize("form", FORMS)
def test_every_flipped_bit_is_named(stores, form):
    """A bit anywhere in the rows or Windows; `verify` and `rows` report only that row."""
    path, whole = stores[form].path, stores[form].path.read_bytes()
    with h5py.File(path) as file:
        names = ("logit", "cls", "lse", "window") if form == "raw" else ("rows", "window")
        starts = {name: file["start"][:] if name == "rows" else None for name in names}
        places = {
            name: (file[name].id.get_offset(), file[name].id.get_storage_size()) for name in names
        }
    rng = np.random.default_rng(0)
    for name, (offset, size) in places.items():
        for _ in range(6):
            at = int(rng.integers(size))
            row = (
                at // (size // COUNT)
                if starts[name] is None
                else int(np.searchsorted(starts[name], at, "right")) - 1
            )
            damaged = bytearray(whole)
            damaged[offset + at] ^= 1 << int(rng.integers(8))
            path.write_bytes(damaged)
            store = ScoreMapStore(path)
            assert verify(store) == {row: ["does not match its checksum"]}
            with pytest.raises(UserError, match=rf"row {row} \(a/{row}.jpg\) is damaged"):
                store.rows(np.arange(COUNT))


@pytest.mark.parametrize("form", FORMS)
def test_changed_paths_and_labels_are_reported(stores, form, capsys):
    """They have a checksum of their own, which is not in the rows' checksums.

    Files that were made before it existed are not checked.
    """
    path, whole = stores[form].path, stores[form].path.read_bytes()
    with h5py.File(path) as file:
        places = {
            name: file[name].id.get_offset() + 2 * file[name].dtype.itemsize
            for name in ("path", "label")
        }
        by_hand = zlib.crc32(file["path"][:].tobytes(), zlib.crc32(file["label"][:].tobytes()))
        assert file.attrs["names_crc32"] == by_hand
    verify_files((path,))
    for name, at in places.items():
        damaged = bytearray(whole)
        damaged[at] = 0xFF if name == "path" else damaged[at] ^ 1
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"faults were found in {path} \(labels or paths\)"):
            verify_files((path,))
        assert (
            f"{path}: its labels and paths do not match their checksum" in capsys.readouterr().out
        )
        if name == "path":
            with pytest.raises(UserError, match=r"its image paths are not valid UTF-8"):
                ScoreMapStore(path).paths()
    with h5py.File(path, "r+") as file:
        del file.attrs["names_crc32"]
    verify_files((path,))


def plant(maps, what):
    """Plant a fault in row 6 of `maps` that no labeling writes."""
    if what == "logits that do not descend":
        maps.logit[6, 1, 2, 1] = maps.logit[6, 1, 2, 0] + 0.5
        maps.lse[6] += 3  # keeps the sum of the probabilities below 1
    elif what == "probabilities that sum to more than 1":
        maps.lse[6, 3, 3] = maps.logit[6, 3, 3, 0] - 0.2
    elif what == "a class twice in one cell":
        maps.cls[6, 0, 0, 2] = maps.cls[6, 0, 0, 0]
    elif what == "class 20 of 20":
        maps.cls[6, 0, 3, 1] = 20
    elif what == "a Window that is not part of the image":
        maps.window[6, 0] = 1
    else:
        assert what == "a logit that is not finite"
        maps.logit[6, 2, 2, 2] = -np.inf


VALUES = (
    "logits that do not descend",
    "a class twice in one cell",
    "class 20 of 20",
    "a Window that is not part of the image",
    "probabilities that sum to more than 1",
    "a logit that is not finite",
)
# The faults that can occur in each form.
FAULTS = [(form, what) for form in FORMS for what in (VALUES[:4] if form == "compact" else VALUES)]


@pytest.mark.parametrize(("form", "what"), FAULTS)
def test_planted_values_are_named(tmp_path, random_maps, monkeypatch, form, what):
    """The values are written with a valid CRC.

    The check of the conversion, which refuses most of them, is disabled for the packed forms.
    """
    maps = random_maps(COUNT, 4, 3, 20)
    plant(maps, what)
    store = write(tmp_path / "raw.h5", maps)
    if form != "raw":
        monkeypatch.setattr(ScoreMapStore, "impossible", lambda store, ids, maps: {})
        store = convert(store, tmp_path / "packed.h5", form)
        monkeypatch.undo()
    assert verify(store) == {6: [f"holds {what}"]}


@pytest.mark.parametrize(
    ("low", "what"),
    [(np.nan, "a logit that is not finite"), (1.5, "probabilities that sum to more than 1")],
)
def test_a_planted_scale_is_named(stores, low, what):
    path = stores["compact"].path
    with h5py.File(path, "r+") as file:
        start, end = file["start"][6:8]
        row = file["rows"][start:end]
        row[:4] = np.frombuffer(np.float32(low).tobytes(), np.uint8)
        file["rows"][start:end] = row
        file["crc32"][6] = row_crcs(([row], file["window"][6:7]))[0]
    store = ScoreMapStore(path)
    assert verify(store) == {6: [f"holds {what}"]}


@pytest.mark.parametrize("form", FORMS)
def test_planted_counts_are_named(stores, form):
    path, whole = stores[form].path, stores[form].path.read_bytes()
    with h5py.File(path, "r+") as file:
        file["label"][3] = 2
    with pytest.raises(
        UserError, match=r"row 3 \(a/3.jpg\) has label 2, but it must be from 0 to 1; copy"
    ):
        ScoreMapStore(path)
    path.write_bytes(whole)
    with h5py.File(path, "r+") as file:
        file["palette"][4] += 1
    if form == "raw":
        assert verify(ScoreMapStore(path)) == {4: ["holds fewer classes than its palette size"]}
    else:  # the offsets of rows follow from the palette sizes
        with pytest.raises(UserError, match=r"its row offsets do not match its palette sizes"):
            ScoreMapStore(path)
    path.write_bytes(whole)
    with h5py.File(path, "r+") as file:
        file["done"][8] = 0
    with pytest.raises(UserError, match=r"1 rows are not labeled"):
        ScoreMapStore(path)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.9, 0.999])
def test_a_cut_file_is_refused(stores, form, share):
    path = stores[form].path
    os.truncate(path, int(share * path.stat().st_size))
    with pytest.raises(UserError, match=rf"{form}.h5"):
        ScoreMapStore(path)


@pytest.mark.slow
def test_the_commands_verify_and_convert(stores, tmp_path, command):
    """`verify` prints a summary and exits with 0, or names the first bad rows and exits with 2.

    All files are read.
    """
    done = command("tools/score_maps.py", "verify", *(store.path for store in stores.values()))
    assert done.returncode == 0, done.stderr
    assert f"{stores['raw'].path}: no faults" in done.stdout
    assert "10 compact maps of 4 x 4 cells, top 3 of 20 classes" in done.stdout
    assert "total variation of a cell's target" in done.stdout
    with h5py.File(stores["compact"].path, "r+") as file:
        file["rows"][:] ^= 1
    done = command(
        "tools/score_maps.py",
        "verify",
        stores["compact"].path,
        tmp_path / "none.h5",
        stores["raw"].path,
    )
    assert done.returncode == 2
    assert done.stdout.count("does not match its checksum") == COUNT
    assert "compact.h5: row 0 (a/0.jpg) does not match its checksum" in done.stdout
    assert "none.h5: there is no such file" in done.stdout
    assert f"{stores['raw'].path}: no faults" in done.stdout
    assert done.stderr.startswith("error: faults were found in ")
    assert "(10 of 10 rows)" in done.stderr
    out = tmp_path / "made.h5"
    done = command(
        "tools/score_maps.py", "convert", stores["raw"].path, "--form", "lossless", "--out", out
    )
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == stores["lossless"].path.read_bytes()
    done = command(
        "tools/score_maps.py", "convert", stores["raw"].path, "--form", "lossless", "--out", out
    )
    assert done.returncode == 2
    assert done.stderr == f"error: {out} exists already; remove it or choose another --out\n"


def test_a_disk_without_locks_and_fallocate_takes_the_same_files(
    stores, tmp_path, random_maps, monkeypatch, no_locks
):
    monkeypatch.delattr(os, "posix_fallocate")
    raw = write(tmp_path / "again.h5", random_maps(COUNT, 4, 3, 20))
    compact = convert(raw, tmp_path / "again-compact.h5", "compact")
    for store, want in ((raw, "raw"), (compact, "compact")):
        assert store.path.read_bytes() == stores[want].path.read_bytes()


def test_a_file_that_appears_during_a_conversion_is_kept(stores, tmp_path, monkeypatch):
    out = tmp_path / "new" / "x.h5"
    monkeypatch.setattr(maintenance, "read_back", lambda *_: out.write_text("mine"))
    with pytest.raises(UserError, match=r"x.h5 exists already"):
        convert(stores["raw"], out, "lossless")
    assert list(out.parent.iterdir()) == [out]
    assert out.read_text() == "mine"
