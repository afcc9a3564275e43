"""densefeed.label and --dataset package.module:factory: the maps are those of a folder of files."""

import inspect
import re
import shutil
import time
import traceback
from copy import deepcopy

import h5py
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import densefeed
from densefeed.relabel.run import Labeling
from densefeed.storage.maintenance import has_other_rows, verify_files
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.storage.shard_plan import PARTS, shards_folder
from densefeed.storage.store_folder import read_manifest
from densefeed.system.errors import UserError

from ..fixtures import photograph
from ..runs import default_dtype, label_words

pytestmark = pytest.mark.usefixtures("one_thread")
COUNT = 13
HOW = dict(input_size=64, top_k=2, device="cpu", threads=2, batch=4)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """PNGs of two classes, of different sizes."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(COUNT):
        path = root / ("cat", "dog")[number % 2] / f"{number:03d}.png"
        path.parent.mkdir(exist_ok=True)
        photograph(rng, *rng.integers(30, 80, 2).tolist()).save(path)
    return root


@pytest.fixture(scope="module")
def teacher():
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=2)


@pytest.fixture(scope="module")
def maps(photos, teacher, tmp_path_factory):
    """The maps of the folder."""
    return densefeed.label(photos, teacher, tmp_path_factory.mktemp("maps") / "maps.h5", **HOW)


def check_equal(store, other, rows=None):
    """All bits of the maps and labels are those of `rows` of the other."""
    rows = np.arange(len(other)) if rows is None else np.array(rows)
    for one, two in zip(store.rows(np.arange(len(store))), other.rows(rows), strict=True):
        np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(store.labels, other.labels[rows])


FORMS = {
    "pillow": None,
    "arrays": np.asarray,
    "tensors": v2.PILToTensor(),
    "floats": v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]),
}


@pytest.mark.parametrize("form", FORMS)
def test_outside_maps_of_a_dataset_are_those_of_its_files(photos, teacher, maps, tmp_path, form):
    dataset = ImageFolder(photos, transform=FORMS[form])
    store = densefeed.label(dataset, teacher, tmp_path / "maps.h5", **HOW)
    check_equal(store, maps)
    assert store.header.class_names == ("cat", "dog")
    assert store.image_path(7) == "item-00000007"


def test_outside_a_subset_has_the_maps_of_its_items(photos, teacher, maps, tmp_path):
    rows = [9, 2, 11, 4]
    subset = torch.utils.data.Subset(ImageFolder(photos), rows)
    check_equal(densefeed.label(subset, teacher, tmp_path / "maps.h5", **HOW), maps, rows)


def test_outside_a_default_dtype_of_64_bits_changes_no_map(photos, teacher, maps, tmp_path):
    """A teacher of float32 in a script that calls torch.set_default_dtype."""
    with default_dtype(torch.float64):
        check_equal(densefeed.label(photos, teacher, tmp_path / "maps.h5", **HOW), maps)


def test_outside_a_teacher_in_float64_has_the_maps_of_float32(photos, teacher, maps, tmp_path):
    """Under a default dtype of float64 named teachers are built so too."""
    double = deepcopy(teacher).double()
    for dtype in (torch.float32, torch.float64):
        with default_dtype(dtype):
            store = densefeed.label(photos, double, tmp_path / f"{dtype}.h5", **HOW)
        for one, two in zip(store.rows(np.arange(COUNT)), maps.rows(np.arange(COUNT)), strict=True):
            # Rounded to neighbors at most: stored float16 below 1, which are up to 2^-11 apart.
            np.testing.assert_allclose(one, two, rtol=0, atol=2**-11)


def test_a_wrong_shard_is_refused_before_the_teacher_is_loaded(photos, tmp_path):
    with pytest.raises(UserError, match="--shard"):
        densefeed.label(photos, str(tmp_path / "missing.pth"), tmp_path / "maps", shard="9/8")


def test_outside_options_are_those_of_the_command(photos, teacher, tmp_path, capsys):
    assert densefeed.label(photos, teacher, tmp_path / "maps.h5", dry_run=True, **HOW) is None
    assert "nothing was written" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    with pytest.raises(TypeError, match="has no option 'inputs'"):
        densefeed.label(photos, teacher, tmp_path / "maps.h5", inputs=3)
    with pytest.raises(UserError, match="--top-k is 0, and must be at least 1"):
        densefeed.label(photos, teacher, tmp_path / "maps.h5", top_k=0)
    for name in ("data", "teacher", "out"):
        assert name in inspect.signature(Labeling).parameters
    with pytest.raises(TypeError, match="has no option 'data'"):
        densefeed.label(photos, teacher, tmp_path / "maps.h5", data=photos)
    with pytest.raises(UserError, match="--engine ray starts processes, which a dataset or a mod"):
        densefeed.label(ImageFolder(photos), teacher, tmp_path / "maps.h5", engine="ray")
    both = densefeed.label(photos, [teacher, teacher], tmp_path / "both", **HOW)
    assert both.header.teacher.startswith("ResNet + ResNet ")


def test_outside_named_datasets_are_labeled_as_by_the_command(photos, teacher, maps, tmp_path):
    """`dataset` beside the folder was a TypeError."""
    rows = [7, 0, 4, 5]
    paths = [maps.image_path(row) for row in rows]
    lines = [f"{path},{maps.labels[row]}" for path, row in zip(paths, rows, strict=True)]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    for name in (f"list/{tmp_path / 'a.csv'}", "share/50"):
        store = densefeed.label(photos, teacher, tmp_path / f"{name[:4]}.h5", dataset=name, **HOW)
        found = [maps.paths().index(path) for path in store.paths()]
        check_equal(store, maps, found)
        assert found == rows or name == "share/50"
    refused = (
        (photos, "json:loads", "makes the dataset itself, and --data .* has no effect"),
        (photos, f"list/{tmp_path / 'none.csv'}", r"none.csv: there is no such file"),
        (list(ImageFolder(photos)), "share/50", "names what a folder holds, and a dataset was giv"),
        (photos, 3, "--dataset is 3, and must be text"),
    )
    for data, name, said in refused:
        with pytest.raises(UserError, match=said):
            densefeed.label(data, teacher, tmp_path / "maps.h5", dataset=name, **HOW)


@pytest.mark.parametrize("teacher", [None, 3, {}, [None]])
def test_outside_no_teacher_is_one_sentence(photos, tmp_path, teacher):
    with pytest.raises(UserError, match=r"^teacher is a \w+; give a torch.nn.Module"):
        densefeed.label(photos, teacher, tmp_path / "maps.h5", **HOW)
    with pytest.raises(UserError, match=r"path is None, and must be of type"):
        densefeed.label(photos, nn.Identity(), None, **HOW)


class Failing(nn.Module):
    """Raises an error in its forward pass."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward_token_logits(self, image_NCHW):
        raise self.error


@pytest.mark.parametrize("tta_views", [1, 4])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("logits"), r"^the teacher .* 64 px \(KeyError: 'logits'\); correct its forward"),
        (AttributeError("no head"), r"^the teacher .* \(AttributeError: no head\); correct its f"),
        (RuntimeError("expired"), r"^the teacher .* \(RuntimeError: expired\); correct its forw"),
        (
            RuntimeError(
                "Given groups=1, weight of size [8, 4, 3, 3], expected input[1, 3, 64, 64] to have "
                "4 channels, but got 3 channels instead"
            ),
            r"^the teacher .* got 3 channels instead\); correct its forward",
        ),
        (
            RuntimeError("The size of tensor a (5) must match the size of tensor b (17) at non-si"),
            r"does not take images of 64 px \(The size of .*\); choose another (--)?input.size",
        ),
        (
            AssertionError("Input height (64) doesn't match model (224)."),
            r"does not take images of 64 px \(Input height .*\); choose another (--)?input.size",
        ),
    ],
)
def test_outside_only_errors_of_sizes_ask_for_another_size(
    photos, tmp_path, error, said, tta_views
):
    """All others show the teacher's own error, whose traceback is its cause's."""
    with pytest.raises(UserError, match=said) as found:
        densefeed.label(photos, Failing(error), tmp_path / "maps.h5", tta_views=tta_views, **HOW)
    assert found.value.__cause__ is error
    assert traceback.extract_tb(error.__traceback__)[-1].name == "forward_token_logits"


def test_outside_labeling_again_labels_what_is_new(photos, teacher, tmp_path, capsys):
    """Into a folder: items that were added are labeled, and the shards before them kept."""
    items, out = list(ImageFolder(photos)), tmp_path / "maps"
    how = HOW | {"shard_images": 4}
    densefeed.label(items[:8], teacher, out, **how)
    before = {shard.sha256 for shard in read_manifest(out).shards}
    store = densefeed.label(items, teacher, out, **how)
    assert len(before & {shard.sha256 for shard in read_manifest(out).shards}) >= 1
    check_equal(store, densefeed.label(items, teacher, tmp_path / "whole", **how))


def test_outside_maps_of_stated_files_are_verified(photos, teacher, tmp_path):
    """Their fingerprint also hashes the names of the files."""
    store = densefeed.label(ImageFolder(photos), teacher, tmp_path / "maps", **HOW)
    assert "-" in store.header.fingerprint
    assert has_other_rows(store) is False
    verify_files((store.path,))


def test_outside_maps_of_a_dataset_that_changed_are_refused(photos, teacher, maps, tmp_path):
    """It shrank, has another order, or has other pixels: for the loader, the labels, a labeling."""
    items, how = list(ImageFolder(photos)), dict(batch=4, size=32, threads=1)
    store = densefeed.label(items, teacher, tmp_path / "maps.h5", **HOW)
    shrunk, reordered = items[:-1], [*items[2::-1], *items[3:]]
    replaced = [(Image.eval(image, lambda v: 255 - v), label) for image, label in items]
    for changed in (shrunk, reordered, replaced):
        with pytest.raises(
            UserError, match="holds the maps of another dataset than the dataset li"
        ):
            densefeed.open_loader(changed, score_maps=store.path, **how)
        with pytest.raises(UserError, match="; give the dataset that was labeled") as error:
            densefeed.open_score_maps(store.path, changed)
        # Remedies of folders.
        for word in ("--val-fraction", "--split", "select", "relabel"):
            assert word not in str(error.value)
        with pytest.raises(UserError, match="exists already; remove it or choose another --out"):
            densefeed.label(changed, teacher, store.path, **HOW)
    with densefeed.open_score_maps(store.path, items) as labels:
        assert len(labels) == len(items)


@pytest.mark.parametrize("kind", ["folder", "subset", "joined", "timm"])
def test_outside_exchanged_items_of_stated_files_are_noticed(
    photos, teacher, tmp_path, monkeypatch, kind
):
    """Two of one label, of which neither is in the sample of pixels; not where the data moved."""
    monkeypatch.setattr("densefeed.storage.dataset_items.SAMPLED", 2)
    monkeypatch.setattr("densefeed.storage.dataset_items.DatasetItems.sampling", 512)

    def build(root, exchanged=False):
        if kind == "timm":
            dataset = timm.data.create_dataset("", str(root))
            samples = dataset.reader.samples
        else:
            dataset = ImageFolder(root)
            samples = dataset.samples
        if exchanged:
            samples[1], samples[2] = samples[2], samples[1]
        if kind == "subset":
            return torch.utils.data.Subset(dataset, range(len(dataset)))
        return torch.utils.data.ConcatDataset([dataset]) if kind == "joined" else dataset

    store = densefeed.label(build(photos), teacher, tmp_path / "maps.h5", **HOW)
    moved = shutil.copytree(photos, tmp_path / "moved")
    items = list(ImageFolder(photos))
    for same in (build(photos), build(moved), items):
        densefeed.open_score_maps(store.path, same).close()
    how = dict(batch=4, size=32, threads=1, score_maps=store.path, val_fraction=0.3)
    densefeed.open_loader(build(moved), **how).close()
    with pytest.raises(UserError, match=r"another dataset .*fingerprints differ"):
        densefeed.open_score_maps(store.path, build(photos, exchanged=True))
    with pytest.raises(UserError, match=r"another dataset .*fingerprints differ"):
        densefeed.open_loader(build(photos, exchanged=True), **how)


def test_outside_a_loader_of_a_dataset_gives_the_batches_of_its_folder(photos, teacher, maps):
    """Images, labels and maps of every batch, with validation images held out by either."""
    how = dict(batch=4, size=32, threads=2, seed=3)
    dataset = ImageFolder(photos)
    store = densefeed.label(dataset, teacher, maps.path.with_name("dataset.h5"), **HOW)
    with (
        densefeed.open_loader(photos, score_maps=maps.path, **how) as files,
        densefeed.open_loader(dataset, score_maps=store.path, **how) as items,
    ):
        for one, two in zip(files.batches(1), items.batches(1), strict=True):
            for field in ("image", "label", "view", "map_logit", "map_class", "map_lse", "window"):
                assert torch.equal(getattr(one, field), getattr(two, field)), field
    parts = []
    for train in (True, False):
        more = dict(score_maps=store.path) if train else {}
        with densefeed.open_loader(dataset, val_fraction=0.3, train=train, **more, **how) as loader:
            parts.append(loader.plan.num_samples)
    assert sum(parts) == COUNT
    with pytest.raises(
        UserError, match="dataset names what a folder holds, and a dataset was give"
    ):
        densefeed.open_loader(dataset, dataset="cifar10", **how)


# ------------------------------------------------------------------------- the command

MODULE = """
import time
from pathlib import Path
from torchvision.datasets import ImageFolder

class Slow(ImageFolder):
    def __getitem__(self, index):
        time.sleep(SECONDS)
        return super().__getitem__(index)

def make():
    return Slow(PHOTOS)

def make_fewer():
    dataset = make()
    dataset.samples = dataset.samples[:-1]
    return dataset
"""


@pytest.fixture
def words(photos, tmp_path):
    """The command that labels the dataset of a module, up to --out."""
    # The name is new in each test: the process that runs commands keeps the modules it imports.
    name = f"photos_{tmp_path.name}"
    text = MODULE.replace("SECONDS", "0.05").replace("PHOTOS", repr(str(photos)))
    (tmp_path / f"{name}.py").write_text(text)
    found = label_words(photos, tmp_path, "--input-size", 64, "--batch", 1)
    at = found.index("--data")
    found[at : at + 2] = ["--dataset", f"{name}:make"]
    found[0] = densefeed.__path__[0] + "/tools/relabel_imagenet.py"
    return [*found, "--out"]


def find_errors(done):
    """List the lines of stderr without the warning of a busy machine."""
    return [line for line in done.stderr.splitlines() if not line.startswith("warning: other proc")]


def count_done(out):
    """Count the rows done of the only shard of a file to be, without HDF5's locking."""
    try:
        (part,) = (shards_folder(out) / PARTS).glob("*.h5.part")
        with h5py.File(part, "r", locking=False) as file:
            return int(file["done"][:].sum())
    except (OSError, ValueError):
        return 0


@pytest.mark.slow
def test_outside_a_dataset_of_a_module_is_labeled_resumed_and_shared(
    words, photos, tmp_path, command
):
    """Killed with SIGKILL and resumed, and by two workers: the bytes of one undisturbed command."""
    killed, whole, shared = (tmp_path / f"{name}.h5" for name in ("killed", "whole", "shared"))
    with command.start(*words, killed, cwd=tmp_path) as process:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline and count_done(killed) < 2:
            time.sleep(0.002)
        process.kill()
    assert not killed.exists()
    assert 2 <= count_done(killed) < COUNT
    again = command(*words, killed, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert re.search(rf"\d+ of {COUNT} are labeled already", again.stdout)
    done = command(*words, whole, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert killed.read_bytes() == whole.read_bytes()
    more = "--shard-images", 4
    one, two = (command.start(*words, shared, *more, cwd=tmp_path) for _ in range(2))
    with one, two:
        ends = [process.communicate() for process in (one, two)]
    assert (one.returncode, two.returncode) == (0, 0), ends
    check_equal(ScoreMapStore(shared), ScoreMapStore(whole))
    labeled = [re.findall(r"shard \w+: \d+ images", out) for out, _ in ends]
    assert all(labeled), ends


@pytest.mark.slow
def test_outside_audit_and_pack_take_the_dataset_of_a_module(words, tmp_path, command):
    out, name = tmp_path / "maps.h5", words[words.index("--dataset") + 1]
    assert command(*words, out, cwd=tmp_path).returncode == 0
    tools = densefeed.__path__[0] + "/tools"
    audit = f"{tools}/audit.py", out, "--dataset"
    done = command(*audit, name, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"each of {COUNT} images has its row, in order" in " ".join(done.stdout.split())
    fewer = command(*audit, f"{name}_fewer", cwd=tmp_path)
    assert fewer.returncode == 2
    pack = f"{tools}/pack_dataset.py", "--maps", out, "--out", tmp_path / "a.beton", "--dataset"
    done = command(*pack, name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with densefeed.open_loader(tmp_path / "a.beton", batch=4, size=32, threads=1) as loader:
        assert (loader.num_classes, loader.score_maps.top_k) == (2, 2)
    fewer = command(*pack, f"{name}_fewer", cwd=tmp_path)
    assert fewer.returncode == 2
    (line,) = find_errors(fewer)
    assert "13 maps for 12 images, fingerprints differ" in line


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("nowhere_at_all:make", "nowhere_at_all:make failed (ModuleNotFoundError: No module named"),
        ("json:nothing", "json:nothing failed (AttributeError: "),
        ("sys:exit", "sys:exit failed (SystemExit); name a function of a module that is installed"),
        ("time:time", "time:time is a float, and not a map-style dataset; give an object that has"),
        ("", "--data is missing; give the folder of the images, or --dataset package.module:fac"),
    ],
)
def test_outside_a_wrong_dataset_ends_with_one_sentence(words, tmp_path, command, dataset, message):
    words[words.index("--dataset") + 1] = dataset
    done = command(*words, tmp_path / "maps.h5", cwd=tmp_path)
    assert done.returncode == 2
    assert [message in line for line in find_errors(done)] == [True], done.stderr
    assert not (tmp_path / "maps.h5").exists()


def test_outside_a_loader_of_packed_files_refuses_a_dataset_object(photos):
    """It named the object's address, and said that it is packed."""
    with pytest.raises(UserError, match=r"^a dataset object is read with loader='folder'"):
        densefeed.open_loader(ImageFolder(photos), batch=4, size=32, loader="ffcv")
