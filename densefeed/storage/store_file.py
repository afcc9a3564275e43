"""Open a file of score maps: its header and datasets, checked against the schema of FORMAT.md."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import h5py
import numpy as np

from densefeed.storage.row_codecs import Absent, Form, FormError
from densefeed.system.errors import UserError
from densefeed.system.options import to_plain

Types = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape of datasets, by name
Arrays = dict[str, np.ndarray]  # datasets, by name

# Version of the file for each form of its rows.
VERSIONS = {"raw": 1, "lossless": 2, "compact": 2}


@dataclass(frozen=True, kw_only=True)
class StoreHeader:
    """The metadata of a store."""

    side: int  # S: cells along each side of a map
    top_k: int  # k: classes kept per cell
    num_classes: int  # K: classes of the teacher
    absent: Absent  # meaning of the classes that are not kept, see FORMAT.md
    teacher: str  # timm name or checkpoint, and a hash of its weights
    input_size: int  # side of the teacher's input, pixels
    geometry: str  # how an image was fitted to the teacher's input
    fingerprint: str  # of the dataset, see images.py
    class_names: tuple[str, ...]  # of the dataset, in label order
    form: Form = "raw"  # encoding of a row
    # For one shard of a dataset: its index, the number of shards, its first row, all rows.
    shard: tuple[int, int, int, int] | None = None

    def to_json(self) -> str:
        """Encode as JSON. Version 1 has no `form` key, so version 1 files keep their bytes."""
        fields = asdict(self) | {"version": VERSIONS[self.form]}
        if self.form == "raw":
            del fields["form"]
        if self.shard is None:
            del fields["shard"]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str, where: Path) -> "StoreHeader":
        """Decode from JSON; UserError that names `where` for an unknown version, form or absent."""
        fields = json.loads(text)
        # Files of version 1 have no form: all are raw.
        version, form = fields.pop("version", None), fields.setdefault("form", "raw")
        absent = fields.get("absent")
        if version not in VERSIONS.values():
            problem = f"score maps have version {version}, this program reads versions 1 and 2"
        elif VERSIONS.get(form) != version:
            problem = f"version {version} has no form {form!r}"
        elif absent not in ("tail", "zero-logit"):
            problem = f"absent is {absent!r}, but must be tail or zero-logit"
        else:
            return cls(**{name: to_plain(value) for name, value in fields.items()})
        raise UserError(f"{where}: {problem}; label the images again")

    def check_same(self, other: "StoreHeader", where: Path) -> None:
        """Raise UserError, which names `where`, unless its header `other` equals this one."""
        # A cause is reported before its effects: another teacher often has another `side` too.
        effects = "side", "num_classes", "shard"
        for name, value in sorted(asdict(self).items(), key=lambda item: item[0] in effects):
            found = getattr(other, name)
            if found == value:
                continue
            difference = f"with another {name.replace('_', ' ')}"
            # Both stand for the dataset.
            if name in ("fingerprint", "class_names"):
                difference = "for another dataset"
            elif isinstance(value, int | str):
                difference += f" ({found}, not {value})"
            raise UserError(f"{where} was started {difference}; remove it or choose another --out")


def row_types(side: int, top_k: int) -> Types:
    """Return dtype and shape of a row of each dataset but `path`, whose width varies."""
    return {
        "logit": ("<f2", (side, side, top_k)),
        "cls": ("<u2", (side, side, top_k)),
        "lse": ("<f2", (side, side)),
        "window": ("<f4", (4,)),
        "label": ("<i8", ()),
        "crc32": ("<u4", ()),
        "palette": ("<u2", ()),
        "done": ("|u1", ()),
    }


def dataset_types(
    header: StoreHeader, rows: int, path: str, packed_shape: tuple[int, ...] = ()
) -> Types:
    """Return dtype and shape of every dataset of a store, in file order.

    `path` is the dtype of the dataset `path`; `packed_shape` is the shape of the dataset `rows` of
    a packed store, which is its size in bytes.
    """
    types, packed = row_types(header.side, header.top_k), header.form != "raw"
    if packed:
        del types["logit"], types["cls"], types["lse"]
        types["start"] = "<i8", ()
    types["path"] = path, ()
    types = {name: (dtype, (rows, *shape)) for name, (dtype, shape) in types.items()}
    if packed:
        types["rows"] = "|u1", packed_shape
    if header.form == "compact":
        types |= {"levels": ("<f4", (256,)), "error": ("<f8", (len(FormError._fields),))}
    return types


def read_layout(path: Path) -> tuple[StoreHeader, dict[str, tuple]]:
    """Read the header, and each dataset's dtype, shape and offset. UserError if HDF5 cannot."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name the HDF5 file of score maps")
    try:
        # HDF5's own lock would conflict with the writer's. What is read here does not change after
        # the file was created.
        with h5py.File(path, "r", locking=False) as file:
            if "densefeed" not in file.attrs:
                raise UserError(
                    f"{path} is not a score map file; make one with tools/relabel_imagenet.py"
                )
            header = StoreHeader.from_json(file.attrs["densefeed"], path)
            return header, {name: (d.dtype, d.shape, d.id.get_offset()) for name, d in file.items()}
    except FileNotFoundError:
        raise missing_file(path) from None
    # The file is not damaged, and commands have a remedy for this error.
    except PermissionError:
        raise
    except (OSError, KeyError) as error:
        raise UserError(
            f"{path} is not a complete HDF5 file ({error}); copy it again or relabel"
        ) from error


def missing_file(path: Path) -> UserError:
    """Return the error that says that there is no file of score maps at `path`."""
    return UserError(f"{path}: there is no such file; make it with tools/relabel_imagenet.py")


def map_datasets(path: Path) -> tuple[StoreHeader, Arrays, dict[str, int]]:
    """Map a file: header, memory-mapped datasets (read only) and their offsets in the file.

    Raises UserError if the file is damaged or not there.
    """
    header, layout = read_layout(path)
    rows = layout["label"][1][0] if "label" in layout else 0
    missing = None, ()
    types = dataset_types(header, rows, "", layout.get("rows", missing)[1][:1])
    # Its dtype depends on the longest path.
    del types["path"]
    for name, (dtype, shape) in types.items():
        expected, found = (np.dtype(dtype), shape), layout.get(name, missing)[:2]
        if expected != found:
            raise UserError(
                f"{path}: its header requires {name!r} to be {shape} of {expected[0]}, "
                f"but it is {found[1]} of {found[0]}; label the images again"
            )
    try:
        with path.open("rb") as file:
            # Plain arrays: slicing a `np.memmap` costs a microsecond more.
            arrays = {
                name: np.asarray(np.memmap(file, dtype, "r", offset, shape))
                for name, (dtype, shape, offset) in layout.items()
            }
    # Another rank may give a shard its final name after its layout was read.
    except FileNotFoundError:
        raise missing_file(path) from None
    return header, arrays, {name: offset for name, (_, _, offset) in layout.items()}
