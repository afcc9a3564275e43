"""In a checkout `densefeed` is this folder; an installed `densefeed` holds the same folders inside it."""

from pathlib import Path

__path__ = [str(Path(__file__).parent)]
