"""`--loader ffcv --data s3://...`: .beton files in object storage, read through a local copy.

The plan knows which samples the next batches need, on every rank. So exactly those are fetched,
LOOKAHEAD samples before their batch, ranges that are close joined into one request; and where the
copy may not hold all samples, those with the farthest next use are freed.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.loader import AHEAD, Encoded
from densefeed.pipelines.plan import EpochPlan
from densefeed.storage.beton import Beton
from densefeed.storage.image_shards import check_complete, list_names
from densefeed.storage.object_cache import CachedFiles, NextUse, SampleCache
from densefeed.storage.score_maps import ScoreMaps
from densefeed.system.errors import UserError
from densefeed.system.object_ranges import find_remote_files, read_range, read_ranges
from densefeed.system.object_url import ObjectURL

# Threads that fetch, with ten requests each. At 20 ms a request of one sample they give up to 5,000
# samples a second.
THREADS = 16
# Samples of a rank that are requested before the loader needs them: 0.5 s at 4,000 per second.
LOOKAHEAD = 2048
# Ranges that a thread fetches at once.
FETCHED = 20
# Batches that are requested at most when one is begun, until there are LOOKAHEAD samples.
RAMP = 3
# Batches of the loader that may still be read: those it decodes, the one it fetches, and a spare.
IN_FLIGHT = AHEAD + 2
# Samples that are compared with their checksums by one call.
VERIFIED = 16
# Seconds until other processes that leave no room in the copy are given up on.
PATIENCE = 60.0


class _Held(NamedTuple):
    """The samples of a batch that are pinned."""

    ids: np.ndarray  # each once
    jobs: dict[int, Future]  # those of them that are being fetched or verified


class RemoteSource(FfcvSource):
    """Samples of .beton files in object storage.

    Args:
        url: an object, or a pattern such as `s3://bucket/train-*.beton`.
        maps: as for FfcvSource.
        cache: folder of local copies, which processes and runs share.

    The unit is a sample: its image with its score map. Raises UserError as FfcvSource, and for
    storage that cannot be read.
    """

    remedy = "upload the file again, or pack it again"

    def __init__(self, url: ObjectURL, maps: str | Path | None, cache: Path) -> None:
        self._folder = cache
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="storage")
        # Batches of this epoch that are requested, and those that were begun.
        self._requested, self._begun = deque[_Held](), deque[_Held]()
        self._next, self._jobs = None, {}
        self._turn, self._opened = threading.Lock(), ExitStack()
        try:
            super().__init__(url, maps)
        except BaseException:
            self._opened.close()
            raise

    def _open(self, path: ObjectURL) -> Beton:
        files = find_remote_files(path)
        # A pattern.
        if files[0].url != path:
            names = [file.url.name for file in files]
            check_complete(path.parent, names, list_names(path.parent)[0])
        self._copy = CachedFiles(files, self._folder, read_range)
        self._opened.callback(self._copy.close)
        beton = Beton(self._copy.paths, [file.url for file in self._copy.files])
        self._cache = SampleCache(self._copy, beton.extents(), read_ranges)
        self._opened.callback(self._cache.close)
        return beton

    @property
    def beton(self) -> None:
        """None: the local copy holds zeros in place of samples that were not fetched."""

    @property
    def fetched(self) -> int:
        """Bytes that this process fetched."""
        return self._copy.fetched + self._cache.fetched

    def check_room(self, plan: EpochPlan) -> None:
        """Raise UserError unless the local copy holds the batches in flight."""
        self._count_ahead(plan, plan.batch // plan.ranks)

    def follow(self, plan: EpochPlan, epoch: int, step: int, index: np.ndarray) -> None:
        """Request the samples of the next batches; `step` of `epoch` is begun after this call.

        `index` is the samples of all batches of this rank in the epoch, `[batches, local batch]`.
        """
        ahead = self._count_ahead(plan, index.shape[1])
        with self._turn:
            if self._next != (epoch, step):
                self._restart(plan, epoch, step)
            # All at once, the first requests would take the processor from the first steps.
            until = min(len(index), self._planned + RAMP)
            while len(self._requested) <= ahead and self._planned < until:
                ids = np.unique(index[self._planned])
                self._requested.append(self._request(ids, self._next_use(plan, self._planned)))
                self._planned += 1
            self._begun.append(self._requested.popleft())
            while len(self._begun) > IN_FLIGHT:
                self._release(self._begun.popleft())
            self._next = epoch, step + 1

    def _restart(self, plan: EpochPlan, epoch: int, step: int) -> None:
        """Begin at a step of an epoch; drop what was requested for other steps."""
        while self._requested:
            self._release(self._requested.popleft())
        self._planned = step
        # The places of all samples in this epoch and the next: every sample occurs in both.
        self._places = None
        if self._cache.is_bounded:
            self._places = [np.argsort(plan.permutation(e)) for e in (epoch, epoch + 1)]

    def _count_ahead(self, plan: EpochPlan, batch: int) -> int:
        """Return how many batches are requested before the one that is begun."""
        ahead = max(1, LOOKAHEAD // batch)
        if not self._cache.is_bounded:
            return ahead
        # Ranks wait for each other in every step, so the batches in flight of all must fit.
        fit = self._cache.capacity // max(1, self._cache.room(plan.batch)) - IN_FLIGHT
        if fit < 1:
            least = (IN_FLIGHT + 1) * self._cache.room(plan.batch)
            least = min(least, self._cache.room(plan.num_samples))
            raise UserError(
                f"{self._folder} has room for {self._cache.capacity:,} bytes of samples, less than "
                f"the batches in flight take; free at least {least:,} bytes, name another folder "
                "with --cache, or give a smaller --batch"
            )
        return min(ahead, fit)

    def _next_use(self, plan: EpochPlan, step: int) -> NextUse:
        """Return the function of samples that returns their next use after a batch, int64."""
        # All ranks are in this batch, or nearly: what they need sooner they have pinned.
        done = (step + 1) * plan.batch // plan.repeats

        def next_use(ids: np.ndarray) -> np.ndarray:
            now, then = (places[ids] for places in self._places)
            return np.where(now >= done, now, plan.num_samples + then)

        return next_use

    def _request(self, ids: np.ndarray, next_use: NextUse) -> _Held:
        """Pin samples and start to fetch those that are not here."""
        if self._cache.is_bounded and (least := self._cache.room(len(ids))) > self._cache.capacity:
            raise UserError(
                f"{self._folder} has room for {self._cache.capacity:,} bytes of samples, less than "
                f"{len(ids):,} images take that are read at once; free several times {least:,} "
                "bytes, or name another folder with --cache"
            )
        until = time.monotonic() + PATIENCE
        while (found := self._cache.hold(ids, next_use)) is None:
            # Other ranks that are ahead, or other runs.
            if time.monotonic() > until:
                raise UserError(
                    f"{self._folder}: other runs leave no room in the local copy; free disk space, "
                    "or name another folder with --cache"
                )
            time.sleep(0.01)
        missing, suspects = ([i for i in part.tolist() if i not in self._jobs] for part in found)
        runs = self._cache.join(np.array(missing, np.int64))
        # What is needed soon is fetched at once.
        size = FETCHED if len(self._requested) > RAMP else 1
        for at in range(0, len(runs), size):
            part = runs[at : at + size]
            self._start(self._cache.fetch, part, np.concatenate(part))
        for at in range(0, len(suspects), VERIFIED):
            part = np.array(suspects[at : at + VERIFIED])
            self._start(self._cache.verify, part, part)
        return _Held(ids, {i: self._jobs[i] for i in ids.tolist() if i in self._jobs})

    def _start(self, work: Callable[[Any], None], on: Any, ids: np.ndarray) -> None:
        """Start a job, which samples `ids` wait for."""
        self._jobs |= dict.fromkeys(ids.tolist(), self._threads.submit(work, on))

    def _release(self, held: _Held) -> None:
        """Unpin the samples of a batch, once none of them is being fetched."""
        for job in set(held.jobs.values()):
            # Its samples may be those of another batch too, so it is not cancelled.
            with suppress(Exception):
                job.result()
        for index in held.jobs:
            self._jobs.pop(index, None)
        self._cache.release(held.ids)

    def begin(self, ids: np.ndarray) -> Encoded:
        encoded = super().begin(ids)
        encoded.tasks, encoded.shared = list(set(self._begun[-1].jobs.values())), True
        return encoded

    def image(self, index: int) -> Image.Image:
        with self._fetched(np.array([index])):
            return super().image(index)

    def check_map(self, index: int) -> None:
        with self._fetched(np.array([index])):
            super().check_map(index)

    def maps(self, ids: np.ndarray) -> ScoreMaps:
        with self._fetched(np.unique(ids)):
            return super().maps(ids)

    @contextmanager
    def _fetched(self, ids: np.ndarray) -> Iterator[None]:
        """Hold samples, each once, that are here then."""
        with self._turn:
            held = self._request(ids, np.zeros_like)
        try:
            for job in set(held.jobs.values()):
                job.result()
            yield
        finally:
            with self._turn:
                self._release(held)

    def read_ahead(self, first: int, end: int) -> None:
        """Do nothing: `follow` requests what is needed."""

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        super().close()
        self._opened.close()
