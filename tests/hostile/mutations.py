"""Ways to damage a file: its bytes, its text, and the structure of its format."""

import io
import json
import math
import os
import random
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import torch

from densefeed.models.checkpoints import MANIFEST
from densefeed.models.model_spec import ModelSpec, build_on_meta
from densefeed.system.files import hash_file

NUMBERS = (
    0,
    1,
    255,
    65_535,
    65_536,
    10**8,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    2**64 - 1,
)
# Values of another type, size or meaning, for any place in a document.
VALUES = (
    *(None, True, -1, 0, 1, 10**8, 10**30, -(2**63), 0.5, float("nan"), float("inf"), -1e308),
    *("", "\x1b[2J\x07", "\u202e", "../../x", "/etc/passwd", "a" * 70_000, "\0", "hf-hub:x/y"),
    # In float32 0 and infinite.
    *([1e-320] * 3, [1e300] * 3),
    *("resnet18", "\udc80", "__class__", "%s{}[red]", [], {}, [[]], [None] * 3, {"": {}}),
)


class Payload:
    """Its pickle writes a file when it is loaded without `weights_only`."""

    def __reduce__(self):
        return os.system, ("touch pwned",)


def damage(path: Path, rng: random.Random) -> str:
    """Damage a file in place in one of the ways of its kind; return a description."""
    ways = [*BYTES, *BY_SUFFIX.get(path.suffix, ()), *BY_SUFFIX.get(path.suffix, ())]
    way = rng.choice(ways)
    return f"{way.__name__} {way(path, rng) or ''}"


# ------------------------------------------------------------------------- bytes


def flip_bits(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    places = [rng.randrange(len(content)) for _ in range(rng.randint(1, 5))]
    # Headers are short, and most of a file is behind them.
    if rng.random() < 0.5:
        places = [place % min(len(content), 2048) for place in places]
    for place in places:
        content[place] ^= rng.choice([1 << rng.randrange(8), rng.randrange(1, 256)])
    path.write_bytes(content)
    return str(places)


def cut(path: Path, rng: random.Random) -> str:
    length = rng.choice([0, 1, rng.randrange(path.stat().st_size), path.stat().st_size - 1])
    os.truncate(path, length)
    return str(length)


def fill(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content))
    length = min(rng.choice([4, 8, 64, 4096]), len(content) - start)
    content[start : start + length] = bytes([rng.choice([0, 255, 65])]) * length
    path.write_bytes(content)
    return f"{start} {length}"


def write_number(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    size = rng.choice([2, 4, 8])
    start = rng.randrange(max(1, min(len(content), rng.choice([256, 4096, len(content)])) - size))
    value = rng.choice(NUMBERS) % 2 ** (8 * size)
    content[start : start + size] = value.to_bytes(size, rng.choice(["little", "big"]))
    path.write_bytes(content)
    return f"{value} at {start}"


def grow(path: Path, rng: random.Random) -> None:
    with open(path, "ab") as file:
        file.write(rng.randbytes(rng.choice([1, 22, 5000])))


def splice(path: Path, rng: random.Random) -> str:
    content = path.read_bytes()
    one, other = sorted(rng.randrange(len(content)) for _ in range(2))
    path.write_bytes(rng.choice([content[:one] + content[other:], content[:other] + content[one:]]))
    return f"{one} {other}"


def replace_all(path: Path, rng: random.Random) -> str:
    content = rng.choice(
        [
            b"",
            b"\0" * 100,
            b"\xff\xfe{",
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(pwned) (w) file\n",
            b"[" * 200_000,
            b'{"a":' * 100_000,
            b"9" * 5000,
            b"[" + b"9" * 5000 + b"]",
            b"\x80\x04c" + b"os\nsystem\n(S'touch pwned'\ntR.",
        ]
    )
    path.write_bytes(content)
    return str(content[:12])


def stand_in(path: Path, rng: random.Random) -> str:
    """Put a FIFO, a device, a loop or a folder in the place of the file."""
    path.unlink()
    kind = rng.choice(["fifo", "/dev/zero", "loop", "folder", "missing"])
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.symlink_to(path.name if kind == "loop" else kind)
    return kind


BYTES = (
    flip_bits,
    flip_bits,
    flip_bits,
    cut,
    fill,
    write_number,
    write_number,
    grow,
    splice,
    replace_all,
    stand_in,
)

# ------------------------------------------------------------------------- documents


def places(node: object) -> list[tuple]:
    """List (container, key) of every value in nested dictionaries and lists."""
    keys = (
        list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    )
    found = [(node, key) for key in keys]
    return found + [place for key in keys for place in places(node[key])]


def alter(document: dict | list, rng: random.Random, values: tuple = VALUES) -> str:
    """Change, remove or nest one value of a document in place."""
    found = places(document)
    if not found:
        return "nothing"
    node, key = rng.choice(found)
    way = rng.choice(["value", "value", "value", "remove", "deep", "key"])
    if way == "value":
        node[key] = rng.choice(values)
    elif way == "remove":
        del node[key]
    elif way == "key" and isinstance(node, dict):
        node[rng.choice(["", "checkpoint_path", "pretrained", "\x1b[2J", "version"])] = node.pop(
            key
        )
    else:
        deep = node[key]
        for _ in range(500):
            deep = [deep]
        node[key] = deep
    return f"{way} of {key!r:.60}"


def alter_json(path: Path, rng: random.Random) -> str:
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    line = rng.randrange(len(lines))
    document = [json.loads(lines[line])]
    what = alter(document, rng)
    text = json.dumps(document[0]) if document else ""
    if rng.random() < 0.1:
        text = text.replace("1", "9" * 5000, 1)
    lines[line] = text
    path.write_text("\n".join(lines) + "\n", errors="surrogatepass")
    return what


def alter_text(path: Path, rng: random.Random) -> str:
    lines = path.read_bytes().splitlines()
    line = rng.choice(
        [
            b"../../../../etc/passwd 0",
            b"/etc/passwd 1",
            b"a//b.jpg 0",
            b"train/cat/000.jpg 100000000",
            b"train/cat/000.jpg " + b"9" * 5000,
            b"train/cat/000.jpg -1",
            b"train/cat/000.jpg 1e3",
            b"\x1b[2J\x07.jpg 0",
            b"\xff\xfe.jpg 0",
            b"\0 0",
            b'"cat,"dog',
            b'"' + b"a" * 200_000,
            b"cat,cat,cat",
            b"99999999999999999999,cat",
            b"9" * 5000 + b",cat",
            b"," * 100,
            "\u202egpj.exe 0".encode(),
            "٣,cat".encode(),
            b"/dev/zero 0",
            b"train/cat 0",
            b"train/cat/000.jpg",
        ]
    )
    at = rng.randrange(len(lines) + 1)
    del lines[at : at + 1]
    lines.insert(rng.randrange(len(lines) + 1), line)
    path.write_bytes(b"\n".join(lines))
    return str(line[:40])


# ------------------------------------------------------------------------- checkpoints, tensors

TENSORS = (
    lambda: torch.full((3, 3), torch.nan),
    lambda: torch.full((3,), torch.nan),
    lambda: torch.zeros(0),
    lambda: torch.zeros(()),
    lambda: torch.arange(5),
    lambda: torch.zeros(1).expand(2**34),
    lambda: torch.zeros(3, dtype=torch.complex64),
    lambda: torch.zeros(4, device="meta"),
    lambda: torch.eye(3).to_sparse(),
)


def nest(levels: int) -> list:
    """Return a list in a list, and so on."""
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


def make_cycles() -> tuple[list, dict]:
    """Return a list and a dictionary that hold themselves."""
    items, table = [], {}
    items.append(items)
    table["self"] = table
    return items, table


def make_values() -> tuple:
    """Return values for any place in a checkpoint; JSON has no such types."""
    return (
        *(3, 2**62, 1.5, -0.5, "x", "hf-hub:timm/resnet18", "local-dir:/tmp", "resnet18.a/../b"),
        *((), [1, 2], [0.5, 0.5], [0.5] * 3, [0.0] * 3, [math.nan] * 3, [1] * 10**5),
        *(nest(3), nest(150), *make_cycles(), {"a": {"b": {}}}, {1: 2}, {(1, 2): 3}, {"x"}),
        *(Payload(), *(make() for make in TENSORS)),
    )


def alter_checkpoint(path: Path, rng: random.Random) -> str:
    state = torch.load(path, weights_only=True)
    if isinstance(state, torch.Tensor):
        state = rng.choice([rng.choice(TENSORS)(), [state], {"a": state}, state.double() * 1e300])
        what = "tensor"
    elif rng.random() < 0.5:
        # A run's weights would hide the few entries that say what runs.
        tensors = {key: value for key, value in state.items() if holds_tensors(value)}
        named = {key: value for key, value in state.items() if key not in tensors}
        what = alter(named, rng, (*VALUES, *make_values()))
        state = tensors | named
    else:
        what = alter(state, rng, (*VALUES, *make_values()))
    limit = sys.getrecursionlimit()
    # Python's pickler calls itself several times for each level of a deep list.
    sys.setrecursionlimit(20_000)
    with open(path, "wb") as file:
        torch.save(state, file, _use_new_zipfile_serialization=rng.random() < 0.8)
    sys.setrecursionlimit(limit)
    return what


def holds_tensors(value: object) -> bool:
    children = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    )
    return isinstance(value, torch.Tensor) or any(map(holds_tensors, children))


# Options of a recipe; the path None becomes that of a malicious file.
ARGUMENTS = (
    *(("checkpoint_path", None), ("pretrained", True), ("features_only", True), ("unknown", 1)),
    *(("act_layer", "gelu"), ("depth", 10**9), ("embed_dim", 10**7), ("num_classes", 10**9)),
    *(("img_size", 10**6), ("patch_size", 1), ("num_heads", 0), ("mlp_ratio", math.inf)),
    *(("depths", [1000] * 64), ("cache_dir", "cache"), ("stem", [[3, 1]] * 60)),
    *(("drop_path_rate", math.nan), ("pretrained_cfg", {"file": "x.pt"}), ("scriptable", "yes")),
    *(("pretrained_cfg", {"url": "http://localhost/x"}), ("out_indices", 5), ("norm_groups", -3)),
    *(("pretrained_cfg_overlay", {"url": "http://localhost/x"}), ("global_pool", "x")),
    ("in_chans", 2**19),
)


# A Swin transformer with small weights and large tables: at 4,096 pixels 4 GB.
TABLES = {"window_size": 32, "embed_dim": 4, "depths": [2], "num_heads": [1], "num_classes": 2}
SIDES = (256, 1024, 4096)


def alter_recipe(path: Path, rng: random.Random) -> str:
    state = torch.load(path, weights_only=True)
    if not isinstance(state, dict) or "recipe" not in state:
        return "nothing"
    evil = path.with_name("evil.pt")
    torch.save({"state_dict": {"weight": Payload()}}, evil)
    recipe = state["recipe"]
    if rng.random() < 0.3:
        recipe["name"] = rng.choice(["hf-hub:a/b", "local-dir:/tmp", "no_such", "resnet18", "", 3])
        what = recipe["name"]
    elif rng.random() < 0.2:
        what = "tables"
        spec = ModelSpec("swin_tiny_patch4_window7_224", {**TABLES, "img_size": rng.choice(SIDES)})
        weights = build_on_meta(spec).state_dict()
        recipe |= spec._asdict()
        state |= {
            "ema": None,
            "model": {name: torch.zeros(weights[name].shape) for name in weights},
        }
    else:
        # Several, because some are harmless alone.
        what = rng.choices(ARGUMENTS, k=rng.choice([1, 1, 2, 3]))
        kwargs = {name: str(evil) if value is None else value for name, value in what}
        recipe["kwargs"] = recipe.get("kwargs", {}) | kwargs
    torch.save(state, path)
    return str(what)


def alter_safetensors(path: Path, rng: random.Random) -> str:
    """Alter the JSON in front of the tensors, let it be long, or let its length be wrong."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, tensors = json.loads(content[8 : 8 + length]), content[8 + length :]
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    what = rng.choice(["value", "value", "value", "many", "length"])
    if what == "value":
        what = alter(header, rng)
    elif what == "many":
        header |= dict.fromkeys(map(str, range(rng.choice([1000, 30_000, 300_000]))), empty)
    text = json.dumps(header).encode()
    length = rng.choice([0, 1, 2**31, 2**63]) if what == "length" else len(text)
    path.write_bytes(struct.pack("<Q", length) + text + tensors)
    return what


def pickle_code(path: Path, rng: random.Random) -> None:
    torch.save(Payload(), path, _use_new_zipfile_serialization=rng.random() < 0.5)


def flip_pickle(path: Path, rng: random.Random) -> None:
    """Flip bits of the pickle in a file of torch, and correct its CRC."""
    new = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(new, "w") as file:
        for name in old.namelist():
            member = bytearray(old.read(name))
            if name.endswith("data.pkl"):
                for _ in range(rng.choice([1, 3, 20])):
                    member[rng.randrange(len(member))] ^= 1 << rng.randrange(8)
            file.writestr(name, bytes(member))
    path.write_bytes(new.getvalue())


def list_hash(path: Path) -> None:
    """Write the hash of a checkpoint into the manifest beside it."""
    manifest = path.with_name(MANIFEST)
    entries = json.loads(manifest.read_text())
    for entry in entries:
        if entry["file"] == path.name:
            entry["sha256"] = hash_file(path)
    manifest.write_text(json.dumps(entries))


def zip_bomb(path: Path, rng: random.Random) -> str:
    """Compressed members, or a pickle that doubles what it holds again and again."""
    file = io.BytesIO()
    compressed = rng.random() < 0.5
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        if compressed:
            archive.writestr("archive/data.pkl", b"\x80\x02" + b"(" * (200 * 2**20) + b".")
        else:
            # 40 times: a tuple of the last one twice. Printing or walking it would take 2^40 steps.
            archive.writestr("archive/data.pkl", b"\x80\x02)q\0" + b"h\0h\0\x86q\0" * 40 + b"h\0.")
        archive.writestr("archive/version", b"3\n")
    path.write_bytes(file.getvalue())
    return "compressed" if compressed else "doubling"


# ------------------------------------------------------------------------- HDF5, beton, npy


def alter_header(path: Path, rng: random.Random) -> str:
    """Alter the JSON of a store, or put another attribute in its place."""
    with h5py.File(path, "r+") as file:
        header = json.loads(file.attrs["densefeed"])
        what = alter(header, rng)
        text = json.dumps(header)
        file.attrs["densefeed"] = rng.choice(
            [text] * 6 + [np.arange(9), 3, text.encode(), "[" * 60_000]
        )
        if rng.random() < 0.1:
            file.attrs["names_crc32"] = rng.choice([-1, "x", np.zeros(5), 2**40])
    return what


def replace_dataset(path: Path, rng: random.Random) -> str:
    """Replace a dataset by one of another type, shape, layout or place."""
    with h5py.File(path, "r+") as file:
        name = rng.choice(list(file))
        old = file[name][:]
        del file[name]
        kinds = {
            "text": lambda: file.create_dataset(name, len(old), h5py.string_dtype()),
            "chunked": lambda: file.create_dataset(name, data=old, chunks=True),
            "compressed": lambda: file.create_dataset(name, data=old, compression="gzip"),
            "other type": lambda: file.create_dataset(
                name, data=np.zeros(old.shape, rng.choice(["f8", "<i2", "S3", "?", ">u2"]))
            ),
            "shape": lambda: file.create_dataset(name, data=np.resize(old, (*old.shape, 2))),
            "rows": lambda: file.create_dataset(
                name, data=np.resize(old, (rng.choice([0, 1, 5000]), *old.shape[1:]))
            ),
            "huge": lambda: file.create_dataset(name, (10**12, *old.shape[1:]), old.dtype),
            "scalar": lambda: file.create_dataset(name, data=3),
            "empty": lambda: file.create_dataset(name, data=h5py.Empty("f4")),
            "group": lambda: file.create_group(name),
            "soft link": lambda: file.__setitem__(name, h5py.SoftLink("/label")),
            "external link": lambda: file.__setitem__(name, h5py.ExternalLink("/etc/passwd", "/x")),
            "external": lambda: file.create_dataset(
                name, old.shape, old.dtype, external=[("/etc/passwd", 0, 10**6)]
            ),
            "reference": lambda: file.create_dataset(name, (len(old),), h5py.ref_dtype),
            "gone": lambda: None,
        }
        kind = rng.choice(list(kinds))
        kinds[kind]()
    return f"{name}: {kind}"


def alter_values(path: Path, rng: random.Random) -> str:
    """Put extreme values in a dataset that stays of its type."""
    with h5py.File(path, "r+") as file:
        name = rng.choice(
            [name for name in file if file[name].dtype.kind in "fiu" and file[name].size]
        )
        values = file[name][:]
        row = rng.randrange(len(values))
        limits = np.finfo if values.dtype.kind == "f" else np.iinfo
        extreme = [0, 1, limits(values.dtype).max, limits(values.dtype).min]
        values[row] = rng.choice(
            [*extreme, *([np.nan, np.inf] if values.dtype.kind == "f" else [])]
        )
        file[name][:] = values
    return f"{name}[{row}]"


def alter_beton(path: Path, rng: random.Random) -> str:
    """Write a number into the header, the fields' descriptors or a table of a .beton."""
    content = bytearray(path.read_bytes())
    # Header, then descriptors of 1,088 bytes; the tables' addresses are in the header.
    tables = [struct.unpack_from("<Q", content, place)[0] for place in (16, 24)]
    starts = [0, 40, *(table for table in tables if table < len(content))]
    start = rng.choice(starts) + rng.choice([0, 4, 8, 12, 16, 24, 32, rng.randrange(256)])
    size = rng.choice([1, 2, 4, 8])
    value = rng.choice(NUMBERS) % 2 ** (8 * size)
    content[start : start + size] = value.to_bytes(size, "little")
    path.write_bytes(content)
    return f"{value} at {start}"


def write_npy(path: Path, rng: random.Random) -> str:
    """Put a NumPy file with a hostile header in the place of a map."""
    shape = rng.choice(
        ["(2, 2, 4, 4)", "(10000000000,)", "()", "(-1, 4)", "(2**9)", "((((", "(" * 9000]
    )
    dtype = rng.choice(["<f2", "|O", "<f2, ", "V9999999999", "|S0", "<U99999999", "[('a', '<f4')]"])
    header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    path.write_bytes(
        b"\x93NUMPY\1\0" + struct.pack("<H", len(header) % 65536) + header + bytes(128)
    )
    return f"{dtype} {shape[:20]}"


def alter_tar(path: Path, rng: random.Random) -> str:
    """Write a field of a member's header, under a checksum that is right."""
    content = bytearray(path.read_bytes())
    heads = [at for at in range(0, len(content), 512) if content[at + 257 : at + 262] == b"ustar"]
    at, field = rng.choice(heads), rng.choice([0, 124, 124, 156, 257, 345])
    value = rng.choice(
        [
            *(b"../../x.jpg\0", b"/etc/passwd.jpg\0", b"a.jpg\0", b"\xff\xfe.jpg\0", b"x.cls\0"),
            *(b"7" * 12, b"\x80" + b"\xff" * 11, b"\xff" * 12, b"0" * 12, b"00000000010\0"),
            *(bytes([kind]) for kind in b"0123457LKxgSDVX\0"),
        ]
    )
    content[at + field : at + field + len(value)] = value
    content[at + 148 : at + 156] = b" " * 8
    content[at + 148 : at + 156] = b"%06o\0 " % sum(content[at : at + 512])
    path.write_bytes(content)
    return f"{value!r} at {at} + {field}"


def alter_footer(path: Path, rng: random.Random) -> str:
    """Change bytes of a Parquet file's footer, which describes the columns."""
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[-8:-4], "little")
    places = [len(content) - 8 - rng.randrange(1, length) for _ in range(rng.randint(1, 4))]
    for place in places:
        content[place] = rng.choice([0, 1, 127, 128, 255, content[place] ^ 1 << rng.randrange(8)])
    path.write_bytes(content)
    return str(places)


BY_SUFFIX: dict[str, tuple[Callable, ...]] = {
    ".h5": (alter_header,) * 6 + (replace_dataset,) * 6 + (alter_values,) * 3,
    ".beton": (alter_beton,) * 12,
    ".tar": (alter_tar,) * 12,
    ".parquet": (alter_footer,) * 12,
    ".pt": (
        *(alter_checkpoint,) * 6,
        *(alter_recipe,) * 4,
        *(pickle_code, zip_bomb, flip_pickle, flip_pickle),
    ),
    ".safetensors": (alter_safetensors,) * 12,
    ".npy": (write_npy,) * 12,
    ".json": (alter_json,) * 12,
    ".jsonl": (alter_json,) * 12,
    ".txt": (alter_text,) * 12,
    ".csv": (alter_text,) * 12,
}
