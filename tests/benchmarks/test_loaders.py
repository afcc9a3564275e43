"""Small runs of the loader benchmark: every peer delivers the right batches, and the results are
computed and written correctly.
"""

import csv
import json
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import harness, loaders, peers
from benchmarks.harness import append_rows, compare, take_turns
from benchmarks.loaders import LoaderBenchmark, choose_loaders, describe, main
from benchmarks.peers import (
    PEERS,
    PeerConfig,
    PublishedDataset,
    draw_samples,
    explain_missing,
    published_targets,
)
from benchmarks.photographs import beton_dataset, sample_dataset
from densefeed.storage.beton import Beton
from densefeed.storage.images import Images
from densefeed.system.errors import UserError

IMAGES, CLASSES, BATCH, SIZE = 16, 8, 8, 48
SMALL = ("ffcv+labels", "ffcv", "torchvision")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def data(cache):
    return sample_dataset(cache, IMAGES, CLASSES)


def small(cache, **options):
    options = {"loaders": ",".join(SMALL), "threads": (1,), "rounds": 2, "record": False} | options
    sizes = {"images": IMAGES, "classes": CLASSES, "batch": BATCH, "size": SIZE}
    return LoaderBenchmark(cache=cache, **sizes, **options)


# ------------------------------------------------------------------------- the data set


def test_rows_of_loaders_on_a_gpu_name_it(data, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    assert describe(data.paths, ["ffcv", "nvidia-dali-gpu"]).endswith(" kB; H200")
    assert describe(data.paths, ["ffcv", "dali-cpu"]).endswith(" kB")


def test_data_set_has_the_same_distinct_jpegs_in_every_format(data):
    images, beton, stock = Images(data.folder), Beton(data.beton), Beton(data.stock)
    files = [images.read(n) for n in range(IMAGES)]
    assert len(set(files)) == IMAGES
    assert [images.where(n) for n in range(IMAGES)] == list(data.paths)
    for n, encoded in enumerate(files):
        with Image.open(data.paths[n]) as opened:
            assert (opened.format, max(opened.size), min(opened.size)) == ("JPEG", 500, 375)
            assert (data.widths[n], data.heights[n]) == opened.size
        assert stock.image(n) == (encoded, False)
    assert {field.name for field in stock.fields} == {"image", "label"}
    np.testing.assert_array_equal(beton.labels, data.labels)
    np.testing.assert_array_equal(data.labels, images.labels)
    assert 15_000 < np.mean([len(encoded) for encoded in files]) < 60_000


def test_published_files_have_the_maps_of_the_beton(data):
    both = Beton(data.beton).arrays(np.arange(IMAGES))["map"]
    for n, path in enumerate(data.paths):
        name = os.path.relpath(path, data.folder).replace(".jpg", ".pt")
        published = torch.load(data.published / name, weights_only=True)
        assert (published.dtype, published.shape) == (torch.float16, (2, 5, 18, 18))
        np.testing.assert_array_equal(published[0].permute(1, 2, 0).numpy(), both[n, 0].view("<f2"))
        np.testing.assert_array_equal(published[1].permute(1, 2, 0).numpy(), both[n, 1].view("<u2"))


def test_cache_is_reused(cache, data):
    stamps = {path: os.stat(path).st_mtime_ns for path in (*data.paths, data.maps, data.stock)}
    again = sample_dataset(cache, IMAGES, CLASSES)
    assert again.paths == data.paths
    assert stamps == {path: os.stat(path).st_mtime_ns for path in stamps}
    assert not list(cache.rglob("*.part"))


def test_given_beton_is_unpacked_for_the_peers(data, tmp_path):
    made = beton_dataset(data.beton, None, tmp_path)
    given = beton_dataset(data.beton, data.folder, tmp_path)
    assert len(made.paths) == IMAGES
    for own, want, other in zip(made.paths, data.paths, given.paths, strict=True):
        assert Image.open(own).tobytes() == Image.open(want).tobytes()
        assert other == want
    # As the packer: a folder of splits, of which it reads `train/`.
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "train").symlink_to(data.folder)
    whole = beton_dataset(data.beton, tmp_path / "whole", tmp_path)
    assert whole.folder == tmp_path / "whole" / "train"
    assert whole.paths == tuple(
        str(whole.folder / os.path.relpath(path, data.folder)) for path in data.paths
    )
    published = [torch.load(path, weights_only=True) for path in made.published.rglob("*.pt")]
    assert [one.shape for one in published] == IMAGES * [(2, 5, 18, 18)]
    bare = beton_dataset(data.stock, None, tmp_path)
    assert (bare.maps, bare.published, bare.planes) == (None, None, None)
    for loader, reason in (
        ("ffcv+labels", "has no score maps; leave it out"),
        ("ffcv-planes", "only the generated images are packed as planes; leave it out"),
    ):
        options = {"loaders": loader, "threads": (1,), "record": False}
        with pytest.raises(UserError, match=reason):
            main(LoaderBenchmark(data=data.stock, cache=tmp_path, **options))
    one = tmp_path / "one" / "x" / "a.jpg"
    one.parent.mkdir(parents=True)
    Image.new("RGB", (20, 20)).save(one)
    with pytest.raises(UserError, match=r"one holds other images than .*train\.beton"):
        beton_dataset(data.beton, tmp_path / "one", tmp_path)


# ------------------------------------------------------------------------- the peers


def deliver_twice(name, data, threads):
    reason = explain_missing(name)
    if reason:
        pytest.skip(reason)
    peer = PEERS[name].build(PeerConfig(data, threads, BATCH, SIZE))
    try:
        return [list(peer.batches(epoch)) for epoch in range(2)]
    finally:
        peer.close()


# With score maps.
OURS = (
    *("ffcv+labels", "ffcv-2-crops+labels", "ffcv-planes+labels", "folder+labels"),
    "dali-cpu+labels",
)


def check_delivered(name, epochs, data):
    dense = {
        **dict.fromkeys(OURS, (BATCH, 18, 18, 5)),
        "token-labeling": (BATCH, 3, 5, 18, 18),
        "token-labeling+labels": (BATCH, CLASSES, 2 + (SIZE // 16) ** 2),
    }.get(name)
    repeats = 2 if "2-crops" in name else 1
    for batches in epochs:
        assert sum(batch.count for batch in batches) == repeats * IMAGES
        if name.endswith("-full"):
            continue
        assert sorted(torch.cat([batch.label for batch in batches]).tolist()) == sorted(
            repeats * data.labels.tolist()
        )
        for batch in batches:
            assert batch.image.dtype == torch.uint8
            assert tuple(batch.image.shape) in {(BATCH, SIZE, SIZE, 3), (BATCH, 3, SIZE, SIZE)}
            assert batch.image.float().std() > 10  # not black, not uninitialized
            assert (None if batch.dense is None else tuple(batch.dense.shape)) == dense
    if not name.endswith("-full"):
        first, second = (torch.cat([batch.image for batch in batches]) for batches in epochs)
        assert not torch.equal(first, second)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [name for name in PEERS if name != "ffcv-stock"])
def test_every_peer_delivers_each_image_once(name, data):
    check_delivered(name, deliver_twice(name, data, 1), data)


@pytest.mark.slow
@pytest.mark.ffcv
def test_stock_ffcv_delivers_each_image_once(data):
    """numba compiles for ten seconds."""
    check_delivered("ffcv-stock", deliver_twice("ffcv-stock", data, 1), data)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ffcv+labels", "nvidia-dali-cpu", "token-labeling", "simplejpeg", "turbojpeg-full"]
)
def test_two_threads_or_processes_deliver_each_image_once(name, data):
    check_delivered(name, deliver_twice(name, data, 2), data)


@pytest.mark.parametrize("name", ["token-labeling", "simplejpeg"])
def test_peers_cut_the_given_crop(name, data):
    """Images are matched by the nearest one."""
    ours = torch.cat([batch.image for batch in deliver_twice("folder", data, 1)[1]]).float()
    peer = torch.cat([batch.image for batch in deliver_twice(name, data, 1)[1]])
    peer = (peer if peer.shape[-1] == 3 else peer.permute(0, 2, 3, 1)).float()
    far = (ours[:, None] - peer[None]).abs().mean((2, 3, 4))
    assert sorted(far.argmin(1).tolist()) == list(range(IMAGES))
    assert far.amin(1).max() < 0.6


def test_nvidia_gpu_decoder_is_probed(monkeypatch):
    """Crops on some GPUs were reported to end in a segmentation fault or an error."""
    pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for why, reason in (
        ("was killed", "nvidia.dali.plugin.pytorch cannot load (its decoder of crops was killed)"),
        ("", None),
    ):
        monkeypatch.setattr(peers, "probe_regions", lambda device, why=why: why)
        assert explain_missing("nvidia-dali-gpu") == reason


def test_nvidia_pipeline_crops_like_torchvision(data):
    """Larger crops have steeper gradients: crops of 25 to 100 % of the area would be 7 % steeper,
    of 8 to 50 % 9 % less steep.
    """
    if reason := explain_missing("nvidia-dali-cpu"):
        pytest.skip(reason)
    torch.manual_seed(0)
    steepness = []
    for name in ("nvidia-dali-cpu", "torchvision-tensor"):
        peer = PEERS[name].build(PeerConfig(data, 1, BATCH, SIZE))
        images = [batch.image for epoch in range(8) for batch in peer.batches(epoch)]
        images = torch.cat(
            [image if image.shape[-1] == 3 else image.permute(0, 2, 3, 1) for image in images]
        )
        steepness.append(images.float().diff(dim=2).abs().mean().item())
        peer.close()
    assert steepness[0] / steepness[1] == pytest.approx(1, abs=0.05)


def reference_targets(score_map, box, label, flip, grid, num_classes):
    """Compute the published targets of one image in float64 without torch: `[K, 2 + grid * grid]`.

    `score_map` is float16 `[2, k, S, S]`; `box` (top, left, height, width) is relative to the size
    of the flipped image.
    """
    side = score_map.shape[-1]
    dense = np.zeros((num_classes, side, side))
    for k in range(score_map.shape[1]):
        for r in range(side):
            for c in range(side):
                value, cls = score_map[:, k, r, c]
                dense[int(cls), r, side - 1 - c if flip else c] = value
    top, left, height, width = box
    # The operator takes the vertical coordinate as x: the published error.
    x1, y1, x2, y2 = (side * v - 0.5 for v in (top, left, top + height, left + width))

    def pooled(cells):
        wide, high = max(x2 - x1, 1.0) / cells, max(y2 - y1, 1.0) / cells
        nx, ny = math.ceil(max(x2 - x1, 1.0) / cells), math.ceil(max(y2 - y1, 1.0) / cells)
        out = np.zeros((num_classes, cells, cells))
        for i in range(cells):
            for j in range(cells):
                for a in range(ny):
                    for b in range(nx):
                        y, x = y1 + (i + (a + 0.5) / ny) * high, x1 + (j + (b + 0.5) / nx) * wide
                        out[:, i, j] += bilinear(y, x) / (nx * ny)
        return out.reshape(num_classes, -1)

    def bilinear(y, x):
        if not (-1 <= y <= side and -1 <= x <= side):
            return np.zeros(num_classes)
        y, x = min(max(y, 0.0), side - 1.0), min(max(x, 0.0), side - 1.0)
        r, c = min(int(y), side - 2), min(int(x), side - 2)
        v, u = y - r, x - c
        upper = (1 - u) * dense[:, r, c] + u * dense[:, r, c + 1]
        lower = (1 - u) * dense[:, r + 1, c] + u * dense[:, r + 1, c + 1]
        return (1 - v) * upper + v * lower

    logits = np.concatenate([pooled(1), pooled(grid)], axis=1)
    soft = np.exp(logits) / np.exp(logits).sum(0)
    off = 0.1 / num_classes
    given = np.full((num_classes, 1), off)
    given[label] = 1 - 0.1 + off
    return np.concatenate([given, soft * (1 - 0.1 + off) + off], axis=1)


def test_published_targets_match_an_independent_implementation(data):
    work = PeerConfig(data, 1, BATCH, SIZE)
    planned = draw_samples(work, 0)[0]
    samples = PublishedDataset(data, SIZE)
    packed = torch.stack([samples[one][2] for one in planned])
    got = published_targets(packed, 14, CLASSES)
    assert {flip for _, _, flip in planned} == {True, False}
    for one, (index, (top, left, height, width), flip) in enumerate(planned):
        name = os.path.relpath(data.paths[index], data.folder).replace(".jpg", ".pt")
        H, W = data.heights[index], data.widths[index]
        left = W - left - width if flip else left
        box = (top / H, left / W, height / H, width / W)
        score_map = torch.load(data.published / name, weights_only=True).numpy().astype(np.float64)
        want = reference_targets(score_map, box, data.labels[index], flip, 14, CLASSES)
        # float32 coordinates are off by 18 * 2^-24 cells, and logits differ by up to 20 between
        # cells: 2e-5, plus rounding.
        np.testing.assert_allclose(got[one].numpy(), want, atol=5e-5)
    # The published smoothing adds 0.1 / K to the sum; the given label's column sums to 1.
    total = got[:, :, 1:].sum(1)
    torch.testing.assert_close(total, torch.full_like(total, 1 + 0.1 / CLASSES), atol=1e-5, rtol=0)


# ------------------------------------------------------------------------- results


def test_document_and_printed_rows(cache, data, tmp_path, capsys):
    out = tmp_path / "out.json"
    main(small(cache, json=out, stages=True, loaders=",".join((*SMALL, "token-labeling+labels"))))
    document = json.loads(out.read_text())
    names = [*SMALL, "token-labeling+labels"]
    stages = [f"stage {name}" for name in ("labels", "read", "decode", "resample", "plan")]
    assert [row["name"] for row in document["rows"]] == names + stages
    for row in document["rows"]:
        assert row["threads"] == 1
        assert 0 < row["p25"] <= row["median"] <= row["p75"]
    assert {(ratio["a"], ratio["b"]) for ratio in document["ratios"]} == {
        ("ffcv+labels", other) for other in ("ffcv", "torchvision", "token-labeling+labels")
    }
    for ratio in document["ratios"]:
        assert 0 < ratio["p25"] <= ratio["median"] <= ratio["p75"]
    printed = capsys.readouterr().out
    for words in (
        "16 JPEGs of ",
        "ffcv+labels, threads 1",
        "required 2, goal 3",
        "required 12, goal 20",
        "stage resample, threads 1",
    ):
        assert words in printed


def test_a_rate_is_also_of_the_processor_time_of_an_epoch(monkeypatch):
    peer, rates = SimpleNamespace(batches=lambda epoch: [SimpleNamespace(count=4)] * epoch), []
    monkeypatch.setattr("time.process_time", iter([1.0, 3.0, 10.0, 11.0]).__next__)
    assert [loaders.run_epoch(peer, rates, epoch) for epoch in (1, 2)] == [4, 8]
    assert rates == [2, 8]


def test_cores_and_threads_are_restored(cache, data):
    torch.set_num_threads(2)
    before = os.sched_getaffinity(0)
    main(small(cache, loaders="ffcv", rounds=1))
    assert os.sched_getaffinity(0) == before
    assert torch.get_num_threads() == 2


def test_rounds_rotate_and_ratios_are_taken_within_rounds():
    """Two works slow down together, so their ratio is 2 in every round; a ratio of medians would
    not be.
    """
    order = []
    # a, b | b, a | a, b | b, a
    clock = iter(np.cumsum([0, 1, 0, 2, 0, 30, 0, 15, 0, 4, 0, 8, 0, 50, 0, 25]))

    def note(name):
        def work(number):
            order.append((number, name))
            return 10

        return work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness.time, "perf_counter", lambda: float(next(clock)))
        rates = take_turns({"a": note("a"), "b": note("b")}, 3)
    assert order == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b"), (3, "b"), (3, "a")]
    assert rates == {"a": [10 / 15, 10 / 4, 10 / 25], "b": [10 / 30, 10 / 8, 10 / 50]}
    row = {"name": "a / b, time", "unit": "ratio", "runs": 3, "median": 2.0, "p25": 2.0, "p75": 2.0}
    ratio = compare("a", "b", rates["a"], rates["b"], ", time", "2")
    assert ratio == row | {"a": "a", "b": "b", "bar": "2"}
    different = compare("a", "b", [4, 1, 3, 2, 5], [1] * 5)
    assert [different[name] for name in harness.QUARTILES] == [3, 2, 4]


def test_loaders_are_rebuilt_in_another_order(cache, data, monkeypatch):
    """Five rounds in three makings are 2, 2 and 1 rounds, with a warm-up each; every loader is
    closed before the next making.
    """
    made, alive = [], []

    class Counting:
        def __init__(self, name):
            self.name, self.rounds = name, []
            made.append(self)
            alive.append(self)
            assert len(alive) <= 2

        def batches(self, epoch):
            self.rounds.append(epoch)
            yield SimpleNamespace(count=16)

        def close(self):
            alive.remove(self)

    for name in ("ffcv", "folder"):
        monkeypatch.setitem(
            PEERS, name, PEERS[name]._replace(build=lambda config, name=name: Counting(name))
        )
    document = main(small(cache, loaders="ffcv,folder", rounds=5, makings=3))
    assert [peer.name for peer in made] == ["ffcv", "folder", "folder", "ffcv", "ffcv", "folder"]
    assert [len(peer.rounds) for peer in made] == [3, 3, 3, 3, 2, 2]
    assert not alive
    assert [line["runs"] for line in document["rows"]] == [5, 5]


def test_pin_confines_running_threads():
    """A thread pool that already runs is confined too; sched_setaffinity on the process would not
    reach it.
    """
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool, harness.restore_cpus_after() as allowed:
        assert pool.submit(os.sched_getaffinity, 0).result() == allowed
        (core,) = harness.choose_cores(1, allowed)
        harness.pin({core})
        assert pool.submit(os.sched_getaffinity, 0).result() == {core}
    assert os.sched_getaffinity(0) == allowed


def test_results_are_appended_without_paths(cache, data, tmp_path, monkeypatch):
    results = tmp_path / "results.csv"
    monkeypatch.setattr(
        "sys.argv",
        [
            "/somewhere/tools/benchmark_loaders.py",
            "--data",
            "/private/x.beton",
            "--json=/private/o.json",
        ],
    )
    for _ in range(2):
        main(small(cache, record=True, results=results, rounds=1))
    rows = list(csv.DictReader(results.open()))
    assert len(rows) == 2 * (3 + 3)
    assert results.read_text().count("date,commit,cpu,cores") == 1
    assert {row["name"]: row["unit"] for row in rows} == {
        **dict.fromkeys(SMALL, "images/s"),
        "ffcv+labels / ffcv": "ratio",
        "ffcv+labels / ffcv, processor time": "ratio",
        "ffcv+labels / torchvision": "ratio",
    }
    for row in rows:
        assert row["command"] == "benchmark_loaders.py --data x.beton --json=o.json"
        assert float(row["p25"]) <= float(row["median"]) <= float(row["p75"])
        assert f"torch {torch.__version__.split('+')[0]}" in row["versions"]
    text = results.read_text()
    assert str(tmp_path) not in text
    assert os.uname().nodename not in text


def test_results_file_with_other_columns_is_left_unchanged(tmp_path):
    results = tmp_path / "results.csv"
    results.write_text("when,what\n1,2\n")
    with pytest.raises(UserError, match=r"results.csv has other columns"):
        append_rows(results, [{"name": "x"}])
    assert results.read_text() == "when,what\n1,2\n"


# ------------------------------------------------------------------------- errors


def test_invalid_options_raise(cache):
    with pytest.raises(
        UserError, match=r"there is no loader 'fvcc'; choose from ffcv\+labels, ffcv"
    ):
        main(small(cache, loaders="ffcv,fvcc"))
    with pytest.raises(UserError, match=r"--threads 999: this process may use \d+ cores"):
        main(small(cache, threads=(999,)))
    with pytest.raises(UserError, match=r"--rounds is 0, and must be at least 1"):
        main(small(cache, rounds=0))
    with pytest.raises(UserError, match=r"--folder needs --data"):
        main(small(cache, folder=cache))


@pytest.mark.slow
def test_missing_peer_is_skipped_unless_named(monkeypatch, capsys):
    gone = PEERS["simplejpeg"]._replace(package="no_such_package")
    broken = PEERS["torchvision-tensor"]._replace(package="json", probe=lambda: json.loads("{"))
    monkeypatch.setattr(peers, "PEERS", PEERS | {"simplejpeg": gone, "torchvision-tensor": broken})
    monkeypatch.setattr(loaders, "PEERS", peers.PEERS)
    names = choose_loaders("")
    assert not {"simplejpeg", "torchvision-tensor"} & set(names)
    assert {"ffcv+labels", "torchvision"} <= set(names)
    printed = capsys.readouterr().out
    assert "simplejpeg: skipped, no_such_package is not installed; pip install" in printed
    assert "torchvision-tensor: skipped, json cannot load (Expecting" in printed
    with pytest.raises(
        UserError,
        match=r"--loaders simplejpeg: no_such_package is not installed; pip install simplejpeg",
    ):
        choose_loaders("ffcv,simplejpeg")
