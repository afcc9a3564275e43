"""What a check of a store returns."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from densefeed.storage.score_maps import ScoreMapStore

Verdict = Literal["fault", "warning", "unchecked", "sound"]
VERDICTS = {"fault": "Fault", "warning": "Warning", "unchecked": "Not checked", "sound": "Sound"}
# What a check returns: verdict, evidence and, for faults and warnings, a remedy.
Outcome = tuple[str, ...]
# Rows listed in the evidence of a check.
MAX_NAMED = 5


class Check(NamedTuple):
    """One check of a store and its outcome."""

    name: str
    verdict: Verdict
    evidence: str  # with numbers
    remedy: str = ""  # one sentence, for faults and warnings


def name_rows(store: ScoreMapStore, rows: Iterable[int]) -> str:
    """List rows with their paths."""
    return ", ".join(f"row {row} ({store.image_path(row)})" for row in rows)
