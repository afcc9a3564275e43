"""The checkpoints of a run: whole or not there, each with its hash, the last few and the best kept.

    OUT/checkpoints/step-00001000.pt ...   plain dictionaries that torch.load(weights_only=True) reads
    OUT/checkpoints/manifest.json          their steps, sizes, SHA-256 and accuracies, oldest first
    OUT/last.pt, OUT/best.pt               links to the newest and to the most accurate

A checkpoint is written under another name, synced, renamed, and only then named in the manifest; old ones are deleted
after that. So whenever a process dies, the manifest names files that are whole.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch

from ..models import checkpoints
from ..relabel.files import UserError, replacing


class Checkpoints:
    """The checkpoints of the run folder `out`, of which the newest `keep` stay, and the best."""

    def __init__(self, out: Path, keep: int) -> None:
        self.out, self.folder, self.keep = out, out / "checkpoints", keep
        self.manifest = self.folder / "manifest.json"

    def exist(self) -> bool:
        """Whether the folder holds a run."""
        return (self.out / "last.pt").is_symlink() or (self.out / "last.pt").exists() or any(self._files())

    def save(self, state: dict, step: int, top1: float | None = None) -> None:
        """Write `state`, the run after `step` steps; `top1` is what an evaluation there gave."""
        path = self.folder / f"step-{step:08d}.pt"
        # Through a Python file: a full disk is an OSError there, and only a failed assertion in torch's own writer.
        with replacing(path) as part:
            with open(part, "wb") as file:
                torch.save(state, file)
            entry = {"file": path.name, "step": step, "bytes": part.stat().st_size, "sha256": sha256(part), "top1": top1}
        # Steps from here on are of a run that was continued from an earlier one, and is done again.
        entries = [old for old in self._entries() if old["step"] < step] + [entry]
        best = max((e for e in entries if e["top1"] is not None), key=lambda e: e["top1"], default=None)
        kept = [e for e in entries if e in entries[-self.keep :] or e is best]
        with replacing(self.manifest) as part:
            part.write_text(json.dumps(kept, indent=1) + "\n")
        self._link("last.pt", path)
        if best is not None:
            self._link("best.pt", self.folder / best["file"])
        names = {e["file"] for e in kept} | {self.manifest.name}
        for other in self.folder.iterdir():  # also what a killed process left: it is named in no manifest
            if other.name not in names:
                other.unlink()

    def newest(self) -> str | None:
        """The file name of the newest checkpoint that is whole; None if there is none at all.

        A damaged one is told on stderr and passed over. UserError if all are.
        """
        entries = self._entries() or [{"file": path.name} for path in sorted(self._files())]
        for entry in reversed(entries):
            path = self.folder / entry["file"]
            try:
                if "sha256" not in entry:
                    checkpoints.load(path)
                elif sha256(path) != entry["sha256"]:
                    raise checkpoints.CheckpointError(f"{path} is not what was saved: its SHA-256 differs")
                return entry["file"]
            except (checkpoints.CheckpointError, OSError) as error:
                print(f"warning: {error}; going back to the checkpoint before it", file=sys.stderr, flush=True)
        if entries:
            raise UserError(f"no checkpoint in {self.folder} can be read; copy them again, or choose another --out")
        return None

    def _files(self) -> list[Path]:
        return list(self.folder.glob("step-*.pt"))

    def _entries(self) -> list[dict]:
        try:
            entries = json.loads(self.manifest.read_text())
            return [e for e in entries if {"file", "step", "sha256", "top1"} <= set(e)]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError) as error:
            print(f"warning: {self.manifest} cannot be read ({error}); trying the files beside it", file=sys.stderr, flush=True)
            return []

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
