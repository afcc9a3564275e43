"""Label every cell of every image with a teacher: images in, dense score maps (HDF5) out.

    python tools/relabel_imagenet.py --data imagenet --teacher dm_nfnet_f6.dm_in1k \\
        --input-size 576 --top-k 5 --out maps.h5

Run the same command again to resume a killed run. On several devices or machines:

    torchrun --nproc-per-node 8 tools/relabel_imagenet.py ...
    python tools/relabel_imagenet.py ... --shard 0/64

The second line is one of 64 jobs, which may run in any order; the last one to finish merges. Each
rank or job writes and resumes a file of its own beside OUT; a pass may be resumed with another
number of them. --dry-run labels a few batches, writes nothing, and prints the estimated cost of the
whole pass. At its end a pass prints the teacher's accuracy computed from the stored maps. If that
is not close to the teacher's own accuracy, do not train on the maps.

Any number of workers, on machines that share a folder, join and leave at any time:

    python tools/relabel_imagenet.py ... --out maps --workers-join
    python tools/score_maps.py status maps

OUT is then a folder of shards with a manifest, which every command takes like a file, and nothing
is merged. A worker takes the shard of one that was killed after a minute, and keeps its rows. When
images were removed, added or repaired, only their shards are labeled again.

OUT may be s3://BUCKET/FOLDER (or gs://, az://), with credentials in the environment. For training
such a store is copied:

    python tools/score_maps.py fetch s3://BUCKET/FOLDER maps

--engine local starts a worker on every GPU of this machine, --engine ray on a Ray cluster.

The teacher is any timm model, a checkpoint, or a module of your own: --teacher
package.module:factory, a function that is called without arguments and returns a torch.nn.Module.
The module needs forward_token_logits (images [N, 3, H, W] to logits [N, K, h, w]), or
forward_features and forward_head as in timm; its attributes mean, std, interpolation, num_classes
and class_names are used. --teacher a --teacher b averages several.

--form compact takes 2.7 kB an image at 18 x 18 cells, raw 7.1 kB. The compact file is made at the
end, from the raw rows in OUT.part.
"""

import os
import signal
import sys
from dataclasses import dataclass
from typing import Literal

import torch
from tyro.conf import UseAppendAction

from densefeed.native import MAX_PIXELS
from densefeed.relabel.audit import measure_accuracy
from densefeed.relabel.estimates import estimate_pass
from densefeed.relabel.folder_workers import join_folders
from densefeed.relabel.labeling import begin_pass, finish_pass
from densefeed.relabel.rendering import NativeRender
from densefeed.relabel.scoring import Compile, Precision, choose_compile
from densefeed.relabel.workers import join_workers
from densefeed.storage.class_folders import ClassFolders
from densefeed.storage.geometry import Geometry
from densefeed.storage.images import Images, MaxPixels, limit_pixels
from densefeed.storage.maintenance import summary
from densefeed.storage.row_codecs import Absent, Form
from densefeed.storage.shard_plan import SHARD_IMAGES
from densefeed.storage.shards import Shard
from densefeed.system.devices import THREADS, choose_rank_device
from densefeed.system.errors import UserError, make_command, name_commands
from densefeed.system.object_store import ObjectURL
from densefeed.system.options import Count, Location, Options
from densefeed.system.terminal import print
from densefeed.tools.label_engines import Engine, run_engine
from densefeed.tools.load_teacher import load_teacher


@dataclass(frozen=True, kw_only=True)
class Labeling(Options):
    """Images to label, and the teacher."""

    # images: the folder that holds train/ and val/, a folder of class folders, or of tar or Parquet
    # files, all also as s3://BUCKET/FOLDER; the root of --dataset
    data: Location
    # score maps to write, HDF5; with --workers-join or --engine a folder or s3://BUCKET/FOLDER
    out: Location
    # timm model, checkpoint, run folder or package.module:factory; repeat it for an ensemble
    teacher: UseAppendAction[tuple[str, ...]]
    # timm's name of the model, for a checkpoint that does not contain it; once, or for each teacher
    model: tuple[str, ...] = ()
    # side of the teacher's input, pixels; once, or for each teacher
    input_size: tuple[int, ...] = (576,)
    # JSON or CSV file from the teacher's classes to those of the data; - for none
    class_map: tuple[str, ...] = ()
    top_k: Count = 5  # classes kept per cell; all of them if the teacher has fewer
    # part of an image that is shown: squashed, its center square (as published), padded, or tiles
    geometry: Geometry = "squash"
    tiles: int = 1  # tiles along each side, with --geometry tile
    # test-time views to average: 2 are the image and its mirror, more are shifted by a cell
    tta_views: int = 1
    # classes that are not kept: the remaining probability spread evenly, or logit 0 (as published)
    absent: Absent = "tail"
    # rows on disk: raw, packed losslessly, or compact, whose error is printed
    form: Form = "raw"
    # name of the dataset, from the list in the --help of packing, if the data is not a folder of
    # class folders
    dataset: str = ""
    split: str = "train"  # split of the dataset
    # images per forward pass; auto: the largest power of two that fits, 32 on a CPU
    batch: int | Literal["auto"] = "auto"
    max_pixels: MaxPixels = MAX_PIXELS
    threads: Count = THREADS  # decoding threads of each rank
    device: str = "auto"  # auto: cuda if there is one, else cpu
    precision: Precision = "auto"  # auto: bf16 on GPUs that have it, else fp32
    compile: Compile = "auto"  # torch.compile of the teacher; auto: on a GPU whole, on a CPU never
    # JPEG decoder; native uses pillow for files that it does not read
    decoder: Literal["native", "pillow"] = "native"
    shard: str = ""  # 0/8: label only the first eighth of the images, as an independent job
    # label shards of --out that no other worker labels, until all are finished
    workers_join: bool = False
    # images of a shard with --workers-join, on average
    shard_images: Count = SHARD_IMAGES
    # list all of --data at the start, or each class folder when it is labeled: for more images than
    # fit into memory by name (130 bytes each), in object storage, with --workers-join
    listing: Literal["whole", "folders"] = "whole"
    # start workers that join: a process per GPU of this machine, or tasks on a Ray cluster
    engine: Engine = "none"
    # workers that an engine starts; 0: one per GPU
    num_workers: int = 0
    # part of a GPU that a worker of an engine takes; 0.5: two workers share one
    gpus_per_worker: float = 1.0
    dry_run: bool = False  # label a few batches, write nothing, print the cost of the whole pass


def choose_shard(labeling: Labeling) -> tuple[Shard, torch.device]:
    """Return the shard of this process, given by --shard or torchrun's rank, and its device."""
    size, device = int(os.environ.get("WORLD_SIZE", 1)), choose_rank_device(labeling.device)
    if labeling.workers_join and labeling.shard:
        raise UserError("--workers-join divides the images by itself; remove --shard")
    if isinstance(labeling.out, ObjectURL) and not labeling.workers_join:
        raise UserError(f"--out {labeling.out} needs --workers-join; add it")
    if labeling.shard_images != SHARD_IMAGES and not labeling.workers_join:
        raise UserError("--shard-images has no effect without --workers-join; remove it")
    check_listing(labeling)
    if labeling.num_workers or labeling.gpus_per_worker != 1:
        raise UserError("--num-workers and --gpus-per-worker need --engine; add it or remove them")
    if size == 1:
        return Shard.parse(labeling.shard) if labeling.shard else Shard(0, 1), device
    if labeling.shard or labeling.dry_run:
        raise UserError(
            "torchrun gives each rank its own shard; run --shard and --dry-run without it"
        )
    return Shard(int(os.environ.get("RANK", 0)), size), device


def check_listing(labeling: Labeling) -> None:
    """Raise UserError for options that exclude listing folder by folder."""
    if labeling.listing == "whole":
        return
    if not isinstance(labeling.data, ObjectURL) or labeling.dataset:
        raise UserError("--listing folders is for class folders at --data s3://...; remove it")
    if not labeling.workers_join or labeling.dry_run:
        raise UserError("--listing folders needs --workers-join, and no --dry-run")


def check_engine(labeling: Labeling) -> None:
    """Raise UserError for options that the workers of an engine cannot have."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("--engine starts processes, as torchrun does; use one of them")
    if labeling.shard or labeling.dry_run:
        raise UserError("--shard and --dry-run have no workers; remove --engine")
    if ":" in labeling.device:
        raise UserError(
            f"--device {labeling.device} is one device; remove it, and each worker takes its own"
        )


def main(labeling: Labeling) -> None:
    """Label the images, then print the accuracy of the stored maps."""
    if labeling.engine != "none":
        check_engine(labeling)
        given = labeling.num_workers, labeling.gpus_per_worker
        run_engine(labeling.engine, sys.argv[1:], labeling.out, *given)
        return
    limit_pixels(labeling.max_pixels)
    shard, device = choose_shard(labeling)
    if labeling.listing == "folders":
        images = ClassFolders(labeling.data, labeling.split)
    else:
        images = Images(labeling.data, labeling.dataset, labeling.split)
    teacher, name = load_teacher(
        labeling.teacher,
        labeling.model,
        labeling.input_size,
        labeling.class_map,
        images.class_names,
        labeling.geometry,
        labeling.tta_views,
        labeling.tiles,
    )
    teacher = teacher.to(device)
    # Printed once, and not by every rank.
    if shard.index == 0:
        for network in teacher.networks:
            if network.caveat:
                print(f"note: {network.caveat}")
    work = begin_pass(
        images,
        teacher,
        name,
        top_k=labeling.top_k,
        batch=labeling.batch,
        threads=labeling.threads,
        absent=labeling.absent,
        form=labeling.form,
        precision=labeling.precision,
        compiled=choose_compile(labeling.compile, device),
        render=NativeRender(images, teacher) if labeling.decoder == "native" else None,
    )
    if labeling.dry_run:
        for line in estimate_pass(work).lines():
            print(line)
        return
    # The ranks of torchrun are one command, whose first rank waits for all and merges. Jobs of
    # --shard are independent.
    ranks = shard.of > 1 and not labeling.shard
    if labeling.workers_join:
        join = join_folders if labeling.listing == "folders" else join_workers
        store = join(work, labeling.out, labeling.shard_images)
    else:
        store = finish_pass(work, labeling.out, shard, ranks)
    if store is not None:
        print(summary(store))
        accuracy = 100 * measure_accuracy(store)
        print(f"accuracy of the stored maps against the image labels: {accuracy:.1f} %")
    elif isinstance(labeling.out, ObjectURL):
        fetch = name_commands(f"python tools/score_maps.py fetch {labeling.out} maps")
        print(f"{labeling.out} is finished; copy it with `{fetch}`")
    elif labeling.workers_join:
        print(f"{labeling.out} is finished")
    elif not ranks:
        print(
            f"{shard.file(labeling.out)} is finished; the job that finishes the last of {shard.of} "
            "shards merges them"
        )


def command() -> None:
    """Run the console script `densefeed-relabel`.

    SIGTERM, with which schedulers stop a job, ends it as Ctrl-C does: workers give leases back.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    make_command(main, Labeling, __doc__)()


if __name__ == "__main__":
    command()
