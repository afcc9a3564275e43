"""Looks, views, tiles and ensembles of teachers whose answer is known."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from densefeed.relabel.class_map import ClassMap
from densefeed.relabel.network import Network
from densefeed.relabel.teacher import MOST_VIEWS, Teacher, resampled, weights_hash
from densefeed.storage.geometry import WHOLE
from densefeed.storage.images import crop_resize
from densefeed.system.errors import UserError

CONFIG = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "interpolation": "bilinear"}
# levels, less those of the padding
PLAIN = {"mean": (0.5, 0.5, 0.5), "std": (1 / 255,) * 3, "interpolation": "bilinear"}
CELL = 8  # pixels


class Mosaic(nn.Module):
    """An equivariant teacher: a cell's logits are a fixed function of its own CELL x CELL pixels,
    plus what `bias` says of its place.
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
    """An image of smooth colors, all its own pixels."""
    rng = np.random.default_rng(height * width)
    small = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    return Image.fromarray(crop_resize(small, (0, 0, 6, 6), max(height, width))).resize(
        (width, height)
    )


def labeled(teacher, image):
    pictures, _ = teacher.prepare(image)
    return teacher(torch.from_numpy(pictures)[None])[0]


def by_hand(image_HW3, model):
    """Mosaic's logits of an image that is a whole number of cells."""
    return model.forward_token_logits(
        (torch.from_numpy(np.asarray(image_HW3).copy()).permute(2, 0, 1)[None] - 127.5).float()
    )[0].permute(1, 2, 0)


def test_geometry_decides_what_is_seen():
    """A picture whose left and right quarters are red and whose middle is blue: a center crop sees
    no red, a letterbox padding.
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
@pytest.mark.parametrize("views", [1, 2, 4, 5, MOST_VIEWS])
def test_views_of_an_equivariant_teacher_average_to_the_same_map(geometry, views):
    """Where a moved view shows the image; beyond it is padding, whose cells are of no view that
    shows this cell elsewhere.
    """
    side = 6 * CELL
    image = mosaic(side, side)
    plain, many = (Teacher(Mosaic(), side, geometry, PLAIN, views=count) for count in (1, views))
    assert len(many.looks(side, side)) == views == many.shape[0]
    torch.testing.assert_close(
        labeled(plain, image), by_hand(image, Mosaic()), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(labeled(many, image), labeled(plain, image), rtol=1e-4, atol=2e-5)


def test_what_depends_on_the_place_and_not_the_image_averages_out():
    """A planted bias to the right: the mirror takes it to the left, and in probabilities both mean
    half of each.
    """
    side = 6 * CELL
    image = Image.new("RGB", (side, side), (128, 128, 128))
    bias = torch.zeros(5, 6, 6)
    bias[1, :, :3], bias[1, :, 3:] = -4, 4
    one, two = (
        labeled(Teacher(Mosaic(0, bias), side, "squash", PLAIN, views=views), image)
        for views in (1, 2)
    )
    assert one.softmax(-1)[0, 5, 1] - one.softmax(-1)[0, 0, 1] > 0.9
    torch.testing.assert_close(two, two.flip(1), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        two.softmax(-1), (one.softmax(-1) + one.flip(1).softmax(-1)) / 2, rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        two.logsumexp(-1), (one.logsumexp(-1) + one.flip(1).logsumexp(-1)) / 2, rtol=1e-5, atol=1e-5
    )


def test_a_fault_of_one_cell_is_thinned_out_over_the_views():
    """A cell in the middle that says nonsense, wherever it looks: shifted views bring it to nine
    different places.
    """
    side = 6 * CELL
    image, bias = mosaic(side, side), torch.zeros(5, 6, 6)
    bias[:, 2, 3] = torch.tensor([9.0, 0, 0, 0, 0])
    right = labeled(Teacher(Mosaic(), side, "squash", PLAIN), image).softmax(-1)
    errors = [
        (
            labeled(Teacher(Mosaic(bias=bias), side, "squash", PLAIN, views=views), image).softmax(
                -1
            )
            - right
        )
        .abs()[2, 3]
        .max()
        for views in (1, 2, MOST_VIEWS)
    ]
    assert errors[1] < 0.51 * errors[0]
    # 2 of 18: the mirror, moved right by a cell, shows it there again
    assert errors[2] < 0.112 * errors[0]


@pytest.mark.parametrize(
    ("cells", "tiles", "overlap", "side"),
    [(6, 2, 2, 10), (8, 2, 2, 14), (9, 3, 2, 23), (18, 2, 4, 32), (3, 4, 2, 6)],
)
def test_tiles_of_an_equivariant_teacher_are_one_large_look(cells, tiles, overlap, side):
    """The image is as large as the map of all tiles, so that every picture is cut without
    resampling.
    """
    image = mosaic(side * CELL, side * CELL)
    teacher = Teacher(Mosaic(), cells * CELL, "tile", PLAIN, tiles=tiles)
    got = labeled(teacher, image)
    assert teacher.overlap == overlap
    assert teacher.window(*image.size) == WHOLE
    assert got.shape == (side, side, 5)
    torch.testing.assert_close(
        got, labeled(Teacher(Mosaic(), side * CELL, "squash", PLAIN), image), rtol=1e-4, atol=2e-5
    )
    torch.testing.assert_close(got, by_hand(image, Mosaic()), rtol=1e-4, atol=2e-5)


def test_tiles_of_a_resized_image_are_nearly_one_large_look():
    """Pillow rounds each picture to 8 bits, at other phases: within a level of color."""
    image = mosaic(150, 230)
    scale = Mosaic().weights.abs().sum(1).max().item()  # of a logit a level
    got = labeled(Teacher(Mosaic(), 6 * CELL, "tile", PLAIN, tiles=2), image)
    want = labeled(Teacher(Mosaic(), 10 * CELL, "squash", PLAIN), image)
    assert (got - want).abs().max() < scale


def test_cells_at_a_seam_come_from_the_tile_that_surrounds_them():
    """A teacher wrong in the outer ring of its map: only the outer ring of the stitched map is."""
    bias = torch.full((5, 6, 6), 100.0)
    bias[:, 1:-1, 1:-1] = 0
    image = mosaic(10 * CELL, 10 * CELL)
    wrong = labeled(Teacher(Mosaic(bias=bias), 6 * CELL, "tile", PLAIN, tiles=2), image)
    right = labeled(Teacher(Mosaic(), 6 * CELL, "tile", PLAIN, tiles=2), image)
    torch.testing.assert_close(wrong[1:-1, 1:-1], right[1:-1, 1:-1], rtol=0, atol=0)
    assert (wrong - right)[0].min() > 99


def test_tiles_have_views_too():
    image = mosaic(10 * CELL, 10 * CELL)
    teacher = Teacher(Mosaic(), 6 * CELL, "tile", PLAIN, tiles=2, views=4)
    assert teacher.shape == (16, 48, 48, 3)
    torch.testing.assert_close(
        labeled(teacher, image), by_hand(image, Mosaic()), rtol=1e-4, atol=2e-5
    )


def test_an_ensembles_map_is_the_mean_of_its_members_probabilities():
    """Three members: same cells, half as many, other means and sizes, another class list."""
    side = 6 * CELL
    image = mosaic(side, side)
    large = Mosaic(cell=2 * CELL, scale=0.03)
    small = Mosaic(scale=0.01, classes=6)
    swap = ClassMap(torch.tensor([0, 1, 3, 4, 5]), torch.tensor([1, 0, 2, 3, 4]), 5)
    others = [Network(large, side, CONFIG), Network(small, side, PLAIN, swap)]
    got = labeled(Teacher(Mosaic(), side, "squash", PLAIN, others=others), image)
    pixels = torch.from_numpy(np.asarray(image).copy())[None]
    one = by_hand(image, Mosaic()).double()
    mean, std = (torch.tensor(CONFIG[name]) * 255 for name in ("mean", "std"))
    # 3 x 3 cells
    two = large.forward_token_logits(((pixels - mean) / std).permute(0, 3, 1, 2)).double()
    two_p = F.interpolate(two.softmax(1), (6, 6), mode="bilinear", align_corners=False)[0].permute(
        1, 2, 0
    )
    two_lse = F.interpolate(
        two.logsumexp(1)[:, None], (6, 6), mode="bilinear", align_corners=False
    )[0, 0]
    three = by_hand(image, small).double()[..., [1, 0, 3, 4, 5]]
    want = (one.softmax(-1) + two_p + three.softmax(-1)) / 3
    torch.testing.assert_close(got.double().softmax(-1), want, rtol=1e-4, atol=1e-6)
    want_lse = (one.logsumexp(-1) + two_lse + three.logsumexp(-1)) / 3
    torch.testing.assert_close(got.double().logsumexp(-1), want_lse, rtol=1e-4, atol=1e-4)


def test_members_of_other_sizes_see_nearly_what_they_would_alone():
    """A smaller one gets the large picture resized: alone it would have been one resize, not two. 4
    levels of 255 on smooth images.
    """
    image = mosaic(300, 200)
    big, small = Mosaic(scale=1.0), Mosaic(scale=1.0)
    alone = labeled(Teacher(small, 6 * CELL, "squash", PLAIN), image)
    pair = Teacher(small, 6 * CELL, "squash", PLAIN, others=[Network(big, 12 * CELL, PLAIN)])
    assert pair.shape == (1, 96, 96, 3)
    picture, _ = pair.prepare(image)
    through = pair.networks[0](torch.from_numpy(picture))[0]
    assert (through - alone).abs().max() < 4 * small.weights.abs().sum(1).max()
    assert labeled(pair, image).shape == (12, 12, 5)


def test_members_must_agree_on_the_classes():
    pair = Teacher(
        Mosaic(),
        48,
        "squash",
        PLAIN,
        name="a",
        others=[Network(Mosaic(classes=4), 48, PLAIN, name="b")],
    )
    with pytest.raises(
        UserError,
        match=r"the teachers score different numbers of classes \(a 5, b 4\); give each a --class-map",
    ):
        labeled(pair, mosaic(48, 48))


def test_resampled_probabilities_sum_to_one_and_a_constant_map_stays():
    logits = 9 * torch.randn(2, 3, 3, 7, generator=torch.Generator().manual_seed(0))
    wide = resampled(logits, 7)
    assert wide.shape == (2, 7, 7, 7)
    torch.testing.assert_close(
        wide.exp().sum(-1).log(), resampled(logits.logsumexp(-1, keepdim=True), 7)[..., 0]
    )
    # the middle cell's center is one of both
    torch.testing.assert_close(wide[:, 3, 3], logits[:, 1, 1], rtol=1e-5, atol=1e-5)
    assert resampled(logits, 3) is logits
    torch.testing.assert_close(
        resampled(logits[:, :1, :1], 4),
        logits[:, :1, :1].expand(-1, 4, 4, -1),
        rtol=1e-5,
        atol=1e-4,
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(geometry="squash", views=0), "--views 0 cannot be; take 1 to 18"),
        (dict(geometry="squash", views=19), "--views 19 cannot be"),
        (dict(geometry="squash", tiles=2), "--geometry squash cannot have --tiles 2"),
        (dict(geometry="tile"), "--geometry tile cannot have --tiles 1"),
    ],
)
def test_impossible_numbers_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        Teacher(Mosaic(), 48, config=PLAIN, **options)


def test_tiles_too_small_to_overlap_are_refused():
    with pytest.raises(UserError, match="tiles of 2 x 2 cells are too small to overlap"):
        labeled(Teacher(Mosaic(), 2 * CELL, "tile", PLAIN, tiles=2), mosaic(48, 48))


def test_sizes_that_a_network_does_not_take_are_said_when_its_cells_are_counted():
    model = timm.create_model("deit_tiny_patch16_224", depth=1, num_classes=5)
    with pytest.raises(
        UserError, match=r"^vit cannot be shown images of 64 px \(.*\); choose another --input-size"
    ):
        Teacher(model, 64, "squash", CONFIG, name="vit", views=4).looks(50, 50)


def test_a_compiled_teacher_says_the_same():
    """torch.compile's tracing, with no code generated: views, a class map and an ensemble in one
    graph.
    """
    image = mosaic(6 * CELL, 6 * CELL)
    other = Network(
        Mosaic(classes=6),
        6 * CELL,
        CONFIG,
        ClassMap(torch.arange(6), torch.tensor([0, 1, 2, 3, 4, 4]), 5),
    )
    teacher = Teacher(Mosaic(), 6 * CELL, "squash", PLAIN, views=3, others=[other])
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


def test_the_hash_follows_the_weights_of_every_member():
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
    # as before there were ensembles
    assert weights_hash(Teacher(alone, 64, "squash", CONFIG).model) == weights_hash(alone)
