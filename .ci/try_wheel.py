"""Try an installed wheel, not the checkout: its library, a JPEG, and the quickstart made small.

    python .ci/try_wheel.py

It needs the extra `demo` and a folder that it may write to, and takes about a minute.
"""

import ctypes
import io
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from densefeed import native

SMALL = ["--train", "64", "--val", "32", "--epochs", "1", "--students", "token-label"]


def check_library() -> None:
    """Raise SystemExit unless libjpeg-turbo is inside the library, and its functions are private.

    Another libjpeg in the process, e.g. Pillow's, would replace functions that are exported.
    """
    package = native.LIBRARY.parents[1]
    if (package.parent / "setup.py").exists():
        sys.exit(f"error: {package} is a checkout; install the wheel and start this elsewhere")
    if b"libjpeg-turbo version 3." not in native.LIBRARY.read_bytes():
        sys.exit(f"error: {native.LIBRARY} does not contain libjpeg-turbo 3")
    library = ctypes.CDLL(str(native.LIBRARY))
    exported = sys.platform == "linux" and hasattr(library, "jpeg_std_error")
    # Where delocate and auditwheel put libraries that they add.
    folders = package / ".dylibs", package.parent / "densefeed.libs"
    added = any(folder.exists() for folder in folders)
    if exported or added:
        sys.exit(f"error: {native.LIBRARY} uses a libjpeg-turbo outside of it")


def check_pixels() -> None:
    """Raise SystemExit unless a gray JPEG has the pixels that Pillow decodes."""
    image = np.random.default_rng(0).integers(0, 256, (60, 90), np.uint8)
    file = io.BytesIO()
    Image.fromarray(image).save(file, "jpeg", quality=80)
    want = np.asarray(Image.open(file))
    # Column-major, after a header of 16 bytes.
    got = np.frombuffer(native.planes(file.getvalue()), np.uint8)[16:].reshape(want.T.shape).T
    if not np.array_equal(got, want):
        sys.exit("error: a JPEG has other pixels than with Pillow")


def main() -> None:
    check_library()
    check_pixels()
    with tempfile.TemporaryDirectory() as folder:
        words = [Path(sys.executable).with_name("densefeed"), "quickstart", *SMALL]
        subprocess.run(words, cwd=folder, check=True)


if __name__ == "__main__":
    main()
