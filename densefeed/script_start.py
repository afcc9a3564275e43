"""Begins a command that was started as a file of a checkout: `python tools/pack_dataset.py`.

It is imported by such files alone, from their own folder, which `tools/script_start.py` links to,
because this Python may lack the package `densefeed`. That package names others that are missing.
"""

import sys

try:
    # Ctrl-C ends the process with a line from here on.
    import densefeed  # noqa: F401
except ModuleNotFoundError as error:
    sys.stderr.write(
        f"error: {sys.executable} lacks the package {error.name}; activate the environment that "
        "`make test` makes (source .venv/bin/activate), or install the package (pip install .)\n"
    )
    sys.exit(2)
