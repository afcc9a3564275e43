"""A folder of shards is read as the one file that holds the same rows."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from densefeed.pipelines.folder import FolderSource
from densefeed.storage.images import Images
from densefeed.storage.maintenance import convert, verify, verify_files
from densefeed.storage.row_codecs import ScoreMaps
from densefeed.storage.score_maps import ScoreMapStore, ScoreMapWriter
from densefeed.storage.shard_plan import PLAN, plan_shards
from densefeed.storage.shards import merge_folders
from densefeed.storage.store_folder import MANIFEST, REMEDY, Manifest, StoredShard, open_rows
from densefeed.system.errors import UserError
from densefeed.system.files import hash_file

from ..stores import make_header, write_store

# First rows of the shards of 11 images: one is a single image.
FIRST = 0, 4, 5
FORMS = "raw", "lossless", "compact"


def split_store(store: ScoreMapStore, maps: ScoreMaps, out: Path, form: str) -> Path:
    """Write the rows of a raw store as shards of `form`, with a manifest."""
    shards, header = [], replace(store.header, form=form)
    (out / "shards").mkdir(parents=True)
    for number, (first, end) in enumerate(zip(FIRST, [*FIRST[1:], len(store)], strict=True)):
        part = out / f"{number}.h5"
        own = replace(store.header, fingerprint=str(number))
        writer = ScoreMapWriter(part, own, store.paths()[first:end], store.labels[first:end])
        writer.write(np.arange(end - first), maps.select(slice(first, end)))
        writer.finish()
        if form != "raw":
            part = convert(ScoreMapStore(part), out / f"{number}.packed", form).path
        digest = hash_file(part)
        name = f"shards/{number:016x}-{digest[:16]}.h5"
        size = part.stat().st_size
        part.rename(out / name)
        shards.append(StoredShard(name, end - first, size, digest, str(number)))
    for rest in out.glob("*.h5"):
        rest.unlink()
    (out / MANIFEST).write_bytes(Manifest(header, tuple(shards)).to_json())
    return out


@pytest.fixture(scope="module")
def stores(folder, random_maps, tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """For each form the store as one file and as a folder."""
    root, images = tmp_path_factory.mktemp("stores"), Images(folder, split="train")
    maps = random_maps(len(images), 6, 2, 2, window=(0.0, 0.1, 1.0, 0.9))
    raw = ScoreMapStore(write_store(root / "raw.h5", images, maps, 2, geometry="center-crop"))
    found = {}
    for form in FORMS:
        one = raw if form == "raw" else convert(raw, root / f"{form}.h5", form)
        found[form] = one.path, split_store(raw, maps, root / form, form)
    return found


def assert_equal(ours: ScoreMaps, theirs: ScoreMaps) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_has_what_the_file_has(stores, form):
    one, ours = map(ScoreMapStore, stores[form])
    assert ours.header == one.header
    assert ours.paths() == one.paths()
    assert ours.names_match()
    assert ours.max_palette == one.max_palette
    assert ours.min_window_side == one.min_window_side
    for name in ("labels", "crcs", "palette"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(one, name))
    ours.check_values()
    assert ours.error == pytest.approx(one.error) if form == "compact" else ours.error is None
    for (ids, _, maps), (want, _, theirs) in zip(ours.chunks("a"), one.chunks("b"), strict=True):
        np.testing.assert_array_equal(ids, want)
        assert_equal(maps, theirs)


@given(st.sampled_from(FORMS), st.lists(st.integers(0, 10), min_size=1, max_size=20))
def test_any_rows_equal_those_of_the_file(stores, form, rows):
    one, ours = map(ScoreMapStore, stores[form])
    assert_equal(ours.rows(np.array(rows)), one.rows(np.array(rows)))
    assert ours.image_path(rows[0]) == one.image_path(rows[0])


@pytest.mark.parametrize("form", FORMS)
def test_the_loader_reads_a_folder(stores, folder, form):
    """The native threads read the rows, by a descriptor and an offset each."""
    ids = np.random.default_rng(0).integers(0, 11, 40)
    one, ours = (FolderSource(folder, "train", path).maps(ids) for path in stores[form])
    assert_equal(ours, one)


@pytest.mark.parametrize(
    ("form", "to"),
    [("raw", "raw"), ("lossless", "raw"), ("raw", "compact"), ("lossless", "lossless")],
)
def test_a_folder_converts_to_the_bytes_of_the_file(stores, tmp_path, form, to):
    made = convert(ScoreMapStore(stores[form][1]), tmp_path / "maps.h5", to)
    assert made.path.read_bytes() == stores[to][0].read_bytes()


@pytest.mark.parametrize("form", FORMS)
def test_merge_writes_a_folder_as_one_file(stores, tmp_path, form):
    one, folder = stores[form]
    out = shutil.copytree(folder, tmp_path / "maps")
    merge_folders((out,), tmp_path / "maps.h5")
    merged, ids = ScoreMapStore(tmp_path / "maps.h5"), np.arange(11)
    assert_equal(merged.rows(ids), ScoreMapStore(folder).rows(ids))
    assert merged.error == ScoreMapStore(folder).error
    assert not verify(merged)
    # The error of a folder is that of its shards, added in another order.
    assert form == "compact" or merged.path.read_bytes() == one.read_bytes()
    assert sorted(p.name for p in out.rglob("*")) == sorted(p.name for p in folder.rglob("*"))
    with pytest.raises(UserError, match=r"maps.h5 exists already"):
        merge_folders((out,), tmp_path / "maps.h5", form)


def test_paths_are_read_whole_whatever_shard_they_are_in(tmp_path, random_maps):
    """A shard's paths are as wide as its longest one."""
    maps = random_maps(11, 2, 2, 3)
    paths = ["a"] * 4 + ["much/longer.jpg"] + ["bb"] * 6
    header = make_header(side=2, top_k=2, num_classes=3)
    writer = ScoreMapWriter(tmp_path / "one.h5", header, paths, np.zeros(11, np.int64))
    writer.write(np.arange(11), maps)
    writer.finish()
    out = split_store(ScoreMapStore(tmp_path / "one.h5"), maps, tmp_path / "maps", "raw")
    assert ScoreMapStore(out).paths() == paths
    (taken,) = open_rows(out).take(("path",), np.array([0, 4, 5]))
    assert taken.tolist() == [b"a", b"much/longer.jpg", b"bb"]


def test_many_shards_raise_the_limit_of_open_files(stores, monkeypatch):
    import resource

    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    ScoreMapStore(stores["raw"][1])
    assert asked == [(3 + 512, 4096)]


# ------------------------------------------------------------------------- damage


def alter(shards: list, key: str, value: object) -> None:
    shards[1][key] = value


ALTERED = {
    "version": lambda values: values.update(version=2),
    "missing header": lambda values: values.pop("header"),
    "header no dictionary": lambda values: values.update(header=[]),
    "other header": lambda values: values["header"].update(teacher="another"),
    "no shards": lambda values: values.update(shards=[]),
    "shards no list": lambda values: values.update(shards={}),
    "shard no dictionary": lambda values: values["shards"].append(3),
    "unknown entry": lambda values: alter(values["shards"], "more", 1),
    "rows no number": lambda values: alter(values["shards"], "rows", True),
    "other rows": lambda values: alter(values["shards"], "rows", 2),
    "other bytes": lambda values: alter(values["shards"], "bytes", 10**20),
    "other fingerprint": lambda values: alter(values["shards"], "fingerprint", "0"),
    "a path elsewhere": lambda values: alter(values["shards"], "file", "../raw.h5"),
    "an absent file": lambda values: alter(values["shards"], "file", f"shards/{0:016}-{0:016}.h5"),
    "a short checksum": lambda values: alter(values["shards"], "sha256", "00"),
    "two in another order": lambda values: values["shards"][0].update(
        file=values["shards"][1]["file"]
    ),
}


@pytest.mark.parametrize("altered", ALTERED)
def test_an_altered_manifest_is_refused_by_name(stores, tmp_path, altered):
    out = shutil.copytree(stores["raw"][1], tmp_path / "maps")
    values = json.loads((out / MANIFEST).read_text())
    ALTERED[altered](values)
    (out / MANIFEST).write_text(json.dumps(values))
    with pytest.raises(UserError, match=rf"^{out}.*({REMEDY}|again|relabel|densefeed label)$"):
        ScoreMapStore(out)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"{}"])
def test_a_damaged_manifest_is_refused_by_name(stores, tmp_path, content):
    out = shutil.copytree(stores["raw"][1], tmp_path / "maps")
    (out / MANIFEST).write_bytes(content)
    with pytest.raises(UserError, match=rf"^{out / MANIFEST}.*{REMEDY}$"):
        ScoreMapStore(out)


def test_a_shard_of_other_bytes_is_found(stores, tmp_path, command):
    """A damaged row by its CRC, where it is read; any other byte by the manifest's checksum."""
    out = shutil.copytree(stores["raw"][1], tmp_path / "maps")
    store, path = ScoreMapStore(out), min((out / "shards").iterdir())
    _, ((place, *_),) = store.places(np.array([2]))
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"maps: row 2 \(.*\) is damaged"):
        ScoreMapStore(out).rows(np.arange(3))
    assert len(ScoreMapStore(out).rows(np.arange(3, 11)).logit) == 8
    done = command("tools/score_maps.py", "verify", out)
    assert done.returncode == 2
    assert f"{path} does not match its checksum; remove it and run the labeling" in done.stdout
    assert "(1 shards, 1 of 11 rows)" in done.stderr
    good = command("tools/score_maps.py", "verify", stores["raw"][1])
    assert (good.returncode, "no faults" in good.stdout) == (0, True)


def test_headers_of_a_folder_and_its_shards_agree(stores):
    """A shard is a store of its own, of its images alone."""
    whole = ScoreMapStore(stores["lossless"][1])
    for number, path in enumerate(sorted((whole.path / "shards").iterdir())):
        assert ScoreMapStore(path).header == replace(whole.header, fingerprint=str(number))


def test_outside_shards_in_another_order_are_refused(stores, folder, tmp_path, capsys):
    """Each shard is whole and its own paths are right: only the order in the manifest is not."""
    out, images = shutil.copytree(stores["raw"][1], tmp_path / "maps"), Images(folder)
    values = json.loads((out / MANIFEST).read_bytes())
    (out / PLAN).write_bytes(plan_shards(images, ScoreMapStore(out).header, 4).to_json())
    verify_files((out,))
    assert capsys.readouterr().out.endswith("maps: no faults\n")
    FolderSource(folder, "train", out).close()
    values["shards"].reverse()
    (out / MANIFEST).write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"maps has 11 maps of other images than the 11"):
        FolderSource(folder, "train", out)
    with pytest.raises(UserError, match=r"maps \(rows of other images\)"):
        verify_files((out,))
    values["shards"] = [values["shards"][0], *values["shards"]]
    (out / MANIFEST).write_text(json.dumps(values))
    with pytest.raises(UserError, match=rf"{MANIFEST}: it names shards/.* 2 times; {REMEDY}"):
        ScoreMapStore(out)


def test_outside_a_linked_folder_of_shards_is_refused(stores, tmp_path):
    """The folder itself may be a link, to another disk."""
    out, linked = shutil.copytree(stores["raw"][1], tmp_path / "maps"), tmp_path / "linked"
    linked.symlink_to(out)
    assert len(ScoreMapStore(linked)) == 11
    (out / "shards").rename(tmp_path / "shards")
    (out / "shards").symlink_to(tmp_path / "shards")
    with pytest.raises(UserError, match=r"maps/shards must be a folder, and is a link; remove it"):
        ScoreMapStore(out)
