"""The Python API: ten lines train, in a loop of your own and in those of other libraries, with the
losses of train.py.
"""

import re
from ast import literal_eval
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import densefeed
from densefeed import sparse_targets
from densefeed.models.kernels import four_channels
from densefeed.models.wrapped_model import WrappedModel
from densefeed.objectives import OBJECTIVES
from densefeed.pipelines.augment.augmentation import Normalize
from densefeed.storage.images import Images
from densefeed.system.options import with_options
from densefeed.tools.pack_dataset import Packing
from densefeed.tools.pack_dataset import main as pack
from densefeed.training.config import Config

from .fixtures import photograph
from .pipelines.test_targets import dense_targets, densify
from .runs import default_dtype, step_for, train_loader
from .stores import write_store


@pytest.fixture
def loader(packed):
    with densefeed.open_loader(str(packed[0]), batch=4, size=32, seed=0, threads=1) as loader:
        yield loader


def make_model(loader, **options):
    torch.manual_seed(0)
    classes = loader.num_classes
    return timm.create_model("lvvit_micro", num_classes=classes, token_head=True, **options)


def train(model, step, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for epoch in range(epochs):
        for batch in step.batches(epoch):
            loss = step(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_importing_the_package_registers_its_models_and_exports_few_names(command):
    code = "import densefeed, timm; print(timm.is_model('lvvit_s'), timm.is_model('cvt_13'))"
    done = command("-c", code)
    assert done.stdout == "True True\n", done.stderr
    assert len(densefeed.__all__) <= 27
    assert all(hasattr(densefeed, name) for name in densefeed.__all__)


@pytest.mark.parametrize("mixing", [dict(mixtoken=True), dict(cutmix=1.0, mixup=0.8), {}])
def test_losses_are_those_of_train_py(loader, packed, mixing):
    """Every batch of an epoch to the bit, with augmentation; drop-path is off.

    So are those of batches that the loader gave, which a trainer moves by itself.
    """
    options = dict(rand_augment="rand-m9-mstd0.5-inc1", erase_probability=0.25) | mixing
    model = make_model(loader, img_size=32).train()
    step = densefeed.build_step(loader, model, **options)
    ours = [step(model, batch).item() for batch in step.batches(1)]
    assert [step(model, batch).item() for batch in loader.batches(1)] == ours
    config = with_options(
        Config(),
        data=packed[0],
        val=packed[1],
        out=Path("none"),
        loader="ffcv",
        size=32,
        batch=4,
        microbatch=4,
        threads=1,
        compile="never",
        **{"mixtoken": False, **options},
    )
    other = train_loader(config)
    twin = make_model(loader, img_size=32).train()
    theirs = step_for(config, other, twin)
    assert [theirs.losses(twin, batch)[0]().item() for batch in theirs.batches(1)] == ours
    other.close()


@pytest.mark.parametrize("mixing", [dict(mixtoken=True), dict(cutmix=1.0, mixup=0.8)])
def test_outside_a_default_dtype_of_64_bits_changes_no_loss(loader, mixing):
    """A network of float32 in a script that calls torch.set_default_dtype, to the bit."""
    model, losses = make_model(loader, img_size=32).train(), []
    augment = dict(rand_augment="rand-m9-mstd0.5-inc1", erase_probability=0.25)
    for dtype in (torch.float32, torch.float64):
        with default_dtype(dtype):
            step = densefeed.build_step(loader, model, **augment | mixing)
            losses.append([step(model, batch) for batch in step.batches(1)])
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0)


@pytest.mark.parametrize("objective", ["token-label", "relabel", "ce"])
def test_a_loop_of_ones_own_learns(loader, objective):
    model = make_model(loader)
    if objective != "token-label":
        model = timm.create_model("test_resnet", num_classes=loader.num_classes)
    losses = train(model, densefeed.build_step(loader, model, objective), epochs=6)
    assert sum(losses[-3:]) < sum(losses[:3])


def test_image_labels_are_those_of_the_loader(loader):
    model = timm.create_model("resnet10t", num_classes=loader.num_classes)
    step = densefeed.build_step(loader, model, "ce", smoothing=0.0)
    batch = next(loader.batches(0))
    normalize = Normalize(model.pretrained_cfg["mean"], model.pretrained_cfg["std"])
    want = torch.nn.functional.cross_entropy(model(normalize(batch.image)), batch.label)
    torch.testing.assert_close(step(model, batch), want)


def test_autocast_is_that_of_the_step_or_of_the_caller(loader):
    """With MixUp images stay float32 in both, so the losses are equal."""
    model, options = make_model(loader), dict(mixup=0.8, cutmix=1.0)
    plain = densefeed.build_step(loader, model, **options)
    own = densefeed.build_step(loader, model, dtype=torch.bfloat16, **options)
    batch = next(plain.batches(0))
    with torch.autocast("cpu", torch.bfloat16):
        around = plain(model, batch).item()
    assert own(model, batch).item() == around != plain(model, batch).item()
    bare = densefeed.build_step(loader, model, dtype=torch.bfloat16)
    assert next(bare.batches(0)).image.dtype == torch.bfloat16


@pytest.mark.parametrize("mixing", [dict(mixtoken=True), dict(cutmix=1.0, mixup=0.8)])
def test_outside_a_network_that_asks_for_four_channels_gets_them(loader, mixing):
    """Its losses are those with three, and in evaluation it takes three."""
    losses, logits = [], []
    for channels in (3, 4):
        model = make_model(loader, img_size=32).train()
        if channels == 4:
            four_channels.use(model)
        step = densefeed.build_step(loader, model, rand_augment="rand-m9-inc1", **mixing)
        batches = list(step.batches(0))
        assert {batch.image.shape[1] for batch in batches} == {channels}
        losses.append([step(model, batch).item() for batch in batches])
        logits.append(model.eval()(torch.ones(1, 3, 32, 32)))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(*logits)


def test_outside_four_channels_for_some_networks_of_a_training_are_refused(loader):
    pair = WrappedModel()
    pair.first, pair.second = make_model(loader), make_model(loader)
    pair.networks = pair.first, pair.second
    four_channels.use(pair.first)
    with pytest.raises(densefeed.UserError, match="leave four-channels out of DENSEFEED_LEVERS"):
        densefeed.build_step(loader, pair, objective="relabel")
    four_channels.use(pair.second)
    densefeed.build_step(loader, pair, objective="relabel")


def test_the_generator_of_torch_is_left_as_it_is(loader):
    model = make_model(loader)
    step = densefeed.build_step(loader, model)
    before = torch.get_rng_state()
    step(model, next(step.batches(0)))
    assert torch.equal(torch.get_rng_state(), before)


def test_images_are_augmented_before_the_crop_in_batches_of_the_step(loader):
    model = make_model(loader)
    options = dict(rand_augment="rand-m9-mstd0.5-inc1-p1", augment_before_crop=True)
    step = densefeed.build_step(loader, model, **options)
    plain = next(densefeed.build_step(loader, model).batches(0))
    assert not torch.equal(next(step.batches(0)).image, plain.image)
    with pytest.raises(densefeed.UserError, match="take batches from the step, not from the"):
        step(model, next(loader.batches(0)))


def test_inside_accelerate(loader):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = make_model(loader)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    step = densefeed.build_step(loader, model, mixtoken=True)
    for batch in step.batches(0):
        loss = step(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert loss.isfinite()


def test_inside_lightning(loader, tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = make_model(loader), []
            self.step_of = densefeed.build_step(loader, self.model, mixtoken=True)

        def training_step(self, batch, _):
            loss = self.step_of(self.model, batch)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)

    module = Module()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, loader)
    assert len(module.losses) == 2 * len(loader)


def test_outside_a_loader_takes_its_rank_from_the_process_group(packed, tmp_path, command):
    """The two ranks share the images. A loader of before the group is refused, one with ranks not.

    11 images, so the last of three batches has one image of padding.
    """
    (tmp_path / "program.py").write_text(
        """
import os
import sys
import densefeed
import torch.distributed as dist

rank = int(os.fork() == 0)
how = dict(batch=4, size=32, threads=1, train=False)
early = densefeed.open_loader(sys.argv[1], **how)
whole = densefeed.open_loader(sys.argv[1], rank=0, ranks=1, **how)
dist.init_process_group("gloo", f"file://{sys.argv[2]}", rank=rank, world_size=2)
shared = densefeed.open_loader(sys.argv[1], **how)
for loader in early, whole, shared:
    try:
        ids = [n for batch in loader for n in batch.index[batch.weight > 0].tolist()]
    except densefeed.UserError as error:
        ids = str(error).split("; ")
    os.write(1, f"rank {dist.get_rank()} {ids}\\n".encode())
# One that leaves early takes its connection from another that is still at init_process_group.
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    )
    done = command(tmp_path / "program.py", packed[0], tmp_path / "group")
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    whole = list(range(11))
    refusal = [
        f"{packed[0]} was opened for 1 rank and torch.distributed has 2, each of which would get "
        "the same batches",
        "open the loader where the process group exists (with Lightning in the hooks "
        "train_dataloader and val_dataloader), or pass rank and ranks to open_loader",
    ]
    shares = [0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10]
    want = [f"rank {rank} {ids}" for rank in (0, 1) for ids in (refusal, whole, shares[rank])]
    assert lines == sorted(want)


@pytest.mark.slow
def test_outside_lightning_with_ddp_shares_the_batches(packed, tmp_path, command):
    """A loader of the hook is shared by the ranks; one of before fit is refused."""
    pytest.importorskip("lightning.pytorch")
    (tmp_path / "program.py").write_text(
        """
import sys
import densefeed
import lightning.pytorch as lightning
import torch

def open_loader():
    return densefeed.open_loader(sys.argv[1], batch=4, size=32, threads=1, hflip=0.0)

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.ids = torch.nn.Linear(1, 1), []

    def training_step(self, batch, _):
        self.ids += batch.index[batch.weight > 0].tolist()
        return self.layer(batch.weight[:, None]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Hooked(Module):
    def train_dataloader(self):
        return open_loader()

off = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
how = dict(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", **off)
for module, loaders in (Hooked(), ()), (Module(), (open_loader(),)):
    trainer = lightning.Trainer(default_root_dir=sys.argv[2], **how)
    try:
        trainer.fit(module, *loaders)
    except densefeed.UserError:
        module.ids.append("refused")
    sys.stdout.write(f"rank {trainer.global_rank}: {module.ids}\\n")
"""
    )
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2
    environment = {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    words = tmp_path / "program.py", packed[0], tmp_path
    done = command(*launcher, *words, environment=environment, descendants=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("rank")]
    ids = [literal_eval(line.split(": ")[1]) for line in lines]
    assert ids.count(["refused"]) == 2
    assert sorted(n for own in ids for n in own if n != "refused") == list(range(11))


def test_models_can_be_imported_by_name_as_those_of_timm():
    from densefeed.models import cvt, dhvt, lvvit

    for module in (cvt, dhvt, lvvit):
        assert all(callable(getattr(module, name)) for name in module.__all__)
    assert lvvit.lvvit_micro(num_classes=3).num_classes == 3


def test_losses_of_two_ranks_have_the_loss_of_one_as_their_mean(packed, loader):
    """Without a token head nothing is computed across images, so only rounding differs."""
    model = timm.create_model("test_vit", img_size=32, num_classes=loader.num_classes).eval()
    how = dict(batch=8, size=32, seed=0, threads=1)
    means = []
    for ranks in (1, 2):
        losses = []
        for rank in range(ranks):
            with densefeed.open_loader(packed[0], rank=rank, ranks=ranks, **how) as rows:
                step = densefeed.build_step(rows, model, "ce")
                losses.append([step(model, batch).item() for batch in step.batches(0)])
        means.append([sum(parts) / ranks for parts in zip(*losses, strict=True)])
    # 11 images: the last batch has three, so one rank has only one or none of them.
    assert len(means[0]) == 2
    assert means[0] == pytest.approx(means[1], rel=1e-6)


def test_a_wrapped_model_gives_the_same_loss(loader):
    class Wrapped(torch.nn.Module):
        """Hides the model's attributes, as DistributedDataParallel does."""

        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *inputs, **options):
            return self.module(*inputs, **options)

    model = make_model(loader)
    step = densefeed.build_step(loader, model, mixtoken=True)
    batch = next(step.batches(0))
    wrapped = Wrapped(model)
    assert step(wrapped, batch).item() == step(model, batch).item()
    other = densefeed.build_step(loader, wrapped, mixtoken=True)
    assert other(wrapped, batch).item() == step(model, batch).item()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(geometry="publshed"), "--geometry 'publshed' is unknown; choose one of aligned"),
        (dict(outside="x"), "--outside 'x' is unknown"),
        (dict(smoothing="0.1"), "--smoothing is '0.1', and must be a number"),
        (dict(rand_augment=9), "--rand-augment is 9, and must be text"),
        (dict(rand_augment="foo"), "--rand-augment 'foo' is not a RandAugment string"),
        (dict(token_weight=True), "--token-weight is True, and must be a number"),
        (dict(shift_border="black"), "--shift-border has no effect without --shift"),
    ],
)
def test_misspelled_words_are_refused(loader, options, message):
    with pytest.raises(densefeed.UserError, match=re.escape(message)):
        densefeed.build_step(loader, make_model(loader), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(batch="4"), "batch is '4', and must be a whole number"),
        (dict(batch=True), "batch is True, and must be a whole number"),
        (dict(size=True), "--size is True, and must be a whole number"),
        (dict(hflip=True), "--hflip is True, and must be a number"),
        (dict(crop_scale=(True, True)), "--crop-scale is (True, True), and must be of type tuple"),
        (dict(train="no"), "train is 'no', and must be True or False"),
        (dict(batch=4.0), "batch is 4.0, and must be a whole number"),
        (dict(size=32.5), "--size is 32.5, and must be a whole number"),
        (dict(seed=-1), "seed is -1 and must be from 0"),
        (dict(hflip="yes"), "--hflip is 'yes', and must be a number"),
        (dict(crop_scale=0.5), "--crop-scale is 0.5, and must be of type tuple[float, float]"),
        (dict(crop_scale=(0.5, "1")), "--crop-scale is (0.5, '1'), and must be of type tuple"),
        (dict(sizes=((0, 32), (1,))), "--sizes is ((0, 32), (1,)), and must be of type tuple"),
    ],
)
def test_loaders_refuse_values_of_another_type(packed, options, message):
    with pytest.raises(densefeed.UserError, match=re.escape(message)):
        densefeed.open_loader(packed[0], **(dict(batch=4, size=32, threads=1) | options))


def test_outside_a_dataset_of_ones_own_is_refused_with_the_page():
    with pytest.raises(
        densefeed.UserError, match=r"item 0 of the dataset list has an image of type int; "
    ):
        densefeed.open_loader([1, 2], batch=2)


def test_loaders_take_the_numbers_of_numpy_and_lists(packed):
    options = dict(batch=np.int64(4), size=np.int32(32), hflip=np.float32(0.5))
    options |= dict(crop_scale=np.array([0.25, 1]), sizes=[(0, np.int64(32))])
    with densefeed.open_loader(packed[0], threads=1, **options) as loader:
        assert next(loader.batches(0)).image.shape == (4, 32, 32, 3)
        config = with_options(Config(data=loader.data), val=packed[1], out=Path("out"))
    # As JSON and a checkpoint hold it.
    assert Config.from_dict(config.to_dict()) == config
    assert (config.data.crop_scale, config.data.sizes) == ((0.25, 1.0), ((0, 32),))


@pytest.mark.parametrize("value", [torch.zeros(3), 3, [1], "x", None])
def test_a_config_that_is_no_config_is_one_error(value):
    """A checkpoint may have tensors anywhere."""
    sound = Config().to_dict()
    for values in (value, sound | {"data": value}):
        with pytest.raises(densefeed.UserError, match=r"^this config "):
            Config.from_dict(values)


@pytest.mark.parametrize("value", [torch.zeros(3), 3, [1], "\0"])
def test_a_path_of_a_config_is_a_text(value):
    sound = Config().to_dict()
    with pytest.raises(densefeed.UserError, match=r"^this config was written by another version"):
        Config.from_dict(sound | {"data": sound["data"] | {"val": value}})


def test_outside_the_config_of_a_run_without_a_method_of_ones_own_has_its_defaults():
    """It was trained before, or beside, the file that registers the method."""
    before = Config().to_dict()
    before["run"]["out"] = "runs/x"
    added = dict(before["objective"])
    del added["drloc"]
    assert Config.from_dict(before | {"objective": added}) == Config.from_dict(before)


@pytest.mark.parametrize("absent", ["tail", "zero-logit"])
def test_labels_of_two_hundred_crops_are_those_of_float64(random_maps, tmp_path, absent):
    """From a packed file, through the loader: torchvision's RoIAlign of the stored maps."""
    K, grid, rng = 6, 4, np.random.default_rng(0)
    for number in range(2 * K):
        path = tmp_path / f"images/train/c{number % K}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photograph(rng, *rng.integers(40, 120, 2).tolist()).save(path)
    images = Images(tmp_path / "images", split="train")
    maps = random_maps(len(images), 9, 3, K)
    store = write_store(tmp_path / "maps.h5", images, maps, K, absent=absent)
    pack(Packing(data=tmp_path / "images", maps=store, out=tmp_path / "train.beton"))
    sizes = np.array([Image.open(tmp_path / "images/train" / path).size for path in images.paths])
    checked = 0
    options = dict(batch=8, size=64, threads=1, repeats=2, crop_scale=(0.05, 1.0))
    with densefeed.open_loader(tmp_path / "train.beton", **options) as loader:
        for epoch in range(9):
            for batch in loader.batches(epoch):
                found = densify(sparse_targets(batch, loader.score_maps, grid), K)
                index, repeat = batch.index.numpy(), batch.repeat.numpy()
                width, height = sizes[index].T
                boxes, flips = loader.plan.crops(epoch, index, height, width, repeat)
                for n in range(len(index)):
                    one = maps.select(index[n : n + 1])
                    size = int(height[n]), int(width[n])
                    want = dense_targets(
                        one, boxes[n : n + 1], flips[n : n + 1], K, grid, absent, 0.0, *size
                    )
                    torch.testing.assert_close(found[n].double(), want[0], rtol=0, atol=1e-5)
                    checked += 1
    assert checked >= 200


def test_outside_maps_of_other_classes_are_warned_of(folder, random_maps, tmp_path, capsys):
    """The first batch shows that they seldom name the image label."""
    images = Images(folder, split="train")
    scores = random_maps(len(images), 6, 2, 2)
    for right, label in ((True, images.labels), (False, 1 - images.labels)):
        cls = np.stack([label, 1 - label], -1).astype(np.uint16)[:, None, None]
        known = scores._replace(
            logit=np.broadcast_to(np.float16([4, 0]), scores.logit.shape).copy(),
            cls=np.broadcast_to(cls, scores.cls.shape).copy(),
            lse=np.full_like(scores.lse, np.log(np.exp(4) + 1)),
        )
        store = write_store(tmp_path / f"{right}.h5", images, known, 2)
        with densefeed.open_loader(
            folder, batch=44, repeats=4, size=32, threads=1, score_maps=store
        ) as loader:
            step = densefeed.build_step(loader, make_model(loader))
            next(step.batches(0))
        told = capsys.readouterr().err
        assert ("name the image label in 0 % of the first crops" in told) != right


def test_models_and_batches_are_checked_in_every_call(loader, packed):
    model, batch = make_model(loader), next(iter(loader))
    step = densefeed.build_step(loader, model)
    step(model, batch)
    with pytest.raises(densefeed.UserError, match=r"call model\.train"):
        step(model.eval(), batch)
    with pytest.raises(densefeed.UserError, match="the batch has no score maps"):
        step(model.train(), batch._replace(map_class=None))


@pytest.mark.parametrize("name", ["data", "val", "maps_on_device", "no_such"])
def test_loaders_refuse_options_that_they_do_not_read(packed, name):
    with pytest.raises(TypeError, match=f"no option '{name}'"):
        densefeed.open_loader(packed[0], batch=4, **{name: True})


@pytest.mark.parametrize(("epoch", "start"), [(-1, 0), (0, -1), (0, 10**6)])
def test_epochs_and_batches_count_from_0(loader, epoch, start):
    with pytest.raises(ValueError, match=f"epoch {epoch} from batch {start}: both count from 0"):
        loader.batches(epoch, start)


@pytest.mark.parametrize("place", [(1.5,), (0, "1"), (None,)])
def test_epochs_and_batches_are_whole_numbers(loader, place):
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        loader.batches(*place)


def test_a_validation_set_takes_no_score_maps(packed):
    with pytest.raises(TypeError, match="score_maps with train=True only"):
        densefeed.open_loader(packed[1], batch=4, train=False, score_maps="maps.h5")


def test_a_step_takes_the_loaders_of_open_loader(loader):
    with pytest.raises(TypeError, match="the loader is a DataLoader; give one of open_loader"):
        densefeed.build_step(torch.utils.data.DataLoader([1]), torch.nn.Linear(1, 1), "ce")


@pytest.mark.parametrize(
    "known",
    [
        *({}, None, 5, {"mean": (0.5,) * 3}, {"mean": 0.5, "std": 0.5}),
        {"mean": (0.5,), "std": (1,)},
        {"mean": ("a", "b", "c"), "std": (1, 1, 1)},
        {"mean": (float("nan"), 0, 0), "std": (1, 1, 1)},
        {"mean": (0, 0, 0), "std": (0.2, 0.2, 0)},
        # Mean and deviation of pixels from 0 to 255.
        {"mean": (124, 117, 104), "std": (58, 57, 57)},
    ],
)
def test_mean_and_deviation_are_three_numbers_each(loader, known):
    model = timm.create_model("resnet10t", num_classes=loader.num_classes)
    model.pretrained_cfg = known
    with pytest.raises(densefeed.UserError, match="does not say how its input is normalized"):
        densefeed.build_step(loader, model, "ce")


@pytest.mark.parametrize("name", ["lr", "size", "drop_path", "device"])
def test_options_that_no_step_reads_are_refused(loader, name):
    with pytest.raises(TypeError, match=name):
        densefeed.build_step(loader, make_model(loader), **{name: 3})


def test_models_that_do_not_fit_are_refused(loader):
    for objective, model, message in (
        ("ce", make_model(loader), "has a token head"),
        (
            "token-label",
            timm.create_model("resnet10t"),
            "has no token head; create an lvvit, .* or take the objective relabel",
        ),
        ("relabel", timm.create_model("resnet10t", num_classes=7), "has 7 classes"),
        ("relabel", torch.nn.Linear(1, 2), "Linear does not say how its input is norm"),
    ):
        with pytest.raises(densefeed.UserError, match=message):
            densefeed.build_step(loader, model, objective)
    cnn = timm.create_model("resnet10t", num_classes=loader.num_classes)
    with pytest.raises(densefeed.UserError, match="ResNet cannot exchange tokens"):
        densefeed.build_step(loader, cnn, "relabel", mixtoken=True)


def test_an_objective_of_ones_own_is_a_loss(loader, monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class FactorOptions(densefeed.Options):
        factor: float = 1.0

    class Scaled(densefeed.Objective):
        name = "scaled"
        own = FactorOptions
        # A step has no section `model`, and a run's option of it is not one of the step's.
        unused: ClassVar = {"drop_path": "--objective token-label"}

        def loss(self, output, batch, step):
            loss = torch.nn.functional.cross_entropy(output, batch.label)
            return self.options.factor * loss

    monkeypatch.setitem(OBJECTIVES, "scaled", Scaled)
    model = timm.create_model("resnet10t", num_classes=loader.num_classes).eval()
    batch = next(loader.batches(0))
    once, thrice, plain = (
        densefeed.build_step(loader, model, *words, **options)(model, batch).item()
        for words, options in (
            (("scaled",), {}),
            (("scaled",), dict(factor=3.0)),
            (("ce",), dict(smoothing=0)),
        )
    )
    assert (once, thrice) == pytest.approx((plain, 3 * plain), rel=1e-5)
    with pytest.raises(ValueError, match="there is an objective 'scaled' already"):
        densefeed.register_objective(Scaled)


def test_a_validation_set_gives_each_image_once(packed):
    with densefeed.open_loader(packed[1], batch=3, size=32, train=False, threads=1) as loader:
        batches = list(loader.batches(0))
    assert loader.score_maps is None
    index = torch.cat([batch.index[batch.weight > 0] for batch in batches])
    assert index.tolist() == list(range(5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_losses(loader):
    losses = []
    for device in ("cpu", "cuda"):
        model = make_model(loader).to(device)
        step = densefeed.build_step(loader, model, mixtoken=True)
        losses.append([step(model, batch).item() for batch in step.batches(0)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_what_does_not_fit_is_refused(loader, packed):
    model = make_model(loader)
    bare = densefeed.open_loader(packed[1], batch=4, size=32)
    with pytest.raises(densefeed.UserError, match="has no score maps, which token-label needs"):
        densefeed.build_step(bare, model)
    bare.close()
    with pytest.raises(densefeed.UserError, match="MixToken already exchanges a box"):
        densefeed.build_step(loader, model, mixtoken=True, cutmix=1.0)
    with pytest.raises(TypeError, match="no option 'no_such'"):
        densefeed.build_step(loader, model, no_such=1)
    with pytest.raises(densefeed.UserError, match="--objective foo is unknown; choose one of ce,"):
        densefeed.build_step(loader, model, "foo")
    with pytest.raises(densefeed.UserError, match="--drloc l1 trains modules beside the"):
        densefeed.build_step(loader, model, drloc="l1")
