"""Files of score maps that state more rows than they hold."""

import time

import h5py
import numpy as np
import pytest

from densefeed.relabel.audit import audit
from densefeed.storage.maintenance import convert_file, verify_files
from densefeed.storage.store_file import dataset_types
from densefeed.storage.store_folder import MANIFEST, Manifest, StoredShard
from densefeed.system.errors import UserError

from ..stores import make_header


def write_sparse(path, rows):
    """Write an unfinished store of `rows` rows without a byte of them on disk."""
    header = make_header(side=1, top_k=1)
    places = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    places.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    places.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    try:
        with h5py.File(path, "w") as file:
            file.attrs["densefeed"] = header.to_json()
            file.attrs["names_crc32"] = np.uint32(0)
            for name, (dtype, shape) in dataset_types(header, rows, "S1").items():
                file.create_dataset(name, shape, dtype, dcpl=places, track_times=False)
    except OSError:
        pytest.skip("this file system has no sparse files")
    assert path.stat().st_size > 38 * rows
    assert path.stat().st_blocks * 512 < 2**20
    return path


def test_outside_a_sparse_file_of_billions_of_rows_is_refused_at_once(tmp_path, capsys):
    """Reading whether each of 2**33 rows is labeled takes 12 s and 8 GB."""
    path, begun = write_sparse(tmp_path / "maps.h5", 2**33), time.process_time()
    with pytest.raises(UserError, match="faults were found in"):
        verify_files((path,))
    assert "16777216 or more rows are not labeled; run the labeling" in capsys.readouterr().out
    with pytest.raises(UserError, match="or more rows are not labeled"):
        convert_file(path, "lossless", tmp_path / "out.h5")
    (check,) = audit(path).checks
    assert (check.name, check.verdict) == ("finished", "fault")
    assert "rows are not labeled yet" in check.evidence
    assert not (tmp_path / "out.h5").exists()
    assert time.process_time() - begun < 3


def test_outside_a_sparse_shard_is_refused_before_it_is_hashed(tmp_path, capsys):
    """Hashing the 90 GB that this shard states takes a minute or more."""
    (tmp_path / "maps/shards").mkdir(parents=True)
    path = write_sparse(tmp_path / "maps/shards/0000000000000000-0000000000000000.h5", 2**31)
    size, header = path.stat().st_size, make_header(side=1, top_k=1)
    shard = StoredShard(f"shards/{path.name}", 2**31, size, "0" * 64, header.fingerprint)
    (tmp_path / "maps" / MANIFEST).write_bytes(Manifest(header, (shard,)).to_json())
    begun = time.process_time()
    with pytest.raises(UserError, match="faults were found in"):
        verify_files((tmp_path / "maps",))
    said = capsys.readouterr().out
    assert f"{path} has 16777216 or more rows that are not labeled; remove it and run" in said
    path.write_bytes(b"")
    with pytest.raises(UserError, match="faults were found in"):
        verify_files((tmp_path / "maps",))
    assert f"{path} does not have the {size:,} bytes that were recorded" in capsys.readouterr().out
    assert time.process_time() - begun < 3
