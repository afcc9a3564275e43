"""Files with the names of EfficientNet-PyTorch load into timm's EfficientNets.

The names are written again here, from timm's to that package's.
"""

import re

import pytest
import timm
import torch

from densefeed.models import checkpoints
from densefeed.models.checkpoints import CheckpointError
from densefeed.relabel.load_teacher import load_network
from densefeed.training.load_model import open_trained

# How a tensor of timm's model is called in the other layout, read off models of both packages:
# the stem, first and last blocks, one whose block number is not its index, and the head.
LITE0 = {
    "conv_stem.weight": "_conv_stem.weight",
    "bn1.running_var": "_bn0.running_var",
    "blocks.0.0.conv_dw.weight": "_blocks.0._depthwise_conv.weight",
    "blocks.0.0.bn1.bias": "_blocks.0._bn1.bias",
    "blocks.0.0.conv_pw.weight": "_blocks.0._project_conv.weight",
    "blocks.0.0.bn2.running_mean": "_blocks.0._bn2.running_mean",
    "blocks.1.0.conv_pw.weight": "_blocks.1._expand_conv.weight",
    "blocks.1.0.bn1.weight": "_blocks.1._bn0.weight",
    "blocks.1.1.conv_dw.weight": "_blocks.2._depthwise_conv.weight",
    "blocks.1.1.bn2.num_batches_tracked": "_blocks.2._bn1.num_batches_tracked",
    "blocks.3.0.conv_pwl.weight": "_blocks.5._project_conv.weight",
    "blocks.3.2.bn3.weight": "_blocks.7._bn2.weight",
    "blocks.6.0.bn3.bias": "_blocks.15._bn2.bias",
    "conv_head.weight": "_conv_head.weight",
    "bn2.running_mean": "_bn1.running_mean",
    "classifier.weight": "_fc.weight",
    "classifier.bias": "_fc.bias",
}
B0 = LITE0 | {
    "blocks.0.0.se.conv_reduce.weight": "_blocks.0._se_reduce.weight",
    "blocks.0.0.se.conv_expand.bias": "_blocks.0._se_expand.bias",
    "blocks.4.1.se.conv_reduce.bias": "_blocks.9._se_reduce.bias",
    "blocks.6.0.se.conv_expand.weight": "_blocks.15._se_expand.weight",
}
# Lite2 has 1, 3, 3, 4, 4, 5 and 1 blocks, b3 has 2, 3, 3, 5, 5, 6 and 2.
LITE2 = {"blocks.5.4.conv_pw.weight": "_blocks.19._expand_conv.weight"}
B3 = {
    "blocks.0.1.conv_pw.weight": "_blocks.1._project_conv.weight",
    "blocks.1.0.conv_pw.weight": "_blocks.2._expand_conv.weight",
    "blocks.6.1.se.conv_expand.weight": "_blocks.25._se_expand.weight",
}
TABLES = {
    "tf_efficientnet_lite0": LITE0,
    "tf_efficientnet_lite1": {"blocks.6.0.bn3.bias": "_blocks.20._bn2.bias"},
    "tf_efficientnet_lite2": LITE2,
    "tf_efficientnet_b0": B0,
    "tf_efficientnet_b3": B3,
}


def name_as_published(names):
    """Return the published name of each of timm's, which come in the order of the model."""
    numbers, found = {}, {}
    for name in names:
        if not name.startswith("blocks."):
            module, rest = name.split(".", 1)
            module = {"bn1": "_bn0", "bn2": "_bn1", "classifier": "_fc"}.get(module, f"_{module}")
            found[name] = f"{module}.{rest}"
            continue
        path, part, rest = re.fullmatch(r"(blocks\.\d+\.\d+)\.(.+)\.(\w+)", name).groups()
        number = numbers.setdefault(path, len(numbers))
        # Only blocks that expand have a third norm.
        if f"{path}.bn3.weight" in names:
            part = {"conv_pw": "expand_conv", "conv_pwl": "project_conv"}.get(part, part)
            part = re.sub(r"bn(\d)", lambda found: f"bn{int(found[1]) - 1}", part)
        part = {"conv_dw": "depthwise_conv", "conv_pw": "project_conv"}.get(part, part)
        part = part.replace("se.conv_", "se_")
        found[name] = f"_blocks.{number}._{part}.{rest}"
    return found


def build_random(name, classes=10):
    """Build a model all of whose tensors are random, running statistics too."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=classes).eval()
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            draw = torch.rand_like if key.endswith("running_var") else torch.randn_like
            tensor.add_(0.05 * draw(tensor))
        else:
            tensor.fill_(7)
    return model


def published_state(model):
    own = model.state_dict()
    names = name_as_published(list(own))
    assert len(set(names.values())) == len(own)
    return {names[name]: tensor for name, tensor in own.items()}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", TABLES)
def test_outside_files_of_efficientnet_pytorch_load_tensor_by_tensor(name, tmp_path):
    model = build_random(name)
    state = published_state(model)
    for ours, theirs in TABLES[name].items():
        assert torch.equal(state[theirs], model.state_dict()[ours])
    path = tmp_path / "weights.pth"
    # The form of PyTorch before 1.6, which such files have.
    torch.save(state, path, _use_new_zipfile_serialization=False)
    loaded = load_network(str(path), name, 32).model.eval()
    own = model.state_dict()
    assert loaded.state_dict().keys() == own.keys()
    for key, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, own[key]), key
    image = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded(image), model(image))


@pytest.mark.slow
def test_outside_wrapped_weights_without_counters_load_with_their_number_of_classes(tmp_path):
    model = build_random("tf_efficientnet_lite0", classes=3)
    state = {
        f"module.{name}": tensor
        for name, tensor in published_state(model).items()
        if "num_batches" not in name
    }
    raw = {name: tensor + 1 for name, tensor in state.items()}
    path = tmp_path / "weights.pth"
    torch.save({"model_ema": state, "state_dict": raw}, path)
    own = model.state_dict()
    for weights, more in (("ema", 0), ("raw", 1)):
        loaded = open_trained(path, weights, "tf_efficientnet_lite0", 32).model
        assert torch.equal(loaded.classifier.bias, own["classifier.bias"] + more)
        assert torch.equal(
            loaded.blocks[5][3].conv_dw.weight, own["blocks.5.3.conv_dw.weight"] + more
        )
    # A training begins with them; its head has other classes.
    new = timm.create_model("tf_efficientnet_lite0", num_classes=10)
    said = checkpoints.initialize(new, path)
    assert "new: classifier (3 classes in the file)" in said
    assert torch.equal(new.conv_head.weight, own["conv_head.weight"])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["tf_efficientnet_lite1", "resnet18", "tf_efficientnet_b0"])
def test_outside_a_file_of_another_efficientnet_is_refused(name, tmp_path):
    path = tmp_path / "weights.pth"
    torch.save(published_state(build_random("tf_efficientnet_lite0")), path)
    with pytest.raises(
        checkpoints.CheckpointError, match=f"does not fit the model {name}.* --model"
    ):
        checkpoints.build(path, name)
    # Nor does a larger model's file, whose last blocks have no place.
    torch.save(published_state(build_random("tf_efficientnet_lite2")), path)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        checkpoints.build(path, "tf_efficientnet_lite0")
