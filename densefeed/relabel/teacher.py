"""Teacher: one or several networks that label the cells of an image, in one or more views or tiles.

A teacher lists the pictures it needs of an image (`views`), gives the part of the image that its
map covers (`window`), and computes one map from the pictures (`forward`). The caller renders the
pictures; `prepare` does so with Pillow.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from densefeed.relabel.class_map import ClassMap
from densefeed.relabel.network import Network, interpolate_cells
from densefeed.relabel.rendering import render
from densefeed.storage.geometry import TLBR, Geometry, TeacherView, crop_in_pixels, teacher_window
from densefeed.system.errors import UserError, first_line, is_out_of_memory

# N images   L pictures, by test-time view and within it by tile   K classes
# S cells along a map's side   s cells along a tile's side

# Shifts of the test-time views in cells, down and right. Each is shown as it is and mirrored: the
# second view is the mirror of the first.
SHIFTS = ((0, 0), (1, 1), (-1, -1), (1, -1), (-1, 1), (1, 0), (-1, 0), (0, 1), (0, -1))
MAX_TTA_VIEWS = 2 * len(SHIFTS)
# Share of a tile's side.
OVERLAP = 1 / 4


class Teacher(nn.Module):
    """Networks that give logits for every cell of an image.

    `geometry` decides what is shown. `squash`: the whole image, its aspect ratio lost.
    `center-crop`: its center square. `letterbox`: the whole image on a square of the teacher's mean
    color; cells of that color are in the map, but no token is labeled by them. `tile`: the whole
    image, squashed, in `tiles` x `tiles` squares that overlap by about a quarter. A map of tiles
    has S = tiles * s - (tiles - 1) * o cells a side, where s is the side of a tile in cells and o
    is s / 4 rounded to an even number, at least 2. Each overlap is cut in its middle, so the o / 2
    cells beside an inner edge of a tile, which lack half of their surroundings, are not used.

    `tta_views` test-time views are averaged: the picture and its mirror, then both shifted by a
    cell in one of eight directions. Each map is first mirrored and shifted back. Where a shifted
    picture reaches beyond the image it shows the mean color; a cell that only some views cover is
    averaged over these.

    `others` are further members of an ensemble. Maps with fewer cells are resampled bilinearly to
    the largest. All members stay on the device, and all see the same pictures, of the size of the
    largest member and by its filter. A smaller member resizes them on the device, antialiased, by
    its own filter; Pillow's rounding to 8 bits comes in between.

    Probabilities are averaged over views and members, because the target of a token is a mean of
    probabilities too (pipelines/targets.py), and a mean of logits would follow the member with the
    larger ones. The mean logsumexp is added back, so that maps that agree are unchanged and
    zero-logit stores keep their scale. The published generators average nothing.

    Args:
        model, input_size, config, class_map, name: of the first network, see Network.
        tta_views: 1 to 18.
        tiles: along a side; at least 2 with geometry `tile`, else 1.
        others: the other networks, of the same classes.
        unmapped: the last class of every network is that of `name_unmapped`.
        map_side: of the first network, see Network.

    Raises UserError for impossible numbers of views or tiles.
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
        tta_views: int = 1,
        tiles: int = 1,
        others: Sequence[Network] = (),
        unmapped: bool = False,
        map_side: int = 0,
    ) -> None:
        super().__init__()
        if not 1 <= tta_views <= MAX_TTA_VIEWS:
            raise UserError(
                f"--tta-views {tta_views} is out of range; choose 1 to {MAX_TTA_VIEWS} (2: the "
                "image and its mirror)"
            )
        if (geometry == "tile") != (tiles > 1) or tiles < 1:
            raise UserError(
                f"--geometry {geometry} does not go with --tiles {tiles}; tile needs 2 or more, "
                "the other geometries need 1"
            )
        first = Network(model, input_size, config, class_map, name, map_side)
        self.networks, self.unmapped = nn.ModuleList([first, *others]), unmapped
        largest = max(self.networks, key=lambda network: network.input_size)
        self.input_size, self.interpolation = largest.input_size, largest.interpolation
        # Color beyond the image, 0 to 255.
        self.fill = tuple(round(level) for level in largest.mean.flatten().tolist())
        self.window_geometry, self.tta_views, self.tiles = geometry, tta_views, tiles
        self.geometry = f"tile {tiles} x {tiles}" if geometry == "tile" else geometry
        # s; known after the first forward.
        self.cells = 0

    @property
    def model(self) -> nn.Module:
        """The network, or all networks of an ensemble: what the hash of the weights covers."""
        if len(self.networks) == 1:
            return self.networks[0].model
        return nn.ModuleList(network.model for network in self.networks)

    @property
    def mean(self) -> Tensor:
        """The mean color of the first network, 0 to 255, `[1, 3, 1, 1]`, on the common device."""
        return self.networks[0].mean

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of an image's pictures: (L, size, size, 3)."""
        return self.tta_views * self.tiles**2, self.input_size, self.input_size, 3

    def window(self, height: int, width: int) -> TLBR:
        """Return the window of the map of an image of this size in pixels."""
        return teacher_window(self.window_geometry, height, width)

    def views(self, height: int, width: int) -> list[TeacherView]:
        """List the L pictures to show of an image of this size in pixels.

        They are ordered by test-time view, and within it by tile in row-major order.
        """
        left, top, right, bottom = crop_in_pixels(self.window(height, width), height, width)
        # Without shifts and tiles the pictures do not depend on the cells, so no network runs.
        if self.tta_views <= 2 and self.tiles == 1:
            flips = (False, True)[: self.tta_views]
            return [TeacherView((left, top, right, bottom), flip) for flip in flips]
        if not self.cells:
            self.count_cells()
        side = self.tiles * self.cells - (self.tiles - 1) * self.overlap
        # Width and height of a cell in pixels.
        across, down = (right - left) / side, (bottom - top) / side
        views = []
        for (row, column), flip in _shifts_and_flips(self.tta_views):
            for tile in range(self.tiles**2):
                y, x = (at * (self.cells - self.overlap) for at in divmod(tile, self.tiles))
                ends = x + column, y + row, x + column + self.cells, y + row + self.cells
                edges = zip((left, top) * 2, ends, (across, down) * 2, strict=True)
                # Rounded, so that a whole pixel stays one and nothing beyond it is read.
                box = tuple(round(start + end * cell, 6) for start, end, cell in edges)
                views.append(TeacherView(box, flip))
        return views

    def count_cells(self) -> None:
        """Run the networks once, because the pictures depend on the number of their cells.

        Raises UserError if they do not take images of this size.
        """
        pictures = torch.zeros(1, *self.shape[1:], dtype=torch.uint8, device=self.mean.device)
        names = " and ".join(network.name for network in self.networks)
        with explain_failures(names, self.input_size), torch.inference_mode():
            self._score(pictures)

    @property
    def overlap(self) -> int:
        """Cells that neighboring tiles share; even, so that the middle lies between two cells."""
        return max(2, 2 * round(self.cells * OVERLAP / 2))

    def prepare(self, image: Image.Image) -> tuple[np.ndarray, TLBR]:
        """Render the pictures of an image, uint8 `[L, size, size, 3]`; return the window too."""
        pictures = np.empty(self.shape, np.uint8)
        return pictures, render(image, self, pictures)

    # Not inference_mode, under which torch.compile (2.15) fails on a slice of the input.
    @torch.no_grad()
    def forward(self, image_NLHW3: Tensor) -> Tensor:
        """Compute logits of every cell, float32 `[N, S, S, K]`, of uint8 `[N, L, size, size, 3]`.

        The L pictures pass the networks one after another, N images at a time.
        """
        if image_NLHW3.shape[1:] != self.shape:
            raise ValueError(f"pictures are {tuple(image_NLHW3.shape[1:])}, not {self.shape}")
        if self.tta_views == 1 and self.tiles == 1:
            return self._score(image_NLHW3[:, 0])
        pictures = iter(image_NLHW3.unbind(1))
        means = [MapMean() for _ in range(self.tiles**2)]
        for shift, flip in _shifts_and_flips(self.tta_views):
            for mean in means:
                logits_NssK = self._score(next(pictures))
                # Axis 2 holds the columns.
                mean.add(logits_NssK.flip(2) if flip else logits_NssK, shift)
        return self._stitch([mean.logits() for mean in means])

    def _score(self, image_NHWC: Tensor) -> Tensor:
        """Average the members' maps of one picture, `[N, s, s, K]`."""
        maps = [network(image_NHWC) for network in self.networks]
        self.cells = max(logits.shape[1] for logits in maps)
        if len(maps) == 1:
            return maps[0]
        if len({logits.shape[3] for logits in maps}) > 1:
            counts = ", ".join(
                f"{network.name} {logits.shape[3] - self.unmapped}"
                for network, logits in zip(self.networks, maps, strict=True)
            )
            raise UserError(
                f"the teachers score different numbers of classes ({counts}); pass a --class-map "
                "for each"
            )
        mean = MapMean()
        for logits in maps:
            mean.add(interpolate_cells(logits, self.cells))
        return mean.logits()

    def _stitch(self, maps: list[Tensor]) -> Tensor:
        """Join the maps of tiles, each overlap cut in its middle."""
        half, last = self.overlap // 2, self.tiles - 1
        if last and self.cells <= 2 * half:
            raise UserError(
                f"tiles of {self.cells} x {self.cells} cells are too small to overlap; choose a "
                "larger --input-size, or --geometry squash"
            )
        kept = [
            slice(half if at else 0, self.cells - (half if at < last else 0))
            for at in range(self.tiles)
        ]
        rows = []
        for row, down in enumerate(kept):
            tiles = maps[row * self.tiles : (row + 1) * self.tiles]
            cut = [tile[:, down, across] for tile, across in zip(tiles, kept, strict=True)]
            rows.append(torch.cat(cut, 2))
        return torch.cat(rows, 1)


class MapMean:
    """A running mean of maps of logits, taken over probabilities (see Teacher).

    A map may be shifted, and then lacks some of the cells.
    """

    def __init__(self) -> None:
        self.log_probability = None  # [N, s, s, K], of the sum
        self.logsumexp = None  # [N, s, s, 1], the sum
        self.count = None  # [s, s, 1], maps that cover a cell

    def add(self, logits_NssK: Tensor, shift: tuple[int, int] = (0, 0)) -> None:
        """Add a map whose cell (0, 0) is the mean's cell `shift`."""
        if self.log_probability is None:
            self.log_probability = torch.full_like(logits_NssK, -torch.inf)
            self.logsumexp = torch.zeros_like(logits_NssK[..., :1])
            self.count = torch.zeros_like(logits_NssK[0, ..., :1])
        side = logits_NssK.shape[1]
        # A shifted picture also shows cells beyond the image, which are cut off.
        here = tuple(slice(max(by, 0), side + min(by, 0)) for by in shift)
        there = tuple(slice(max(-by, 0), side + min(-by, 0)) for by in shift)
        part = logits_NssK[:, *there]
        logsumexp = part.logsumexp(-1, keepdim=True)
        log_probability = part - logsumexp
        # Sums stay logarithms: a probability below e^-104 is 0 in float32.
        self.log_probability[:, *here] = torch.logaddexp(
            self.log_probability[:, *here], log_probability
        )
        self.logsumexp[:, *here] += logsumexp
        self.count[here] += 1

    def logits(self) -> Tensor:
        """Return the mean, float32 `[N, s, s, K]`."""
        return self.log_probability - self.count.log() + self.logsumexp / self.count


# Words of PyTorch's and timm's errors that the size of an input causes. Those of a convolution with
# another number of channels name the size of its weight.
SIZES = re.compile(
    r"(?!.*\bchannels\b).*(size|\b(shapes?|height|width|resolution|pixels|spatial|divisible)\b)",
    re.I,
)


@contextmanager
def explain_failures(
    name: str, size: int, option: str = "input size", images: str = ""
) -> Iterator[None]:
    """Explain what the teacher `name` raises at images of `size` pixels by UserError.

    `images` are named in the message; without any it is the teacher's first image, which may have a
    size that it does not take. The cause of the UserError is the teacher's own error, with its
    traceback. `option` is that of the size. Errors of memory are raised as they are.
    """
    try:
        yield
    except UserError:
        raise
    # A module of the user's own may raise anything.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        problem, bare = first_line(error), isinstance(error, AssertionError) and not str(error)
        # An assertion without a message mostly compares sizes.
        kinds = AssertionError, RuntimeError, ValueError
        if not images and (bare or (isinstance(error, kinds) and SIZES.match(problem))):
            raise UserError(
                f"{name} does not take images of {size} px ({problem}); choose another {option}"
            ) from error
        raise UserError(
            f"the teacher {name} failed at {images or 'its first image'}, of {size} px "
            f"({f'{type(error).__name__}: {problem}'.rstrip(': ')}); correct its forward pass"
        ) from error


def _shifts_and_flips(count: int) -> list[tuple[tuple[int, int], bool]]:
    """List the shift (down, right; cells) and the flip of each test-time view."""
    return [(shift, flip) for shift in SHIFTS for flip in (False, True)][:count]


def weights_hash(model: nn.Module) -> str:
    """Hash all weights in the order of their names; first 16 hexadecimal digits of the SHA-256."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        # As bytes, because NumPy has no bfloat16. Flattened first, because a tensor of 0 dimensions
        # (BatchNorm's counter) has no view of another item size.
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
