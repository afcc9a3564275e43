"""Whether a GPU's JPEG decoder in DALI can decode regions, tried in a child process."""

import functools
import io
import os
import subprocess
import sys

import numpy as np
import torch
from PIL import Image

from densefeed.pipelines.dali_pipeline import INSIDE, build, feed
from densefeed.storage import indexed_jpeg

# Importing PyTorch and DALI from a network disk takes most of it.
PROBE_SECONDS = 120
# The last line that a probe prints if regions were decoded.
PROBE_RESULT = "regions decoded"


def try_regions(device: int) -> None:
    """Decode boxes of JPEGs on a GPU and compare the pixels with a CPU's.

    Raises an exception if they differ by more than 4 gray levels; it may also kill the process.
    """
    jpegs, boxes = make_probe_jpegs(64)
    flips, shown = np.arange(len(jpegs)) % 3 == 0, []
    for where in (None, device):
        pipeline = build(len(jpegs), 2, where, regions=True, resize=True)
        # As many runs in flight as a loader has.
        for _ in range(INSIDE):
            feed(pipeline, jpegs, boxes, flips, 96)
        runs = [pipeline.outputs()[0].as_tensor() for _ in range(INSIDE)]
        shown.append(torch.stack([torch.from_dlpack(run).float().cpu() for run in runs]))
    difference = (shown[0] - shown[1]).abs().mean((2, 3, 4)).max().item()
    if difference > 4:
        raise RuntimeError(f"its pixels differ from the CPU's by {difference:.1f} gray levels")


def make_probe_jpegs(count: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Make JPEGs of the kinds that a loader feeds, and a box in each, `[count, 4]` float64.

    They are 4:4:4, 4:2:0, gray, and 4:2:0 with the restart markers of a segment index.
    """
    rng, jpegs, boxes = np.random.default_rng(0), [], []
    for number in range(count):
        extent, out = rng.integers(40, 600, 2), io.BytesIO()
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        image, kind = coarse.resize(extent[::-1].tolist()), number % 4
        image = image.convert("L") if kind == 2 else image
        image.save(out, "JPEG", subsampling=0 if kind in (0, 2) else 2)
        jpeg = indexed_jpeg.transcode(out.getvalue()) if kind == 3 else out.getvalue()
        jpegs.append(np.frombuffer(jpeg, np.uint8))
        side = rng.integers(8, extent)
        boxes.append((*rng.integers(extent - side), *side))
    return jpegs, np.array(boxes, float)


def explain_failure(command: list[str], seconds: float) -> str:
    """Run a command in a child process; return why it failed, or an empty string.

    It succeeds if it ends with exit code 0 within `seconds` and PROBE_RESULT is the last line of
    its standard output: a child that ran something else has proven nothing.
    """
    # The child imports our modules from where this process found them, installed or not.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command,
            env=environment,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return f"did not finish within {seconds:g} s"
    if done.returncode < 0:
        return f"was killed by signal {-done.returncode}"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return f"failed ({lines[-1].strip()})"
    return "" if done.stdout.strip().endswith(PROBE_RESULT) else "ended without a result"


@functools.cache
def probe_regions(device: int) -> str:
    """Test whether this GPU's decoder supports regions: why not, or an empty string.

    Runs in a child process: nvImageCodec 0.9, part of DALI 2.3 and 2.4, was reported to end the
    process with SIGSEGV on H100 and B200, and to refuse regions on A100 (NVIDIA/nvImageCodec,
    issue 55).
    """
    return explain_failure(probe_command(device), PROBE_SECONDS)


def probe_command(device: int) -> list[str]:
    """Return the command of the child process that decodes regions on this GPU."""
    code = f"from {__name__} import try_regions; try_regions({device}); print({PROBE_RESULT!r})"
    return [sys.executable, "-c", code]
