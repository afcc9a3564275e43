"""Label every cell of every image once with a teacher: images in, dense score maps (HDF5) out.

    python tools/relabel_imagenet.py --data imagenet/train --teacher dm_nfnet_f6.dm_in1k --input-size 576 --top-k 5 --out maps.h5

Run the same command again to continue a killed run. On several devices, and machines:

    torchrun --nproc-per-node 8 tools/relabel_imagenet.py ...
    python tools/relabel_imagenet.py ... --shard 0/64        one of 64 jobs, in any order; the last one to finish merges

Each rank or job writes a file of its own beside OUT, and continues it; a pass may go on with
another number of them. --dry-run labels a few batches, writes nothing, and says what all of it will
cost. At the end a pass prints the teacher's accuracy as read back from the stored maps: if that is
not near the teacher's own, do not train on them.

The teacher is any timm model, a checkpoint, or a module of your own: --teacher
package.module:factory, which is called without arguments and makes a torch.nn.Module that has
forward_token_logits (images [N, 3, H, W] to logits [N, K, h, w]) or timm's forward_features and
forward_head; what it says of mean, std, interpolation, num_classes and class_names is heard.
--teacher a --teacher b averages several.

--form compact takes 2.7 kB an image at 18 x 18 cells, where raw takes 7.1; until it is made, at the
end, OUT.part is raw.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from tyro.conf import UseAppendAction

from densefeed.relabel.estimates import try_out
from densefeed.relabel.labeling import begin_pass, label_images, stored_accuracy
from densefeed.relabel.rendering import NativeRender
from densefeed.relabel.scoring import Precision
from densefeed.storage.geometry import Geometry
from densefeed.storage.images import Images
from densefeed.storage.maintenance import summary
from densefeed.storage.row_codecs import Form
from densefeed.storage.score_maps import Absent
from densefeed.storage.shards import Shard
from densefeed.system.devices import choose_device
from densefeed.system.errors import UserError, run
from densefeed.tools.load_teacher import load_teacher


@dataclass(frozen=True, kw_only=True)
class Labeling:
    """What to label, with which teacher."""

    data: Path  # folder of class folders, or what --dataset asks for
    out: Path  # the score maps to write, HDF5
    # a timm model, a checkpoint, a run folder or package.module:factory; again for more
    teacher: UseAppendAction[tuple[str, ...]]
    # timm's name of the model, for a checkpoint that does not say; once, or for each teacher
    model: tuple[str, ...] = ()
    # side of the teacher's input, pixels; once, or for each teacher
    input_size: tuple[int, ...] = (576,)
    # JSON or CSV: which class of the data each of a teacher's becomes; - for none
    class_map: tuple[str, ...] = ()
    top_k: int = 5  # classes kept per cell
    # how an image is fitted: squashed, its center square (as published), padded, or in tiles
    geometry: Geometry = "squash"
    tiles: int = 1  # along each side, with --geometry tile
    views: int = 1  # looks to average: 2 is the image and its mirror, more are moved by a cell
    # the classes not kept: true remainder spread evenly, or logit 0 (as published)
    absent: Absent = "tail"
    # of the rows on disk: as they are, packed without loss, or compact, of which the error is
    # printed
    form: Form = "raw"
    # a name as tools/pack_dataset.py --help lists them, if not a folder of class folders
    dataset: str = ""
    split: str = "train"  # of the dataset
    # images per forward pass; auto: the largest power of two that fits, 32 on a CPU
    batch: int | Literal["auto"] = "auto"
    # decoding threads
    threads: int = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    device: str = "auto"  # auto: cuda if there is one, else cpu
    precision: Precision = "auto"  # auto: bf16 on GPUs that have it, else fp32
    compile: bool = False  # the teacher, by torch.compile
    decoder: Literal["native", "pillow"] = "native"  # native leaves to pillow what it does not read
    shard: str = ""  # 0/8: only the first eighth of the images, as a job of its own
    dry_run: bool = False  # label a few batches, write nothing, and print what the whole will take


def ranks_of_torchrun(labeling: Labeling) -> tuple[Shard, torch.device]:
    """This process's part of the images, by --shard or as torchrun numbers it, and its device."""
    rank, size, local = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    device = choose_device(labeling.device)
    if size == 1:
        return Shard.parse(labeling.shard) if labeling.shard else Shard(0, 1), device
    if labeling.shard or labeling.dry_run:
        raise UserError(
            "torchrun gives each rank its own shard; run --shard and --dry-run without it"
        )
    if device.type == "cuda":
        if device.index is not None:
            raise UserError(
                f"--device {device} is one device; under torchrun give --device cuda, and each rank takes its own"
            )
        if local >= torch.cuda.device_count():
            raise UserError(
                f"torchrun began {local + 1} or more ranks on a machine of {torch.cuda.device_count()} CUDA devices; "
                "give --nproc-per-node as many as there are"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    return Shard(rank, size), device


def main(labeling: Labeling) -> None:
    """Label, then judge what was stored."""
    shard, device = ranks_of_torchrun(labeling)
    images = Images(labeling.data, labeling.dataset, labeling.split)
    teacher, name = load_teacher(
        labeling.teacher,
        labeling.model,
        labeling.input_size,
        labeling.class_map,
        images.class_names,
        labeling.geometry,
        labeling.views,
        labeling.tiles,
    )
    teacher = teacher.to(device)
    if shard.index == 0:
        for network in teacher.networks:
            if network.caveat:
                print(f"note: {network.caveat}")
    options = dict(
        top_k=labeling.top_k,
        batch=labeling.batch,
        threads=labeling.threads,
        absent=labeling.absent,
        form=labeling.form,
        precision=labeling.precision,
        compiled=labeling.compile,
        render=NativeRender(images, teacher) if labeling.decoder == "native" else None,
    )
    if labeling.dry_run:
        for line in try_out(begin_pass(images, teacher, name, **options)).lines():
            print(line)
        return
    ranks = shard.of > 1 and not labeling.shard
    store = label_images(images, teacher, name, labeling.out, shard=shard, ranks=ranks, **options)
    if store is not None:
        print(summary(store))
        print(
            f"accuracy of the stored maps against the image labels: {100 * stored_accuracy(store):.1f} %"
        )
    elif not ranks:
        print(
            f"{shard.file(labeling.out)} is finished; the job that finishes the last of {shard.of} shards merges them"
        )


if __name__ == "__main__":
    run(lambda: main(tyro.cli(Labeling, description=__doc__)))
