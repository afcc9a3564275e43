"""An ordered map over threads: what decodes images in every stage. Decoders release the interpreter
lock, so threads scale.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(
    work: Callable[[Item], Result], items: Iterable[Item], pool: Executor, ahead: int
) -> Iterator[Result]:
    """Yield `work(item)` in the order of `items`, at most `ahead` of them unfinished or waiting.

    An exception of `work` surfaces here, at its item's place. When the consumer stops early, work
    not begun is cancelled.
    """
    items = iter(items)
    waiting: deque[Future] = deque(pool.submit(work, item) for item in islice(items, ahead))
    try:
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(pool.submit(work, item) for item in islice(items, 1))
    finally:
        for future in waiting:
            future.cancel()
