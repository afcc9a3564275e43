"""The local copy of samples: Belady's rule, joined ranges, pins and processes that end."""

import multiprocessing
import os
import signal
from contextlib import contextmanager
from functools import cache as memoize
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from densefeed.storage import object_cache
from densefeed.storage.beton import Extents
from densefeed.storage.object_cache import GAP_SHARE, PAGE, CachedFiles, SampleCache
from densefeed.system.errors import UserError
from densefeed.system.object_ranges import RemoteFile
from densefeed.system.object_url import ObjectURL

from ..planted import plant, time_limit

FILE = ObjectURL("s3://bucket/train.beton")


class Disk:
    """Bytes that stand for an object, and the ranges that were read of them."""

    def __init__(self, size):
        self.content = np.random.default_rng(0).bytes(size)
        self.reads = []

    def read(self, file, start, stop):
        self.reads.append((start, stop))
        return memoryview(self.content)[start:stop]

    def read_many(self, file, ranges):
        return [self.read(file, *span) for span in ranges]


def count_used(folder):
    """Return the bytes of disk that the samples in a copy's folder take."""
    return sum(file.stat().st_blocks * 512 for file in folder.glob("*.beton"))


@contextmanager
def open_cache(folder, disk, starts, sizes, capacity=0):
    """Open a copy without a front: the object is no .beton."""
    count, file = len(starts), RemoteFile(FILE, len(disk.content), "v1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_cache, "front_ranges", lambda descriptor: iter(()))
        copy = CachedFiles([file], folder, disk.read)
    extents = Extents(np.zeros(count, np.int32), np.asarray(starts), np.asarray(sizes))
    with pytest.MonkeyPatch.context() as patch:
        if capacity:
            patch.setattr(object_cache, "DISK_SHARE", 1)
            patch.setattr(object_cache, "count_free", lambda folder: capacity - count_used(folder))
        cache = SampleCache(copy, extents, disk.read_many)
    try:
        yield cache
    finally:
        cache.close()
        copy.close()


def use(cache, index, next_use):
    """Read a sample as a batch of one; return whether it had to be fetched."""
    missing, suspects = cache.hold(np.array([index]), next_use)
    for run in cache.join(missing):
        cache.fetch([run])
    cache.verify(suspects)
    cache.release(np.array([index]))
    return len(missing) > 0


def fewest_misses(order, capacity):
    """Return the fewest fetches of any policy, by trying all: a fetched sample takes a place."""

    @memoize
    def search(at, here):
        if at == len(order):
            return 0
        if order[at] in here:
            return search(at + 1, here)
        if len(here) < capacity:
            return 1 + search(at + 1, here | {order[at]})
        return 1 + min(search(at + 1, here - {gone} | {order[at]}) for gone in here)

    return search(0, frozenset())


@given(data=st.data(), count=st.integers(2, 6))
def test_fetches_are_the_fewest_of_any_policy(tmp_path_factory, data, count):
    capacity = data.draw(st.integers(1, count))
    epochs = [data.draw(st.permutations(range(count))) for _ in range(4)]
    order = [index for epoch in epochs[:3] for index in epoch]
    places = [np.argsort(epoch) for epoch in epochs]
    misses = 0
    folder, disk = tmp_path_factory.mktemp("cache"), Disk(count * PAGE)
    pages = np.arange(count) * PAGE
    with open_cache(folder, disk, pages, np.full(count, PAGE), capacity * PAGE) as cache:
        for at, index in enumerate(order):
            epoch, step = divmod(at, count)

            def next_use(ids, now=places[epoch], then=places[epoch + 1], step=step):
                return np.where(now[ids] > step, now[ids], count + then[ids])

            misses += use(cache, index, next_use)
        stored = np.frombuffer((folder / cache._copy.folder / "0.beton").read_bytes(), np.uint8)
        here = np.flatnonzero(cache._index)
    assert misses == fewest_misses(tuple(order), capacity)
    # A sample that is here has its bytes, one that was freed takes no disk and reads as zeros.
    assert len(here) == min(capacity, count)
    rows, truth = stored.reshape(count, PAGE), np.frombuffer(disk.content, np.uint8)
    for index in range(count):
        same = (rows[index] == truth.reshape(count, PAGE)[index]).all()
        assert same if index in here else not rows[index].any()


@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=30),
    gaps=st.lists(st.integers(0, 300), min_size=30, max_size=30),
    data=st.data(),
)
def test_joined_ranges_waste_little_and_hold_each_sample_once(tmp_path_factory, sizes, gaps, data):
    starts = np.cumsum([gap + size for gap, size in zip(gaps, [0, *sizes[:-1]], strict=False)])
    disk = Disk(int(starts[-1]) + sizes[-1])
    ids = np.array(sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1))))
    with open_cache(tmp_path_factory.mktemp("cache"), disk, starts, sizes) as cache:
        np.random.default_rng(0).shuffle(ids)
        cache.hold(ids, np.zeros_like)
        runs = cache.join(ids)
        assert sorted(np.concatenate(runs).tolist()) == sorted(ids.tolist())
        for run in runs:
            cache.fetch([run])
        needed = sum(sizes[i] for i in ids)
        assert needed <= cache.fetched <= (1 + GAP_SHARE) * needed
        for i in ids:
            got = os.pread(cache._descriptors[0], sizes[i], int(starts[i]))
            assert got == disk.content[starts[i] : starts[i] + sizes[i]]


def test_pinned_samples_are_not_freed(tmp_path):
    disk, pages = Disk(3 * PAGE), np.arange(3) * PAGE
    cached = open_cache(tmp_path, disk, pages, np.full(3, PAGE), 2 * PAGE)
    other = open_cache(tmp_path, disk, pages, np.full(3, PAGE), 2 * PAGE)
    with cached as ours, other as theirs:
        for index in (0, 1):
            (missing, _) = theirs.hold(np.array([index]), np.zeros_like)
            theirs.fetch([missing])
        assert ours.hold(np.array([2]), np.zeros_like) is None
        assert not ours._pins.any()
        theirs.release(np.array([1]))
        missing, _ = ours.hold(np.array([2]), np.zeros_like)
        ours.fetch([missing])
        assert np.flatnonzero(ours._index).tolist() == [0, 2]


def test_the_index_has_its_disk_space_from_the_start(tmp_path):
    """A store to a map of a file without space would end the process (SIGBUS)."""
    pages = np.arange(3000) * PAGE
    with open_cache(tmp_path, Disk(3000 * PAGE), pages, np.full(3000, PAGE)):
        for name, size in (("index", 24_000), ("pins.*", 3000)):
            assert next(tmp_path.rglob(name)).stat().st_blocks * 512 >= size


def test_samples_in_one_another_are_refused(tmp_path):
    with (
        pytest.raises(UserError, match="samples that lie in one another"),
        open_cache(tmp_path, Disk(100), [0, 20], [30, 30]),
    ):
        pass


def fill(folder, seed, kill_after=None):
    """Hold and fetch all samples in a random order; die in the middle if asked."""
    disk, pages = Disk(64 * PAGE), np.arange(64) * PAGE
    with open_cache(folder, disk, pages, np.full(64, PAGE), 16 * PAGE) as cache:
        for n, index in enumerate(np.random.default_rng(seed).permutation(64).tolist() * 3):
            while (held := cache.hold(np.array([index]), np.zeros_like)) is None:
                pass
            if n == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
            for run in cache.join(held[0]):
                cache.fetch([run])
            got = os.pread(cache._descriptors[0], PAGE, index * PAGE)
            assert got == disk.content[index * PAGE : (index + 1) * PAGE]
            cache.release(np.array([index]))


@pytest.mark.slow
def test_processes_that_share_a_copy_and_are_killed(tmp_path):
    """Every sample that a process reads is right, whatever others free, fetch or leave."""
    context = multiprocessing.get_context("spawn")
    jobs = [(1, None), (2, 40), (3, None), (4, 7)]
    running = [context.Process(target=fill, args=(tmp_path, *job)) for job in jobs]
    for process in running:
        process.start()
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0, -signal.SIGKILL, 0, -signal.SIGKILL]
    # Pins of the killed do not count.
    fill(tmp_path, 5)
    assert not list(tmp_path.rglob("pins.*"))
    assert next(tmp_path.rglob("0.beton")).stat().st_blocks * 512 <= 16 * PAGE


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *product(("lock", "users", "index"), ("pipe", "device", "link")),
        ("objects.json", "pipe"),
        ("objects.json", "device"),
        ("0.beton", "link"),
    ],
)
def test_outside_files_of_a_copy_are_regular(tmp_path, name, kind):
    """Else the copy would overwrite the file that a link leads to. It is made again."""
    disk = Disk(4 * PAGE)
    with open_cache(tmp_path, disk, [0], [PAGE]):
        (copy,) = tmp_path.iterdir()
    (copy / name).unlink()
    victim = plant(kind, copy / name)
    os.link(victim, tmp_path / "kept")
    with time_limit(), open_cache(tmp_path, disk, [0], [PAGE]) as cache:
        assert use(cache, 0, lambda ids: ids)
    assert (copy / name).is_file()
    assert not (copy / name).is_symlink()
    assert (tmp_path / "kept").read_bytes() == b"mine"
