"""Train with an online teacher: it labels every crop in the step, in place of stored score maps.

    python -m benchmarks.online_teacher photos_token_label --objective online-token-label \
        --model lvvit_micro_fifth --size 480 --sizes 0 320 6 480 \
        --online-teacher densefeed.models.efficientnet_lite:lite2 --online-size 320 \
        --online-class-map photos/scenes/class_map.csv --data ... --val ... --out ...

It takes the options of densefeed train. The teacher sees the crop, here at 320 px, resized to
--online-size if that differs, and its top 5 classes of every cell are the labels, as those of a map
of the crop. `lvvit_micro_fifth` is lvvit_micro on the mean of 5 x 5 pixels: at 320 px it sees what
lvvit_micro sees at 64. Only this module knows it, so other commands import it first:

    python -c "import benchmarks.online_teacher; from densefeed.tools import validate;
    validate.command()" runs/online --data photos/scenes/held-out ...
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import register_model
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed import register_objective, train
from densefeed.objectives.base import Setting, StepContext
from densefeed.objectives.losses import token_labeling_loss
from densefeed.objectives.token_labeling import TokenLabeling
from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.relabel.class_map import read_class_map
from densefeed.relabel.load_teacher import load_network
from densefeed.relabel.network import Network
from densefeed.relabel.scoring import keep
from densefeed.system.errors import UserError
from densefeed.system.options import Count, Options

TOP_K = 5
# Side of the teacher's crop, over that of the student's.
TIMES = 5
# Mean and deviation by which the images of a student are normalized.
MEAN, STD = (torch.tensor(x).view(3, 1, 1) for x in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))


@dataclass(frozen=True, kw_only=True)
class OnlineOptions(Options):
    """Options of --objective online-token-label."""

    online_teacher: str = ""  # as densefeed label --teacher
    online_size: Count = 224  # side of the teacher's input, pixels
    online_class_map: Path | None = None  # as densefeed label --class-map


def label_crops(teacher: Network, pixels_NCHW: Tensor, batch: Batch) -> tuple[Batch, ScoreMapSpec]:
    """Return a batch whose maps are the teacher's of its crops, and how to read them.

    `pixels_NCHW` are the crops, 0 to 255. A crop is the image of its map.
    """
    size = teacher.input_size
    pixels = F.interpolate(pixels_NCHW, size, mode="bicubic", antialias=True).clamp(0, 255)
    logits_NSSK = teacher(pixels.permute(0, 2, 3, 1))
    kept, (count, side, _, num_classes) = keep(logits_NSSK, TOP_K), logits_NSSK.shape
    whole = torch.tensor([0.0, 0, 1, 1], device=pixels.device).expand(count, 4)
    batch = batch._replace(
        view=torch.eye(2, 3, device=pixels.device).expand(count, 2, 3),
        shown=whole,
        window=whole,
        map_logit=kept.logit,
        map_class=kept.cls.view(torch.uint16),
        map_lse=kept.lse,
        axis_aligned=True,
    )
    palette = min(num_classes, side * side * TOP_K)
    return batch, ScoreMapSpec(side, TOP_K, num_classes, "tail", palette, 1.0)


@register_objective
class OnlineTokenLabeling(TokenLabeling):
    """Token labeling whose dense labels a teacher computes in every step."""

    name, section, own = "online-token-label", "online", OnlineOptions
    needs_score_maps = False

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.teacher: Network | None = None

    def loss(self, output: Any, batch: Batch, step: StepContext) -> Tensor:
        targets = self.targets(*self.label(batch, step, output))
        weight = self.setting.options.token_labeling.token_weight
        return token_labeling_loss(output, *targets, weight)

    @torch.no_grad()
    def label(self, batch: Batch, step: StepContext, output: Any) -> tuple[Batch, StepContext]:
        """Return the batch with maps of its crops, and the step with how to read them."""
        if self.teacher is None:
            self.teacher = self.load_teacher(output[0].shape[-1]).to(batch.image.device)
        pixels = batch.image.float() * STD.to(batch.image) + MEAN.to(batch.image)
        labeled, spec = label_crops(self.teacher, 255 * pixels, batch)
        return labeled, step._replace(score_maps=spec)

    def load_teacher(self, num_classes: int) -> Network:
        """Load the teacher for the data's `num_classes`."""
        if not self.options.online_teacher:
            raise UserError("--online-teacher is missing; name one as in densefeed label")
        loaded = load_network(self.options.online_teacher, "", self.options.online_size)
        class_map, path = None, self.options.online_class_map
        if path:
            # Folders of classes are sorted by name.
            lines = path.read_text(encoding="utf-8").splitlines()[1:]
            names = sorted({line.partition(",")[2] for line in lines if line.partition(",")[2]})
            class_map = read_class_map(path, loaded.class_names, loaded.model.num_classes, names)
            if class_map.classes != num_classes:
                raise UserError(f"{path} maps to {class_map.classes} classes, not {num_classes}")
        name = self.options.online_teacher
        return Network(
            loaded.model, self.options.online_size, loaded.config, class_map, name
        ).eval()


class ReducedInput(nn.Module):
    """lvvit_micro on the mean of TIMES x TIMES pixels."""

    def __init__(self, img_size: int, kwargs: dict) -> None:
        super().__init__()
        self.net = timm.create_model("lvvit_micro", img_size=img_size // TIMES, **kwargs)
        self.patch_size, self.num_classes = TIMES * self.net.patch_size, self.net.num_classes
        self.pretrained_cfg = self.net.pretrained_cfg
        self.with_token_head = self.net.with_token_head

    def no_weight_decay(self) -> set[str]:
        return {f"net.{name}" for name in self.net.no_weight_decay()}

    def forward(self, image_NCHW: Tensor, **arguments: Tensor) -> Any:
        return self.net(F.avg_pool2d(image_NCHW, TIMES), **arguments)


@register_model
def lvvit_micro_fifth(pretrained: bool = False, img_size: int = 320, **kwargs: Any) -> nn.Module:
    """Build the model; arguments as of lvvit_micro."""
    unused = "pretrained_cfg", "pretrained_cfg_overlay"
    return ReducedInput(img_size, {key: kwargs[key] for key in kwargs if key not in unused})


if __name__ == "__main__":
    train.command()
