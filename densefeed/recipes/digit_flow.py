"""The flow on digit scenes, to the packed training and validation set."""

from dataclasses import dataclass
from pathlib import Path

from densefeed.recipes.flow import FlowOptions, run_step, train_model
from densefeed.system.options import Count, Integers

# The teacher's input when it labels: a scene's own size. At it, after training on crops that show
# digits 0.7 to 1.3 times as large, it recognizes both large and small digits.
TEACHER_SIZE = 96


@dataclass(frozen=True, kw_only=True)
class DigitOptions(FlowOptions):
    """The scenes and the trainings of a flow on digits."""

    # one whole flow per seed, each with its own scenes, teacher and students
    seeds: Integers = (0,)
    train: Count = 3000  # training scenes
    val: Count = 2000  # validation scenes; of 1000, chance alone scatters 90 % by 1 point


def prepare_data(out: Path, seed: int, options: DigitOptions) -> tuple[Path, Path]:
    """Make scenes, teacher, score maps and packed files; return the training and validation set."""
    scenes, teacher, maps = out / "scenes", out / "runs/teacher", out / "maps.h5"
    packed, val = out / "train.beton", out / "val.beton"
    run_step(
        scenes,
        "Compose scenes: one large handwritten digit, which is the image label, and small others",
        "scenes",
        out=scenes,
        train=options.train,
        val=options.val,
        seed=seed,
    )
    purpose = "Train the teacher, a CNN, on the image labels"
    data = {"loader": "folder", "data": scenes, "val": scenes}
    train_model(teacher, purpose, ("quickstart_teacher",), data, seed, options)
    run_step(
        maps,
        "Label every cell of every training image with the teacher: the score maps",
        "label",
        data=scenes,
        teacher=teacher,
        input_size=TEACHER_SIZE,
        top_k=5,
        out=maps,
    )
    purpose = "Pack the training images and their score maps into one file"
    run_step(packed, purpose, "pack", data=scenes, maps=maps, out=packed)
    run_step(val, "Pack the validation images", "pack", data=scenes, split="val", out=val)
    return packed, val
