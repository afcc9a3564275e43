"""The samples of a tar in WebDataset's layout: the places of their images, and their labels.

An index of a tar in object storage costs as much as reading the tar, so it is kept on this machine,
under the tar's URL, size and version.
"""

import hashlib
import json
from collections import Counter
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from densefeed.storage.dataset_names import ENDINGS, check_label, find_system_entry
from densefeed.storage.shard_file import ShardFile, find_state, open_shard
from densefeed.storage.tar_files import Member, read_members
from densefeed.system.errors import UserError
from densefeed.system.files import (
    cache_folder,
    find_path_fault,
    make_folder,
    read_own,
    replace_file,
)
from densefeed.system.json_files import parse_json
from densefeed.system.object_url import ObjectURL

# Bytes of a label's `.cls` and `.json`.
MOST_CLS, MOST_JSON = 32, 2**20
# Bytes of a request while an object is indexed: at 20 ms each and 100 MB/s, waiting is a fifth.
REQUESTED = 2**23
# The form of a kept index. Change it with the rules of this file: others are then not used.
FORM = 3


class TarIndex(NamedTuple):
    """The N samples of a tar that have an image, in its order."""

    names: list[str]  # of the images in the tar
    labels: list[int | None]  # None where a sample has no file of one
    offsets: list[int]  # of the images, bytes
    sizes: list[int]  # bytes
    left_out: dict[str, int]  # what was left out, and how often
    system: list[str]  # hidden and system files and folders that were left out


class Sample:
    """The files of a sample."""

    __slots__ = ("cls", "image", "json", "label")

    def __init__(self) -> None:
        self.image: Member | None = None
        self.cls: Member | None = None
        self.json: Member | None = None
        self.label: int | UserError | None = None


def index_tar(path: Path | ObjectURL) -> tuple[ShardFile, TarIndex]:
    """Index a tar; one in object storage is read only if no index of this version is kept.

    UserError for a tar that is damaged, or samples that are invalid.
    """
    with open_shard(path) as file:
        shard = ShardFile(path, find_state(file))
        if isinstance(path, Path):
            return shard, read_index(file, path)
        kept = find_kept(shard)
        if (index := load_index(kept)) is None:
            index = read_index(file.buffered(REQUESTED), path)
            # Then the next command reads the tar again.
            with suppress(OSError, UserError):
                save_index(index, kept)
        return shard, index


# ------------------------------------------------------------------------- kept


def find_kept(shard: ShardFile) -> Path:
    """Return the file of the index of a tar in object storage."""
    key = "\n".join(map(str, (FORM, shard.path, *shard.state)))
    return cache_folder() / "tar-index" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def save_index(index: TarIndex, kept: Path) -> None:
    """Write an index, after its checksum."""
    content = json.dumps(index).encode()
    make_folder(kept.parent)
    with replace_file(kept) as part:
        part.write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)


def load_index(kept: Path) -> TarIndex | None:
    """Read an index; None if there is none, or it is damaged."""
    try:
        digest, _, content = read_own(kept).partition(b"\n")
    # Then it is written again, in place of whatever has its name.
    except (OSError, UserError):
        return None
    if hashlib.sha256(content).hexdigest().encode() != digest:
        return None
    return TarIndex(*json.loads(content))


# ------------------------------------------------------------------------- samples


def read_index(file: BufferedReader, path: Path | ObjectURL) -> TarIndex:
    """Find the samples of an open tar. UserError as `index_tar`."""
    samples, others, system = group_members(file, path)
    found = [sample for sample in samples if sample.image]
    left_out = Counter({"other files": others, "samples without an image": len(samples)})
    left_out["samples without an image"] -= len(found)
    for sample in found:
        if isinstance(sample.label, UserError):
            raise sample.label
    return TarIndex(
        [sample.image.name for sample in found],
        [sample.label for sample in found],
        [sample.image.offset for sample in found],
        [sample.image.size for sample in found],
        dict(+left_out),
        sorted(system),
    )


def group_members(
    file: BufferedReader, path: Path | ObjectURL
) -> tuple[list[Sample], int, set[str]]:
    """Return the samples of a tar, the number of files that belong to none, and system names.

    UserError for a name that no folder could have, and for two images or labels of a sample.
    """
    samples: dict[str, Sample] = {}
    others, system = 0, set()
    for member in read_members(file, path):
        if fault := find_path_fault(member.name):
            raise UserError(f"{path}: the name {member.name[:80]!r} {fault}; write the tar again")
        # Counted once for a whole folder, as on a disk.
        if entry := find_system_entry(member.name):
            system.add(entry)
            continue
        key, kind = split_name(member.name)
        if not kind:
            others += 1
            continue
        sample = samples.setdefault(key, Sample())
        if other := getattr(sample, kind):
            raise UserError(
                f"{path} holds {other.name} and {member.name}, two files of one sample (its key is "
                "the name up to the first dot); rename one of them"
            )
        setattr(sample, kind, member)
        # Read here, where the walk has just been: an object is then read once.
        if kind == "cls" or (kind == "json" and not sample.cls):
            try:
                sample.label = read_label(file, path, member, kind)
            # It counts only if the sample has an image.
            except UserError as error:
                sample.label = error
    return list(samples.values()), others, system


def split_name(name: str) -> tuple[str, str]:
    """Return the key of a member, and which file of a sample it is: image, cls, json or none."""
    folder, slash, file = name.rpartition("/")
    stem, _, extensions = file.partition(".")
    ending = "." + extensions.rpartition(".")[2].lower()
    kind = {".cls": "cls", ".json": "json"}.get(ending, "image" if ending in ENDINGS else "")
    return folder + slash + stem, kind


def read_label(
    file: BufferedReader, path: Path | ObjectURL, member: Member, kind: str
) -> int | None:
    """Return the label in a `.cls` or a `.json`, None if that has none. UserError if invalid."""
    where, most = f"{path}/{member.name}", MOST_CLS if kind == "cls" else MOST_JSON
    if member.size > most:
        raise UserError(
            f"{where} has {member.size:,} bytes, more than the {most:,} of a label; write the tar "
            "again"
        )
    file.seek(member.offset)
    content = file.read(member.size)
    if kind == "cls":
        digits = content.strip()
        return check_label(int(digits) if digits.isdigit() else digits.decode("latin-1"), where)
    try:
        values = parse_json(content)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}); write the tar again") from None
    if not isinstance(values, dict) or "label" not in values:
        return None
    return check_label(values["label"], where)
