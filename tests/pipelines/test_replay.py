"""An epoch is a pure function of (data, recipe, seed): it does not depend on threads, ranks,
resuming, storage or process.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.folder import FolderSource
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.shapes import AspectBuckets
from densefeed.tools.pack_dataset import Packing, main

from ..jpeg_files import loader_class

ROOT = Path(__file__).parents[2]
SIDE = 48  # no crop of the test images (up to 89 px) is twice as large, see the last test
# Each test compares epoch 1 of these plans.
PLANS = {
    "plain": {},
    "repeats": {"repeats": 2},
    "sizes": {"sizes": ((0, SIDE), (1, 64))},
    "shapes": {
        "buckets": AspectBuckets((0.75, 4 / 3), 8, 1 + np.arange(11), 11 - np.arange(11)),
        "multi_scale": (SIDE, 64),
    },
    "blocks": {"order": "blocks", "block": 2, "window": 2},
    "evaluate": {"mode": "evaluate"},
}


DALI = [
    pytest.param(kind, marks=pytest.mark.dali)
    for kind in ("dali folder", "dali maps inside", "dali no index")
]


def source(kind, paths):
    return {
        "folder": lambda: FolderSource(paths["folder"], "train", paths["maps"]),
        "maps inside": lambda: FfcvSource(paths["inside"]),
        "maps beside": lambda: FfcvSource(paths["bare"], paths["maps"]),
        "no index": lambda: FfcvSource(paths["no index"]),
    }[kind]()


def plan_of(**options):
    """Plan 11 samples in batches of 8, so that the second one is padded."""
    return EpochPlan(
        **{"num_samples": 11, "batch": 8, "seed": 5, "mode": "train", "sizes": ((0, SIDE),)}
        | options
    )


def epoch(kind, paths, threads=2, start=0, **options):
    """Return the batches of epoch 1."""
    decoder = "dali" if kind.startswith("dali") else "native"
    reader = loader_class(decoder)(
        source(kind.removeprefix("dali "), paths), plan_of(**options), threads
    )
    batches = list(reader.batches(1, start))
    reader.close()
    return batches


def digest(*ranks, rows=None, pixels=True):
    """Compute SHA-256 over ids, weights, labels, views (crop and flip), pixels and maps; the rows
    of several ranks are merged.
    """
    sha, order = hashlib.sha256(), slice(None) if rows is None else np.argsort(np.concatenate(rows))
    for shards in zip(*ranks, strict=True):
        for name in shards[0].tensors:
            if name == "image" and not pixels:
                continue
            parts = [shard.tensors[name] for shard in shards]
            sha.update(f"{name} {parts[0].dtype} {tuple(parts[0].shape[1:])}".encode())
            sha.update(np.ascontiguousarray(torch.cat(parts).numpy()[order]))
    return sha.hexdigest()


@pytest.fixture(scope="module")
def paths(folder, maps, tmp_path_factory):
    root = tmp_path_factory.mktemp("replay")
    main(Packing(data=folder, maps=maps, out=root / "inside.beton"))
    main(Packing(data=folder, out=root / "bare.beton"))
    main(Packing(data=folder, maps=maps, out=root / "no index.beton", index=False))
    return {"folder": folder, "maps": maps} | {
        name: root / f"{name}.beton" for name in ("inside", "bare", "no index")
    }


@pytest.fixture(scope="module")
def expected(paths):
    """Compute the digest of each plan: one thread, one rank, from the start, a .beton with maps."""
    return {
        name: digest(epoch("maps inside", paths, threads=1, **options))
        for name, options in PLANS.items()
    }


@pytest.fixture(scope="module")
def expected_of(paths, expected):
    """Return a function for the digest that a loader should give. DALI's pixels differ; all other
    fields are the same, which is checked here.
    """
    dalis = {}

    def digest_of(kind, plan):
        if not kind.startswith("dali"):
            return expected[plan]
        if plan not in dalis:
            ours, theirs = (
                epoch(kind, paths, threads=1, **PLANS[plan])
                for kind in ("maps inside", "dali maps inside")
            )
            assert digest(ours, pixels=False) == digest(theirs, pixels=False)
            dalis[plan] = digest(theirs)
        return dalis[plan]

    return digest_of


def test_the_digest_covers_every_field(paths, expected):
    """Otherwise the tests below could not fail: plans have different digests, and so does a batch
    with one changed value.
    """
    assert len(set(expected.values())) == len(PLANS)
    for field in range(9):
        batches = epoch("maps inside", paths, threads=1)
        batches[1][field].view(torch.uint8).view(-1)[-1] ^= 1
        assert digest(batches) != expected["plain"], batches[0]._fields[field]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["folder", "maps inside", "maps beside", "no index", *DALI])
def test_batches_do_not_depend_on_threads_and_storage(paths, expected_of, kind, plan):
    """Bit for bit, pixels included: all paths decode and resample crops smaller than twice the
    output's side in the same way.
    """
    for threads in (1, 2, 4):
        assert digest(epoch(kind, paths, threads, **PLANS[plan])) == expected_of(kind, plan), (
            threads
        )


@pytest.mark.one_in(5)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("ranks", "parts"), [(2, 0), (4, 0), (1, 4), (2, 4)])
@pytest.mark.parametrize("dali", [False, pytest.param(True, marks=pytest.mark.dali)])
def test_merged_ranks_equal_one_rank(paths, expected_of, ranks, parts, plan, dali):
    # Even if each rank reads another storage.
    kinds = ("maps inside", "folder", "maps beside", "no index")
    kinds = [f"dali {kind}" for kind in kinds] if dali else kinds
    shares = [
        dict(rank=rank, ranks=ranks, microbatches=parts, **PLANS[plan]) for rank in range(ranks)
    ]
    shards = [epoch(kinds[rank], paths, **share) for rank, share in enumerate(shares)]
    assert digest(*shards, rows=[plan_of(**share).rows for share in shares]) == expected_of(
        kinds[0], plan
    )


@pytest.mark.one_in(5)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["folder", "maps inside", *DALI[:2]])
def test_resuming_at_any_batch_gives_the_same_batches(paths, expected, kind, plan):
    options = PLANS[plan] | {"batch": 2}
    whole = epoch(kind, paths, **options)
    for start in range(len(whole) + 1):
        assert digest(epoch(kind, paths, start=start, **options)) == digest(whole[start:]), start


@pytest.mark.parametrize("kind", ["maps inside", DALI[1]])
def test_two_epochs_at_once_do_not_interfere(paths, expected_of, kind):
    plan = EpochPlan(num_samples=11, batch=8, seed=5, mode="train", sizes=((0, SIDE),))
    reader = loader_class("dali" if "dali" in kind else "native")(
        source("maps inside", paths), plan, 2
    )
    pairs = list(zip(reader.batches(1), reader.batches(2), reader.batches(1), strict=True))
    one, other, again = zip(*pairs, strict=True)
    reader.close()
    assert digest(one) == digest(again) == expected_of(kind, "plain") != digest(other)


@pytest.mark.slow
def test_other_processes_give_the_same_batches(paths, expected):
    """In interpreters of their own, since string hashes can only be changed at start."""
    code = (
        "from tests.pipelines.test_replay import digest, epoch; "
        f"print(digest(epoch('folder', {paths!r})))"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", "from pathlib import PosixPath; " + code],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    assert [child.communicate()[0].strip() for child in children] == 2 * [expected["plain"]]


def test_pixels_of_scaled_decoding_stay_within_tolerance(tmp_path):
    """Without an index large crops are decoded at 1/2, 1/4 or 1/8, with another filter than ours.
    All other fields are equal.
    """
    # This import takes 0.9 s.
    from sklearn.datasets import load_sample_images

    for name, pixels in zip("ab", load_sample_images().images, strict=True):
        path = tmp_path / "images" / "train" / name / f"{name}.jpg"
        path.parent.mkdir(parents=True)
        Image.fromarray(pixels).save(path, quality=90)
    main(Packing(data=tmp_path / "images", out=tmp_path / "x.beton"))
    for side in (213, 160, 106, 71, 53, 32):  # of 427
        plan = EpochPlan(num_samples=2, batch=2, seed=0, mode="evaluate", sizes=((0, side),))
        readers = [
            loader_class("native")(s, plan, 2)
            for s in (FolderSource(tmp_path / "images", "train"), FfcvSource(tmp_path / "x.beton"))
        ]
        (one,), (other,) = (list(reader.batches(0)) for reader in readers)
        assert all(torch.equal(one[field], other[field]) for field in range(1, 5))
        assert (one.image.float() - other.image.float()).abs().mean((1, 2, 3)).max() <= 0.6, side
        for reader in readers:
            reader.close()
