"""`--loader dali`: pixels against Pillow's and our own decoder's, input that breaks DALI, and the
probe for region decoding on a GPU.
"""

import io
import json
import re
import shutil
import sys
import threading
import time
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from densefeed import native
from densefeed import train as training
from densefeed.pipelines import dali, dali_engine, dali_pipeline, dali_probe
from densefeed.pipelines.dali import DaliLoader
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.folder import FolderSource
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
from densefeed.storage import indexed_jpeg
from densefeed.storage.images import Images, crop_resize
from densefeed.system.errors import UserError
from densefeed.system.provenance import ROOT
from densefeed.tools.pack_dataset import Packing, main

from ..jpeg_files import encoded
from ..stores import write_store

# Tolerances in gray levels, mean over a crop; 0.20 and 0.39 were measured.
OF_PILLOW, OF_OURS = 0.3, 0.6


@pytest.fixture
def installed():
    pytest.importorskip("nvidia.dali", reason="DALI is not installed here")


def needs_dali(test):
    """Mark a test that needs DALI."""
    return pytest.mark.dali(pytest.mark.usefixtures("installed")(test))


@pytest.fixture(scope="module")
def photos(photographs, tmp_path_factory):
    """Write the photographs as a folder of JPEGs with three samplings, and packed with index."""
    root = tmp_path_factory.mktemp("photos")
    for number, photograph in enumerate(photographs):
        path = root / "images" / "train" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(photograph, subsampling=("4:2:0", "4:2:2", "4:4:4")[number % 3]))
    main(Packing(data=root / "images", out=root / "x.beton"))
    return root


@pytest.fixture
def maps_of(random_maps, tmp_path):
    """Return a function that makes score maps for a folder's training split."""

    def make(root):
        images = Images(root, split="train")
        return write_store(tmp_path / "maps.h5", images, random_maps(len(images), 6, 2, 2), 2)

    return make


def opened(
    source,
    kind=DaliLoader,
    threads=2,
    batch=4,
    repeats=4,
    size=96,
    mode="train",
    way="bilinear",
    **options,
):
    plan = EpochPlan(
        num_samples=len(source.labels),
        batch=batch,
        seed=3,
        mode=mode,
        repeats=repeats,
        sizes=((0, size),),
        crop_pct=0.87,
        crop_interpolation=way,
    )
    return kind(source, plan, threads, **options)


def epoch(*arguments, number=0, **options):
    """Return the batches of an epoch."""
    reader = opened(*arguments, **options)
    try:
        return list(reader.batches(number))
    finally:
        reader.close()


# ----------------------------------------------------------------------- pixels


@needs_dali
def test_images_stored_as_planes_are_decoded_natively(photos, tmp_path):
    main(Packing(data=photos / "images", out=tmp_path / "x.beton", form="planes"))
    ours, theirs = (
        epoch(FfcvSource(tmp_path / "x.beton"), kind=ThreadedLoader),
        epoch(FfcvSource(tmp_path / "x.beton")),
    )
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.image, other.image)


@needs_dali
@pytest.mark.parametrize("mode", ["train", "evaluate"])
@pytest.mark.parametrize("size", [48, 224])
def test_crops_are_close_to_pillows_and_other_fields_are_equal(photos, mode, size):
    """Includes fractional boxes (evaluation) and flips. A .beton's crops are decoded from cut
    JPEGs, with the same pixels.
    """
    source, images = (
        FolderSource(photos / "images", "train"),
        Images(photos / "images", split="train"),
    )
    how = dict(mode=mode, size=size, batch=7, repeats=1)
    plan = opened(source, ThreadedLoader, **how).plan
    flips = 0
    for number in range(3 if mode == "train" else 1):
        every = [
            epoch(FolderSource(photos / "images", "train"), number=number, **how),
            epoch(FfcvSource(photos / "x.beton"), number=number, **how),
            epoch(FfcvSource(photos / "x.beton"), ThreadedLoader, number=number, **how),
        ]
        for whole, cut, ours in zip(*every, strict=True):
            assert torch.equal(whole.image, cut.image)
            for name, one in cut.tensors.items():
                assert name == "image" or torch.equal(one, ours.tensors[name]), name
            assert (cut.image.float() - ours.image.float()).abs().mean((1, 2, 3)).max() <= OF_OURS
            for row, index in enumerate(whole.index.tolist()):
                image = Image.open(images.where(index))
                box, flip = plan.crops(
                    number, np.array([index]), np.array([image.height]), np.array([image.width])
                )
                (top, left, height, width), mirrored = box[0], flip[0]
                want = crop_resize(image, (left, top, left + width, top + height), size)
                want = want[:, ::-1] if mirrored else want
                assert np.abs(whole.image[row].numpy().astype(int) - want).mean() <= OF_PILLOW, (
                    number,
                    index,
                )
                flips += mirrored
    assert flips > 3 or mode == "evaluate"


@needs_dali
@pytest.mark.parametrize("way", ["bicubic", "random"])
def test_a_crops_filter_is_that_of_the_plan(photos, way):
    plain = epoch(FfcvSource(photos / "x.beton"), size=48)
    ours = epoch(FfcvSource(photos / "x.beton"), ThreadedLoader, size=48, way=way)
    theirs = epoch(FfcvSource(photos / "x.beton"), size=48, way=way)
    plan = opened(FfcvSource(photos / "x.beton"), ThreadedLoader, way=way).plan
    differ = set()
    for cut, one, bilinear in zip(theirs, ours, plain, strict=True):
        assert (cut.image.float() - one.image.float()).abs().mean((1, 2, 3)).max() <= OF_OURS
        cubic = plan.cubic_crops(plan.crop_draws(0, one.index.numpy(), one.repeat.numpy()))
        changed = (cut.image != bilinear.image).flatten(1).any(1).tolist()
        assert changed == cubic.tolist()
        differ |= set(changed)
    assert differ == ({True} if way == "bicubic" else {True, False})


@needs_dali
def test_whole_decode_and_slice_equals_region_decode(photos):
    """The fallback of a GPU, run on a CPU."""
    path = sorted((photos / "images" / "train" / "a").iterdir())[0]
    jpeg = np.frombuffer(path.read_bytes(), np.uint8)
    box, flip = np.array([[10, 20, 200, 111], [0.5, 7.25, 30.75, 99.5]]), np.array([True, False])
    shown = []
    for regions in (True, False):
        pipeline = dali_pipeline.build(4, 1, None, regions, resize=True)
        dali_pipeline.feed(pipeline, [jpeg, jpeg], box, flip, 64)
        shown.append(np.array(pipeline.outputs()[0].as_tensor()))
    np.testing.assert_array_equal(*shown)
    assert shown[0].std() > 5


# ----------------------------------------------------------------------- cutting


def fingerprint(jpeg):
    return len(jpeg) << 32 | zlib.crc32(jpeg)


def cut_of(jpeg, box, sound=0):
    """Cut a crop out of a JPEG in memory; return the Cut, the new JPEG and the sample."""
    with Image.open(io.BytesIO(jpeg)) as image:
        width, height = image.size
    content, room = np.frombuffer(jpeg, np.uint8), np.zeros(len(jpeg) + 64, np.uint8)
    sample, cut = np.zeros(1, native.SAMPLE), np.zeros(1, native.CUT)
    sample["bytes"], sample["length"], sample["height"], sample["width"] = (
        content.ctypes.data,
        len(jpeg),
        height,
        width,
    )
    sample["box_tlhw"], cut["bytes"], cut["sound"] = box, room.ctypes.data, sound
    native.Job(sample, cut, keep=content).decode()
    assert not room[len(jpeg) :].any()  # nothing is written beyond the room
    made = native.memory_at(int(cut["bytes"][0]), int(cut["length"][0])).tobytes()
    return cut[0], made, sample[0]


@pytest.mark.parametrize("kind", ["4:2:0", "4:2:2", "4:4:4", "gray"])
def test_a_cut_jpeg_decodes_to_the_same_crop(noise, kind):
    """Byte for byte, decoded by libjpeg in Pillow, with a margin of 2 pixels for chroma; and the
    JPEG is shorter.
    """
    rng = np.random.default_rng(0)
    for height, width in ((120, 200), (375, 500), (9, 33), (64, 64), (1, 1)):
        image = Image.fromarray(noise(height, width))
        image = image.convert("L") if kind == "gray" else image
        jpeg = indexed_jpeg.transcode(
            encoded(image, **({} if kind == "gray" else {"subsampling": kind}))
        )
        whole, lengths = np.asarray(Image.open(io.BytesIO(jpeg))), []
        for _ in range(40):
            tall, wide = int(rng.integers(1, height + 1)), int(rng.integers(1, width + 1))
            top, left = int(rng.integers(height - tall + 1)), int(rng.integers(width - wide + 1))
            cut, made, sample = cut_of(jpeg, (top, left, tall, wide))
            assert sample["status"] == native.OK, sample["message"]
            shown = np.asarray(Image.open(io.BytesIO(made)))
            assert shown.shape[:2] == (cut["height"], cut["width"])
            at = (
                slice(top - cut["top"], top - cut["top"] + tall),
                slice(left - cut["left"], left - cut["left"] + wide),
            )
            np.testing.assert_array_equal(shown[at], whole[top : top + tall, left : left + wide])
            lengths.append(len(made))
        assert max(lengths) <= len(jpeg)
        if height == 375:
            assert np.mean(lengths) < 0.6 * len(jpeg)


def test_damage_is_found_before_dali(noise):
    """In an indexed JPEG by its checksums, in the rows that are needed; in any other by decoding
    all of it, unless the same bytes were checked before.
    """
    jpeg = bytearray(indexed_jpeg.transcode(encoded(Image.fromarray(noise(160, 160)))))
    jpeg[-300] ^= 4
    # The last rows are not read.
    assert cut_of(bytes(jpeg), (0, 0, 40, 40))[2]["status"] == native.OK
    cut, made, sample = cut_of(bytes(jpeg), (100, 0, 60, 160))
    assert (sample["status"], cut["length"], made) == (native.DAMAGED, 0, b"")
    assert b"do not match their checksum" in sample["message"]
    short = encoded(Image.fromarray(noise(160, 160)))[:-300]
    assert cut_of(short, (0, 0, 40, 40))[2]["status"] == native.DAMAGED
    # `sound` claims that these bytes were checked before.
    assert cut_of(short, (0, 0, 40, 40), sound=fingerprint(short))[2]["status"] == native.OK
    whole = encoded(Image.fromarray(noise(160, 160)))
    assert cut_of(whole, (0, 0, 40, 40), sound=fingerprint(short))[0]["sound"] == fingerprint(whole)


# ----------------------------------------------------------------------- what breaks DALI


@pytest.fixture
def unchecked(monkeypatch):
    """Return a function that disables our own check of a folder's files."""

    def of(root):
        class Known(np.ndarray):
            def __setitem__(self, rows, value):
                pass

        known = np.array(
            [fingerprint(path.read_bytes()) for path in sorted(root.rglob("*.jpg"))], np.uint64
        ).view(Known)
        monkeypatch.setattr(
            dali_engine.Engine,
            "sound",
            property(lambda self: known, lambda self, value: None),
            raising=False,
        )

    return of


@needs_dali
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_broken_pipeline_is_rebuilt_and_the_bad_sample_reported(
    photos, tmp_path, capfd, monkeypatch, unchecked
):
    """Samples in the runs before, with and after it are complete."""
    build, built = dali_pipeline.build, []
    monkeypatch.setattr(
        dali_engine, "build", lambda *arguments: built.append(arguments) or build(*arguments)
    )
    root = tmp_path / "images"
    for number, path in enumerate(sorted((photos / "images").rglob("*.jpg"))):
        to = root / "train" / "ab"[number % 2] / path.name
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(path.read_bytes())
    victim = sorted((root / "train" / "a").iterdir())[1]
    want = epoch(FolderSource(root, "train"), mode="evaluate", batch=6, repeats=1)[0]
    victim.write_bytes(victim.read_bytes()[:5000])
    unchecked(root)
    with pytest.raises(
        UserError, match=f"sample 1: {victim} cannot be decoded .* replace or remove this file"
    ):
        epoch(FolderSource(root, "train"), mode="evaluate", batch=6, repeats=1)
    for rows in (1, 2, 6):
        reader = opened(
            FolderSource(root, "train"), mode="evaluate", batch=6, repeats=1, on_bad_sample="skip"
        )
        reader._engine._rows = rows
        for _ in range(2):
            (got,) = reader.batches(0)
            assert got.weight.tolist() == [n != 1 for n in range(6)]
            shown = [n for n in range(6) if n != 1]
            # Our own decoder decoded the run that failed.
            assert (got.image[shown].float() - want.image[shown].float()).abs().mean(
                (1, 2, 3)
            ).max() <= OF_OURS
        assert reader.skipped == 2
        reader.close()
    assert len(built) > 1 + 1 + 3  # one of each loader at least, and more
    assert f"skipped sample 1: {victim}" in capfd.readouterr().err


@needs_dali
def test_damage_outside_the_crop_has_the_same_outcome_as_in_other_loaders(
    photos, maps_of, tmp_path
):
    """For a JPEG without index. The check before DALI covers the whole file and finds the damage;
    our own decoder decides whether the crop is refused.
    """
    root = tmp_path / "images"
    shutil.copytree(photos / "images", root)
    victim = sorted((root / "train" / "a").iterdir())[0]
    content = bytearray(victim.read_bytes())
    # The last rows, without the end marker.
    content[-(len(content) // 8) : -2] = bytes(len(content) // 8 - 2)
    source = FolderSource(root, "train", maps_of(root))  # reads the file only when it is fetched
    victim.write_bytes(content)
    outcomes = []
    for number in range(8):
        loaders = [
            opened(source, kind, batch=6, repeats=1, size=48, on_bad_sample="skip")
            for kind in (ThreadedLoader, DaliLoader)
        ]
        (want,), (got,) = (list(loader.batches(number)) for loader in loaders)
        assert got.weight.tolist() == want.weight.tolist()
        for name in ("index", "view", "map_logit", "map_class", "map_lse", "window"):
            assert torch.equal(getattr(got, name), getattr(want, name))
        outcomes.append(loaders[1].skipped)
    assert 0 < sum(outcomes) < 8


@needs_dali
@pytest.mark.parametrize("damage", ["zeros", "end marker in the middle", "cut"])
def test_a_file_damaged_after_an_epoch_is_checked_again(photos, tmp_path, damage):
    """An epoch, the damage, two more epochs: the outcome is the folder loader's, though DALI would
    decode such files without an error.
    """
    root = shutil.copytree(photos / "images", tmp_path / "images")
    victim = sorted((root / "train" / "a").iterdir())[0]
    loaders = [
        opened(
            FolderSource(root, "train"),
            kind,
            batch=6,
            repeats=1,
            size=48,
            on_bad_sample="skip",
            mode="evaluate",
        )
        for kind in (ThreadedLoader, DaliLoader)
    ]
    for loader in loaders:
        assert next(loader.batches(0)).weight.all()
    whole = victim.read_bytes()
    half = len(whole) // 2
    middle = {
        "zeros": bytes(len(whole) - half),
        "end marker in the middle": b"\xff\xd9" * 20 + whole[half + 40 :],
        "cut": b"",
    }
    victim.write_bytes(whole[:half] + middle[damage])
    for number in (1, 2):
        assert [next(loader.batches(number)).weight.tolist() for loader in loaders] == [
            [0.0] + [1.0] * 5
        ] * 2
    victim.write_bytes(whole)
    for loader in loaders:
        assert next(loader.batches(3)).weight.all()
        loader.close()


@needs_dali
@pytest.mark.parametrize("at_once", [True, False])
def test_runs_that_only_dali_refuses_are_decoded_natively_and_logged(
    photos, monkeypatch, capfd, at_once
):
    """Unless every run fails: then DALI is at fault. It can fail when it is fed, or later, with
    runs behind it.
    """
    feed, calls = dali_pipeline.feed, []

    def breaks(pipeline, jpegs, *others):
        calls.append(len(jpegs))
        if len(calls) in broken:
            if at_once:
                raise RuntimeError("no more memory")
            jpegs = [np.zeros(100, np.uint8), *jpegs[1:]]
        feed(pipeline, jpegs, *others)

    monkeypatch.setattr(dali_engine, "feed", breaks)
    ours = epoch(FfcvSource(photos / "x.beton"), ThreadedLoader, batch=3, repeats=3)
    for broken in ({1}, {2}, {6}, {7, 8}, {8, 9}, {3, 5, 9}):
        reader = opened(FfcvSource(photos / "x.beton"), batch=3, repeats=3)
        reader._engine._rows = 2
        calls.clear()
        for got, want in zip(reader.batches(0), ours, strict=True):
            assert torch.equal(got.weight, want.weight)
            assert (got.image.float() - want.image.float()).abs().mean((1, 2, 3)).max() <= OF_OURS
        reader.close()
        log = capfd.readouterr().err
        # A run behind one that failed is fed again, to a new pipeline, where `breaks` may not break
        # it.
        assert 1 <= log.count("decoded natively instead") <= len(broken)
    broken = set(range(1000))
    with pytest.raises(
        UserError,
        match=r"DALI failed in 3 runs whose samples are all readable \(.*\), most recently of "
        r"sample \d, .*x\.beton image \d and 3 more; .* --loader ffcv or folder",
    ):
        epoch(FfcvSource(photos / "x.beton"), batch=4)


@needs_dali
def test_a_failure_in_an_abandoned_epoch_is_ignored(photos, monkeypatch, capfd):
    """A run fails in a batch that is no longer needed: it is not decoded and not counted as a
    failure, its samples are checked again, and the next epoch is complete.
    """
    feed, collect, decode, calls, decoded = (
        dali_pipeline.feed,
        dali_engine.Engine._collect,
        dali_engine.Engine._decode,
        [],
        [],
    )
    entered, left = threading.Event(), threading.Event()

    def breaks(pipeline, jpegs, *others):
        calls.append(jpegs)
        feed(pipeline, [np.zeros(100, np.uint8), *jpegs[1:]] if len(calls) == 2 else jpegs, *others)

    def waits(self):  # delays the run that will fail until the epoch was abandoned
        if len(calls) > 1 and self._inside[0].jpegs is calls[1]:
            entered.set()
            left.wait(60)
        collect(self)

    monkeypatch.setattr(dali_engine, "feed", breaks)
    monkeypatch.setattr(dali_engine.Engine, "_collect", waits)
    monkeypatch.setattr(
        dali_engine.Engine,
        "_decode",
        lambda self, work, rows: decoded.append(work) or decode(self, work, rows),
    )
    want = epoch(FfcvSource(photos / "x.beton"), ThreadedLoader, batch=3, repeats=3)
    loader = opened(FfcvSource(photos / "x.beton"), batch=3, repeats=3)
    for _ in range(dali_engine.FAILURES + 1):
        calls.clear()
        entered.clear()
        left.clear()
        batches = loader.batches(0)
        first = next(batches)
        assert entered.wait(60)
        batches.close()
        left.set()
        got = list(loader.batches(0))  # the same loader continues after the abandoned epoch
        assert torch.equal(first.index, want[0].index)
        assert [batch.index.tolist() for batch in got] == [batch.index.tolist() for batch in want]
        for one, other in zip(got, want, strict=True):
            assert (one.image.float() - other.image.float()).abs().mean((1, 2, 3)).max() <= OF_OURS
    loader.close()
    assert not decoded
    assert loader._engine._failures == 0
    assert "DALI failed" not in capfd.readouterr().err


@needs_dali
def test_runs_are_limited_in_samples_and_pixels(photos):
    reader = opened(FfcvSource(photos / "x.beton"), threads=2)
    engine = reader._engine
    engine._rows = 3
    for pixels, lengths in (
        ([1] * 7, [3, 3, 1]),
        ([2**23] * 3, [1, 1, 1]),
        ([2**22] * 4, [2, 2]),
        ([2**30, 1, 1], [1, 2]),
        ([], []),
    ):
        runs = engine._split_runs(np.arange(len(pixels)), np.array(pixels, np.int64))
        assert [len(run) for run in runs] == lengths
        assert [row for run in runs for row in run.tolist()] == list(range(len(pixels)))
    reader.close()


# ----------------------------------------------------------------------- the engine's thread


def error_of(reader):
    """Return the error of an epoch, which another thread iterates over, so that a hang fails."""
    errors = []

    def run():
        try:
            list(reader.batches(0))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the consumer waits for ever"
    (error,) = errors
    return error


def mention(error):
    """Return the lines of an error that a traceback shows: its message and notes."""
    return "\n".join([str(error), *error.__notes__])


@needs_dali
def test_an_error_of_a_batch_names_its_samples(photos, monkeypatch):
    """Its type is that of the error, by which train.py recognizes that memory ran out."""

    def fail(self, run, crops):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(dali_engine.Engine, "_resample", fail)
    source = FolderSource(photos / "images", "train")
    reader = opened(source, mode="evaluate", batch=6, repeats=1)
    error = error_of(reader)
    reader.close()
    assert isinstance(error, torch.OutOfMemoryError)
    assert f"decoded sample 0, {source.where(0)} and 5 more" in mention(error)


@needs_dali
@pytest.mark.parametrize("at", ["start", "collect"])
def test_an_error_that_ends_the_engine_reaches_the_consumer(photos, monkeypatch, at):
    """Also one from outside the code that guards a batch, and before the first batch."""

    def fail(*_):
        raise RuntimeError(f"failed at {at}")

    if at == "start":
        # The engine of a CUDA device makes it the current one.
        monkeypatch.setattr(dali, "probe_regions", lambda device: "")
        monkeypatch.setattr(torch.cuda, "device", fail)
    else:
        monkeypatch.setattr(dali_engine.Engine, "_collect", fail)
    source = FolderSource(photos / "images", "train")
    device = torch.device("cuda", 0) if at == "start" else torch.device("cpu")
    reader = opened(source, mode="evaluate", batch=6, repeats=1, device=device)
    # The engine does not come back for a further epoch.
    for _ in range(2):
        error = error_of(reader)
        assert str(error) == f"failed at {at}"
        assert f"to decode sample 0, {source.where(0)} and 5 more" in mention(error)
    reader.close()


@needs_dali
def test_a_hang_of_dali_is_reported_and_closing_does_not_wait_for_it(photos, monkeypatch):
    from nvidia.dali import Pipeline

    monkeypatch.setattr(dali_engine, "HUNG_POLLS", 3)
    outputs, released = Pipeline.outputs, threading.Event()

    def hang(self, *arguments):
        released.wait(60)
        return outputs(self, *arguments)

    monkeypatch.setattr(Pipeline, "outputs", hang)
    source = FolderSource(photos / "images", "train")
    reader = opened(source, mode="evaluate", batch=6, repeats=1)
    error = error_of(reader)
    assert isinstance(error, UserError)
    assert f"in a run of sample 0, {source.where(0)} and 5 more; remove this file" in str(error)
    reader.close()
    assert not released.is_set()
    assert reader._engine._thread.is_alive()
    released.set()
    reader._engine._thread.join(60)
    assert not reader._engine._thread.is_alive()


@needs_dali
def test_only_one_long_call_counts_as_a_hang(photos):
    """Not several calls of the same run, nor the time between calls."""
    reader = opened(FolderSource(photos / "images", "train"))
    engine, run = reader._engine, dali_engine.Run(None, np.arange(1), [])

    def poll(count):
        return [engine.find_hung() for _ in range(count)]

    for _ in range(2):
        with engine._calling(run):
            assert poll(dali_engine.HUNG_POLLS) == [None] * dali_engine.HUNG_POLLS
    assert poll(2 * dali_engine.HUNG_POLLS) == [None] * 2 * dali_engine.HUNG_POLLS
    with engine._calling(run):
        assert poll(dali_engine.HUNG_POLLS + 1)[-1] is run
    reader.close()


@needs_dali
@pytest.mark.parametrize("index", [None, 1])
def test_the_engine_uses_the_configured_device(photos, monkeypatch, index):
    """The current device of a new thread is 0. `cuda` without an index is the caller's."""
    entered = []

    class Device:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append((threading.current_thread().name, self.device))

        def __exit__(self, *_):
            pass

    def get_current():
        return 1 if threading.current_thread() is threading.main_thread() else 0

    def stop(self, work):
        raise RuntimeError("begun")

    monkeypatch.setattr(torch.cuda, "current_device", get_current)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, Device)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"a stream of {device}")
    monkeypatch.setattr(dali, "probe_regions", lambda device: "")
    monkeypatch.setattr(dali_engine.Engine, "_begin", stop)
    source = FolderSource(photos / "images", "train")
    reader = opened(source, device=torch.device("cuda", index))
    assert str(error_of(reader)) == "begun"
    reader.close()
    assert entered == [("dali", torch.device("cuda", 1)), ("dali", "a stream of cuda:1")]
    # DALI's name of the device.
    assert reader._engine._number == 1


FORK = """
import os, sys
from pathlib import Path
from densefeed.pipelines.dali import DaliLoader
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.plan import EpochPlan
from densefeed.system.errors import UserError
def opened():
    source = FfcvSource(Path(sys.argv[1]))
    count = len(source.labels)
    plan = EpochPlan(num_samples=count, batch=4, seed=1, mode="train", sizes=((0, 32),))
    return DaliLoader(source, plan, 2)
loader = opened()
batches = loader.batches(0)
next(batches)
child = os.fork()
if not child:
    try:
        opened()
    except UserError as error:
        sys.exit(7 if "start processes by spawn" in str(error) else 1)
    sys.exit(0)
status = os.waitpid(child, 0)[1]
print(os.waitstatus_to_exitcode(status), next(batches).image.shape)
"""


@pytest.mark.slow
@needs_dali
def test_a_forked_child_exits_normally(photos, command):
    """Destroying DALI there would wait for threads that the child lacks, or crash."""
    done = command("-c", FORK, photos / "x.beton", timeout=60, teardown=True)
    assert (done.returncode, done.stdout.split()[:1]) == (0, ["7"]), done.stderr


# --------------------------------------------------------- the probe for region decoding


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (f"print('a warning'); print({dali_probe.PROBE_RESULT!r})", ""),
        ("pass", "ended without a result"),
        (
            f"print({dali_probe.PROBE_RESULT!r} + ' not'); print('\\0' * 99)",
            "ended without a result",
        ),
        (f"print({dali_probe.PROBE_RESULT!r}); import sys; sys.exit(3)", "failed (exit code 3)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was killed by signal 11"),
        ("raise RuntimeError('status 8')", "failed (RuntimeError: status 8)"),
        ("import sys; sys.exit(3)", "failed (exit code 3)"),
        ("import time; time.sleep(60)", "did not finish within 1 s"),
    ],
)
def test_a_probe_can_succeed_fail_die_or_hang(code, reason):
    began = time.monotonic()
    seconds = 30 if "sleep" not in code else 1
    assert dali_probe.explain_failure([sys.executable, "-c", code], seconds) == reason
    assert time.monotonic() - began < 30


class EngineRecorder:
    """Stands for the engine, whose thread would need a GPU: keeps how JPEGs would be decoded."""

    def __init__(self, pool, threads, rows, device, regions, samples):
        self.regions = regions

    def stop(self):
        pass


@needs_dali
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (f"print({dali_probe.PROBE_RESULT!r})", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was killed by signal 11"),
        ("import time; time.sleep(60)", "did not finish within 1 s"),
        ("print('Ma\\xdfstab')", "ended without a result"),
    ],
)
def test_where_the_probe_fails_whole_jpegs_are_decoded_and_one_line_says_why(
    photos, monkeypatch, capfd, code, reason
):
    monkeypatch.setattr(dali_probe, "probe_command", lambda device: [sys.executable, "-c", code])
    monkeypatch.setattr(dali_probe, "PROBE_SECONDS", 1 if "sleep" in code else 60)
    monkeypatch.setattr(dali, "Engine", EngineRecorder)
    dali_probe.probe_regions.cache_clear()
    try:
        # The second loader, as of a validation set, asks no child again.
        for _ in range(2):
            reader = opened(FfcvSource(photos / "x.beton"), device=torch.device("cuda", 0))
            assert reader._engine.regions == (not reason)
            reader.close()
            monkeypatch.setattr(dali_probe, "probe_command", None)
    finally:
        dali_probe.probe_regions.cache_clear()
    lines = capfd.readouterr().out.splitlines()
    assert len(set(lines)) == 1
    what = f"whole JPEGs, as its region decoder {reason}" if reason else "regions"
    assert lines[0] == f"DALI on cuda:0 decodes {what}"


# ------------------------------------------------------------- the graph that a GPU runs


DOCUMENTED = ROOT / "docs" / "reference" / "dali.md"


@needs_dali
@pytest.mark.parametrize("regions", [True, False])
def test_a_gpus_graph_passes_what_dalis_documentation_asks_for(monkeypatch, regions):
    """Defined without a driver. docs/reference/dali.md has the reasons."""
    from nvidia.dali import Pipeline, fn, types

    calls = {}

    def record(module, name):
        function = getattr(module, name)

        def call(*inputs, **options):
            out = function(*inputs, **options)
            calls[name] = [node.device for node in inputs], options, out.device
            return out

        monkeypatch.setattr(module, name, call)

    for name in ("external_source", "slice", "reinterpret", "resize"):
        record(fn, name)
    for name in ("image", "image_slice"):
        record(fn.decoders, name)
    monkeypatch.setattr(Pipeline, "build", lambda self: None)
    dali_pipeline.build(4, 2, 0, regions, resize=True)
    decoder = "image_slice" if regions else "image"
    named = {"external_source", decoder, "reinterpret", "resize"}
    assert set(calls) == named | (set() if regions else {"slice"})
    # The page has a row for each operator.
    table = [line.split("|")[1] for line in DOCUMENTED.read_text().splitlines() if line[:1] == "|"]
    documented = set(re.findall(r"`(?:decoders\.)?(\w+)`", " ".join(table)))
    assert set(calls) <= documented
    inputs, options, device = calls[decoder]
    # JPEGs and boxes are read on the host, pixels are made on the GPU.
    assert (set(inputs), device) == ({"cpu"}, "gpu")
    assert options["device"] == "mixed"
    assert options["adjust_orientation"] is False
    assert options["jpeg_fancy_upsampling"] is True
    # The default, WH, swaps the axes of our boxes.
    assert calls["image_slice" if regions else "slice"][1]["axis_names"] == "HW"
    if not regions:
        assert calls["slice"][0] == ["gpu", "cpu", "cpu"]
    inputs, options, device = calls["resize"]
    assert (inputs, device) == (["gpu"], "gpu")
    assert {options[name].device for name in ("size", "roi_start", "roi_end")} == {"cpu"}
    # DALI's own type, of each sample; INTERP_TRIANGULAR is deprecated.
    assert (options["interp_type"].device, options["antialias"]) == ("cpu", True)
    assert dali_pipeline.dali_filters(np.array([native.BICUBIC, native.BILINEAR])).tolist() == [
        int(types.INTERP_CUBIC),
        int(types.INTERP_LINEAR),
    ]


@needs_dali
def test_the_resize_of_a_gpus_graph_is_pillows(photos):
    """Run on a CPU: downscaled, upscaled and mirrored."""
    path = sorted((photos / "images" / "train" / "a").iterdir())[0]
    boxes = np.array([[10.5, 20.25, 170.0, 150.5], [3.0, 9.0, 30.5, 40.25], [0, 0, 160, 170]])
    flips, jpegs = np.array([False, True, True]), [np.frombuffer(path.read_bytes(), np.uint8)] * 3
    kinds = {native.BILINEAR: Image.Resampling.BILINEAR, native.BICUBIC: Image.Resampling.BICUBIC}
    pipeline = dali_pipeline.build(3, 1, None, regions=True, resize=True)
    for filters in (None, np.array([native.BICUBIC, native.BILINEAR, native.BICUBIC])):
        dali_pipeline.feed(pipeline, jpegs, boxes, flips, 64, filters)
        shown = np.array(pipeline.outputs()[0].as_tensor())
        used = [native.BILINEAR] * 3 if filters is None else filters
        for got, box, flip, kind in zip(shown, boxes, flips, used, strict=True):
            top, left, height, width = box
            area = left, top, left + width, top + height
            want = crop_resize(Image.open(path), area, 64, kinds[kind])
            want = want[:, ::-1] if flip else want
            assert np.abs(got.astype(int) - want).mean() <= OF_PILLOW


@needs_dali
@pytest.mark.skipif(torch.cuda.is_available(), reason="only for machines without a GPU")
def test_the_probe_runs_our_pipeline(command):
    """In a forked process: a new one takes 5 s more to import PyTorch."""
    done = command(*dali_probe.probe_command(0)[1:])
    assert done.returncode
    assert "in try_regions" in done.stderr  # it found our modules
    assert "No module" not in done.stderr


def test_the_probe_has_jpegs_of_every_kind_that_a_loader_feeds():
    jpegs, boxes = dali_probe.make_probe_jpegs(8)
    kinds = set()
    for jpeg, (top, left, height, width) in zip(jpegs, boxes.tolist(), strict=True):
        image = Image.open(io.BytesIO(jpeg.tobytes()))
        assert 0 <= top < top + height <= image.height
        assert 0 <= left < left + width <= image.width
        # DRI: the distance of restart markers.
        kinds.add((image.mode, image.layer[0][1], b"\xff\xdd" in jpeg.tobytes()))
    assert kinds == {("RGB", 1, False), ("RGB", 2, False), ("L", 1, False), ("RGB", 2, True)}


@needs_dali
def test_the_probe_compares_pixels(monkeypatch):
    """On a CPU both are equal; a decoder that mirrors wrongly is detected."""
    build = dali_pipeline.build
    monkeypatch.setattr(
        dali_probe, "build", lambda run, threads, device, **how: build(run, threads, None, **how)
    )
    dali_probe.try_regions(0)
    # The CPU's runs, then the GPU's.
    feed, runs = dali_pipeline.feed, dali_pipeline.INSIDE
    flips = iter([False] * runs + [True] * runs)
    monkeypatch.setattr(
        dali_probe,
        "feed",
        lambda pipe, jpegs, box, flip, *how: feed(pipe, jpegs, box, flip ^ next(flips), *how),
    )
    with pytest.raises(RuntimeError, match="its pixels differ from the CPU's by"):
        dali_probe.try_regions(0)


@pytest.mark.gpu
@needs_dali
def test_on_a_gpu_batches_are_close_to_the_cpus(photos):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda", 0)
    kept = []
    for source in (FfcvSource(photos / "x.beton"), FolderSource(photos / "images", "train")):
        theirs = epoch(source, device=device, batch=8, repeats=8)
        kept.append(theirs)
        ours = epoch(FfcvSource(photos / "x.beton"), ThreadedLoader, batch=8, repeats=8)
        for one, other in zip(theirs, ours, strict=True):
            assert one.image.is_cuda
            assert one.label.is_pinned()
            for name, field in one.tensors.items():
                assert name == "image" or torch.equal(field, other.tensors[name]), name
            # The GPU's decoder rounds its inverse DCT and chroma differently.
            assert (one.image.cpu().float() - other.image.float()).abs().mean((1, 2, 3)).max() <= 3


# ----------------------------------------------------------------------- the commands


def test_without_dali_the_error_names_the_package(photos, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali.pipeline", None)
    dali.check_installed.cache_clear()
    with pytest.raises(
        UserError, match=r'--loader dali needs NVIDIA DALI \(.*\); run `pip install "\.\[dali\]"`'
    ):
        opened(FfcvSource(photos / "x.beton"))
    dali.check_installed.cache_clear()


def test_dali_is_imported_only_when_used(command):
    code = (
        "import sys, densefeed.train, densefeed.pipelines.dali; "
        "sys.exit(any('nvidia.dali' in name for name in sys.modules))"
    )
    assert command("-c", code).returncode == 0


@needs_dali
def test_a_run_trains_from_a_packed_file(micro, tmp_path):
    """Its losses differ from those of `ffcv` only slightly, because its pixels do."""
    losses = {}
    for loader in ("dali", "ffcv"):
        result = training.train(micro(tmp_path / loader, loader=loader, epochs=1))
        assert result["skipped"] == 0
        lines = [
            json.loads(line)
            for line in (tmp_path / loader / "metrics.jsonl").read_text().splitlines()
        ]
        losses[loader] = [line["loss"] for line in lines if "lr" in line]
    assert len(losses["dali"]) == 3
    np.testing.assert_allclose(losses["dali"], losses["ffcv"], rtol=0.02)
    assert losses["dali"] != losses["ffcv"]


@needs_dali
def test_the_command_trains_from_a_folder_and_its_maps(folder, maps, tmp_path, command):
    """Without packing."""
    done = command(
        "train.py",
        "lvvit_micro_token_label",
        "--loader",
        "dali",
        "--data",
        folder,
        "--val",
        folder,
        "--score-maps",
        maps,
        "--out",
        tmp_path / "run",
        "--batch",
        4,
        "--epochs",
        1,
        "--size",
        32,
        "--threads",
        1,
        "--device",
        "cpu",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["skipped"] == 0
