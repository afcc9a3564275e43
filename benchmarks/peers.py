"""The loaders that benchmarks/loaders.py compares, behind one interface.

All read the same files and deliver batches of 224 x 224 crops, flipped or not.

Ours, with the plan's crops; with `+labels` every batch has its score maps:

- `ffcv`, `folder` (`+labels`): from a .beton or a folder.
- `ffcv-2-crops` (`+labels`): two crops of each image, `--repeats 2`.
- `ffcv-planes` (`+labels`): from a .beton of color planes; only with the generated images.
- `dali-cpu`, `dali-gpu` (`+labels`): from the same .beton, decoded by DALI.

Peers that draw their own crops, from the same distribution (area 8 to 100 %, aspect ratio 3/4 to
4/3, ten tries), as they accept none:

- `nvidia-dali-cpu`, `nvidia-dali-gpu`: the pipeline of NVIDIA's ImageNet example: file reader,
  decoding of the crop alone, resize, mirror; no score maps.
- `ffcv-stock`: ffcv 1.0.2, the same JPEG bytes in a .beton, RandomResizedCropRGBImageDecoder,
  os_cache.
- `torchvision`: DataLoader, ImageFolder (Pillow), v2.RandomResizedCrop(antialias) and flip.
- `torchvision-tensor`: the same, but decoded by torchvision.io.decode_jpeg and resized as uint8
  tensors.
- `timm`: timm's create_loader with its training transform, without color jitter, before
  normalization.

Peers that get the plan's crops:

- `token-labeling`: the published data path up to the device: Pillow, one .pt file per image, map
  and box packed into one tensor.
- `token-labeling+labels`: the same with its dense targets, built by its collate function on the
  CPU, in the published geometry.
- `simplejpeg`: libjpeg-turbo through simplejpeg, antialiased resize of the uint8 crop by torch.

An upper bound that crops nothing:

- `turbojpeg-full`: libjpeg-turbo decodes every whole JPEG from memory-mapped bytes.
- `nvjpeg-full`: torchvision decodes them on a GPU, all of a batch in one call.

No peer normalizes; all deliver uint8. With one thread everything runs in the calling process. With
more, a DataLoader has as many worker processes and the others as many threads. timm drops an
incomplete last batch. DALI's pipeline is that of its ImageNet example (a hundred tries, triangular
antialiased filter) with our areas and aspect ratios; it delivers uint8 [N, H, W, 3] as ours do,
which is no slower than the example's normalized floats. token-labeling always resizes with the
bilinear filter, where the published code chooses bilinear or the slower bicubic at random; like all
it has no RandAugment.
"""

import importlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from densefeed.pipelines.dali_probe import probe_regions
from densefeed.pipelines.open import DataOptions, open_dataset
from densefeed.pipelines.plan import EpochPlan
from densefeed.storage.beton import Beton
from densefeed.storage.packs import map_stem
from densefeed.system.prefetch import ordered_map

# Label smoothing of the published code, which smooths token labels too.
SMOOTHING = 0.1
# Side of a token, pixels.
PATCH = 16
# Images that a thread takes at once.
CHUNK = 16
# Batches in flight, as in our loaders and stock FFCV.
AHEAD = 3


class BenchmarkSet(NamedTuple):
    """The same images in every format.

    Rows of all formats are in the same order, except in a given .beton that is not sorted by class.
    """

    folder: Path  # class folders of JPEGs
    beton: Path  # ours, with score maps if there are any
    # The same with images stored as planes; None for given data, of which it may be too large.
    planes: Path | None
    stock: Path  # a .beton of the folder's JPEG bytes, without score maps
    maps: Path | None  # the score maps as HDF5, in the folder's order
    # The score maps as one .pt file per image; None also where float16 cannot hold all class ids.
    published: Path | None
    paths: tuple[str, ...]  # of the folder's files
    labels: np.ndarray  # int64 [N]
    heights: np.ndarray  # int64 [N], pixels
    widths: np.ndarray  # int64 [N], pixels
    num_classes: int  # of the score maps


class PeerConfig(NamedTuple):
    """What a peer reads and delivers."""

    data: BenchmarkSet
    threads: int
    batch: int = 64  # images
    size: int = 224  # side of the output, pixels

    def plan(self) -> EpochPlan:
        """Return the plan of crops, which is that of our loaders too."""
        return EpochPlan(
            num_samples=len(self.data.labels),
            batch=self.batch,
            seed=0,
            mode="train",
            sizes=((0, self.size),),
        )


# A sample's id, its crop (top, left, height, width; int64, pixels), and whether it is mirrored.
Sample = tuple[int, np.ndarray, bool]


class PeerBatch(NamedTuple):
    """The parts of a batch that all peers have."""

    count: int  # images, without padding
    # uint8 [N, H, W, 3] or [N, 3, H, W]; None for turbojpeg-full and nvjpeg-full
    image: Tensor | None
    label: Tensor | None  # int64 [N]
    dense: Tensor | None  # dense targets, or what a training step builds them from


PeerBatches = Iterator[PeerBatch]


class Peer(Protocol):
    """A loader to measure; `batches` may be called for one epoch after another."""

    def batches(self, epoch: int) -> PeerBatches: ...

    def close(self) -> None:
        """Stop threads and processes that outlive an epoch; there are none by default."""


class OurLoader:
    """One of our loaders, with or without score maps of the same files.

    The loaders are `ffcv`, `ffcv-planes`, `folder`, `dali-cpu` and `dali-gpu`. Each image comes
    `repeats` times.
    """

    def __init__(self, kind: str, labels: bool, config: PeerConfig, repeats: int = 1) -> None:
        data, folder = config.data, kind == "folder"
        beton = data.planes if kind == "ffcv-planes" else data.beton
        options = DataOptions(
            loader=kind.partition("-")[0],
            train=data.folder if folder else beton,
            # A .beton holds its own maps.
            score_maps=data.maps if folder and labels else None,
            threads=config.threads,
            size=config.size,
            repeats=repeats,
        )
        device = torch.device("cuda:0" if kind == "dali-gpu" else "cpu")
        self._loader = open_dataset(
            options, "train", batch=config.batch, seed=0, maps=labels, device=device
        )

    def batches(self, epoch: int) -> PeerBatches:
        for batch in self._loader.batches(epoch):
            # Padding has weight 0.
            yield PeerBatch(int(batch.weight.sum()), batch.image, batch.label, batch.map_logit)

    def close(self) -> None:
        self._loader.close()


Build = Callable[[PeerConfig], Peer]


class StockFfcv(Peer):
    """`ffcv-stock`, whose thread ends with the epoch.

    ffcv sets the number of threads of numba and torch for the whole process.
    """

    def __init__(self, config: PeerConfig) -> None:
        # Imported here, because ffcv is optional and its import takes seconds.
        from ffcv.fields.basics import IntDecoder
        from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
        from ffcv.loader import Loader, OrderOption
        from ffcv.transforms import RandomHorizontalFlip, ToTensor

        crop = RandomResizedCropRGBImageDecoder((config.size, config.size))
        pixels = [crop, RandomHorizontalFlip(), ToTensor()]
        self._loader = Loader(
            str(config.data.stock),
            batch_size=config.batch,
            num_workers=config.threads,
            os_cache=True,
            order=OrderOption.RANDOM,
            seed=0,
            # By default ffcv drops an incomplete last batch, which our loaders deliver.
            drop_last=False,
            pipelines={"image": pixels, "label": [IntDecoder(), ToTensor()]},
        )

    def batches(self, epoch: int) -> PeerBatches:
        for image, label in self._loader:
            # ffcv delivers integers as a column.
            yield PeerBatch(len(image), image, label[:, 0], None)


class NvidiaDali:
    """NVIDIA's own pipeline: `nvidia-dali-cpu` and `nvidia-dali-gpu`.

    `nvidia-dali-gpu` decodes in mixed mode and delivers batches on the GPU.
    """

    def __init__(self, device: Literal["cpu", "gpu"], config: PeerConfig) -> None:
        from nvidia.dali.plugin.base_iterator import LastBatchPolicy
        from nvidia.dali.plugin.pytorch import DALIGenericIterator

        # The reader pads the last batch and the iterator cuts it, so an epoch has each image once.
        # Without padding, images of the next epoch would fill the batch.
        self._iterator = DALIGenericIterator(
            [build_nvidia_pipeline(device, config)],
            ["image", "label"],
            reader_name="reader",
            last_batch_policy=LastBatchPolicy.PARTIAL,
            # Without a reset every epoch but the first would be empty.
            auto_reset=True,
        )

    def batches(self, epoch: int) -> PeerBatches:
        for (batch,) in self._iterator:
            yield PeerBatch(len(batch["label"]), batch["image"], batch["label"][:, 0].long(), None)

    def close(self) -> None:
        """Drop the pipeline, which stops its threads."""
        self._iterator = None


def build_nvidia_pipeline(
    device: Literal["cpu", "gpu"], config: PeerConfig
) -> "nvidia.dali.Pipeline":  # noqa: F821
    """Build DALI's pipeline: images uint8 `[N, H, W, 3]`, labels int32 `[N, 1]`."""
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(
        batch_size=config.batch,
        num_threads=config.threads,
        # Without a device id, operators of the CPU run on machines that have no driver.
        device_id=None if device == "cpu" else 0,
        seed=0,
    )
    def pipeline():
        encoded, label = fn.readers.file(
            file_root=str(config.data.folder),
            random_shuffle=True,
            pad_last_batch=True,
            name="reader",
        )
        image = fn.decoders.image_random_crop(
            encoded,
            device="cpu" if device == "cpu" else "mixed",
            output_type=types.RGB,
            random_area=[0.08, 1.0],
            random_aspect_ratio=[3 / 4, 4 / 3],
            # As in NVIDIA's example; DALI's default is ten.
            num_attempts=100,
        )
        size = config.size, config.size
        image = fn.resize(image, size=size, interp_type=types.INTERP_TRIANGULAR)
        # Mean 0 and deviation 1, the defaults, keep the pixels, so this only mirrors.
        image = fn.crop_mirror_normalize(
            image, dtype=types.UINT8, output_layout="HWC", mirror=fn.random.coin_flip()
        )
        return image, label if device == "cpu" else label.gpu()

    return pipeline()


def require_gpu() -> None:
    """Raise RuntimeError if there is no CUDA device."""
    if not torch.cuda.is_available():
        raise RuntimeError("it needs a CUDA device")


def probe_nvidia_gpu() -> None:
    """Raise RuntimeError if there is no GPU, or if decoding a crop on it fails.

    nvImageCodec 0.9, which DALI 2.3 and 2.4 bring, was reported to segfault there.
    """
    require_gpu()
    if why := probe_regions(0):
        raise RuntimeError(f"its decoder of crops {why}")


class DataLoaderPeer:
    """A peer around a torch DataLoader, which yields image, label and perhaps dense targets."""

    _loader: DataLoader

    def batches(self, epoch: int) -> PeerBatches:
        for image, label, *dense in self._loader:
            yield PeerBatch(len(image), image, label, dense[0] if dense else None)

    def close(self) -> None:
        """Stop persistent workers, which would otherwise live until the interpreter exits."""
        iterator, self._loader = self._loader._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()


def worker_options(config: PeerConfig) -> dict:
    """Return a DataLoader's options for the configured number of threads.

    One thread means no worker process; more threads mean as many persistent workers. Workers come
    from a fork server: a fork of this process, in which OpenMP and numba have threads, may hang.
    """
    # Without persistent workers, the start of new processes would be timed in every epoch.
    many = config.threads > 1
    return {
        "num_workers": config.threads if many else 0,
        "persistent_workers": many,
        "multiprocessing_context": "forkserver" if many else None,
    }


class Torchvision(DataLoaderPeer):
    """`torchvision`: ImageFolder and the v2 transforms on Pillow images, or on uint8 tensors."""

    def __init__(self, tensors: bool, config: PeerConfig) -> None:
        from torchvision.datasets import ImageFolder
        from torchvision.datasets.folder import default_loader
        from torchvision.transforms import v2

        crop = [v2.RandomResizedCrop(config.size, antialias=True), v2.RandomHorizontalFlip()]
        transform = v2.Compose(crop if tensors else [*crop, v2.PILToTensor()])
        load = decode_tensor if tensors else default_loader
        dataset = ImageFolder(str(config.data.folder), transform, loader=load)
        self._loader = DataLoader(dataset, config.batch, shuffle=True, **worker_options(config))


def decode_tensor(path: str) -> Tensor:
    """Decode a JPEG file to uint8 `[3, H, W]`."""
    from torchvision.io import ImageReadMode, decode_jpeg, read_file

    # Without a mode a grayscale file would have one channel, and batches could not be stacked.
    return decode_jpeg(read_file(path), ImageReadMode.RGB)


class Timm(DataLoaderPeer):
    """`timm`, without its prefetcher.

    The prefetcher converts the batch to float and normalizes it, which is the device's work.
    """

    def __init__(self, config: PeerConfig) -> None:
        from timm.data import create_dataset, create_loader

        folder = str(config.data.folder)
        options = worker_options(config)
        # create_loader has no such option.
        context = options.pop("multiprocessing_context")
        # `.loader` is what the prefetcher wraps: a loader of uint8 batches. With
        # use_prefetcher=False the transform itself would convert to float and normalize.
        self._loader = create_loader(
            create_dataset("", root=folder, split="train", is_training=True),
            (3, config.size, config.size),
            config.batch,
            is_training=True,
            color_jitter=None,
            interpolation="bilinear",
            device=torch.device("cpu"),
            **options,
        ).loader
        self._loader.multiprocessing_context = context


# ------------------------------------------------------------------------- the published data path


def draw_samples(config: PeerConfig, epoch: int) -> list[list[Sample]]:
    """Return the samples of each batch of the plan's epoch, in its order."""
    plan, data, batch = config.plan(), config.data, config.batch
    ids = plan.permutation(epoch)
    boxes, flips = plan.crops(epoch, ids, data.heights[ids], data.widths[ids])
    rows = list(zip(ids.tolist(), boxes.astype(np.int64), flips.tolist(), strict=True))
    return [rows[at : at + batch] for at in range(0, len(rows), batch)]


class TokenLabeling(DataLoaderPeer):
    """`token-labeling`, with `labels` also its dense targets."""

    def __init__(self, labels: bool, config: PeerConfig) -> None:
        grid = max(1, config.size // PATCH) if labels else None
        collate = partial(collate_published, grid=grid, num_classes=config.data.num_classes)
        # The batches of an epoch: workers that outlive it get the next one's crops this way.
        self._config, self._batches = config, []
        self._loader = DataLoader(
            PublishedDataset(config.data, config.size),
            batch_sampler=self._batches,
            collate_fn=collate,
            **worker_options(config),
        )

    def batches(self, epoch: int) -> PeerBatches:
        self._batches[:] = draw_samples(self._config, epoch)
        return super().batches(epoch)


class PublishedDataset(Dataset):
    """Samples in the published order of operations.

    Pillow decodes the image, the map's file is read, the whole image and the map are flipped, and
    then the image is cropped.
    """

    def __init__(self, data: BenchmarkSet, size: int) -> None:
        self._paths, self._labels, self._size = data.paths, data.labels.tolist(), size
        self._maps = [f"{data.published}/{map_stem(path, whole=False)}.pt" for path in data.paths]

    def __getitem__(self, sample: Sample) -> tuple[np.ndarray, int, Tensor]:
        """Return uint8 `[3, size, size]`, the label, and the packed map float32 `[3, k, S, S]`."""
        index, (top, left, height, width), flip = sample
        label = self._labels[index]
        with open(self._paths[index], "rb") as file:
            image = Image.open(file).convert("RGB")
        score_map = torch.load(self._maps[index], weights_only=True).float()
        if flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            score_map = score_map.flip(-1)
            # The plan flips after cropping; this cuts the same pixels from the flipped image.
            left = image.width - left - width
        crop = image.crop((left, top, left + width, top + height))
        crop = crop.resize((self._size, self._size), Image.Resampling.BILINEAR)
        # As published: a third plane carries the box in columns 0 to 3 and the label in column 5.
        packed = torch.cat([score_map, torch.zeros_like(score_map[:1])])
        box = (top / image.height, left / image.width, height / image.height, width / image.width)
        packed[2, 0, 0, :4] = torch.tensor(box)
        packed[2, 0, 0, 5] = label
        return np.ascontiguousarray(np.asarray(crop).transpose(2, 0, 1)), label, packed


def collate_published(
    samples: list[tuple[np.ndarray, int, Tensor]], grid: int | None, num_classes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Stack images, labels, and the packed maps, or with a `grid` their dense targets."""
    image, label, packed = zip(*samples, strict=True)
    dense = torch.stack(packed)
    if grid is not None:
        dense = published_targets(dense, grid, num_classes)
    return torch.from_numpy(np.stack(image)), torch.tensor(label), dense


def published_targets(packed: Tensor, grid: int, num_classes: int) -> Tensor:
    """Build dense targets as TokenLabeling's collate function does.

    The targets are float32 `[N, K, 2 + grid * grid]`. `packed` is `[N, 3, k, S, S]`. Columns: the
    smoothed label, the crop's label, the tokens' labels in row-major order. The geometry is the
    published one with its error: crops are passed as (top, left, bottom, right) to an operator that
    takes (x, y, x, y). Classes that a map does not name stay at logit 0, and the softmax follows
    the pooling.
    """
    top, left, height, width = packed[:, 2, 0, 0, :4].unbind(1)
    # RoIAlign without `aligned` counts from the center of the first cell: half a cell less.
    corners = torch.stack([top, left, top + height, left + width], 1) * packed.shape[-1] - 0.5
    pooled = pool_maps(packed[:, 0], packed[:, 1], corners, num_classes, grid)
    off = SMOOTHING / num_classes
    on = 1 - SMOOTHING + off
    given = torch.full((len(packed), num_classes, 1), off)
    given.scatter_(1, packed[:, 2, 0, 0, 5].long().view(-1, 1, 1), on)
    # Not normalized again, as published: a token's target sums to 1 + SMOOTHING / K.
    target = torch.cat([given, pooled.softmax(1) * on + off], 2)
    # The published code mixes with a share of 1 even where nothing is mixed.
    return target * 1.0 + target.flip(0) * 0.0


def pool_maps(
    logit_NkSS: Tensor,
    class_NkSS: Tensor,
    corners_N4: Tensor,
    num_classes: int,
    grid: int,
    aligned: bool = False,
) -> Tensor:
    """Scatter each map to all classes and pool it in a box and in the box's grid x grid cells.

    The published code does the same. The result is `[N, K, 1 + grid * grid]`. A box is (x, y, x, y)
    in cells of the map. `aligned` is that of torchvision's RoIAlign.
    """
    from torchvision.ops import roi_align

    dense = logit_NkSS.new_zeros(len(logit_NkSS), num_classes, *logit_NkSS.shape[2:])
    # Image by image, as published: this loop is part of what is measured.
    for row, logit, named in zip(dense, logit_NkSS, class_NkSS, strict=True):
        row.scatter_(0, named.long(), logit)
    number = torch.arange(len(dense), dtype=dense.dtype, device=dense.device)
    boxes = torch.cat([number[:, None], corners_N4], 1)
    pooled = (roi_align(dense, boxes, cells, aligned=aligned) for cells in (1, grid))
    return torch.cat([part.flatten(2) for part in pooled], 2)


# ------------------------------------------------------------------------- image by image


class SimpleJpeg:
    """`simplejpeg`: in the calling thread, or on a pool.

    Each thread decodes into its own buffer, which is 1.4 times faster than a new one per image.
    """

    def __init__(self, config: PeerConfig) -> None:
        from simplejpeg import decode_jpeg  # pyright: ignore[reportMissingImports]

        self._decode, self._config, self._local = decode_jpeg, config, threading.local()
        self._largest = int((config.data.heights * config.data.widths).max()) * 3
        self._pool = ThreadPoolExecutor(config.threads) if config.threads > 1 else None

    def _pixels(self, encoded: bytes) -> np.ndarray:
        """Decode to uint8 `[H, W, 3]`, valid until this thread's next call."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = np.empty(self._largest, np.uint8)
        return self._decode(encoded, "RGB", buffer=self._local.buffer)

    def _fill(self, out: Tensor, sample: Sample) -> None:
        index, box, flip = sample
        top, left, height, width = box.tolist()
        pixels = self._pixels(Path(self._config.data.paths[index]).read_bytes())
        cut = torch.from_numpy(pixels[top : top + height, left : left + width])
        image, size = cut.permute(2, 0, 1)[None], (self._config.size, self._config.size)
        crop = F.interpolate(image, size, mode="bilinear", antialias=True)[0].permute(1, 2, 0)
        out.copy_(crop.flip(1) if flip else crop)

    def batches(self, epoch: int) -> PeerBatches:
        data, size = self._config.data, self._config.size

        def chunks() -> Iterator[tuple[list[Sample], Tensor, int]]:
            for samples in draw_samples(self._config, epoch):
                image = torch.empty(len(samples), size, size, 3, dtype=torch.uint8)
                for first in range(0, len(samples), CHUNK):
                    yield samples, image, first

        def fill(chunk: tuple[list[Sample], Tensor, int]) -> PeerBatch | None:
            samples, image, first = chunk
            end = first + CHUNK
            for out, sample in zip(image[first:end], samples[first:end], strict=True):
                self._fill(out, sample)
            # Chunks come back in order, so the batch is complete with its last one.
            if end < len(samples):
                return None
            label = torch.from_numpy(data.labels[[index for index, _, _ in samples]])
            return PeerBatch(len(samples), image, label, None)

        yield from filter(None, self._map(fill, chunks()))

    def _map(self, work: Callable, items: Iterable) -> Iterator:
        """Map in the calling thread, or on the pool."""
        if self._pool is None:
            return map(work, items)
        # AHEAD counts batches, ordered_map counts chunks.
        return ordered_map(work, items, self._pool, AHEAD * -(-self._config.batch // CHUNK))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


class FullDecode(SimpleJpeg):
    """`turbojpeg-full`: each whole JPEG is decoded into one buffer and left there.

    This is simplejpeg's own libjpeg-turbo, measured faster (2,050 images/s) than the system's
    tjDecompress2 (1,950) and torchvision's decode_jpeg (1,890), all three on one core and into
    memory that was touched before.
    """

    def __init__(self, config: PeerConfig) -> None:
        super().__init__(config)
        self._stock = Beton(config.data.stock)

    def batches(self, epoch: int) -> PeerBatches:
        ids = self._config.plan().permutation(epoch)
        chunks = np.array_split(ids, -(-len(ids) // CHUNK))

        def decode(chunk: np.ndarray) -> PeerBatch:
            for index in chunk.tolist():
                self._pixels(self._stock.image(index)[0])
            return PeerBatch(len(chunk), None, None, None)

        # Only the numbers of images are delivered: the pixels stay in the threads' buffers.
        return self._map(decode, chunks)


class NvjpegFull(Peer):
    """`nvjpeg-full`: torchvision decodes whole JPEGs on a GPU, a batch at a time."""

    def __init__(self, config: PeerConfig) -> None:
        self._config, self._stock = config, Beton(config.data.stock)

    def batches(self, epoch: int) -> PeerBatches:
        from torchvision.io import decode_jpeg

        for ids in self._config.plan().rank_rows(epoch).index:
            encoded = [bytearray(self._stock.image(index)[0]) for index in ids.tolist()]
            tensors = [torch.frombuffer(one, dtype=torch.uint8) for one in encoded]
            decode_jpeg(tensors, device="cuda")
            torch.cuda.synchronize()
            yield PeerBatch(len(ids), None, None, None)


# ------------------------------------------------------------------------- all peers


class Entry(NamedTuple):
    """How to build a peer, and its requirements."""

    build: Build
    package: str = ""  # to import
    remedy: str = ""  # how to install it
    probe: Callable[[], None] = lambda: None  # raises if the package is installed but cannot work
    maps: bool = False  # whether it reads score maps


def our_entries(kind: str, *needs: object) -> dict[str, Entry]:
    """Return the entries of one of our loaders, with and without score maps."""
    return {
        f"{kind}+labels": Entry(partial(OurLoader, kind, True), *needs, maps=True),
        kind: Entry(partial(OurLoader, kind, False), *needs),
    }


DALI = "nvidia.dali", "pip install nvidia-dali-cuda130, or -cuda120"
SIMPLEJPEG = "simplejpeg", "pip install simplejpeg"
NVIDIA = "nvidia.dali.plugin.pytorch", DALI[1]
PEERS = {
    **our_entries("ffcv"),
    "ffcv-2-crops+labels": Entry(partial(OurLoader, "ffcv", True, repeats=2), maps=True),
    "ffcv-2-crops": Entry(partial(OurLoader, "ffcv", False, repeats=2)),
    **our_entries("ffcv-planes"),
    **our_entries("folder"),
    **our_entries("dali-cpu", *DALI),
    **our_entries("dali-gpu", *DALI, require_gpu),
    "ffcv-stock": Entry(StockFfcv, "ffcv", "pip install ffcv==1.0.2 setuptools"),
    "nvidia-dali-cpu": Entry(partial(NvidiaDali, "cpu"), *NVIDIA),
    "nvidia-dali-gpu": Entry(partial(NvidiaDali, "gpu"), *NVIDIA, probe_nvidia_gpu),
    "torchvision": Entry(partial(Torchvision, False)),
    "torchvision-tensor": Entry(partial(Torchvision, True)),
    "timm": Entry(Timm),
    "token-labeling": Entry(partial(TokenLabeling, False), maps=True),
    "token-labeling+labels": Entry(partial(TokenLabeling, True), maps=True),
    "simplejpeg": Entry(SimpleJpeg, *SIMPLEJPEG),
    "turbojpeg-full": Entry(FullDecode, *SIMPLEJPEG),
    "nvjpeg-full": Entry(NvjpegFull, "torchvision.io", "run it where there is one", require_gpu),
}


def explain_missing(name: str) -> str | None:
    """Return why peer `name` cannot run here, in a few words; None if it can."""
    entry = PEERS[name]
    if not entry.package:
        return None
    try:
        importlib.import_module(entry.package)
        entry.probe()
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:
        # A native extension that does not fit this machine may raise anything: ImportError,
        # OSError, RuntimeError, ...
        return f"{entry.package} cannot load ({str(error).strip().splitlines()[0][:120]})"
    return None
