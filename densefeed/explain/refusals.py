"""Kinds of map that a model refuses, and the reasons."""

from collections.abc import Callable
from typing import TypeVar

from densefeed.system.errors import UserError

Computed = TypeVar("Computed")


class Refusals(dict[str, str]):
    """The reason of each kind of map that a model refuses, as far as it was tried."""

    def attempt(
        self, kind: str, compute: Callable[..., Computed], *arguments: object
    ) -> Computed | None:
        """Return what `compute` returns, or None if the model refuses it, now or before."""
        if kind in self:
            return None
        try:
            return compute(*arguments)
        except UserError as error:
            self[kind] = str(error)
            return None


def group_refusals(refused: dict[str, str]) -> list[tuple[str, str]]:
    """Return each reason once, after the kinds that it is the reason for."""
    kinds = {}
    for kind, reason in refused.items():
        kinds.setdefault(reason, []).append(kind)
    return [(", ".join(names), reason) for reason, names in kinds.items()]
