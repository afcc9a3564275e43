"""Checkpoints of a run: written atomically, each with its hash; the last few and the best are kept.

    OUT/checkpoints/step-00001000.pt ...   dictionaries that torch.load(weights_only=True) reads
    OUT/checkpoints/manifest.json          their steps, SHA-256 and accuracies, oldest first
    OUT/last.pt, OUT/best.pt               links to the newest and to the most accurate

A checkpoint is written under a temporary name, synced and renamed, and only then listed in the
manifest. Old ones are deleted after that. So the manifest lists complete files only, whenever a
process is killed.
"""

import os
import re
from pathlib import Path

import torch

from densefeed.models import checkpoints
from densefeed.system.errors import UserError
from densefeed.system.files import hash_file, replace_file, replace_link
from densefeed.system.json_files import read_json
from densefeed.system.provenance import write_json
from densefeed.system.terminal import warn

# Names of the files that a run writes. Other names, such as step-notes.pt, belong to the user.
FILE = re.compile(r"step-\d{8,}\.pt")
# What the manifest says of each, beside the metric that rates it.
ENTRY = {"file", "step", "sha256"}
# Their temporary names, which killed processes leave.
PART = re.compile(r"(step-\d{8,}\.pt|manifest\.json)\.\d+\.part")


class Checkpoints:
    """The checkpoints of the run folder `out`, which keeps the newest `keep` and the best.

    The best is that with the highest metric `rated`.
    """

    def __init__(self, out: Path, keep: int, rated: str = "top1") -> None:
        self.out, self.folder, self.keep, self.rated_by = out, out / "checkpoints", keep, rated
        self.manifest = self.folder / checkpoints.MANIFEST
        # File names that `newest` skipped. `save` drops them, so that a damaged file never counts
        # as one of those to keep.
        self._damaged = set()

    def exist(self) -> bool:
        """Return whether the folder holds a run."""
        # lexists: a link to a file that was deleted is a run too.
        return os.path.lexists(self.out / "last.pt") or any(self._files())

    def save(self, state: dict, step: int) -> None:
        """Write `state`, the state of the run after `step` steps."""
        path = self.folder / f"step-{step:08d}.pt"
        # Entries from this step on exist if the run was resumed from an earlier checkpoint. Their
        # steps are repeated, so they are dropped.
        older = [e for e in self._entries() if e["step"] < step and e["file"] not in self._damaged]
        # Every later checkpoint holds the accuracies too, in case the manifest is lost.
        state = state | {"accuracies": {e["file"]: e[self.rated_by] for e in older}}
        # On a full disk a Python file raises OSError, where torch's own writer only fails an
        # assertion.
        with replace_file(path) as part:
            with open(part, "wb") as file:
                torch.save(state, file)
            entry = {"file": path.name, "step": step, "sha256": hash_file(part)}
            entry[self.rated_by] = None
        self._update([*older, entry])

    def rate(self, step: int, value: float) -> None:
        """Store the metric of the checkpoint of `step` in the manifest.

        The file does not change, so its hash is valid at any time.
        """
        rated = {self.rated_by: value}
        self._update([e | rated if e["step"] == step else e for e in self._entries()])

    def rated(self, step: int) -> bool:
        """Return whether the metric after `step` is stored."""
        entries, rated = self._entries(), self.rated_by
        return any(entry["step"] == step and entry[rated] is not None for entry in entries)

    def _update(self, entries: list[dict]) -> None:
        """Write the manifest, set the links, delete old files."""
        evaluated = [e for e in entries if e[self.rated_by] is not None]
        best = max(evaluated, key=lambda e: e[self.rated_by], default=None)
        kept = [e for e in entries if e in entries[-self.keep :] or e is best]
        write_json(self.manifest, kept)
        # Before old files are deleted, so that a link never leads nowhere.
        self._link("last.pt", self.folder / kept[-1]["file"])
        if best is not None:
            self._link("best.pt", self.folder / best["file"])
        else:
            # Left from steps that are repeated.
            (self.out / "best.pt").unlink(missing_ok=True)
        names = {e["file"] for e in kept}
        # This includes files of a killed process, which no manifest lists.
        for other in [*self._files(), *self._files(PART)]:
            if other.name not in names:
                other.unlink()

    def newest(self) -> str | None:
        """Return the file name of the newest undamaged checkpoint, None if there are none at all.

        Skips damaged ones with a warning on stderr. Raises UserError if all are damaged.
        """
        entries = self._entries()
        for entry in reversed(entries):
            path = self.folder / entry["file"]
            try:
                if hash_file(path) == entry["sha256"]:
                    return path.name
                self._skip(path.name, f"{path} is damaged: its SHA-256 differs")
            except OSError as error:
                self._skip(path.name, error)
        if entries or any(self._files()):
            raise UserError(
                f"no checkpoint in {self.folder} can be read; copy them again, or choose another "
                "--out"
            )
        return None

    def _skip(self, name: str, why: object) -> None:
        warn(f"{why}; using the checkpoint before it")
        self._damaged.add(name)

    def _files(self, names: re.Pattern = FILE) -> list[Path]:
        """List the checkpoint files, oldest first, or those with other `names`."""
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        ours = (path for path in paths if names.fullmatch(path.name))
        return sorted(path for path in ours if path.is_file())

    def _entries(self) -> list[dict]:
        """Read the entries of the manifest, or make them from the files if it cannot be read."""
        why = f"{self.manifest} does not exist"
        try:
            entries = read_json(self.manifest, "using the checkpoint files in its folder", list)
            wanted = ENTRY | {self.rated_by}
            if entries and all(isinstance(e, dict) and e.keys() >= wanted for e in entries):
                return entries
            why = f"{self.manifest} is not a manifest of checkpoints"
        except FileNotFoundError:
            if not self._files():
                return []
        except UserError as error:
            why = str(error)
        warn(why)
        entries, accuracies = [], {}
        for path in self._files():
            try:
                accuracies |= checkpoints.load(path).get("accuracies", {})
                step = int(path.stem.removeprefix("step-"))
                entries.append({"file": path.name, "step": step, "sha256": hash_file(path)})
            except (checkpoints.CheckpointError, OSError) as error:
                self._skip(path.name, error)
        return [entry | {self.rated_by: accuracies.get(entry["file"])} for entry in entries]

    def _link(self, name: str, path: Path) -> None:
        """Link OUT/name to `path`, atomically."""
        # Left by killed processes: only one process at a time trains in a folder.
        for left in self.out.glob(f"{name}.*.part"):
            if re.fullmatch(r"\d+", left.name[len(name) + 1 : -len(".part")]):
                left.unlink()
        # Relative, so that a run folder can be moved.
        replace_link(self.out / name, path.relative_to(self.out))
