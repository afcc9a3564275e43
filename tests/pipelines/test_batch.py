"""Transfer of batches to a device."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from densefeed.pipelines.batch import Batch, copy_stream, to_device
from densefeed.pipelines.loader import Memory


def batches(count, memory):
    for number in range(count):
        image = memory.empty((64, 128, 128, 3), torch.uint8).fill_(number)
        index = torch.full((64,), number)
        yield Batch(
            image,
            index,
            torch.zeros(64, 2, 3),
            torch.zeros(64, 4),
            index,
            index,
            torch.ones(64),
            None,
            None,
            None,
            None,
        )


def test_on_a_cpu_batches_pass_through():
    given = list(batches(3, Memory()))
    for one, other in zip(to_device(iter(given), torch.device("cpu")), given, strict=True):
        assert one.image is other.image


@pytest.fixture
def log(monkeypatch):
    """`log(count)` returns what `to_device` and its consumer do with batches, without a GPU."""
    seen = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def record_event(self):
            seen.append(f"end of {self.name}")
            return self

        def wait_event(self, event):
            seen.append(f"{self.name} waits for {event.name}")

        def wait_stream(self, stream):
            seen.append(f"{self.name} waits for {stream.name}")

    steps, copies, on = Stream("steps"), Stream("copies"), ["steps"]

    @contextmanager
    def change(stream):
        on.append(stream.name)
        yield
        on.pop()

    class Field:
        def record_stream(self, stream):
            seen.append(f"kept for {stream.name}")

    class Event:
        def __init__(self, blocking=False):
            assert blocking

        def record(self, stream):
            # After the step whose line is the last one.
            self.step = seen[-1]

        def synchronize(self):
            seen.append(f"wait for {self.step}")

    class Numbered(int):
        tensors = {"image": Field()}  # noqa: RUF012

        def to(self, device):
            seen.append(f"copy {self} on {on[-1]}")
            return self

    def augment(batch):
        seen.append(f"augment {batch} on {on[-1]}")
        return batch

    def load(count):
        for number in range(count):
            seen.append(f"load {number}")
            yield Numbered(number)

    for name, value in {
        "torch.cuda.Event": Event,
        "torch.cuda.stream": change,
        "torch.cuda.current_stream": lambda device: steps,
        "densefeed.pipelines.batch.copy_stream": lambda device: copies,
    }.items():
        monkeypatch.setattr(name, value)

    def run(count):
        for number in to_device(load(count), torch.device("cuda"), augment):
            seen.append(f"step {number} on {on[-1]}")
        return seen

    return run


def test_outside_a_batch_is_loaded_when_the_step_before_it_is_queued(log):
    """Loading batch 1 before step 0 delays the first step by the time that a batch takes."""
    whole = [line for line in log(2) if line.split()[0] in ("load", "step")]
    assert whole == ["load 0", "step 0 on steps", "load 1", "step 1 on steps"]


def test_outside_a_batch_is_augmented_on_the_stream_of_copies(log):
    """There it hides behind the step before; the step reads it after its end, and keeps it."""
    assert log(1) == [
        "copies waits for steps",
        *("load 0", "copy 0 on copies", "augment 0 on copies", "end of copies"),
        *("steps waits for copies", "kept for steps", "step 0 on steps"),
    ]


def test_outside_the_host_is_two_steps_ahead_at_the_most(log):
    """Otherwise the batches of all steps until the next log line lie on the device."""
    seen = log(6)
    for number in range(3, 6):
        waited = seen.index(f"wait for step {number - 3} on steps")
        assert seen.index(f"step {number - 1} on steps") < waited < seen.index(f"load {number}")


@pytest.mark.parametrize("used", [False, True])
def test_outside_memory_is_pinned_where_cuda_is_used(monkeypatch, used):
    """Pinned memory would open a context on a GPU that is there and not used."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    assert Memory().pinned == used


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_copies_on_the_side_stream_are_whole_when_the_step_reads_them():
    """Host memory is pinned and reused immediately; the step is slow, so copies run ahead of it."""
    device, memory = torch.device("cuda"), Memory()
    slow = torch.randn(4096, 4096, device=device)
    assert memory.empty((1,), torch.uint8).is_pinned()
    sums = []
    for batch in to_device(batches(50, memory), device):
        slow = (slow @ slow).clamp(-1, 1)
        sums.append(batch.image.long().sum() - batch.image[0, 0, 0, 0].long() * batch.image.numel())
        sums.append(batch.image[0, 0, 0, 0].long() - len(sums) // 2)
    assert not torch.stack(sums).any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_batch_is_whole_when_it_is_on_the_host():
    """The copy is queued behind slow products; without waiting it would hold other bytes."""
    (batch,), slow = batches(1, Memory()), torch.randn(4096, 4096, device="cuda")
    want, batch = batch.label + 1, batch.to("cuda")
    torch.cuda.synchronize()
    for _ in range(20):
        slow = (slow @ slow).clamp(-1, 1)
    queued = batch._replace(label=batch.label + 1 + slow[0, 0].isnan().long())
    # Nothing else here waits for the device.
    assert torch.equal(queued.to("cpu").label, want)


def test_all_copies_to_a_gpu_share_one_stream(monkeypatch):
    """Memory stays with the stream it was used on: a stream for each epoch would reserve more."""
    copy_stream.cache_clear()
    made, device = [], torch.device("cuda", 3)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    for _ in range(3):
        assert list(to_device(iter([]), device)) == []
    assert made == [device]
    copy_stream.cache_clear()
