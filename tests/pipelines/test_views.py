"""Views against pixels: an image whose pixels are their own coordinates passes through pipelines of
torchvision, and its pixels say where the View must point.
"""

import copy
import inspect
import pickle
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F
from torchvision.transforms.v2.functional._utils import _KERNEL_REGISTRY

from densefeed import UserError, View
from densefeed.pipelines import views
from densefeed.storage.geometry import crop_views, visible_boxes

# Largest differences in sides of the stored image. The bar of float tensors.
EXACT = 1e-4
BILINEAR = v2.InterpolationMode.BILINEAR
GEOMETRIC = {"ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"}


def coordinates(height: int, width: int) -> Tensor:
    """Make float64 `[3, H, W]`: x and y of each pixel's center, and 1; 0 is fill."""
    x = ((torch.arange(width, dtype=torch.float64) + 0.5) / width).expand(height, width)
    y = ((torch.arange(height, dtype=torch.float64) + 0.5) / height)[:, None].expand_as(x)
    return erase_border(torch.stack([x, y, torch.ones_like(x)]))


def erase_border(image: Tensor, width: int = 1) -> Tensor:
    """Mark the outer pixels as fill: interpolation repeats them, and so does not go on beyond."""
    kept = torch.zeros_like(image[-1])
    kept[width:-width, width:-width] = 1
    return torch.cat([image[:-1], image[-1:] * kept])


def border(step: v2.Transform) -> int:
    """Return how many pixels a step may have repeated: more where it cuts and then enlarges."""
    return 4 if isinstance(step, v2.RandomResizedCrop) else 1


def run(steps, image, seed=0):
    """Pass the image and its View through steps."""
    torch.manual_seed(seed)
    view = View.identity(image)
    for step in steps:
        image, view = step(image, view)
        image = erase_border(image, border(step))
    return image, view


def run_pil(steps, image, seed=0):
    """Do the same with each channel as an image of mode F."""
    channels = []
    for number, channel in enumerate(image):
        torch.manual_seed(seed)
        picture = to_pil(channel)
        view = View.identity(picture)
        for step in steps:
            picture, view = step(picture, view)
            if number == 2:
                picture = to_pil(erase_border(F.pil_to_tensor(picture), border(step))[0])
        channels.append(F.pil_to_tensor(picture)[0].double())
    return torch.stack(channels), view


def to_pil(channel: Tensor) -> Image.Image:
    return Image.fromarray(channel.numpy().astype(np.float32))


def predict(view: View, height: int, width: int) -> Tensor:
    """Compute what a View says of each pixel's center: float64 `[2, H, W]`."""
    x = ((torch.arange(width, dtype=torch.float64) + 0.5) / width).expand(height, width)
    y = ((torch.arange(height, dtype=torch.float64) + 0.5) / height)[:, None].expand_as(x)
    a = view.matrix[:, :, None, None]
    return a[:, 0] * x + a[:, 1] * y + a[:, 2]


def deviation(image: Tensor, view: View, rounding: float = 1e-9) -> tuple[float, int]:
    """Compare pixels that are not fill: the largest difference in sides, and how many they are."""
    height, width = image.shape[1:]
    assert view.canvas_size == (height, width)
    valid = image[2] > 1 - rounding
    top, left, bottom, right = view.shown
    x, y = image[:2, valid]
    assert ((x > left) & (x < right) & (y > top) & (y < bottom)).all()
    far = (predict(view, height, width) - image[:2]).abs()[:, valid]
    return far.amax().item() if valid.any() else 0.0, int(valid.sum())


# ---------------------------------------------------------------- every transform

SMOOTH = {"interpolation": BILINEAR}
# Bilinear without antialiasing is exact on a linear image.
POINT = {"antialias": False}
TRANSFORMS = {
    "crop": lambda: v2.RandomCrop((61, 70)),
    "crop padded": lambda: v2.RandomCrop((150, 99), padding=[3, 5, 7, 11], pad_if_needed=True),
    "center crop": lambda: v2.CenterCrop((50, 41)),
    "center crop square": lambda: v2.CenterCrop(60),
    "center crop beyond": lambda: v2.CenterCrop((131, 71)),
    "center crop far beyond": lambda: v2.CenterCrop([200]),
    "resized crop": lambda: v2.RandomResizedCrop((64, 48), **POINT),
    "resize": lambda: v2.Resize((130, 55), **POINT),
    "resize shorter": lambda: v2.Resize(77, **POINT),
    "resize limited": lambda: v2.Resize(60, max_size=71, **POINT),
    "resize longer": lambda: v2.Resize(None, max_size=75, **POINT),
    "scale jitter": lambda: v2.ScaleJitter((90, 110), (0.5, 1.5), **POINT),
    "shortest size": lambda: v2.RandomShortestSize([60, 90], 110, **POINT),
    "random resize": lambda: v2.RandomResize(50, 120, **POINT),
    "pad": lambda: v2.Pad(9),
    "pad two": lambda: v2.Pad([4, 13], fill=0.0),
    "pad four": lambda: v2.Pad([1, 2, 3, 4]),
    "pad negative": lambda: v2.Pad([-5, 4, 3, -6]),
    "zoom out": lambda: v2.RandomZoomOut(p=1),
    "flip": lambda: v2.RandomHorizontalFlip(1),
    "vertical flip": lambda: v2.RandomVerticalFlip(1),
    "affine": lambda: v2.RandomAffine(40, (0.1, 0.2), (0.7, 1.4), (-20, 20, -10, 15), **SMOOTH),
    "affine sheared": lambda: v2.RandomAffine(0, shear=25, **SMOOTH),
    "affine centered": lambda: v2.RandomAffine(30, (0.1, 0.1), center=[13, 70], **SMOOTH),
    "rotation": lambda: v2.RandomRotation(180, **SMOOTH),
    "rotation centered": lambda: v2.RandomRotation(70, center=[20.5, 31], **SMOOTH),
    "rotation expanded": lambda: v2.RandomRotation(180, expand=True, **SMOOTH),
    "rotation expanded, centered": lambda: v2.RandomRotation(
        50, expand=True, center=[40, 30], **SMOOTH
    ),
    "a quarter": lambda: v2.RandomRotation((90, 90), **SMOOTH),
    "a quarter expanded": lambda: v2.RandomRotation((270, 270), expand=True),
    "half a turn": lambda: v2.RandomRotation((180, 180)),
    "RandAugment": lambda: geometric(views.RandAugment)(1, 20, **SMOOTH),
    "AutoAugment": lambda: geometric(views.AutoAugment)(v2.AutoAugmentPolicy.SVHN, **SMOOTH),
    "TrivialAugmentWide": lambda: geometric(views.TrivialAugmentWide)(**SMOOTH),
    "one of two": lambda: v2.RandomChoice([v2.CenterCrop(50), v2.RandomHorizontalFlip(1)]),
    "any order": lambda: v2.RandomOrder([v2.Pad(3), v2.RandomRotation(9, **SMOOTH)]),
    "applied": lambda: v2.RandomApply([v2.Pad(3), v2.CenterCrop(55)], 0.9),
}


def geometric(policy):
    """Make a class with the policy's draws that leaves colors, here coordinates, as they are."""

    class Geometric(policy):
        def _apply_image_or_video_transform(self, image, transform_id, *numbers, **options):
            if transform_id not in GEOMETRIC:
                return image
            return super()._apply_image_or_video_transform(image, transform_id, *numbers, **options)

    return Geometric


@pytest.mark.parametrize("name", TRANSFORMS)
def test_pixels_are_where_the_view_says(name):
    for seed in range(8):
        far, count = deviation(*run([TRANSFORMS[name]()], coordinates(97, 83), seed))
        assert far < EXACT
        assert count > 1800


# ---------------------------------------------------------------- compositions

ints, side = st.integers, st.integers(40, 130)
STEPS = st.one_of(
    st.builds(lambda h, w: v2.RandomResizedCrop((h, w), (0.3, 1), **POINT), side, side),
    st.builds(lambda h, w: v2.Resize((h, w), **POINT), side, side),
    st.builds(lambda s, m: v2.Resize(s, max_size=s + m, **POINT), side, ints(1, 60)),
    st.builds(lambda h, w: v2.RandomCrop((h, w), pad_if_needed=True), side, side),
    st.builds(lambda h, w: v2.CenterCrop((h, w)), side, side),
    st.builds(v2.Pad, st.lists(ints(-6, 20), min_size=4, max_size=4)),
    st.builds(lambda: v2.RandomHorizontalFlip(1)),
    st.builds(lambda: v2.RandomVerticalFlip(1)),
    st.builds(
        lambda degrees, shear, center: v2.RandomAffine(
            degrees, (0.1, 0.1), (0.8, 1.3), (-shear, shear, -9, 9), center=center, **SMOOTH
        ),
        ints(0, 180),
        ints(1, 25),
        st.none() | st.lists(side, min_size=2, max_size=2),
    ),
    st.builds(
        lambda degrees, expand: v2.RandomRotation(degrees, expand=expand, **SMOOTH),
        ints(1, 180),
        st.booleans(),
    ),
    st.builds(lambda count: geometric(views.RandAugment)(count, 15, **SMOOTH), ints(1, 3)),
    st.builds(lambda: geometric(views.TrivialAugmentWide)(**SMOOTH)),
)
COMPOSITIONS = st.lists(STEPS, min_size=2, max_size=6)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(COMPOSITIONS, side, side, ints(0, 2**31))
def test_outside_compositions_are_exact_on_float_tensors(steps, height, width, seed):
    far, _ = deviation(*run(steps, coordinates(height, width), seed))
    assert far < EXACT


# ---------------------------------------------------------------- Pillow, uint8, float32

# A triangle filter at the centers of pixels has its own mean off the center by this at most, in
# pixels of its input: the largest over all scales and positions.
ANTIALIASED = 0.086


def is_resizing(step) -> bool:
    names = "Resize", "ResizedCrop", "ScaleJitter", "ShortestSize"
    return type(step).__name__.endswith(names)


@pytest.mark.filterwarnings("ignore:Anti-alias option is always applied")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_pixels_of_pil_images_are_where_the_view_says(name):
    step = TRANSFORMS[name]()
    # Pillow always antialiases. Otherwise, coordinates are rounded to float32.
    bar = ANTIALIASED / 83 if is_resizing(step) else 1e-6
    for seed in range(4):
        far, count = deviation(*run_pil([step], coordinates(97, 83), seed), 1e-6)
        assert far < bar
        assert count > 1800


@settings(max_examples=50, deadline=None, derandomize=True)
@given(COMPOSITIONS, side, side, ints(0, 2**31))
def test_outside_compositions_are_exact_on_pil_images(steps, height, width, seed):
    steps = [step for step in steps if not is_resizing(step)]
    for step in steps:
        # Pillow repeats pixels where an operation cuts, unmarked between two of one policy.
        if isinstance(step, v2.RandAugment):
            step.num_ops = 1
    far, _ = deviation(*run_pil(steps, coordinates(height, width), seed), 1e-6)
    assert far < 1e-6


@pytest.mark.parametrize("name", ["resize", "resized crop", "resize shorter"])
def test_antialiased_pixels_are_where_the_view_says(name):
    step = TRANSFORMS[name]()
    step.antialias = True
    for seed in range(4):
        far, _ = deviation(*run([step], coordinates(97, 83), seed))
        assert far < ANTIALIASED / 83


@pytest.mark.parametrize("kind", ["float32", "uint8", "tv_tensor", "pil"])
def test_every_kind_of_image_has_the_same_view(kind):
    """8 bits: two steps that interpolate round by half a level each, a third by the border."""
    steps = v2.RandomAffine(20, (0.1, 0.1), **SMOOTH), v2.CenterCrop(70), v2.RandomRotation(9)
    exact = coordinates(97, 83)
    rounded = (exact * 255).round().to(torch.uint8)
    pixels = {
        "float32": exact.float(),
        "uint8": rounded,
        "tv_tensor": tv_tensors.Image(rounded),
        "pil": F.to_pil_image(rounded),
    }[kind]
    torch.manual_seed(5)
    image, view = v2.Compose([*steps, v2.ToImage()])(pixels, View.identity(pixels))
    _, want = run(steps, exact, 5)
    assert torch.equal(view.plain, want.plain)
    values = image.double() if kind == "float32" else image.double() / 255
    # Nearest pixels of the rotation: half of one, along both axes; and the levels.
    far, _ = deviation(values.as_subclass(Tensor), view, 1e-6)
    assert far < 0.5 * 2**0.5 / 83 + (0 if kind == "float32" else 1.5 / 255)


# Sizes of expanded rotations that PIL and torchvision's tensors round differently.
@pytest.mark.parametrize(
    ("height", "width", "angle"), [(169, 81, -120.19098663330078), (358, 79, -138.99522399902344)]
)
def test_the_size_of_an_expanded_rotation_is_that_of_the_image(height, width, angle):
    sizes = []
    for image in (Image.new("L", (width, height)), torch.zeros(1, height, width)):
        turned = F.rotate(image, angle, expand=True)
        view = F.rotate(View.identity(image), angle, expand=True)
        assert list(view.canvas_size) == F.get_size(turned)
        sizes.append(view.canvas_size)
        # Other operations keep what kind the image is of.
        again = F.rotate(F.horizontal_flip(View.identity(image)), angle, expand=True)
        assert again.canvas_size == view.canvas_size
    assert sizes[0] != sizes[1]


# ---------------------------------------------------------------- what is shown


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric"])
def test_padding_is_outside_in_every_mode(mode):
    image = coordinates(60, 90)
    view = View.identity(image)
    for step in (lambda one: F.crop(one, 10, 20, 30, 40), lambda one: F.pad(one, 8, 0, mode)):
        image, view = step(image), step(view)
    assert view.canvas_size == (46, 56)
    torch.testing.assert_close(
        view.shown, torch.tensor([10 / 60, 20 / 90, 40 / 60, 60 / 90]).double()
    )
    point = predict(view, 46, 56)
    top, left, bottom, right = view.shown
    inside = (point[0] > left) & (point[0] < right) & (point[1] > top) & (point[1] < bottom)
    assert inside.sum() == 30 * 40
    torch.testing.assert_close(point[:, inside], image[:2, inside])


def test_shown_is_the_box_around_what_is_left():
    """Every pixel that is not fill lies inside, up to its own size, and some at each side."""
    for seed in range(30):
        torch.manual_seed(seed)
        image = coordinates(120, 90)
        steps = v2.RandomResizedCrop((80, 70), **POINT), v2.RandomAffine(40, (0.2, 0.2), **SMOOTH)
        image, view = run(steps, image, seed)
        x, y = image[:2, image[2] > 0.999]
        ends = torch.stack([y.min(), x.min(), y.max(), x.max()])
        assert (ends - view.shown).abs().max() < 0.08
        outward = torch.tensor([1, 1, -1, -1])
        assert ((ends - view.shown) * outward > 0).all()
    # Nothing is left: an empty box.
    gone = F.affine(View.identity(image), 0, [500, 0], 1, [0, 0])
    assert gone.shown[1] == gone.shown[3]


def test_crops_have_the_views_of_the_loaders():
    rng = np.random.default_rng(0)
    for _ in range(200):
        height, width = rng.integers(20, 500, 2).tolist()
        h, w = (int(rng.integers(1, side + 1)) for side in (height, width))
        top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
        view = View.identity(torch.empty(1, height, width))
        view = F.horizontal_flip(F.resized_crop(view, top, left, h, w, [224, 224]))
        box = np.array([[top, left, h, w]])
        want = crop_views(box, np.array([True]), np.array([height]), np.array([width]))
        torch.testing.assert_close(view.matrix.float()[None], torch.from_numpy(want))
        torch.testing.assert_close(
            view.shown.float()[None], torch.from_numpy(visible_boxes(want)), rtol=0, atol=2e-7
        )
        # No rounding beside the diagonal: targets take the faster way.
        assert view.matrix[0, 1] == view.matrix[1, 0] == 0
        assert F.rotate(view, 180).matrix[0, 1] == 0


# ---------------------------------------------------------------- policies

POLICIES = {
    "RandAugment": lambda module: module.RandAugment(3, 12),
    "AutoAugment": lambda module: module.AutoAugment(v2.AutoAugmentPolicy.SVHN, fill=128),
    "TrivialAugmentWide": lambda module: module.TrivialAugmentWide(interpolation=BILINEAR),
}


@pytest.mark.parametrize("kind", ["pil", "uint8"])
@pytest.mark.parametrize("name", POLICIES)
def test_outside_policies_make_the_images_of_torchvision(name, kind):
    """To the bit, and leave the generator in the same state, with a View before or after."""
    noise = torch.randint(256, (3, 40, 52), generator=torch.Generator().manual_seed(0))
    noise = noise.to(torch.uint8)
    image = noise if kind == "uint8" else F.to_pil_image(noise)
    view, changed = View.identity(image), 0
    for seed in range(30):
        torch.manual_seed(seed)
        want, state = POLICIES[name](v2)(image), torch.rand(1)
        torch.manual_seed(seed)
        (moved, other), got, label = POLICIES[name](views)([view, None], image, 3)
        assert torch.equal(F.to_image(got), F.to_image(want))
        assert torch.rand(1) == state
        assert (other, label) == (None, 3)
        torch.manual_seed(seed)
        sample = POLICIES[name](views)({"image": image, "view": view})
        assert torch.equal(sample["view"].plain, moved.plain)
        changed += not torch.equal(moved.plain, view.plain)
    assert 3 <= changed < 30


@pytest.mark.parametrize("name", POLICIES)
def test_outside_every_operation_of_a_policy_is_known(name):
    policy = POLICIES[name](views)
    assert set(policy._AUGMENTATION_SPACE) <= views.KEEPING | GEOMETRIC
    with pytest.raises(TypeError, match=rf"type View are not supported by {name}"):
        POLICIES[name](v2)(torch.zeros(3, 9, 9, dtype=torch.uint8), make_view())
    # What torchvision's refuse is refused still.
    with pytest.raises(TypeError, match=f"type Mask are not supported by {name}"):
        policy(torch.zeros(3, 9, 9, dtype=torch.uint8), tv_tensors.Mask(torch.zeros(9, 9)))


def test_outside_threads_share_a_policy():
    """Both calls are between their first and second operation at once."""
    barrier = threading.Barrier(2)

    class Waiting(views.RandAugment):
        def _apply_image_or_video_transform(self, *arguments, **options):
            barrier.wait(20)
            return super()._apply_image_or_video_transform(*arguments, **options)

    policy, found = Waiting(2), {}
    policy._AUGMENTATION_SPACE = {"Rotate": v2.RandAugment._AUGMENTATION_SPACE["Rotate"]}

    def work(side):
        image = torch.zeros(3, side, side, dtype=torch.uint8)
        found[side] = policy(image, View.identity(image))[1]

    threads = [threading.Thread(target=work, args=(side,)) for side in (20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {side: view.canvas_size for side, view in found.items()} == {20: (20, 20), 30: (30, 30)}


# ---------------------------------------------------------------- every class and functional


def make_view() -> View:
    """Return a View whose numbers are neither whole nor small."""
    return F.rotate(F.crop(View.identity(torch.empty(1, 70, 90)), 5, 6, 41, 50), 20)


KEEPS = {
    "ClampBoundingBoxes": v2.ClampBoundingBoxes,
    "ClampKeyPoints": v2.ClampKeyPoints,
    "ColorJitter": lambda: v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
    "ConvertBoundingBoxFormat": lambda: v2.ConvertBoundingBoxFormat("XYWH"),
    "ConvertImageDtype": v2.ConvertImageDtype,
    "GaussianBlur": lambda: v2.GaussianBlur(3),
    "GaussianNoise": v2.GaussianNoise,
    "Grayscale": v2.Grayscale,
    "Identity": v2.Identity,
    "JPEG": lambda: v2.JPEG(50),
    "Lambda": lambda: v2.Lambda(lambda image: image / 2, tv_tensors.Image),
    "LinearTransformation": lambda: v2.LinearTransformation(torch.eye(60), torch.zeros(60)),
    "Normalize": lambda: v2.Normalize([0.5] * 3, [0.5] * 3),
    "PILToTensor": v2.PILToTensor,
    "RGB": v2.RGB,
    "RandomAdjustSharpness": lambda: v2.RandomAdjustSharpness(2, 1),
    "RandomAutocontrast": lambda: v2.RandomAutocontrast(1),
    "RandomChannelPermutation": v2.RandomChannelPermutation,
    "RandomEqualize": lambda: v2.RandomEqualize(1),
    "RandomErasing": lambda: v2.RandomErasing(1),
    "RandomGrayscale": lambda: v2.RandomGrayscale(1),
    "RandomInvert": lambda: v2.RandomInvert(1),
    "RandomPhotometricDistort": lambda: v2.RandomPhotometricDistort(p=1),
    "RandomPosterize": lambda: v2.RandomPosterize(3, 1),
    "RandomSolarize": lambda: v2.RandomSolarize(9, 1),
    "SanitizeBoundingBoxes": lambda: v2.SanitizeBoundingBoxes(labels_getter=None),
    "SanitizeKeyPoints": lambda: v2.SanitizeKeyPoints(labels_getter=None),
    "SetClampingMode": lambda: v2.SetClampingMode("soft"),
    "ToDtype": lambda: v2.ToDtype({tv_tensors.Image: torch.float16, "others": torch.float32}),
    "ToImage": v2.ToImage,
    "ToPILImage": v2.ToPILImage,
    "ToPureTensor": v2.ToPureTensor,
    "ToTensor": v2.ToTensor,
    "UniformTemporalSubsample": lambda: v2.UniformTemporalSubsample(3),
}
BATCHES = {"CutMix", "MixUp"}
FLOATS = {"LinearTransformation", "Normalize"}
REFUSES = {
    "AugMix": (v2.AugMix, TypeError, "AugMix"),
    "AutoAugment": (v2.AutoAugment, TypeError, "AutoAugment"),
    "CutMix": (lambda: v2.CutMix(num_classes=3), ValueError, "CutMix"),
    "ElasticTransform": (v2.ElasticTransform, UserError, "cannot follow elastic of torchvision"),
    "FiveCrop": (lambda: v2.FiveCrop(3), TypeError, "FiveCrop"),
    "MixUp": (lambda: v2.MixUp(num_classes=3), ValueError, "MixUp"),
    "RandAugment": (v2.RandAugment, TypeError, "RandAugment"),
    "RandomPerspective": (lambda: v2.RandomPerspective(p=1), UserError, "cannot follow perspec"),
    "TenCrop": (lambda: v2.TenCrop(3), TypeError, "TenCrop"),
    "TrivialAugmentWide": (v2.TrivialAugmentWide, TypeError, "TrivialAugmentWide"),
}
FOLLOWS = {type(make()).__name__ for make in TRANSFORMS.values()} - {"Geometric"}
FOLLOWS |= {"Compose", "RandomIoUCrop"}
# Functionals that change colors, or Views have nothing for.
WITHOUT_KERNEL = """
    get_dimensions get_num_channels get_num_frames erase jpeg normalize gaussian_blur gaussian_noise
    rgb_to_grayscale grayscale_to_rgb adjust_brightness adjust_saturation adjust_contrast
    adjust_sharpness adjust_hue adjust_gamma posterize solarize autocontrast equalize invert
    permute_channels uniform_temporal_subsample
"""


def test_outside_every_transform_of_torchvision_is_known():
    """A new one of a later version needs a row in one of the tables, and maybe a kernel."""
    classes = {n: one for n, one in vars(v2).items() if inspect.isclass(one)}
    found = {name for name, one in classes.items() if issubclass(one, v2.Transform)}
    assert found - {"Transform"} == FOLLOWS | set(KEEPS) | set(REFUSES)
    without = {one.__name__ for one, kernels in _KERNEL_REGISTRY.items() if View not in kernels}
    assert without == set(WITHOUT_KERNEL.split())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", KEEPS)
def test_views_pass_through_what_moves_no_pixel(name):
    view = make_view()
    sample = {
        "view": view,
        "image": tv_tensors.Image(torch.randint(256, (3, 4, 5), dtype=torch.uint8)),
        "boxes": tv_tensors.BoundingBoxes([[1, 1, 3, 3]] * 2, format="XYXY", canvas_size=(4, 5)),
        "points": tv_tensors.KeyPoints([[1, 1], [2, 9]], canvas_size=(4, 5)),
    }
    if name in FLOATS:
        sample["image"] = tv_tensors.Image(sample["image"].float())
    if name == "PILToTensor":
        sample["image"] = F.to_pil_image(sample["image"])
    got = KEEPS[name]()(sample)["view"]
    assert isinstance(got, View)
    assert got.dtype == torch.float64
    assert torch.equal(got.plain, view.plain)


@pytest.mark.parametrize("name", REFUSES)
def test_outside_what_no_view_can_follow_is_refused_by_name(name):
    make, error, words = REFUSES[name]
    image = torch.zeros((2, 3, 41, 50) if name in BATCHES else (3, 41, 50), dtype=torch.uint8)
    with pytest.raises(error, match=words):
        make()(image, torch.tensor([0, 1]), make_view())
    if name.endswith("Crop"):
        functional = F.five_crop if name == "FiveCrop" else F.ten_crop
        with pytest.raises(UserError, match=r"cannot follow (five|ten)_crop .* F\.crop"):
            functional(make_view(), [3, 3])


def test_iou_crops_are_followed():
    image = coordinates(80, 70)
    boxes = tv_tensors.BoundingBoxes([[9, 9, 50, 60]], format="XYXY", canvas_size=(80, 70))
    torch.manual_seed(1)
    out, view, _ = v2.RandomIoUCrop()(tv_tensors.Image(image), View.identity(image), boxes)
    assert out.shape[1:] != image.shape[1:]
    assert deviation(out.as_subclass(Tensor), view)[0] < 1e-12


def test_outside_a_functional_that_is_not_known_is_refused():
    """A kernel for masks would take a View for pixels."""
    with pytest.raises(UserError, match="cannot follow this transform"):
        tv_tensors.wrap(torch.zeros(2, 6), like=make_view())


def test_a_view_after_to_pure_tensor_is_still_followed():
    image = coordinates(30, 40)
    pipeline = v2.Compose([v2.ToImage(), v2.ToPureTensor(), v2.RandomHorizontalFlip(1)])
    out, view = pipeline(image, View.identity(image))
    assert deviation(out, view)[0] < 1e-12


# ---------------------------------------------------------------- batches, errors, the page


def test_outside_the_example_of_the_page_runs():
    text = Path(__file__).parents[2].joinpath("docs/guides/any-loop.md").read_text()
    (example,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.S) if "View" in code]
    for image in (Image.new("RGB", (320, 240)), torch.zeros(3, 240, 320, dtype=torch.uint8)):
        names = {"image": image}
        exec(example, names)
        assert names["image"].shape == (3, 224, 224)
        assert names["view"].canvas_size == (224, 224)


class Crops(torch.utils.data.Dataset):
    transform = v2.Compose([v2.RandomCrop(20), views.RandAugment()])

    def __len__(self):
        return 8

    def __getitem__(self, number):
        torch.manual_seed(number)
        image = torch.zeros(3, 30, 40, dtype=torch.uint8)
        return number, *self.transform(image, View.identity(image))


@pytest.mark.parametrize("workers", [0, 2])
def test_views_are_collated(workers):
    want = [Crops()[number][2] for number in range(8)]
    loader = torch.utils.data.DataLoader(Crops(), batch_size=4, num_workers=workers)
    batches = [view for _, _, view in loader]
    assert all(type(batch) is View and batch.shape == (4, 2, 6) for batch in batches)
    got = View(torch.cat(batches))
    assert torch.equal(got.plain, torch.stack([one.plain for one in want]))
    assert torch.equal(got.matrix, torch.stack([one.matrix for one in want]))
    assert torch.equal(got.shown, torch.stack([one.shown for one in want]))
    assert got.canvas_size == (20, 20)
    # One transform of a batch of images, as on a GPU.
    flipped = F.horizontal_flip(got)
    assert torch.equal(flipped.plain, torch.stack([F.horizontal_flip(v).plain for v in want]))


def test_views_without_collation_come_from_workers():
    loader = torch.utils.data.DataLoader(Crops(), 2, num_workers=1, collate_fn=list)
    _, _, view = next(iter(loader))[1]
    assert isinstance(view, View)
    assert torch.equal(view.plain, Crops()[1][2].plain)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("mix", [v2.CutMix, v2.MixUp])
def test_outside_torchvision_mixes_no_batch_of_views(mix, workers):
    """It passed tensors of Views through beside the images that it mixed."""

    class Labeled(Crops):
        def __getitem__(self, number):
            _, image, view = super().__getitem__(number)
            return image, number, view

    loader = torch.utils.data.DataLoader(Labeled(), batch_size=4, num_workers=workers)
    image, label, view = next(iter(loader))
    stacked = torch.stack([Crops()[number][2] for number in range(4)])
    assert torch.equal(stacked.plain, view.plain)
    made = [torch.stack(tensors=list(stacked)), torch.cat([view[:2], view[2:]]), view.flip(0)]
    made += [stacked[torch.tensor([1, 0, 2, 3])], view.float(), view.expand(4, 2, 6)]
    for batch in (view, view.to("cpu"), copy.deepcopy(view), stacked, *made):
        for sample in ((image, label, batch), ({"image": image, "labels": label, "v": batch},)):
            with pytest.raises(ValueError, match=f"^{mix.__name__}.* does not support .* masks"):
                mix(num_classes=8)(*sample)


@pytest.mark.parametrize("image", [Image.new("RGB", (9, 7)), torch.zeros(3, 7, 9)])
def test_outside_copies_of_a_view_know_the_kind_of_image(image):
    """A deep copy rounded the size of an expanded rotation as that of a tensor."""
    view = View.identity(image)
    ways = copy.copy, copy.deepcopy, Tensor.clone, Tensor.detach
    for way in (*ways, lambda one: one.to("cpu"), lambda one: pickle.loads(pickle.dumps(one))):
        copied = way(view)
        assert type(copied) is View
        assert copied.is_pil == isinstance(image, Image.Image)
        assert torch.equal(copied.plain, view.plain)
    height, width, angle = 169, 81, -120.19098663330078
    sizes = [
        F.rotate(copy.deepcopy(View.identity(one)), angle, expand=True).canvas_size
        for one in (Image.new("L", (width, height)), torch.zeros(1, height, width))
    ]
    assert sizes[0] != sizes[1]


def test_outside_what_is_no_image_or_view_is_refused():
    with pytest.raises(UserError, match=r"takes a PIL image or a tensor, not ndarray; .*ToImage"):
        View.identity(np.zeros((4, 5, 3), np.uint8))
    with pytest.raises(UserError, match=r"shape \[2, 6\], not \[7, 2, 3\]; begin with View"):
        View(torch.zeros(7, 2, 3))
