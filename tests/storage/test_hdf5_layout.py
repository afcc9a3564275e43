"""The layout of an HDF5 file against h5py, and on files of other layouts."""

import struct

import h5py
import numpy as np
import pytest

from densefeed.storage.hdf5_layout import FILTERS, LAYOUT, LayoutError, read_layout

TYPES = ("|u1", "<u2", "<u4", "<i8", "<f2", "<f4", "<f8", "S1", "S300")


def layout(path, *attributes):
    with open(path, "rb") as file:
        return read_layout(file.fileno(), attributes)


def make(path, **datasets):
    """Write contiguous datasets of these values, each allocated at once."""
    with h5py.File(path, "w") as file:
        for name, values in datasets.items():
            file[name] = values
    return path


def test_datasets_and_attributes_equal_those_of_h5py(tmp_path):
    """More names than a node of a group holds, and attributes deleted and written again."""
    values = {f"d{n}": np.ones((n + 1, 2, 3)[: 1 + n % 3], kind) for n, kind in enumerate(TYPES)}
    path = make(tmp_path / "x.h5", **values)
    text = "é" * 40_000
    with h5py.File(path, "r+") as file:
        for round_ in range(4):
            file.attrs["text"], file.attrs["number"] = text[round_:], np.uint32(round_)
            file.attrs[f"other{round_}"] = np.zeros(5)
        del file["d3"]
    found = layout(path, "text", "number", "absent")
    assert found.attributes == {"text": text[3:].encode(), "number": 3}
    with h5py.File(path) as file:
        assert sorted(found.datasets) == sorted(file)
        for name, dataset in found.datasets.items():
            theirs = file[name]
            assert dataset == (theirs.dtype, theirs.shape, theirs.id.get_offset())


@pytest.mark.parametrize("name", [">u2", ">f4", "<i2", "<u8", "<c8", "?", "V3"])
def test_other_types_are_none(tmp_path, name):
    path = make(tmp_path / "x.h5", x=np.zeros(3, name))
    assert layout(path).datasets["x"].dtype is None


def plant(file, what):
    if what == "is a link":
        file["y"] = h5py.SoftLink("/x")
    elif what == "root group is not stored as a symbol table":
        file["y"] = h5py.ExternalLink("other.h5", "/x")
    elif what == "is not a dataset":
        file.create_group("y")
    elif what == "is not contiguous":
        file.create_dataset("y", data=np.zeros(8), chunks=(2,))
    elif what == "has filters or lies in another file":
        file.create_dataset("y", (8,), "<f4", external=[("other", 0, 32)])
    elif what == "shared type":
        file["type"] = np.dtype("<f4")
        file.create_dataset("y", data=np.zeros(8), dtype=file["type"])
        del file["type"]
    elif what == "is empty, or reaches beyond the end":
        file["y"] = np.zeros(0)
    else:
        assert what == "attribute 'text' is neither text nor a number"
        file.attrs["text"] = np.zeros(3)


@pytest.mark.parametrize(
    "what",
    [
        "is a link",
        "root group is not stored as a symbol table",
        "is not a dataset",
        "is not contiguous",
        "has filters or lies in another file",
        "shared type",
        "is empty, or reaches beyond the end",
        "attribute 'text' is neither text nor a number",
    ],
)
def test_what_no_store_holds_is_refused(tmp_path, what):
    path = make(tmp_path / "x.h5", x=np.zeros(3))
    with h5py.File(path, "r+") as file:
        plant(file, what)
    with pytest.raises(LayoutError, match=what):
        layout(path, "text")


def test_a_virtual_dataset_and_other_versions_are_refused(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        virtual = h5py.VirtualLayout((3,), "<f4")
        virtual[:] = h5py.VirtualSource("other.h5", "x", (3,))
        file.create_virtual_dataset("y", virtual)
    with pytest.raises(LayoutError, match="is not contiguous"):
        layout(tmp_path / "x.h5")
    with h5py.File(tmp_path / "new.h5", "w", libver="latest") as file:
        file["x"] = np.zeros(3)
    with pytest.raises(LayoutError, match="of another version than 0"):
        layout(tmp_path / "new.h5")
    (tmp_path / "no.h5").write_bytes(b"{}")
    with pytest.raises(LayoutError, match="metadata is damaged"):
        layout(tmp_path / "no.h5")
    (tmp_path / "no.h5").write_bytes(bytes(5000))
    with pytest.raises(LayoutError, match="not an HDF5 file"):
        layout(tmp_path / "no.h5")


def test_filters_of_a_contiguous_dataset_are_refused(tmp_path):
    """The HDF5 library writes filters only with chunks."""
    path = make(tmp_path / "x.h5", x=np.zeros(3))
    content = bytearray(path.read_bytes())
    # The message of the layout has 24 bytes; the next one is free space.
    at = content.index(struct.pack("<HH4xBB", LAYOUT, 24, 3, 1)) + 8 + 24
    assert struct.unpack_from("<H", content, at) == (0,)
    struct.pack_into("<H", content, at, FILTERS)
    path.write_bytes(content)
    with pytest.raises(LayoutError, match="'x' has filters"):
        layout(path)


def find_text(content: bytes, length: int) -> int:
    """Return the place of the reference to a text of this length: length, collection, number."""
    heap = content.index(b"GCOL")
    return content.index(struct.pack("<IQI", length, heap, 1))


def test_loops_and_declared_sizes_are_bounded(tmp_path):
    """Where the HDF5 library hangs or takes gigabytes: a text, a continuation, a dataset."""
    path = make(tmp_path / "x.h5", x=np.zeros(3))
    with h5py.File(path, "r+") as file:
        file.attrs["text"] = "some text"
    whole = path.read_bytes()
    at, heap = find_text(whole, 9), whole.index(b"GCOL")
    for place, form, value in (
        (at, "<I", 2**32 - 1),
        (at + 4, "<Q", 2**63),
        (at + 4, "<Q", 8),
        (at + 12, "<I", 7),
        (heap + 8, "<Q", 0),
        (heap + 24, "<Q", 2**64 - 8),
        (heap + 24, "<Q", 0),
    ):
        damaged = bytearray(whole)
        struct.pack_into(form, damaged, place, value)
        path.write_bytes(damaged)
        with pytest.raises(LayoutError, match="damaged"):
            layout(path, "text")
    # A message of 16 bytes that continues the root's header at itself.
    loop = whole.index(struct.pack("<HHI", 16, 16, 0))
    damaged = bytearray(whole)
    struct.pack_into("<QQ", damaged, loop + 8, loop, 24)
    path.write_bytes(damaged)
    with pytest.raises(LayoutError):
        layout(path, "text")
