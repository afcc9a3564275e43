"""Token labels for people with a stock ffcv Loader of their own: its batches, and the crop of each
image, as our Batch.

ffcv draws crops inside its decoder and flips in an operation after it, and tells nobody. Here the
decoder does both and returns (image, crop); two pipelines begin at it, one picks the images, the
other the crops:

    crops = crop_pipelines(RandomResizedCropRGBImageDecoder((224, 224)), flip=0.5)
    loader, labels = Loader(path, batch_size=64, pipelines=crops), DenseLabels(path)
    for image, label, crop in loader:
        targets = sparse_targets(labels(image, label, crop), labels.score_maps, grid=14)

For ffcv 1.0.2 (`pip install "densefeed[ffcv]"`), whose faults stay: its crops are drawn anew in
every run, whatever its seed; memory of a batch is written again after the next one was asked for;
an exception in its thread leaves the consumer waiting, so nothing here raises there: what a decoder
finds wrong travels with the crop, and DenseLabels raises it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from densefeed.pipelines.batch import Batch
from densefeed.pipelines.ffcv import MAP_FIELDS, FfcvSource
from densefeed.storage.geometry import crop_views, visible_boxes
from densefeed.storage.score_maps import ScoreMaps
from densefeed.system.errors import UserError

try:
    from ffcv.fields.rgb_image import IMAGE_MODES, ResizedCropRGBImageDecoder
    from ffcv.libffcv import imdecode, resize_crop
    from ffcv.pipeline import PipelineSpec
    from ffcv.pipeline.allocation_query import AllocationQuery
    from ffcv.pipeline.compiler import Compiler
    from ffcv.pipeline.operation import Operation
    from ffcv.pipeline.state import State
    from ffcv.transforms import RandomHorizontalFlip, RandomResizedCrop, RandomTranslate, ToTensor
except ImportError as error:
    raise ImportError(
        f'the bridge for ffcv needs ffcv ({error}); pip install "densefeed[ffcv]"'
    ) from error

# A row of a crop table, int64: sample id, box and size of the stored image in pixels, whether it
# was flipped after it was cut (0, 1), what the JPEG's decoder returned (0: decoded whole, and for
# raw pixels), and where in the file the image stands.
CROP = (
    "index",
    "top",
    "left",
    "height",
    "width",
    "image_height",
    "image_width",
    "flip",
    "status",
    "offset",
)
# of ffcv: they move pixels and say nothing
MOVERS = (RandomHorizontalFlip, RandomTranslate, RandomResizedCrop)
# The words in the names of torchvision's transforms, version 1 and 2, that move pixels; its
# policies may.
MOVING = (
    "Flip",
    "Crop",
    "Affine",
    "Rotation",
    "Perspective",
    "Elastic",
    "Resize",
    "ShortestSize",
    "Pad",
    "Zoom",
    "Scale",
    "RandAugment",
    "AutoAugment",
    "TrivialAugment",
    "AugMix",
)


class ReportingDecoder(ResizedCropRGBImageDecoder):
    """An ffcv decoder that crops as `decoder` does, flips with probability `flip`, and returns
    (images, crops).

    Args:
        decoder: RandomResizedCropRGBImageDecoder, CenterCropRGBImageDecoder, or another with
            `scale`, `ratio` and a `get_crop_generator`; what it cuts is what it would have cut,
            resized by ffcv's own filter.
        flip: probability of a left-right flip.

    Images are uint8 `[N, H, W, 3]`, crops int64 `[N, 10]`, a CROP each.
    """

    def __init__(self, decoder: ResizedCropRGBImageDecoder, flip: float) -> None:
        super().__init__(decoder.output_size)
        self.scale, self.ratio, self._draw, self._flip = (
            decoder.scale,
            decoder.ratio,
            decoder.get_crop_generator,
            flip,
        )

    @property
    def get_crop_generator(self) -> Callable:
        return self._draw

    def declare_state_and_memory(
        self, previous_state: State
    ) -> tuple[State, tuple[AllocationQuery, ...]]:
        state, queries = super().declare_state_and_memory(previous_state)
        return state, (*queries, AllocationQuery((len(CROP),), np.dtype("<i8")))

    def generate_code(self) -> Callable:
        # numba takes these for constants; it knows no attributes of ours.
        read, rows, jpeg, chance = (
            self.memory_read,
            Compiler.get_iterator(),
            IMAGE_MODES["jpg"],
            self._flip,
        )
        decompress, resize, draw = (
            Compiler.compile(code) for code in (imdecode, resize_crop, self._draw)
        )
        scale, ratio = (
            np.array(pair) if isinstance(pair, tuple) else pair for pair in (self.scale, self.ratio)
        )

        def decode(batch_indices, storage, metadata, storage_state):
            images, scratch, crops = storage
            for row in rows(len(batch_indices)):
                sample = batch_indices[row]
                field = metadata[sample]
                encoded = read(field["data_ptr"], storage_state)
                height, width = np.uint32(field["height"]), np.uint32(field["width"])
                status = 0
                if field["mode"] == jpeg:
                    whole = scratch[row]
                    status = decompress(
                        encoded, whole, height, width, height, width, 0, 0, 1, 1, False, False
                    )
                    pixels = whole.reshape(-1)[: 3 * height * width].reshape(height, width, 3)
                else:
                    pixels = encoded.reshape(height, width, 3)
                top, left, high, wide = draw(height, width, scale, ratio)
                resize(pixels, top, top + high, left, left + wide, images[row])
                flipped = np.random.rand() < chance
                if flipped:
                    images[row] = images[row, :, ::-1].copy()
                crops[row, 0] = sample
                crops[row, 1], crops[row, 2], crops[row, 3], crops[row, 4] = top, left, high, wide
                crops[row, 5], crops[row, 6], crops[row, 7], crops[row, 8] = (
                    height,
                    width,
                    flipped,
                    status,
                )
                crops[row, 9] = field["data_ptr"]
            return images[: len(batch_indices)], crops[: len(batch_indices)]

        decode.is_parallel = True
        return decode


class Part(Operation):
    """One of the two things that a ReportingDecoder returns: 0 images, 1 crops."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def declare_state_and_memory(self, previous_state: State) -> tuple[State, None]:
        crops = {"shape": (len(CROP),), "dtype": np.dtype("<i8")}
        return replace(previous_state, **(crops if self._number else {})), None

    def generate_code(self) -> Callable:
        number = self._number

        def part(both, _):
            return both[number]

        return part


def crop_pipelines(
    decoder: ResizedCropRGBImageDecoder,
    flip: float = 0.5,
    transforms: Sequence[Operation | nn.Module] = (),
    field: str = "image",
) -> dict[str, PipelineSpec | None]:
    """`pipelines` of an ffcv Loader that also yields each image's crop, int64 `[N, 10]`, after the
    fields of the file.

    Args:
        decoder: how images are cropped, see ReportingDecoder.
        flip: probability of a left-right flip, in place of RandomHorizontalFlip.
        transforms: what else is done to images; default: ToTensor. They must not move pixels:
            UserError for those of ffcv's and torchvision's that do.
        field: the images' field in the file.

    Fields of score maps, which a .beton of ours has, are switched off: DenseLabels reads them,
    checked. Other fields are read as ffcv reads them unless you add pipelines of your own
    (`crop_pipelines(...) | {"label": [...]}`).
    """
    if not isinstance(decoder, ResizedCropRGBImageDecoder):
        raise UserError(
            f"{type(decoder).__name__} does not crop to one size; give RandomResizedCropRGBImageDecoder or CenterCropRGBImageDecoder"
        )
    for operation in transforms:
        name, home = type(operation).__name__, type(operation).__module__
        if isinstance(operation, MOVERS) or (
            home.startswith("torchvision.") and any(word in name for word in MOVING)
        ):
            raise UserError(
                f"{name} moves pixels and does not say where; leave it out, and give crop_pipelines decoder and flip"
            )
    whole = ReportingDecoder(decoder, flip)
    return {
        field: PipelineSpec(
            field, decoder=whole, transforms=[Part(0), *(transforms or [ToTensor()])]
        ),
        **dict.fromkeys(MAP_FIELDS),
        "crop": PipelineSpec(whole, transforms=[Part(1), ToTensor()]),
    }


class DenseLabels:
    """Makes our Batch, score maps included, of what an ffcv Loader with `crop_pipelines` yields.

    Args:
        data: the .beton that the Loader reads.
        maps: its score maps (HDF5), for a .beton that does not carry them; their rows are the
            samples of the .beton.
        on_bad_sample: `raise` stops at an image that ffcv could not decode whole (stock ffcv would
            show it black, or as another image) and at a damaged score map; `skip` gives it weight 0
            and all else of another sample of its batch, and counts it in `skipped`.

    UserError if there are no score maps, or if they are not those of `data`. `spec` is what
    `sparse_targets` wants to know of the maps, `source` what `ResidentMaps` does.
    """

    def __init__(
        self,
        data: Path | str,
        maps: Path | str | None = None,
        on_bad_sample: Literal["raise", "skip"] = "raise",
    ):
        self.source = FfcvSource(Path(data), None if maps is None else Path(maps))
        if self.source.score_maps is None:
            raise UserError(
                f"{data} has no score maps; give DenseLabels the HDF5 file that holds them, or pack them into it"
            )
        self.score_maps, self.on_bad_sample, self.skipped, self._data = (
            self.source.score_maps,
            on_bad_sample,
            0,
            data,
        )

    def __call__(self, image: Tensor, label: Tensor, crop: Tensor) -> Batch:
        """The Batch of `image` `[N, ...]`, as it is, `label` `[N]` or `[N, 1]`, and `crop` int64
        `[N, 10]`, a CROP each.

        Views, ids and maps are memory of its own, on the CPU; image and label share the Loader's
        memory, so `Batch.to` a GPU, or clone them, before the next batch is asked for. UserError
        for what cannot be read, see `on_bad_sample`.
        """
        if not len(crop):
            raise UserError("the Loader gave an empty batch; leave it out")
        crop_NC, label = crop.cpu().numpy(), label.reshape(len(crop), -1)[:, 0].long()
        self._check_file(crop_NC, label.cpu().numpy())
        bad, maps = self._read(crop_NC)
        weight, shown = np.ones(len(crop_NC), np.float32), np.arange(len(crop_NC))
        if bad:
            good = next((row for row in shown.tolist() if row not in bad), None)
            if self.on_bad_sample == "raise" or good is None:
                raise UserError(next(iter(bad.values())))
            rows = list(bad)
            weight[rows], shown[rows] = 0, good
            image, label, maps = image[shown], label[shown], self.source.maps(crop_NC[shown, 0])
            self.skipped += len(rows)
        crop_NC = crop_NC[shown]
        index_N, box_tlhw_N4, height_N, width_N, flip_N = (
            crop_NC[:, 0],
            crop_NC[:, 1:5],
            crop_NC[:, 5],
            crop_NC[:, 6],
            crop_NC[:, 7],
        )
        view = crop_views(box_tlhw_N4, flip_N > 0, height_N, width_N)
        tensors = (torch.from_numpy(np.ascontiguousarray(part)) for part in maps)
        fields = dict(zip(("map_logit", "map_class", "map_lse", "window"), tensors, strict=True))
        return Batch(
            image=image,
            label=label,
            view=torch.from_numpy(view),
            shown=torch.from_numpy(visible_boxes(view)),
            index=torch.from_numpy(index_N),
            repeat=torch.zeros(len(index_N), dtype=torch.long),
            weight=torch.from_numpy(weight),
            **fields,
        )

    def _check_file(self, crop_NC: np.ndarray, label_N: np.ndarray) -> None:
        """UserError if places, sizes or labels of the Loader's images are not those of our file:
        their maps would be other images'. Of files of raw pixels all of one size, with the same
        labels in the same order, this tells nothing apart.
        """
        index_N, known = crop_NC[:, 0], len(self.source.labels)
        if index_N.max() < known:
            samples = self.source.begin(index_N).wait().samples
            known_N4 = np.stack(
                [
                    samples["height"],
                    samples["width"],
                    self.source.labels[index_N],
                    samples["offset"],
                ],
                1,
            )
            same = known_N4 == np.stack([*crop_NC[:, 5:7].T, label_N, crop_NC[:, 9]], 1)
            if same.all():
                return
        raise UserError(
            f"the Loader reads other images than {self._data} holds; give both the same file"
        )

    def _read(self, crop_NC: np.ndarray) -> tuple[dict[int, str], ScoreMaps | None]:
        """Rows of images or maps that cannot be read, and why; the maps, if all of them can."""
        ids, maps = crop_NC[:, 0], None
        bad = {
            row: f"sample {ids[row]}, {self.source.where(ids[row])}: ffcv cannot decode it whole; {self.source.remedy}"
            for row in np.flatnonzero(crop_NC[:, 8]).tolist()
        }
        try:
            maps = self.source.maps(ids)
        except UserError:
            for row, index in enumerate(ids.tolist()):
                try:
                    self.source.check_map(index)
                except UserError as error:
                    bad.setdefault(row, f"sample {index}: {error}")
        return bad, maps
