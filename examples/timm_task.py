"""Token labels as a training task of timm, in place of its distillation with an online teacher."""

import scenes
import torch
from timm.task import TrainingTask
from torch.utils.data import DataLoader

import densefeed


class DenseLabelTask(TrainingTask):
    """As timm's TokenDistillationTask, but the teacher has labeled the images before.

    A target is the paths and the views of a batch. The result has the `loss`, which is all that a
    task must return.
    """

    def __init__(self, model: torch.nn.Module, maps, **how) -> None:
        super().__init__(**how)
        self.trainable_module, self.labels = model, densefeed.open_score_maps(maps)

    def forward(self, input: torch.Tensor, target) -> dict[str, torch.Tensor]:
        path, view = target
        loss = scenes.dense_loss(self.trainable_module, self.labels, input, path, view)
        return {"loss": loss}


options = scenes.read_options(__doc__)
images = scenes.ViewedImages(options.data / "train", scenes.CROPS)
loader = DataLoader(
    images, options.batch, shuffle=True, num_workers=options.workers, drop_last=True
)
student = scenes.make_student(len(images.classes))
task = DenseLabelTask(student, options.maps)
optimizer, schedule = scenes.make_optimizer(student, options.lr, options.epochs, len(loader))
for _ in range(options.epochs):
    for image, _label, *target in loader:
        task(image, target)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
print(f"top-1 {100 * scenes.measure(student, options.data):.1f} %")
