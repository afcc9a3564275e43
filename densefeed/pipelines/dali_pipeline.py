"""DALI's pipeline: JPEGs and boxes in, pixels out, and what a forked process may do with it."""

import ctypes
import weakref
from typing import TYPE_CHECKING

import numpy as np

from densefeed import native
from densefeed.pipelines.shapes import Shape

if TYPE_CHECKING:
    from nvidia.dali import Pipeline

# Runs in flight inside DALI, so that it does not wait for Python between them.
INSIDE = 2
# Pipelines of this process.
_built: weakref.WeakSet["Pipeline"] = weakref.WeakSet()
_forked = False


def was_forked() -> bool:
    """Whether this process was forked from one that had built pipelines."""
    return _forked


def forget() -> None:
    """Leak all pipelines in a forked child, and refuse further use of DALI there.

    The child lacks DALI's threads; destroying a pipeline would wait for them forever, or crash.
    """
    global _forked
    _forked = bool(_built)
    for pipeline in _built:
        # An extra reference that is never released, so that its destructor never runs.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pipeline._pipe))
        pipeline._pipe = None


def build(run: int, threads: int, device: int | None, regions: bool, resize: bool) -> "Pipeline":
    """Build DALI's pipeline for up to `run` samples: JPEGs and boxes in, pixels out.

    Args:
        threads: DALI's CPU threads.
        device: number of the GPU; None for a CPU pipeline.
        regions: decode only the box of each JPEG; otherwise decode all of it and cut the box out,
            with the same pixels.
        resize: return uint8 `[N, H, W, 3]`; otherwise the pixels of each box as they are,
            uint8 `[height, width, 3]`.
    """
    from nvidia.dali import Pipeline, fn, types

    # With a longer queue DALI would require several runs before it starts the first. A queue of one
    # accepts more than one run all the same.
    pipeline = Pipeline(
        batch_size=run,
        num_threads=threads,
        device_id=device,
        prefetch_queue_depth=1,
        exec_dynamic=True,
    )
    with pipeline:
        # no_copy: DALI reads the bytes in place, so a Run keeps them alive.
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1, no_copy=True)

        def pair(name: str, dtype: object) -> object:
            return fn.external_source(name=name, dtype=dtype, ndim=1)

        def number(name: str) -> object:
            return fn.external_source(name=name, dtype=types.INT32, ndim=0)

        anchor, shape = pair("anchor", types.INT32), pair("shape", types.INT32)
        # The teacher of the maps and the other loaders ignore EXIF orientation too.
        options = {"adjust_orientation": False}
        if device is not None:
            # Fancy upsampling interpolates chroma as libjpeg does.
            options |= {"device": "mixed", "jpeg_fancy_upsampling": True}
        # By default DALI expects (x, y), which would swap the axes of our boxes.
        if regions:
            image = fn.decoders.image_slice(encoded, anchor, shape, axis_names="HW", **options)
        else:
            image = fn.slice(fn.decoders.image(encoded, **options), anchor, shape, axis_names="HW")
        if resize:
            image = fn.resize(
                image,
                size=pair("size", types.FLOAT),
                roi_start=pair("start", types.FLOAT),
                roi_end=pair("end", types.FLOAT),
                # DALI refuses integers in place of its own type.
                interp_type=fn.reinterpret(number("filter"), dtype=types.INTERP_TYPE),
                antialias=True,
            )
        pipeline.set_outputs(image)
    pipeline.build()
    _built.add(pipeline)
    return pipeline


def cover_boxes(box_tlhw_N4: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round boxes outward to the pixels they touch, by the native decoder's rule.

    Return the first row and column, and those behind the last, `[N, 2]` each.
    """
    # 1e-9: a box that rounding ends just behind a pixel does not touch the next (resample.c).
    return np.floor(box_tlhw_N4[:, :2]), np.ceil(box_tlhw_N4[:, :2] + box_tlhw_N4[:, 2:] - 1e-9)


def feed(
    pipeline: "Pipeline",
    jpegs: list[np.ndarray],
    box_tlhw_N4: np.ndarray,
    flip_N: np.ndarray,
    size: int | Shape | None,
    filter_N: np.ndarray | None = None,
) -> None:
    """Start a run. `jpegs` must live until the run is finished.

    Args:
        jpegs: N arrays, uint8 of any lengths.
        box_tlhw_N4: crops (top, left, height, width) in pixels of these JPEGs, float64.
        flip_N: whether a crop is mirrored left-right, bool.
        size: side of the output, or height and width, pixels; None if the pipeline neither resizes
            nor mirrors.
        filter_N: native.BILINEAR or native.BICUBIC for each crop; None: all bilinear.
    """
    low, high = cover_boxes(box_tlhw_N4)
    inputs = {
        "encoded": jpegs,
        "anchor": low.astype(np.int32),
        "shape": (high - low).astype(np.int32),
    }
    if size is not None:
        start = (box_tlhw_N4[:, :2] - low).astype(np.float32)
        end = start + box_tlhw_N4[:, 2:].astype(np.float32)
        # A region of interest from right to left mirrors the image without a further pass.
        start[flip_N, 1], end[flip_N, 1] = end[flip_N, 1], start[flip_N, 1]
        inputs |= {"start": start, "end": end, "size": np.full((len(jpegs), 2), size, np.float32)}
        inputs["filter"] = dali_filters(np.zeros(len(jpegs)) if filter_N is None else filter_N)
    for name, value in inputs.items():
        pipeline.feed_input(name, value)
    pipeline.schedule_run()


def dali_filters(filter_N: np.ndarray) -> np.ndarray:
    """Translate native.BILINEAR and BICUBIC to DALI's numbers of the same filters: int32 `[N]`."""
    from nvidia.dali import types

    # Both are Pillow's. DALI deprecates the other name of the first, triangular.
    cubic, linear = int(types.INTERP_CUBIC), int(types.INTERP_LINEAR)
    return np.where(filter_N == native.BICUBIC, cubic, linear).astype(np.int32)
