"""A file of another kind than expected is called by its kind."""

import io
import json
import shutil
import tarfile

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from densefeed.models import checkpoints
from densefeed.storage.beton import Beton
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError
from densefeed.system.file_kinds import name_kind
from densefeed.system.json_files import read_json


@pytest.fixture
def files(tmp_path, packed):
    """A file of each kind, written by the package that the format comes from."""
    with h5py.File(tmp_path / "maps.h5", "w") as file:
        file["x"] = np.zeros(3)
    torch.save({"model": {}}, tmp_path / "x.pt")
    save_file({"x": torch.zeros(2)}, tmp_path / "x.safetensors")
    (tmp_path / "x.json").write_text(json.dumps({"a": 1}))
    (tmp_path / "x.txt").write_text("hello")
    (tmp_path / "empty").touch()
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("a"), io.BytesIO())
    shutil.copy(packed[0], tmp_path / "x.beton")
    return tmp_path


def test_outside_each_kind_has_its_name(files):
    found = {path.name: name_kind(path) for path in files.iterdir()}
    assert found == {
        "maps.h5": "an HDF5 file, as score maps are",
        "x.pt": "a zip file, as checkpoints of PyTorch are",
        "x.safetensors": "a safetensors file",
        "x.json": "a JSON file",
        "x.txt": "",
        "empty": "",
        "x.tar": "a tar file",
        "x.beton": "a .beton",
    }


def test_outside_a_file_of_another_kind_is_called_by_it(files):
    """`densefeed validate maps.h5` printed that it does not load safely."""
    (files / "x.onnx").write_bytes(b"\x08\x08\x12\x07pytorch")
    for name, read, kind in (
        ("maps.h5", checkpoints.load, "an HDF5 file, as score maps are, and not a checkpoint; giv"),
        ("x.beton", checkpoints.load, "a .beton, and not a checkpoint"),
        ("x.onnx", checkpoints.load, "an ONNX network, and not a checkpoint; give a che"),
        ("x.pt", ScoreMapStore, "a zip file, as checkpoints of PyTorch are, and not a file of sc"),
        ("x.json", ScoreMapStore, "a JSON file, and not a file of score maps"),
        ("maps.h5", lambda path: read_json(path, "x"), "an HDF5 file, .* and not a JSON file; x"),
    ):
        with pytest.raises(UserError, match=rf"{name} is {kind}"):
            read(files / name)
    with pytest.raises(
        UserError, match=r"maps\.h5 is not an FFCV dataset of version 2 but an HDF5"
    ):
        Beton(files / "maps.h5")
    # Damaged, or of no known kind.
    with pytest.raises(UserError, match=r"x\.txt is not a checkpoint that loads safely"):
        checkpoints.load(files / "x.txt")
