"""What a run's student makes of validation images, for a page: the first of a draw.

A classifier's are right and wrong ones with the relevance for the predicted class, those of a
segmentation network or a detector are true and predicted masks.
"""

import sys
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from timm.data.transforms import str_to_pil_interp

from densefeed.explain.heat_maps import encode_map, shrink
from densefeed.explain.refusals import Refusals
from densefeed.explain.relevance import class_relevance
from densefeed.models.mask_rcnn import MaskRCNN
from densefeed.models.on_backbone import OnBackbone
from densefeed.models.upernet import UperNet
from densefeed.objectives.detection import describe_found, paint_found, scale_whole
from densefeed.objectives.segmentation import scale_image, sum_scales
from densefeed.pages.class_masks import draw_classes
from densefeed.pages.templates import picture
from densefeed.pipelines.augment.augmentation import Normalize
from densefeed.pipelines.loader import Source
from densefeed.pipelines.open import open_dataset
from densefeed.storage.dataset_names import match_forms
from densefeed.storage.instances import OBJECTS
from densefeed.storage.mask_folder import UNLABELED
from densefeed.system.errors import UserError
from densefeed.system.progress import bar
from densefeed.system.terminal import print
from densefeed.training.config import Config
from densefeed.training.load_model import Trained, crop_input, open_trained

# Validation images that the student classifies, and those shown of the right and of the wrong ones.
TRIED, SHOWN = 64, 6
# Validation images that are shown with their true and their predicted mask.
SEGMENTED = 8
# Longer side of such a picture, pixels.
PICTURE_SIDE, MASK_SIDE = 224, 320
# Images that pass through the student at once: relevance takes 0.3 GB for each of LV-ViT-S.
AT_ONCE = 4


class Classified(NamedTuple):
    """A validation image that a student classified."""

    index: int  # number of the sample
    pixels: np.ndarray  # what the student sees, uint8 [S, S, 3]
    label: str
    probability: torch.Tensor  # of each class, [L]


def show_predictions(config: Config, folder: Path) -> dict | None:
    """Classify some validation images with a run's student; return what a page shows of them.

    These are TRIED images, drawn with the run's seed. Of those that are classified right, and of
    those that are not, the first SHOWN of the draw are shown; of a segmentation network the first
    SEGMENTED with a mask. None, with a line that says why, if there is no student or no validation
    set.
    """
    try:
        trained = open_trained(folder, others=(UperNet, MaskRCNN))
        loader = open_dataset(config.data, "evaluate", batch=AT_ONCE, seed=config.run.seed)
        with closing(loader):
            names = match_forms(loader.class_names, trained.class_names)
            if others := set(names) - set(trained.class_names):
                raise UserError(
                    f"{config.data.val} has the class {min(others)}, which {trained.path} lacks; "
                    "give the validation set of the run"
                )
            if isinstance(trained.model, OnBackbone):
                return segment(trained, loader.source, config.run.seed)
            return classify(trained, loader.source, names, config.run.seed)
    # The rest of the page is of use without them.
    except (UserError, OSError) as error:
        print(f"the report shows no predictions: {error}", file=sys.stderr)
        return None


def segment(trained: Trained, source: Source, seed: int) -> dict:
    """Segment images of a source, or find objects in them; return what is shown.

    Raises UserError for a source without masks, or of other classes.
    """
    if source.masks is None or source.class_names != trained.class_names:
        raise UserError(
            "the validation set has no masks of the classes of the run; give the one of the run"
        )
    drawn = np.random.default_rng(seed).permutation(len(source.labels))
    names, items = trained.class_names, []
    for index in drawn.tolist():
        image = source.image(index)
        mask = source.mask(index, image.height, image.width).numpy()
        if not mask.size:
            continue
        found = find_classes(trained, image)
        if source.instances:
            mask = np.where(mask == UNLABELED, UNLABELED, mask // OBJECTS)
        labeled = mask != UNLABELED
        small = shrink(image, MASK_SIDE)
        # The pixel that is nearest to the center of a pixel of the picture.
        nearest = small.size, Image.Resampling.NEAREST
        masks = [
            np.asarray(Image.fromarray(each.astype(np.int32)).resize(*nearest))
            for each in (mask, found)
        ]
        pictures, key = draw_classes(small, masks, names)
        items.append(
            {
                "index": index,
                "image": picture(small, "JPEG"),
                "masks": [picture(each, "PNG") for each in pictures],
                "key": key,
                "ratio": f"{image.width} / {image.height}",
                "right": float((found == mask)[labeled].mean()) if labeled.any() else None,
            }
        )
        if len(items) == SEGMENTED:
            break
    facts = {"size": trained.size, "weights": trained.weights, "objects": source.instances}
    return {"segmented": items} | facts


def find_classes(trained: Trained, image: Image.Image) -> np.ndarray:
    """Return what a network finds in an image, as an evaluation at one scale does, `[H, W]`.

    Classes of pixels, of a detector those of the objects.
    """
    filter, size = str_to_pil_interp(trained.interpolation), (image.height, image.width)
    normalize = Normalize(trained.mean, trained.std)
    if isinstance(trained.model, UperNet):
        scaled = [scale_image(image, trained.size, filter)]
        total = sum_scales(trained.model, scaled, normalize, trained.size, AT_ONCE, size)
        return total.argmax(0).numpy()
    scaled = scale_whole(image, trained.size, filter)
    (output,) = trained.model(normalize(scaled[None]))
    scale = image.width / scaled.shape[1], image.height / scaled.shape[0]
    return paint_found(describe_found(output, scale, size), size)


def classify(trained: Trained, source: Source, names: list[str], seed: int) -> dict:
    """Classify TRIED images of a source; return their number, and those that are shown.

    `names` are those of the source's classes, each in the model's form.
    """
    drawn = np.random.default_rng(seed).permutation(len(source.labels))[:TRIED].tolist()
    normalize, right, wrong = Normalize(trained.mean, trained.std), [], []
    for ids in bar([drawn[n : n + AT_ONCE] for n in range(0, len(drawn), AT_ONCE)], "classify"):
        inputs = [crop_input(source.image(n), trained, trained.crop_pct) for n in ids]
        logits_NL = trained.model(normalize(torch.from_numpy(np.stack(inputs))))
        for n, pixels, probability_L in zip(ids, inputs, logits_NL.softmax(-1), strict=True):
            label = names[int(source.labels[n])]
            found = Classified(n, pixels, label, probability_L)
            is_right = trained.class_names[int(probability_L.argmax())] == label
            (right if is_right else wrong).append(found)
    refused = Refusals()
    shown = [
        describe_prediction(found, trained, normalize, refused)
        for found in (*wrong[:SHOWN], *right[:SHOWN])
    ]
    return {
        "tried": len(drawn),
        "right": len(right),
        "items": shown,
        "weights": trained.weights,
        "size": trained.size,
        "refused": refused.get("relevance"),
    }


def describe_prediction(
    found: Classified, trained: Trained, normalize: Normalize, refused: Refusals
) -> dict:
    """Return what the page shows of an image, with the relevance for its predicted class."""
    names, best = trained.class_names, int(found.probability.argmax())
    image_NCHW = normalize(torch.from_numpy(found.pixels[None].copy()))
    asked = trained.model, image_NCHW, torch.tensor([[best]])
    relevance = refused.attempt("relevance", class_relevance, *asked)
    return {
        "index": found.index,
        "image": picture(shrink(Image.fromarray(found.pixels), PICTURE_SIDE), "JPEG"),
        "heat": "" if relevance is None else encode_map(relevance[0, 0]),
        "label": found.label,
        "predicted": names[best],
        "probability": float(found.probability[best]),
        "of_label": float(found.probability[names.index(found.label)]),
    }
