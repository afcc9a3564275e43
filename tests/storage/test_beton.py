""".beton files: read and written against stock ffcv 1.0.2, with damage, kills and full disks."""

import errno
import io
import json
import os
import shutil
import signal
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from densefeed import native
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.storage import beton as module
from densefeed.storage import beton_format, beton_writer
from densefeed.storage.beton import Beton
from densefeed.storage.beton_format import (
    ALLOCATION,
    BYTES,
    FIELD,
    HEADER,
    IMAGE,
    INT,
    JSON,
    NDARRAY,
    PAGE,
    RGB,
    SOI,
    Field,
    describe_field,
    map_arrays,
    map_fields,
    metadata_dtype,
    notes_place,
    read_front,
)
from densefeed.storage.beton_images import BetonImages
from densefeed.storage.beton_verify import verify, verify_files
from densefeed.storage.beton_writer import ROW, BetonWriter, Sample
from densefeed.storage.images import decode, limit_pixels
from densefeed.storage.score_maps import ScoreMapWriter, row_crcs
from densefeed.system.errors import UserError
from densefeed.tools.pack_dataset import Packing, main

from ..stores import make_header

NOTES = {"class_names": [*"abcdefghi"], "fingerprint": "f" * 64, "teacher": "t", "absent": "tail"}
NOTES |= {"max_palette": 9, "min_window_side": 0.5}


def jpegs(count, seed=0):
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        height, width = rng.integers(20, 60, 2)
        buffer = io.BytesIO()
        coarse = Image.fromarray(rng.integers(0, 255, (3, 3, 3), dtype=np.uint8))
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=95)
        out.append((buffer.getvalue(), int(height), int(width)))
    return out


def samples_of(random_maps, count=7, seed=0):
    maps = random_maps(count, 6, 3, 9, seed=seed)
    return [
        Sample(*image, n % 3, map_arrays(maps, n)) for n, image in enumerate(jpegs(count, seed))
    ], maps


def write_beton(path, samples, arrays, notes):
    with BetonWriter(path, len(samples), arrays, notes) as writer:
        for index, sample in enumerate(samples):
            writer.write(index, sample)
        writer.finish()


def write(path, random_maps, count=7, seed=0, **notes):
    samples, maps = samples_of(random_maps, count, seed)
    write_beton(path, samples, map_fields(6, 3), NOTES | notes)
    return samples, maps


@pytest.fixture(scope="module")
def packed(tmp_path_factory, random_maps):
    """A file of seven samples with maps, its bytes, and everything a reader gets from it."""
    path = tmp_path_factory.mktemp("packed") / "x.beton"
    write(path, random_maps)
    return path, path.read_bytes(), everything(path)


def everything(path):
    """Everything a reader can get from a file, arrays before images."""
    beton = Beton(path)
    arrays = beton.arrays(np.arange(len(beton))) if beton.crcs is not None else {}
    columns = (beton.labels, beton.heights, beton.widths, beton.modes, *arrays.values())
    images = [beton.image(n) for n in range(len(beton))]
    got = (
        [column.tobytes() for column in columns],
        beton.fields,
        beton.notes,
        beton.fingerprint,
        images,
    )
    beton.close()
    return got


# ----------------------------------------------------------------------- round trip


def test_samples_round_trip(tmp_path, random_maps):
    samples, maps = write(tmp_path / "x.beton", random_maps)
    beton = Beton(tmp_path / "x.beton")
    assert len(beton) == 7
    assert beton.notes == {"densefeed": 2} | NOTES
    np.testing.assert_array_equal(beton.labels, np.arange(7) % 3)
    for n, sample in enumerate(samples):
        assert beton.image(n) == (sample.encoded, native.JPEG)
        assert (beton.heights[n], beton.widths[n]) == (sample.height, sample.width)
    ids = np.array([5, 0, 5])
    both = beton.arrays(ids)["map"]
    np.testing.assert_array_equal(both[:, 0].view("<f2"), maps.logit[ids])
    np.testing.assert_array_equal(both[:, 1].view("<u2"), maps.cls[ids])
    np.testing.assert_array_equal(beton.arrays(ids)["window"], maps.window[ids])
    np.testing.assert_array_equal(beton.crcs, row_crcs(maps))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.beton"]


def test_the_extents_are_the_positions_of_the_bytes(tmp_path, random_maps):
    """A reader in C uses descriptor, offset and size; here of two files at once."""
    (one, _), (two, _) = (
        write(tmp_path / "1.beton", random_maps),
        write(tmp_path / "2.beton", random_maps, seed=1),
    )
    beton = Beton([tmp_path / "1.beton", tmp_path / "2.beton"])
    for n, sample in enumerate([*one, *two]):
        file, offset, size = (int(column[n]) for column in beton.images)
        assert os.pread(beton.descriptors[file], size, offset) == sample.encoded
    ids = np.array([9, 2])
    for name, number in (("map", 0), ("lse", 1), ("window", 2)):
        descriptors, offsets = beton.open_files(ids), beton.offsets(name)[ids]
        for n, descriptor, offset in zip(ids, descriptors, offsets, strict=True):
            array = (*one, *two)[n].arrays[number]
            assert os.pread(descriptor, beton.field(name).nbytes, offset) == array.tobytes()


def test_samples_never_cross_a_page_and_arrays_are_aligned(tmp_path):
    """Three samples of 3 MB in pages of 8 MiB: the third must begin on the second page."""
    noise = SOI + np.random.default_rng(0).bytes(2_999_999)
    field = Field(NDARRAY, "x", "<f4", (3,))
    write_beton(
        tmp_path / "x.beton",
        [Sample(noise, 10, 10, 0, (np.arange(3.0) + n,)) for n in range(3)],
        [field],
        NOTES,
    )
    beton = Beton(tmp_path / "x.beton")
    for n in range(3):
        assert beton.image(n)[0] == noise
        np.testing.assert_array_equal(beton.arrays(np.array([n]))["x"][0], np.arange(3) + n)
    assert (
        beton.images.offset // PAGE == (beton.images.offset + beton.images.size - 1) // PAGE
    ).all()
    assert (beton.offsets("x")[:3] % 16 == 0).all()


def test_a_sample_larger_than_a_page_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"does not fit a page"):
        write_beton(tmp_path / "x.beton", [Sample(bytes(9_000_000), 1, 1, 0)], [], NOTES)
    assert not (tmp_path / "x.beton").exists()


# ----------------------------------------------------------------------- several files


def test_several_files_are_one_dataset(tmp_path, random_maps):
    one, _ = write(tmp_path / "1.beton", random_maps, 4, min_window_side=0.25)
    two, _ = write(
        tmp_path / "2.beton", random_maps, 3, seed=1, max_palette=11, fingerprint="e" * 64
    )
    both, first = Beton([tmp_path / "2.beton", tmp_path / "1.beton"]), Beton(tmp_path / "1.beton")
    assert [both.image(n)[0] for n in range(7)] == [sample.encoded for sample in [*two, *one]]
    np.testing.assert_array_equal(
        both.arrays(np.array([5, 0]))["map"], np.stack([one[2].arrays[0], two[0].arrays[0]])
    )
    assert both.where(5) == f"{tmp_path / '1.beton'} image 2"
    assert (both.notes["max_palette"], both.notes["min_window_side"]) == (11, 0.25)
    assert first.fingerprint == "f" * 64
    reverse = Beton([tmp_path / "1.beton", tmp_path / "2.beton"])
    assert len({beton.fingerprint for beton in (both, first, reverse)}) == 3


def test_files_that_do_not_match_are_refused_by_name(tmp_path, random_maps):
    write(tmp_path / "1.beton", random_maps)
    write(tmp_path / "2.beton", random_maps, class_names=["a", "b", "d"])
    write(tmp_path / "3.beton", random_maps, absent="zero-logit")
    write_beton(tmp_path / "4.beton", [Sample(*jpegs(1)[0], 0)], [], NOTES)
    for name, said in (
        ("2", "another class names"),
        ("3", "another absent"),
        ("4", "other fields"),
    ):
        with pytest.raises(UserError, match=rf"{name}\.beton has {said} than .*1\.beton"):
            Beton([tmp_path / "1.beton", tmp_path / f"{name}.beton"])
    with pytest.raises(UserError, match=r"no \.beton file was named"):
        Beton([])


# ----------------------------------------------------------------------- damage


def places(path):
    """The parts of a packed file that have a checksum, and the padding: {name: [(start, end)]}."""
    with open(path, "rb") as file:
        front = read_front(path, file.fileno())
    beton = Beton(path)
    count, sums_at = len(beton), front.notes["crc32"]["samples_at"]
    notes_end = sums_at + 4 * count + len(json.dumps(front.notes))
    found = {
        "header": [(0, HEADER.itemsize)],
        "descriptors": [(HEADER.itemsize, front.metadata)],
        "metadata": [(front.metadata, sums_at)],
        "checksums": [(sums_at, sums_at + 4 * count)],
        "notes": [(sums_at + 4 * count, notes_end)],
        "table": [(front.table, path.stat().st_size)],
    }
    extents = []
    for name in ("map", "lse", "window"):
        starts = beton.offsets(name)[:count]
        extents += [(at, at + beton.field(name).nbytes) for at in starts.tolist()]
    found["arrays"] = sorted(extents)
    images = [
        (at, at + size)
        for at, size in zip(beton.images.offset.tolist(), beton.images.size.tolist(), strict=True)
    ]
    used = sorted(extents + images)
    ends = [notes_end, *(end for _, end in used)]
    found["padding"] = [
        (a, b)
        for a, b in zip(ends, [*(start for start, _ in used), front.table], strict=True)
        if a < b
    ]
    return found


@contextmanager
def flipped(path, at, bit):
    """Flip one bit of the file temporarily."""
    with open(path, "r+b", buffering=0) as file:
        before = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([before[0] ^ 1 << bit]), at)
        yield
        os.pwrite(file.fileno(), before, at)


@given(data=st.data())
@settings(max_examples=150)
def test_a_flipped_bit_is_detected_or_harmless(packed, data):
    path, _, want = packed
    regions = places(path)
    region = data.draw(st.sampled_from(sorted(regions)))
    start, end = data.draw(st.sampled_from(regions[region]))
    at, bit = data.draw(st.integers(start, end - 1)), data.draw(st.integers(0, 7))
    with flipped(path, at, bit):
        if region == "padding":
            assert everything(path) == want
        elif region == "arrays":
            beton = Beton(path)
            with pytest.raises(UserError, match=r"x\.beton image \d: its arrays are damaged"):
                beton.arrays(np.arange(7))
        else:
            with pytest.raises(UserError, match=r"x\.beton"):
                Beton(path)


def test_every_bit_of_header_and_notes_place_is_checked(packed):
    """All bits that decide how the rest is read: header, field types, position of the notes."""
    path, _, _ = packed
    image = HEADER.itemsize
    notes = notes_place(image)
    for at in (
        *range(HEADER.itemsize),
        *(image + n * FIELD.itemsize for n in range(5)),
        *range(notes, notes + 28),
    ):
        for bit in range(8):
            with flipped(path, at, bit), pytest.raises(UserError, match=r"x\.beton"):
                Beton(path)


def test_an_image_that_is_no_jpeg_is_detected(packed):
    path, _, _ = packed
    beton = Beton(path)
    with (
        flipped(path, int(beton.images.offset[3]), 0),
        pytest.raises(UserError, match=r"x\.beton image 3 .*not a JPEG"),
    ):
        beton.image(3)


def cuts(path):
    """Every border between two parts of the file, and one byte to either side."""
    borders = {edge for spans in places(path).values() for span in spans for edge in span}
    return sorted(
        at for edge in borders for at in (edge - 1, edge, edge + 1) if 0 <= at < path.stat().st_size
    )


def test_a_cut_at_every_border_is_refused(packed, tmp_path):
    path, whole, _ = packed
    (tmp_path / "cut.beton").write_bytes(whole)
    for at in reversed(cuts(path)):
        os.truncate(tmp_path / "cut.beton", at)
        with pytest.raises(UserError, match=r"cut\.beton"):
            Beton(tmp_path / "cut.beton")


def test_a_longer_file_is_refused(packed, tmp_path):
    _, whole, _ = packed
    (tmp_path / "x.beton").write_bytes(whole + bytes(24))
    with pytest.raises(UserError, match=r"truncated or corrupt"):
        Beton(tmp_path / "x.beton")


def test_a_file_cut_while_open_raises_an_error_and_no_signal(packed, tmp_path):
    _, whole, _ = packed
    path = tmp_path / "x.beton"
    path.write_bytes(whole)
    beton = Beton(path)
    assert str(path) not in Path("/proc/self/maps").read_text()
    os.truncate(path, int(beton.images.offset[4]) + 10)
    assert beton.image(3)[0][:2] == SOI
    for read in (lambda: beton.image(4), lambda: beton.arrays(np.array([5]))["map"]):
        with pytest.raises(
            UserError, match=r"x\.beton image [45] is gone: .* truncated or replaced while open"
        ):
            read()


def test_a_file_replaced_while_open_still_reads_the_old_one(packed, tmp_path, random_maps):
    _, whole, want = packed
    path = tmp_path / "x.beton"
    path.write_bytes(whole)
    beton = Beton(path)
    write(tmp_path / "new.beton", random_maps, seed=5)
    os.replace(tmp_path / "new.beton", path)
    assert [beton.image(n) for n in range(7)] == want[-1]


def test_no_descriptor_stays_open(packed):
    path, whole, _ = packed

    def opened():
        """Count the descriptors of files in this folder; other tests may leave others."""
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        targets = [os.readlink(link) for link in links if os.path.islink(link)]
        return sum(target.startswith(str(path.parent)) for target in targets)

    before = opened()
    beton = Beton([path, path])
    assert opened() == before + 2
    beton.close()
    with pytest.raises(ValueError, match="closed"):
        beton.image(0)
    Beton(path)  # collected at once
    (path.parent / "short.beton").write_bytes(whole[:5000])
    with pytest.raises(UserError):
        Beton([path, path.parent / "short.beton"])
    assert opened() == before


def test_errors_name_the_file(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.beton: there is no such file"):
        Beton(tmp_path / "nowhere.beton")
    with pytest.raises(UserError, match=r"is not a file"):
        Beton(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"is not a file"):  # opening it would wait for a writer
        Beton(tmp_path / "pipe")
    path = tmp_path / "x.beton"
    path.write_bytes(b"\x01" * 5000)
    with pytest.raises(UserError, match=r"not an FFCV dataset of version 2"):
        Beton(path)


# ----------------------------------------------------------------------- third-party files


def foreign(path, fields, images, order):
    """Write a .beton as FFCV's workers may: any fields, samples in another order, no notes."""
    metadata = np.zeros(len(images), metadata_dtype(fields))
    start = HEADER.itemsize + FIELD.itemsize * len(fields) + metadata.nbytes
    pages, table, at = bytearray(), [], -(-start // PAGE) * PAGE
    for index in order:
        jpeg, height, width = images[index]
        for n, field in enumerate(fields):
            if field.type == INT:
                metadata[index][f"f{n}"] = index % 3
                continue
            content = {
                RGB: jpeg,
                BYTES: b"x" * (index % 3),
                JSON: b'{"a": 1}\0',
                NDARRAY: np.full(3, index, "<f4").tobytes(),
            }
            content = content[field.type]
            record = {
                RGB: (0, width, height, at),
                BYTES: (at, len(content)),
                JSON: (at, len(content)),
                NDARRAY: at,
            }
            metadata[index][f"f{n}"] = record[field.type]
            table.append((index, at, len(content)))
            pages += content
            at += len(content)
    end = -(-at // PAGE) * PAGE
    table = np.array(table, ALLOCATION)
    with open(path, "wb") as file:
        file.write(np.array((2, len(fields), PAGE, len(images), end), HEADER).tobytes())
        file.write(b"".join(describe_field(field) for field in fields) + metadata.tobytes())
        file.seek(-(-start // PAGE) * PAGE)
        file.write(pages)
        file.seek(end)
        file.write(table.tobytes())


FOREIGN = [
    [Field(RGB, "image"), Field(INT, "label")],
    [
        Field(INT, "label"),
        Field(BYTES, "text"),
        Field(NDARRAY, "x", "<f4", (3,)),
        Field(RGB, "image"),
        Field(JSON, "j"),
    ],
]


@pytest.mark.parametrize("fields", FOREIGN, ids=["two", "many"])
def test_any_order_of_fields_and_samples(tmp_path, fields, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 4)
    images, order = jpegs(11), np.random.default_rng(1).permutation(11).tolist()
    foreign(tmp_path / "x.beton", fields, images, order)
    beton = Beton(tmp_path / "x.beton")
    assert [beton.image(n)[0] for n in range(11)] == [jpeg for jpeg, _, _ in images]
    np.testing.assert_array_equal(beton.labels, np.arange(11) % 3)
    np.testing.assert_array_equal(beton.heights, [height for _, height, _ in images])
    assert (beton.notes, beton.crcs) == ({}, None)
    if any(field.name == "x" for field in beton.fields):
        np.testing.assert_array_equal(beton.arrays(np.array([7, 2]))["x"][:, 0], [7, 2])


def test_a_third_party_field_called_map_is_no_score_map(tmp_path):
    foreign(
        tmp_path / "x.beton", [*FOREIGN[0], Field(NDARRAY, "map", "<f4", (3,))], jpegs(3), range(3)
    )
    assert FfcvSource(tmp_path / "x.beton").score_maps is None


@given(data=st.data())
@settings(max_examples=150)
def test_damage_in_a_file_without_checksums_never_crashes(tmp_path_factory, data):
    """Structure is checked; other bits may change the data. Reading ends or raises UserError."""
    path = tmp_path_factory.getbasetemp() / "foreign.beton"
    if not path.exists():
        foreign(path, FOREIGN[1], jpegs(5), [3, 1, 0, 2, 4])
    size, front = path.stat().st_size, HEADER.itemsize + 5 * FIELD.itemsize + 5 * 72
    at = data.draw(
        st.one_of(
            st.integers(0, 23), st.integers(0, front - 1), st.integers(size - 20 * 24, size - 1)
        )
    )
    with flipped(path, at, data.draw(st.integers(0, 7))), suppress(UserError):
        everything(path)


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        ("type", 255, "type 255"),
        ("mode", 9, "unknown mode"),
        ("height", 0, "without a size"),
        ("ptr", 3, "its allocation table is damaged"),
        ("owner", 4, "its allocation table is damaged"),
        ("size", 2**40, "outside the pages"),
        ("size", 2**63, "outside the pages"),
        ("size", 0, "outside the pages"),
    ],
)
def test_structural_damage_is_named(tmp_path, where, value, said):
    path = tmp_path / "x.beton"
    foreign(path, FOREIGN[0], jpegs(5), range(5))
    data = bytearray(path.read_bytes())
    image, table = HEADER.itemsize + 2 * FIELD.itemsize, len(data) - 5 * 24
    offset = {name: image + IMAGE.fields[name][1] for name in IMAGE.names} | {
        "type": 24,
        "owner": table,
        "size": table + 16,
    }
    width = {"type": 1, "mode": 1, "height": 2}.get(where, 8)
    data[offset[where] : offset[where] + width] = value.to_bytes(width, "little")
    path.write_bytes(data)
    with pytest.raises(UserError, match=said):
        Beton(path)


def test_a_sample_without_an_entry_is_detected(tmp_path):
    """One entry is there twice and another is missing; each entry alone is valid."""
    foreign(tmp_path / "x.beton", FOREIGN[0], jpegs(5), range(5))
    data = bytearray((tmp_path / "x.beton").read_bytes())
    data[-5 * 24 : -4 * 24] = data[-24:]
    (tmp_path / "x.beton").write_bytes(data)
    with pytest.raises(UserError, match="its allocation table is damaged"):
        Beton(tmp_path / "x.beton")


# ----------------------------------------------------------------------- memory


def test_opening_takes_little_memory(tmp_path):
    """At most 80 bytes per sample with maps, and 20 MB of buffers.

    The limit is for 1.28 M samples and is measured with a twentieth of them.
    """
    count = 64_000
    with BetonWriter(tmp_path / "x.beton", count, map_fields(18, 5), NOTES) as writer:
        # 64,000 images that are never read: their records, and a hole in place of their bytes.
        rows = writer._rows
        rows["index"], rows["size"], rows["state"] = np.arange(count), 30_000, 1
        rows["height"], rows["width"] = 375, 500
        rows["ptr"] = writer._first_page + np.arange(count, dtype=np.uint64) * 2**16
        writer._at = int(rows["ptr"][-1]) + 2**16
        writer.finish()
    tracemalloc.start()
    beton = Beton(tmp_path / "x.beton")
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(beton) == count
    assert kept < 80 * count
    assert peak < kept + 20e6


# ----------------------------------------------------------------------- interrupted writing

FAULTY = ("pwrite", "ftruncate", "fsync", "replace", "unlink")


def break_after(calls, act):
    """Let call number `calls` of those that change a disk do half its work and then call `act`.

    Returns a function that restores the calls.
    """
    left, real = [calls], {name: getattr(os, name) for name in FAULTY}

    def wrap(name):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                if name == "pwrite":
                    real[name](args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
                act()
            return real[name](*args, **kwargs)

        return call

    for name in FAULTY:
        setattr(os, name, wrap(name))
    return lambda: [setattr(os, name, real[name]) for name in FAULTY]


def pack(path, samples, fails=()):
    with BetonWriter(path, len(samples), map_fields(6, 3), NOTES) as writer:
        for index in writer.todo().tolist():
            writer.fail(index) if index in fails else writer.write(index, samples[index])
        writer.finish()


def pack_and_die(path, samples, calls, **options):
    """Pack in a child that is killed at its call number `calls`; return whether it was."""
    child = os.fork()
    if child == 0:
        try:
            break_after(calls, lambda: os.kill(os.getpid(), signal.SIGKILL))
            pack(path, samples, **options)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("begun", [None, 9], ids=["fresh", "continued"])
def test_a_packing_killed_at_any_write_resumes_to_the_same_bytes(
    tmp_path, random_maps, packed, begun
):
    """Also if the killed packing resumes one that was killed after `begun` writes."""
    samples, _ = samples_of(random_maps)
    path, calls = tmp_path / "x.beton", 0
    while (begun is None or pack_and_die(path, samples, begun)) and pack_and_die(
        path, samples, calls
    ):
        # Killed between the rename and the clean-up: a later packing is refused and cleans up.
        if path.exists():
            with pytest.raises(UserError, match="exists already"):
                pack(path, samples)
        else:
            pack(path, samples)
        assert path.read_bytes() == packed[1], calls
        assert [file.name for file in tmp_path.iterdir()] == ["x.beton"]
        path.unlink()
        calls += 1
    assert calls > 15
    assert path.read_bytes() == packed[1]


def test_a_packing_killed_repeatedly_completes(tmp_path, random_maps, packed):
    samples, _ = samples_of(random_maps)
    deaths = 0
    while pack_and_die(tmp_path / "x.beton", samples, 14):
        deaths += 1
        assert deaths < 10
    assert deaths > 1
    assert (tmp_path / "x.beton").read_bytes() == packed[1]


def test_a_disk_full_at_any_write_is_one_error_and_packing_resumes(tmp_path, random_maps, packed):
    samples, _ = samples_of(random_maps)
    path = tmp_path / "x.beton"

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    for calls in range(100):
        restore, error = break_after(calls, full), None
        try:
            pack(path, samples)
        except OSError as raised:
            error = raised
        finally:
            restore()
        if error is None:
            break
        assert (error.errno, error.filename) == (errno.ENOSPC, str(path))
        if path.exists():  # only the clean-up is missing
            path.unlink()
            (tmp_path / "x.beton.part.rows").unlink(missing_ok=True)
    assert calls > 5
    assert path.read_bytes() == packed[1]


def test_images_lost_in_a_power_cut_are_packed_again(tmp_path, random_maps, packed):
    """The journal reached the disk, but the third image and the end of the journal did not."""
    samples, _ = samples_of(random_maps)
    path, part, journal = (tmp_path / f"x.beton{end}" for end in ("", ".part", ".part.rows"))
    assert pack_and_die(path, samples, 14)
    with open(part, "r+b") as file:
        file.seek(image_end(packed[0], 2) - 40)
        file.write(bytes(40))
    with open(journal, "ab") as file:
        file.write(bytes(1000))
    assert pack_and_die(path, samples, 4)  # writes the third image and its record
    with BetonWriter(path, 7, map_fields(6, 3), NOTES) as writer:
        # The records of 3 and 4 after it are discarded.
        assert writer.todo().tolist() == [3, 4, 5, 6]
    pack(path, samples)
    assert path.read_bytes() == packed[1]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux names open files")
def test_images_are_on_disk_before_their_records(tmp_path, random_maps, monkeypatch):
    """Every SYNC_BYTES both files are synced: after a power cut only what follows is read back."""
    samples, _ = samples_of(random_maps)
    monkeypatch.setattr(beton_writer, "SYNC_BYTES", 0)
    synced, fsync = [], os.fsync
    with BetonWriter(tmp_path / "x.beton", 7, map_fields(6, 3), NOTES) as writer:

        def record(descriptor):
            synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", record)
        for index in range(3):
            writer.write(index, samples[index])
    assert synced == ["x.beton.part", "x.beton.part.rows"] * 3


def image_end(path, index):
    """Offset of the end of image `index` of a file."""
    images = Beton(path).images
    return int(images.offset[index] + images.size[index])


def test_half_an_image_leaves_no_trace(tmp_path, random_maps):
    """Killed in the middle of the last image, which then fails."""
    samples, _ = samples_of(random_maps)
    assert pack_and_die(tmp_path / "x.beton", samples, 4 + 2 * 6)
    for name in ("x", "y"):
        pack(tmp_path / f"{name}.beton", samples, fails=[6])
    assert (tmp_path / "x.beton").read_bytes() == (tmp_path / "y.beton").read_bytes()


def test_an_image_that_failed_is_tried_again_and_is_last(tmp_path, random_maps):
    samples, _ = samples_of(random_maps)
    notes = NOTES | {"fingerprint": "e" * 64}  # the file was repaired, so its size changed
    with BetonWriter(tmp_path / "y.beton", 7, map_fields(6, 3), notes) as writer:
        for index in (0, 1, 3, 4, 5, 6, 2):
            writer.write(index, samples[index])
        writer.finish()
    path = tmp_path / "x.beton"
    # Killed after the front with `left_out` was written.
    assert pack_and_die(path, samples, 23, fails=[2])
    with open(tmp_path / "x.beton.part", "r+b") as file:
        file.seek(places(tmp_path / "y.beton")["notes"][0][1])
        file.write(b"9999")  # as longer notes would leave
    with BetonWriter(path, 7, map_fields(6, 3), notes) as writer:
        assert writer.todo().tolist() == [2]
        writer.write(2, samples[2])
        writer.finish()
    beton = Beton(path)
    assert [beton.image(n)[0] for n in range(7)] == [sample.encoded for sample in samples]
    assert beton.images.offset.argmax() == 2
    assert beton.notes == {"densefeed": 2} | notes
    assert path.read_bytes() == (tmp_path / "y.beton").read_bytes()


def test_images_left_out_are_counted_and_change_the_fingerprint(tmp_path, random_maps):
    samples, _ = samples_of(random_maps)
    pack(tmp_path / "x.beton", samples, fails=[0, 4])
    beton = Beton(tmp_path / "x.beton")
    assert [beton.image(n)[0] for n in range(5)] == [samples[n].encoded for n in (1, 2, 3, 5, 6)]
    assert beton.notes["left_out"] == 2
    assert beton.fingerprint != NOTES["fingerprint"]
    np.testing.assert_array_equal(beton.arrays(np.array([3]))["map"][0], samples[5].arrays[0])
    with pytest.raises(UserError, match="none of the 7 images"):
        pack(tmp_path / "y.beton", samples, fails=range(7))


def test_one_packer_at_a_time(tmp_path, random_maps):
    samples, _ = samples_of(random_maps)
    with (
        BetonWriter(tmp_path / "x.beton", 7, map_fields(6, 3), NOTES),
        pytest.raises(UserError, match=r"x\.beton is being packed by another process"),
    ):
        pack(tmp_path / "x.beton", samples)
    pack(tmp_path / "x.beton", samples)


def test_other_samples_are_never_mixed_with_those_of_a_killed_writer(tmp_path, random_maps):
    samples, _ = samples_of(random_maps)
    assert pack_and_die(tmp_path / "x.beton", samples, 8)
    other, _ = samples_of(random_maps, seed=1)
    with (
        BetonWriter(tmp_path / "x.beton", 7, map_fields(6, 3), NOTES) as writer,
        pytest.raises(UserError, match=r"x\.beton\.part holds another version of image 0"),
    ):
        writer.check(0, other[0])


def test_a_part_of_another_packing_is_refused_and_kept(tmp_path, random_maps):
    samples, _ = samples_of(random_maps)
    assert pack_and_die(tmp_path / "x.beton", samples, 8)
    before = (tmp_path / "x.beton.part").read_bytes()
    for notes, arrays, count, said in (
        (NOTES | {"teacher": "u"}, map_fields(6, 3), 7, "teacher"),
        (NOTES | {"fingerprint": "e" * 64}, map_fields(6, 3), 7, "fingerprint"),
        (NOTES, map_fields(6, 3), 8, "num samples"),
        (NOTES, map_fields(6, 2), 7, "arrays"),
    ):
        with pytest.raises(UserError, match=rf"x\.beton\.part was .* differs in {said}; remove it"):
            BetonWriter(tmp_path / "x.beton", count, arrays, notes)
    assert (tmp_path / "x.beton.part").read_bytes() == before
    (tmp_path / "y.beton.part").write_text("mine")
    with pytest.raises(UserError, match=r"y\.beton\.part exists and is not from an earlier"):
        BetonWriter(tmp_path / "y.beton", 7, [], NOTES)
    assert (tmp_path / "y.beton.part").read_text() == "mine"


@pytest.mark.parametrize("end", [".part", ".part.rows"])
@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe"])
def test_what_is_no_file_of_a_packing_is_not_opened(tmp_path, end, kind):
    (tmp_path / "mine").write_text("mine")
    path = tmp_path / f"x.beton{end}"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("mine" if kind == "link" else "nowhere")
    with pytest.raises(UserError, match=rf"^{path} is not a regular file; remove it or choose"):
        BetonWriter(tmp_path / "x.beton", 7, [], NOTES)
    assert (tmp_path / "mine").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["mine", path.name]


def change_rows(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[bytes], bytes]:
    """Return a function that changes the records of a journal and corrects their checksums."""

    def changed(content: bytes) -> bytes:
        line, end, records = content.partition(b"\n")
        rows = change(np.frombuffer(records, ROW).copy())
        for row in rows:
            row["crc"] = zlib.crc32(row.tobytes()[:-4])
        return line + end + rows.tobytes()

    return changed


def set_row(name: str, value: int) -> Callable[[bytes], bytes]:
    def change(rows: np.ndarray) -> np.ndarray:
        rows[name][2] = value
        return rows

    return change_rows(change)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "change",
    [
        set_row("index", 7),
        set_row("index", 2**64 - 1),
        set_row("index", 0),
        set_row("state", 3),
        set_row("ptr", 0),
        set_row("size", PAGE + 1),
        set_row("size", 1),
        change_rows(lambda rows: np.concatenate([rows, rows[:2]])),
        change_rows(lambda rows: rows[::-1]),
        *(
            lambda content, line=line: line + content[content.index(b"\n") :]
            for line in (b"[]", b"null", b"3", b"", b"\xff", b"[" * 20_000, b"9" * 5000)
        ),
    ],
)
def test_a_journal_that_no_packing_writes_is_refused(tmp_path, random_maps, change):
    """The checksums of its records are right."""
    samples, _ = samples_of(random_maps)
    assert pack_and_die(tmp_path / "x.beton", samples, 14)
    journal = tmp_path / "x.beton.part.rows"
    content = change(journal.read_bytes())
    journal.write_bytes(content)
    part = (tmp_path / "x.beton.part").read_bytes()
    with pytest.raises(UserError, match=rf"^{journal}, left by an earlier packing, is damaged; re"):
        BetonWriter(tmp_path / "x.beton", 7, map_fields(6, 3), NOTES)
    assert journal.read_bytes() == content
    assert (tmp_path / "x.beton.part").read_bytes() == part


# ----------------------------------------------------------------------- verify


@pytest.mark.parametrize("label", [-1, 9, 65_535, 10**8, -(2**63)])
def test_verify_finds_labels_that_are_no_classes(tmp_path, label):
    samples = [Sample(*jpegs(1)[0], 0), Sample(*jpegs(1)[0], label)]
    write_beton(tmp_path / "x.beton", samples, [], NOTES)
    (fault,) = verify(tmp_path / "x.beton", 1)
    low, high = sorted((0, label))
    assert fault.startswith(f"{tmp_path}/x.beton has labels from {low} to {high}, ")


def test_verify_closes_the_file_when_it_is_interrupted(packed, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(native, "check", interrupted)
    # Its traceback, which a caller may keep, holds the open file.
    with pytest.raises(KeyboardInterrupt) as caught:
        verify(packed[0], 2)
    opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert str(packed[0].resolve()) not in opened, caught


@pytest.mark.slow
def test_verify_names_every_damaged_sample(packed, tmp_path, command):
    _, whole, _ = packed
    sound, bad, cut = (tmp_path / f"{name}.beton" for name in ("sound", "bad", "cut"))
    sound.write_bytes(whole)
    cut.write_bytes(whole[:-1])
    beton = Beton(sound)
    data = bytearray(whole)
    data[int(beton.offsets("lse")[2]) + 5] ^= 1
    end = int(beton.images.offset[6] + beton.images.size[6])
    data[end - 300 : end] = bytes(300)
    bad.write_bytes(data)
    done = command("tools/beton.py", "verify", sound, bad, cut)
    assert done.returncode == 2, done.stderr
    assert f"{sound}: no faults" in done.stdout
    assert f"{bad} image 2: its arrays are damaged" in done.stdout
    assert f"{bad} image 6 is damaged" in done.stdout
    assert f"{cut} is truncated or corrupt" in done.stdout
    assert "bad.beton (2)" in done.stderr
    verify_files((sound,))


# ----------------------------------------------------------------------- stock ffcv

FFCV_READS = """
import sys
import numpy as np
from ffcv.fields.basics import IntDecoder
from ffcv.fields.ndarray import NDArrayDecoder
from ffcv.fields.rgb_image import CenterCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import ToTensor
pipelines = {name: [NDArrayDecoder(), ToTensor()] for name in ("map", "lse", "window")}
pipelines["image"] = [CenterCropRGBImageDecoder((16, 16), ratio=1.0), ToTensor()]
pipelines["label"] = [IntDecoder(), ToTensor()]
names = "image", "label", "map", "lse", "window"
loader = Loader(
    sys.argv[1],
    batch_size=4,
    num_workers=2,
    order=OrderOption.SEQUENTIAL,
    drop_last=False,
    pipelines={name: pipelines[name] for name in names},
)
parts = [[np.array(field) for field in batch] for batch in loader]
np.savez(sys.argv[2], *[np.concatenate(column) for column in zip(*parts)])
"""

FFCV_WRITES = """
import sys
import numpy as np
from ffcv.fields import BytesField, IntField, JSONField, NDArrayField, RGBImageField
from ffcv.writer import DatasetWriter
images = np.load(sys.argv[1])
class Two:
    def __len__(self): return len(images)
    def __getitem__(self, n): return images[n % len(images)], n % 3
class Many:
    def __len__(self): return 230
    def __getitem__(self, n):
        text = np.full(n % 5, n % 256, "u1")
        return n % 3, np.full((2, 3), n, "f4"), {"n": int(n)}, images[n % len(images)], text
def image(mode): return RGBImageField(write_mode=mode, jpeg_quality=95)
if __name__ == "__main__":
    for mode in ("jpg", "raw"):
        fields = {"picture": image(mode), "class": IntField()}
        writer = DatasetWriter(f"{sys.argv[2]}/{mode}.beton", fields, num_workers=2)
        writer.from_indexed_dataset(Two(), chunksize=2)
    fields = {"class": IntField(), "x": NDArrayField(np.dtype("f4"), (2, 3)), "j": JSONField()}
    fields |= {"picture": image("jpg"), "text": BytesField()}
    # With two workers and chunks of 10 the samples are not in order.
    writer = DatasetWriter(f"{sys.argv[2]}/many.beton", fields, num_workers=2)
    writer.from_indexed_dataset(Many(), chunksize=10)
"""


@pytest.fixture(scope="module")
def ffcv(command):
    """A function that runs code with stock ffcv in a process."""
    pytest.importorskip("ffcv", reason="ffcv could not be built here")

    def run(code, *words):
        done = command("-c", code, *words, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]

    return run


@pytest.mark.slow
@pytest.mark.ffcv
def test_stock_ffcv_opens_a_densefeed_file(tmp_path, random_maps, ffcv):
    samples, maps = write(tmp_path / "x.beton", random_maps)
    ffcv(FFCV_READS, tmp_path / "x.beton", tmp_path / "read.npz")
    image, label, both, lse, window = np.load(tmp_path / "read.npz").values()
    np.testing.assert_array_equal(label[:, 0], np.arange(7) % 3)
    np.testing.assert_array_equal(both[:, 0].view("<f2"), maps.logit)
    np.testing.assert_array_equal(both[:, 1].view("<u2"), maps.cls)
    np.testing.assert_array_equal(lse.view("<f2"), maps.lse)
    np.testing.assert_array_equal(window, maps.window)
    for got, (jpeg, height, width, *_) in zip(image, samples, strict=True):
        side = min(height, width)
        box = ((width - side) // 2, (height - side) // 2, (width + side) // 2, (height + side) // 2)
        want = np.asarray(
            Image.open(io.BytesIO(jpeg)).crop(box).resize((16, 16), Image.Resampling.BOX)
        ).astype(int)
        # The fast DCT and area filter of ffcv differ from Pillow's on smooth images.
        assert np.abs(got - want).mean() < 4


@pytest.mark.slow
@pytest.mark.ffcv
def test_stock_ffcv_refuses_planes(folder, tmp_path, ffcv):
    """It would read them as raw pixels, beyond their end."""
    main(Packing(data=folder, out=tmp_path / "x.beton", form="planes"))
    code = "import sys, ffcv.reader; ffcv.reader.Reader(sys.argv[1])"
    with pytest.raises(AssertionError, match=r"file format mismatch: code=2,file=57090"):
        ffcv(code, tmp_path / "x.beton")


@pytest.fixture(scope="module")
def stock(tmp_path_factory, ffcv):
    """Files of stock ffcv, and the images.

    They are jpg.beton, raw.beton, and many.beton with five fields in another order.
    """
    root, rng = tmp_path_factory.mktemp("stock"), np.random.default_rng(0)
    smooth = [
        np.asarray(
            Image.fromarray(rng.integers(0, 255, (4, 5, 3), dtype=np.uint8)).resize((50, 40))
        )
        for _ in range(9)
    ]
    np.save(root / "images.npy", np.stack(smooth))
    ffcv(FFCV_WRITES, root / "images.npy", root)
    return root, smooth


@pytest.mark.slow
@pytest.mark.ffcv
@pytest.mark.parametrize("mode", ["jpg", "raw"])
def test_files_of_stock_ffcv_open(stock, mode):
    root, smooth = stock
    source = FfcvSource(root / f"{mode}.beton")
    np.testing.assert_array_equal(source.labels, np.arange(9) % 3)
    assert source.class_names == ["0", "1", "2"]
    for n, want in enumerate(smooth):
        got = np.asarray(source.image(n)).astype(int)
        # The mean error of quality 95 on smooth noise is 1 to 2.
        assert np.abs(got - want).mean() <= (0 if mode == "raw" else 3)
    images = BetonImages(root / f"{mode}.beton")
    for n in range(9):
        np.testing.assert_array_equal(decode(images.read(n), "x"), source.image(n))


@pytest.mark.slow
@pytest.mark.ffcv
def test_files_of_stock_ffcv_with_many_fields_open_alone_and_together(stock):
    root, smooth = stock
    beton = Beton([root / "many.beton"] * 2)
    np.testing.assert_array_equal(beton.labels, np.tile(np.arange(230) % 3, 2))
    np.testing.assert_array_equal(
        beton.arrays(np.arange(460))["x"][:, 1, 2], np.tile(np.arange(230.0), 2)
    )
    for n in (0, 117, 459):
        got = np.asarray(Image.open(io.BytesIO(beton.image(n)[0]))).astype(int)
        assert np.abs(got - smooth[n % 230 % 9]).mean() <= 3
    with pytest.raises(UserError, match=r"raw\.beton has other fields than .*many\.beton"):
        Beton([root / "many.beton", root / "raw.beton"])


@pytest.mark.slow
@pytest.mark.ffcv
def test_a_file_of_stock_ffcv_trains_with_an_hdf5_store(stock, tmp_path, random_maps, command):
    root, _ = stock
    header = make_header(side=6, num_classes=3, class_names=("0", "1", "2"))
    maps = random_maps(9, 6, 3, 3)
    writer = ScoreMapWriter(tmp_path / "maps.h5", header, [*"abcdefghi"], np.arange(9) % 3)
    writer.write(np.arange(9), maps)
    writer.finish()
    source = FfcvSource(root / "jpg.beton", tmp_path / "maps.h5")
    np.testing.assert_array_equal(source.maps(np.array([8, 1])).logit, maps.logit[[8, 1]])
    data = "--loader", "ffcv", "--data", root / "jpg.beton", "--val", root / "jpg.beton"
    given = *data, "--score-maps", tmp_path / "maps.h5", "--out", tmp_path / "run"
    done = command("train.py", "lvvit_micro_relabel", *given, "--epochs", 1, "--batch", 4)
    assert done.returncode == 0, done.stderr


def test_the_checksum_of_a_sample_is_the_documented_one(packed):
    """As in FORMAT.md: little endian CRC-32 (zlib) over map, lse and window."""
    path, whole, _ = packed
    beton = Beton(path)
    at = json.loads(whole[whole.index(b'{"densefeed"') :].split(b"\0", 1)[0])["crc32"]["samples_at"]
    rows = beton.arrays(np.arange(7))
    for n in range(7):
        want = zlib.crc32(b"".join(rows[name][n].tobytes() for name in ("map", "lse", "window")))
        assert int.from_bytes(whole[at + 4 * n : at + 4 * n + 4], "little") == want


def test_adjacent_samples_are_read_ahead_in_one_range_and_others_in_several(
    folder, maps, tmp_path, monkeypatch
):
    """Images and maps of a packed file are adjacent; each of several files has its own range."""
    asked = []
    monkeypatch.setattr(
        os,
        "posix_fadvise",
        lambda file, offset, length, _: asked.append((file, offset, offset + length)),
    )
    main(Packing(data=folder, maps=maps, out=tmp_path / "x.beton"))
    beton = Beton([tmp_path / "x.beton", shutil.copy(tmp_path / "x.beton", tmp_path / "y.beton")])
    beton.read_ahead(9, 14)
    assert [file for file, _, _ in asked] == beton.descriptors
    for index in range(9, 14):
        _, start, end = asked[index // 11]
        assert start <= beton.offsets("map")[index] < end
        assert (
            start
            < beton.images.offset[index]
            < beton.images.offset[index] + beton.images.size[index]
            <= end
        )
    # Arrays of 6 x 6 x 2 x 4 + 6 x 6 x 2 + 16 bytes, and alignment.
    used = sum(int(beton.images.size[n]) + 652 for n in range(9, 14))
    assert sum(end - start for _, start, end in asked) < used + 5 * 64
    for offsets in (beton.images.offset, *beton._offsets.values()):
        offsets[3] += 2**20  # as if several FFCV workers had written
    asked.clear()
    beton.read_ahead(2, 5)
    assert len(asked) == 2
    assert sum(end - start for _, start, end in asked) < 2**17


# ----------------------------------------------------------------------- hostile headers


def rewrite(path, notes=None, dtype=None):
    """Replace the text of the notes, or the dtype of the field `map`, and correct the checksum."""
    whole = bytearray(path.read_bytes())
    end = HEADER.itemsize + FIELD.itemsize * int(np.frombuffer(whole, HEADER, 1)["num_fields"][0])
    place_at = notes_place(HEADER.itemsize)
    place = np.frombuffer(whole, beton_format.NOTES, 1, place_at)
    at, size = int(place["at"][0]), int(place["size"][0])
    text = bytes(whole[at : at + size]) if notes is None else notes
    whole[at : at + len(text)] = text
    if dtype is not None:
        # The third field; its dtype follows 32 extents.
        dtype_at = HEADER.itemsize + 2 * FIELD.itemsize + FIELD.fields["arguments"][1] + 256
        whole[dtype_at : dtype_at + 8] = len(dtype).to_bytes(8, "little")
        whole[dtype_at + 8 : dtype_at + 8 + len(dtype)] = dtype
    head = whole[:end]
    np.frombuffer(head, beton_format.NOTES, 1, place_at)[["size", "crc"]] = len(text), 0
    crc = zlib.crc32(text, zlib.crc32(head))
    np.frombuffer(head, beton_format.NOTES, 1, place_at)["crc"] = crc
    whole[:end] = head
    path.write_bytes(whole)


WRONG_NOTES = {
    "max_palette": [0, -1, "9", None, 9.5, 10**9, True],
    "min_window_side": [0, -0.5, float("nan"), float("inf"), 5e-324, "1", []],
    "absent": ["head", 3, []],
    "class_names": [[], "abc", {"a": 1}, [1, 2], None],
    "fingerprint": [None, 3, ["f"]],
    "teacher": [3, {}],
    "left_out": [-1, "many", 2.5],
    "crc32": [None, 3, {}, {"metadata": 1, "table": 2, "samples": 3, "samples_at": 2**63}],
    "densefeed": [None, "2", [2]],
}


@pytest.mark.parametrize("name", WRONG_NOTES)
def test_wrong_values_in_notes_with_a_right_checksum_are_refused(tmp_path, packed, name):
    path = shutil.copy(packed[0], tmp_path / "x.beton")
    notes = Beton(path).notes
    sums = json.loads(packed[1][packed[1].index(b'{"densefeed"') :].split(b"\0", 1)[0])["crc32"]
    for value in WRONG_NOTES[name]:
        rewrite(path, json.dumps({"crc32": sums} | notes | {name: value}).encode())
        with pytest.raises(UserError, match=r"invalid; pack it again|header is damaged; pack or"):
            Beton(path)


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"3", b"{", b"\xff", b"[" * 10_000, b'{"densefeed": %s}' % (b"9" * 5_000)],
    ids=range(7),
)
def test_notes_that_are_no_object_are_refused(tmp_path, packed, text):
    path = shutil.copy(packed[0], tmp_path / "x.beton")
    rewrite(path, text)
    with pytest.raises(UserError, match="its header is damaged; pack or copy it again"):
        Beton(path)


DTYPES = "f4,(", "(2,)f4,", "i4(", "O", "|O8", "{'a': 3}", "f4" * 300, "", "f16,f16", "<i16", "f1"


@pytest.mark.parametrize(
    "described", [*(json.dumps([["", dtype]]).encode()[:700] for dtype in DTYPES), b"[" * 700]
)
def test_dtypes_that_are_no_number_are_refused(tmp_path, packed, described):
    """NumPy parses some of these as Python, and raises SyntaxError."""
    path = shutil.copy(packed[0], tmp_path / "x.beton")
    rewrite(path, dtype=described)
    with pytest.raises(UserError, match="the dtype of field 'map' is damaged or not numeric"):
        Beton(path)


def test_map_fields_of_other_shapes_are_refused(tmp_path, random_maps):
    """The loaders copy as many bytes as the field `map` implies."""
    samples, _ = samples_of(random_maps)
    fields = map_fields(6, 3)
    fields[1] = fields[1]._replace(shape=(6, 5))
    short = [
        sample._replace(arrays=(sample.arrays[0], sample.arrays[1][:, :5], sample.arrays[2]))
        for sample in samples
    ]
    write_beton(tmp_path / "x.beton", short, fields, NOTES)
    with pytest.raises(UserError, match="shape of the score maps in its notes is invalid"):
        Beton(tmp_path / "x.beton")


def test_raw_images_of_too_many_pixels_are_refused(tmp_path, random_maps):
    """A sparse file holds the bytes of any size."""
    samples, _ = samples_of(random_maps, 2)
    samples = [Sample(bytes(3 * 600), 20, 30, 0, s.arrays, native.RAW) for s in samples]
    write_beton(tmp_path / "x.beton", samples, map_fields(6, 3), NOTES)
    try:
        limit_pixels(599)
        found = verify(tmp_path / "x.beton", 1)
    finally:
        limit_pixels(native.MAX_PIXELS)
    assert len(found) == 2
    assert found[1].startswith(f"{tmp_path}/x.beton image 1 is damaged (its 30 x 20 pixels are")
    assert verify(tmp_path / "x.beton", 1) == []


def test_the_limit_of_pixels_is_an_option_of_verify(packed, command):
    words = ("tools/beton.py", "verify", packed[0], "--max-pixels")
    refused, read, wrong = (command(*words, most) for most in (100, 10**6, 0))
    assert (refused.returncode, read.returncode, wrong.returncode) == (2, 0, 2)
    assert "pixels are more than --max-pixels 100" in refused.stdout
    assert f"{packed[0]}: no faults" in read.stdout
    assert wrong.stderr == "error: --max-pixels is 0, and must be at least 1\n"


def test_a_disk_without_locks_takes_the_same_file(
    tmp_path, random_maps, packed, monkeypatch, no_locks
):
    """Fresh, resumed after a kill, and with samples read ahead on a system without that hint."""
    monkeypatch.delattr(os, "posix_fadvise")
    samples, _ = samples_of(random_maps)
    with BetonWriter(tmp_path / "new.beton", 7, map_fields(6, 3), NOTES) as writer:
        writer.write(0, samples[0])
    with BetonWriter(tmp_path / "new.beton", 7, map_fields(6, 3), NOTES) as writer:
        assert writer.todo().tolist() == [1, 2, 3, 4, 5, 6]
        for index in range(1, 7):
            writer.write(index, samples[index])
        writer.finish()
    assert (tmp_path / "new.beton").read_bytes() == packed[1]
    beton = Beton(tmp_path / "new.beton")
    beton.read_ahead(0, 7)
    beton.close()


@pytest.mark.parametrize("label", [10**8, 2**31 - 1, -1])
def test_labels_out_of_range_are_refused_before_names_are_made(tmp_path, label, little_memory):
    """The names of 10^8 classes took 7.4 GB. Files that FFCV wrote have no names of their own."""
    samples = [Sample(*jpegs(1)[0], 0), Sample(*jpegs(1)[0], label)]
    notes = NOTES | {"class_names": []}
    write_beton(tmp_path / "x.beton", samples, [], notes)
    with (
        little_memory(),
        pytest.raises(UserError, match=r"has labels from -?\d+ to .* from 0 to 65,534"),
    ):
        FfcvSource(tmp_path / "x.beton")
