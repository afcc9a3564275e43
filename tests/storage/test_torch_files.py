"""Files that torch.save cannot have written are refused before torch.load reads them."""

import copy
import io
import struct
import time
import zipfile

import pytest
import torch

from densefeed.models import checkpoints
from densefeed.storage.tensor_files import TensorError, TensorFiles
from densefeed.storage.torch_files import TorchFileError, check_torch_file

HEAD = b"\x80\x02"


def saved(value, zipped=True):
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=zipped)
    return file


def rezipped(file, change=lambda name, content: content, method=zipfile.ZIP_STORED):
    """Rewrite a zip with other members."""
    new = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(new, "w", method) as zipped:
        for name in old.namelist():
            zipped.writestr(name, change(name.partition("/")[2], old.read(name)))
    return new


def with_pickle(pickled, method=zipfile.ZIP_STORED):
    """A file of torch.save with another pickle."""
    return rezipped(
        saved(torch.zeros(3)), lambda name, old: pickled if name == "data.pkl" else old, method
    )


def doubled(levels):
    """A tuple of twice the same tuple, so often, as the key of a dictionary."""
    twice = b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(levels))
    return HEAD + b")q\x00" + twice + b"}h%cK\x01s." % levels


BOMBS = {
    "empty lists": (lambda: with_pickle(HEAD + b"]" * 2**20 + b"."), "operations"),
    "compressed": (
        lambda: with_pickle(HEAD + b"]" * 2**26 + b".", zipfile.ZIP_DEFLATED),
        "compressed",
    ),
    "long pickle": (lambda: with_pickle(HEAD + b"]" * 2**25 + b"."), "bytes"),
    "a tuple that doubles": (lambda: with_pickle(doubled(60)), "tuple of more"),
    "a deep tuple": (lambda: with_pickle(HEAD + b")" + b"\x85" * 10**6 + b"."), "tuple of more"),
    "bytearray of a number": (lambda: with_pickle(HEAD + b"cbuiltins\nbytearray\n."), "bytearray"),
    "tensor of a number": (lambda: with_pickle(HEAD + b"ctorch\nFloatTensor\n."), "FloatTensor"),
    "large integer": (lambda: with_pickle(HEAD + b"\x8a\x09" + b"\xff" * 8 + b"\x00."), "63 bits"),
    "other operation": (lambda: with_pickle(HEAD + b"]2."), "DUP"),
    "nothing on the stack": (lambda: with_pickle(HEAD + b"\x86."), "damaged"),
    "no end": (lambda: with_pickle(HEAD + b"]"), "damaged"),
}


# A million operations take 4 s of the scans.
@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(*bomb, id=name, marks=[pytest.mark.slow] * (name == "empty lists"))
        for name, bomb in BOMBS.items()
    ],
)
def test_bombs_are_refused_at_once(make, said, tmp_path):
    """A deflated pickle of 65 kB took 5 GB and 43 s."""
    file = make()
    began = time.process_time()
    with pytest.raises(TorchFileError, match=said):
        check_torch_file(file, 2**24)
    (tmp_path / "x.pt").write_bytes(file.getvalue())
    with pytest.raises(TensorError):
        TensorFiles().read(tmp_path / "x.pt")
    with pytest.raises(checkpoints.CheckpointError, match="loads safely"):
        checkpoints.load(tmp_path / "x.pt")
    assert time.process_time() - began < 15


def test_a_storage_is_as_long_as_its_pickle_states():
    """PyTorch 2.6 reads behind the end of a shorter one."""
    number = struct.pack("<i", 10**8)

    def longer(name, old):
        return old.replace(b"cpuq\x04K\x03", b"cpuq\x04J" + number) if name == "data.pkl" else old

    file = rezipped(saved(torch.zeros(3)), longer)
    with pytest.raises(TorchFileError, match="another size"):
        check_torch_file(file, 2**16)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_files_of_torch_save_are_accepted(zipped):
    tied = torch.zeros(5)
    held = {
        "model": {f"weight{n}": torch.ones(2, n, dtype=torch.float16) for n in range(300)},
        "tied": [tied, tied, tied[2:], torch.nn.Parameter(tied)],
        "seen": torch.zeros(2, dtype=torch.float64),
        "other": [
            None,
            True,
            2**40,
            1.5,
            "ä",
            (1, (2, 3)),
            {1, 2},
            torch.Size((3,)),
            torch.bfloat16,
        ],
    }
    file = saved(held, zipped)
    check_torch_file(file, 2**16)
    assert file.tell() == 0
    assert torch.load(file, weights_only=True)["other"] == held["other"]


def test_every_cut_zip_is_refused():
    content = saved({"a": torch.arange(4.0)}).getvalue()
    for length in range(0, len(content), 7):
        with pytest.raises(TorchFileError):
            check_torch_file(io.BytesIO(content[:length]), 2**16)


def test_a_zip_that_readers_see_differently_is_refused():
    """Bytes before it, a comment, a name twice but for case, another place of the directory."""
    file = saved(torch.zeros(3))
    content = file.getvalue()
    doubled = io.BytesIO(content)
    with zipfile.ZipFile(doubled, "a") as zipped:
        zipped.writestr("archive/DATA.PKL", HEAD + b"].")
    commented = io.BytesIO(content)
    with zipfile.ZipFile(commented, "a") as zipped:
        zipped.comment = b"x"
    moved = bytearray(content)
    moved[-34] ^= 1
    inside = io.BytesIO(content[:4] + content)
    for other in (doubled, commented, io.BytesIO(bytes(moved)), inside):
        with pytest.raises(TorchFileError):
            check_torch_file(other, 2**16)


def overlapped(count):
    """A file of `count` equal tensors whose storages are the bytes of the first."""
    file = saved([torch.zeros(1000) for _ in range(count)])
    with zipfile.ZipFile(file) as old:
        names, contents = old.namelist(), [old.read(name) for name in old.namelist()]
    new = io.BytesIO()
    with zipfile.ZipFile(new, "w") as zipped:
        first = None
        for name, content in zip(names, contents, strict=True):
            if "/data/" in name and first:
                # Only an entry of the directory, with the place of the first storage.
                member = copy.copy(first)
                member.filename = name
                zipped.filelist.append(member)
                continue
            zipped.writestr(name, content)
            if "/data/" in name:
                first = zipped.filelist[-1]
    return new


def test_members_that_share_bytes_are_refused():
    """Else a small file would state storages of any size in all."""
    one, many = overlapped(1), overlapped(40)
    check_torch_file(one, 2**16)
    assert len(many.getvalue()) < 40 * 4000
    with pytest.raises(TorchFileError, match="compressed or overlap"):
        check_torch_file(many, 2**16)


def test_a_legacy_file_states_no_more_than_it_holds():
    content = saved(torch.zeros(3), zipped=False).getvalue()
    at = content.index(b"K\x03", content.index(b"cpuq"))
    larger = content[:at] + b"J" + struct.pack("<i", 10**9) + content[at + 2 :]
    with pytest.raises(TorchFileError, match="shorter"):
        check_torch_file(io.BytesIO(larger), 2**16)
