"""For `python tools/X.py` in a checkout that is not installed: `densefeed` is the folder above. Not shipped in the wheel."""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parent.parent)]
