"""Check a file of `torch.save` before `torch.load` reads it.

`torch.load(weights_only=True)` runs no code from a file, but limits neither its memory nor its
time: 64 MiB of empty lists, which a zip compresses to 65 kB, took 5 GB and 43 s. A tuple of tuples
takes exponential time as a key, a deep one overflows the stack, and PyTorch 2.6 reads beyond the
end of a storage that is shorter than its pickle states. So this module first reads the operations
of the pickle, builds nothing from them, and refuses what `torch.save` does not write.
"""

import io
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import torch

# Operations that PyTorch's own unpickler of weights knows.
OPERATIONS = (
    "PROTO GLOBAL NEWOBJ REDUCE BUILD APPEND APPENDS SETITEM SETITEMS MARK TUPLE TUPLE1 TUPLE2 "
    "TUPLE3 NONE NEWFALSE NEWTRUE EMPTY_TUPLE EMPTY_LIST EMPTY_DICT EMPTY_SET BININT BININT1 "
    "BININT2 BINFLOAT BINUNICODE SHORT_BINSTRING LONG1 BINGET LONG_BINGET BINPUT LONG_BINPUT "
    "BINPERSID STOP"
)
# Bytes of an element, by the name of a storage's type in a pickle.
STORAGES = {
    f"torch {name}Storage": size
    for size, names in {
        1: ("Bool", "Byte", "Char"),
        2: ("Half", "BFloat16", "Short"),
        4: ("Float", "Int"),
        8: ("Double", "Long", "ComplexFloat"),
        16: ("ComplexDouble",),
    }.items()
    for name in names
} | {"torch.storage UntypedStorage": 1}
# PyTorch's own list has callables too that allocate as many bytes as a number in the file states.
GLOBALS = frozenset(
    (
        *STORAGES,
        *(f"torch {name}" for name in vars(torch) if isinstance(vars(torch)[name], torch.dtype)),
        *(f"torch._utils _rebuild_{name}" for name in ("tensor_v2", "tensor_v3", "parameter")),
        *("torch._utils _rebuild_tensor", "torch Size", "torch device"),
        *("collections OrderedDict", "argparse Namespace", "builtins set", "__builtin__ set"),
    )
)
# Checkpoints of 10,000 tensors have 250,000. An object of the smallest operation takes 90 bytes.
MAX_OPERATIONS = 2**20
# Elements of a tuple, those of the tuples in it included: it may be a key, which is hashed.
MAX_TUPLE = 10_000
# Python's hashes of larger integers are easily made equal, which makes a dictionary slow.
MAX_INTEGER = 2**63
# Pickles of a legacy file before its storages.
LEGACY_PICKLES = 5
# End of a zip file, without a comment: place of the directory. Before it, at fixed places, the
# locator and the record of zip64, which torch.save writes always.
END, LOCATOR, RECORD = struct.Struct("<4s8xLLH"), struct.Struct("<4s4xQ4x"), 56
# How zipfile refuses a damaged file.
ZIP_ERRORS = (zipfile.BadZipFile, ValueError, RuntimeError, EOFError, OverflowError, struct.error)


class TorchFileError(Exception):
    """A file that `torch.save` cannot have written. The message gives the reason."""


def check_torch_file(file: BinaryIO, max_pickle: int) -> None:
    """Raise TorchFileError unless reading the file takes little more memory than its size.

    `max_pickle` is the largest size of its pickle, bytes. Rewinds the file.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    # torch.load decides so too.
    zipped = file.read(4) == b"PK\3\4"
    file.seek(0)
    if zipped:
        pickled, members = read_members(file, size, max_pickle)
        storages = scan_pickle(io.BytesIO(pickled))
        sizes = {name: member.file_size for name, member in members.items()}
        if any(sizes.get(f"data/{key}") != nbytes for key, nbytes in storages.items()):
            raise TorchFileError("a storage has another size than its pickle states")
    else:
        front = io.BytesIO(file.read(max_pickle))
        storages = {}
        for _ in range(LEGACY_PICKLES):
            storages |= scan_pickle(front)
        if sum(storages.values()) > size:
            raise TorchFileError("the file is shorter than its pickle states")
    file.seek(0)


def read_members(
    file: BinaryIO, size: int, max_pickle: int
) -> tuple[bytes, dict[str, zipfile.ZipInfo]]:
    """Return the pickle of a zip file, and all members by their names below NAME/, in lower case.

    Raises TorchFileError for a zip that `torch.save` does not write.
    """
    try:
        archive = zipfile.ZipFile(file)
        listed = archive.infolist()
        # Other readers, such as PyTorch's, may find another directory or member in other files.
        if archive.comment or archive.start_dir != find_directory(file, size):
            raise TorchFileError("it has bytes before or after its zip")
        members = {member.filename.partition("/")[2].lower(): member for member in listed}
        if len(members) != len(listed):
            raise TorchFileError("it has two members of one name")
        # torch.save compresses nothing, and no bytes belong to two members.
        packed = any(m.compress_type or m.compress_size != m.file_size for m in listed)
        if packed or sum(m.file_size for m in listed) > size:
            raise TorchFileError("its members are compressed or overlap")
        pickled = members.get("data.pkl")
        if pickled and pickled.file_size > max_pickle:
            raise TorchFileError(f"its pickle has more than {max_pickle:,} bytes")
        return (read_member(file, pickled) if pickled else b""), members
    except ZIP_ERRORS as error:
        raise TorchFileError(f"it is not a complete zip file ({type(error).__name__})") from error


def read_member(file: BinaryIO, member: zipfile.ZipInfo) -> bytes:
    """Read an uncompressed member of a zip; TorchFileError if it does not match its CRC.

    `ZipFile.read` takes twice as long.
    """
    # A header of 30 bytes comes first, whose end are the lengths of a name and an extra field.
    try:
        file.seek(member.header_offset + 26)
        lengths = int.from_bytes(file.read(2), "little"), int.from_bytes(file.read(2), "little")
        file.seek(sum(lengths), io.SEEK_CUR)
        content = file.read(member.file_size)
    # A place beyond 2^63.
    except OverflowError as error:
        raise TorchFileError("its members lie beyond its end") from error
    if zlib.crc32(content) != member.CRC:
        raise TorchFileError("its checksum differs")
    return content


def find_directory(file: BinaryIO, size: int) -> int:
    """Return where the end of a zip file states that its directory is; -1 if nowhere."""
    file.seek(max(0, size - END.size - LOCATOR.size - RECORD))
    tail = file.read()
    end = len(tail) - END.size
    signature, _, start, comment = END.unpack(tail[end:])
    if signature != b"PK\5\6" or comment:
        return -1
    if end >= LOCATOR.size + RECORD and tail[RECORD:][:4] == b"PK\6\7":
        _, place = LOCATOR.unpack(tail[RECORD:end])
        (start,) = struct.unpack("<Q", tail[RECORD - 8 : RECORD])
        return start if place == size - len(tail) and tail[:4] == b"PK\6\6" else -1
    return start


def scan_pickle(stream: io.BytesIO) -> dict[str, int]:
    """Check the operations of the pickle at the stream's place; return its storages' bytes by key.

    Builds no object of the pickle. Raises TorchFileError.
    """
    # Each object's name, number or elements, and for a tuple the number of all elements.
    stack: list[tuple[object, int]] = []
    marks: list[int] = []
    memo, storages = {}, {}
    try:
        for operation, argument in read_operations(stream):
            name = operation.name
            if name == "MARK":
                marks.append(len(stack))
                continue
            if name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
                continue
            before = operation.stack_before
            marked = pickletools.markobject in before
            top = marks.pop() if marked else len(stack)
            first = top - (before.index(pickletools.markobject) if marked else len(before))
            if first < (marks[-1] if marks else 0):
                raise TorchFileError("its pickle is damaged")
            taken = stack[first:]
            del stack[first:]
            if name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif "TUPLE" in name:
                count = len(taken) + sum(count for _, count in taken)
                if count > MAX_TUPLE:
                    raise TorchFileError(f"its pickle has a tuple of more than {MAX_TUPLE:,}")
                stack.append((tuple(value for value, _ in taken), count))
            elif operation.stack_after:
                stack.append((argument, 0))
            if name == "BINPERSID":
                key, nbytes = read_storage(taken[0][0])
                storages[key] = nbytes
    # genops raises ValueError; the others are a stack or memo without the object.
    except (ValueError, LookupError) as error:
        raise TorchFileError("its pickle is damaged") from error
    return storages


def read_operations(stream: io.BytesIO) -> Iterator[tuple[pickletools.OpcodeInfo, object]]:
    """Yield the operations of a pickle and their arguments; TorchFileError for one not allowed."""
    known = frozenset(OPERATIONS.split())
    for number, (operation, argument, _) in enumerate(pickletools.genops(stream)):
        if number >= MAX_OPERATIONS:
            raise TorchFileError(f"its pickle has more than {MAX_OPERATIONS:,} operations")
        if operation.name not in known:
            raise TorchFileError(f"its pickle has the operation {operation.name}")
        if operation.name == "GLOBAL" and argument not in GLOBALS:
            raise TorchFileError(f"it names {ascii(argument)[1:-1].replace(' ', '.')[:80]}")
        large = isinstance(argument, int) and abs(argument) >= MAX_INTEGER
        if large and argument != torch.serialization.MAGIC_NUMBER:
            raise TorchFileError("its pickle has an integer of more than 63 bits")
        yield operation, argument


def read_storage(value: object) -> tuple[str, int]:
    """Return key and bytes of the storage that a persistent id names."""
    if not isinstance(value, tuple) or len(value) not in (5, 6) or value[0] != "storage":
        raise TorchFileError("its pickle is damaged")
    _, kind, key, _, count, *_ = value
    if not (isinstance(key, str) and isinstance(count, int) and count >= 0):
        raise TorchFileError("its pickle is damaged")
    if not isinstance(kind, str) or kind not in STORAGES:
        raise TorchFileError("it has a storage of another type")
    return key.lower(), count * STORAGES[kind]
