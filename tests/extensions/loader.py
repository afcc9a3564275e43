"""A loader of your own: images in an uncompressed tar file, by class folder.

python loader.py lvvit_micro_ce --loader tar --data train.tar --val val.tar --out runs/tar
"""

import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from densefeed import native, register_loader, train
from densefeed.pipelines.loader import Encoded, Source
from densefeed.storage.images import decode


class TarSource(Source):
    """Images of a tar file, `class/name.jpg`."""

    remedy = "write this member of the archive again"

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")  # noqa: SIM115
        with tarfile.open(fileobj=self._file) as archive:
            members = sorted((m for m in archive if m.isfile()), key=lambda m: m.name)
        self._names = [member.name for member in members]
        self._places = [(member.offset_data, member.size) for member in members]
        classes = [Path(name).parent.name for name in self._names]
        self.class_names, self.fingerprint = sorted(set(classes)), f"{self._places}"
        self.labels = np.array([self.class_names.index(name) for name in classes])

    def where(self, index: int) -> str:
        return f"{self._file.name}, {self._names[index]}"

    def begin(self, ids: np.ndarray) -> Encoded:
        samples = np.zeros(len(ids), native.SAMPLE)
        samples["file"], samples["kind"] = self._file.fileno(), native.JPEG
        for row, index in enumerate(ids.tolist()):
            samples["offset"][row], samples["length"][row] = self._places[index]
            samples["height"][row], samples["width"][row] = native.probe(self._read(index))
        return Encoded(samples)

    def _read(self, index: int) -> bytes:
        self._file.seek(self._places[index][0])
        return self._file.read(self._places[index][1])

    def image(self, index: int) -> Image.Image:
        return decode(self._read(index), self.where(index))

    def close(self) -> None:
        self._file.close()


register_loader("tar", lambda path, mode, maps, threads: TarSource(path))

if __name__ == "__main__":
    train.command()
