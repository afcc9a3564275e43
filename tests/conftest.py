"""Small real datasets that several rooms' tests share."""

import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parent.parent
if "PYTEST_XDIST_WORKER" in os.environ:  # a worker has one core, and so have the commands it starts
    os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))


class NoHostRead(TorchDispatchMode):
    """AssertionError at operations that read values back to the host, or whose result has a size that depends on values."""

    # bool(), float(), int() and a tensor as an index all end in _local_scalar_dense; inside an operator they show as item and is_nonzero.
    READS = (
        "_local_scalar_dense", "item", "is_nonzero", "argwhere", "nonzero", "masked_select", "equal", "_unique", "_unique2", "unique_dim",
        "unique_consecutive", "unique_dim_consecutive", "bincount",
    )  # fmt: skip

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        sized = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in ("index", "index_put", "index_put_"):  # a mask as an index is a nonzero() below what is seen here
            sized = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if sized or name in self.READS:
            raise AssertionError(f"host read: {func}")
        if func.namespace == "densefeed":  # look inside our own operators, which would run with no mode on
            device = next(value for value in args if isinstance(value, torch.Tensor)).device.type
            with self:
                return func.redispatch(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.upper())), *args, **kwargs)
        return func(*args, **kwargs)


@pytest.fixture(scope="session")
def no_host_read():
    """`with no_host_read():` around what must never wait for the device, backward pass included (not compiled code)."""

    def refuse(name):
        def method(*_args, **_kwargs):
            raise AssertionError(f"host read: Tensor.{name}")

        return method

    @contextmanager
    def trap():
        with ExitStack() as stack:
            for name in ("item", "tolist", "cpu", "numpy", "__array__"):
                stack.enter_context(mock.patch.object(torch.Tensor, name, refuse(name)))
            stack.enter_context(NoHostRead())
            yield

    return trap


@pytest.fixture(scope="session")
def command():
    """Runs `python WORDS` in the checkout as a user would; output captured."""

    def run(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, *map(str, words)], cwd=cwd, capture_output=True, text=True)

    return run


def photograph(rng: np.random.Generator, height: int, width: int) -> Image.Image:
    """Smooth colour noise: compresses and resamples as a photograph does."""
    coarse = rng.integers(0, 256, (max(2, height // 8), max(2, width // 8), 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Two classes, `train/` of 11 and `val/` of 5 JPEGs of different sizes."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split, count in (("train", 11), ("val", 5)):
        for number in range(count):
            path = root / split / ("cat", "dog")[number % 2] / f"{number:03d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            photograph(rng, int(rng.integers(40, 90)), int(rng.integers(40, 90))).save(path, quality=90)
    return root


@pytest.fixture(scope="session")
def random_maps():
    """A maker of score maps of any shape, as a teacher of K classes might give them."""
    from densefeed.relabel.scoring import keep_top

    def make(count: int, side: int, top_k: int, num_classes: int, seed: int = 0, window=(0.0, 0.0, 1.0, 1.0)):
        logits = 3 * torch.randn(count, side, side, num_classes, generator=torch.Generator().manual_seed(seed))
        return keep_top(logits, top_k, np.tile(np.array(window, np.float32), (count, 1)))

    return make


@pytest.fixture(scope="session")
def maps(folder, random_maps, tmp_path_factory) -> Path:
    """A store of random maps (S=6, k=2, K=2) for `folder`'s training split, its windows not the whole image."""
    from densefeed.relabel.images import Images
    from densefeed.relabel.store import ScoreMapWriter, StoreHeader

    images = Images(folder, split="train")
    path = tmp_path_factory.mktemp("maps") / "maps.h5"
    header = StoreHeader(
        side=6, top_k=2, num_classes=2, absent="tail", teacher="random", input_size=96, geometry="centre-crop",
        fingerprint=images.fingerprint(), class_names=tuple(images.class_names),
    )  # fmt: skip
    writer = ScoreMapWriter(path, header, images.paths, images.labels)
    writer.write(np.arange(len(images)), random_maps(len(images), 6, 2, 2, window=(0.0, 0.1, 1.0, 0.9)))
    writer.finish()
    return path


@pytest.fixture
def one_thread():
    """PyTorch on one thread: sums in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def packed(folder, maps, tmp_path_factory, command) -> tuple[Path, Path]:
    """The small folder as .beton: (train with maps, val)."""
    root = tmp_path_factory.mktemp("packed")
    for split, extra in (("train", ("--maps", maps)), ("val", ())):
        done = command("tools/pack_dataset.py", "--data", folder, "--split", split, "--out", root / f"{split}.beton", *extra)
        assert done.returncode == 0, done.stderr
    return root / "train.beton", root / "val.beton"


@pytest.fixture(scope="session")
def micro(packed):
    """A maker of configs of the smallest run: `micro(out, **fields)` trains two epochs of three steps of four images."""
    from densefeed.training import recipes

    small = dict(
        loader="ffcv", batch=4, epochs=2, size=32, mixtoken=True, ema=0.9, drop_path=0.2, threads=2, eval_every=1, log_every=1,
        device="cpu",
    )  # fmt: skip

    def make(out: Path, **fields):
        return replace(recipes.lvvit_micro_token_label(), data=packed[0], val=packed[1], out=out, **(small | fields))

    return make
