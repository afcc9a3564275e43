"""Relevance of two objects of one scene, student by student, for the report."""

import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from densefeed.explain.relevance import class_relevance
from densefeed.pipelines.augment.augmentation import Normalize
from densefeed.storage.images import Images, decode
from densefeed.system.errors import UserError
from densefeed.system.terminal import print
from densefeed.tools.audit import picture
from densefeed.tools.heat_maps import encode_map
from densefeed.tools.load_model import crop_input, open_trained
from densefeed.tools.true_objects import Truth, make_objects, read_objects

# Validation scenes among which one is chosen.
MOST_SCENES = 1000
# Units along a side of the picture in which boxes are drawn.
SIDE = 16


class Scene(NamedTuple):
    """A validation image that shows two objects."""

    name: str  # of its file
    image: Image.Image
    truth: Truth
    class_names: list[str]


def choose_scene(path: Path) -> Scene | None:
    """Choose an image by the file `path` of true boxes, or None if there is none to choose.

    Of the first MOST_SCENES validation images with two objects, of two classes, it is the one with
    the largest second object: maps of few tokens show a small one poorly.
    """
    images = Images(path.parent, split="val")
    truths, areas = list(islice(read_objects(path, images, "val"), MOST_SCENES)), {}
    for place, truth in enumerate(truths):
        if len(truth.classes) == 2 and truth.classes[0] != truth.classes[1]:
            left, top, right, bottom = truth.boxes_ltrb[1]
            areas[place] = (right - left) * (bottom - top)
    if not areas:
        return None
    place = max(areas, key=areas.__getitem__)
    where = images.where(place)
    image = decode(images.read(place), where)
    return Scene(Path(where).name, image, truths[place], images.class_names)


def compare_relevance(folders: Sequence[Path], boxes: Path) -> dict | None:
    """Return the relevance of two objects of one image for every run that has it, for the page.

    Runs of other classes, or of a model without relevance, such as a CNN, are left out. None if
    there is no run or no scene to show. What is missing or damaged is printed: the rest of the
    report is of use without.
    """
    try:
        scene = choose_scene(boxes)
    except (UserError, OSError) as error:
        print(f"the report shows no relevance: {error}", file=sys.stderr)
        return None
    columns = [explain_run(folder, scene) for folder in folders] if scene else []
    columns = [column for column in columns if column]
    if not columns:
        return None
    whole = np.array([[1.0, 0, 0], [0, 1, 0]])
    return {
        "image": picture(scene.image, "JPEG"),
        "file": scene.name,
        "names": [scene.class_names[c] for c in scene.truth.classes],
        "objects": make_objects(scene.truth, whole, SIDE, scene.class_names),
        "side": SIDE,
        "columns": columns,
    }


def explain_run(folder: Path, scene: Scene) -> dict | None:
    """Return name, probabilities and maps of the scene's objects for the model of a run."""
    try:
        trained = open_trained(folder)
    except (UserError, OSError) as error:
        print(f"the report shows no relevance of {folder.name}: {error}", file=sys.stderr)
        return None
    if trained.class_names != scene.class_names:
        return None
    # All of the scene, which is square, whatever the run's crop: every student is shown the same.
    pixels, _ = crop_input(scene.image, trained, 1.0)
    image_1CHW = Normalize(trained.mean, trained.std)(torch.tensor(pixels[None]))
    target_1J = torch.from_numpy(scene.truth.classes)[None]
    try:
        relevance_JRC = class_relevance(trained.model, image_1CHW, target_1J)[0]
    # A model that has no relevance.
    except UserError:
        return None
    with torch.no_grad():
        probability_K = trained.model(image_1CHW)[0].softmax(-1)
    return {
        "name": folder.name,
        "probabilities": probability_K[target_1J[0]].tolist(),
        "maps": list(map(encode_map, relevance_JRC)),
    }
