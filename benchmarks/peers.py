"""Every loader that benchmarks/loaders.py compares, behind one door: the same files, 224 x 224
crops and flips, batches.

| name | what runs | crops |
|---|---|---|
| `ffcv`, `folder` (`+labels`) | ours, from a .beton or a folder; score maps delivered with every batch | the plan's |
| `dali-cpu`, `dali-gpu` (`+labels`) | ours, from the same .beton, decoded by DALI | the plan's |
| `dali-gpu+ffcv+labels` | two of ours at once, half of the threads each, two epochs in all | the plan's |
| `nvidia-dali-cpu`, `-gpu` | NVIDIA's ImageNet pipeline: file reader, decode of the crop alone, resize, mirror; no score maps | its own |
| `ffcv-stock` | ffcv 1.0.2, the very same JPEG bytes in a .beton, RandomResizedCropRGBImageDecoder, os_cache | its own |
| `torchvision` | DataLoader, ImageFolder (Pillow), v2.RandomResizedCrop(antialias) and flip | its own |
| `torchvision-tensor` | the same, but decoded by torchvision.io.decode_jpeg and resized as a uint8 tensor | its own |
| `timm` | timm's create_loader with its training transform, without color jitter; not yet normalized | its own |
| `token-labeling` | the published path up to the device: Pillow, a .pt file an image, map and box packed into one tensor | the plan's |
| `token-labeling+labels` | ... and its dense targets, built by its collate function on the CPU, in the published geometry | the plan's |
| `simplejpeg` | libjpeg-turbo through simplejpeg, antialiased resize of the crop by torch on uint8 | the plan's |
| `spdl` | SPDL's pipeline: FFmpeg decodes, its filters crop, resize and mirror | the plan's |
| `turbojpeg-full` | a limit and no loader: libjpeg-turbo decodes every whole JPEG, read from memory-mapped bytes | none |

`its own`: a loader that cannot be told the crop draws it from the same distribution (area 8 to 100
%, aspect 3/4 to 4/3, ten tries). No peer normalizes; all deliver uint8. With one thread everything
runs in the calling process, with more a DataLoader has as many worker processes, the others as many
threads. timm drops an incomplete last batch. DALI's pipeline is that of its ImageNet example (a
hundred tries, triangular antialiased filter) with our areas and aspects; it hands over bytes [N, H,
W, 3], as ours do, which costs it no more than the example's normalized floats. token-labeling
resizes by the bilinear filter alone, where the published code draws bilinear or (slower) bicubic,
and has no RandAugment, as no other here.
"""

import functools
import importlib
import io
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from densefeed.pipelines.dali import DaliLoader
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.folder import FolderSource
from densefeed.pipelines.loader import Source, ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
from densefeed.storage.beton import Beton
from densefeed.system.prefetch import ordered_map
from densefeed.system.provenance import ROOT

SMOOTHING = 0.1  # of the published token labels
PATCH = 16  # pixels a token
CHUNK = 16  # images a thread takes at once
AHEAD = 3  # batches that a pool works ahead, as ours and stock FFCV do


class BenchmarkSet(NamedTuple):
    """The same images in every form. Rows of all forms are in the same order, but for a given
    .beton that is not by class.
    """

    folder: Path  # class folders of JPEGs
    beton: Path  # ours, with score maps if there are any
    stock: Path  # a .beton of the folder's JPEG bytes, without score maps
    maps: Path | None  # the score maps as HDF5, in the folder's order
    # ... and as one .pt file an image; None also for more classes than float16 can number
    published: Path | None
    paths: tuple[str, ...]  # of the folder's files
    labels: np.ndarray  # int64 [N]
    heights: np.ndarray  # int64 [N], pixels
    widths: np.ndarray
    num_classes: int  # of the score maps


class Work(NamedTuple):
    """What a peer shall do with the set."""

    data: BenchmarkSet
    threads: int
    batch: int = 64
    size: int = 224  # side of the output, pixels

    def plan(self) -> EpochPlan:
        """The crops of the peers that can be told them."""
        return EpochPlan(num_samples=len(self.data.labels), batch=self.batch, seed=0, mode="train")


class Delivered(NamedTuple):
    """One batch, as far as peers have it in common."""

    count: int  # images in it, padding not counted
    # uint8 [N, H, W, 3] or [N, 3, H, W]; None: the limit row, which crops nothing
    image: Tensor | None
    label: Tensor | None  # int64 [N]
    dense: Tensor | None  # what a step needs to build dense targets, or the targets


class Peer(Protocol):
    """A loader under test; `batches` may be called for one epoch after another."""

    def batches(self, epoch: int) -> Iterator[Delivered]: ...

    def close(self) -> None: ...


def ffcv_source(work: Work, labels: bool) -> Source:
    """Our .beton. Without labels it is the very same file, its maps unread."""
    source = FfcvSource(work.data.beton)
    source.score_maps = source.score_maps if labels else None
    return source


def folder_source(work: Work, labels: bool) -> Source:
    """The folder of JPEGs, with or without score maps beside it."""
    return FolderSource(work.data.folder, "train", work.data.maps if labels else None, work.threads)


def threaded(
    source_of: Callable[[Work, bool], Source],
    make: Callable[..., ThreadedLoader],
    work: Work,
    labels: bool,
) -> ThreadedLoader:
    """A source's images decoded by our native threads, or what else `make` makes a loader of."""
    source = source_of(work, labels)
    plan = EpochPlan(
        num_samples=len(source.labels),
        batch=work.batch,
        seed=0,
        mode="train",
        sizes=((0, work.size),),
    )
    return make(source, plan, work.threads)


OURS = {
    "ffcv": functools.partial(threaded, ffcv_source, ThreadedLoader),
    "folder": functools.partial(threaded, folder_source, ThreadedLoader),
    "dali-cpu": functools.partial(threaded, ffcv_source, DaliLoader),
    "dali-gpu": functools.partial(
        threaded, ffcv_source, functools.partial(DaliLoader, device=torch.device("cuda", 0))
    ),
}


def first_batch(beton: str, threads: str, batch: str, size: str) -> None:
    """Open our loader on a .beton and wait for its first batch, labels included where the file has
    them.
    """
    nothing = np.zeros(0, np.int64)
    data = BenchmarkSet(Path(), Path(beton), Path(), None, None, (), nothing, nothing, nothing, 0)
    loader = OURS["ffcv"](Work(data, int(threads), int(batch), int(size)), True)
    next(loader.batches(0))
    loader.close()


class Ours:
    """One of OURS, with or without score maps."""

    def __init__(self, kind: str, labels: bool, work: Work) -> None:
        self._loader = OURS[kind](work, labels)

    def batches(self, epoch: int) -> Iterator[Delivered]:
        for batch in self._loader.batches(epoch):
            yield Delivered(int(batch.weight.sum()), batch.image, batch.label, batch.map_logit)

    def close(self) -> None:
        self._loader.close()


class Both:
    """Two peers at once, each in a thread of its own with half of the threads; batches as they
    come.
    """

    def __init__(
        self, make: Callable[[Work], Peer], other: Callable[[Work], Peer], work: Work
    ) -> None:
        half = work._replace(threads=max(1, work.threads // 2))
        self._peers = make(half), other(half)

    def batches(self, epoch: int) -> Iterator[Delivered]:
        came: SimpleQueue[Delivered | None] = SimpleQueue()

        def run(peer: Peer) -> None:
            try:
                for batch in peer.batches(epoch):
                    came.put(batch)
            finally:
                came.put(None)

        with ThreadPoolExecutor(2) as pool:
            runs = [pool.submit(run, peer) for peer in self._peers]
            for _ in runs:
                yield from iter(came.get, None)
            for one in runs:
                one.result()

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


class StockFfcv:
    """`ffcv-stock`. ffcv sets the number of threads of numba and torch for the whole process."""

    def __init__(self, work: Work) -> None:
        from ffcv.fields.basics import IntDecoder
        from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
        from ffcv.loader import Loader as StockLoader
        from ffcv.loader import OrderOption
        from ffcv.transforms import RandomHorizontalFlip, ToTensor

        pixels = [
            RandomResizedCropRGBImageDecoder((work.size, work.size)),
            RandomHorizontalFlip(),
            ToTensor(),
        ]
        self._loader = StockLoader(
            str(work.data.stock),
            batch_size=work.batch,
            num_workers=work.threads,
            os_cache=True,
            order=OrderOption.RANDOM,
            seed=0,
            drop_last=False,
            pipelines={"image": pixels, "label": [IntDecoder(), ToTensor()]},
        )

    def batches(self, epoch: int) -> Iterator[Delivered]:
        for image, label in self._loader:
            yield Delivered(len(image), image, label[:, 0], None)

    def close(self) -> None:
        """Nothing: an epoch that ran to its end has stopped its thread."""


class NvidiaDali:
    """`nvidia-dali-cpu` and, decoding in mixed mode, `nvidia-dali-gpu`, whose batches stay on the
    GPU.
    """

    def __init__(self, device: Literal["cpu", "gpu"], work: Work) -> None:
        from nvidia.dali.plugin.base_iterator import LastBatchPolicy
        from nvidia.dali.plugin.pytorch import DALIGenericIterator

        # Padded and cut again by the iterator: an epoch is each image once (without, the next
        # epoch's begins in its place).
        self._iterator = DALIGenericIterator(
            [nvidia_pipeline(device, str(work.data.folder), work)],
            ["image", "label"],
            reader_name="reader",
            last_batch_policy=LastBatchPolicy.PARTIAL,
            auto_reset=True,
        )

    def batches(self, epoch: int) -> Iterator[Delivered]:
        for (batch,) in self._iterator:
            yield Delivered(len(batch["label"]), batch["image"], batch["label"][:, 0].long(), None)

    def close(self) -> None:
        """Forget the pipeline, which stops its threads."""
        self._iterator = None


def nvidia_pipeline(
    device: Literal["cpu", "gpu"], folder: str, work: Work
) -> "nvidia.dali.Pipeline":  # noqa: F821
    """DALI's pipeline: images uint8 `[N, H, W, 3]`, labels int32 `[N, 1]`."""
    from nvidia.dali import fn, pipeline_def, types

    options = {
        "batch_size": work.batch,
        "num_threads": work.threads,
        "device_id": None if device == "cpu" else 0,
        "seed": 0,
    }

    @pipeline_def(**options)
    def pipeline():
        encoded, label = fn.readers.file(
            file_root=folder, random_shuffle=True, pad_last_batch=True, name="reader"
        )
        image = fn.decoders.image_random_crop(
            encoded,
            device="cpu" if device == "cpu" else "mixed",
            output_type=types.RGB,
            random_area=[0.08, 1.0],
            random_aspect_ratio=[3 / 4, 4 / 3],
            num_attempts=100,
        )
        image = fn.resize(image, size=(work.size, work.size), interp_type=types.INTERP_TRIANGULAR)
        image = fn.crop_mirror_normalize(
            image,
            dtype=types.UINT8,
            output_layout="HWC",
            mean=[0.0] * 3,
            std=[1.0] * 3,
            mirror=fn.random.coin_flip(),
        )
        return image, label if device == "cpu" else label.gpu()

    return pipeline()


NVIDIA_PROBE = """
import sys
from pathlib import Path
import numpy as np
from benchmarks.peers import BenchmarkSet, NvidiaDali, Work
nothing = np.zeros(0, np.int64)
data = BenchmarkSet(Path(sys.argv[1]), Path(), Path(), None, None, (), nothing, nothing, nothing, 0)
assert sum(batch.count for batch in NvidiaDali("gpu", Work(data, 1, 2, 32)).batches(0)) == 2
"""


def gpu_is_here() -> None:
    """There is a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("it needs a CUDA device")


def nvidia_gpu_works() -> None:
    """There is a GPU, and decoding a crop on it does not end the process.

    nvImageCodec 0.9, which DALI 2.3 and 2.4 bring, was reported to segfault there on H100 and B200
    (nvImageCodec issue 55), so a process of its own tries first.
    """
    gpu_is_here()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "class").mkdir()
        for number in range(2):
            Image.effect_noise((320, 240), 60).convert("RGB").save(
                Path(folder) / "class" / f"{number}.jpg"
            )
        done = subprocess.run(
            [sys.executable, "-c", NVIDIA_PROBE, folder],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or [f"the process ended with {done.returncode}"]
        raise RuntimeError(f"it cannot decode crops on this GPU: {why[0]}")


class Workers:
    """A peer around a torch DataLoader, which yields image, label and perhaps dense targets."""

    _loader: DataLoader

    def batches(self, epoch: int) -> Iterator[Delivered]:
        for image, label, *dense in self._loader:
            yield Delivered(len(image), image, label, dense[0] if dense else None)

    def close(self) -> None:
        """Stop persistent workers; without this they wait for the interpreter's end."""
        iterator, self._loader = self._loader._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()


def workers(work: Work) -> dict:
    """A DataLoader's options: no process for one thread, else as many as threads, kept from epoch
    to epoch.

    They come from a fork server: a fork of this process, in which OpenMP and numba have threads,
    may hang.
    """
    many = work.threads > 1
    return {
        "num_workers": work.threads if many else 0,
        "persistent_workers": many,
        "multiprocessing_context": "forkserver" if many else None,
    }


class Torchvision(Workers):
    """`torchvision`: ImageFolder and the v2 transforms on Pillow images, or on uint8 tensors."""

    def __init__(self, tensors: bool, work: Work) -> None:
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        crop = [v2.RandomResizedCrop(work.size, antialias=True), v2.RandomHorizontalFlip()]
        transform = v2.Compose(crop if tensors else [*crop, v2.PILToTensor()])
        dataset = ImageFolder(
            str(work.data.folder), transform, **({"loader": decode_tensor} if tensors else {})
        )
        self._loader = DataLoader(dataset, work.batch, shuffle=True, **workers(work))


def decode_tensor(path: str) -> Tensor:
    """uint8 `[3, H, W]` of a JPEG file."""
    from torchvision.io import ImageReadMode, decode_jpeg, read_file

    return decode_jpeg(read_file(path), ImageReadMode.RGB)


class Timm(Workers):
    """`timm`. The batch is taken before its prefetcher converts it to float and normalizes it,
    which is the device's work.
    """

    def __init__(self, work: Work) -> None:
        from timm.data import create_dataset, create_loader

        dataset = create_dataset("", root=str(work.data.folder), split="train", is_training=True)
        options = workers(work)
        context = options.pop("multiprocessing_context")
        self._loader = create_loader(
            dataset,
            (3, work.size, work.size),
            work.batch,
            is_training=True,
            color_jitter=None,
            interpolation="bilinear",
            device=torch.device("cpu"),
            **options,
        ).loader
        self._loader.multiprocessing_context = context


# ------------------------------------------------------------------------- the published data path


class PlannedBatches:
    """A batch sampler of (sample, box, flip): how the plan's crops reach worker processes that
    outlive an epoch.
    """

    def __init__(self, work: Work) -> None:
        self._data, self._plan, self.epoch = work.data, work.plan(), 0

    def __len__(self) -> int:
        return self._plan.batches

    def __iter__(self) -> Iterator[list[tuple[int, np.ndarray, bool]]]:
        ids, boxes, flips = planned(self._plan, self._data, self.epoch)
        rows = list(zip(ids.tolist(), boxes, flips.tolist(), strict=True))
        return iter(
            [rows[at : at + self._plan.batch] for at in range(0, len(rows), self._plan.batch)]
        )


class TokenLabeling(Workers):
    """`token-labeling`, with `labels` its dense targets too."""

    def __init__(self, labels: bool, work: Work) -> None:
        collate = functools.partial(
            collate_published,
            grid=max(1, work.size // PATCH) if labels else None,
            num_classes=work.data.num_classes,
        )
        self._batches = PlannedBatches(work)
        dataset = PublishedSamples(work.data, work.size)
        self._loader = DataLoader(
            dataset, batch_sampler=self._batches, collate_fn=collate, **workers(work)
        )

    def batches(self, epoch: int) -> Iterator[Delivered]:
        self._batches.epoch = epoch
        return super().batches(epoch)


class PublishedSamples(Dataset):
    """The published per-sample order: Pillow, the map's file, flip of the whole image and of the
    map, then crop.
    """

    def __init__(self, data: BenchmarkSet, size: int) -> None:
        self._paths, self._labels, self._size = data.paths, data.labels.tolist(), size
        self._maps = [
            str((data.published / Path(path).relative_to(data.folder)).with_suffix(".pt"))
            for path in data.paths
        ]

    def __getitem__(self, planned: tuple[int, np.ndarray, bool]) -> tuple[np.ndarray, int, Tensor]:
        """uint8 `[3, size, size]`, the label, and the packed map float32 `[3, k, S, S]`."""
        index, (top, left, height, width), flip = planned
        with open(self._paths[index], "rb") as file:
            image = Image.open(file).convert("RGB")
        score_map = torch.load(self._maps[index], weights_only=True).float()
        if flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            score_map = score_map.flip(-1)
            left = image.width - left - width  # the plan flips after it has cut; the same pixels
        crop = image.crop((left, top, left + width, top + height)).resize(
            (self._size, self._size), Image.Resampling.BILINEAR
        )
        packed = torch.cat([score_map, torch.zeros_like(score_map[:1])])
        box = (top / image.height, left / image.width, height / image.height, width / image.width)
        packed[2, 0, 0, :4] = torch.tensor(box)
        packed[2, 0, 0, 5] = self._labels[index]
        return (
            np.ascontiguousarray(np.asarray(crop).transpose(2, 0, 1)),
            self._labels[index],
            packed,
        )


def collate_published(
    samples: list[tuple[np.ndarray, int, Tensor]], grid: int | None, num_classes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Images, labels, and the packed maps, or with a `grid` their dense targets."""
    image, label, packed = zip(*samples, strict=True)
    dense = torch.stack(packed)
    if grid is not None:
        dense = published_targets(dense, grid, num_classes)
    return torch.from_numpy(np.stack(image)), torch.tensor(label), dense


def published_targets(packed: Tensor, grid: int, num_classes: int) -> Tensor:
    """Dense targets as the published collate function builds them: float32 `[N, K, 2 + grid *
    grid]`.

    `packed` is `[N, 3, k, S, S]`. Columns: the smoothed label, the crop's label, the tokens'
    row-major. The geometry is the published one, right or not (reference: crops are handed over as
    (top, left, bottom, right) to an operator that takes (x, y, x, y)). Classes that a map does not
    name stay at logit 0, and the softmax comes after the pooling.
    """
    from torchvision.ops import roi_align

    count, _, _, side, _ = packed.shape
    top, left, height, width = packed[:, 2, 0, 0, :4].unbind(1)
    corners = torch.stack([top, left, top + height, left + width], 1) * side - 0.5
    boxes = torch.cat([torch.arange(count, dtype=packed.dtype)[:, None], corners], 1)
    dense = torch.zeros(count, num_classes, side, side)
    for row, score_map in zip(dense, packed, strict=True):
        row.scatter_(0, score_map[1].long(), score_map[0])
    pooled = torch.cat(
        [roi_align(dense, boxes, 1).flatten(2), roi_align(dense, boxes, grid).flatten(2)], 2
    )
    off = SMOOTHING / num_classes
    on = 1 - SMOOTHING + off
    given = torch.full((count, num_classes, 1), off).scatter_(
        1, packed[:, 2, 0, 0, 5].long().view(-1, 1, 1), on
    )
    target = torch.cat([given, pooled.softmax(1) * on + off], 2)
    # it mixes with a share of 1 even where nothing is mixed
    return target * 1.0 + target.flip(0) * 0.0


# ------------------------------------------------------------------------- image by image


def planned(
    plan: EpochPlan, data: BenchmarkSet, epoch: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids `[N]`, boxes `[N, 4]` (top, left, height, width; int64, pixels) and flips `[N]` of an
    epoch, in its order.
    """
    ids = plan.permutation(epoch)
    boxes, flips = plan.crops(epoch, ids, data.heights[ids], data.widths[ids])
    return ids, boxes.astype(np.int64), flips


class SimpleJpeg:
    """`simplejpeg`: in the calling thread, or on a pool; decodes into a buffer of its own each
    time, which is 1.4 times faster.
    """

    def __init__(self, work: Work) -> None:
        from simplejpeg import decode_jpeg

        self._decode, self._work, self._plan, self._local = (
            decode_jpeg,
            work,
            work.plan(),
            threading.local(),
        )
        self._largest = int((work.data.heights * work.data.widths).max()) * 3
        self._pool = ThreadPoolExecutor(work.threads) if work.threads > 1 else None

    def _pixels(self, encoded: bytes) -> np.ndarray:
        """uint8 `[H, W, 3]`, good until this thread decodes the next."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = np.empty(self._largest, np.uint8)
        return self._decode(encoded, "RGB", buffer=self._local.buffer)

    def _fill(self, out: Tensor, index: int, box: np.ndarray, flip: bool) -> None:
        top, left, height, width = box.tolist()
        cut = self._pixels(Path(self._work.data.paths[index]).read_bytes())[
            top : top + height, left : left + width
        ]
        image = torch.from_numpy(cut).permute(2, 0, 1)[None]
        crop = F.interpolate(
            image, (self._work.size, self._work.size), mode="bilinear", antialias=True
        )[0].permute(1, 2, 0)
        out.copy_(crop.flip(1) if flip else crop)

    def batches(self, epoch: int) -> Iterator[Delivered]:
        ids, boxes, flips = planned(self._plan, self._work.data, epoch)
        size, batch = self._work.size, self._work.batch
        spans = [range(at, min(at + batch, len(ids))) for at in range(0, len(ids), batch)]

        def chunks() -> Iterator[tuple[Tensor, range, range]]:
            for span in spans:
                image = torch.empty(len(span), size, size, 3, dtype=torch.uint8)
                for at in range(0, len(span), CHUNK):
                    yield image, span, range(at, min(at + CHUNK, len(span)))

        def fill(chunk: tuple[Tensor, range, range]) -> tuple[Tensor, range, bool]:
            image, span, rows = chunk
            for row in rows:
                self._fill(
                    image[row], int(ids[span[row]]), boxes[span[row]], bool(flips[span[row]])
                )
            return image, span, rows.stop == len(span)

        ahead = AHEAD * -(-batch // CHUNK)
        filled = (
            map(fill, chunks())
            if self._pool is None
            else ordered_map(fill, chunks(), self._pool, ahead)
        )
        for image, span, whole in filled:
            if whole:
                label = torch.from_numpy(self._work.data.labels[ids[span.start : span.stop]])
                yield Delivered(len(span), image, label, None)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


class FullDecode(SimpleJpeg):
    """`turbojpeg-full`: each whole JPEG is decoded into one buffer and left there.

    simplejpeg's own libjpeg-turbo: measured faster (2,050 images/s) than the system's tjDecompress2
    (1,950) and torchvision's decode_jpeg (1,890), all three on one core and into memory already
    touched.
    """

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._stock = Beton(work.data.stock)

    def batches(self, epoch: int) -> Iterator[Delivered]:
        ids = self._plan.permutation(epoch)
        chunks = np.array_split(ids, -(-len(ids) // CHUNK))

        def decode(chunk: np.ndarray) -> int:
            for index in chunk.tolist():
                self._pixels(self._stock.image(index)[0])
            return len(chunk)

        counts = map(decode, chunks) if self._pool is None else self._pool.map(decode, chunks)
        for count in counts:
            yield Delivered(count, None, None, None)


class Spdl:
    """`spdl`: its pipeline, one filter graph an image, since a graph holds the crop."""

    def __init__(self, work: Work) -> None:
        from spdl import io as spdl_io
        from spdl.pipeline import PipelineBuilder

        self._io, self._builder, self._work, self._plan = (
            spdl_io,
            PipelineBuilder,
            work,
            work.plan(),
        )

    def _decode(self, sample: tuple[int, np.ndarray, bool]) -> tuple[object, int]:
        index, box, flip = sample
        (top, left, height, width), size = box.tolist(), self._work.size
        mirror = "hflip," if flip else ""
        graph = f"crop={width}:{height}:{left}:{top}:exact=1,scale={size}:{size}:flags=bilinear,{mirror}format=pix_fmts=rgb24"
        packets = self._io.demux_image(self._work.data.paths[index])
        return self._io.decode_packets(packets, filter_desc=graph), index

    def _collate(self, samples: list[tuple[object, int]]) -> Delivered:
        frames, ids = zip(*samples, strict=True)
        image = self._io.to_torch(self._io.convert_frames(list(frames)))
        return Delivered(len(ids), image, torch.from_numpy(self._work.data.labels[list(ids)]), None)

    def batches(self, epoch: int) -> Iterator[Delivered]:
        ids, boxes, flips = planned(self._plan, self._work.data, epoch)
        builder = self._builder().add_source(zip(ids.tolist(), boxes, flips.tolist(), strict=True))
        builder = builder.pipe(self._decode, concurrency=self._work.threads).aggregate(
            self._work.batch
        )
        pipeline = builder.pipe(self._collate).add_sink(AHEAD).build(num_threads=self._work.threads)
        with pipeline.auto_stop():
            yield from pipeline

    def close(self) -> None:
        """Nothing: a pipeline lives for one epoch."""


def spdl_loads() -> None:
    """Its native part loads with the first call, and only beside the FFmpeg libraries it was built
    for.
    """
    from spdl import io as spdl_io

    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG")
    spdl_io.demux_image(buffer.getvalue())


class Entry(NamedTuple):
    """How a peer is made, and what it needs."""

    make: Callable[[Work], Peer]
    package: str = ""  # to import
    remedy: str = ""  # how to get it
    maps: bool = False  # whether it reads score maps
    try_out: Callable[[], None] = lambda: None  # raises where the package is here but cannot work


DALI = "pip install nvidia-dali-cuda130, or -cuda120"
PEERS = {
    "ffcv+labels": Entry(functools.partial(Ours, "ffcv", True), maps=True),
    "ffcv": Entry(functools.partial(Ours, "ffcv", False)),
    "folder+labels": Entry(functools.partial(Ours, "folder", True), maps=True),
    "folder": Entry(functools.partial(Ours, "folder", False)),
    "dali-cpu+labels": Entry(
        functools.partial(Ours, "dali-cpu", True), "nvidia.dali", DALI, maps=True
    ),
    "dali-cpu": Entry(functools.partial(Ours, "dali-cpu", False), "nvidia.dali", DALI),
    "dali-gpu+labels": Entry(
        functools.partial(Ours, "dali-gpu", True), "nvidia.dali", DALI, True, gpu_is_here
    ),
    "dali-gpu": Entry(
        functools.partial(Ours, "dali-gpu", False), "nvidia.dali", DALI, False, gpu_is_here
    ),
    "dali-gpu+ffcv+labels": Entry(
        functools.partial(
            Both, functools.partial(Ours, "dali-gpu", True), functools.partial(Ours, "ffcv", True)
        ),
        "nvidia.dali",
        DALI,
        True,
        gpu_is_here,
    ),
    "ffcv-stock": Entry(StockFfcv, "ffcv", "pip install ffcv==1.0.2 setuptools"),
    "nvidia-dali-cpu": Entry(
        functools.partial(NvidiaDali, "cpu"), "nvidia.dali.plugin.pytorch", DALI
    ),
    "nvidia-dali-gpu": Entry(
        functools.partial(NvidiaDali, "gpu"),
        "nvidia.dali.plugin.pytorch",
        DALI,
        try_out=nvidia_gpu_works,
    ),
    "torchvision": Entry(functools.partial(Torchvision, False)),
    "torchvision-tensor": Entry(functools.partial(Torchvision, True)),
    "timm": Entry(Timm),
    "token-labeling": Entry(functools.partial(TokenLabeling, False), maps=True),
    "token-labeling+labels": Entry(functools.partial(TokenLabeling, True), maps=True),
    "simplejpeg": Entry(SimpleJpeg, "simplejpeg", "pip install simplejpeg"),
    "spdl": Entry(
        Spdl,
        "spdl.io",
        "pip install spdl-io, and FFmpeg's libraries with libavdevice (Debian 12: libavdevice59)",
        try_out=spdl_loads,
    ),
    "turbojpeg-full": Entry(FullDecode, "simplejpeg", "pip install simplejpeg"),
}


def why_missing(name: str) -> str | None:
    """Why peer `name` cannot run here, in a few words; None if it can."""
    entry = PEERS[name]
    if not entry.package:
        return None
    try:
        importlib.import_module(entry.package)
        entry.try_out()
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:
        # A native extension that does not fit this machine fails in its own way: ImportError,
        # OSError, RuntimeError, ...
        return f"{entry.package} cannot load ({str(error).strip().splitlines()[0][:120]})"
    return None
