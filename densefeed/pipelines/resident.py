"""ResidentMaps: the score maps of a whole dataset on the device, so that a batch carries none and
names its samples only.

ImageNet-1k at S = 18, k = 5 takes 9.2 GB (8.3 GB without logsumexps, as the published packs), read
before the first step.
"""

import numpy as np
import torch

from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.loader import Source
from densefeed.system.devices import free_memory
from densefeed.system.errors import UserError
from densefeed.system.progress import bar

CHUNK = 4096  # samples read at once: 29 MB at S = 18, k = 5
SPARE = 0.9  # share of the free memory that maps may take


class ResidentMaps:
    """The maps of a source on `device`; calling it gives a batch of that device its map fields.

    The fields are those that the loader would have streamed, bit for bit. Every map is checked
    while it is loaded; a damaged one raises UserError whatever the loader does about bad samples.
    UserError too, before anything is read, if the maps take more than SPARE of the device's free
    memory. Says on stdout what it takes.
    """

    def __init__(self, source: Source, device: torch.device) -> None:
        spec, count = source.score_maps, len(source.labels)
        needed, free = count * bytes_of_map(spec), free_memory(device)
        if needed > SPARE * free:
            raise UserError(
                f"the score maps of {count:,} images take {needed / 1e9:.2f} GB on {device}, "
                f"of which {free / 1e9:.2f} GB are free; stream them with the batches instead, or give a device with more memory"
            )
        print(
            f"score maps of {count:,} images: {needed / 1e9:.2f} GB on {device}, {free / 1e9:.2f} GB were free"
        )
        cells = (count, spec.side, spec.side)
        self._logit = torch.empty(*cells, spec.top_k, dtype=torch.float16, device=device)
        # The bits of uint16, of which index_select knows nothing.
        self._class = torch.empty(*cells, spec.top_k, dtype=torch.int16, device=device)
        self._lse = torch.empty(cells, dtype=torch.float16, device=device)
        self._window = torch.empty(count, 4, dtype=torch.float32, device=device)
        for first in bar(range(0, count, CHUNK), "score maps"):
            rows = source.maps(np.arange(first, min(first + CHUNK, count)))
            parts = rows.logit, rows.cls.view(np.int16), rows.lse, rows.window
            for whole, part in zip(
                (self._logit, self._class, self._lse, self._window), parts, strict=True
            ):
                whole[first : first + len(part)] = torch.from_numpy(np.ascontiguousarray(part))

    def __call__(self, batch: Batch) -> Batch:
        """The batch with its map fields, by `index`; nothing waits for the device."""
        logit, named, lse, window = (
            whole.index_select(0, batch.index)
            for whole in (self._logit, self._class, self._lse, self._window)
        )
        return batch._replace(
            map_logit=logit, map_class=named.view(torch.uint16), map_lse=lse, window=window
        )


def bytes_of_map(spec: ScoreMapSpec) -> int:
    """What one image's map takes: logits and classes, logsumexps, Window."""
    return spec.side**2 * (4 * spec.top_k + 2) + 16
