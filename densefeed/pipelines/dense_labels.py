"""Score maps as labels of any crops of their images, for a dataset, loader and loop of your own."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from densefeed.pipelines.batch import Batch
from densefeed.pipelines.folder import locate_rows, map_spec, read_parts
from densefeed.pipelines.masks import SoftMasks
from densefeed.pipelines.shapes import Grid, Shape, split_size
from densefeed.pipelines.targets import (
    PLAIN,
    SparseTargets,
    TargetRules,
    palette_maps,
    sparse_targets,
)
from densefeed.storage.dataset_items import DatasetItems, name_dataset
from densefeed.storage.geometry import visible_boxes
from densefeed.storage.images import Images
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.storage.selection import find_rows
from densefeed.system.errors import UserError, first_line, is_out_of_memory

# N images   T tokens   K classes
Ids = Sequence[int] | Sequence[str] | np.ndarray | Tensor


class StoredLabels:
    """The score maps of a store: the correct label of every token of any crop of its images.

    Rows are read from the file when they are needed, in any order, each checked against its
    checksum. An object can be used in the worker processes of a DataLoader, forked or spawned.

    Attributes:
        num_classes, class_names: of the labels.
        labels: the image labels, int64 `[N]`.
    """

    def __init__(self, path: str | Path, dataset: Any = None) -> None:
        self._store = ScoreMapStore(path)
        if dataset is not None:
            name = name_dataset(dataset)
            images = Images(Path(name), DatasetItems(dataset, name), split="train")
            find_rows(self._store, images, images.root)
        self.path, self._spec = self._store.path, map_spec(self._store)
        self.num_classes = self._spec.num_classes
        self.class_names = list(self._store.header.class_names)
        self.labels = self._store.labels

    def __len__(self) -> int:
        """Number of images."""
        return len(self._store)

    def __reduce__(self) -> tuple:
        # A spawned process opens the file itself.
        return StoredLabels, (self.path,)

    def close(self) -> None:
        """Close the file."""
        self._store.close()

    def __enter__(self) -> "StoredLabels":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @cached_property
    def _rows_by_path(self) -> dict[str, int]:
        """The row of each path; -1 for a path of several rows."""
        rows: dict[str, int] = {}
        for row, path in enumerate(self._store.paths()):
            rows[path] = -1 if path in rows else row
        return rows

    def find_rows(self, ids: Ids) -> np.ndarray:
        """Return the rows of images, int64 `[N]`.

        `ids` are numbers in the order of labeling, or paths as in the store, relative to the folder
        of the class folders (`cat/0.jpg`). UserError for one that is not in the store.
        """
        try:
            ids = np.asarray(ids.detach().cpu() if isinstance(ids, Tensor) else ids)
        # Lists of different lengths, types that NumPy has not, as bfloat16, and tensors of meta.
        except (TypeError, ValueError, NotImplementedError) as error:
            raise UserError(
                f"ids are a {type(ids).__name__} of different lengths or of a type that NumPy does "
                "not know; give one number or path per image, [N]"
            ) from error
        if ids.ndim == 1 and not len(ids):
            return ids.astype(np.int64)
        if ids.ndim != 1:
            raise UserError(f"ids of shape {ids.shape}; give one number or path per image, [N]")
        if ids.dtype.kind in "US":
            return np.array([self._find_row(path) for path in ids.tolist()], np.int64)
        if ids.dtype.kind not in "iu":
            raise UserError(f"ids of {ids.dtype}; give whole numbers, or paths as in {self.path}")
        bad = (ids < 0) | (ids >= len(self))
        if bad.any():
            raise UserError(
                f"{self.path} has no map of image {ids[bad.argmax()]}: it holds {len(self):,}, "
                "numbered from 0; label the dataset that is trained on"
            )
        return ids.astype(np.int64)

    def _find_row(self, path: str) -> int:
        row = self._rows_by_path.get(path)
        if row is None:
            known = next(iter(self._rows_by_path))
            raise UserError(
                f"{self.path} has no map of {path}; paths in it are like {known}: give one of them"
            )
        if row < 0:
            raise UserError(
                f"{self.path} has several maps of {path}; give their numbers instead of the path"
            )
        return row

    def targets(
        self,
        ids: Ids,
        view: Tensor,
        grid: Grid | list[Grid] = 14,
        rules: TargetRules = PLAIN,
        device: torch.device | str | None = None,
    ) -> SparseTargets | list[SparseTargets]:
        """Return the targets of every token of crops, row-major.

        They are those of a loader of `open_loader` for the same View, to the bit.

        Args:
            ids: the images, see `find_rows`.
            view: `[N, 2, 3]`, takes a point (x, y, 1) of the network's input to one of the stored
                image, both from (0, 0) at the top-left corner to (1, 1); or collated
                `densefeed.View`s, `[N, 2, 6]`, which also know what a shift or rotation filled.
            grid: tokens along a side of the input, or (rows, columns); 1 is the class token. Of a
                list of these the maps are read once, and a list is returned.
            rules: smoothing, temperature, geometry and what counts outside.
            device: where targets are computed; default: that of `view`. The host waits
                for the copy of a view on a GPU, so give views on the CPU and the device.

        Raises UserError for an image without a map, a damaged map, and a view that is not affine
        or shows a region without area.
        """
        grids = grid if isinstance(grid, list) else [grid]
        batch = self._read(ids, view, rules, device)
        spread = palette_maps(batch, self._spec, rules)
        found = [sparse_targets(batch, self._spec, one, rules, spread) for one in grids]
        return found if isinstance(grid, list) else found[0]

    def soft_masks(
        self,
        ids: Ids,
        view: Tensor,
        size: int | Shape,
        rules: TargetRules = PLAIN,
        device: torch.device | str | None = None,
    ) -> SoftMasks:
        """Return the targets of every pixel of crops of `size` for `sparse_loss`.

        `size` is (height, width), or the side of a square. The targets are those of `targets` with
        a grid of that size, whose arguments the others are; but they are computed only in the loss,
        a few rows of pixels at a time.
        """
        size = split_size(size)
        return SoftMasks(self._read(ids, view, rules, device), self._spec, size, rules)

    def _read(
        self, ids: Ids, view: Tensor, rules: TargetRules, device: torch.device | str | None
    ) -> Batch:
        """Read maps for views, as a batch without images on the device; see `targets`.

        UserError for arguments of other types, all of which are checked here.
        """
        if not isinstance(rules, TargetRules):
            raise UserError(
                f"rules is a {type(rules).__name__}; give densefeed.TargetRules, e.g. "
                "TargetRules(smoothing=0.1)"
            )
        rows = self.find_rows(ids)
        matrix, shown = split_view(view, len(rows))
        maps, failed = read_parts(locate_rows(self._store, rows), self._spec)
        for row in rows[failed].tolist():
            # Raises the reason. A map that failed once and now reads well has none to give.
            self._store.checked_rows(np.array([row]))
            raise UserError(f"{self.path}: row {row} cannot be read; copy the file again")
        matrix_N23 = matrix.float()
        aligned = not matrix_N23[:, [0, 1], [1, 0]].any()
        batch = Batch(
            image=torch.empty(len(rows), 0, dtype=torch.uint8),
            label=torch.from_numpy(self.labels[rows]),
            view=matrix_N23,
            shown=shown.float(),
            index=torch.from_numpy(rows),
            repeat=torch.zeros(len(rows), dtype=torch.int64),
            weight=torch.ones(len(rows), dtype=torch.float32),
            map_logit=torch.from_numpy(maps.logit),
            map_class=torch.from_numpy(maps.cls),
            map_lse=torch.from_numpy(maps.lse),
            window=torch.from_numpy(maps.window),
            axis_aligned=aligned,
        )
        try:
            placed = batch.to(view.device if device is None else device)
            if placed.view.is_meta:
                raise NotImplementedError("tensors of meta have no numbers")
            return placed
        except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
            if is_out_of_memory(error):
                raise
            raise UserError(
                f"device {device!r} cannot be used here ({first_line(error)}); give cpu, or cuda "
                "where there is a GPU"
            ) from error


def split_view(view: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return matrices `[N, 2, 3]` on the CPU and what is shown of the images, `[N, 4]`, of views.

    UserError unless `view` is of `count` images, affine and of an area.
    """
    if not isinstance(view, Tensor) or view.shape not in ((count, 2, 3), (count, 2, 6)):
        found = tuple(view.shape) if isinstance(view, Tensor) else type(view).__name__
        raise UserError(
            f"view is {found}; for {count} images give an affine view, a tensor [{count}, 2, 3] "
            "from the network's input to the image, or the collated Views of a transform"
        )
    if view.is_meta or view.layout != torch.strided or not view.is_floating_point():
        raise UserError("view has no numbers, or none that are real; give a dense tensor of floats")
    if not count:
        raise UserError("there are no ids; give one image at least")
    view = view.detach().as_subclass(Tensor).cpu()
    matrix = view[:, :, :3]
    area = torch.linalg.det(matrix[:, :, :2].double()).abs()
    finite = view.flatten(1).isfinite().all(1)
    bad = ~(finite & (area >= 1e-12))
    if bad.any():
        number = int(bad.int().argmax())
        fault = "shows no area of its image; crop and warp it less"
        if not finite[number]:
            fault = "has numbers that are not finite; compute it again, e.g. from View.identity"
        raise UserError(f"view {number} of the batch {fault}")
    if view.shape[2] == 6:
        return matrix, view[:, :, 3:5].permute(0, 2, 1).flip(2).flatten(1)
    return matrix, torch.from_numpy(visible_boxes(matrix.float().numpy()))


def open_score_maps(path: str | Path, dataset: Any = None) -> StoredLabels:
    """Open a store of score maps for a loop of your own: an .h5 file or a folder of shards.

    `targets` returns the labels of any crops of its images, from nothing but their numbers or paths
    and affine views: no loader, no Batch and no teacher. `dataset` is the object that
    `densefeed.label` labeled; it is compared with the store: number of items, labels and pixels of
    32 items.

    Raises UserError for a file that is missing, damaged or not finished, and for another dataset.
    """
    return StoredLabels(path, dataset)
