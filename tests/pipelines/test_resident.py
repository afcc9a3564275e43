"""Maps held on the device against the maps that loaders stream."""

import numpy as np
import pytest
import torch

from densefeed.pipelines import resident
from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.folder import FolderSource
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.resident import ResidentMaps
from densefeed.pipelines.targets import sparse_targets
from densefeed.storage.score_maps import ScoreMaps
from densefeed.system.errors import UserError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def sources(folder, maps, packed):
    """Return functions that open the same data with its maps in a store, and inside a .beton."""
    return {
        "folder": lambda: FolderSource(folder, "train", maps),
        "beton": lambda: FfcvSource(packed[0]),
    }


def epoch_of(source, **options):
    plan = EpochPlan(
        num_samples=len(source.labels), batch=4, seed=3, mode="train", sizes=((0, 32),)
    )
    reader = ThreadedLoader(source, plan, 2, **options)
    try:
        return list(reader.batches(0)), reader.score_maps
    finally:
        reader.close()


@pytest.mark.parametrize("kind", ["folder", "beton"])
def test_resident_maps_equal_streamed_ones_bit_for_bit(kind, sources, monkeypatch, capsys):
    """In chunks that do not divide the 11 samples; batches without maps differ in nothing else, and
    targets are equal.
    """
    monkeypatch.setattr(resident, "CHUNK", 3)
    source = sources[kind]()
    held = ResidentMaps(source, CPU)
    assert "score maps of 11 images: 0.00 GB on cpu" in capsys.readouterr().out
    streamed, spec = epoch_of(source)
    bare, spec_without = epoch_of(sources[kind](), maps=False)
    assert spec_without == spec is not None
    for whole, without in zip(streamed, bare, strict=True):
        assert all(
            getattr(without, name) is None
            for name in ("map_logit", "map_class", "map_lse", "window")
        )
        given = held(without)
        assert whole.tensors.keys() == given.tensors.keys()
        for name, field in whole.tensors.items():
            assert field.dtype == given.tensors[name].dtype, name
            assert torch.equal(field, given.tensors[name]), name
        for a, b in zip(
            sparse_targets(whole, spec, 4), sparse_targets(given, spec, 4), strict=True
        ):
            assert torch.equal(a, b)


def test_class_ids_above_32767_are_preserved():
    """They are stored as int16."""

    class Source:
        labels = np.zeros(2, np.int64)
        score_maps = ScoreMapSpec(1, 2, 65536, "tail", 2, 1.0)

        def maps(self, ids):
            named = np.array([[0, 65535], [40000, 32768]], np.uint16).reshape(2, 1, 1, 2)[ids]
            shape = named.shape
            return ScoreMaps(
                np.zeros(shape, np.float16),
                named,
                np.zeros(shape[:3], np.float16),
                np.zeros((len(ids), 4), np.float32),
            )

    batch = Batch(*[None] * len(Batch._fields))._replace(index=torch.tensor([1, 0, 1]))
    assert ResidentMaps(Source(), CPU)(batch).map_class.tolist() == [
        [[[40000, 32768]]],
        [[[0, 65535]]],
        [[[40000, 32768]]],
    ]


def test_maps_that_exceed_the_memory_are_refused_unread(sources, monkeypatch):
    source = sources["folder"]()
    needed = 11 * source.score_maps.nbytes
    row = source.maps(np.arange(1))
    assert source.score_maps.nbytes == sum(part.nbytes for part in row)
    monkeypatch.setattr(source, "maps", lambda ids: pytest.fail("read"))
    monkeypatch.setattr(resident, "free_memory", lambda device: needed)
    with pytest.raises(
        UserError,
        match=r"the score maps of 11 images take 0.00 GB on cpu, of which 0.00 GB are free; "
        r"give --no-maps-on-device, which streams them",
    ):
        ResidentMaps(source, CPU)
    monkeypatch.undo()
    assert 10e6 < resident.free_memory(CPU) < 1e14
