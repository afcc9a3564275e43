"""Label every cell of every image once with a teacher: images in, dense score maps (HDF5) out.

    python tools/relabel_imagenet.py --data imagenet/train --teacher dm_nfnet_f6.dm_in1k --input-size 576 --top-k 5 --out maps.h5

Run the same command again to continue a killed run. At the end it prints the teacher's accuracy as read back from the
stored maps: if that is not near the teacher's own, do not train on them.

--form compact takes 2.7 kB an image at 18 x 18 cells, where raw takes 7.1; until it is made, at the end, OUT.part is raw.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
import tyro
from densefeed.models import checkpoints
from densefeed.relabel.files import UserError, run
from densefeed.relabel.forms import Form
from densefeed.relabel.geometry import Geometry
from densefeed.relabel.images import Images
from densefeed.relabel.labelling import label_images, stored_accuracy
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
    batch: int = 32  # images per forward pass
    threads: int = os.cpu_count() or 1  # decoding threads
    device: str = "auto"  # auto: cuda if there is one, else cpu


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


def main(labelling: Labelling) -> None:
    """Label, then judge what was stored."""
    images = Images(labelling.data, labelling.dataset, labelling.split)
    device = choose_device(labelling.device)
    model, class_names = load_teacher(labelling)
    if class_names and class_names != images.class_names:
        raise UserError(
            f"{labelling.teacher} was trained on other classes than {labelling.data} has "
            f"({class_names[0]}, ... and {images.class_names[0]}, ...); choose a teacher of the same classes"
        )
    config = resolve_data_config(model=model)
    teacher = Teacher(model, labelling.input_size, labelling.geometry, config).to(device)
    store = label_images(
        images, teacher, labelling.teacher, labelling.out, labelling.top_k, labelling.batch, labelling.threads, labelling.absent,
        labelling.form,
    )  # fmt: skip
    print(summary(store))
    print(f"accuracy of the stored maps against the image labels: {100 * stored_accuracy(store):.1f} %")


if __name__ == "__main__":
    run(lambda: main(tyro.cli(Labelling, description=__doc__)))
