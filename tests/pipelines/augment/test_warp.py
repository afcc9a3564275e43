"""The warp against Pillow's Image.transform and a float64 evaluation of the interpolation
formula.
"""

import numpy as np
import pytest
import torch
from PIL import Image

from densefeed.pipelines.augment.settings import GEOMETRIC, make_matrix
from densefeed.pipelines.augment.warp import tap_weights, warp_by_gather, warp_images

from ...runs import default_dtype

FILL = (124, 116, 104)
ARGUMENTS = {
    "Rotate": (-30.0, 0.0, 7.3, 27.0),
    "ShearX": (-0.3, 0.11),
    "ShearY": (-0.27, 0.08),
    "TranslateXRel": (-0.45, 0.2, 1.5),
    "TranslateYRel": (0.405, -0.013),
}


@pytest.fixture(scope="module")
def images(noise) -> torch.Tensor:
    """Make three images of 61 x 83: photograph-like, noise and one color."""
    rng = np.random.default_rng(2)
    return torch.from_numpy(
        np.stack(
            [noise(61, 83), rng.integers(0, 256, (61, 83, 3)), np.full((61, 83, 3), 200)]
        ).astype(np.uint8)
    )


def border(matrix_23: np.ndarray, height: int, width: int) -> np.ndarray:
    """Mark output pixels whose source point is so close to the image's edge that rounding decides
    between fill and picture.
    """
    x, y = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    points = [row[0] * x + row[1] * y + row[2] for row in matrix_23]
    gaps = [
        np.minimum(abs(point), abs(point - extent))
        for point, extent in zip(points, (width, height), strict=True)
    ]
    return np.minimum(*gaps) < 1e-4


@pytest.mark.parametrize("way", [warp_images, warp_by_gather])
@pytest.mark.parametrize("cubic", [False, True])
@pytest.mark.parametrize("name", GEOMETRIC)
def test_operations_equal_pillows(images, way, cubic, name):
    """Within 1 gray level everywhere except on the border, where a float32 sum can fall on the
    other side of the edge.
    """
    _, H, W, _ = images.shape
    resample = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
    for argument in ARGUMENTS[name]:
        matrix_33 = make_matrix(name, np.array([argument]), H, W)[0]
        matrix = torch.from_numpy(matrix_33[:2].astype(np.float32)).expand(len(images), 2, 3)
        got = way(images, matrix, torch.full((len(images),), float(cubic)), FILL).numpy()
        for image, mine in zip(images.numpy(), got, strict=True):
            picture = Image.fromarray(image)
            if name == "Rotate":
                want = np.asarray(picture.rotate(argument, resample, fillcolor=FILL))
            else:
                data = tuple(matrix_33[:2].ravel())
                want = np.asarray(
                    picture.transform(
                        (W, H), Image.Transform.AFFINE, data, resample, fillcolor=FILL
                    )
                )
            off = abs(mine.astype(int) - want).max(-1) > 1
            assert not (off & ~border(matrix_33[:2], H, W)).any(), argument
            assert off.mean() < 0.01  # the border is a line of pixels


def cubic_weight(far: np.ndarray) -> np.ndarray:
    """Compute Keys's kernel with a = -1 (IEEE ASSP 1981, equation 15 for any a) at a distance."""
    far, a = abs(far), -1.0
    near = (a + 2) * far**3 - (a + 3) * far**2 + 1
    return np.where(
        far <= 1, near, np.where(far < 2, a * far**3 - 5 * a * far**2 + 8 * a * far - 4 * a, 0)
    )


def test_tap_weights_equal_the_kernels():
    d = torch.rand(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for weights, kernel in (
        (tap_weights(d, 1.0), cubic_weight),
        (tap_weights(d, 0.0), lambda far: np.clip(1 - abs(far), 0, 1)),
    ):
        for tap, weight in zip(range(-1, 3), weights, strict=True):
            np.testing.assert_allclose(weight, kernel(d.numpy() - tap), atol=1e-12)


@pytest.mark.parametrize("way", [warp_images, warp_by_gather])
@pytest.mark.parametrize("cubic", [False, True])
def test_a_composed_warp_equals_the_float64_sum(images, way, cubic):
    """Rotation, shear and translation, resampled once, against the explicit sum of sixteen
    neighbors of every pixel.
    """
    _, H, W, _ = images.shape
    matrix = np.eye(3)
    for name, argument in (("Rotate", 17.0), ("ShearX", -0.2), ("TranslateYRel", 0.11)):
        matrix = matrix @ make_matrix(name, np.array([argument]), H, W)[0]
    matrix_23 = matrix[:2].astype(np.float32)
    kernel = cubic_weight if cubic else lambda far: np.clip(1 - abs(far), 0, None)
    x, y = np.meshgrid(np.arange(W) + 0.5, np.arange(H) + 0.5)
    u, v = (row[0] * x + row[1] * y + row[2] for row in matrix_23.astype(np.float64))
    inside = (u >= 0) & (u < W) & (v >= 0) & (v < H)
    for image in images.numpy():
        want = np.zeros((H, W, 3))
        for row in range(-2, 4):
            for column in range(-2, 4):
                i, j = np.floor(v - 0.5) + row, np.floor(u - 0.5) + column
                weight = kernel(v - 0.5 - i) * kernel(u - 0.5 - j)
                want += (
                    weight[..., None]
                    * image[i.clip(0, H - 1).astype(int), j.clip(0, W - 1).astype(int)]
                )
        want = np.where(inside[..., None], want.clip(0, 255), FILL)
        got = way(
            torch.from_numpy(image)[None],
            torch.from_numpy(matrix_23)[None],
            torch.tensor([float(cubic)]),
            FILL,
        )[0].numpy()
        safe = ~border(matrix_23, H, W)
        assert (abs(got - want)[safe] <= 1 + 1e-3).all()  # truncated, so up to one below


def test_two_integer_translations_equal_pillows_two():
    """Whole pixels do not blur, so resampling twice equals once; pixels that the first moved out of
    view do not come back.
    """
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)
    matrix = make_matrix("TranslateXRel", np.array([0.2]), 40, 50) @ make_matrix(
        "TranslateYRel", np.array([-0.1]), 40, 50
    )
    picture = Image.fromarray(image)
    for data in ((1, 0, 10, 0, 1, 0), (1, 0, 0, 0, 1, -4)):
        picture = picture.transform(
            picture.size, Image.Transform.AFFINE, data, Image.Resampling.BICUBIC, fillcolor=FILL
        )
    for way in (warp_images, warp_by_gather):
        got = way(
            torch.from_numpy(image)[None],
            torch.from_numpy(matrix[:, :2].astype(np.float32)),
            torch.ones(1),
            FILL,
        )
        assert np.array_equal(got[0], np.asarray(picture))


@pytest.mark.parametrize("way", [warp_images, warp_by_gather])
def test_outside_a_default_dtype_of_64_bits_changes_no_pixel(images, way):
    matrix = torch.tensor([[0.9, 0.2, 1.3], [-0.2, 0.9, 0.1]], dtype=torch.float32).expand(3, 2, 3)
    cubic, found = torch.tensor([0, 1, 1], dtype=torch.float32), []
    for dtype in (torch.float32, torch.float64):
        with default_dtype(dtype):
            found.append(way(images, matrix, cubic, FILL))
    assert torch.equal(*found)


@pytest.mark.parametrize("way", [warp_images, warp_by_gather])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 7), (5, 2)])
def test_tiny_crops(way, height, width):
    image = torch.randint(
        0, 256, (3, height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    for matrix in (
        ((1, 0.3, -1), (0, 1, 0)),
        ((1, 0, 0), (0.2, 1, 0.4)),
        ((0.9, 0.2, 0), (-0.2, 0.9, 0.1)),
        ((1, 0, 0), (0, 1, 0)),
    ):
        data = tuple(value for row in matrix for value in row)
        got = way(
            image, torch.tensor(matrix, dtype=torch.float32).expand(3, 2, 3), torch.ones(3), FILL
        )
        for mine, source in zip(got.numpy(), image.numpy(), strict=True):
            want = Image.fromarray(source).transform(
                (width, height),
                Image.Transform.AFFINE,
                data,
                Image.Resampling.BICUBIC,
                fillcolor=FILL,
            )
            off = abs(mine.astype(int) - np.asarray(want)).max(-1) > 1
            assert not (off & ~border(np.array(matrix, np.float64), height, width)).any()
