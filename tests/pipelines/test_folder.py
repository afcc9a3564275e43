"""Packed score maps through the loaders, resident maps and the packer: lossless maps equal the raw
ones, compact maps stay within the error that their store records.
"""

import numpy as np
import pytest
import torch

from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.folder import FolderSource
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.resident import ResidentMaps
from densefeed.pipelines.targets import SparseTargets, sparse_targets
from densefeed.storage.images import Images
from densefeed.storage.maintenance import convert
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError

from ..jpeg_files import loader_class
from ..stores import write_reordered, write_store

MAPS = ("map_logit", "map_class", "map_lse", "window")


@pytest.fixture(scope="module", params=["tail", "zero-logit"])
def stores(request, folder, tmp_path_factory):
    """Store the same maps of `folder` in every form: {form: path}."""
    from densefeed.relabel.scoring import keep, to_maps

    images, root = Images(folder, split="train"), tmp_path_factory.mktemp("forms")
    logits = 3 * torch.randn(len(images), 6, 6, 2, generator=torch.Generator().manual_seed(4))
    windows = np.tile(np.array([[0, 0.1, 1, 0.9]], np.float32), (len(images), 1))
    maps = to_maps(keep(logits, 2), windows)
    header = dict(absent=request.param, geometry="center-crop")
    write_store(root / "raw.h5", images, maps, 2, **header)
    paths = {form: root / f"{form}.h5" for form in ("raw", "lossless", "compact")}
    for form in ("lossless", "compact"):
        convert(ScoreMapStore(paths["raw"]), paths[form], form)
    return paths


@pytest.fixture(scope="module")
def bare(folder, tmp_path_factory, command):
    """Pack the images without maps."""
    out = tmp_path_factory.mktemp("bare") / "train.beton"
    done = command("tools/pack_dataset.py", "--data", folder, "--out", out)
    assert done.returncode == 0, done.stderr
    return out


def test_repeats_of_an_image_share_its_memory(folder, monkeypatch):
    """So that the decoder sees that they are one image; a file that is gone fails for each."""
    source = FolderSource(folder, "train", threads=2)
    gone = Images(folder, split="train").where(2)
    encoded = source.begin(np.array([5, 5, 5, 3, 5])).wait()
    first, second, third, other, again = encoded.samples
    assert first == second == third
    assert len({first["bytes"], other["bytes"], again["bytes"]}) == 3
    assert (first["length"], first["height"]) == (again["length"], again["height"])

    def missing(index):
        raise FileNotFoundError(2, "gone", gone)

    monkeypatch.setattr(source.images, "read", missing)
    encoded = source.begin(np.array([2, 2])).wait()
    assert list(encoded.errors) == [0, 1]
    assert encoded.errors[0] == encoded.errors[1]
    source.close()


def batches_of(source, kind=ThreadedLoader, **options):
    plan = EpochPlan(
        num_samples=len(source.labels), batch=4, seed=3, mode="train", sizes=((0, 32),)
    )
    loader = kind(source, plan, 2, **options)
    try:
        return list(loader.batches(0)), loader.score_maps
    finally:
        loader.close()


def tensors(parts) -> list[torch.Tensor]:
    return [part for part in parts if isinstance(part, torch.Tensor)]


def equal(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


def dense(targets: SparseTargets, num_classes: int) -> torch.Tensor:
    """Expand targets to dense ones, `[N, T, K]`."""
    palette = targets.palette[:, None].expand_as(targets.extra)
    whole = targets.base[..., None].repeat(1, 1, num_classes)
    return whole.scatter_add(2, palette, targets.extra)


@pytest.mark.parametrize("kind", ["folder", "ffcv"])
def test_batches_of_every_form_agree(stores, folder, bare, kind):
    def opened(form):
        return (
            FolderSource(folder, "train", stores[form])
            if kind == "folder"
            else FfcvSource(bare, stores[form])
        )

    raw, spec = batches_of(opened("raw"))
    lossless, its = batches_of(opened("lossless"))
    assert its == spec
    assert all(equal(*pair) for pair in zip(raw, lossless, strict=True))

    compact, its = batches_of(opened("compact"))
    assert its == spec
    store, far = ScoreMapStore(stores["compact"]), 0.0
    for before, after in zip(raw, compact, strict=True):
        want = store.rows(after.index.numpy())
        for name, field in zip(MAPS, want, strict=True):
            np.testing.assert_array_equal(getattr(after, name).numpy(), field)
        same = [name for name in before._fields if name not in ("map_logit", "map_lse")]
        assert equal(
            [getattr(before, name) for name in same], [getattr(after, name) for name in same]
        )
        one, other = (dense(sparse_targets(batch, spec, 4), 2) for batch in (before, after))
        far = max(far, float((one - other).abs().sum(-1).max()) / 2)
    # Zero-logit maps average logits before the softmax, not targets.
    slack = 1e-6 if spec.absent == "tail" else store.error.variation_max
    assert 0 < far <= store.error.variation_max + slack


@pytest.mark.dali
@pytest.mark.parametrize("form", ["lossless", "compact"])
def test_dali_gives_the_same_maps(stores, folder, form):
    ours, theirs = (
        batches_of(FolderSource(folder, "train", stores[form]), loader_class(kind))[0]
        for kind in ("native", "dali")
    )
    for one, other in zip(ours, theirs, strict=True):
        assert equal(one._replace(image=one.label), other._replace(image=other.label))


@pytest.mark.parametrize("form", ["lossless", "compact"])
def test_resident_maps_equal_streamed_ones(stores, folder, form):
    source = FolderSource(folder, "train", stores[form])
    resident = ResidentMaps(source, torch.device("cpu"))
    streamed, _ = batches_of(source)
    bare, _ = batches_of(FolderSource(folder, "train", stores[form]), maps=False)
    for whole, without in zip(streamed, bare, strict=True):
        assert equal(whole, resident(without))


@pytest.mark.parametrize("form", ["lossless", "compact"])
def test_the_packer_expands_packed_maps(stores, folder, tmp_path, command, form):
    out = tmp_path / "train.beton"
    done = command("tools/pack_dataset.py", "--data", folder, "--maps", stores[form], "--out", out)
    assert done.returncode == 0, done.stderr
    assert ("the .beton inherits its error: error of a probability" in done.stdout) == (
        form == "compact"
    )
    source, store = FfcvSource(out), ScoreMapStore(stores[form])
    for got, want in zip(source.maps(np.arange(11)), store.rows(np.arange(11)), strict=True):
        np.testing.assert_array_equal(got, want)
    source.close()


@pytest.mark.parametrize("form", ["lossless", "compact"])
def test_a_damaged_or_truncated_row_is_reported(stores, folder, tmp_path, capsys, form):
    path = tmp_path / "maps.h5"
    path.write_bytes(stores[form].read_bytes())
    _, places = ScoreMapStore(path).places(np.array([7]))
    content = bytearray(path.read_bytes())
    content[places[0, 0] + 5] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"sample 7.*maps.h5: row 7 .* is damaged"):
        batches_of(FolderSource(folder, "train", path))
    batches, _ = batches_of(FolderSource(folder, "train", path), on_bad_sample="skip")
    assert capsys.readouterr().err.count("skipped sample 7") == 1
    # Resident maps read it this way, whatever the loader's `on_bad_sample`.
    with pytest.raises(UserError, match=r"maps.h5: row 7 .* is damaged"):
        FolderSource(folder, "train", path).maps(np.arange(11))
    assert 7 not in torch.cat([batch.index for batch in batches]).tolist()
    path.write_bytes(stores[form].read_bytes())
    source = FolderSource(folder, "train", path)
    with open(path, "r+b") as file:
        file.truncate(int(places[0, 0]) + 3)
    with pytest.raises(UserError, match=r"maps.h5 was truncated while it was open"):
        source.check_map(7)


def test_sources_take_strings_for_paths(folder, maps, bare):
    sources = FolderSource(str(folder), "train", str(maps)), FfcvSource(str(bare), str(maps))
    assert [len(source.labels) for source in sources] == [11, 11]
    assert all(source.score_maps is not None for source in sources)


@pytest.mark.parametrize("change", ["order", "order in a class", "fewer"])
def test_outside_rows_of_other_images_are_refused(folder, bare, random_maps, tmp_path, change):
    """The fingerprint is right, and the maps are not in the order of the images."""
    images, rows = Images(folder), np.arange(11)
    assert images.labels[0] == images.labels[1]
    rows = {"order": rows[::-1], "order in a class": rows[[1, 0, *range(2, 11)]], "fewer": rows[:9]}
    out = write_reordered(tmp_path / "m.h5", images, random_maps(11, 6, 2, 2), rows[change])
    with pytest.raises(UserError, match=r"m\.h5 has \d+ maps of other images than the 11 of"):
        FolderSource(folder, "train", out)
    with pytest.raises(UserError, match=r"m\.h5 has .* maps of (other|the) images .*label"):
        FfcvSource(bare, out)
