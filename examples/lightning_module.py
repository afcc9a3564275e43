"""Token labels in a LightningModule."""

import lightning
import scenes
import torch
from torch.utils.data import DataLoader

import densefeed


class TokenLabeling(lightning.LightningModule):
    """Trains a model with a token head on the maps of a store."""

    def __init__(self, model, maps, lr: float, epochs: int, steps: int) -> None:
        super().__init__()
        self.model, self.schedule = model, (lr, epochs, steps)
        self.labels = densefeed.open_score_maps(maps)

    def training_step(self, batch, _number) -> torch.Tensor:
        image, _label, path, view = batch
        return scenes.dense_loss(self.model, self.labels, image, path, view)

    def configure_optimizers(self):
        optimizer, schedule = scenes.make_optimizer(self.model, *self.schedule)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


options = scenes.read_options(__doc__)
images = scenes.ViewedImages(options.data / "train", scenes.CROPS)
loader = DataLoader(
    images, options.batch, shuffle=True, num_workers=options.workers, drop_last=True
)
student = scenes.make_student(len(images.classes))
module = TokenLabeling(student, options.maps, options.lr, options.epochs, len(loader))
trainer = lightning.Trainer(
    max_epochs=options.epochs,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, loader)
print(f"top-1 {100 * scenes.measure(module.model, options.data):.1f} %")
