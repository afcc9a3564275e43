"""An ordered map over threads, used to decode images in every stage.

The decoders release the GIL, so threads scale.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(
    work: Callable[[Item], Result], items: Iterable[Item], pool: Executor, ahead: int
) -> Iterator[Result]:
    """Yield `work(item)` in the order of `items`, with at most `ahead` of them in flight.

    Results that wait for the consumer count as in flight. An exception of `work` is raised at its
    item's position. If the consumer stops early, work that has not started is cancelled.
    """
    items = iter(items)
    waiting = deque(pool.submit(work, item) for item in islice(items, ahead))
    try:
        while waiting:
            yield waiting.popleft().result()
            # One item more is begun for each that the consumer took.
            waiting.extend(pool.submit(work, item) for item in islice(items, 1))
    finally:
        for future in waiting:
            future.cancel()
