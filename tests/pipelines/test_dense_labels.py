"""Labels of any crops from a store alone: to the bit those of a loader, in any process."""

import math
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import densefeed
from densefeed import TargetRules, UserError, open_score_maps, sparse_loss, sparse_targets
from densefeed.storage.images import Images

from ..stores import write_reordered, write_store
from .test_targets import batch_of, random_boxes, walked_targets, warp, warped

PUBLISHED = TargetRules(geometry="published", outside="uniform", smoothing=0.1)
GRIDS = [1, 4, (3, 5)]


def same(found, wanted):
    """Whether two targets are equal bit for bit."""
    return all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@pytest.fixture(scope="module")
def store(folder, random_maps, tmp_path_factory):
    """Maps of eight classes; two classes of images."""
    images = Images(folder, split="train")
    path = tmp_path_factory.mktemp("labels") / "maps.h5"
    return write_store(path, images, random_maps(len(images), 6, 3, 8), 8)


@pytest.mark.parametrize("rules", [TargetRules(), PUBLISHED], ids=["aligned", "published"])
@pytest.mark.parametrize("kind", ["folder", "packed"])
def test_targets_are_those_of_a_loader_to_the_bit(kind, rules, folder, packed, maps):
    """1,056 crops, half of them mirrored, of maps that cover a part of their images."""
    data, more = {"folder": (folder, {"score_maps": maps}), "packed": (packed[0], {})}[kind]
    options = dict(batch=44, repeats=4, size=32, threads=1, crop_scale=(0.05, 1.0), hflip=0.5)
    count = 0
    with open_score_maps(maps) as labels, densefeed.open_loader(data, **options, **more) as loader:
        for epoch in range(24):
            for batch in loader.batches(epoch):
                found = labels.targets(batch.index, batch.view, GRIDS, rules)
                for grid, targets in zip(GRIDS, found, strict=True):
                    assert same(targets, sparse_targets(batch, loader.score_maps, grid, rules))
                count += len(batch.index)
    assert count >= 1000


@pytest.mark.parametrize("form", ["lossless", "compact"])
def test_every_form_of_store_is_read(form, store, tmp_path, command):
    other = tmp_path / f"{form}.h5"
    done = command(
        "-m", "densefeed", "score-maps", "convert", store, "--out", other, "--form", form
    )
    assert done.returncode == 0, done.stderr
    view = torch.tensor([[[0.5, 0, 0.25], [0, -0.5, 0.75]]] * 4)
    with open_score_maps(store) as raw, open_score_maps(other) as labels:
        wanted, found = (one.targets([3, 0, 3, 10], view, 5).dense(8) for one in (raw, labels))
        tolerance = 0 if form == "lossless" else 0.05
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


def test_any_affine_view_is_a_walk_over_its_points(random_maps, folder, tmp_path):
    """Rotated, sheared, beyond the image; the walk is a loop in float64."""
    images, K = Images(folder, split="train"), 12
    scores = random_maps(len(images), 6, 3, K, window=(0.05, 0.2, 1.0, 0.8))
    boxes, flips = random_boxes(4, flips=True)
    maps = scores.select(np.arange(4))
    warps = warp(0.4), warp(-0.5, 0.3), warp(0, 0.28, (0.3, 0)), warp(1.3, -0.3, (0.1, -0.4))
    batch = warped(batch_of(maps, boxes, flips, sheared=True), *warps)
    batch = batch._replace(view=batch.view.float().double())
    corners = torch.tensor([[0.0, 1, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1]], dtype=torch.float64)
    low, high = (batch.view @ corners).aminmax(dim=2)
    # Beyond the image is fill.
    shown = torch.cat([low.flip(1), high.flip(1)], 1).clamp(0, 1)
    with open_score_maps(write_store(tmp_path / "maps.h5", images, scores, K)) as labels:
        found = labels.targets(range(4), batch.view, 3)
    want, weight = walked_targets(batch._replace(shown=shown), maps, K, 3, "tail", "ignore")
    torch.testing.assert_close(found.weight.double(), weight, rtol=0, atol=1e-5)
    told = weight > 0
    assert not told.all()
    # Places on the map have some ten roundings of 6 cells * 2^-24 in float32, and probabilities
    # change by at most 3 a cell: 1e-5.
    torch.testing.assert_close(found.dense(K)[told].double(), want[told], rtol=0, atol=2e-5)


def test_what_is_shown_can_be_given(store):
    """A collated View of a transform has it beside its matrix."""
    matrix = torch.tensor([[[1.0, 0, 0], [0, 1, 0]]], dtype=torch.float64)
    half = torch.tensor([[[0.0, 0.5, 64], [0.25, 1.0, 48]]], dtype=torch.float64)
    with open_score_maps(store) as labels:
        targets = labels.targets([0], torch.cat([matrix, half], 2), 4)
    assert targets.weight.view(4, 4).tolist() == [[0] * 4, *[[1, 1, 0, 0]] * 3]


@pytest.mark.parametrize("grid", [0, -1, 1.5, "14", (3,), (3, 4, 5), (2, 0), None])
def test_outside_a_grid_that_is_none_is_refused(store, grid):
    said = r"^grid is .*; give the number of tokens along a side"
    with open_score_maps(store) as labels, pytest.raises(UserError, match=said):
        labels.targets([0], torch.eye(2, 3)[None], grid)


class Crops(Dataset):
    """Views of the images of a store, labeled in the worker processes."""

    def __init__(self, labels) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        side = (index + 1) / 12
        return index, torch.tensor([[side, 0.0, 0.1], [0.0, -side, side]])


class Collate:
    def __init__(self, labels) -> None:
        self.labels = labels

    def __call__(self, samples):
        index, view = torch.utils.data.default_collate(samples)
        return index, view, tuple(self.labels.targets(index, view, 4))


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_worker_processes_label_their_batches(store, start):
    with open_score_maps(store) as labels:
        loader = DataLoader(
            Crops(labels),
            batch_size=3,
            shuffle=True,
            num_workers=2,
            collate_fn=Collate(labels),
            multiprocessing_context=start,
            persistent_workers=True,
        )
        seen = []
        for _ in range(2):
            for index, view, targets in loader:
                assert same(targets, labels.targets(index, view, 4))
                seen += index.tolist()
        assert sorted(seen) == sorted([*range(len(labels))] * 2)


def test_images_are_found_by_number_and_by_path(folder, store):
    images = Images(folder, split="train")
    view = torch.eye(2, 3).repeat(3, 1, 1)
    with open_score_maps(store) as labels:
        assert labels.num_classes == 8
        assert labels.class_names == images.class_names
        assert labels.labels.tolist() == images.labels.tolist()
        rows = [4, 0, 9]
        wanted = labels.targets(rows, view, 2)
        ways = np.array(rows, np.int32), torch.tensor(rows), [images.paths[row] for row in rows]
        for ids in ways:
            assert same(labels.targets(ids, view, 2), wanted)
        again = pickle.loads(pickle.dumps(labels))
        assert same(again.targets(rows, view, 2), wanted)
        again.close()


def test_the_loss_is_the_dense_one(store):
    view = torch.eye(2, 3).repeat(4, 1, 1)
    rules = TargetRules(smoothing=0.1)
    with open_score_maps(store) as labels:
        whole, tokens = labels.targets(range(4), view, [1, 3], rules)
    generator = torch.Generator().manual_seed(0)
    for targets, shape in ((tokens, (4, 9, 8)), (whole, (4, 8))):
        logits = torch.randn(shape, generator=generator, dtype=torch.float64)
        dense = targets.dense(8).double().reshape(shape)
        want = -(dense * logits.log_softmax(-1)).sum(-1).mean()
        torch.testing.assert_close(sparse_loss(logits, targets), want, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="do not fit 4 images of 16 tokens"):
        sparse_loss(torch.zeros(4, 16, 8), tokens)


WHOLE = torch.eye(2, 3)[None]
# A collated View of an input of 8 x 8 pixels that shows the whole image.
SHOWN = torch.tensor([[[1.0, 0, 0, 0, 1, 8], [0, 1, 0, 0, 1, 8]]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("ids", "view", "said"),
    [
        ([11], WHOLE, r"has no map of image 11: it holds 11, numbered from 0"),
        ([-1], WHOLE, r"has no map of image -1"),
        (["cat/none.jpg"], WHOLE, r"has no map of cat/none.jpg; paths in it are like cat/000.jpg"),
        ([0.5], WHOLE, r"ids of float64; give whole numbers"),
        ([[0]], WHOLE, r"ids of shape \(1, 1\)"),
        ([0], torch.eye(3)[None], r"view is \(1, 3, 3\); for 1 images give an affine view"),
        ([0, 1], WHOLE, r"view is \(1, 2, 3\); for 2 images give"),
        ([0], np.eye(2, 3)[None], r"view is ndarray"),
        ([0], torch.zeros(1, 2, 3), r"view 0 of the batch shows no area of its image"),
        ([0], WHOLE * math.nan, r"view 0 of the batch has numbers that are not finite"),
    ],
)
def test_outside_ids_and_views_that_do_not_fit_are_one_sentence(store, ids, view, said):
    with open_score_maps(store) as labels, pytest.raises(UserError, match=said) as error:
        labels.targets(ids, view)
    assert "\n" not in str(error.value)


def put_nan(column):
    view = SHOWN.clone()
    view[0, 1, column] = math.nan
    return view


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([0], WHOLE, 2, {}), r"^rules is a dict; give densefeed.TargetRules"),
        (([0], WHOLE, 2, None), r"^rules is a NoneType; give densefeed.TargetRules"),
        (([[1], [2, 3]], WHOLE), r"^ids are a list of different lengths or of a type that NumPy"),
        ((torch.ones(1).bfloat16(), WHOLE), r"^ids are a Tensor .*; give one number or path per"),
        ((torch.ones(1), WHOLE), r"^ids of float32; give whole numbers"),
        (("cat/000.jpg", WHOLE), r"^ids of shape \(\); give one number or path per image"),
        ((["3"], WHOLE), r"has no map of 3; paths in it are like cat/000.jpg"),
        (([0], WHOLE, 2, TargetRules(), "gpu"), r"^device 'gpu' cannot be used here \(.*; give c"),
        (([], WHOLE[:0]), r"^there are no ids; give one image at least"),
        ((torch.ones(1, device="meta"), WHOLE), r"^ids are a Tensor .*; give one number or path"),
        (([0], WHOLE.to("meta")), r"^view has no numbers, or none that are real; give a dense"),
        (([0], WHOLE.to_sparse()), r"^view has no numbers, or none that are real; give a dense"),
        (([0], WHOLE.to(torch.complex64)), r"^view has no numbers, or none that are real; give a"),
        (([0], WHOLE, 2, TargetRules(), "meta"), r"^device 'meta' cannot be used here \("),
        (([0], WHOLE, 2, TargetRules(), 3.5), r"^device 3.5 cannot be used here \(.*; give cpu"),
        *(
            (([0], put_nan(column), 2), r"^view 0 of the batch has numbers that are not finite; ")
            for column in range(6)
        ),
    ],
)
def test_outside_arguments_of_other_types_are_one_sentence(store, arguments, said):
    """Each was an error of Python, NumPy or PyTorch; NaN in what is shown gave weights of 0."""
    ids, view, grid, *rest = *arguments, *[2][len(arguments) - 2 :]
    with open_score_maps(store) as labels:
        calls = [lambda: labels.targets(ids, view, grid, *rest)]
        calls += [lambda: labels.soft_masks(ids, view, (2, 2), *rest)]
        for call in calls:
            with pytest.raises(UserError, match=said) as error:
                call()
            assert "\n" not in str(error.value)


def test_outside_grids_and_sizes_are_integers_of_any_kind(store):
    with open_score_maps(store) as labels:
        want = labels.targets([0], WHOLE, 3)
        for grid in (np.int64(3), (np.int32(3), 3)):
            assert all(map(torch.equal, labels.targets([0], WHOLE, grid), want))
        for size in (16, np.int64(16), [16, 16], torch.Size([16, 16])):
            assert labels.soft_masks([0], WHOLE, size).size == (16, 16)
        for size in ("16", (16,), 1.5, (0, 16)):
            with pytest.raises(UserError, match=r"^size is .*; give the pixels of a side, or \("):
                labels.soft_masks([0], WHOLE, size)


def test_outside_a_store_that_was_closed_says_so(store):
    labels = open_score_maps(store)
    labels.close()
    with pytest.raises(UserError, match=r"maps.h5 was closed; open it again"):
        labels.targets([0], WHOLE, 2)
    for path in (None, 3, [store]):
        with pytest.raises(UserError, match=r"path is .* must be of type str"):
            open_score_maps(path)


def test_outside_the_guides_examples_run(folder, random_maps, tmp_path, monkeypatch):
    images = Images(folder, split="train")
    write_store(tmp_path / "maps.h5", images, random_maps(len(images), 6, 3, 8), 8)
    page = (Path(__file__).parents[2] / "docs/guides/any-loop.md").read_text()
    monkeypatch.chdir(tmp_path)
    names, (first, mixing) = {}, re.findall(r"```python\n(.*?)```", page, re.S)[:2]
    exec(first, names)
    whole, tokens = (names[name].dense(8) for name in ("whole", "tokens"))
    assert tokens.shape == (1, 14 * 14, 8)
    logits = names["out"].cls[:, None], names["out"].tokens
    on_whole, on_tokens = (
        -(target * logits_NTK.log_softmax(2)).sum(2).mean()
        for target, logits_NTK in zip((whole, tokens), logits, strict=True)
    )
    torch.testing.assert_close(names["loss"], on_whole + on_tokens / 2)
    # Two images, of which each is the other's partner, and a box that cuts tokens.
    image, view = torch.rand(2, 3, 224, 224), torch.eye(2, 3).repeat(2, 1, 1)
    with open_score_maps("maps.h5") as labels:
        whole, tokens = labels.targets([7, 2], view, [1, 14])
    names |= {"image": image, "whole": whole, "tokens": tokens}
    exec(mixing.replace("48, 160", "50, 160"), names)
    pixels = torch.zeros(224, 224)
    pixels[32:160, 50:176] = 1
    torch.testing.assert_close(names["image"], image + pixels * (image.flip(0) - image))
    share = pixels.unflatten(0, (14, 16)).unflatten(2, (14, 16)).mean((1, 3)).view(1, 196, 1)
    assert (share % 1 > 0).any()
    for name, part, of in (("tokens", share, tokens), ("whole", pixels.mean(), whole)):
        dense = of.dense(8)
        want = (1 - part) * dense + part * dense.flip(0)
        torch.testing.assert_close(names[name].dense(8), want)


def test_outside_two_images_of_one_name_are_named(folder, random_maps, tmp_path):
    images = Images(folder, split="train")
    path = write_reordered(
        tmp_path / "maps.h5", images, random_maps(len(images), 4, 2, 2), np.array([0, 3, 3])
    )
    with open_score_maps(path) as labels:
        name = images.paths[3]
        with pytest.raises(UserError, match=f"several maps of {name}; give their numbers"):
            labels.targets([name], WHOLE)
        assert labels.targets([images.paths[0], images.paths[0]], WHOLE.repeat(2, 1, 1), 1)


def test_outside_a_flipped_bit_names_its_image(store, tmp_path):
    with open_score_maps(store) as labels:
        place, name = labels._store.places(np.array([5]))[1][0], labels._store.image_path(5)
    damaged = tmp_path / "maps.h5"
    data = bytearray(store.read_bytes())
    data[place[0] + 3] ^= 16
    damaged.write_bytes(data)
    with open_score_maps(damaged) as labels:
        labels.targets([4], WHOLE)
        with pytest.raises(UserError, match=rf"row 5 \({name}\) is damaged"):
            labels.targets([5], WHOLE)
