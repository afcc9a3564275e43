"""Label every cell of every image once with a teacher: images in, dense score maps (HDF5) out.

    python tools/relabel_imagenet.py --data imagenet/train --teacher dm_nfnet_f6.dm_in1k --input-size 576 --top-k 5 --out maps.h5

Run the same command again to continue a killed run. On several devices, and machines:

    torchrun --nproc-per-node 8 tools/relabel_imagenet.py ...
    python tools/relabel_imagenet.py ... --shard 0/64        one of 64 jobs, in any order; the last one to finish merges

Each rank or job writes a file of its own beside OUT, and continues it; a pass may go on with another number of them.
--dry-run labels a few batches, writes nothing, and says what all of it will cost. At the end a pass prints the teacher's accuracy
as read back from the stored maps: if that is not near the teacher's own, do not train on them.

--form compact takes 2.7 kB an image at 18 x 18 cells, where raw takes 7.1; until it is made, at the end, OUT.part is raw.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import timm
import torch
import tyro
from densefeed.models import checkpoints
from densefeed.pipelines.rendering import NativeRender
from densefeed.relabel.estimates import try_out
from densefeed.relabel.files import UserError, run
from densefeed.relabel.forms import Form
from densefeed.relabel.geometry import Geometry
from densefeed.relabel.images import Images
from densefeed.relabel.labelling import begin_pass, label_images, stored_accuracy
from densefeed.relabel.scoring import Precision
from densefeed.relabel.shards import Shard
from densefeed.relabel.store import Absent
from densefeed.relabel.teacher import Teacher, choose_device
from densefeed.relabel.upkeep import summary
from timm.data import resolve_data_config


@dataclass(frozen=True, kw_only=True)
class Labelling:
    """What to label, with which teacher."""

    data: Path  # folder of class folders, or what --dataset asks for
    out: Path  # the score maps to write, HDF5
    teacher: str  # a timm model's name, a checkpoint, or a run folder of train.py
    model: str = ""  # timm's name of the model, for a checkpoint that does not say
    input_size: int = 576  # side of the teacher's input, pixels
    top_k: int = 5  # classes kept per cell
    geometry: Geometry = "squash"  # how an image is fitted: whole and squashed, or its centre square (as published)
    absent: Absent = "tail"  # the classes not kept: true remainder spread evenly, or logit 0 (as published)
    form: Form = "raw"  # of the rows on disk: as they are, packed without loss, or compact, of which the error is printed
    dataset: str = ""  # a name as tools/pack_dataset.py --help lists them, if not a folder of class folders
    split: str = "train"  # of the dataset
    batch: int | Literal["auto"] = "auto"  # images per forward pass; auto: the largest power of two that fits, 32 on a CPU
    threads: int = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # decoding threads
    device: str = "auto"  # auto: cuda if there is one, else cpu
    precision: Precision = "auto"  # auto: bf16 on GPUs that have it, else fp32
    compile: bool = False  # the teacher, by torch.compile
    decoder: Literal["native", "pillow"] = "native"  # native leaves to pillow what it does not read
    shard: str = ""  # 0/8: only the first eighth of the images, as a job of its own
    dry_run: bool = False  # label a few batches, write nothing, and print what the whole will take


def load_teacher(labelling: Labelling) -> tuple[torch.nn.Module, list[str]]:
    """The teacher with its weights, and the names of its classes where its checkpoint tells them."""
    if labelling.input_size < 1:
        raise UserError("--input-size must be at least 1 pixel")
    path = Path(labelling.teacher)
    path = path / "last.pt" if path.is_dir() else path
    try:
        if path.exists() or path.suffix in (".pt", ".pth", ".tar", ".safetensors"):
            model, checkpoint = checkpoints.build(path, labelling.model)
            model.pretrained_cfg.update({name: checkpoint[name] for name in ("mean", "std") if name in checkpoint})
            return at_size(model, labelling.input_size), checkpoint.get("class_names", [])
    except checkpoints.CheckpointError as error:
        raise UserError(str(error)) from error
    if not timm.is_model(labelling.teacher.split(".")[0]):
        raise UserError(f"{labelling.teacher} is neither a file nor a timm model; timm.list_models() lists them")
    try:
        return at_size(timm.create_model(labelling.teacher, pretrained=True), labelling.input_size), []
    except Exception as error:  # the hub's client raises many kinds when a download fails
        raise UserError(
            f"the weights of {labelling.teacher} cannot be downloaded ({type(error).__name__}); give a file: "
            f"--teacher weights.safetensors --model {labelling.teacher}"
        ) from error


def at_size(model: torch.nn.Module, size: int) -> torch.nn.Module:
    """The model ready for inputs of `size` pixels: timm's transformers resize their position tables, CNNs take any size."""
    if hasattr(model, "set_input_size"):
        model.set_input_size(img_size=(size, size))
    return model


def ranks_of_torchrun(labelling: Labelling) -> tuple[Shard, torch.device]:
    """This process's part of the images, by --shard or as torchrun numbers it, and its device."""
    rank, size, local = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    device = choose_device(labelling.device)
    if size == 1:
        return Shard.parse(labelling.shard) if labelling.shard else Shard(0, 1), device
    if labelling.shard or labelling.dry_run:
        raise UserError("torchrun gives each rank its own shard; run --shard and --dry-run without it")
    if device.type == "cuda":
        if device.index is not None:
            raise UserError(f"--device {device} is one device; under torchrun give --device cuda, and each rank takes its own")
        if local >= torch.cuda.device_count():
            raise UserError(
                f"torchrun began {local + 1} or more ranks on a machine of {torch.cuda.device_count()} CUDA devices; "
                "give --nproc-per-node as many as there are"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    return Shard(rank, size), device


def main(labelling: Labelling) -> None:
    """Label, then judge what was stored."""
    shard, device = ranks_of_torchrun(labelling)
    images = Images(labelling.data, labelling.dataset, labelling.split)
    model, class_names = load_teacher(labelling)
    if class_names and class_names != images.class_names:
        raise UserError(
            f"{labelling.teacher} was trained on other classes than {labelling.data} has "
            f"({class_names[0]}, ... and {images.class_names[0]}, ...); choose a teacher of the same classes"
        )
    config = resolve_data_config(model=model)
    teacher = Teacher(model, labelling.input_size, labelling.geometry, config).to(device)
    options = dict(
        top_k=labelling.top_k, batch=labelling.batch, threads=labelling.threads, absent=labelling.absent, form=labelling.form,
        precision=labelling.precision, compiled=labelling.compile,
        render=NativeRender(images, teacher) if labelling.decoder == "native" else None,
    )  # fmt: skip
    if labelling.dry_run:
        for line in try_out(begin_pass(images, teacher, labelling.teacher, **options)).lines():
            print(line)
        return
    ranks = shard.of > 1 and not labelling.shard
    store = label_images(images, teacher, labelling.teacher, labelling.out, shard=shard, ranks=ranks, **options)
    if store is not None:
        print(summary(store))
        print(f"accuracy of the stored maps against the image labels: {100 * stored_accuracy(store):.1f} %")
    elif not ranks:
        print(f"{shard.file(labelling.out)} is finished; the job that finishes the last of {shard.of} shards merges them")


if __name__ == "__main__":
    run(lambda: main(tyro.cli(Labelling, description=__doc__)))
