"""Run a labeling, of the command and of `densefeed.label`: images and a teacher to a store."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from torch import nn
from tyro.conf import UseAppendAction

from densefeed.models import checkpoints
from densefeed.relabel.accuracy import print_accuracy
from densefeed.relabel.estimates import estimate_pass
from densefeed.relabel.labeling import Pass, begin_pass
from densefeed.relabel.load_teacher import (
    NO_CLASS_MAP,
    describe_numbers,
    is_checkpoint,
    load_teacher,
)
from densefeed.relabel.ray_workers import Engine, run_on_ray
from densefeed.relabel.rendering import NativeRender
from densefeed.relabel.scoring import Compile, choose_compile
from densefeed.relabel.workers import ALL, Share, label
from densefeed.storage.beton_images import open_images
from densefeed.storage.dataset_items import DatasetItems
from densefeed.storage.dataset_names import check_two_classes
from densefeed.storage.geometry import Geometry
from densefeed.storage.images import DecodeOptions, SplitOptions, limit_pixels
from densefeed.storage.maintenance import summary
from densefeed.storage.row_codecs import Form
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.storage.shard_plan import SHARD_IMAGES
from densefeed.system.devices import DeviceOptions, ThreadOptions, choose_rank_device, warn_busy
from densefeed.system.errors import UserError
from densefeed.system.json_files import is_number, read_json
from densefeed.system.object_url import ObjectURL
from densefeed.system.options import (
    Bounds,
    Count,
    Integers,
    Location,
    NonNegativeInt,
    Texts,
    own_first,
)
from densefeed.system.precision import Precision
from densefeed.system.terminal import print


@own_first
@dataclass(frozen=True, kw_only=True)
class Labeling(SplitOptions, DecodeOptions, ThreadOptions, DeviceOptions):
    """Images to label, and the teacher."""

    # images: the folder that holds train/ and val/, a folder of class folders, or of tar or Parquet
    # files, all also as s3://BUCKET/FOLDER; a .beton; the root of --dataset
    data: Location | None = None
    # score maps to write: a file NAME.h5, or a folder or s3://BUCKET/FOLDER of shards
    out: Location
    # timm model, checkpoint, folder of train or export, or package.module:factory; repeat it for an
    # ensemble
    teacher: UseAppendAction[tuple[str, ...]]
    # timm's name of the model, for a checkpoint that does not contain it; once, or for each teacher
    model: Texts = ()
    # side of the teacher's input, pixels; once, or for each teacher
    input_size: Integers = (576,)
    # JSON or CSV file from the teacher's classes to those of the data; - for none
    class_map: Texts = ()
    # probability of the teacher's classes that --class-map leaves out. drop: rescale that of the
    # classes of the data to 1; keep: store it as it is, and --outside of train decides on the rest
    unmapped: Literal["drop", "keep"] = "drop"
    # cells along a side of a map, of a teacher that gives more; 0: all, but of a segmentation
    # network one per 8 pixels of its input
    map_side: NonNegativeInt = 0
    top_k: Count = 5  # classes kept per cell; all of them if the teacher has fewer
    # part of an image that is shown: squashed, its center square (as published), padded, or tiles
    geometry: Geometry = "squash"
    tiles: int = 1  # tiles along each side, with --geometry tile
    # test-time views to average: 2 are the image and its mirror, more are shifted by a cell
    tta_views: int = 1
    # classes that are not kept: the remaining probability spread evenly, or logit 0 (as published)
    absent: Literal["tail", "zero-logit"] = "tail"
    # rows on disk: raw, packed losslessly, or compact, whose error is printed
    form: Form = "raw"
    # name of the dataset, from the list in the --help of packing, if the data is not a folder of
    # class folders; or, in place of --data, package.module:factory, which returns a dataset
    dataset: str = ""
    # split of the dataset; with --val-fraction, train or val
    split: str = "train"
    # images per forward pass; auto: the largest power of two that fits, 32 on a CPU
    batch: int | Literal["auto"] = "auto"
    precision: Precision = "auto"  # auto: bf16 on GPUs that have it, else fp32
    compile: Compile = "auto"  # torch.compile of the teacher; auto: on a GPU whole, on a CPU never
    # JPEG decoder; native uses pillow for files that it does not read
    decoder: Literal["native", "pillow"] = "native"
    shard: str = ""  # 0/8: only every eighth shard, for machines that share no disk
    shard_images: Count = SHARD_IMAGES  # images of a shard, on average
    engine: Engine = "none"  # ray: start workers on a Ray cluster
    # workers that Ray starts; 0: one per GPU
    num_workers: NonNegativeInt = 0
    # part of a GPU that a worker of Ray takes; 0.5: two workers share one
    gpus_per_worker: Annotated[float, Bounds(0.01, 1)] = 1.0
    dry_run: bool = False  # label a few batches, write nothing, print the cost of the whole pass


def check_engine(labeling: Labeling) -> None:
    """Raise UserError for options that do not go with --engine, or only with it."""
    if labeling.engine == "none":
        if labeling.num_workers or labeling.gpus_per_worker != 1:
            raise UserError(
                "--num-workers and --gpus-per-worker need --engine ray; add it or remove them"
            )
        return
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("--engine starts processes, as torchrun does; use one of them")
    if labeling.shard or labeling.dry_run:
        raise UserError("--shard and --dry-run have no workers; remove --engine")
    if ":" in labeling.device:
        raise UserError(
            f"--device {labeling.device} is one device; remove it, and each worker takes its own"
        )


def check_unmapped(labeling: Labeling) -> None:
    """Raise UserError for options that do not go with --unmapped keep."""
    if labeling.unmapped == "drop":
        return
    if all(file == NO_CLASS_MAP for file in labeling.class_map):
        raise UserError("--unmapped keep needs a --class-map; add it or remove --unmapped")
    if labeling.absent != "tail":
        raise UserError(
            f"--unmapped keep stores probabilities, and --absent {labeling.absent} does not; "
            "remove one of them"
        )


def run_labeling(
    labeling: Labeling, items: DatasetItems | None = None, teachers: Sequence[str | nn.Module] = ()
) -> ScoreMapStore | None:
    """Label the images, then print the accuracy of the stored maps.

    `items` are images in place of `data`, and `teachers` stand in place of `teacher`. Returns the
    store as `label` of workers.py does, and None from a dry run.
    """
    check_engine(labeling)
    check_unmapped(labeling)
    if labeling.engine == "ray" and (items or teachers):
        raise UserError(
            "--engine ray starts processes, which a dataset or a module of this one does not reach;"
            " name both as package.module:factory"
        )
    out, is_first = labeling.out, os.environ.get("RANK", "0") == "0"
    if is_first:
        warn_busy()
    if labeling.dry_run:
        lines = estimate_pass(begin(labeling, is_first, items, teachers)).lines()
        for line in lines if is_first else ():
            print(line)
        if labeling.shard and is_first:
            print(f"--dry-run does not read --shard {labeling.shard}: this is the whole pass")
        return None
    # With Ray only the workers open the images.
    has_labels = labeling.dataset.partition("/")[0] not in ("masks", "instances", "coco")
    if labeling.engine == "ray":
        # Workers take the options without those of the engine.
        options = replace(labeling, engine="none", num_workers=0, gpus_per_worker=1.0)
        run_on_ray(options, label_shards, labeling.num_workers, labeling.gpus_per_worker)
        store = None if isinstance(out, ObjectURL) else ScoreMapStore(out)
    else:
        share = Share.parse(labeling.shard) if labeling.shard else ALL
        work = begin(labeling, is_first, items, teachers)
        has_labels = work.images.has_labels
        shards = dict(shard_images=labeling.shard_images, share=share)
        store = label(work, out, **shards, shows=is_first)
    if store is not None:
        print(summary(store))
        named = [each for each in teachers or labeling.teacher if isinstance(each, str)]
        if has_labels:
            print_accuracy(store, describe_training(named, store.header.fingerprint))
    elif labeling.shard and is_first:
        print(
            f"shards {labeling.shard} of {out} are finished; join them with the others by "
            "`densefeed score-maps merge`"
        )
    elif isinstance(out, ObjectURL):
        print(f"{out} is finished; copy it with `densefeed score-maps fetch {out} maps`")
    elif is_first:
        print(f"{out} is finished")
    return store


def describe_training(teachers: Sequence[str], fingerprint: str) -> str:
    """Describe the teachers that were trained on the images of this fingerprint; "" without one."""
    parts = []
    for source in filter(is_checkpoint, teachers):
        path = checkpoints.find_file(Path(source))
        if checkpoints.load(path).get("fingerprint") == fingerprint:
            parts.append(f"{source} was trained on these images{describe_validation(path)}")
    return f"note: {'; '.join(parts)}; on new images the maps are worse" if parts else ""


def describe_validation(path: Path) -> str:
    """Describe the validation accuracy of the finished run of a checkpoint; "" if it is unknown."""
    try:
        result = read_json(path.with_name("result.json"), "train again")
    # The run may not be finished, or only its checkpoint was copied.
    except (OSError, UserError):
        return ""
    top1 = result.get("top1_ema", result.get("top1"))
    if not is_number(top1):
        return ""
    return f", and its validation accuracy was {100 * top1:.1f} %"


def label_shards(labeling: Labeling) -> None:
    """Label as one of the workers that Ray starts."""
    label(begin(labeling), labeling.out, shard_images=labeling.shard_images)


def begin(
    labeling: Labeling,
    shows: bool = False,
    items: DatasetItems | None = None,
    teachers: Sequence[str | nn.Module] = (),
) -> Pass:
    """Open the images and load the teacher. `shows`: print what is to be known of its weights.

    `items` and `teachers` are those of `run_labeling`.
    """
    limit_pixels(labeling.max_pixels)
    device = choose_rank_device(labeling.device)
    images = open_images(labeling.data, items or labeling.dataset, labeling.split, labeling)
    check_two_classes(images.root, images.class_names, images.labels)
    if shows:
        images.describe_split()
    teacher, name = load_teacher(
        teachers or labeling.teacher,
        labeling.model,
        labeling.input_size,
        labeling.class_map,
        images.class_names,
        labeling.geometry,
        labeling.tta_views,
        labeling.tiles,
        labeling.unmapped == "keep",
        labeling.map_side,
    )
    teacher = teacher.to(device)
    caveats = [network.caveat for network in teacher.networks if network.caveat]
    caveats += [
        f"{network.name} states no names of classes; they are matched by order with those of "
        f"{images.root}"
        for network in teacher.networks
        if network.by_order
    ]
    caveats += [
        describe_numbers(images.root, network.name, network.by_number)
        for network in teacher.networks
        if network.by_number
    ]
    for caveat in caveats if shows else ():
        print(f"note: {caveat}")
    return begin_pass(
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
