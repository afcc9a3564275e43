"""Keep the score maps of a whole dataset in device memory, so that batches carry only sample ids.

ImageNet-1k at S = 18, k = 5 takes 9.2 GB (8.3 GB without logsumexps, as in the published packs),
loaded before the first step.
"""

from functools import partial

import numpy as np
import torch

from densefeed.pipelines.batch import Batch, allocate_maps
from densefeed.pipelines.loader import Source
from densefeed.storage.score_maps import ScoreMaps
from densefeed.system.devices import free_memory
from densefeed.system.errors import UserError
from densefeed.system.progress import bar
from densefeed.system.terminal import print

# Samples per read: 29 MB at S = 18, k = 5.
CHUNK = 4096
# Share of the free memory that maps may take.
SPARE = 0.9


class ResidentMaps:
    """The maps of a source on `device`; called with a batch on that device, it adds the map fields.

    The fields equal bit for bit those that the loader would have streamed. Every map is checked
    while it is loaded; a damaged one raises UserError, whatever the loader's `on_bad_sample`.
    UserError is also raised, before anything is read, if the maps need more than SPARE of the
    device's free memory. Prints the memory they take to stdout.
    """

    def __init__(self, source: Source, device: torch.device) -> None:
        spec, count = source.score_maps, len(source.labels)
        needed, free = count * spec.nbytes, free_memory(device)
        if needed > SPARE * free:
            raise UserError(
                f"the score maps of {count:,} images take {needed / 1e9:.2f} GB on {device}, "
                f"of which {free / 1e9:.2f} GB are free; give "
                "--no-maps-on-device, which streams them with the batches, or choose a device with "
                "more memory"
            )
        print(
            f"score maps of {count:,} images: {needed / 1e9:.2f} GB on {device}, "
            f"{free / 1e9:.2f} GB were free"
        )
        fields = allocate_maps(count, spec, partial(torch.empty, device=device))
        for first in bar(range(0, count, CHUNK), "score maps"):
            rows = source.maps(np.arange(first, min(first + CHUNK, count)))
            for whole, part in zip(fields, rows, strict=True):
                whole[first : first + len(part)] = torch.from_numpy(part)
        # index_select does not support uint16, so classes are held as int16 with the same bits.
        self._fields = fields._replace(cls=fields.cls.view(torch.int16))

    def __call__(self, batch: Batch) -> Batch:
        """Add the map fields to a batch, selected by its `index`, without a host sync."""
        maps = ScoreMaps(*(whole.index_select(0, batch.index) for whole in self._fields))
        return batch.add_maps(maps._replace(cls=maps.cls.view(torch.uint16)))
