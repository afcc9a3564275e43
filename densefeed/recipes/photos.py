"""Recipes of the students on photo scenes, which differ in supervision."""

from densefeed.recipes import quickstart
from densefeed.recipes.recipe import table

STUDENT = dict(
    # Crops of 64 px, of 15 to 100 % of a scene, show objects about as large as the whole scene does
    # at 96 px, where the student is evaluated.
    size=96,
    sizes=((0, 64),),
    crop_scale=(0.15, 1.0),
    hflip=0.5,
    epochs=6,
    batch=24,
    lr_batch=24,
)
# Segmentation and detection on the same scenes.
DENSE = STUDENT | dict(
    crop_scale=(0.25, 1.0),
    epochs=3,
    batch=12,
    lr_batch=12,
    # With AdamW, 1e-3 and 16 images all pixels of a mask were background after 300 steps.
    optimizer="adamuon",
    lr=6e-3,
    min_lr=1e-5,
    weight_decay=0.01,
    warmup_epochs=0.3,
    eval_every=10,
    drop_path=0.0,
)
PUBLISHED = dict(geometry="published", outside="uniform")
RELABEL, MIXTOKEN = dict(objective="relabel"), dict(mixtoken=True)
# The image's label, which is always right here, mixed into the dense label of the whole crop.
IMAGE_LABEL = dict(ground_truth="intended")
DATA = "--loader ffcv --data photos/train.beton --val photos/val.beton"

RECIPES = table(
    "The quickstart's student with token labels on photo scenes of 60 classes (densefeed photos).",
    quickstart.RECIPES["quickstart_token_label"],
    data=DATA,
    photos_token_label=(STUDENT,),
)
RECIPES |= table(
    "The student on photo scenes with MixToken, the published label geometry, or other labels.",
    RECIPES["photos_token_label"],
    data=DATA,
    photos_token_label_published=(PUBLISHED,),
    photos_token_label_mixtoken=(MIXTOKEN,),
    photos_token_label_mixtoken_published=(MIXTOKEN | PUBLISHED,),
    photos_relabel=(RELABEL, "One dense label per crop (arXiv 2101.05022)."),
    photos_relabel_published=(RELABEL | PUBLISHED,),
    photos_ce=(dict(objective="ce"), "Image labels only."),
)
RECIPES |= table(
    "The student on photo scenes, whose class token learns from the image label too.",
    RECIPES["photos_token_label"],
    data=DATA,
    photos_token_label_ground_truth=(IMAGE_LABEL,),
    photos_token_label_published_ground_truth=(IMAGE_LABEL | PUBLISHED,),
    photos_token_label_mixtoken_ground_truth=(IMAGE_LABEL | MIXTOKEN,),
    photos_relabel_ground_truth=(IMAGE_LABEL | RELABEL,),
)
