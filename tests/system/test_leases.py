"""Leases: one holder at a time, whatever the others do."""

import multiprocessing
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from densefeed.system import leases as module
from densefeed.system.leases import (
    Beat,
    LeaseLostError,
    Leases,
    has_ended,
    lease_key,
    list_holders,
    name_place,
    name_worker,
)
from densefeed.system.object_folder import ObjectFolder, open_objects
from densefeed.system.object_url import ObjectURL

from ..object_storage import run_with

LEASES = int(os.environ.get("SOAK_LEASES", 100))


@pytest.fixture
def clock(monkeypatch):
    """A clock of this process, which the test sets."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def two_workers(folder: Path, seconds: float = 10) -> tuple[Leases, Leases]:
    return Leases(ObjectFolder(folder), seconds), Leases(ObjectFolder(folder), seconds)


def test_a_lease_that_is_renewed_is_never_taken(tmp_path, clock):
    first, second = two_workers(tmp_path)
    lease = first.claim("a")
    assert first.claim("a") is None
    for _ in range(50):
        assert second.claim("a") is None
        clock[0] += 9
        lease.renew()
        lease.report(1, 1.0)
    assert second.claim("b").generation == 1


def test_a_lease_that_is_not_renewed_is_taken_once(tmp_path, clock):
    """The time counts from the first look of whoever takes it: no clocks are compared."""
    first, second = two_workers(tmp_path)
    third = Leases(ObjectFolder(tmp_path), 10)
    lease = first.claim("a")
    clock[0] += 1000
    assert second.claim("a") is None
    clock[0] += 9.9
    assert second.claim("a") is None
    assert third.claim("a") is None
    clock[0] += 0.1
    taken = second.claim("a")
    assert taken.generation == 2
    clock[0] += 0.1
    # It has seen the first holder's lease, and the second one's not yet.
    assert third.claim("a") is None
    with pytest.raises(LeaseLostError, match="the lease of a was lost"):
        lease.report(1, 1.0)
    lease.renew()
    assert ObjectFolder(tmp_path).read(lease_key("a", 1)) == Beat(lease.beat.worker).to_json()


def test_a_holder_that_was_stopped_looks_whether_another_took_its_lease(tmp_path, clock):
    first, second = two_workers(tmp_path)
    lease = first.claim("a")
    assert second.claim("a") is None
    clock[0] += 11
    lease.report(1, 1.0)
    # It was renewed, so the second one waits for the whole time again.
    assert second.claim("a") is None
    clock[0] += 11
    assert second.claim("a").generation == 2
    with pytest.raises(LeaseLostError):
        lease.report(1, 1.0)


def test_a_holder_whose_file_is_gone_writes_no_other(tmp_path):
    """The leases of finished work are removed while a late holder still works."""
    lease = two_workers(tmp_path)[0].claim("a")
    lease.remove()
    lease.renew()
    with pytest.raises(LeaseLostError):
        lease.report(1, 1.0)
    assert ObjectFolder(tmp_path).list("leases") == {}


def test_a_lease_is_kept_by_a_thread_and_then_released(tmp_path):
    first, second = two_workers(tmp_path, 0.2)
    lease = first.claim("a")
    with lease.keep():
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            lease.report(3, 2.5)
            assert second.claim("a") is None
            time.sleep(0.02)
        (beat,) = list_holders(ObjectFolder(tmp_path), ["a"])
        assert (beat.done, beat.rate) == (3, 2.5)
    assert list_holders(ObjectFolder(tmp_path), ["a"]) == []
    assert second.claim("a").generation == 2
    assert len(list_holders(ObjectFolder(tmp_path), ["a", "b"])) == 1


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b'{"worker": "x", "more": 1}', b"\xff", b'{"worker": [1]}'),
        *(b'{"worker": "x", "rate": "fast"}', b'{"worker": "x", "rate": NaN}'),
        *(b'{"worker": "x", "done": -1}', b'{"worker": "x", "released": "yes"}'),
    ],
)
def test_a_damaged_lease_is_held_until_its_time_is_over(tmp_path, clock, content):
    objects = ObjectFolder(tmp_path)
    objects.create(lease_key("a", 1), content)
    (tmp_path / "leases" / "a.x").write_bytes(content)
    leases = Leases(objects, 10)
    assert leases.claim("a") is None
    assert list_holders(objects, ["a"]) == []
    clock[0] += 10
    assert leases.claim("a").generation == 2


def claim_all(place: Path | ObjectURL, count: int, rounds: int, start, results) -> None:
    """Claim pieces of work in their order, as soon as all processes are there."""
    start.wait(60)
    for round_ in range(rounds):
        workers = Leases(open_objects(place / str(round_)))
        got = [name for name in map(str, range(count)) if workers.claim(name)]
        results.put([f"{round_}/{name}" for name in got])
    # The lease of a process that has ended is free.
    start.wait(60)


def take(results, children: list):
    """Wait for the next result, as long as no child has failed."""
    while True:
        with suppress(queue.Empty):
            return results.get(timeout=1)
        assert not any(child.exitcode for child in children)


def count_holders(place: Path | ObjectURL, leases: int, method: str) -> Counter:
    """Let four processes claim the same leases in the same order; count the holders of each."""
    context = multiprocessing.get_context(method)
    start, results, rounds = context.Barrier(4), context.Queue(), max(1, leases // 500)
    words = dict(os.environ), claim_all, place, leases // rounds, rounds, start, results
    children = [context.Process(target=run_with, args=words) for _ in range(4)]
    for child in children:
        child.start()
    lists = [take(results, children) for _ in range(4 * rounds)]
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    return Counter(name for names in lists for name in names)


def test_contended_leases_have_one_holder_each(tmp_path):
    """In a folder; `make soak` has 10,000."""
    # The children use no library with threads, and start at once.
    holders = count_holders(tmp_path, LEASES, "fork")
    assert set(holders.values()) == {1}
    assert len(holders) == LEASES


@pytest.mark.slow
def test_contended_leases_in_object_storage_have_one_holder_each(bucket):
    """Processes that no one forked with a store that is open; `make soak` has 10,000 leases."""
    multiprocessing.set_forkserver_preload(["densefeed.system.leases", "pytest"])
    holders = count_holders(bucket, LEASES, "forkserver")
    assert set(holders.values()) == {1}
    assert len(holders) == LEASES


def test_threads_that_want_leases_of_object_storage_get_one_each(bucket):
    results, start = queue.Queue(), threading.Barrier(4)
    words = bucket, 25, 1, start, results
    threads = [threading.Thread(target=claim_all, args=words) for _ in range(4)]
    for thread in threads:
        thread.start()
    holders = Counter(name for _ in threads for name in results.get(timeout=60))
    assert holders == {f"0/{number}": 1 for number in range(25)}


def test_expired_leases_that_many_threads_want_get_one_holder(tmp_path, clock):
    """All of them see an expired lease, and claim its next generation at the same time."""
    Leases(ObjectFolder(tmp_path), 10).claim("a")
    workers = [Leases(ObjectFolder(tmp_path), 10) for _ in range(8)]
    for generation in range(2, 12):
        assert not any(worker.claim("a") for worker in workers)
        clock[0] += 10
        start, got = threading.Barrier(8), []

        def claim(worker: Leases, start=start, got=got) -> None:
            start.wait(10)
            got.append(worker.claim("a"))

        threads = [threading.Thread(target=claim, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert [lease.generation for lease in got if lease] == [generation]


def test_the_lease_of_a_process_that_ended_here_is_free_at_once(tmp_path):
    """And only of one that ran in this system: hosts may have equal names, and PIDs repeat."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    ended = name_worker().replace(f":{os.getpid()}:", f":{child.pid}:")
    host, boot, space = name_place().split("/")
    assert has_ended(ended)
    assert not has_ended(name_worker())
    assert not has_ended(ended.replace(boot, "another"))
    assert not has_ended(ended.replace(space, "1"))
    assert not has_ended(f"{host}:{child.pid}:0")
    for worker in ("", ":", "::", "x:y:z", f"{name_place()}:{10**30}x:0"):
        assert not has_ended(worker)
    leases = Leases(ObjectFolder(tmp_path), seconds=60)
    lease = leases.claim("work")
    assert leases.claim("work") is None
    lease.beat.worker = ended
    lease.renew()
    assert list_holders(ObjectFolder(tmp_path), ["work"]) == []
    assert leases.claim("work").generation == 2
