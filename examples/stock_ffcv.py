"""Token labels for a stock ffcv Loader: its batches, and the crop of each image, as our Batch.

Copy this file beside your script. ffcv draws crops inside its decoder and flips in an operation
after it, and neither is exposed. Here the decoder does both and returns (image, crop); two
pipelines start from it, one takes the images, the other the crops.

For ffcv 1.0.2 (`pip install ".[ffcv]"` in a checkout). Its limitations remain: crops differ in
every run, whatever its seed; the memory of a batch is overwritten once the next one is requested;
an exception in its thread leaves the consumer waiting forever. So nothing here raises in that
thread: the status of the decoder travels with the crop, and DenseLabels raises the error.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from ffcv.fields.rgb_image import IMAGE_MODES, ResizedCropRGBImageDecoder
from ffcv.libffcv import imdecode, resize_crop
from ffcv.pipeline import PipelineSpec
from ffcv.pipeline.allocation_query import AllocationQuery
from ffcv.pipeline.compiler import Compiler
from ffcv.pipeline.operation import Operation
from ffcv.pipeline.state import State
from ffcv.transforms import RandomHorizontalFlip, RandomResizedCrop, RandomTranslate, ToTensor
from torch import Tensor, nn

from densefeed.pipelines.batch import Batch, crop_batch
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.plan import RankRows
from densefeed.storage.beton_format import MAP_FIELDS
from densefeed.system.errors import UserError

# Length of a row of a crop table, int64: 0 sample id; 1 to 4 box in pixels (top, left, height,
# width); 5, 6 height and width of the stored image; 7 whether it was flipped after the crop; 8 the
# return value of the JPEG decoder (0: decoded without error; also for raw pixels); 9 the offset of
# the image in the file.
CROP = 10
# Transforms of ffcv that move pixels and do not expose how.
MOVERS = (RandomHorizontalFlip, RandomTranslate, RandomResizedCrop)


class ReportingDecoder(ResizedCropRGBImageDecoder):
    """An ffcv decoder that crops as `decoder` does, flips, and returns (images, crops).

    Args:
        decoder: RandomResizedCropRGBImageDecoder, CenterCropRGBImageDecoder, or another with
            `scale`, `ratio` and a `get_crop_generator`. The crops are those of this decoder, and
            ffcv's own filter resizes them.
        flip: probability of a left-right flip.

    Images are uint8 `[N, H, W, 3]`, crops int64 `[N, 10]`, see CROP.
    """

    def __init__(self, decoder: ResizedCropRGBImageDecoder, flip: float) -> None:
        super().__init__(decoder.output_size)
        self.scale, self.ratio = decoder.scale, decoder.ratio
        self._draw, self._flip = decoder.get_crop_generator, flip

    @property
    def get_crop_generator(self) -> Callable:
        return self._draw

    def declare_state_and_memory(
        self, previous_state: State
    ) -> tuple[State, tuple[AllocationQuery, ...]]:
        state, queries = super().declare_state_and_memory(previous_state)
        return state, (*queries, AllocationQuery((CROP,), np.dtype("<i8")))

    def generate_code(self) -> Callable:
        # numba compiles local variables in as constants; it cannot read attributes of this object.
        read, rows = self.memory_read, Compiler.get_iterator()
        jpeg, chance = IMAGE_MODES["jpg"], self._flip
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
                    # The whole image at full scale: libffcv's own crop and flip stay off.
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
                    # Without the copy, source and target would be the same memory.
                    images[row] = images[row, :, ::-1].copy()
                crop = crops[row]
                crop[0], crop[9] = sample, field["data_ptr"]
                crop[1], crop[2], crop[3], crop[4] = top, left, high, wide
                crop[5], crop[6], crop[7], crop[8] = height, width, flipped, status
            # The buffers hold a full batch, of which the last one may need fewer rows.
            return images[: len(batch_indices)], crops[: len(batch_indices)]

        # ffcv's Compiler then calls numba with parallel=True.
        decode.is_parallel = True
        return decode


class TakePart(Operation):
    """Select one of the two outputs of a ReportingDecoder: 0 images, 1 crops."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def declare_state_and_memory(self, previous_state: State) -> tuple[State, None]:
        crops = {"shape": (CROP,), "dtype": np.dtype("<i8")}
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
    """Build the `pipelines` of an ffcv Loader that also yields each image's crop.

    The crops, int64 `[N, 10]`, come after the fields of the file.

    Args:
        decoder: how images are cropped, see ReportingDecoder.
        flip: probability of a left-right flip, in place of RandomHorizontalFlip.
        transforms: further transforms of the images; default: ToTensor. They must not move pixels:
            labels would belong to other ones. UserError for those of ffcv that do.
        field: the images' field in the file.

    The score-map fields of a .beton packed by this project are switched off, because DenseLabels
    reads and checks them. Other fields are read as ffcv does by default, unless you add pipelines
    of your own (`crop_pipelines(...) | {"label": [...]}`).
    """
    for operation in transforms:
        if isinstance(operation, MOVERS):
            raise UserError(
                f"{type(operation).__name__} moves pixels and does not report how; remove it, and "
                "give crop_pipelines decoder and flip"
            )
    whole = ReportingDecoder(decoder, flip)
    images = [TakePart(0), *(transforms or [ToTensor()])]
    return {
        field: PipelineSpec(field, decoder=whole, transforms=images),
        **dict.fromkeys(MAP_FIELDS),
        "crop": PipelineSpec(whole, transforms=[TakePart(1), ToTensor()]),
    }


class DenseLabels:
    """Convert the output of an ffcv Loader with `crop_pipelines` into our Batch, with score maps.

    Args:
        data: the .beton that the Loader reads.
        maps: its score maps (HDF5), for a .beton that does not contain them; their rows are the
            samples of the .beton.

    UserError if there are no score maps, or if they are not those of `data`. Pass `score_maps`, the
    specification of the maps, to `sparse_targets`, and the targets of a grid of 1 and of the tokens
    to `densefeed.objectives.losses.token_labeling_loss`.
    """

    def __init__(self, data: str, maps: str | None = None) -> None:
        self.source = FfcvSource(data, maps)
        if self.source.score_maps is None:
            raise UserError(
                f"{data} has no score maps; give DenseLabels the HDF5 file that holds them, or "
                "pack them into it"
            )
        self.score_maps, self._data = self.source.score_maps, data

    def __call__(self, image: Tensor, label: Tensor, crop: Tensor) -> Batch:
        """Build the Batch of `image`, unchanged, `label` and `crop`.

        `image` is `[N, ...]`, `label` `[N]` or `[N, 1]`, and `crop` int64 `[N, 10]`, see CROP.
        Views, ids and maps have their own memory, on the CPU; image and label share the Loader's
        memory, so copy them to a GPU with `Batch.to`, or clone them, before you request the next
        batch. UserError for an image that ffcv could not decode completely (it would be black, or
        another image) and for a damaged score map.
        """
        crop_NC, label = crop.cpu().numpy(), label.reshape(len(crop), -1)[:, 0].long()
        self._check_file(crop_NC, label.cpu().numpy())
        ids, boxes, (height_N, width_N, flip_N) = crop_NC[:, 0], crop_NC[:, 1:5], crop_NC.T[5:8]
        for index in ids[crop_NC[:, 8] != 0].tolist():
            raise UserError(
                f"sample {index}, {self.source.where(index)}: ffcv cannot decode all of it; "
                f"{self.source.remedy}"
            )
        rows = RankRows(ids, np.zeros_like(ids), np.ones(len(ids), np.float32))
        maps = map(torch.from_numpy, self.source.maps(ids))
        return crop_batch(image, label, (boxes, flip_N, height_N, width_N), rows, list(maps))

    def _check_file(self, crop_NC: np.ndarray, label_N: np.ndarray) -> None:
        """Raise UserError if the Loader reads another file than ours.

        The maps would then belong to other images. The check compares offsets, sizes and labels. It
        cannot distinguish files of raw pixels that all have one size, with the same labels in the
        same order.
        """
        index_N, labels = crop_NC[:, 0], self.source.labels
        # Another file may have more samples than ours.
        if index_N.max() < len(labels):
            samples = self.source.begin(index_N).wait().samples
            place = [samples[name] for name in ("height", "width", "offset")]
            ours = np.stack([*place, labels[index_N]])
            if (ours == np.stack([*crop_NC[:, [5, 6, 9]].T, label_N])).all():
                return
        raise UserError(
            f"the Loader reads other images than {self._data} holds; give both the same file"
        )
