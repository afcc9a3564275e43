"""Ways to leave a loader: batches that the consumer holds are never overwritten, and no thread,
memory, file or process remains.
"""

import contextlib
import gc
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from densefeed import native
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.folder import FolderSource
from densefeed.pipelines.loader import AHEAD, Memory, ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
from densefeed.system.errors import UserError
from densefeed.tools.pack_dataset import Packing, main

from ..jpeg_files import loader_class

ROOT = Path(__file__).parents[2]
DALI = pytest.param("dali", marks=pytest.mark.dali)  # of a .beton
SLOW_DALI = pytest.param("dali", marks=[pytest.mark.dali, pytest.mark.slow])
LARGE = 64 * 224 * 224 * 3  # bytes of a batch's images where memory is measured
# Seconds after which a process that does not end counts as hung. The interpreter and DALI take 1 to
# 2 s of processor time to free all modules, which took 28 s with a load average of 12 on two cores,
# and above 60 s where other processes came first.
HUNG = 300
# "Exception ignored in ..."
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def opened(folder, maps, tmp_path_factory):
    """Return a function that opens `folder`, `ffcv` or `dali` with 11 samples and score maps."""
    beton = tmp_path_factory.mktemp("leaving") / "x.beton"
    main(Packing(data=folder, maps=maps, out=beton))

    def open_loader(kind="ffcv", threads=3, batch=2, repeats=1, size=32):
        source = (
            FolderSource(folder, "train", maps, threads) if kind == "folder" else FfcvSource(beton)
        )
        plan = EpochPlan(
            num_samples=11, batch=batch, seed=3, mode="train", repeats=repeats, sizes=((0, size),)
        )
        return loader_class("dali" if kind == "dali" else "native")(source, plan, threads)

    return open_loader


def open_resources():
    """Count the threads of this process, native ones included, and list our open files."""
    gc.collect()
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    files = {os.readlink(link) for link in links if os.path.exists(link)}
    return len(os.listdir("/proc/self/task")), {
        name for name in files if name.endswith((".beton", ".jpg", ".h5"))
    }


@pytest.fixture(scope="module")
def before():
    torch.ones(2**20).sum()  # PyTorch starts its own threads at the first large sum
    # Modules imported by earlier tests and by DALI would take part in every collection below.
    gc.collect()
    gc.freeze()
    return open_resources()


@pytest.fixture(autouse=True)
def no_leaks(before):
    """After each test, threads and open files are those of the start; executors need a moment to
    stop their threads.
    """
    yield
    deadline = time.monotonic() + 60
    while (
        not ((after := open_resources())[0] <= before[0] and after[1] <= before[1])
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    assert after[0] <= before[0]  # fewer: numpy's own threads end when a test forks
    assert after[1] <= before[1]


def resident_bytes():
    """Return the resident memory of this process, bytes."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ----------------------------------------------------------------------- memory


@pytest.mark.parametrize("kind", ["folder", "ffcv", DALI])
def test_batches_that_are_held_are_never_overwritten(opened, kind):
    """The consumer keeps whole batches, slices, rows or numpy views, or drops them: three epochs,
    in memory that is reused.
    """
    reader, kept = opened(kind), []
    for epoch in range(3):
        for number, batch in enumerate(reader.batches(epoch)):
            held = [
                lambda b: list(b.tensors.values()),
                lambda b: [field[1:] for field in b.tensors.values()],
                lambda b: [field.numpy()[::2] for field in b.tensors.values()],
                lambda b: [
                    memoryview(field.numpy()[0].reshape(-1).view(np.uint8))
                    for field in b.tensors.values()
                ],
                lambda b: [],
            ][(number + epoch) % 5](batch)
            kept.append((held, [np.array(part) for part in held]))
            del batch, held
    reader.close()
    for held, copies in kept:
        for part, copy in zip(held, copies, strict=True):
            np.testing.assert_array_equal(np.asarray(part), copy)
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ffcv", DALI])
def test_few_batches_are_in_memory_for_a_slow_consumer(opened, monkeypatch, kind):
    """An epoch of 11 batches uses AHEAD + 2 blocks, one of them the consumer's current batch; other
    batches that it holds are extra.
    """
    reader, made, empty = opened(kind, batch=64, repeats=64, size=224), [], Memory.empty
    monkeypatch.setattr(
        Memory, "empty", lambda self, shape, dtype: made.append(shape) or empty(self, shape, dtype)
    )
    before, most, places = resident_bytes(), 0, set()
    for number, batch in enumerate(reader.batches(0)):
        if number == 0:
            time.sleep(0.2)
        assert made.count((64, 224, 224, 3)) <= number + AHEAD
        places.add(batch.image.data_ptr())
        most = max(most, resident_bytes() - before)
    assert number == 10
    assert len(places) <= AHEAD + 2
    # Stacks and scratch memory of the threads; DALI's own libraries and pools took 70 MB with its
    # first pipeline.
    assert most < (AHEAD + 2) * LARGE + (2**24 if kind == "ffcv" else 2**27)
    reader.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ffcv", DALI])
def test_leaving_fifty_times_leaks_no_memory(opened, kind):
    sizes = []
    for number in range(1, 51):
        reader = opened(kind, batch=32, repeats=32, size=160)
        batches = reader.batches(0)
        next(batches), next(batches)
        if number % 2:
            reader.close()
        del reader, batches
        if number % 10 == 0:
            sizes.append(resident_bytes())
    # 40 leaked batches of images are 94 MiB; DALI's pools vary by 20 MB, and do not grow over 150
    # loaders.
    assert max(sizes) - sizes[0] < (2**24 if kind == "ffcv" else 2**26)


# ----------------------------------------------------------------------- ways to leave


def leave_by_break(reader):
    for _ in reader.batches(0):
        break


def leave_by_error(reader):
    with contextlib.suppress(ZeroDivisionError):
        for _ in reader.batches(0):
            _ = 1 / 0


def leave_unstarted(reader):
    reader.batches(0)


def leave_with_a_cycle(reader):
    batches = reader.batches(0)
    cycle = [batches, next(batches)]
    cycle.append(cycle)  # only the garbage collector finds it


def close_twice_while_iterating(reader):
    batches = reader.batches(0)
    next(batches)
    reader.close()
    reader.close()
    with pytest.raises(RuntimeError, match="this loader is closed"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


def close_and_drop_the_iterator(reader):
    batches = reader.batches(0)
    next(batches)
    reader.close()


def iterate_after_close(reader):
    reader.close()
    with pytest.raises(RuntimeError, match="this loader is closed"):
        next(reader.batches(0))


@pytest.mark.parametrize("kind", ["folder", "ffcv", DALI])
@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break,
        leave_by_error,
        leave_unstarted,
        leave_with_a_cycle,
        close_twice_while_iterating,
        close_and_drop_the_iterator,
        iterate_after_close,
    ],
)
def test_nothing_remains_however_the_loader_is_left(opened, leave, close, kind):
    reader = opened(kind)
    leave(reader)
    if close:
        reader.close()


@pytest.mark.parametrize("kind", ["folder", "ffcv", DALI])
def test_the_loader_can_be_used_after_leaving_early(opened, kind):
    reader = opened(kind)
    whole = [batch.image.clone() for batch in reader.batches(1)]
    for _ in range(3):
        leave_by_break(reader)
    for want, batch in zip(whole, reader.batches(1), strict=True):
        assert torch.equal(want, batch.image)
    reader.close()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["ffcv", DALI])
def test_closing_from_another_thread_raises_in_the_consumer(opened, kind):
    """Never an interpreter crash, in any state of the consumer."""
    for number in range(20):
        reader, errors = opened(kind, batch=64, repeats=64, size=64), []

        def consume(reader=reader, errors=errors):
            try:
                while True:
                    for _ in reader.batches(0):
                        pass
            except RuntimeError as error:
                errors.append(str(error))

        consumer = threading.Thread(target=consume)
        consumer.start()
        time.sleep(0.002 * number)
        reader.close()
        consumer.join(timeout=60)
        assert errors == ["this loader is closed"]


@pytest.mark.parametrize("kind", ["ffcv", DALI])
def test_a_forked_child_gets_an_error_and_does_no_harm(opened, kind):
    reader = opened(kind)
    batches = reader.batches(0)
    first = next(batches)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            next(reader.batches(0))
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            del batches
            reader.close()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert b"cannot be used in a forked process" in os.read(read, 1000)
    assert len([first, *batches]) == 6
    os.close(read)
    os.close(write)
    reader.close()


def test_too_many_threads_are_refused(opened):
    with pytest.raises(
        UserError, match=r"100,000 decoding threads are more than .* give fewer --threads"
    ):
        native.Pool(100_000)


# ----------------------------------------------------------------------- the process ends

CHILD = """
import sys, time
from pathlib import Path
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.folder import FolderSource
from densefeed.pipelines.dali import DaliLoader
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
kind, path, batch = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
source = FolderSource(path, "train", threads=2) if kind == "folder" else FfcvSource(path)
plan = EpochPlan(num_samples=2, batch=batch, repeats=batch, seed=0, mode="train")
batches = (DaliLoader if kind == "dali" else ThreadedLoader)(source, plan, 2).batches(0)
try:
    print("waiting", flush=True)
    next(batches)
    print("got one", flush=True)
    if sys.argv[4] == "stay":
        time.sleep(60)
except KeyboardInterrupt:
    print(time.monotonic(), flush=True)
    raise
"""


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """Write two images of 12 megapixels, in a folder and packed without index: a batch of 2,000
    crops takes a minute.
    """
    root = tmp_path_factory.mktemp("slow")
    for name in "ab":
        (root / "images" / "train" / name).mkdir(parents=True)
        noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((4000, 3000)).save(root / "images" / "train" / name / "x.jpg")
    main(Packing(data=root / "images", out=root / "x.beton", index=False))
    return {"folder": root / "images", "ffcv": root / "x.beton"}


@pytest.fixture
def child_of(command, tmp_path):
    """Return a function that starts a child with these arguments; `tmp_path` is its working
    directory and its folder for temporary files.
    """
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{CHILD}"
    how = {"cwd": tmp_path, "environment": {"TMPDIR": str(tmp_path)}, "teardown": True}
    return lambda *words: command.start("-c", code, *words, **how)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["ffcv", "folder", DALI])
def test_ctrl_c_interrupts_a_wait(child_of, slow, kind):
    """2,000 photographs of 12 megapixels take minutes. On two idle cores the wait ends within 0.1 s
    and the process within 2 s, on busy ones later.
    """
    with child_of(kind, slow["folder" if kind == "folder" else "ffcv"], 2000, "stay") as child:
        assert child.stdout.readline() == "waiting\n"
        time.sleep(0.5)
        assert child.poll() is None
        sent = time.monotonic()
        child.send_signal(signal.SIGINT)
        # Its reading threads drop the reads that have not started.
        output, traceback = child.communicate(timeout=HUNG)
    assert float(output) - sent < 20
    assert child.returncode == -signal.SIGINT
    assert traceback.rstrip().endswith("KeyboardInterrupt")
    assert "Exception ignored" not in traceback


@pytest.mark.parametrize("kind", ["ffcv", SLOW_DALI])
def test_a_process_can_exit_with_everything_open(child_of, slow, kind):
    with child_of(kind, slow["ffcv"], 2, "go") as child:
        output, complaints = child.communicate(timeout=HUNG)
    assert (output, complaints, child.returncode) == ("waiting\ngot one\n", "", 0)


def test_a_killed_process_leaves_nothing_and_restarts_at_once(child_of, slow, tmp_path):
    """There are no worker processes to orphan: threads decode, in memory that no other process
    shares.
    """
    with child_of("ffcv", slow["ffcv"], 2, "stay") as child:
        assert [child.stdout.readline() for _ in range(2)] == ["waiting\n", "got one\n"]
        tasks = Path(f"/proc/{child.pid}/task")
        assert len(list(tasks.iterdir())) > 2
        # It has no child processes.
        assert "".join(path.read_text() for path in tasks.glob("*/children")) == ""
        mapped = Path(f"/proc/{child.pid}/maps").read_text()
        assert "/dev/shm" not in mapped
        assert "/SYSV" not in mapped
        child.kill()
        child.wait()
        assert not tasks.exists()
    assert sorted(os.listdir(slow["ffcv"].parent)) == ["images", "x.beton"]
    assert not list(tmp_path.iterdir())  # the folder of its temporary files
    source = FfcvSource(slow["ffcv"])
    reader = ThreadedLoader(source, EpochPlan(num_samples=2, batch=2, seed=0, mode="train"), 2)
    assert len(next(reader.batches(0)).image) == 2
    reader.close()
