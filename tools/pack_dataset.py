"""Pack images, and their score maps, into one FFCV dataset (.beton) that stock ffcv 1.0.2 opens too.

    python tools/pack_dataset.py --data imagenet/train --maps maps.h5 --out train.beton
    python tools/pack_dataset.py --data imagenet/val --split val --out val.beton

JPEGs keep their bytes. What a JPEG decoder does not give as RGB (PNG, CMYK, ...) is encoded anew as JPEG, and counted. Files
that cannot be decoded are listed at the end and nothing is written.
"""

import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from densefeed.pipelines.beton import PAGE, Sample, write_beton
from densefeed.pipelines.ffcv import map_arrays, map_fields
from densefeed.pipelines.folder import spec_of
from densefeed.relabel.files import UserError, run
from densefeed.relabel.images import Images, decode
from densefeed.relabel.prefetch import ordered_map
from densefeed.relabel.progress import bar
from densefeed.relabel.store import ScoreMapStore
from PIL import Image

QUALITY = 95  # of what must be encoded anew
NAMED = 10  # unreadable files named in the message


@dataclass(frozen=True, kw_only=True)
class Packing:
    """What to pack."""

    data: Path  # folder of class folders, or what --dataset asks for
    out: Path  # the .beton to write
    maps: Path | None = None  # score maps (HDF5) made for this data
    dataset: str = ""  # timm's dataset name, if not a folder of class folders
    split: str = "train"  # of the dataset
    threads: int = os.cpu_count() or 1  # threads that read and check images


def main(packing: Packing) -> None:
    """Pack; a second pass over unreadable files is never needed: all are named at once."""
    if packing.threads < 1:
        raise UserError("--threads must be at least 1")
    if packing.out.exists():
        raise UserError(f"{packing.out} exists already; remove it or choose another --out")
    images = Images(packing.data, packing.dataset, packing.split)
    notes = {"densefeed": 1, "class_names": images.class_names, "fingerprint": images.fingerprint()}
    store, fields = None, []
    if packing.maps is not None:
        store = ScoreMapStore(packing.maps)
        store.check(notes["fingerprint"], packing.data)
        spec = spec_of(store, len(images.class_names))
        notes |= {"teacher": store.header.teacher, "absent": spec.absent, "max_palette": spec.max_palette}
        notes |= {"min_window_side": spec.min_window_side}
        fields = map_fields(spec.side, spec.top_k)
    unreadable, encoded_anew = [], []

    def prepare(index: int) -> Sample | None:
        try:
            jpeg, image, anew = as_jpeg(images.read(index), images.where(index))
        except UserError as error:
            unreadable.append(str(error))
            return None
        if len(jpeg) > PAGE // 2:
            unreadable.append(
                f"{images.where(index)} is a JPEG of {len(jpeg):,} bytes, and a page holds {PAGE:,} (make it smaller)"
            )
            return None
        if anew:
            encoded_anew.append(images.where(index))
        arrays = map_arrays(store.rows(np.array([index])), 0) if store else ()
        return Sample(jpeg, image.height, image.width, int(images.labels[index]), arrays)

    def samples() -> Iterator[Sample]:
        with ThreadPoolExecutor(packing.threads) as pool:
            for sample in bar(ordered_map(prepare, range(len(images)), pool, 16 * packing.threads), "pack", len(images)):
                if sample is not None and not unreadable:
                    yield sample
        if unreadable:
            more = f" (and {len(unreadable) - NAMED} more)" if len(unreadable) > NAMED else ""
            raise UserError(f"{len(unreadable)} images cannot be packed: {'; '.join(unreadable[:NAMED])}{more}")

    write_beton(packing.out, len(images), samples(), fields, notes)
    size = packing.out.stat().st_size
    print(f"{packing.out}: {len(images):,} images{' with score maps' if store else ''}, {size / 2**20:,.1f} MiB")
    if encoded_anew:
        print(f"encoded anew as JPEG at quality {QUALITY}: {len(encoded_anew)} images, the first is {encoded_anew[0]}")


def as_jpeg(encoded: bytes, where: str) -> tuple[bytes, Image.Image, bool]:
    """Bytes that a JPEG decoder gives as RGB, the decoded image, and whether they were encoded anew. UserError if undecodable."""
    image = decode(encoded, where)
    with Image.open(io.BytesIO(encoded)) as opened:
        if opened.format == "JPEG" and opened.mode in ("RGB", "L"):
            return encoded, image, False
    buffer = io.BytesIO()
    try:
        image.save(buffer, "JPEG", quality=QUALITY, subsampling=0)
    except (OSError, ValueError) as error:
        raise UserError(f"{where} cannot be encoded as JPEG ({error}); make it smaller than 65,500 pixels a side") from error
    return buffer.getvalue(), image, True


if __name__ == "__main__":
    run(lambda: main(tyro.cli(Packing, description=__doc__)))
