"""Fixtures shared by the tests: small real datasets, score maps, configs, commands."""

import atexit
import errno
import fcntl
import gc
import io
import json
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from PIL import Image, ImageDraw
from torch.utils._python_dispatch import TorchDispatchMode

from densefeed.system import object_store
from densefeed.system.devices import peak_rss, tag_compiled_code

from .drawn_pictures import draw_pictures
from .jpeg_files import jpegs, noise, photographs  # noqa: F401
from .object_storage import Choose, FaultProxy, S3Server, point_to
from .preloaded import Preloaded
from .stores import write_store

# A worker of pytest-xdist has one core, and so have the commands that it starts, unless
# OMP_NUM_THREADS is set, as by processors.py.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
# The same examples in every run, and none fails because the machine is slow.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")
# Some tests compile without the functions that do it first.
tag_compiled_code()
# A shell starts background processes (`&`) with SIGINT ignored, but some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


class NoHostRead(TorchDispatchMode):
    """Raise AssertionError at operations that need a sync with the host.

    These read values back, or have a result whose size depends on values.
    """

    # bool(), float(), int() and indexing with a tensor all call _local_scalar_dense; inside an
    # operator they appear as item and is_nonzero.
    READS = (
        "_local_scalar_dense",
        "item",
        "is_nonzero",
        "argwhere",
        "nonzero",
        "masked_select",
        "equal",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "unique_dim_consecutive",
        "bincount",
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        sized = name == "repeat_interleave" and kwargs.get("output_size") is None
        # Indexing with a mask calls nonzero() below this dispatch mode.
        if name in ("index", "index_put", "index_put_"):
            sized = any(
                index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
            )
        if sized or name in self.READS:
            raise AssertionError(f"host read: {func}")
        # Operators of DenseFeed would run without this mode, so redispatch them inside it.
        if func.namespace == "densefeed":
            device = next(value for value in args if isinstance(value, torch.Tensor)).device.type
            key = getattr(torch._C.DispatchKey, device.upper())
            with self:
                return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
        return func(*args, **kwargs)


@pytest.fixture(scope="session")
def no_host_read():
    """Context manager that fails on any read of device values by the host.

    Use `with no_host_read():` around code that must never wait for the device. It covers the
    backward pass, but not compiled code.
    """

    def raise_at(name):
        def method(*_args, **_kwargs):
            raise AssertionError(f"host read: Tensor.{name}")

        return method

    @contextmanager
    def trap():
        with ExitStack() as stack:
            for name in ("item", "tolist", "cpu", "numpy", "__array__"):
                stack.enter_context(mock.patch.object(torch.Tensor, name, raise_at(name)))
            stack.enter_context(NoHostRead())
            yield

    return trap


@pytest.fixture(scope="session", autouse=True)
def frozen_modules():
    """Exclude all imported modules from garbage collection, which takes 0.6 s with them.

    There is no collection before: conftest.py turns it off. pytest collects ten times at its
    end, so the modules stay excluded until the interpreter exits.
    """
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # Triton prints at exit which of its objects were not freed


@pytest.fixture(autouse=True)
def environment_of_the_test():
    """Undo changes of environment variables and of PyTorch's number of threads.

    After importing cv2 or Lightning a command that follows could otherwise not be forked (see
    preloaded.py). With two threads in each of two workers on two cores, 1,300 tests of models took
    twice the processor time (165 against 83 s).
    """
    threads, before = torch.get_num_threads(), dict(os.environ)
    yield
    torch.set_num_threads(threads)
    # Unlike mock.patch.dict() only after a change: setting all takes 0.4 ms in each of 8,000 tests.
    # pytest sets this one in every phase of a test.
    before["PYTEST_CURRENT_TEST"] = os.environ["PYTEST_CURRENT_TEST"]
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A folder that all workers of pytest-xdist share; their own are beside each other."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def command(shared):
    """`command(*WORDS)` runs `python WORDS` in the checkout like a user, and captures the output.

    See preloaded.py for the options. All workers share a server, whose imports take 5 to 8 s.
    """
    with closing(Preloaded(folder=shared)) as preloaded:
        yield preloaded


@pytest.fixture(scope="session")
def run_once(shared) -> Callable[[str, Callable[[], object]], object]:
    """`run_once(name, make)` returns the result of `make`, which one worker alone computes.

    Results are JSON. If it fails, every test that wants it fails with the same text.
    """

    def run(name: str, make: Callable[[], object]) -> object:
        path = shared / f"{name}.json"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                try:
                    found = {"result": make()}
                except Exception as error:
                    found = {"error": str(error)}
                path.write_text(json.dumps(found))
        found = json.loads(path.read_text())
        assert "error" not in found, found["error"]
        return found["result"]

    return run


@pytest.fixture(scope="session")
def s3_server():
    """An S3 server on the loopback."""
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def bucket(s3_server):
    """The URL of an empty bucket, which this process and those that it starts can use."""
    point_to(s3_server.port)
    return s3_server.make_bucket()


@pytest.fixture
def quick_retries(monkeypatch):
    """Requests to object storage are repeated as often as ever, without long pauses."""
    pauses = {"init_backoff": timedelta(milliseconds=2), "max_backoff": timedelta(milliseconds=20)}
    retries = object_store.RETRIES | {"backoff": object_store.RETRIES["backoff"] | pauses}
    monkeypatch.setattr(object_store, "RETRIES", retries)
    monkeypatch.setattr(object_store, "PAUSE_SECONDS", 0.01)


@pytest.fixture
def disturb(s3_server, quick_retries):
    """A function that puts a proxy with faults before the server of `bucket`."""
    with ExitStack() as proxies:

        def start(choose: Choose) -> FaultProxy:
            proxy = proxies.enter_context(FaultProxy(s3_server, choose))
            proxies.callback(proxy.shutdown)
            point_to(proxy.port)
            return proxy

        yield start


def photograph(rng: np.random.Generator, height: int, width: int) -> Image.Image:
    """Make smooth color noise that compresses and resamples like a photograph."""
    coarse = rng.integers(0, 256, (max(2, height // 8), max(2, width // 8), 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Image folder of two classes: 11 JPEGs in `train/` and 5 in `val/`, of different sizes."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split, count in (("train", 11), ("val", 5)):
        for number in range(count):
            path = root / split / ("cat", "dog")[number % 2] / f"{number:03d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            photograph(rng, int(rng.integers(40, 90)), int(rng.integers(40, 90))).save(
                path, quality=90
            )
    return root


@pytest.fixture(scope="session")
def random_maps():
    """Factory of random score maps of any shape, in the form of a teacher's."""
    from densefeed.relabel.scoring import keep, to_maps

    def make(
        count: int, side: int, top_k: int, num_classes: int, seed: int = 0, window=(0, 0, 1, 1)
    ):
        rng = torch.Generator().manual_seed(seed)
        logits = 3 * torch.randn(count, side, side, num_classes, generator=rng)
        return to_maps(keep(logits, top_k), np.tile(np.array(window, np.float32), (count, 1)))

    return make


@pytest.fixture(scope="session")
def maps(folder, random_maps, tmp_path_factory) -> Path:
    """Store of random maps (S=6, k=2, K=2) for the training split of `folder`.

    Its Windows do not cover the whole images.
    """
    from densefeed.storage.images import Images

    images = Images(folder, split="train")
    path = tmp_path_factory.mktemp("maps") / "maps.h5"
    scores = random_maps(len(images), 6, 2, 2, window=(0.0, 0.1, 1.0, 0.9))
    return write_store(path, images, scores, 2, geometry="center-crop")


@pytest.fixture(scope="module")
def one_thread():
    """Run PyTorch on one thread to the end of the module, so that sums have a fixed order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def three_runs(monkeypatch):
    """Let `densefeed validate` time a model by three runs and not for a second."""
    monkeypatch.setattr("densefeed.tools.validate.MODEL_SECONDS", 0.0)


@pytest.fixture(scope="session")
def packed(folder, maps, tmp_path_factory) -> tuple[Path, Path]:
    """The small folder as .beton files: (train with maps, val)."""
    from densefeed.tools.pack_dataset import Packing, main

    root = tmp_path_factory.mktemp("packed")
    for split in ("train", "val"):
        options = Packing(
            data=folder,
            split=split,
            out=root / f"{split}.beton",
            maps=maps if split == "train" else None,
        )
        main(options)
    return root / "train.beton", root / "val.beton"


@pytest.fixture(scope="session")
def masked(random_maps, tmp_path_factory) -> tuple[Path, Path]:
    """A folder of images with masks of 4 classes in ADE20K's layout, and maps of its training set.

    It has 13 training images and 5 for validation, whose squares are of the color of their class.
    One of each has no mask.
    """
    from densefeed.storage.images import Images

    root, rng = tmp_path_factory.mktemp("masked"), np.random.default_rng(3)
    (root / "classes.txt").write_text("ground\nred\ngreen\nblue\n")
    for split, count in (("training", 13), ("validation", 5)):
        for kind in ("images", "annotations"):
            (root / kind / split).mkdir(parents=True)
        for n in range(count):
            mask = np.kron(rng.integers(0, 5, (3, 4)), np.ones((14, 14), int)).astype(np.uint8)
            pixels = rng.integers(0, 40, (*mask.shape, 3)) + 200 * np.eye(5)[mask][..., 2:]
            name = f"{split}/{n}"
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(root / f"images/{name}.jpg")
            if n:
                Image.fromarray(mask).save(root / f"annotations/{name}.png")
    images = Images(root, "masks", "train")
    path, scores = root / "maps.h5", random_maps(len(images), 6, 2, 4)
    return root, write_store(path, images, scores, 4)


@pytest.fixture(scope="session")
def segments(masked):
    """Factory of configs of the smallest run with masks: two epochs of four steps."""
    from densefeed.recipes import RECIPES
    from densefeed.system.options import with_options

    backbone = "backbone='lvvit_micro'", "depth=2", "stem=((7,2),(3,2),(4,2))", "stem_width=8"
    small = dict(
        model_kwargs=(*backbone, "embed_dim=24", "num_heads=2", "decoder_width=8", "auxiliary=8"),
        batch=4,
        epochs=2,
        size=32,
        sizes=(),
        ema=0.9,
        drop_path=0.2,
        threads=2,
        eval_every=1,
        log_every=1,
        device="cpu",
    )

    def make(out: Path, **fields):
        soft = fields.get("objective") == "segment-soft"
        paths = dict(data=masked[0], val=masked[0], out=out)
        paths |= dict(score_maps=masked[1]) if soft else {}
        return with_options(RECIPES["segment_photos"](), **paths, **(small | fields))

    return make


@pytest.fixture(scope="session")
def drawn_scenes(shared, run_once) -> Path:
    """200 photo scenes of drawn cut-outs in 3 classes for validation, and 3 for training."""
    from densefeed.tools import make_photo_scenes

    root = shared / "drawn"

    def make() -> None:
        draw_pictures(root)
        folders = dict(cutouts=root / "cutouts", backgrounds=root / "backgrounds")
        numbers = dict(train=3, val=200, held_out=0, width=128, height=96, threads=1)
        make_photo_scenes.main(
            make_photo_scenes.PhotoScenes(out=root / "scenes", **folders, **numbers)
        )

    run_once("drawn", make)
    return root / "scenes"


@pytest.fixture(scope="session")
def coco(tmp_path_factory) -> Path:
    """A folder in COCO's layout: 9 training images and 4 for validation, objects of 3 classes.

    An object is a rectangle or a triangle of the color of its class. The third image of each has
    none, the first a crowd region, and the second an object that hides most of another.
    """
    root, rng = tmp_path_factory.mktemp("coco"), np.random.default_rng(5)
    (root / "annotations").mkdir()
    names = {9: "red", 2: "green", 5: "blue"}
    for split, count in (("train2017", 9), ("val2017", 4)):
        (root / split).mkdir()
        images, annotations = [], []
        for n in range(count):
            H, W = 48, 64 - 8 * (n % 2)
            pixels = rng.integers(0, 40, (H, W, 3)).astype(np.uint8)
            image = Image.fromarray(pixels)
            for _ in range(0 if n == 2 else 3):
                left, top = rng.integers(0, 24, 2).tolist()
                width, height = rng.integers(12, 24, 2).tolist()
                points = [left, top, left + width, top, left + width, top + height]
                points += [left, top + height] * int(rng.integers(2))
                key = (9, 2, 5)[int(rng.integers(3))]
                channel = (9, 2, 5).index(key)
                ImageDraw.Draw(image).polygon(points, tuple(np.eye(3, dtype=int)[channel] * 220))
                annotations.append(
                    {"image_id": 100 - n, "category_id": key, "segmentation": [points]}
                    | {"bbox": [left, top, width, height], "area": width * height, "iscrowd": 0}
                )
            if n == 0:
                runs = {"size": [H, W], "counts": [H * 40, H * 10, H * (W - 50)]}
                annotations.append(
                    {"image_id": 100, "category_id": 9, "segmentation": runs, "iscrowd": 1}
                    | {"bbox": [40, 0, 10, H], "area": H * 10}
                )
            image.save(root / split / f"{n}.png")
            images.append({"id": 100 - n, "file_name": f"{n}.png", "height": H, "width": W})
        content = {
            "images": images,
            "annotations": [one | {"id": n} for n, one in enumerate(annotations, start=1)],
            "categories": [{"id": key, "name": name} for key, name in names.items()],
        }
        path = root / "annotations" / f"instances_{split}.json"
        path.write_text(json.dumps(content))
    return root


@pytest.fixture(scope="session")
def detects(coco):
    """Factory of configs of the smallest run with objects: two epochs of four steps."""
    from densefeed.recipes import RECIPES
    from densefeed.system.options import with_options

    backbone = "backbone='lvvit_micro'", "depth=2", "stem=((7,2),(3,2),(4,2))", "stem_width=8"
    small = dict(
        model_kwargs=(*backbone, "embed_dim=24", "num_heads=2", "decoder_width=8", "samples=16"),
        dataset=f"coco/{coco}/annotations/instances_train2017.json",
        batch=4,
        epochs=2,
        size=32,
        sizes=(),
        ema=0.9,
        drop_path=0.2,
        threads=2,
        eval_every=1,
        log_every=1,
        device="cpu",
    )

    def make(out: Path, **fields):
        paths = dict(data=coco, val=coco / "annotations/instances_val2017.json", out=out)
        return with_options(RECIPES["detect_photos"](), **paths, **(small | fields))

    return make


@pytest.fixture(scope="session")
def micro(packed):
    """Factory of configs of the smallest run.

    `micro(out, **fields)` trains two epochs of three steps of four images.
    """
    from densefeed.recipes import RECIPES
    from densefeed.system.options import with_options

    small = dict(
        loader="ffcv",
        batch=4,
        epochs=2,
        size=32,
        mixtoken=True,
        ema=0.9,
        drop_path=0.2,
        threads=2,
        eval_every=1,
        log_every=1,
        device="cpu",
    )

    def make(out: Path, **fields):
        paths = dict(data=packed[0], val=packed[1], out=out)
        return with_options(RECIPES["lvvit_micro_token_label"](), **paths, **(small | fields))

    return make


class CellNet(torch.nn.Module):
    """Score every cell of 8 x 8 pixels, with a receptive field of 44."""

    def __init__(self, width: int, classes: int = 10) -> None:
        super().__init__()
        conv = torch.nn.Conv2d
        self.layers = torch.nn.Sequential(
            conv(3, width, 4, 4),
            torch.nn.GELU(),
            conv(width, 2 * width, 3, 1, 1),
            torch.nn.GELU(),
            conv(2 * width, 4 * width, 3, 2, 1),
            torch.nn.GELU(),
            conv(4 * width, 4 * width, 3, 1, 1),
            torch.nn.GELU(),
            conv(4 * width, classes, 1),
        )

    def forward_token_logits(self, image_NCHW: torch.Tensor) -> torch.Tensor:
        return self.layers(image_NCHW)


def make_scenes(root: Path, size: int) -> None:
    """Write 320 digit scenes; in every other group of ten scenes the images are a third wider."""
    from densefeed.storage.scenes import load_photographs
    from densefeed.tools.make_digit_scenes import PHOTOGRAPHS, load_scans, scene

    backgrounds, scans = load_photographs(PHOTOGRAPHS), load_scans()["train"]
    for n in range(320):
        jpeg, _ = scene(np.random.default_rng([8, n]), n % 10, size, backgrounds, scans)
        path = root / "train" / str(n % 10) / f"{n:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.open(io.BytesIO(jpeg))
        if n // 10 % 2:
            image = image.resize((size * 4 // 3, size), Image.Resampling.BICUBIC)
        image.save(path)


def train_to_locate(size: int, side: int) -> list[CellNet]:
    """Train two networks on boxes of other scenes, which is faster than training on labels."""
    from densefeed.storage.scenes import load_photographs
    from densefeed.tools.make_digit_scenes import PHOTOGRAPHS, load_scans, scene

    backgrounds, scans = load_photographs(PHOTOGRAPHS), load_scans()["train"]
    pixels_NHWC = np.empty((450, size, size, 3), np.uint8)
    cell_NSS = torch.full((450, side, side), -1)
    for n in range(450):
        jpeg, digits = scene(np.random.default_rng([7, n]), n % 10, size, backgrounds, scans)
        pixels_NHWC[n] = np.asarray(Image.open(io.BytesIO(jpeg)))
        for digit in digits:
            left, top, right, bottom = (round(v * side / size) for v in digit["box"])
            place = slice(top, max(bottom, top + 1)), slice(left, max(right, left + 1))
            cell_NSS[n, *place] = int(digit["class"])

    def train(seed: int, width: int, steps: int = 140):
        with torch.enable_grad(), torch.random.fork_rng():
            torch.manual_seed(seed)
            net, rng = CellNet(width), np.random.default_rng(seed)
            optimizer = torch.optim.AdamW(net.parameters(), 5e-3)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, steps)
            x = (torch.from_numpy(pixels_NHWC).permute(0, 3, 1, 2).float() / 255 - 0.4) / 0.25
            for _ in range(steps):
                some = torch.from_numpy(rng.integers(0, len(x), 32))
                logits_NSSK = net.forward_token_logits(x[some]).permute(0, 2, 3, 1)
                want = cell_NSS[some]
                on = want >= 0
                loss = torch.nn.functional.cross_entropy(logits_NSSK[on], want[on])
                # The target of background cells is uniform.
                loss = loss - 0.5 * logits_NSSK[~on].log_softmax(-1).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
        return net

    return [train(0, 24), train(1, 20)]


@pytest.fixture(scope="session")
def located(shared, run_once):
    """Inputs of an audit: 320 digit scenes of 48 pixels and models that locate digits.

    `teachers(0)` and `teachers(1)` are two networks of different width, seed and training, as
    References of the audit; `untrained(seed)` is a network with random weights.
    """
    from densefeed.relabel.teacher import Teacher

    size, side, scenes, networks = 48, 6, shared / "scenes", shared / "networks.pt"

    def make() -> None:
        make_scenes(scenes, size)
        torch.save(train_to_locate(size, side), networks)

    run_once("located", make)
    config = {"mean": (0.4, 0.4, 0.4), "std": (0.25, 0.25, 0.25), "interpolation": "bilinear"}

    def references(net: torch.nn.Module):
        return {
            geometry: Teacher(net, size, geometry, config) for geometry in ("squash", "center-crop")
        }

    def untrained(seed: int, classes: int = 10):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return references(CellNet(24, classes))

    both = [references(net) for net in torch.load(networks, weights_only=False)]
    return SimpleNamespace(scenes=scenes, teachers=both.__getitem__, untrained=untrained)


@pytest.fixture(params=["ENOLCK", "ENOTSUP", "ENOSYS"])
def no_locks(monkeypatch, request):
    """A file system without locks, as some network file systems are."""

    def flock(*_: object) -> None:
        raise OSError(getattr(errno, request.param), "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.fixture
def little_memory():
    """Return a context in which `most` more bytes of memory, by default 100 MB, are a failure."""

    @contextmanager
    def watch(most=10**8):
        # Resets the peak of this process: ru_maxrss would hide what stays below an earlier one.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        before = peak_rss()
        yield
        assert peak_rss() - before < most

    return watch
