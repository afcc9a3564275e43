"""Token labels with Hugging Face Accelerate: accelerate launch accelerate_loop.py ..."""

import scenes
from accelerate import Accelerator
from torch.utils.data import DataLoader

import densefeed

options = scenes.read_options(__doc__)
accelerator = Accelerator()
images = scenes.ViewedImages(options.data / "train", scenes.CROPS)
share = options.batch // accelerator.num_processes
loader = DataLoader(images, share, shuffle=True, num_workers=options.workers, drop_last=True)
model = scenes.make_student(len(images.classes))
steps = len(images) // options.batch
optimizer, schedule = scenes.make_optimizer(model, options.lr, options.epochs, steps)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
labels = densefeed.open_score_maps(options.maps)

for _ in range(options.epochs):
    for image, _label, path, view in loader:
        loss = scenes.dense_loss(model, labels, image, path, view)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
top1 = scenes.measure(accelerator.unwrap_model(model), options.data)
accelerator.print(f"top-1 {100 * top1:.1f} %")
