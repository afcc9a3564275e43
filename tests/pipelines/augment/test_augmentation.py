"""Augmentation of whole batches: normalization as in torchvision, Views that follow the warp, and
no host sync.
"""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data import auto_augment
from torchvision.transforms import RandomCrop
from torchvision.transforms.v2 import functional as tv

from densefeed.pipelines.augment import augmentation as augment_module
from densefeed.pipelines.augment import groups, warp
from densefeed.pipelines.augment.augmentation import (
    Augmentation,
    Normalize,
    augment_batches,
    make_noise_table,
)
from densefeed.pipelines.augment.choices import LAYER_NUMBERS
from densefeed.pipelines.augment.operations import histogram
from densefeed.pipelines.augment.settings import GEOMETRIC, Augment
from densefeed.pipelines.batch import Batch
from densefeed.pipelines.plan import AUGMENT, EpochPlan

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PLAN = EpochPlan(num_samples=10_000, batch=64, seed=9, mode="train", sizes=((0, 64),))
FULL = Augment(rand_augment="rand-m9-mstd0.5-inc1", erase_probability=0.5)


def batch_of(image: torch.Tensor, index: torch.Tensor | None = None, repeat: int = 0) -> Batch:
    """Make a batch whose Views are different crops and flips."""
    N = len(image)
    index = torch.arange(N) if index is None else index
    view = torch.tensor([[0.5, 0, 0.25], [0, 0.25, 0.5]]).repeat(N, 1, 1)
    view[1::2, 0] = torch.tensor([-0.75, 0, 0.875])
    return Batch(
        image,
        torch.arange(N),
        view,
        torch.zeros(N, 4),
        index,
        torch.full((N,), repeat),
        torch.ones(N),
        None,
        None,
        None,
        None,
    )


def choose(augmentation: Augmentation, batch: Batch, epoch: int = 0):
    return augmentation.choose(epoch, batch.index, batch.repeat, *batch.image.shape[1:3])


@pytest.fixture(scope="module")
def images(noise) -> torch.Tensor:
    """Make 33 photograph-like crops of 40 x 56."""
    return torch.from_numpy(np.stack([noise(40, 56, seed=number) for number in range(33)]))


def test_normalize_equals_torchvisions_in_channels_last():
    image = torch.randint(
        0, 256, (3, 5, 7, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    got = Normalize(MEAN, STD)(image)
    want = tv.normalize(image.permute(0, 3, 1, 2).double() / 255, MEAN, STD)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)  # float32 on values up to 2.7
    assert got.is_contiguous(memory_format=torch.channels_last)


def test_pixels_inverts_normalize():
    image = (
        torch.arange(256, dtype=torch.uint8)
        .repeat(3)
        .view(1, 3, 256)
        .mT.reshape(1, 16, 16, 3)
        .contiguous()
    )
    normalize = Normalize(MEAN, STD)
    assert torch.equal(normalize.pixels(normalize(image)), image)


@pytest.mark.parametrize(
    "augment", [Augment(), Augment(rand_augment="rand-m9-p0"), Augment(rand_augment="rand-n0")]
)
def test_without_operations_only_normalizes(images, augment):
    augmentation, batch = Augmentation(PLAN, augment, MEAN, STD), batch_of(images)
    out = augmentation(batch, choose(augmentation, batch))
    assert torch.equal(out.image, Normalize(MEAN, STD)(images))
    assert torch.equal(out.view, batch.view)


def apply_timm(
    monkeypatch, augmentation: Augmentation, batch: Batch, epoch: int, bilinear: bool = False
) -> tuple[list[np.ndarray], list[int]]:
    """Apply timm's operations to each crop, as chosen, with the same magnitudes; also return how
    often each is warped.
    """
    chooser = augmentation.choose.__self__
    spec = chooser.spec
    height, width = batch.image.shape[1:3]
    seen, warped = [], []
    for row in range(len(batch.image)):
        one = slice(row, row + 1)
        picture, warps = Image.fromarray(batch.image[row].numpy()), 0
        numbers = [
            LAYER_NUMBERS * layer + number for layer in range(spec.layers) for number in range(6)
        ]
        drawn = PLAN.draws(
            epoch, batch.index[one].numpy(), AUGMENT, numbers, batch.repeat[one].numpy()
        ).reshape(-1, 6)
        for operation, whether, radius, angle, sign, cubic in drawn.tolist():
            if whether >= spec.probability:
                continue
            name = spec.names[int(operation * len(spec.names))]
            level = spec.magnitude + spec.std * np.sqrt(-2 * np.log(1 - radius)) * np.cos(
                2 * np.pi * angle
            )
            level = min(max(level, 0.0), spec.most)
            monkeypatch.setattr(auto_augment.random, "random", lambda sign=sign: sign)
            argument = (
                auto_augment.LEVEL_TO_ARG[name](level, {})
                if auto_augment.LEVEL_TO_ARG[name]
                else ()
            )
            if name.startswith("Posterize") and argument[0] < 1:
                picture = Image.new("RGB", picture.size)  # Pillow 13 raises an error
                continue
            is_cubic = cubic >= 0.5 and not bilinear
            resample = Image.Resampling.BICUBIC if is_cubic else Image.Resampling.BILINEAR
            picture = auto_augment.NAME_TO_OP[name](
                picture, *argument, resample=resample, fillcolor=augmentation.fill
            )
            warps += name in GEOMETRIC
        assert picture.size == (width, height)
        seen.append(np.asarray(picture))
        warped.append(warps)
    return seen, warped


def test_crops_equal_timms(monkeypatch, noise):
    """The same operations at the same magnitudes, by timm's functions on Pillow images, in timm's
    order.

    Without a warp all bytes are equal. One warp changes some pixels by a gray level, and lines of
    pixels on the border; a later operation can amplify a level (solarizing inverts a byte at its
    threshold), so a small share of pixels can differ by much. A wrong order would change the fill
    color, which covers a tenth of a warped image or more. Two warps blur twice in timm, and are
    compared below.
    """
    images = torch.from_numpy(np.stack([noise(40, 56, seed=number) for number in range(150)]))
    augmentation = Augmentation(PLAN, Augment(rand_augment="rand-m9-mstd0.5-inc1-p0.8"), MEAN, STD)
    batch = batch_of(images, torch.arange(150) + 200)
    crops = augmentation.crops(batch, choose(augmentation, batch, epoch=1))
    want, warped = apply_timm(monkeypatch, augmentation, batch, epoch=1)
    assert min(warped.count(warps) for warps in (0, 1)) > 30
    for mine, timms, warps in zip(crops.numpy().astype(int), want, warped, strict=True):
        if warps == 0:
            assert np.array_equal(mine, timms)
        elif warps == 1:
            assert (abs(mine - timms).max(-1) > 20).mean() < 0.04


@settings(max_examples=20)
@given(
    st.integers(0, 2**40), st.integers(1, 9), st.integers(0, 2), st.randoms(use_true_random=False)
)
def test_results_do_not_depend_on_batch_order_or_size(seed, N, repeat, random):
    """A sample's pixels, View and erased boxes do not depend on the rest of the batch, N = 1 and
    odd N included.
    """
    plan = EpochPlan(num_samples=10_000, batch=64, seed=seed, mode="train", sizes=((0, 32),))
    augmentation = Augmentation(
        plan, Augment(rand_augment="rand-m9-mstd0.5-inc1-n3", erase_probability=0.5), MEAN, STD
    )
    rng = np.random.default_rng(N)
    image = torch.from_numpy(rng.integers(0, 256, (N, 17, 23, 3), dtype=np.uint8))
    whole = batch_of(image, torch.arange(N) * 7, repeat)
    out = augmentation(whole, choose(augmentation, whole))
    order = random.sample(range(N), N)
    moved = whole.map_tensors(lambda field: field[order])
    for at, got, view in zip(
        order, *augmentation(moved, choose(augmentation, moved))[:3:2], strict=True
    ):
        assert torch.equal(got, out.image[at])
        assert torch.equal(view, out.view[at])
    alone = whole.map_tensors(lambda field: field[:1])
    assert torch.equal(augmentation(alone, choose(augmentation, alone)).image[0], out.image[0])


def points(side: int) -> torch.Tensor:
    """Return (x, y, 1) of each pixel's center in a square: float32 `[side, side, 3]`."""
    center = (torch.arange(side) + 0.5) / side
    return torch.stack(
        [center.expand(side, side), center[:, None].expand(side, side), torch.ones(side, side)], -1
    )


def test_composed_warps_equal_timms_successive_ones(monkeypatch):
    """Three geometric operations composed into one, on pixels that encode their position, against
    timm's three resamplings.

    A pixel is 4 levels, and each of timm's passes truncates by up to a level. Where blue is 255,
    timm's pixel is not blended with the fill color: bilinear weights are not negative, so only
    unblended pixels reach 255.
    """
    N, side = 40, 64
    augmentation = Augmentation(PLAN, Augment(rand_augment="rand-m5-mstd2-p1-n3"), MEAN, STD)
    chooser = augmentation.choose.__self__
    chooser.spec = chooser.spec._replace(names=GEOMETRIC)
    batch = batch_of((points(side) * 255).round().to(torch.uint8).repeat(N, 1, 1, 1))
    choice = choose(augmentation, batch)
    # A view of the numbers that were drawn.
    choice.cubic.zero_()
    crops = augmentation.crops(batch, choice).numpy().astype(int)
    timms, warped = apply_timm(monkeypatch, augmentation, batch, epoch=0, bilinear=True)
    assert all(warped)
    compared = 0
    for mine, want in zip(crops, timms, strict=True):
        clear = (want[..., 2] == 255) & (mine[..., 2] == 255)
        # Pixels without neighbors beyond the edge.
        inner = clear & (mine[..., :2] > 12).all(-1) & (mine[..., :2] < 243).all(-1)
        assert abs(mine - want)[inner].max(initial=0) <= 3
        compared += inner.sum()
    assert compared > 0.2 * N * side * side


def test_views_follow_the_warp():
    """Pixels encode their position in the crop: after the warp the new View, composed with the
    inverse of the old one, predicts the pixel values.

    Red is x and green y, 8 levels per pixel: half a pixel would be 4 levels. Interpolation of a
    linear function is exact except for three errors: rounding of the encoded bytes, half a level
    times 1.5 along each axis (the sum of the absolute bicubic weights); truncation, a level; and
    cubic convolution with a = -1, which bends a line by d (1 - d) (1 - 2 d) pixels, at most 0.0963.
    Three pixels from the edge no repeated neighbor is read.
    """
    N, side = 64, 32
    augmentation = Augmentation(PLAN, Augment(rand_augment="rand-m9-mstd0.5-p1-n3"), MEAN, STD)
    chooser = augmentation.choose.__self__
    chooser.spec = chooser.spec._replace(names=GEOMETRIC)
    point = points(side)
    batch = batch_of((point * 255).round().to(torch.uint8).repeat(N, 1, 1, 1))
    choice = choose(augmentation, batch)
    assert len(choice.warp_row) == N
    stored = torch.einsum("nij,yxj->nyxi", augmentation(batch, choice).view, point)
    turned, shift = batch.view[:, :, :2], batch.view[:, None, None, :, 2]
    source = torch.einsum("nij,nyxj->nyxi", torch.linalg.inv(turned), stored - shift)
    crops = augmentation.crops(batch, choice)
    well_inside = ((source > 3 / side) & (source < 1 - 3 / side)).all(-1)
    beyond = ((source < -1e-4) | (source > 1 + 1e-4)).any(-1)
    assert well_inside.float().mean() > 0.2
    assert (crops[..., :2] - 255 * source)[well_inside].abs().max() < 0.5 * 1.5**2 + 1 + 0.0963 * 8
    assert beyond.any()
    assert (crops[beyond] == torch.tensor(augmentation.fill, dtype=torch.uint8)).all()


def test_a_shift_is_a_crop_of_the_padded_image(images):
    """Byte for byte a slice of the padded image, as RandomCrop(size, padding=4), at many of its 81
    positions; the View follows.
    """
    augmentation, batch = Augmentation(PLAN, Augment(shift=4), MEAN, STD), batch_of(images)
    choice = choose(augmentation, batch)
    crops, view = augmentation.crops(batch, choice), augmentation(batch, choice).view
    H, W = images.shape[1:3]
    for row, (crop, (right, down)) in enumerate(
        zip(crops, choice.pixel_matrix[:, :, 2].int().tolist(), strict=True)
    ):
        padded = torch.tensor(augmentation.fill, dtype=torch.uint8).repeat(H + 8, W + 8, 1)
        padded[4:-4, 4:-4] = images[row]
        assert torch.equal(crop, padded[4 + down : 4 + down + H, 4 + right : 4 + right + W])
        moved = batch.view[row][:, 2] + batch.view[row][:, :2] @ torch.tensor([right / W, down / H])
        torch.testing.assert_close(view[row][:, 2], moved)
        assert torch.equal(view[row][:, :2], batch.view[row][:, :2])
    assert choice.pixel_matrix[:, :, 2].any()


@pytest.mark.parametrize("policy", ["", "rand-m9-mstd0.5-n3-inc1"])
def test_a_black_border_is_that_of_torchvisions_random_crop(images, monkeypatch, policy):
    """Byte for byte RandomCrop(size, padding=4), then RandAugment: its operations see the border.

    Labels follow both.
    """
    H, W = images.shape[1:3]
    augment = Augment(shift=4, shift_border="black", rand_augment=policy)
    augmentation, batch = Augmentation(PLAN, augment, MEAN, STD), batch_of(images)
    choice = choose(augmentation, batch)
    alone = Augmentation(PLAN, Augment(shift=4), MEAN, STD)
    moves = choose(alone, batch).pixel_matrix[:, :, 2].int().tolist()
    padded = []
    for image, (right, down) in zip(images, moves, strict=True):
        place = 4 + down, 4 + right, H, W
        monkeypatch.setattr(RandomCrop, "get_params", lambda *_, place=place: place)
        padded.append(RandomCrop((H, W), padding=4)(image.permute(2, 0, 1)).permute(1, 2, 0))
    assert len({tuple(move) for move in moves}) > 20
    later = Augmentation(PLAN, Augment(rand_augment=policy), MEAN, STD)
    rest = batch._replace(image=torch.stack(padded), view=alone(batch, choose(alone, batch)).view)
    assert torch.equal(augmentation.crops(batch, choice), later.crops(rest, choose(later, rest)))
    want = later(rest, choose(later, rest)).view
    torch.testing.assert_close(augmentation(batch, choice).view, want, rtol=0, atol=1e-6)


def test_only_image_and_view_change(images):
    augmentation, batch = Augmentation(PLAN, FULL, MEAN, STD), batch_of(images)
    before = batch.map_tensors(torch.clone)
    out = augmentation(batch, choose(augmentation, batch))
    for name, was in before.tensors.items():
        assert torch.equal(was, batch.tensors[name]), name
        assert name in ("image", "view") or torch.equal(was, out.tensors[name]), name
    assert out.image.is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(out.view, batch.view)


def test_erased_boxes_have_the_right_content(images):
    """Inside its box a crop is standard normal noise; outside it does not change."""
    augmentation = Augmentation(PLAN, Augment(erase_probability=0.9), MEAN, STD)
    batch = batch_of(images)
    choice = choose(augmentation, batch)
    assert len(choice.boxes) > 20
    want, noise, inside = Normalize(MEAN, STD)(images), make_noise_table(PLAN), []
    for box in choice.boxes:
        hole = want[box.sample, :, box.top : box.top + box.height, box.left : box.left + box.width]
        for y in range(box.height):
            row = noise[box.noise + 3 * y * box.width :][: 3 * box.width].view(box.width, 3).T
            hole[:, y] = row
        inside.append(hole.flatten())
    got = augmentation(batch, choice).image
    assert torch.equal(got, want)
    values = torch.cat(inside)
    assert abs(values.mean()) < 5 / len(values) ** 0.5
    assert abs(values.std() - 1) < 5 / len(values) ** 0.5


def test_noise_is_normal_and_depends_on_the_seed():
    noise = make_noise_table(PLAN).double()
    assert len(noise) >= 2**20
    grid = torch.linspace(-4, 4, 81, dtype=torch.float64)
    share = torch.searchsorted(noise.sort().values, grid) / len(noise)
    assert (share - torch.special.ndtr(grid)).abs().max() < 2.23 / len(noise) ** 0.5
    assert abs((noise[1:] * noise[:-1]).mean()) < 5 / len(noise) ** 0.5
    assert torch.equal(noise, make_noise_table(PLAN).double())
    other = EpochPlan(num_samples=10, batch=2, seed=1, mode="train")
    assert not torch.equal(noise[:1000], make_noise_table(other)[:1000].double())


def test_the_device_part_needs_no_host_sync(images, monkeypatch, no_host_read):
    """As on a GPU: all samples at once, the warp by gathers, histograms by scattering."""
    augment = Augment(rand_augment="rand-m9-mstd0.5-p1-n4-inc1", erase_probability=0.5)
    augmentation, batch = Augmentation(PLAN, augment, MEAN, STD), batch_of(images)
    choice = choose(augmentation, batch)
    on_cpu = augmentation(batch, choice).image
    monkeypatch.setattr(augment_module, "warp_images", warp.warp_by_gather)

    def at_once(image, row, operation, *arguments):
        image.index_copy_(0, row, operation(image.index_select(0, row), *arguments))

    for module in (augment_module, groups):
        monkeypatch.setattr(module, "apply_rows", at_once)
    monkeypatch.setattr(
        torch.Tensor, "bincount", lambda index, minlength: histogram(index, minlength)
    )
    with no_host_read():
        got = augmentation(batch, choice).image
    assert len(choice.before) + len(choice.after) > 8
    # The two warps differ by a gray level in some pixels, which equalizing can amplify; most
    # samples are equal.
    assert ((got - on_cpu).abs() > 0.02).float().mean() < 0.05


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_without_a_host_sync(images):
    augment = Augment(rand_augment="rand-m9-mstd0.5-p1-n4-inc1", erase_probability=0.5)
    augmentation, batch = Augmentation(PLAN, augment, MEAN, STD), batch_of(images)
    choice = choose(augmentation, batch)
    on_cpu, device = augmentation(batch, choice), torch.device("cuda")
    augmentation, batch = augmentation.to(device), batch.to(device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = augmentation(batch, choice)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ((got.image.cpu() - on_cpu.image).abs() > 0.02).float().mean() < 0.05
    torch.testing.assert_close(got.view.cpu(), on_cpu.view, rtol=0, atol=1e-6)


def test_batches_keep_their_order_and_choice(images):
    augmentation = Augmentation(PLAN, FULL, MEAN, STD)
    batches = [
        batch_of(images[:size], torch.arange(size) + 100 * size)._replace(epoch=2)
        for size in (33, 1, 7)
    ]
    got = list(augment_batches(iter(batches), augmentation, torch.device("cpu")))
    for batch, out in zip(batches, got, strict=True):
        want = augmentation(batch, choose(augmentation, batch, epoch=2))
        assert torch.equal(out.image, want.image)
        assert torch.equal(out.view, want.view)


def test_choosing_is_cheap(images):
    """Processor time for 256 samples is far below a step: 20 ms is fifty times the time on an idle
    machine.
    """
    augmentation = Augmentation(PLAN, FULL, MEAN, STD)
    index = np.arange(256)
    took = []
    for epoch in range(3):
        start = time.process_time()  # wall-clock time would include other processes
        augmentation.choose(epoch, index, np.zeros(256, int), 64, 64)
        took.append(time.process_time() - start)
    assert min(took) < 0.02
