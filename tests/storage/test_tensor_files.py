"""Arrays of .pt and .npy files against torch.load and numpy.load, also of damaged files.

Code in malicious pickles is never run.
"""

import io
import os
import pickle
import random
import struct
import zipfile
from contextlib import suppress

import numpy as np
import pytest
import torch

from densefeed.storage import tensor_files
from densefeed.storage.tensor_files import TensorError, TensorFiles
from densefeed.storage.torch_files import TorchFileError, read_member


def a_map(seed=0, dtype=torch.float16):
    return (8 * torch.rand(2, 5, 6, 6, generator=torch.Generator().manual_seed(seed))).to(dtype)


def saved(path, tensor, zipped=True):
    torch.save(tensor, path, _use_new_zipfile_serialization=zipped)
    return path


def rezipped(path, key):
    """Rewrite a file as PyTorch 1.6 to 1.8 wrote it: three members, storage named by address."""
    with zipfile.ZipFile(path) as old:
        members = {name.split("/", 1)[1]: old.read(name) for name in old.namelist()}
    named = b"X\1\0\0\0" + b"0", b"X" + struct.pack("<L", len(key)) + key.encode()
    with zipfile.ZipFile(path, "w") as new:
        new.writestr("archive/data.pkl", members["data.pkl"].replace(*named))
        new.writestr(f"archive/data/{key}", members["data/0"])
        new.writestr("archive/version", b"3\n")
    return path


@pytest.fixture
def no_torch_load(monkeypatch):
    """A function that makes torch.load raise from then on."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("torch.load was called")

    return lambda: monkeypatch.setattr(torch, "load", refuse)


VIEWS = {
    "float16": lambda n: a_map(n),
    "float32": lambda n: a_map(n, torch.float32),
    "float64": lambda n: a_map(n, torch.float64),
    "int64": lambda n: a_map(n, torch.int64),
    "axes exchanged": lambda n: a_map(n).transpose(2, 3),
    "one of a batch, with the storage of all": lambda n: torch.stack(
        [a_map(n + more) for more in range(3)]
    )[1],
    "every other cell": lambda n: a_map(n)[..., ::2],
    "expanded": lambda n: a_map(n)[:, :1].expand(2, 5, 6, 6),
}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_arrays_equal_torch_load_and_later_zips_do_not_call_it(
    tmp_path, zipped, view, no_torch_load
):
    paths = [saved(tmp_path / f"{n}.pt", view(n), zipped) for n in range(3)]
    want = [torch.load(path, weights_only=True).numpy() for path in paths]
    files = TensorFiles()
    assert np.array_equal(files.read(paths[0]), want[0])
    if zipped:
        no_torch_load()
    for path, array in zip(paths, want, strict=True):
        found = files.read(path)
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)


def test_kinds_of_files_are_not_confused(tmp_path):
    """Files that differ in shape, dtype or container are read correctly in any order."""
    tensors = [
        a_map(),
        a_map(1).float(),
        a_map(2).view(2, 5, 4, 9),
        a_map(3).view(5, 2, 6, 6).transpose(0, 1),
        a_map(4)[:, :4],
    ]
    paths = [
        saved(tmp_path / f"{n}{z}.pt", t, z) for n, t in enumerate(tensors) for z in (True, False)
    ]
    files, shuffled = TensorFiles(), random.Random(0)
    for _ in range(4):
        shuffled.shuffle(paths)
        for path in paths:
            assert np.array_equal(files.read(path), torch.load(path, weights_only=True).numpy())


def test_storages_named_by_address_may_have_different_names(tmp_path, no_torch_load):
    paths = [
        rezipped(saved(tmp_path / f"{n}.pt", a_map(n)), key)
        for n, key in enumerate(("94037821", "140112233445566"))
    ]
    want = [torch.load(path, weights_only=True).numpy() for path in paths]
    files = TensorFiles()
    files.read(paths[0])
    no_torch_load()
    for path, array in zip(paths, want, strict=True):
        assert np.array_equal(files.read(path), array)


def test_files_are_read_when_the_cache_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "MAX_LAYOUTS", 1)
    files = TensorFiles()
    for dtype in (torch.float16, torch.float32, torch.float16, torch.float64, torch.float64):
        assert np.array_equal(
            files.read(saved(tmp_path / "x.pt", a_map(dtype=dtype))), a_map(dtype=dtype).numpy()
        )
    assert len(files._layouts) == 1


class Touch:
    """Make a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def hostile(kind, path, mark):
    """Write a file that makes the folder `mark` when its pickle is run."""
    pickled = pickle.dumps(Touch(mark), 2)
    if kind == "zip":
        torch.save(Touch(mark), path)
    elif kind == "legacy":
        torch.save(Touch(mark), path, _use_new_zipfile_serialization=False)
    elif kind == "pickle":
        path.write_bytes(pickled)
    elif kind == "a map's zip with another pickle":
        saved(path, a_map())
        with zipfile.ZipFile(path) as old:
            members = {name: old.read(name) for name in old.namelist()}
        with zipfile.ZipFile(path, "w") as new:
            for name, content in members.items():
                new.writestr(
                    name, pickled + b"X\1\0\0\x000." if name.endswith("data.pkl") else content
                )
    elif kind == "legacy, in the list of keys":
        content = saved(path, a_map(), zipped=False).read_bytes()
        at = content.rindex(b"\x80\x02]")
        path.write_bytes(content[:at] + pickled + content[-8 - 720 :])
    else:
        np.save(path, np.array([Touch(mark)], object), allow_pickle=True)
        path.with_suffix(".pt.npy").rename(path)
    return path


KINDS = [
    "zip",
    "legacy",
    "pickle",
    "a map's zip with another pickle",
    "legacy, in the list of keys",
    "array of objects",
]


@pytest.mark.parametrize("kind", KINDS)
def test_no_pickle_is_run(tmp_path, kind):
    """Neither before nor after layouts were cached. Running the file would make the folder."""
    mark, files = tmp_path / "mark", TensorFiles()
    path = hostile(kind, tmp_path / "hostile.pt", mark)
    for _ in range(2):
        with pytest.raises(TensorError):
            files.read(path)
        assert not mark.exists()
        for zipped in (True, False):
            files.read(saved(tmp_path / "map.pt", a_map(), zipped))
    if kind == "array of objects":  # control: unpickling it makes the folder
        np.load(path, allow_pickle=True)
    elif kind == "pickle":
        pickle.loads(path.read_bytes())
    else:
        with suppress(Exception):
            torch.load(path, weights_only=False)
    assert mark.exists()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_changed_byte_is_refused_or_changes_nothing_that_has_a_checksum(tmp_path, zipped):
    """In a zip, pickle and storage have a checksum.

    The legacy form has none, so its values change as they do with torch.load.
    """
    content = saved(tmp_path / "x.pt", a_map(), zipped).read_bytes()
    path, files, rng, refused = tmp_path / "y.pt", TensorFiles(), random.Random(0), 0
    files.read(tmp_path / "x.pt")
    for at in rng.sample(range(len(content)), 300):
        path.write_bytes(
            content[:at] + bytes([content[at] ^ rng.randrange(1, 256)]) + content[at + 1 :]
        )
        try:
            found = files.read(path)
        except TensorError:
            refused += 1
            continue
        want = a_map() if zipped else torch.load(path, map_location="cpu", weights_only=True)
        assert found.tobytes() == want.numpy().tobytes(), at
    assert 20 < refused < 300


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_cut_or_lengthened_file_is_refused(tmp_path, zipped):
    content, files = saved(tmp_path / "x.pt", a_map(), zipped).read_bytes(), TensorFiles()
    files.read(tmp_path / "x.pt")
    for length in (0, 1, 2, 21, 22, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "y.pt").write_bytes(content[:length])
        with pytest.raises(TensorError):
            files.read(tmp_path / "y.pt")


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({"map": a_map()}, "a dict"),
        ([a_map()], "a list"),
        (a_map().to_sparse(), "it names torch._utils._rebuild_sparse"),
        (a_map().bfloat16(), "bfloat16"),
        (torch.nn.Parameter(a_map()), "Parameter"),
        ("text", "a str"),
    ],
)
def test_anything_but_one_plain_tensor_is_refused(tmp_path, held, said):
    torch.save(held, tmp_path / "x.pt")
    with pytest.raises(TensorError, match=said):
        TensorFiles().read(tmp_path / "x.pt")


def test_text_and_large_files_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "x.pt"
    path.write_text("<html>404</html>")
    with pytest.raises(TensorError, match="not a tensor"):
        TensorFiles().read(path)
    monkeypatch.setattr(tensor_files, "MAX_BYTES", 1000)
    with pytest.raises(TensorError, match="larger"):
        TensorFiles().read(saved(path, a_map()))
    with pytest.raises(FileNotFoundError):
        TensorFiles().read(tmp_path / "none.pt")


def test_files_that_expand_when_read_are_refused(tmp_path, monkeypatch):
    """A compressed storage of zeros, and an expanded tensor of 4 TB; no such memory is used."""
    monkeypatch.setattr(tensor_files, "MAX_BYTES", 2**18)
    torch.save(torch.zeros(2**20, dtype=torch.float16), tmp_path / "zeros.pt")
    with (
        zipfile.ZipFile(tmp_path / "zeros.pt") as old,
        zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert (tmp_path / "bomb.pt").stat().st_size < 2**14
    for zipped in (True, False):
        saved(tmp_path / f"expanded{zipped}.pt", torch.zeros(1).expand(2**40), zipped)
    with pytest.raises(TensorError, match="compressed"):
        TensorFiles().read(tmp_path / "bomb.pt")
    for name in ("expandedTrue.pt", "expandedFalse.pt"):
        with pytest.raises(TensorError, match="is larger"):
            TensorFiles().read(tmp_path / name)


def test_a_member_beyond_any_file_is_damage():
    member = zipfile.ZipInfo("a/data/0")
    member.header_offset = 2**63
    with pytest.raises(TorchFileError, match="beyond its end"):
        read_member(io.BytesIO(b"PK"), member)


def test_numpy_arrays(tmp_path):
    """Dtypes, orders and versions; cut and longer files are refused."""
    files, plain = TensorFiles(), a_map().numpy()
    for n, array in enumerate((plain, plain.astype(">f4"), np.asfortranarray(plain))):
        path = tmp_path / f"{n}.npy"
        np.save(path, array)
        assert np.array_equal(files.read(path), array)
    with open(tmp_path / "2.npy", "wb") as file:
        np.lib.format.write_array(file, plain, version=(2, 0))
    assert np.array_equal(files.read(tmp_path / "2.npy"), plain)
    content = (tmp_path / "0.npy").read_bytes()
    for wrong in (content[:-1], content + b"\0", content[:7], content[:60], content[:6]):
        path.write_bytes(wrong)
        with pytest.raises(TensorError):
            files.read(path)
