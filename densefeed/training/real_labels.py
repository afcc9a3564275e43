"""ReaL accuracy (Beyer et al., arXiv 2006.07159): several classes of an image are correct."""

from pathlib import Path

from timm.data import RealLabelsImagenet
from torch import Tensor
from torch.nn import functional as F

from densefeed.pipelines.loader import Source
from densefeed.system.errors import UserError
from densefeed.system.json_files import read_json

# Images per call of timm's accuracy, which takes a dense row of all classes for each.
CHUNK = 1024


def check_real_json(path: str) -> None:
    """Raise UserError if the file is not a list of lists of class numbers."""
    lists = read_json(Path(path), "copy it again", list)
    if not all(isinstance(classes, list) and all(map(is_class, classes)) for classes in lists):
        raise UserError(
            f"{path} is not a list of lists of class numbers; use the real.json of arXiv 2006.07159"
        )


def is_class(value: object) -> bool:
    """Whether a value of a JSON file can be the number of a class."""
    return type(value) is int and value >= 0


def open_real(path: str, source: Source, data: Path) -> RealLabelsImagenet:
    """Open timm's ReaL accuracy for these samples, in their order.

    Raises UserError if the ReaL labels are not those of the samples.
    """
    count = len(source.labels)
    if path != "timm":
        check_real_json(path)
    names = [Path(source.where(index)).name for index in range(count)]
    official = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, count + 1)]
    try:
        accuracy = RealLabelsImagenet(
            names if sorted(names) == official else official,
            real_json=None if path == "timm" else path,
            topk=(1,),
        )
    # timm asserts that there are as many lists as images.
    except AssertionError:
        raise UserError(
            f"--real {path} has another number of images than the {count:,} of {data}; "
            "give the ReaL labels of this data"
        ) from None
    lists = [accuracy.real_labels[name] for name in accuracy.filenames]
    labeled = [pair for pair in zip(source.labels.tolist(), lists, strict=True) if pair[1]]
    if not labeled or max(max(right) for _, right in labeled) >= len(source.class_names):
        raise UserError(
            f"--real {path} has no labels of the {len(source.class_names)} classes of {data}; "
            "give the ReaL labels of this data"
        )
    agree = sum(label in right for label, right in labeled) / len(labeled)
    # About nine in ten of ImageNet's own labels are among their ReaL classes. In a wrong order it
    # is about one in hundreds.
    if agree < 0.5:
        raise UserError(
            f"only {100 * agree:.0f} % of the labels of {data} are among those of --real {path}, "
            "so their orders differ; "
            "validate the folder of ILSVRC2012_val_*.JPEG with --loader folder"
        )
    return accuracy


def real_top1(accuracy: RealLabelsImagenet, best_N: Tensor, num_classes: int) -> float:
    """Return the share of correct images, 0 to 1, among those with a ReaL label."""
    for best in best_N.split(CHUNK):
        # timm takes the top-k of these rows, as it does of logits.
        accuracy.add_result(F.one_hot(best, num_classes))
    # timm returns a percentage.
    return accuracy.get_accuracy(1) / 100
