"""The checkpoints of a run: whole or not there, each with its hash, the last few and the best kept.

    OUT/checkpoints/step-00001000.pt ...   plain dictionaries that torch.load(weights_only=True) reads
    OUT/checkpoints/manifest.json          their steps, SHA-256 and accuracies, oldest first
    OUT/last.pt, OUT/best.pt               links to the newest and to the most accurate

A checkpoint is written under another name, synced, renamed, and only then named in the manifest;
old ones are deleted after that. So whenever a process dies, the manifest names files that are
whole.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch

from densefeed.models import checkpoints
from densefeed.system.errors import UserError
from densefeed.system.files import replace_file


class Checkpoints:
    """The checkpoints of the run folder `out`, of which the newest `keep` stay, and the best."""

    def __init__(self, out: Path, keep: int) -> None:
        self.out, self.folder, self.keep = out, out / "checkpoints", keep
        self.manifest = self.folder / "manifest.json"
        self._damaged: set[str] = set()  # names that `newest` passed over

    def exist(self) -> bool:
        """Whether the folder holds a run."""
        return (
            (self.out / "last.pt").is_symlink()
            or (self.out / "last.pt").exists()
            or any(self._files())
        )

    def save(self, state: dict, step: int) -> None:
        """Write `state`, the run after `step` steps."""
        path = self.folder / f"step-{step:08d}.pt"
        # Steps from here on are of a run that was continued from an earlier one, and is done again.
        older = [
            old
            for old in self._entries()
            if old["step"] < step and old["file"] not in self._damaged
        ]
        # Accuracies stand in every later checkpoint too, should the manifest be lost.
        state = state | {"accuracies": {old["file"]: old["top1"] for old in older}}
        # Through a Python file: a full disk is an OSError there, and only a failed assertion in
        # torch's own writer.
        with replace_file(path) as part:
            with open(part, "wb") as file:
                torch.save(state, file)
            entry = {"file": path.name, "step": step, "sha256": sha256(part), "top1": None}
        self._settle([*older, entry])

    def rate(self, step: int, top1: float) -> None:
        """Note the accuracy of the checkpoint of `step`; the file stays as it is, so that its hash
        holds at every moment.
        """
        self._settle(
            [
                entry | {"top1": top1} if entry["step"] == step else entry
                for entry in self._entries()
            ]
        )

    def rated(self, step: int) -> bool:
        """Whether the accuracy after `step` is noted."""
        return any(entry["step"] == step and entry["top1"] is not None for entry in self._entries())

    def _settle(self, entries: list[dict]) -> None:
        """Write the manifest, let the links lead where they should, delete what need not stay."""
        best = max(
            (e for e in entries if e["top1"] is not None), key=lambda e: e["top1"], default=None
        )
        kept = [e for e in entries if e in entries[-self.keep :] or e is best]
        with replace_file(self.manifest) as part:
            part.write_text(json.dumps(kept, indent=1) + "\n")
        self._link("last.pt", self.folder / kept[-1]["file"])
        if best is not None:
            self._link("best.pt", self.folder / best["file"])
        else:
            (self.out / "best.pt").unlink(missing_ok=True)  # of a run that is done again
        names = {e["file"] for e in kept}
        # Also what a killed process left: it is named in no manifest. Files of other names are not
        # ours.
        for other in [*self._files(), *self.folder.glob("*.part")]:
            if other.name not in names:
                other.unlink()

    def newest(self) -> str | None:
        """The file name of the newest checkpoint that is whole; None if there is none at all.

        A damaged one is told on stderr and passed over. UserError if all are.
        """
        entries = self._entries()
        for entry in reversed(entries):
            path = self.folder / entry["file"]
            try:
                if sha256(path) != entry["sha256"]:
                    raise checkpoints.CheckpointError(
                        f"{path} is not what was saved: its SHA-256 differs"
                    )
                return entry["file"]
            except (checkpoints.CheckpointError, OSError) as error:
                self._pass_over(entry["file"], error)
        if entries or any(self._files()):
            raise UserError(
                f"no checkpoint in {self.folder} can be read; copy them again, or choose another --out"
            )
        return None

    def _pass_over(self, name: str, error: Exception) -> None:
        print(
            f"warning: {error}; going back to the checkpoint before it", file=sys.stderr, flush=True
        )
        self._damaged.add(name)

    def _files(self) -> list[Path]:
        """Of checkpoints, oldest first."""
        return sorted(self.folder.glob("step-*.pt"))

    def _entries(self) -> list[dict]:
        """What the manifest says, or the files themselves where it says nothing."""
        try:
            entries = json.loads(self.manifest.read_text())
            if entries and all(
                e["file"] == f"step-{e['step']:08d}.pt" and e["sha256"] and (e["top1"] or 0) >= 0
                for e in entries
            ):
                return entries
            raise ValueError("its entries are not ours")
        except FileNotFoundError:
            if not self._files():
                return []
            why = "is not there"
        except (ValueError, TypeError, KeyError) as error:
            why = f"cannot be read ({error})"
        print(
            f"warning: {self.manifest} {why}; trying the files beside it",
            file=sys.stderr,
            flush=True,
        )
        return self._found()

    def _found(self) -> list[dict]:
        """Entries of the files that load."""
        entries, accuracies = [], {}
        for path in self._files():
            try:
                accuracies |= checkpoints.load(path).get("accuracies", {})
                entries.append(
                    {
                        "file": path.name,
                        "step": int(path.stem.removeprefix("step-")),
                        "sha256": sha256(path),
                    }
                )
            except (checkpoints.CheckpointError, ValueError, OSError) as error:
                self._pass_over(path.name, error)
        return [entry | {"top1": accuracies.get(entry["file"])} for entry in entries]

    def _link(self, name: str, path: Path) -> None:
        """Let OUT/name lead to `path`, in one step."""
        part = self.out / f"{name}.{os.getpid()}.part"
        part.unlink(missing_ok=True)
        part.symlink_to(path.relative_to(self.out))
        os.replace(part, self.out / name)


def sha256(path: Path) -> str:
    """Of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
