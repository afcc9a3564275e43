"""Checks of a run's data: are its score maps those that the published label pipeline needs?"""

import shutil

import numpy as np
import pytest
import torch

from densefeed.pipelines.plan import EpochPlan
from densefeed.storage.geometry import teacher_window
from densefeed.storage.images import Images
from densefeed.system.errors import UserError
from densefeed.system.options import with_options
from densefeed.training import setup
from densefeed.training.config import Config, RunOptions
from densefeed.training.ranks import ALONE, Ranks
from densefeed.training.setup import choose_compile, describe_padding, setup_run

from ..runs import objective_for, step_for
from ..stores import write_store


@pytest.fixture
def make_run(folder, random_maps, micro, tmp_path):
    """`make_run(kind, absent, **fields)` sets up a run on maps of this kind; its first batch."""

    def make(kind, absent, **fields):
        images = Images(folder, split="train")
        scores = random_maps(len(images), 6, 2, 2)
        windows = [teacher_window(kind, *images.size(n)) for n in range(len(images))]
        scores = scores._replace(window=np.array(windows, np.float32))
        store = tmp_path / "maps.h5"
        store.unlink(missing_ok=True)
        write_store(store, images, scores, 2, absent=absent, geometry=kind)
        paths = dict(loader="folder", data=folder, val=folder, score_maps=store)
        config = with_options(micro(tmp_path / "run"), **(paths | fields))
        run = setup_run(config, ALONE)
        step = step_for(run.config, run.loader, run.student.trainable, run.dtype)
        batch = next(step.batches(0))
        run.loader.close()
        run.val.close()
        return batch

    return make


@pytest.mark.parametrize(
    ("geometry", "absent", "faults"),
    [
        ("center-crop", "zero-logit", []),
        ("squash", "zero-logit", ["do not cover the center square"]),
        ("letterbox", "zero-logit", ["do not cover the center square"]),
        ("center-crop", "tail", ["do not keep logit 0"]),
        ("squash", "tail", ["do not keep logit 0", "do not cover the center square"]),
    ],
)
def test_maps_unlike_the_published_ones_are_warned_of(make_run, capsys, geometry, absent, faults):
    make_run(geometry, absent, geometry="published", outside="uniform")
    told = capsys.readouterr().err
    every = ["do not keep logit 0", "do not cover the center square"]
    assert [fault for fault in every if fault in told] == faults
    assert ("--geometry center-crop --absent zero-logit" in told) == bool(faults)


PUBLISHED = dict(
    geometry="published",
    outside="uniform",
    rand_augment="rand-m9-mstd0.5-inc1-p1",
    augment_before_crop=True,
)


@pytest.mark.parametrize(
    ("kind", "absent", "fields", "message"),
    [
        ("squash", "zero-logit", {}, "do not cover the center square .*--absent zero-logit"),
        ("center-crop", "tail", {}, "do not keep logit 0.*--geometry center-crop"),
        ("center-crop", "zero-logit", dict(loader="dali"), "does not augment whole images"),
        ("center-crop", "zero-logit", dict(maps_on_device=True), "remove --maps-on-device"),
    ],
)
def test_the_published_pipeline_refuses(make_run, kind, absent, fields, message):
    with pytest.raises(UserError, match=message):
        make_run(kind, absent, **PUBLISHED, **fields)


@pytest.mark.parametrize("labels", [{}, dict(maps_on_device=True), dict(geometry="published")])
def test_steps_get_images_that_were_augmented_before_the_crop(make_run, labels, capsys):
    fields = {**PUBLISHED, "geometry": "aligned", **labels}
    ours = make_run("center-crop", "zero-logit", **fields)
    crops = make_run("center-crop", "zero-logit", **(fields | dict(augment_before_crop=False)))
    assert torch.equal(ours.index, crops.index)
    # Every image has an operation.
    assert (ours.image != crops.image).flatten(1).any(1).all()
    published = "geometry" in labels
    assert ours.axis_aligned == published
    # With aligned labels it is where the crop lies in the stored image.
    assert torch.equal(ours.shown, crops.shown) == published
    maps_moved = not torch.equal(ours.map_logit, crops.map_logit)
    assert maps_moved == published
    assert "warning" not in capsys.readouterr().err


def test_the_aligned_geometry_takes_any_maps(make_run, capsys):
    make_run("squash", "tail")
    assert "warning" not in capsys.readouterr().err


def test_outside_one_class_alone_is_not_trained(folder, micro, tmp_path):
    for split in ("train", "val"):
        shutil.copytree(folder / split / "cat", tmp_path / "one" / split / "cat")
    data = tmp_path / "one"
    config = with_options(micro(tmp_path / "run"), loader="folder", data=data, val=data)
    with pytest.raises(UserError, match=r"/one has one class alone, 'cat'; give images of two"):
        setup_run(config, ALONE)


def test_outside_a_batch_above_the_training_set_says_how_much_is_padding(make_run, capsys):
    """300 images in a batch of 1,000 trained on 70 % padding without a word."""
    plan = EpochPlan(num_samples=300, batch=1000, seed=0, mode="train")
    assert describe_padding(plan).startswith(
        "--batch 1,000 is larger than the training set of 300 images, so 70% of each batch is pad"
    )
    for fields in (dict(batch=300), dict(batch=900, repeats=3)):
        plan = EpochPlan(**dict(num_samples=300, seed=0, mode="train") | fields)
        assert describe_padding(plan) == ""
    make_run("squash", "tail", batch=44)
    assert "note: --batch 44 is larger than the training set of 11 images, so 75%" in (
        capsys.readouterr().out
    )


def test_outside_auto_compiles_nothing_without_a_compiler(monkeypatch, capsys):
    """A wheel needs no compiler, and Triton does."""
    ranks, objective = Ranks(0, 1, torch.device("cuda")), objective_for(Config())
    assert choose_compile(RunOptions(), ranks, objective).compile == "blocks"
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(setup, "has_triton", lambda: False)
    assert choose_compile(RunOptions(), ranks, objective).compile == "never"
    assert "on Debian install gcc and python3-dev" in capsys.readouterr().err
    assert choose_compile(RunOptions(compile="whole"), ranks, objective).compile == "whole"
