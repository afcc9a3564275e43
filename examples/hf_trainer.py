"""Token labels in the Trainer of Hugging Face transformers, with a student of timm's registry."""

import scenes
import torch
from torch import nn
from torch.utils.data import default_collate
from transformers import Trainer, TrainingArguments

import densefeed


class TokenLabeling(nn.Module):
    """Returns the loss on the labels of a store, as Trainer expects of a model."""

    def __init__(self, student: nn.Module, maps) -> None:
        super().__init__()
        self.student, self.labels = student, densefeed.open_score_maps(maps)

    def forward(self, image, path, view) -> dict[str, torch.Tensor]:
        return {"loss": scenes.dense_loss(self.student, self.labels, image, path, view)}


def collate(samples) -> dict:
    """Name the parts of a batch by the arguments of `forward`."""
    image, _label, path, view = default_collate(samples)
    return {"image": image, "path": path, "view": view}


options = scenes.read_options(__doc__)
images = scenes.ViewedImages(options.data / "train", scenes.CROPS)
student = scenes.make_student(len(images.classes))
steps = len(images) // options.batch
trainer = Trainer(
    TokenLabeling(student, options.maps),
    TrainingArguments(
        output_dir="hf_trainer",
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch,
        dataloader_num_workers=options.workers,
        dataloader_drop_last=True,
        # The columns of a dataset that `forward` does not name would be removed.
        remove_unused_columns=False,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=options.seed,
    ),
    data_collator=collate,
    train_dataset=images,
    optimizers=scenes.make_optimizer(student, options.lr, options.epochs, steps),
)
trainer.train()
print(f"top-1 {100 * scenes.measure(student, options.data):.1f} %")
