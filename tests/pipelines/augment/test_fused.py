"""The kernels of augmentation against plain PyTorch: in Triton's interpreter, compiled for GPUs,
and on a GPU. Compiling needs no GPU.
"""

import os
import re

import numpy as np
import pytest
import torch

from densefeed.pipelines.augment import augmentation as augment_module
from densefeed.pipelines.augment import fused
from densefeed.pipelines.augment.augmentation import Augmentation, Normalize
from densefeed.pipelines.augment.settings import OWN, Augment, register_operation
from densefeed.pipelines.augment.warp import warp_by_gather
from densefeed.pipelines.batch import Batch
from densefeed.pipelines.plan import EpochPlan

from ...interpreter import compile_kernel, interpreted, run_interpreted

triton = pytest.importorskip("triton")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PLAN = EpochPlan(num_samples=10_000, batch=32, seed=9, mode="train", sizes=((0, 64),))
CASES = {
    "lvvit": {"rand_augment": "rand-m9-mstd0.5-inc1", "erase_probability": 0.5},
    "four layers": {"rand_augment": "rand-m9-mstd0.5-p1-n4-inc1", "erase_probability": 0.9},
    "strong": {"rand_augment": "rand-m15-n3", "erase_probability": 0.5},
    "jitter": {"color_jitter": (0.4, 0.4, 0.4, 0.3), "shift": 4, "erase_probability": 0.5},
    "black border": {"rand_augment": "rand-m9-mstd0.5-inc1", "shift": 4, "shift_border": "black"},
    "blur": {"rand_augment": "rand-m9-mstd0.5-t3a", "color_jitter": (0.3, 0.3, 0.3)},
    "none": {},
}


def make_batch(images: list[np.ndarray], device: str = "cpu") -> Batch:
    """Make a batch of crops and flips; two samples have a single color or a flat channel."""
    image = torch.from_numpy(np.stack(images))
    image[0], image[1, ..., 0], image[2] = 7, 9, image[2] // 64 * 64
    N = len(image)
    view = torch.tensor([[0.5, 0, 0.25], [0, 0.25, 0.5]]).repeat(N, 1, 1)
    view[1::2, 0] = torch.tensor([-0.75, 0, 0.875])
    data = torch.arange(N), view, torch.zeros(N, 4), torch.arange(N), torch.zeros(N).long()
    return Batch(image, *data, torch.ones(N), None, None, None, None).to(device)


def choose(augmentation: Augmentation, batch: Batch):
    size = batch.image.shape[1:3]
    return augmentation.choose(1, batch.index.cpu(), batch.repeat.cpu(), *size)


@pytest.fixture(scope="module")
def images(noise) -> list[np.ndarray]:
    """Make 32 photograph-like crops of 24 x 32."""
    return [noise(24, 32, seed=number) for number in range(32)]


@pytest.fixture
def gpu_warp(monkeypatch):
    """The plain warp of a GPU, as kernels sum: that of a CPU sums in another order, and processors
    differ in whether addcmul_ rounds once or twice.
    """
    monkeypatch.setattr(augment_module, "warp_images", warp_by_gather)
    monkeypatch.setattr(torch.Tensor, "addcmul_", lambda total, x, y: total.add_(x * y))


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_compute_the_bytes_of_plain_pytorch(images, gpu_warp, name):
    augmentation, batch = Augmentation(PLAN, Augment(**CASES[name]), MEAN, STD), make_batch(images)
    before, choice = batch.image.clone(), choose(augmentation, batch)
    plan = fused.pack(choice, len(batch.image), torch.device("cpu"))
    got = fused.augment_crops(batch.image, plan, choice, augmentation.fill)
    assert torch.equal(got, augmentation.crops(batch, choice))
    assert torch.equal(batch.image, before)
    # A multiply-add rounds once or twice, as the processor has it.
    (image, view), (want, want_view) = (
        compute(batch, choice) for compute in (augmentation._fused, augmentation._plain)
    )
    torch.testing.assert_close(image, want, rtol=0, atol=2.5e-7)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(view, want_view)


def test_memory_of_a_plan_is_aligned(images):
    """To 16 bytes: for every other alignment Triton would compile the kernels once more."""
    augmentation = Augmentation(PLAN, Augment(**CASES["four layers"]), MEAN, STD)
    batch = make_batch(images)
    for epoch in range(5):
        choice = augmentation.choose(epoch, batch.index, batch.repeat, 24, 32)
        before, after, *tensors = fused.pack(choice, len(batch.image), torch.device("cpu"))
        tensors += [part.entry for part in (*before, *after)]
        assert all(tensor.data_ptr() % 16 == tensors[0].data_ptr() % 16 for tensor in tensors)


@interpreted
@pytest.mark.parametrize("size", [(1, 1), (2, 5), (3, 3), (33, 47)])
def test_interpreted_kernels_of_any_size(size, gpu_warp):
    """Smaller than a block, no multiple of one, and images without inner pixels."""
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (*size, 3), np.uint8) for _ in range(24)]
    augment = Augment(rand_augment="rand-m9-mstd0.5-p1-n3-inc1")
    augmentation, batch = Augmentation(PLAN, augment, MEAN, STD), make_batch(images)
    choice = choose(augmentation, batch)
    plan = fused.pack(choice, len(batch.image), torch.device("cpu"))
    got = fused.augment_crops(batch.image, plan, choice, augmentation.fill)
    assert torch.equal(got, augmentation.crops(batch, choice))


@interpreted
def test_interpreted_kernels_beside_a_registered_operation(images, gpu_warp):
    """It has no kernel, and runs in the order in which it was chosen."""
    register_operation("Negative", lambda image, _: 255 - image, lambda u: u, 0.5)
    augment = Augment(rand_augment="rand-m9-n2-inc1", operations=("Negative",))
    augmentation, batch = Augmentation(PLAN, augment, MEAN, STD), make_batch(images)
    choice = choose(augmentation, batch)
    plan = fused.pack(choice, len(batch.image), torch.device("cpu"))
    assert "Negative" in OWN
    assert any(part.others for part in (*plan.before, *plan.after))
    got = fused.augment_crops(batch.image, plan, choice, augmentation.fill)
    assert torch.equal(got, augmentation.crops(batch, choice))


@interpreted
def test_interpreted_kernels_write_half_precision(images):
    augment = Augment(rand_augment="rand-m9-inc1", erase_probability=1.0)
    for dtype in (torch.bfloat16, torch.float16):
        augmentation = Augmentation(PLAN, augment, MEAN, STD, dtype)
        batch = make_batch(images)
        choice = choose(augmentation, batch)
        plan = fused.pack(choice, len(batch.image), torch.device("cpu"))
        colors = augmentation.normalize.scale, augmentation.normalize.shift, augmentation.noise
        got = fused.normalize_and_erase(batch.image, plan, *colors, dtype)
        want = Normalize(MEAN, STD)(batch.image)
        augmentation._erase(want, choice)
        assert got.dtype == dtype
        # The interpreter truncates to bfloat16.
        torch.testing.assert_close(got.float(), want, rtol=torch.finfo(dtype).eps, atol=1e-6)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outside_interpreted_kernels_write_a_fourth_channel_of_zeros(images, dtype):
    """The three colors, erased boxes among them, are those of images without it."""
    augment = Augment(erase_probability=1.0)
    augmentation, other = (
        Augmentation(PLAN, augment, MEAN, STD, dtype, channels=channels) for channels in (3, 4)
    )
    # 33 x 47 pixels: neither a multiple of a block.
    batch = make_batch([np.pad(image, ((0, 9), (0, 15), (0, 0)), "wrap") for image in images])
    choice = choose(augmentation, batch)
    (image, _), (want, _) = other._fused(batch, choice), augmentation._fused(batch, choice)
    assert image.dtype == dtype
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(image[:, :3], want)
    assert not image[:, 3].any()


@pytest.mark.slow
def test_in_the_interpreter():
    assert run_interpreted(__file__) == len(CASES) + 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outside_plain_augmentation_adds_a_fourth_channel_of_zeros(images, dtype):
    augment = Augment(rand_augment="rand-m9-inc1", erase_probability=1.0)
    augmentation, other = (
        Augmentation(PLAN, augment, MEAN, STD, dtype, channels=channels) for channels in (3, 4)
    )
    batch = make_batch(images)
    choice = choose(augmentation, batch)
    image, want = other(batch, choice).image, augmentation(batch, choice).image
    assert image.dtype == dtype
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(image[:, :3], want)
    assert not image[:, 3].any()


# Types of the kernels' arguments that are no integers, and the numbers compiled in.
TYPES = {
    **dict.fromkeys(("image", "out", "given", "tables"), "*u8"),
    **dict.fromkeys(("entry", "code", "number", "boxes"), "*i32"),
    **dict.fromkeys(("argument", "matrix", "cubics", "scale", "shift", "noise", "view"), "*fp32"),
    "almost": "fp32",
}
CONSTANTS = {
    "table_kernel": {"PIXELS": 4096},
    "photometric_kernel": {"PIXELS": 1024},
    "warp_kernel": {"PIXELS": 1024},
    "normalize_kernel": {"NUMBERS": 1024, "CHANNELS": 4},
    "view_kernel": {"BLOCK_N": 128},
}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    "capability",
    [pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(100, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", CONSTANTS)
def test_compiles_without_a_gpu(name, capability):
    """The bytes depend on no fused or approximate operation."""
    from densefeed.pipelines.augment import fused_triton as subject

    types = TYPES | {"normalize_kernel": {"out": "*bf16"}, "view_kernel": {"out": "*fp32"}}.get(
        name, {}
    )
    made = compile_kernel(getattr(subject, name), types, CONSTANTS[name], capability, False)
    assert not re.search(r"div\.(approx|full)", made["ptx"])
    # normalize_kernel asks for one.
    assert ("fma.rn" in made["ptx"]) == (name == "normalize_kernel")


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_gpu_kernels_compute_the_bytes_of_plain_pytorch(images, name):
    augmentation = Augmentation(PLAN, Augment(**CASES[name]), MEAN, STD).cuda()
    batch = make_batch(images, "cuda")
    choice = choose(augmentation, batch)
    got, want = augmentation(batch, choice), augmentation._plain(batch, choice)
    # addcmul_ of the plain warp is a fused multiply-add there: a gray level in few pixels, which
    # equalizing can amplify.
    assert ((got.image - want[0]).abs() > 1e-6).float().mean() < 1e-3
    assert torch.equal(got.view, want[1])
