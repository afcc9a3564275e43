"""The labeling pass: stored rows against a direct computation, resume after kill -9, accuracy."""

import errno
import json
import re
import shutil
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from densefeed.relabel import accuracy as accuracies
from densefeed.relabel import labeling
from densefeed.relabel.accuracy import measure_accuracy, print_accuracy
from densefeed.relabel.estimates import estimate_pass
from densefeed.relabel.labeling import begin_pass, score_batches, unfinished_batches
from densefeed.relabel.rendering import PillowRender
from densefeed.relabel.run import describe_training
from densefeed.relabel.scoring import Scorer, keep, to_maps
from densefeed.relabel.teacher import Teacher, weights_hash
from densefeed.storage.images import Images, decode
from densefeed.storage.maintenance import convert
from densefeed.storage.score_maps import ScoreMapStore, ScoreMapWriter
from densefeed.storage.shard_plan import PARTS, shards_folder
from densefeed.storage.store_file import StoreFile
from densefeed.system.errors import UserError, explain_os_error
from densefeed.system.options import flag
from densefeed.tools import relabel_imagenet

from ..runs import label_images, label_words

ROOT = Path(__file__).parents[2]
CONFIG = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "interpolation": "bilinear"}


def teacher(classes=2, size=64, geometry="squash"):
    torch.manual_seed(0)
    return Teacher(timm.create_model("test_resnet", num_classes=classes), size, geometry, CONFIG)


def options(**more):
    return dict(top_k=2, batch=2, threads=2, absent="tail") | more


def test_all_classes_are_kept_of_a_teacher_that_has_fewer_than_top_k(folder, tmp_path):
    images = Images(folder, split="train")
    five, two = (
        label_images(
            images, teacher(), "t", tmp_path / f"{top_k}.h5", **options(top_k=top_k, batch="auto")
        )
        for top_k in (5, 2)
    )
    assert five.header == two.header
    assert five.header.top_k == 2
    rows = np.arange(len(five))
    for one, other in zip(five.rows(rows), two.rows(rows), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("tta_views", [1, 4])
def test_outside_a_size_that_the_patch_does_not_divide_is_refused(folder, tmp_path, tta_views):
    """It was a traceback, also in a dry run."""
    ours = timm.create_model("lvvit_micro", num_classes=2)
    scorer = Teacher(ours, 65, "squash", CONFIG, name="ours", tta_views=tta_views)
    with pytest.raises(UserError, match=r"ours does not take .* of patch_size 8, such as 64 or 72"):
        label_images(Images(folder, split="train"), scorer, "ours", tmp_path / "x.h5", **options())


def normalize(pixels: np.ndarray) -> torch.Tensor:
    """The network's input of rendered pictures."""
    x_NCHW = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(CONFIG[name]).view(3, 1, 1) for name in ("mean", "std"))
    return (x_NCHW - mean) / std


@pytest.mark.parametrize("geometry", ["squash", "center-crop"])
def test_a_row_is_the_teachers_top_k_of_that_image(folder, tmp_path, geometry):
    """A row against one image passed through the bare timm model; float16 keeps 11 bits."""
    images, scorer = Images(folder, split="train"), teacher(geometry=geometry)
    store = label_images(images, scorer, "t", tmp_path / "maps.h5", **options(batch=4))
    for index in (0, 7, 10):
        image = decode(images.read(index), "")
        if geometry == "center-crop":
            side = min(image.size)
            left, top = (image.width - side) / 2, (image.height - side) / 2
            top, left = top / image.height, left / image.width
            want_window = np.array([top, left, 1 - top, 1 - left])
        else:
            want_window = np.array([0, 0, 1, 1])
        with torch.no_grad():
            features = scorer.model.forward_features(normalize(scorer.prepare(image)[0]))
            logits = (
                torch.einsum("ncij,kc->nijk", features, scorer.model.fc.weight)
                + scorer.model.fc.bias
            )
        row = store.rows(np.array([index]))
        want = logits.topk(2, dim=-1)
        np.testing.assert_allclose(row.logit[0], want.values[0], atol=2e-3, rtol=1e-3)
        np.testing.assert_array_equal(row.cls[0], want.indices[0])
        np.testing.assert_allclose(row.lse[0], logits.logsumexp(-1)[0], atol=2e-3, rtol=1e-3)
        np.testing.assert_allclose(row.window[0], want_window, atol=1e-6)
    assert store.header.teacher.startswith("t ")


def test_accuracy_of_the_stored_maps_is_the_models_own(folder, tmp_path):
    """With every class kept, the mean logit of a map is the output of the bare timm model."""
    images, scorer = Images(folder, split="train"), teacher(classes=2)
    store = label_images(images, scorer, "t", tmp_path / "maps.h5", **options(batch=4))
    right = []
    for index in range(len(images)):
        pixels, _ = scorer.prepare(decode(images.read(index), ""))
        with torch.no_grad():
            top = scorer.model(normalize(pixels)).argmax()
        right.append(int(top) == images.labels[index])
    assert measure_accuracy(store, batch=4) == pytest.approx(np.mean(right))


@pytest.mark.parametrize("absent", ["tail", "zero-logit"])
def test_accuracy_counts_unnamed_classes_as_stored(tmp_path, random_maps, absent):
    """Against dense logits, computed cell by cell."""
    from densefeed.storage.score_maps import ScoreMapWriter, StoreHeader

    count, side, top_k, classes = 40, 3, 2, 5
    maps = random_maps(count, side, top_k, classes)
    score = np.zeros((count, classes))
    for n in range(count):
        for cell in range(side * side):
            logit, cls, lse = (
                part[n].reshape(side * side, -1)[cell].astype(float) for part in maps[:3]
            )
            rest = max(1 - np.exp(logit - lse).sum(), 1e-3) / (classes - top_k)
            dense = np.full(classes, 0.0 if absent == "zero-logit" else lse[0] + np.log(rest))
            dense[cls.astype(int)] = logit
            score[n] += dense
    labels = score.argmax(1)
    labels[::4] = (labels[::4] + 1) % classes
    header = StoreHeader(
        side=side,
        top_k=top_k,
        num_classes=classes,
        absent=absent,
        teacher="t",
        input_size=64,
        geometry="squash",
        fingerprint="f",
        class_names=tuple("abcde"),
    )
    writer = ScoreMapWriter(tmp_path / "maps.h5", header, [f"{n}" for n in range(count)], labels)
    writer.write(np.arange(count), maps)
    writer.finish()
    assert measure_accuracy(ScoreMapStore(tmp_path / "maps.h5"), batch=16) == 0.75


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
def test_logits_that_float16_cannot_hold_are_refused(bad):
    logits = torch.zeros(1, 2, 2, 3)
    logits[0, 1, 1, 2] = bad
    what = "NaN" if np.isnan(bad) else r"above 65,504, the largest number of float16"
    with pytest.raises(UserError, match=rf"scores of image 0 are {what}; check its weights"):
        to_maps(keep(logits, 2), np.zeros((1, 4), np.float32))


@pytest.mark.parametrize(
    ("accuracy", "said"), [(0.99, "good: "), (0.95, "fair: "), (0.874, "87.4 % is too low for ")]
)
def test_outside_the_accuracy_of_maps_is_judged(monkeypatch, capsys, accuracy, said):
    monkeypatch.setattr(accuracies, "measure_accuracy", lambda store: accuracy)
    print_accuracy(SimpleNamespace(header=SimpleNamespace(absent="tail")), "a caveat")
    line, caveat, verdict = capsys.readouterr().out.splitlines()
    assert line.endswith(f"image labels: {100 * accuracy:.1f} %")
    assert caveat == "a caveat"
    assert verdict.startswith(said)


def test_impossible_options_are_refused_before_any_work(folder, tmp_path):
    images = Images(folder, split="train")
    for option in ("top_k", "threads"):
        with pytest.raises(UserError, match=f"{flag(option)} is 0, and must be at least 1"):
            relabel_imagenet.Labeling(data=folder, out=tmp_path, teacher=("t",), **{option: 0})
    with pytest.raises(UserError, match="--batch is 0, and must be at least 1"):
        label_images(images, teacher(), "t", tmp_path / "maps.h5", **options(batch=0))
    with pytest.raises(UserError, match=r"has 2 classes but the teacher t scores 1"):
        label_images(images, teacher(classes=1), "t", tmp_path / "maps.h5", **options(top_k=1))
    with pytest.raises(UserError, match="--precision fp16 needs a GPU; choose bf16"):
        label_images(images, teacher(), "t", tmp_path / "maps.h5", **options(precision="fp16"))
    assert list(tmp_path.iterdir()) == []


def test_a_run_killed_with_9_continues_and_ends_equal(folder, tmp_path, command):
    """SIGKILL once rows are on disk; the same command again gives the bytes of a whole run."""
    words = label_words(folder, tmp_path, "--input-size", 512, "--batch", 1, "--out")
    killed, whole = tmp_path / "killed.h5", tmp_path / "whole.h5"
    with command.start(*words, killed) as process:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if done_rows(killed) >= 2:
                break
            time.sleep(0.002)
        process.kill()
    # It may have finished before the signal came.
    if not killed.exists():
        assert done_rows(killed) >= 2
        again = command(*words, killed)
        assert again.returncode == 0, again.stderr
        assert "11 are labeled already" in again.stdout
    assert command(*words, whole).returncode == 0
    assert killed.read_bytes() == whole.read_bytes()
    assert sorted(tmp_path.glob("killed*")) == [killed]
    assert len(ScoreMapStore(killed)) == 11


def done_rows(out):
    """Count the rows done of the only shard of a file to be, without HDF5's locking."""
    import h5py

    try:
        (part,) = (shards_folder(out) / PARTS).glob("*.h5.part")
        with h5py.File(part, "r", locking=False) as file:
            return int(file["done"][:].sum())
    except (OSError, ValueError):
        return 0


# ------------------------------------------------------------------------- threads


def test_a_failed_write_ends_the_pass_and_what_was_written_stays(folder, tmp_path, monkeypatch):
    """The disk refuses the batch of the seventh row, on the writing thread.

    The message names the file, and the pass resumes later.
    """
    images, scorer, write = Images(folder, split="train"), teacher(), ScoreMapWriter.write
    threads = set(threading.enumerate())

    def failing(self, ids, maps):
        if 6 in ids:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.part))
        write(self, ids, maps)

    with monkeypatch.context() as patch:
        patch.setattr(ScoreMapWriter, "write", failing)
        with pytest.raises(OSError, match="No space left") as error:
            label_images(images, scorer, "t", tmp_path / "maps.h5", **options())
    assert explain_os_error(error.value).endswith(
        ".1.h5.part: the disk is full; free some space or choose another place"
    )
    assert done_rows(tmp_path / "maps.h5") >= 6
    label_images(images, scorer, "t", tmp_path / "maps.h5", **options())
    assert len(ScoreMapStore(tmp_path / "maps.h5")) == 11
    assert set(threading.enumerate()) <= threads


def test_outside_images_with_nan_are_named(folder, tmp_path, monkeypatch):
    """A teacher with a NaN for black images; the message does not speak of float16."""
    logits = Scorer.logits
    monkeypatch.setattr(
        Scorer,
        "logits",
        lambda self, picture_NLHWC: logits(self, picture_NLHWC).where(
            (picture_NLHWC > 0).flatten(1).any(1)[:, None, None, None], float("nan")
        ),
    )
    copy = shutil.copytree(folder, tmp_path / "images")
    victims = sorted((copy / "train" / "cat").glob("*.jpg"))[2:4]
    for victim in victims:
        Image.new("RGB", (64, 64)).save(victim)
    images = Images(copy, split="train")
    with pytest.raises(UserError) as error:
        label_images(images, teacher(), "t", tmp_path / "maps.h5", **options(batch=11))
    assert str(error.value) == (
        f"the teacher's scores of {victims[0]} (and of 1 more of its batch) are NaN; check its "
        "weights and preprocessing"
    )
    with pytest.raises(UserError, match=f"scores of {re.escape(str(victims[0]))} "):
        estimate_pass(begin_pass(images, teacher(), "t", **options(batch=11)))


class Fails(torch.nn.Module):
    """Maps of 4 x 4 cells for the first image, and from the second call on what `fails` makes."""

    def __init__(self, fails):
        super().__init__()
        self.fails, self.calls = fails, 0

    def forward_features(self, image_NCHW):
        self.calls += 1
        if self.calls > 2:
            image_NCHW = self.fails(image_NCHW)
        side = image_NCHW.shape[-1] // 16
        pooled_NCss = torch.nn.functional.adaptive_avg_pool2d(image_NCHW, side)
        return pooled_NCss[:, : 2 if pooled_NCss.shape[1] == 3 else 3]

    def forward(self, image_NCHW):
        return self.forward_features(image_NCHW)


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (lambda image: image.nothing, "AttributeError: 'Tensor' object has no attribute 'nothing'"),
        (lambda image: image.expand(3, *image.shape), "RuntimeError: "),
        (lambda image: image[..., :32, :32], "ValueError: logits of the shape [2, 2, 2, 2] in "),
        (lambda image: image[:1], "ValueError: logits of the shape [1, 4, 4, 2] in place of "),
        (lambda image: image[:, [0, 1, 2, 0]], "ValueError: logits of the shape [2, 4, 4, 3] in "),
        (lambda image: image[:, :1], "ValueError: logits of the shape [2, 4, 4, 1] in place of"),
    ],
)
def test_outside_a_teacher_that_fails_later_is_one_sentence(folder, tmp_path, fails, reason):
    """It was a traceback of the pass, or a map of one image for a batch."""
    own, images = Teacher(Fails(fails), 64, "squash", CONFIG), Images(folder, split="train")
    with pytest.raises(UserError) as error:
        label_images(images, own, "own", tmp_path / "maps.h5", **options())
    assert f"failed at 2 images from {images.where(2)} on, of 64 px ({reason}" in str(error.value)
    assert str(error.value).endswith("; correct its forward pass")
    assert done_rows(tmp_path / "maps.h5") == 2


def test_a_damaged_image_ends_the_pass_after_those_before_it_are_written(folder, tmp_path):
    copy = tmp_path / "images"
    shutil.copytree(folder, copy)
    victim = sorted((copy / "train").rglob("*.jpg"))[7]
    # Its length, and so the fingerprint of the dataset, stay the same.
    victim.write_bytes(bytes(victim.stat().st_size))
    with pytest.raises(UserError, match=rf"{victim.name} cannot be decoded"):
        label_images(Images(copy, split="train"), teacher(), "t", tmp_path / "maps.h5", **options())
    assert done_rows(tmp_path / "maps.h5") == 6
    victim.write_bytes((folder / victim.relative_to(copy)).read_bytes())
    images = Images(copy, split="train")
    assert len(label_images(images, teacher(), "t", tmp_path / "maps.h5", **options())) == 11


def test_images_are_scored_in_order_although_they_are_rendered_in_any(folder, tmp_path):
    """Rendering the first images of a batch takes longest.

    Pictures are not overwritten before they are scored.
    """
    images, scorer = Images(folder, split="train"), teacher()
    want = label_images(
        images, scorer, "t", tmp_path / "one.h5", **options(threads=1)
    ).path.read_bytes()
    plain = PillowRender(images, scorer)

    def late(index, out):
        time.sleep(0.02 * (index % 2 == 0))
        return plain(index, out)

    got = label_images(images, scorer, "t", tmp_path / "two.h5", **options(threads=4), render=late)
    assert got.path.read_bytes() == want


def test_the_time_the_teacher_waits_is_attributed_to_images_or_disk(folder, monkeypatch):
    """A wait for a written batch takes 100 s here, one for the Windows of rendered images 1 s."""

    def wait(*futures):
        return 1.0 if futures[0].result() else 100.0

    monkeypatch.setattr(labeling, "wait_seconds", wait)
    images, scorer = Images(folder, split="train"), teacher()
    work = begin_pass(images, scorer, "t", **options(threads=1))
    updates = []
    batches = [np.arange(at, min(at + 2, 11)) for at in range(0, 11, 2)]
    speed = score_batches(work, batches, lambda *words: None, updates.append)
    assert updates == [2, 4, 6, 8, 10, 11]
    assert (speed.images, speed.images_wait, speed.disk_wait) == (11, 6, 600)
    speed.seconds = 1000
    assert "0.6 % of the time for images and 60.0 % for the disk" in str(speed)


@pytest.mark.parametrize(("count", "buffers"), [(1, 1), (3, 3), (6, 4)])
def test_every_buffer_of_rendered_images_is_used(folder, monkeypatch, count, buffers):
    """On a GPU they are pinned, 154 MB for 256 images of 448 pixels."""
    work = begin_pass(Images(folder, split="train"), teacher(), "t", **options(threads=1, batch=2))
    made, used, zeros, begin = set(), set(), torch.zeros, work.scorer.begin

    def record_zeros(*shape, **how):
        tensor = zeros(*shape, **how)
        if shape == (2, *work.pictures_shape):
            made.add(tensor)
        return tensor

    def record_begin(pictures, *rest):
        used.add(pictures)
        return begin(pictures, *rest)

    monkeypatch.setattr(torch, "zeros", record_zeros)
    monkeypatch.setattr(work.scorer, "begin", record_begin)
    batches = [np.arange(at, min(at + 2, 11)) for at in range(0, 2 * count, 2)]
    score_batches(work, batches, lambda *words: None, lambda _: None)
    assert made == used
    assert len(made) == buffers


def test_a_batch_is_no_larger_than_the_set(folder):
    """Its buffers are allocated before the first image is read."""
    images = Images(folder, split="train")
    work = begin_pass(images, teacher(), "t", **options(batch=10**9))
    assert work.batch == len(images) == 11


def test_an_input_size_that_no_store_takes_is_refused(folder):
    with pytest.raises(UserError, match=r"--input-size is 5,000, and must be from 1 to 4,096"):
        begin_pass(Images(folder, split="train"), teacher(size=5000), "t", **options())


def test_a_pass_keeps_the_hash_of_weights_that_it_standardizes_once(folder):
    """And the teacher that lists the pictures knows its cells without a forward pass of its own."""
    model = timm.create_model("test_nfnet", num_classes=2)
    standardizing = Teacher(model, 128, "tile", CONFIG, tiles=2)
    name = f"t {weights_hash(model)}"
    work = begin_pass(Images(folder, split="train"), standardizing, "t", **options())
    assert work.scorer.teacher is not standardizing
    assert work.header.teacher == name == f"t {weights_hash(model)}"
    assert standardizing.cells == 4


def test_a_wait_lasts_until_all_futures_are_done(monkeypatch):
    clock = [10.0]
    monkeypatch.setattr(labeling.time, "perf_counter", lambda: clock[0])
    first, last = Future(), Future()
    first.set_result(None)
    last.result = lambda: clock.append(clock.pop() + 2.5)
    assert labeling.wait_seconds(first, last) == 2.5


def test_a_batch_always_has_the_same_images():
    done = np.array([1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0], bool)
    assert [ids.tolist() for ids in unfinished_batches(done, 4)] == [[4, 5, 6, 7], [8, 9, 10]]
    assert unfinished_batches(np.ones(3, bool), 4) == []


# ------------------------------------------------------------------------- estimated cost


def test_a_dry_run_writes_nothing_and_predicts_the_sizes_of_the_files(folder, tmp_path):
    """Bytes an image against stores that are then made; hours against a computation by hand."""
    images, scorer = Images(folder, split="train"), teacher()
    estimate = estimate_pass(begin_pass(images, scorer, "t", **options()))
    assert list(tmp_path.iterdir()) == []
    raw = label_images(images, scorer, "t", tmp_path / "raw.h5", **options())
    for form, each in estimate.row_bytes.items():
        path = raw.path if form == "raw" else convert(raw, tmp_path / f"{form}.h5", form).path
        whole = {"levels": 1024, "error": 32} if form == "compact" else {}
        file = StoreFile(path)
        assert sum(file.read(name).nbytes for name in file.types) - sum(
            whole.values()
        ) == pytest.approx(11 * each)
    assert estimate.images == 11
    assert estimate._replace(rate=100.0).hours(1_281_167, 8) == pytest.approx(
        1_281_167 / 800 / 3600
    )
    assert 1e7 < estimate.memory_bytes < 1e11
    text = "\n".join(estimate._replace(rate=100.0).lines())
    for words in (
        "100.0 images/s in batches of 2",
        "8 such devices: 0.00 h for 11 images, 0.44 h for 1,281,167 images",
        "compact: ",
    ):
        assert words in text


@pytest.fixture
def settings(folder, tmp_path):
    """Options of a labeling by a small teacher."""
    torch.manual_seed(0)
    weights = tmp_path / "teacher.safetensors"
    save_file(timm.create_model("test_resnet", num_classes=2).state_dict(), weights)
    given = dict(model=("test_resnet",), input_size=(64,), top_k=2, device="cpu")
    return relabel_imagenet.Labeling(
        data=folder, out=tmp_path / "maps.h5", teacher=(str(weights),), **given
    )


def test_the_command_dry_runs(settings, tmp_path, capsys):
    relabel_imagenet.main(replace(settings, dry_run=True))
    text = capsys.readouterr().out
    assert "64 such devices" in text
    assert re.search(
        r"one decoding thread renders [\d,]+ images/s: \d+ keeps? this device busy", text
    )
    assert [path.name for path in tmp_path.iterdir()] == ["teacher.safetensors"]


def test_outside_a_busy_machine_is_told_when_labeling_starts(settings, monkeypatch, capsys):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.getloadavg", lambda: (1e4, 0.0, 0.0))
    relabel_imagenet.main(replace(settings, dry_run=True))
    assert capsys.readouterr().err.count("load average 10000.0 on ") == 1


def test_outside_dry_run_says_that_it_does_not_read_the_shard(settings, capsys):
    relabel_imagenet.main(replace(settings, dry_run=True, shard="0/2"))
    assert "--dry-run does not read --shard 0/2: this is the whole" in capsys.readouterr().out


def test_outside_a_teacher_without_class_names_is_said_to_go_by_order(settings, tmp_path, capsys):
    note = f"states no names of classes; they are matched by order with those of {settings.data}"
    relabel_imagenet.main(replace(settings, dry_run=True))
    assert note in capsys.readouterr().out.replace("\n", " ")
    names = Images(settings.data).class_names
    (tmp_path / "config.json").write_text(json.dumps({"label_names": names}))
    named = tmp_path / "model.safetensors"
    (tmp_path / "teacher.safetensors").rename(named)
    relabel_imagenet.main(replace(settings, teacher=(str(named),), dry_run=True))
    assert "matched by order" not in capsys.readouterr().out


def test_outside_a_teacher_that_was_trained_on_the_images_is_told(settings, tmp_path, capsys):
    """With the accuracy of its run on new images; a teacher of other images is not."""
    images, run = Images(settings.data), tmp_path / "run"
    run.mkdir()
    (tmp_path / "result.json").write_text('{"top1": 0.5}')
    state = {"model": timm.create_model("test_resnet", num_classes=2).state_dict()}
    for fingerprint, file in ((images.fingerprint(), run / "last.pt"), ("f", tmp_path / "x.pt")):
        torch.save(state | {"fingerprint": fingerprint}, file)
    describe, teachers = describe_training, [str(run), str(tmp_path / "x.pt")]
    told = f"note: {run} was trained on these images"
    assert describe(teachers, images.fingerprint()) == f"{told}; on new images the maps are worse"
    (run / "result.json").write_text('{"top1": 0.5, "top1_ema": 0.625}')
    assert ", and its validation accuracy was 62.5 %; on" in describe(
        teachers, images.fingerprint()
    )
    assert describe(["resnet18", teachers[1]], images.fingerprint()) == ""
    relabel_imagenet.main(replace(settings, teacher=(str(run),)))
    printed = capsys.readouterr().out.replace("\n", " ")
    assert f"{told}, and its validation accuracy was 62.5 %" in printed


def test_outside_data_with_numbers_for_names_is_said_to_go_by_number(settings, tmp_path, capsys):
    images = Images(settings.data)
    for number, name in enumerate(images.class_names):
        shutil.copytree(settings.data / "train" / name, tmp_path / "images" / str(number))
    settings = replace(settings, data=tmp_path / "images")
    names = [f"thing {n}" for n in range(len(images.class_names))]
    (tmp_path / "config.json").write_text(json.dumps({"label_names": names}))
    named = tmp_path / "model.safetensors"
    (tmp_path / "teacher.safetensors").rename(named)
    relabel_imagenet.main(replace(settings, teacher=(str(named),), dry_run=True))
    assert (
        f"note: {settings.data} has numbers for names of classes; they are matched by number with "
        f"those of {named} by number"
    ) in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(("mode", "want"), [("auto", False), ("never", False), ("whole", True)])
def test_the_command_compiles_as_its_option_says(settings, monkeypatch, mode, want):
    """On a CPU; what `auto` means on a GPU is tested beside `choose_compile`."""
    passed = []

    def begin(*_, compiled, **__):
        passed.append(compiled)
        raise UserError("this test ends here")

    monkeypatch.setattr("densefeed.relabel.run.begin_pass", begin)
    with pytest.raises(UserError, match="this test ends here"):
        relabel_imagenet.main(replace(settings, compile=mode))
    assert passed == [want]
