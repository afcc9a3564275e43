"""Label every cell of every image once with a teacher: images in, dense score maps (HDF5) out.

    python tools/relabel_imagenet.py --data imagenet/train --teacher dm_nfnet_f6.dm_in1k --input-size 576 --top-k 5 --out maps.h5

Run the same command again to continue a killed run. At the end it prints the teacher's accuracy as read back from the
stored maps: if that is not near the teacher's own, do not train on them.

The teacher is any timm model, a checkpoint, or a module of your own: --teacher package.module:factory, which is called without
arguments and makes a torch.nn.Module that has forward_token_logits (images [N, 3, H, W] to logits [N, K, h, w]) or timm's
forward_features and forward_head; what it says of mean, std, interpolation, num_classes and class_names is heard.
--teacher a --teacher b averages several.

--form compact takes 2.7 kB an image at 18 x 18 cells, where raw takes 7.1; until it is made, at the end, OUT.part is raw.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import tyro
from densefeed.relabel.files import run
from densefeed.relabel.forms import Form
from densefeed.relabel.geometry import Geometry
from densefeed.relabel.images import Images
from densefeed.relabel.labelling import label_images, stored_accuracy
from densefeed.relabel.store import Absent
from densefeed.relabel.teacher import choose_device
from densefeed.relabel.upkeep import summary
from densefeed.tools.teachers import load_teacher
from tyro.conf import UseAppendAction


@dataclass(frozen=True, kw_only=True)
class Labelling:
    """What to label, with which teacher."""

    data: Path  # folder of class folders, or what --dataset asks for
    out: Path  # the score maps to write, HDF5
    teacher: UseAppendAction[tuple[str, ...]]  # a timm model, a checkpoint, a run folder or package.module:factory; again for more
    model: tuple[str, ...] = ()  # timm's name of the model, for a checkpoint that does not say; once, or for each teacher
    input_size: tuple[int, ...] = (576,)  # side of the teacher's input, pixels; once, or for each teacher
    class_map: tuple[str, ...] = ()  # JSON or CSV: which class of the data each of a teacher's becomes; - for none
    top_k: int = 5  # classes kept per cell
    geometry: Geometry = "squash"  # how an image is fitted: squashed, its centre square (as published), padded, or in tiles
    tiles: int = 1  # along each side, with --geometry tile
    views: int = 1  # looks to average: 2 is the image and its mirror, more are moved by a cell
    absent: Absent = "tail"  # the classes not kept: true remainder spread evenly, or logit 0 (as published)
    form: Form = "raw"  # of the rows on disk: as they are, packed without loss, or compact, of which the error is printed
    dataset: str = ""  # timm's dataset name, if not a folder of class folders
    split: str = "train"  # of the dataset
    batch: int = 32  # images per forward pass
    threads: int = os.cpu_count() or 1  # decoding threads
    device: str = "auto"  # auto: cuda if there is one, else cpu


def main(labelling: Labelling) -> None:
    """Label, then judge what was stored."""
    images = Images(labelling.data, labelling.dataset, labelling.split)
    device = choose_device(labelling.device)
    teacher, name = load_teacher(
        labelling.teacher, labelling.model, labelling.input_size, labelling.class_map, images.class_names, labelling.geometry,
        labelling.views, labelling.tiles,
    )  # fmt: skip
    for network in teacher.networks:
        if network.caveat:
            print(f"note: {network.caveat}")
    store = label_images(
        images, teacher.to(device), name, labelling.out, labelling.top_k, labelling.batch, labelling.threads, labelling.absent,
        labelling.form,
    )  # fmt: skip
    print(summary(store))
    print(f"accuracy of the stored maps against the image labels: {100 * stored_accuracy(store):.1f} %")


if __name__ == "__main__":
    run(lambda: main(tyro.cli(Labelling, description=__doc__)))
