"""Match the classes of data to those of a model, by name, number or order."""

from pathlib import Path
from typing import Literal, NamedTuple

from torch import Tensor, nn

from densefeed.models.model_spec import imagenet_names
from densefeed.relabel.class_map import ClassMap, merge_classes
from densefeed.storage.dataset_names import (
    describe_lookalikes,
    list_some,
    match_forms,
    match_numbers,
)
from densefeed.system.errors import UserError
from densefeed.system.terminal import warn
from densefeed.training.load_model import Trained


class Match(NamedTuple):
    """The position of each class of the data among the model's classes."""

    columns: list[int]  # for each class of the data, the model's
    by: Literal["name", "number", "order", "class map"]


class Merged(nn.Module):
    """A model whose logits are those of the data's classes, by a class map."""

    def __init__(self, model: nn.Module, class_map: ClassMap) -> None:
        super().__init__()
        self.model, self.num_classes = model, class_map.classes
        self.register_buffer("source", class_map.source)
        self.register_buffer("target", class_map.target)

    def forward(self, image_NCHW: Tensor) -> Tensor:
        logits_NK = self.model(image_NCHW).float()
        return merge_classes(logits_NK, ClassMap(self.source, self.target, self.num_classes))


def match_classes(
    data: list[str], model: list[str], num_classes: int, stand_in: list[str]
) -> Match:
    """Find each class of the data among the model's, by the rules of densefeed validate.

    `model` is empty if the names of its `num_classes` classes are unknown; `stand_in` are the names
    to use for a model without names of its own. Raises UserError if a class is not found.
    """
    # Files written by stock ffcv hold no class names, so models trained on one have numbers.
    unnamed = not model or model == [str(number) for number in range(num_classes)]
    # Names before numbers: a model trained on folders 0, 1, ..., 10 has them sorted as text.
    for names in (model, stand_in if unnamed else []):
        place = {name: number for number, name in enumerate(names)}
        found = match_forms(data, names)
        if names and set(found) <= set(place):
            return Match([place[name] for name in found], "name")
    if numbers := match_numbers(data, num_classes):
        return Match(numbers, "number")
    if unnamed and not stand_in and len(data) == num_classes:
        return Match(list(range(num_classes)), "order")
    known = stand_in if unnamed else model
    there = set(known)
    unknown = [name for name in match_forms(data, known) if name not in there]
    example = f" ({list_some(model)})" if model else ""
    pair = describe_lookalikes(unknown, known)
    raise UserError(
        f"{len(unknown)} of the {len(data)} classes of the data ({list_some(unknown)}) are not "
        f"among the {num_classes} classes of the model{example}; "
        "give data with class folders named as in training" + (f"; {pair}" if pair else "")
    )


def warn_of_others(match: Match, data: list[str], trained: Trained, path: Path) -> None:
    """Warn if classes match by number or order, not by name, and may be others.

    By number they may be if they are not as many, or if the model has names; the 1,000 classes of
    ImageNet-V2 are numbers too. By order they may be if the model has names, which then differ.
    """
    names, count = trained.class_names, trained.model.num_classes
    others = len(data) != count or (names and not imagenet_names(trained.model))
    if match.by != "name" and others:
        why = "have numbers for names" if match.by == "number" else "have other names"
        first = f", as {data[0]} with {names[match.columns[0]]!r}" if names else ""
        warn(
            f"the {len(data):,} classes of {path} {why} and were matched by {match.by} "
            f"with the {count:,} of the model{first}; if these are other classes, the accuracy is "
            "meaningless"
        )
