"""Label every cell of every image with a teacher: images in, score maps (HDF5) out.

    densefeed label --data imagenet --teacher dm_nfnet_f6.dm_in1k \\
        --input-size 576 --top-k 5 --out maps.h5

--val-fraction 0.15 divides images that have no validation set: 15 % of each class are the split
val, which is not labeled unless --split val asks for it. Give train and pack the same fraction and
--val-seed.

Run the same command again to resume a killed run, or at the same time, anywhere that sees OUT, to
share the work. A process per GPU:

    torchrun --nproc-per-node 8 -m densefeed label ...

--dry-run labels a few batches, writes nothing, and prints the estimated cost of the whole pass. At
its end a pass prints the teacher's accuracy computed from the stored maps. If that is not close to
the teacher's own accuracy, do not train on the maps.

Each process labels shards of the images that no other one labels. If OUT ends in .h5, they lie in
OUT.shards until the file is made of them. Else OUT is a folder of shards with a manifest, which
every command takes like a file: when images were removed, added or repaired, only their shards are
labeled again. A process takes the shard of one that was killed, and keeps its rows.

    densefeed score-maps status maps

Machines that share no disk label --shard 0/4, ..., 3/4 into folders, which `densefeed score-maps
merge` joins.

OUT may be s3://BUCKET/FOLDER (or gs://, az://), with credentials in the environment. For training
such a store is copied:

    densefeed score-maps fetch s3://BUCKET/FOLDER maps

--engine ray starts a worker on every GPU of a Ray cluster.

The images may be those of a dataset of your own: --dataset package.module:factory in place of
--data, a function that is called without arguments and returns an object with len() and
(image, label) for [index], as those of torchvision, timm and Hugging Face. In Python,
densefeed.label takes the object itself.

The teacher is any timm model, a checkpoint, or a module of your own: --teacher
package.module:factory, a function that is called without arguments and returns a torch.nn.Module.
The module needs forward_token_logits (images [N, 3, H, W] to logits [N, K, h, w]), or
forward_features and forward_head as in timm; its attributes mean, std, interpolation, num_classes
and class_names are used. --teacher a --teacher b averages several.

--form compact takes 2.7 kB an image at 18 x 18 cells, raw 7.1 kB.
"""

if not __package__:
    import script_start  # noqa: F401

from densefeed.relabel.run import Labeling, run_labeling
from densefeed.system.errors import make_command


def main(labeling: Labeling) -> None:
    """Label the images, then print the accuracy of the stored maps."""
    run_labeling(labeling)


# Schedulers stop a job with SIGTERM; workers then give leases back.
command = make_command(main, Labeling, __doc__, sigterm=True)


if __name__ == "__main__":
    command()
