"""Token labels in a plain PyTorch loop, with crops of torchvision.transforms.v2."""

import scenes
from torch.utils.data import DataLoader

import densefeed

options = scenes.read_options(__doc__)
images = scenes.ViewedImages(options.data / "train", scenes.CROPS)
loader = DataLoader(
    images, options.batch, shuffle=True, num_workers=options.workers, drop_last=True
)
model = scenes.make_student(len(images.classes))
optimizer, schedule = scenes.make_optimizer(model, options.lr, options.epochs, len(loader))
# The teacher's labels of every crop, without the teacher.
labels = densefeed.open_score_maps(options.maps)

for _ in range(options.epochs):
    for image, _label, path, view in loader:
        loss = scenes.dense_loss(model, labels, image, path, view)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
print(f"top-1 {100 * scenes.measure(model, options.data):.1f} %")
