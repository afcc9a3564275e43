"""Geometries, test-time views, tiles and ensembles of teachers whose maps are known."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from densefeed.relabel.class_map import ClassMap
from densefeed.relabel.network import Network, interpolate_cells
from densefeed.relabel.teacher import MAX_TTA_VIEWS, Teacher, weights_hash
from densefeed.storage.geometry import WHOLE
from densefeed.storage.images import crop_resize
from densefeed.system.errors import UserError

CONFIG = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "interpolation": "bilinear"}
# In gray levels, relative to the padding.
PLAIN = {"mean": (0.5, 0.5, 0.5), "std": (1 / 255,) * 3, "interpolation": "bilinear"}
CELL = 8  # pixels


class Mosaic(nn.Module):
    """An equivariant teacher: logits of a cell are a fixed function of its CELL x CELL pixels.

    `bias` is added by position.
    """

    def __init__(self, scale=0.02, bias=None, cell=CELL, classes=5):
        super().__init__()
        weights = torch.randn(classes, 3, generator=torch.Generator().manual_seed(3))
        self.weights, self.bias, self.cell = nn.Parameter(scale * weights), bias, cell

    def forward_token_logits(self, image_NCHW):
        colors = F.avg_pool2d(image_NCHW, self.cell)
        logits = torch.einsum("nchw,kc->nkhw", colors, self.weights)
        return logits if self.bias is None else logits + self.bias


def mosaic(height, width):
    """Make an image of smooth colors."""
    rng = np.random.default_rng(height * width)
    small = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    return Image.fromarray(crop_resize(small, (0, 0, 6, 6), max(height, width))).resize(
        (width, height)
    )


def label(teacher, image):
    """Compute the map of one image."""
    pictures, _ = teacher.prepare(image)
    return teacher(torch.from_numpy(pictures)[None])[0]


def expected_map(image_HW3, model):
    """Compute Mosaic's logits of an image that is a whole number of cells."""
    return model.forward_token_logits(
        (torch.from_numpy(np.asarray(image_HW3).copy()).permute(2, 0, 1)[None] - 127.5).float()
    )[0].permute(1, 2, 0)


def test_geometry_decides_what_is_shown():
    """The left and right quarters are red, the middle is blue.

    A center crop shows no red, a letterbox shows padding.
    """
    pixels = np.zeros((50, 100, 3), np.uint8)
    pixels[:, :25, 0] = pixels[:, 75:, 0] = pixels[:, 25:75, 2] = 255
    image = Image.fromarray(pixels)
    model = timm.create_model("test_resnet", num_classes=2)
    (squashed,), window = Teacher(model, 64, "squash", CONFIG).prepare(image)
    assert window == WHOLE
    assert squashed[:, :8, 0].min() > 200
    (center,), window = Teacher(model, 64, "center-crop", CONFIG).prepare(image)
    assert window == (0.0, 0.25, 1.0, 0.75)
    assert center[..., 0].max() == 0
    (boxed,), window = Teacher(model, 64, "letterbox", CONFIG).prepare(image)
    assert window == (-0.5, 0.0, 1.5, 1.0)
    assert (boxed[:14] == boxed[50:]).all()
    np.testing.assert_array_equal(boxed[0, 0], np.round(np.array(CONFIG["mean"]) * 255))
    assert (boxed[18:46, 1:14] == (255, 0, 0)).all()
    assert (boxed[18:46, 18:46] == (0, 0, 255)).all()


@pytest.mark.parametrize("geometry", ["squash", "center-crop", "letterbox"])
@pytest.mark.parametrize("tta_views", [1, 2, 4, 5, MAX_TTA_VIEWS])
def test_views_of_an_equivariant_teacher_average_to_the_same_map(geometry, tta_views):
    """Shifted views show padding beyond the image.

    The cells of padding are not used for a cell that other views show.
    """
    side = 6 * CELL
    image = mosaic(side, side)
    plain, many = (
        Teacher(Mosaic(), side, geometry, PLAIN, tta_views=count) for count in (1, tta_views)
    )
    assert len(many.views(side, side)) == tta_views == many.shape[0]
    torch.testing.assert_close(
        label(plain, image), expected_map(image, Mosaic()), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(label(many, image), label(plain, image), rtol=1e-4, atol=2e-5)


def test_a_bias_by_position_averages_out():
    """A bias on the right half is on the left in the mirrored view.

    The mean probability is half of each.
    """
    side = 6 * CELL
    image = Image.new("RGB", (side, side), (128, 128, 128))
    bias = torch.zeros(5, 6, 6)
    bias[1, :, :3], bias[1, :, 3:] = -4, 4
    one, two = (
        label(Teacher(Mosaic(0, bias), side, "squash", PLAIN, tta_views=count), image)
        for count in (1, 2)
    )
    assert one.softmax(-1)[0, 5, 1] - one.softmax(-1)[0, 0, 1] > 0.9
    torch.testing.assert_close(two, two.flip(1), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        two.softmax(-1), (one.softmax(-1) + one.flip(1).softmax(-1)) / 2, rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        two.logsumexp(-1), (one.logsumexp(-1) + one.flip(1).logsumexp(-1)) / 2, rtol=1e-5, atol=1e-5
    )


def test_the_error_of_one_cell_is_reduced_by_shifted_views():
    """A cell in the middle is always wrong; shifted views move it to nine different positions."""
    side = 6 * CELL
    image, bias = mosaic(side, side), torch.zeros(5, 6, 6)
    bias[:, 2, 3] = torch.tensor([9.0, 0, 0, 0, 0])
    right = label(Teacher(Mosaic(), side, "squash", PLAIN), image).softmax(-1)
    errors = [
        (
            label(
                Teacher(Mosaic(bias=bias), side, "squash", PLAIN, tta_views=count), image
            ).softmax(-1)
            - right
        )
        .abs()[2, 3]
        .max()
        for count in (1, 2, MAX_TTA_VIEWS)
    ]
    assert errors[1] < 0.51 * errors[0]
    # 2 of 18: the mirror, shifted right by a cell, shows it there again.
    assert errors[2] < 0.112 * errors[0]


@pytest.mark.parametrize(
    ("cells", "tiles", "overlap", "side"),
    [(6, 2, 2, 10), (8, 2, 2, 14), (9, 3, 2, 23), (18, 2, 4, 32), (3, 4, 2, 6)],
)
def test_tiles_of_an_equivariant_teacher_equal_one_large_picture(cells, tiles, overlap, side):
    """The image has the size of the map of all tiles, so pictures are cut without resampling."""
    image = mosaic(side * CELL, side * CELL)
    teacher = Teacher(Mosaic(), cells * CELL, "tile", PLAIN, tiles=tiles)
    got = label(teacher, image)
    assert teacher.overlap == overlap
    assert teacher.window(*image.size) == WHOLE
    assert got.shape == (side, side, 5)
    torch.testing.assert_close(
        got, label(Teacher(Mosaic(), side * CELL, "squash", PLAIN), image), rtol=1e-4, atol=2e-5
    )
    torch.testing.assert_close(got, expected_map(image, Mosaic()), rtol=1e-4, atol=2e-5)


def test_tiles_of_a_resized_image_nearly_equal_one_large_picture():
    """Pillow rounds each picture to 8 bits, at other phases: differences are below one level."""
    image = mosaic(150, 230)
    scale = Mosaic().weights.abs().sum(1).max().item()  # logit per level
    got = label(Teacher(Mosaic(), 6 * CELL, "tile", PLAIN, tiles=2), image)
    want = label(Teacher(Mosaic(), 10 * CELL, "squash", PLAIN), image)
    assert (got - want).abs().max() < scale


def test_cells_at_a_seam_come_from_the_tile_that_surrounds_them():
    """If the outer ring of every tile is wrong, only that of the stitched map is wrong."""
    bias = torch.full((5, 6, 6), 100.0)
    bias[:, 1:-1, 1:-1] = 0
    image = mosaic(10 * CELL, 10 * CELL)
    wrong = label(Teacher(Mosaic(bias=bias), 6 * CELL, "tile", PLAIN, tiles=2), image)
    right = label(Teacher(Mosaic(), 6 * CELL, "tile", PLAIN, tiles=2), image)
    torch.testing.assert_close(wrong[1:-1, 1:-1], right[1:-1, 1:-1], rtol=0, atol=0)
    assert (wrong - right)[0].min() > 99


def test_tiles_and_views_combine():
    image = mosaic(10 * CELL, 10 * CELL)
    teacher = Teacher(Mosaic(), 6 * CELL, "tile", PLAIN, tiles=2, tta_views=4)
    assert teacher.shape == (16, 48, 48, 3)
    torch.testing.assert_close(
        label(teacher, image), expected_map(image, Mosaic()), rtol=1e-4, atol=2e-5
    )


def test_an_ensembles_map_is_the_mean_of_its_members_probabilities():
    """Three members: same cells, half as many, another normalization, another class list."""
    side = 6 * CELL
    image = mosaic(side, side)
    large = Mosaic(cell=2 * CELL, scale=0.03)
    small = Mosaic(scale=0.01, classes=6)
    swap = ClassMap(torch.tensor([0, 1, 3, 4, 5]), torch.tensor([1, 0, 2, 3, 4]), 5)
    others = [Network(large, side, CONFIG), Network(small, side, PLAIN, swap)]
    got = label(Teacher(Mosaic(), side, "squash", PLAIN, others=others), image)
    pixels = torch.from_numpy(np.asarray(image).copy())[None]
    one = expected_map(image, Mosaic()).double()
    mean, std = (torch.tensor(CONFIG[name]) * 255 for name in ("mean", "std"))
    # 3 x 3 cells
    two = large.forward_token_logits(((pixels - mean) / std).permute(0, 3, 1, 2)).double()
    two_p = F.interpolate(two.softmax(1), (6, 6), mode="bilinear", align_corners=False)[0].permute(
        1, 2, 0
    )
    two_lse = F.interpolate(
        two.logsumexp(1)[:, None], (6, 6), mode="bilinear", align_corners=False
    )[0, 0]
    three = expected_map(image, small).double()[..., [1, 0, 3, 4, 5]]
    want = (one.softmax(-1) + two_p + three.softmax(-1)) / 3
    torch.testing.assert_close(got.double().softmax(-1), want, rtol=1e-4, atol=1e-6)
    want_lse = (one.logsumexp(-1) + two_lse + three.logsumexp(-1)) / 3
    torch.testing.assert_close(got.double().logsumexp(-1), want_lse, rtol=1e-4, atol=1e-4)


def test_a_smaller_member_gets_nearly_the_pictures_it_would_get_alone():
    """It gets the large picture resized, which is two resizes where alone it would be one.

    The difference is up to 4 levels of 255 on smooth images.
    """
    image = mosaic(300, 200)
    big, small = Mosaic(scale=1.0), Mosaic(scale=1.0)
    alone = label(Teacher(small, 6 * CELL, "squash", PLAIN), image)
    pair = Teacher(small, 6 * CELL, "squash", PLAIN, others=[Network(big, 12 * CELL, PLAIN)])
    assert pair.shape == (1, 96, 96, 3)
    picture, _ = pair.prepare(image)
    through = pair.networks[0](torch.from_numpy(picture))[0]
    assert (through - alone).abs().max() < 4 * small.weights.abs().sum(1).max()
    assert label(pair, image).shape == (12, 12, 5)


def test_members_must_agree_on_the_classes():
    pair = Teacher(
        Mosaic(),
        48,
        "squash",
        PLAIN,
        name="a",
        others=[Network(Mosaic(classes=4), 48, PLAIN, name="b")],
    )
    message = r"different numbers of classes \(a 5, b 4\); pass a --class-map for each"
    with pytest.raises(UserError, match=message):
        label(pair, mosaic(48, 48))


def test_resampled_probabilities_sum_to_one_and_a_constant_map_is_unchanged():
    logits = 9 * torch.randn(2, 3, 3, 7, generator=torch.Generator().manual_seed(0))
    wide = interpolate_cells(logits, 7)
    assert wide.shape == (2, 7, 7, 7)
    torch.testing.assert_close(
        wide.exp().sum(-1).log(), interpolate_cells(logits.logsumexp(-1, keepdim=True), 7)[..., 0]
    )
    # The center of the middle cell is the same in both maps.
    torch.testing.assert_close(wide[:, 3, 3], logits[:, 1, 1], rtol=1e-5, atol=1e-5)
    assert interpolate_cells(logits, 3) is logits
    torch.testing.assert_close(
        interpolate_cells(logits[:, :1, :1], 4),
        logits[:, :1, :1].expand(-1, 4, 4, -1),
        rtol=1e-5,
        atol=1e-4,
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(geometry="squash", tta_views=0), "--tta-views 0 is out of range; choose 1 to 18"),
        (dict(geometry="squash", tta_views=19), "--tta-views 19 is out of range"),
        (dict(geometry="squash", tiles=2), "--geometry squash does not go with --tiles 2"),
        (dict(geometry="tile"), "--geometry tile does not go with --tiles 1"),
    ],
)
def test_impossible_numbers_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        Teacher(Mosaic(), 48, config=PLAIN, **options)


def test_tiles_too_small_to_overlap_are_refused():
    with pytest.raises(UserError, match="tiles of 2 x 2 cells are too small to overlap"):
        label(Teacher(Mosaic(), 2 * CELL, "tile", PLAIN, tiles=2), mosaic(48, 48))


def test_an_input_size_that_a_network_does_not_take_is_reported():
    model = timm.create_model("deit_tiny_patch16_224", depth=1, num_classes=5)
    with pytest.raises(
        UserError, match=r"^vit does not take images of 64 px \(.*\); choose another input size"
    ):
        Teacher(model, 64, "squash", CONFIG, name="vit", tta_views=4).views(50, 50)


@pytest.mark.slow
def test_a_compiled_teacher_gives_the_same_map():
    """Views, a class map and an ensemble in one graph of torch.compile, without code generation."""
    image = mosaic(6 * CELL, 6 * CELL)
    other = Network(
        Mosaic(classes=6),
        6 * CELL,
        CONFIG,
        ClassMap(torch.arange(6), torch.tensor([0, 1, 2, 3, 4, 4]), 5),
    )
    teacher = Teacher(Mosaic(), 6 * CELL, "squash", PLAIN, tta_views=3, others=[other])
    pictures = torch.from_numpy(teacher.prepare(image)[0])[None]
    compiled = torch.compile(teacher, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch.inference_mode():
        torch.testing.assert_close(
            compiled(pictures.clone()), teacher(pictures), rtol=1e-5, atol=1e-5
        )


def test_all_members_move_to_the_device_together():
    pair = Teacher(Mosaic(), 48, "squash", PLAIN, others=[Network(Mosaic(), 48, CONFIG)]).to("meta")
    assert {tensor.device.type for tensor in pair.state_dict().values()} == {"meta"}
    assert pair.mean.device.type == "meta"


def test_the_hash_depends_on_the_weights_of_every_member():
    pair = Teacher(
        timm.create_model("test_resnet", num_classes=5),
        64,
        "squash",
        CONFIG,
        others=[Network(Mosaic(), 48, CONFIG)],
    )
    before = weights_hash(pair.model)
    assert weights_hash(pair.model) == before
    for network in pair.networks:
        with torch.no_grad():
            next(network.model.parameters()).view(-1)[0] += 1
        assert weights_hash(pair.model) != before
        before = weights_hash(pair.model)
    alone = timm.create_model("test_resnet", num_classes=5)
    # A single network has the hash it had before ensembles existed.
    assert weights_hash(Teacher(alone, 64, "squash", CONFIG).model) == weights_hash(alone)
