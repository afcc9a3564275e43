"""A teacher: one or several networks that look at an image, once or in several views or tiles, and
say what its cells show.

It says which pictures it wants of an image (`looks`), which part of the image the map covers
(`window`), and makes one map of the pictures (`forward`). Who calls it cuts the pictures out;
`prepare` does so with Pillow.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.relabel.class_map import ClassMap
from densefeed.relabel.network import Network
from densefeed.relabel.rendering import render
from densefeed.storage.geometry import TLBR, Geometry, TeacherView, crop_in_pixels, teacher_window
from densefeed.system.errors import UserError

# N images   L looks, view by view and in each tile by tile   S cells along a map's side, s along a tile's   K classes

# What the views are moved by, in cells down and right. Each is shown as it is and mirrored: the
# second view is the first's mirror.
SHIFTS = ((0, 0), (1, 1), (-1, -1), (1, -1), (-1, 1), (1, 0), (-1, 0), (0, 1), (0, -1))
MOST_VIEWS = 2 * len(SHIFTS)
OVERLAP = 1 / 4  # of a tile's side


class Teacher(nn.Module):
    """Networks that give logits for every cell of an image.

    `geometry`: `squash` shows the whole image, its aspect ratio lost; `center-crop` its center
    square; `letterbox` the whole image on a square of the teacher's mean color (cells of that are
    in the map, and no token is labeled by them); `tile` the whole image, squashed, in `tiles` x
    `tiles` squares that overlap by about a quarter. A map of tiles has S = tiles * s - (tiles - 1)
    * o cells a side, where a tile has s and o is s / 4 rounded to an even number, at least 2; each
    overlap is cut in its middle, so o / 2 cells beside a tile's inner edge, which lack half of
    their surroundings, are not used.

    `views` looks are averaged: the picture and its mirror, then both moved by a cell in one of
    eight directions. Every map is mirrored and moved back first. Where a moved picture reaches
    beyond the image it shows the mean color; cells that only some views cover are averaged over
    these. `others` are further members of an ensemble; maps of fewer cells are resampled, bilinear,
    to the largest. All members stay on the device. All see the same pictures, of the largest
    member's size and by its filter; a smaller member resizes them on the device, antialiased, by
    its own (Pillow's rounding to 8 bits comes in between).

    What is averaged, over views and members, are probabilities: a token's target is a mean of
    probabilities too (targets.py), and a mean of logits would follow whichever member has the
    larger ones. The mean logsumexp is added back, so that maps that agree come out as they were and
    zero-logit stores keep their scale. The published generators average nothing.

    Args:
        model, input_size, config, class_map, name: of the first network, see Network.
        views: 1 to 18.
        tiles: along a side, with `tile` at least 2 and else 1.
        others: the other networks, of the same classes.

    Raises UserError for numbers of views or tiles that cannot be.
    """

    def __init__(
        self,
        model: nn.Module,
        input_size: int,
        geometry: Geometry,
        config: dict,
        *,
        class_map: ClassMap | None = None,
        name: str = "",
        views: int = 1,
        tiles: int = 1,
        others: Sequence[Network] = (),
    ) -> None:
        super().__init__()
        if not 1 <= views <= MOST_VIEWS:
            raise UserError(
                f"--views {views} cannot be; take 1 to {MOST_VIEWS}, 2 being the image and its mirror"
            )
        if (geometry == "tile") != (tiles > 1) or tiles < 1:
            raise UserError(
                f"--geometry {geometry} cannot have --tiles {tiles}; tile takes 2 and more, the others take 1"
            )
        self.networks = nn.ModuleList(
            [Network(model, input_size, config, class_map, name), *others]
        )
        largest = max(self.networks, key=lambda network: network.input_size)
        self.input_size, self.interpolation = largest.input_size, largest.interpolation
        # 0 to 255, of what is beyond an image
        self.fill = tuple(round(level) for level in largest.mean.flatten().tolist())
        self.window_geometry, self.views, self.tiles = geometry, views, tiles
        self.geometry = f"tile {tiles} x {tiles}" if geometry == "tile" else geometry
        self.cells = 0  # s; known after the first forward

    @property
    def model(self) -> nn.Module:
        """The network, or all of an ensemble: what the hash of the weights is over."""
        return (
            self.networks[0].model
            if len(self.networks) == 1
            else nn.ModuleList(network.model for network in self.networks)
        )

    @property
    def mean(self) -> Tensor:
        """The first network's mean color, 0 to 255, `[1, 3, 1, 1]`, on the device that all are
        on.
        """
        return self.networks[0].mean

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of an image's looks: (L, size, size, 3)."""
        return self.views * self.tiles**2, self.input_size, self.input_size, 3

    def window(self, height: int, width: int) -> TLBR:
        """The Window of the map of an image of these pixels."""
        return teacher_window(self.window_geometry, height, width)

    def looks(self, height: int, width: int) -> list[TeacherView]:
        """The pictures to show of an image of these pixels: L of them, view by view and in each
        tile by tile, row-major.
        """
        left, top, right, bottom = crop_in_pixels(self.window(height, width), height, width)
        if self.views <= 2 and self.tiles == 1:
            return [
                TeacherView((left, top, right, bottom), flip)
                for flip in (False, True)[: self.views]
            ]
        if not self.cells:
            self._count_cells()
        side = self.tiles * self.cells - (self.tiles - 1) * self.overlap
        across, down = (right - left) / side, (bottom - top) / side  # a cell
        looks = []
        for (row, column), flip in _views(self.views):
            for tile in range(self.tiles**2):
                y, x = (at * (self.cells - self.overlap) for at in divmod(tile, self.tiles))
                ends = x + column, y + row, x + column + self.cells, y + row + self.cells
                box = (
                    start + end * cell
                    for start, end, cell in zip(
                        (left, top) * 2, ends, (across, down) * 2, strict=True
                    )
                )
                # A whole pixel stays one, so that nothing beyond it is read.
                looks.append(TeacherView(tuple(round(edge, 6) for edge in box), flip))
        return looks

    def _count_cells(self) -> None:
        """Ask the networks: what they are shown depends on how many cells they give."""
        try:
            with torch.inference_mode():
                self._score(
                    torch.zeros(1, *self.shape[1:], dtype=torch.uint8, device=self.mean.device)
                )
        except torch.OutOfMemoryError:
            raise
        except (AssertionError, RuntimeError) as error:
            said = str(error).partition("\n")[0] or type(error).__name__
            names = " and ".join(network.name for network in self.networks)
            raise UserError(
                f"{names} cannot be shown images of {self.input_size} px ({said}); choose another --input-size"
            ) from error

    @property
    def overlap(self) -> int:
        """Cells that neighboring tiles share; even, so that its middle lies between two."""
        return max(2, 2 * round(self.cells * OVERLAP / 2))

    def prepare(self, image: Image.Image) -> tuple[np.ndarray, TLBR]:
        """The pictures of an image, uint8 `[L, size, size, 3]`, and the Window of its map."""
        pictures = np.empty(self.shape, np.uint8)
        return pictures, render(image, self, pictures)

    # and not inference_mode, within which torch.compile (2.15) fails on a slice of the input
    @torch.no_grad()
    def forward(self, image_NLHW3: Tensor) -> Tensor:
        """Logits of every cell, float32 `[N, S, S, K]`, of the looks at images, uint8 `[N, L, size,
        size, 3]`.

        Looks pass the networks one by one: N pictures at a time, whatever L is.
        """
        if image_NLHW3.shape[1:] != self.shape:
            raise ValueError(f"pictures are {tuple(image_NLHW3.shape[1:])}, not {self.shape}")
        if self.views == 1 and self.tiles == 1:
            return self._score(image_NLHW3[:, 0])
        looks = (image_NLHW3[:, look] for look in range(self.shape[0]))
        sums = [Mean() for _ in range(self.tiles**2)]
        for shift, flip in _views(self.views):
            for mean in sums:
                logits_NssK = self._score(next(looks))
                mean.add(logits_NssK.flip(2) if flip else logits_NssK, shift)
        return self._stitched([mean.logits() for mean in sums])

    def _score(self, image_NHWC: Tensor) -> Tensor:
        """The members' mean of one look, `[N, s, s, K]`."""
        maps = [network(image_NHWC) for network in self.networks]
        self.cells = max(logits.shape[1] for logits in maps)
        if len(maps) == 1:
            return maps[0]
        classes = {
            network.name: logits.shape[3]
            for network, logits in zip(self.networks, maps, strict=True)
        }
        if len(set(classes.values())) > 1:
            said = ", ".join(f"{name} {count}" for name, count in classes.items())
            raise UserError(
                f"the teachers score different numbers of classes ({said}); give each a --class-map"
            )
        mean = Mean()
        for logits in maps:
            mean.add(resampled(logits, self.cells))
        return mean.logits()

    def _stitched(self, maps: list[Tensor]) -> Tensor:
        half, last = self.overlap // 2, self.tiles - 1
        if last and self.cells <= 2 * half:
            raise UserError(
                f"tiles of {self.cells} x {self.cells} cells are too small to overlap; choose a larger --input-size, or squash"
            )

        def kept(at: int) -> slice:
            return slice(half if at else 0, self.cells - (half if at < last else 0))

        rows = [
            torch.cat(
                [
                    maps[row * self.tiles + column][:, kept(row), kept(column)]
                    for column in range(self.tiles)
                ],
                2,
            )
            for row in range(self.tiles)
        ]
        return torch.cat(rows, 1)


class Mean:
    """A running mean of maps of logits, in probabilities; see Teacher. Each may be moved, and then
    misses cells.
    """

    def __init__(self) -> None:
        self.log_probability: Tensor | None = None  # N s s K, of the sum
        self.lse: Tensor | float = 0.0  # N s s 1, the sum
        self.count: Tensor | float = 0.0  # s s 1, how many maps cover a cell

    def add(self, logits_NssK: Tensor, shift: tuple[int, int] = (0, 0)) -> None:
        """Add a map whose cell (0, 0) is the mean's cell `shift`."""
        if self.log_probability is None:
            self.log_probability = torch.full_like(logits_NssK, -torch.inf)
            self.lse = torch.zeros_like(logits_NssK[..., :1])
            self.count = torch.zeros_like(logits_NssK[0, ..., :1])
        side = logits_NssK.shape[1]
        here = tuple(slice(max(by, 0), side + min(by, 0)) for by in shift)
        there = tuple(slice(max(-by, 0), side + min(-by, 0)) for by in shift)
        part = logits_NssK[:, *there]
        lse = part.logsumexp(-1, keepdim=True)
        self.log_probability[:, *here] = torch.logaddexp(self.log_probability[:, *here], part - lse)
        self.lse[:, *here] += lse
        self.count[here] += 1

    def logits(self) -> Tensor:
        """The mean, float32 `[N, s, s, K]`."""
        return self.log_probability - self.count.log() + self.lse / self.count


def resampled(logits_NssK: Tensor, side: int) -> Tensor:
    """A map of logits with `side` cells a side, its probabilities and its logsumexp interpolated,
    bilinear.
    """
    if logits_NssK.shape[1] == side:
        return logits_NssK
    lse = logits_NssK.logsumexp(-1, keepdim=True)
    parts = torch.cat([(logits_NssK - lse).exp(), lse], -1).permute(0, 3, 1, 2)
    parts = F.interpolate(parts, (side, side), mode="bilinear", align_corners=False).permute(
        0, 2, 3, 1
    )
    return parts[..., :-1].clamp(min=torch.finfo(parts.dtype).tiny).log() + parts[..., -1:]


def _views(count: int) -> list[tuple[tuple[int, int], bool]]:
    """Shift (down, right; cells) and flip of each view."""
    return [(shift, flip) for shift in SHIFTS for flip in (False, True)][:count]


def weights_hash(model: nn.Module) -> str:
    """First 16 hexadecimal digits of the SHA-256 over all weights, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
