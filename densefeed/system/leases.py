"""Leases: many processes divide work among them, join and leave at any time, without a broker.

The lease of a piece of work is a file, or an object of object storage, that its holder created and
renews. Nobody else writes to it. If its content stays the same for a lease's time, or its holder
ran on this machine and has ended, another process creates the next generation: creating a file is
atomic, so of many processes one gets it. No clocks of two machines are compared: each process
measures by its own how long a content has stayed the same.

A holder that was stopped for longer than a lease's time may work beside its successor, which no
lease can prevent. So results must be published by an atomic call too (relabel/workers.py).
"""

import json
import math
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

from densefeed.system.errors import UserError
from densefeed.system.json_files import parse_json
from densefeed.system.object_folder import Objects

# Seconds after which a lease that is not renewed may be taken, and renewals in this time.
LEASE_SECONDS, RENEWALS = 60.0, 4
FOLDER = "leases"


class LeaseLostError(UserError):
    """Another process may have taken the lease."""


@dataclass
class Beat:
    """The content of a lease, which every renewal changes."""

    worker: str
    number: int = 0
    done: int = 0  # units of work that are done
    rate: float = 0.0  # units per second
    released: bool = False

    def to_json(self) -> bytes:
        """Encode as JSON."""
        return json.dumps(vars(self)).encode()


def name_worker() -> str:
    """Return a name that no other process has: its place, PID, and random digits."""
    return f"{name_place()}:{os.getpid()}:{uuid4().hex[:8]}"


def name_place() -> str:
    """Name where a PID is valid: the running system and, in a container, its own namespace.

    Empty where that is not known. Hosts may have equal names, as copies of one image have.
    """
    # Only Linux has these.
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def has_ended(worker: str) -> bool:
    """Whether a process of `name_worker` ran here and ended: killed, it released nothing."""
    place, _, number = worker.rpartition(":")[0].rpartition(":")
    if not place or place != name_place() or not number.isdecimal():
        return False
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return False


@dataclass(eq=False)
class Lease:
    """A lease that this process holds, of the piece of work `name`."""

    objects: Objects
    name: str
    generation: int
    seconds: float
    beat: Beat
    _lost: bool = False
    _renewing: threading.Lock = field(default_factory=threading.Lock)
    _renewed: float = field(default_factory=lambda: time.monotonic())

    @property
    def key(self) -> str:
        """The file of the lease."""
        return lease_key(self.name, self.generation)

    def report(self, done: int, rate: float) -> None:
        """Set what the next renewal shows; LeaseLostError if the lease is lost."""
        # After a long stop another process may have taken it; if none has, it is still held.
        if time.monotonic() - self._renewed > self.seconds:
            self.renew()
        if self._lost:
            raise LeaseLostError(f"{self.objects.root}: the lease of {self.name} was lost")
        self.beat.done, self.beat.rate = done, rate

    def renew(self) -> None:
        """Write the next beat, unless the lease is lost."""
        with self._renewing:
            began, before = time.monotonic(), self.objects.read(self.key)
            after = self.objects.read(lease_key(self.name, self.generation + 1))
            self._lost = self._lost or before is None or after is not None
            if not self._lost:
                self.beat.number += 1
                self.objects.replace(self.key, self.beat.to_json())
                self._renewed = began

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Renew the lease on a thread; then release it, so that another process need not wait."""
        end = threading.Event()

        def renew_until_end() -> None:
            while not end.wait(self.seconds / RENEWALS):
                # `report` renews it, or raises, if no renewal succeeds in time.
                with suppress(OSError, UserError):
                    self.renew()

        thread = threading.Thread(target=renew_until_end, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()
            self.beat = replace(self.beat, released=True)
            with suppress(OSError, UserError):
                self.renew()

    def remove(self) -> None:
        """Remove the files of all generations of finished work, the newest first."""
        for generation in range(self.generation, 0, -1):
            self.objects.remove(lease_key(self.name, generation))


class Leases:
    """The leases of a folder, as one process sees them."""

    def __init__(self, objects: Objects, seconds: float = LEASE_SECONDS) -> None:
        self._objects, self._seconds, self._worker = objects, seconds, name_worker()
        # Content and time of the first look at it, by the file of the lease.
        self._seen: dict[str, tuple[bytes, float]] = {}

    def claim(self, name: str) -> Lease | None:
        """Claim a piece of work; None if another process holds it.

        Whoever gets it must look again whether the work was finished in the meantime: the leases of
        finished work are removed.
        """
        # The last generation of the lease, 0 if there is none, and its content.
        generation, content = 0, None
        while (found := self._objects.read(lease_key(name, generation + 1))) is not None:
            generation, content = generation + 1, found
        if content is not None and not self._is_free(lease_key(name, generation), content):
            return None
        lease = Lease(self._objects, name, generation + 1, self._seconds, Beat(self._worker))
        return lease if self._objects.create(lease.key, lease.beat.to_json()) else None

    def _is_free(self, key: str, content: bytes) -> bool:
        """Whether a lease was released, its holder ended, or it has not changed for its time."""
        beat, now = read_beat(content), time.monotonic()
        if beat and (beat.released or has_ended(beat.worker)):
            return True
        before, since = self._seen.get(key, (None, now))
        self._seen[key] = content, since if content == before else now
        return content == before and now - since >= self._seconds


def lease_key(name: str, generation: int) -> str:
    """Return the file of a generation of a lease."""
    return f"{FOLDER}/{name}.{generation}"


def read_beat(content: bytes) -> Beat | None:
    """Decode the content of a lease; None if it is damaged."""
    try:
        beat = Beat(**parse_json(content))
    except (TypeError, ValueError):
        return None
    kinds = {"worker": str, "number": int, "done": int, "rate": float | int, "released": bool}
    sound = all(isinstance(getattr(beat, name), kind) for name, kind in kinds.items())
    # A comparison with NaN is false.
    return beat if sound and beat.done >= 0 and 0 <= beat.rate < math.inf else None


def list_holders(objects: Objects, names: Iterable[str]) -> list[Beat]:
    """Return the latest beats of those pieces of work `names` that are held, for a display.

    Their age is that of the files by the clock of this machine: with clocks that differ by more
    than a lease's time the list is wrong. Nothing else depends on it.
    """
    now, wanted, holders = time.time(), set(names), {}
    for file, changed in objects.list(FOLDER).items():
        name, _, generation = file.rpartition(".")
        if name in wanted and generation.isdecimal() and now - changed < LEASE_SECONDS:
            beat = read_beat(objects.read(f"{FOLDER}/{file}") or b"")
            if beat and not beat.released:
                holders.setdefault(name, {})[int(generation)] = beat
    # Only the last generation of a piece of work counts.
    last = [generations[max(generations)] for generations in holders.values()]
    return [beat for beat in last if not has_ended(beat.worker)]
