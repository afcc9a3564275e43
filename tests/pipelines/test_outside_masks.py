"""Soft and hard masks of pixels: targets, loss and gradient against float64 written out."""

import threading

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import tv_tensors
from torchvision.transforms import v2

import densefeed
from densefeed import TargetRules, UserError, View, open_score_maps, sample_masks, sparse_loss
from densefeed.objectives import mask_loss
from densefeed.pipelines import masks as masks_module
from densefeed.storage.images import Images
from densefeed.storage.row_codecs import ScoreMaps

from ..runs import default_dtype
from ..stores import write_store

N, K, SIDE, SIZE = 3, 8, 6, (11, 7)
ROTATED = [[[0.5, 0.2, 0.1], [-0.1, 0.6, 0.3]]] * N
CROPS = [
    [[0.5, 0, 0.25], [0, 0.4, 0.1]],
    [[-0.9, 0, 0.95], [0, 0.7, 0.2]],
    [[1.2, 0, -0.1], [0, 1.3, -0.1]],
]
VIEWS = {"crops": torch.tensor(CROPS), "rotated": torch.tensor(ROTATED)}
RULES = {
    "plain": TargetRules(),
    "smooth": TargetRules(smoothing=0.1, temperature=0.7),
    "uniform": TargetRules(outside="uniform"),
    "published": TargetRules(geometry="published", outside="uniform", smoothing=0.1),
}


@pytest.fixture(scope="module", params=["tail", "zero-logit", "background"])
def labels(request, folder, random_maps, tmp_path_factory):
    """Maps that cover a part of their images."""
    images = Images(folder, split="train")
    path = tmp_path_factory.mktemp("masks") / "maps.h5"
    maps = random_maps(len(images), SIDE, 3, K, window=(0.05, 0.2, 1.0, 0.9))
    with open_score_maps(write_store(path, images, maps, K, absent=request.param)) as labels:
        yield labels


@pytest.fixture(params=[1, 10**6], ids=["rows", "whole"])
def stripes(request, monkeypatch):
    """Stripes of one row of pixels, blocks of two, points of four or more; and all at once."""
    monkeypatch.setattr(mask_loss, "STRIPE_BYTES", {"cpu": request.param, "cuda": request.param})
    if request.param == 1:
        monkeypatch.setattr(masks_module, "VALUES", 2 * K * SIZE[1])
        monkeypatch.setattr(masks_module, "POINTS", 40 * SIZE[1])


def random_logits(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return (3 * torch.randn(N, K, *SIZE, generator=generator)).to(dtype).requires_grad_()


def written_out(logits, target_NKhw, weight_Nhw):
    """The mean cross entropy and its gradient in float64."""
    double = logits.detach().double().requires_grad_()
    each = -(target_NKhw * double.log_softmax(1)).sum(1)
    loss = (each * weight_Nhw).sum() / weight_Nhw.sum()
    loss.backward()
    return loss.detach(), double.grad


def dense_targets(labels, view, rules):
    """Targets `[N, K, h, w]` and weights `[N, h, w]` of the grid of all pixels, float64."""
    targets = labels.targets(range(N), view, SIZE, rules)
    dense = targets.dense(K).double().mT.unflatten(2, SIZE)
    return dense, targets.weight.double().unflatten(1, SIZE)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("view", VIEWS)
def test_outside_the_loss_of_pixels_is_that_of_a_grid_of_tokens(labels, view, rules, stripes):
    view, rules = VIEWS[view], RULES[rules]
    logits = random_logits()
    loss = sparse_loss(logits, labels.soft_masks(range(N), view, SIZE, rules))
    loss.backward()
    dense, weight = dense_targets(labels, view, rules)
    want, grad = written_out(logits, dense, weight)
    # Unlabeled pixels weigh nothing.
    assert rules.outside == "uniform" or (weight == 0).any()
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=0)
    torch.testing.assert_close(logits.grad.double(), grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_outside_targets_are_those_of_one_thread(labels, stripes, threads):
    """Threads divide the classes, to which up to 3 are added; their zeros change a sum's order.

    The tolerance is 8 roundings of float32.
    """
    found = []
    for count in (1, threads):
        torch.set_num_threads(count)
        blocks = labels.soft_masks(range(N), VIEWS["crops"], SIZE, RULES["smooth"]).blocks(1)
        found.append(torch.cat([block.soft.dense(K) for block in blocks], 1))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rules", RULES)
def test_outside_a_default_dtype_of_64_bits_changes_no_loss_of_float32(labels, rules):
    """As in scripts that call torch.set_default_dtype. Equal to the bit: nothing takes it."""
    found, tokens = [], []
    for dtype in (torch.float32, torch.float64):
        logits = random_logits().detach().requires_grad_()
        with default_dtype(dtype):
            masks = labels.soft_masks(range(N), VIEWS["crops"], SIZE, RULES[rules])
            loss = sparse_loss(logits, masks)
            loss.backward()
            targets = labels.targets(range(N), VIEWS["crops"], (4, 4), RULES[rules])
            tokens.append(sparse_loss(torch.ones(N, 16, K, dtype=torch.float32), targets))
        found.append((loss, logits.grad))
    assert found[1][0].dtype == tokens[1].dtype == torch.float32
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    torch.testing.assert_close(tokens[1], tokens[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_outside_logits_of_16_bits_are_summed_in_float32(labels, name):
    logits = random_logits(getattr(torch, name))
    loss = sparse_loss(logits, labels.soft_masks(range(N), VIEWS["crops"], SIZE))
    (1000 * loss).backward()
    want, grad = written_out(logits, *dense_targets(labels, VIEWS["crops"], TargetRules()))
    assert loss.dtype == torch.float32
    assert logits.grad.dtype == logits.dtype
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=0)
    spacing = torch.finfo(logits.dtype).eps
    torch.testing.assert_close(logits.grad.double(), 1000 * grad, rtol=2 * spacing, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", [-500, -40, 20, 500, "mixed"])
def test_outside_logits_of_any_size_are_exact(labels, stripes, dtype, offset):
    """Beyond 28 their powers are not computed without subtracting the maximum."""
    logits = random_logits()
    generator = torch.Generator().manual_seed(3)
    mixed = torch.randint(-1, 2, (N, 1, *SIZE), generator=generator) * 300.0
    logits = (logits.detach() + (mixed if offset == "mixed" else offset)).to(dtype)
    logits.requires_grad_()
    loss = sparse_loss(logits, labels.soft_masks(range(N), VIEWS["crops"], SIZE))
    loss.backward()
    want, grad = written_out(logits, *dense_targets(labels, VIEWS["crops"], TargetRules()))
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=0)
    spacing = torch.finfo(dtype).eps
    torch.testing.assert_close(logits.grad.double(), grad, rtol=max(1e-5, 2 * spacing), atol=1e-7)


def test_outside_a_data_loader_converts_masks(labels):
    """It makes a list of their size."""
    masks, logits = labels.soft_masks(range(N), VIEWS["crops"], SIZE), random_logits()
    (made,) = DataLoader([masks], batch_size=None)
    assert torch.equal(sparse_loss(logits, made), sparse_loss(logits, masks))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_outside_hard_and_soft_targets_are_mixed_pixel_by_pixel(labels, share, stripes):
    """Soft targets, hard classes, both and none of them known, in a loop over pixels."""
    view, logits = VIEWS["crops"], random_logits()
    hard = torch.randint(-1, K, (N, *SIZE), generator=torch.Generator().manual_seed(2))
    loss = sparse_loss(logits, labels.soft_masks(range(N), view, SIZE).mix(hard, share))
    loss.backward()
    soft, known = dense_targets(labels, view, TargetRules())
    # Pixels on the border of what the map covers: the target is a mean by the same rule.
    target, weight = torch.zeros_like(soft), torch.zeros_like(known)
    for n, y, x in np.ndindex(N, *SIZE):
        w, c = known[n, y, x], int(hard[n, y, x])
        if c < 0:
            target[n, :, y, x], weight[n, y, x] = soft[n, :, y, x], w
        else:
            one = F.one_hot(torch.tensor(c), K).double()
            target[n, :, y, x] = w * share * soft[n, :, y, x] + (1 - w * share) * one
            weight[n, y, x] = 1
    want, grad = written_out(logits, target, weight)
    assert ((hard < 0) & (known == 0)).any()
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=0)
    torch.testing.assert_close(logits.grad.double(), grad, rtol=1e-5, atol=1e-7)


def test_outside_pixels_may_be_tokens_of_a_grid(labels):
    """Logits of pixels beside targets of a grid were taken for K tokens."""
    view, (ours, tokens) = VIEWS["crops"], (random_logits(), random_logits())
    loss = sparse_loss(ours, labels.soft_masks(range(N), view, SIZE))
    same = sparse_loss(tokens, labels.targets(range(N), view, SIZE))
    (loss + same).backward()
    torch.testing.assert_close(same, loss)
    torch.testing.assert_close(tokens.grad, ours.grad, rtol=1e-5, atol=1e-7)


def test_outside_a_logit_of_minus_infinity_takes_a_class_out(labels):
    """The loss was NaN, as 0 times infinity."""
    hard = torch.randint(0, K - 1, (N, *SIZE), generator=torch.Generator().manual_seed(2))
    logits = random_logits().detach()
    logits[:, K - 1] = -torch.inf
    logits.requires_grad_()
    loss = sparse_loss(logits, labels.soft_masks(range(N), VIEWS["crops"], SIZE).mix(hard, 0.0))
    loss.backward()
    want = F.cross_entropy(logits.detach(), hard)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
    assert logits.grad.isfinite().all()


WRONG = [(K, torch.int64), (-2, torch.int8), (255, torch.uint8)]


@pytest.mark.parametrize(("wrong", "dtype"), WRONG)
def test_outside_hard_ids_of_no_class_are_refused(labels, wrong, dtype):
    hard = torch.zeros(N, *SIZE, dtype=dtype)
    hard[0, 1, 1] = wrong
    with pytest.raises(ValueError, match=f"hard masks hold {wrong}; give classes from 0 to"):
        labels.soft_masks(range(N), VIEWS["crops"], SIZE).mix(hard)


def test_outside_an_image_without_a_mask_has_no_class():
    view = torch.tensor([[[1.0, 0, 0], [0, 1, 0]]] * 2)
    masks = [torch.zeros(0, 0, dtype=torch.int64), torch.ones(4, 4, dtype=torch.int64)]
    found = sample_masks(masks, view, (2, 3))
    assert (found[0] == -1).all()
    assert (found[1] == 1).all()


def test_outside_without_a_label_the_loss_is_0(labels):
    beyond = torch.tensor([[[0.5, 0, 2], [0, 0.5, 2]]] * N)
    logits = random_logits()
    loss = sparse_loss(logits, labels.soft_masks(range(N), beyond, SIZE))
    loss.backward()
    assert loss == 0
    assert not logits.grad.any()


def test_outside_one_backward_pass_and_no_gradient_where_none_is_wanted(labels):
    masks, logits = labels.soft_masks(range(N), VIEWS["crops"], SIZE), random_logits()
    with torch.no_grad():
        want = sparse_loss(logits, masks)
    loss = sparse_loss(logits, masks)
    assert torch.equal(loss.detach(), want)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call sparse_loss again"):
        loss.backward()


def test_outside_a_batch_may_be_empty(labels):
    """As the last of a rank."""
    logits = torch.empty(0, K, *SIZE, requires_grad=True)
    masks = labels.soft_masks(range(N), VIEWS["crops"], SIZE)
    masks = masks._replace(batch=masks.batch.map_tensors(lambda field: field[:0]))
    sparse_loss(logits, masks).backward()
    assert logits.grad.shape == logits.shape


def test_outside_memory_of_a_gradient_is_used_again_when_no_tensor_has_it(labels):
    masks, logits = labels.soft_masks(range(N), VIEWS["crops"], SIZE), random_logits()

    def differentiate(scale):
        return torch.autograd.grad(sparse_loss(scale * logits, masks), logits)[0]

    def differentiate_leaf():
        logits.grad = None
        sparse_loss(logits, masks).backward()
        return logits.grad.data_ptr()

    # Held by a leaf, by a view of a part, and by nothing.
    differentiate_leaf()
    part, want = logits.grad[1], logits.grad.clone()
    differentiate(2.0)
    assert torch.equal(logits.grad, want)
    logits.grad = None
    differentiate(3.0)
    assert torch.equal(part, want[1])
    del part
    at = mask_loss.memory._bytes.data_ptr()
    assert [differentiate_leaf() for _ in range(2)] == [at] * 2
    other = []
    thread = threading.Thread(target=lambda: other.append(differentiate_leaf()))
    thread.start()
    thread.join()
    assert other != [at]


def test_outside_what_does_not_fit_is_named(labels):
    masks = labels.soft_masks(range(N), VIEWS["crops"], SIZE)
    with pytest.raises(ValueError, match=r"do not fit masks of \(3, 8, 11, 7\)"):
        sparse_loss(torch.zeros(N, K, 7, 11), masks)
    with pytest.raises(ValueError, match=r"give class ids of shape \(3, 11, 7\)"):
        masks.mix(torch.zeros(N, 7, 11, dtype=torch.int64))
    with pytest.raises(ValueError, match="give class ids of shape"):
        masks.mix(torch.zeros(N, *SIZE))
    with pytest.raises(ValueError, match="from 0 to 1"):
        masks.mix(torch.zeros(N, *SIZE, dtype=torch.uint8), 1.5)
    with pytest.raises(ValueError, match="the share of soft targets is 'a'; give a number from"):
        masks.mix(torch.zeros(N, *SIZE, dtype=torch.uint8), "a")
    with pytest.raises(TypeError, match=r"^hard masks are a list; give a tensor of class ids"):
        masks.mix([0])
    hard = torch.zeros(N, *SIZE, dtype=torch.uint8)
    assert masks.mix(hard, torch.tensor(0.5)).share == 0.5


# ------------------------------------------------------------------------- hard masks

H, W = 12, 16


def random_masks(count=2):
    return torch.randint(0, 9, (count, H, W), generator=torch.Generator().manual_seed(0))


def crop(top, left, height, width, flip=False):
    view = [[width / W, 0, left / W], [0, height / H, top / H]]
    if flip:
        view[0] = [-width / W, 0, (left + width) / W]
    return torch.tensor([view])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("flip", [False, True])
def test_outside_hard_masks_are_those_of_torchvisions_crops(flip, dtype):
    """Every crop that is not resized, also beyond the image, and those that torchvision resizes."""
    (mask,) = random_masks(1)
    moved = tv_tensors.Mask(mask)
    for top, left, height, width in [(0, 0, H, W), (3, 5, 7, 4), (-2, -3, 9, 9), (8, 9, 9, 13)]:
        view = crop(top, left, height, width, flip).to(dtype)
        for factor in (1, 2, 3):
            size = height * factor, width * factor
            want = v2.functional.pad(moved, [20] * 4, fill=-1)
            want = v2.functional.crop(want, top + 20, left + 20, height, width)
            want = F.interpolate(want[None, None].double(), size, mode="nearest-exact")[0, 0]
            want = want.flip(1) if flip else want
            found = sample_masks(mask[None], view, size)[0]
            assert found.dtype == torch.int64
            assert torch.equal(found, want.long()), (top, left, factor)


def test_outside_hard_masks_are_those_of_torchvisions_nearest_exact_resize():
    masks = random_masks()
    for size in [(5, 9), (7, 7), (24, 40), (12, 16)]:
        want = F.interpolate(masks[:, None].double(), size, mode="nearest-exact")[:, 0].long()
        assert torch.equal(sample_masks(masks, torch.eye(2, 3).repeat(2, 1, 1), size), want)


def test_outside_hard_masks_follow_a_view_through_a_pipeline():
    """A View beside the image, the mask itself through the same transforms: a quarter turn, crops.

    Masks of several sizes are a list. What the transforms filled is outside.
    """
    big = torch.arange(40 * 30).view(40, 30)
    transform = v2.Compose(
        [
            v2.RandomCrop((20, 25), padding=6),
            v2.RandomHorizontalFlip(),
            v2.RandomRotation((90, 90), expand=True),
        ]
    )
    for seed in range(20):
        torch.manual_seed(seed)
        wanted, view = transform(tv_tensors.Mask(big + 1), View.identity(big[None]))
        other = torch.zeros(3, 5, dtype=torch.uint8)
        views = torch.stack([view.plain, View.identity(other[None]).plain])
        found, rest = sample_masks([big, other], views, tuple(wanted.shape))
        assert torch.equal(found, wanted.as_subclass(torch.Tensor) - 1)
        assert not rest.any()


def test_outside_a_view_of_hard_masks_that_does_not_fit_is_one_sentence():
    with pytest.raises(UserError, match=r"view is \(1, 2, 3\); for 2 masks give an affine view"):
        sample_masks(random_masks(), torch.eye(2, 3)[None], (4, 4))


@pytest.mark.parametrize(
    ("masks", "size", "said"),
    [
        ([np.zeros((4, 5), int)], 4, r"^a mask is a ndarray; give class ids as a tensor of int"),
        ([[0, 1]], 4, "^a mask is a list; give"),
        (None, 4, "^masks are a NoneType and view a Tensor; give a tensor"),
        (torch.tensor(3), 4, r"^masks have the shape \(\); give class ids \[N, H, W\]"),
        (torch.zeros(1, 4, 5).cfloat(), 4, r"^a mask is a tensor of complex64, \(4, 5\); give"),
        (torch.zeros(1, 4, 5), 4, r"^a mask is a tensor of float32, \(4, 5\); give"),
        (torch.zeros(1, 1, 4, 5, dtype=torch.long), 4, r"have the shape \(1, 1, 4, 5\); give"),
        ([torch.zeros(1, 4, 5, dtype=torch.long)], 4, r"of int64, \(1, 4, 5\); give"),
        (torch.zeros(1, 4, 5, dtype=torch.long), (4,), r"^size is \(4,\); give the pixels of a"),
        (torch.zeros(1, 4, 5, dtype=torch.long), (4, 0), r"^size is \(4, 0\); give the pixels"),
    ],
)
def test_outside_hard_masks_of_other_types_are_one_sentence(masks, size, said):
    with pytest.raises(UserError, match=said):
        sample_masks(masks, torch.eye(2, 3)[None], size)


def test_outside_no_masks_give_none():
    for masks in ([], torch.zeros(0, 4, 5, dtype=torch.int64)):
        assert sample_masks(masks, torch.zeros(0, 2, 3), 4).shape == (0, 4, 4)


def test_outside_the_side_of_a_square_is_a_size():
    masks, view = random_masks(), torch.eye(2, 3).repeat(2, 1, 1)
    assert torch.equal(sample_masks(masks, view, 4), sample_masks(masks, view, (4, 4)))


def test_outside_soft_and_hard_masks_agree_on_where_a_pixel_is(folder, tmp_path):
    """Maps of one class per cell, and a mask of the same cells: the best classes are equal."""
    images = Images(folder, split="train")
    cls = np.random.default_rng(0).permuted(np.tile(np.arange(K), (len(images), 8, 8, 1)), axis=3)
    logit = np.tile(np.float16([9, 0, 0, 0, 0, 0, 0, 0]), (len(images), 8, 8, 1))
    lse = np.log(np.exp(logit.astype(np.float64)).sum(-1)).astype(np.float16)
    window = np.tile(np.float32([0, 0, 1, 1]), (len(images), 1))
    maps = ScoreMaps(logit, cls.astype(np.uint16), lse, window)
    path = write_store(tmp_path / "maps.h5", images, maps, K)
    # Each pixel lies in the middle half of its cell, where that cell is the greatest.
    view = torch.tensor([[[0.5, 0, 0.25], [0, -0.5, 0.75]]] * 2)
    with densefeed.open_score_maps(path) as labels:
        best = labels.targets([1, 4], view, (4, 4)).dense(K).argmax(-1).unflatten(1, (4, 4))
    hard = torch.from_numpy(cls[[1, 4], :, :, 0].astype(np.int64))
    assert torch.equal(sample_masks(hard, view, (4, 4)), best)
