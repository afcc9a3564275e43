"""Token labels under DDP, computed in persistent worker processes.

torchrun --standalone --nproc-per-node 2 ddp_workers.py --data scenes --maps maps.h5
"""

import scenes
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, default_collate

import densefeed


class Label:
    """Collates samples and adds the targets of their crops; runs in a worker process."""

    def __init__(self, maps) -> None:
        self.labels = densefeed.open_score_maps(maps)

    def __call__(self, samples):
        image, _label, path, view = default_collate(samples)
        rules = densefeed.TargetRules(smoothing=0.1)
        return image, *self.labels.targets(path, view, [1, image.shape[-1] // 8], rules)


options = scenes.read_options(__doc__)
dist.init_process_group("gloo")
ranks = dist.get_world_size()
images = scenes.ViewedImages(options.data / "train", scenes.CROPS)
sampler = DistributedSampler(images, seed=options.seed, drop_last=True)
loader = DataLoader(
    images,
    options.batch // ranks,
    sampler=sampler,
    num_workers=options.workers,
    persistent_workers=options.workers > 0,
    collate_fn=Label(options.maps),
    drop_last=True,
)
student = scenes.make_student(len(images.classes))
network = DistributedDataParallel(student)
optimizer, schedule = scenes.make_optimizer(student, options.lr, options.epochs, len(loader))
for epoch in range(options.epochs):
    sampler.set_epoch(epoch)
    for image, whole, tokens in loader:
        output = network(image)
        loss = densefeed.sparse_loss(output.cls, whole)
        loss = loss + 0.5 * densefeed.sparse_loss(output.tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
if dist.get_rank() == 0:
    print(f"top-1 {100 * scenes.measure(student, options.data):.1f} %")
dist.destroy_process_group()
