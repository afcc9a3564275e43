"""Networks on the maps of a classifier's blocks, for decoders and detectors.

The maps are, of a pyramid as Swin, the outputs of all stages, each with a norm of its own (Swin,
section 4.3). Of a plain transformer they are outputs of four blocks, three apart, resampled to 4,
8, 16 and 16 pixels a cell as LV-ViT's segmentation does it: transposed convolution of 4 x 4 and of
2 x 2, nothing, and 2,048 channels, each with a convolution of 1 x 1, BatchNorm and ReLU.
"""

import inspect

import timm
from timm.models import load_pretrained, resolve_pretrained_cfg
from torch import Tensor, nn

# N images   K classes   D width   h, w cells

# Channels of the last map of a plain transformer; of a small one six times its width.
LAST = 2048


class MapNorm(nn.LayerNorm):
    """LayerNorm over the channels of maps `[N, D, h, w]`."""

    def forward(self, x_NDhw: Tensor) -> Tensor:
        return super().forward(x_NDhw.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def make_branch(width: int, channels: int, scale: float) -> nn.Sequential:
    """Make a branch that multiplies the sides of a plain transformer's map by `scale`."""
    layers = [nn.Conv2d(width, channels, 1), nn.BatchNorm2d(channels), nn.ReLU()]
    if scale > 1:
        larger = nn.ConvTranspose2d(width, width, scale, scale)
        layers = [larger, nn.BatchNorm2d(width), nn.ReLU(), *layers]
    elif scale < 1:
        layers.append(nn.MaxPool2d(round(1 / scale)))
    return nn.Sequential(*layers)


class OnBackbone(nn.Module):
    """Base of networks on the maps of a classifier's blocks, see the text above.

    Args:
        backbone: timm's name of a classifier with `forward_intermediates`, which gets `kwargs`.
        last: scale of the last map of a plain transformer.
        widest: its channels, at most; 0: those of the transformer.

    Attributes:
        channels, strides: of each map; strides in pixels a cell.
        plain: whether the backbone is a plain transformer.

    Raises AttributeError for a backbone without maps.
    """

    def __init__(self, backbone: str, last: float = 1, widest: int = LAST, **kwargs) -> None:
        super().__init__()
        # Its stages take maps of any size, padded to whole windows.
        strict = {"strict_img_size": False} if backbone.startswith("swin_") else {}
        self.backbone = timm.create_model(backbone, num_classes=0, **strict, **kwargs)
        # timm's config of an export states it.
        self.num_features, info = self.backbone.num_features, self.backbone.feature_info
        widths, reductions = ([layer[key] for layer in info] for key in ("num_chs", "reduction"))
        end, apart = len(info) - 1, max(1, min(3, len(info) // 4))
        self.plain = len(set(reductions)) == 1
        if self.plain:
            D, self.taken = widths[-1], list(range(end % apart, len(info), apart))[-4:]
            self.channels = [*[D] * (len(self.taken) - 1), min(widest, 6 * D) or D]
            # A smaller network has its finest maps too.
            scales = (4, 2, 1, last)[: len(self.taken)]
            self.strides = [reductions[-1] / scale for scale in scales]
            pairs = zip(self.channels, scales, strict=True)
            self.branches = nn.ModuleList(make_branch(D, C, scale) for C, scale in pairs)
        else:
            self.taken = list(range(len(info)))[-4:]
            self.channels = [widths[layer] for layer in self.taken]
            self.strides = [reductions[layer] for layer in self.taken]
            self.branches = nn.ModuleList(MapNorm(C) for C in self.channels)
        # Weights without a gradient would stop DistributedDataParallel.
        self.backbone.prune_intermediate_layers(self.taken, prune_norm=True, prune_head=True)

    def no_weight_decay(self) -> set[str]:
        """Return the backbone's exceptions, for timm's grouping."""
        own = getattr(self.backbone, "no_weight_decay", set)()
        return {f"backbone.{name}" for name in own}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Let the backbone recompute activations in the backward pass."""
        self.backbone.set_grad_checkpointing(enable)

    def make_maps(self, image_NCHW: Tensor) -> list[Tensor]:
        """Return the maps of images, from the finest to the coarsest."""
        maps = self.backbone.forward_intermediates(
            image_NCHW, indices=self.taken, intermediates_only=True
        )
        return [branch(x) for branch, x in zip(self.branches, maps, strict=True)]


def find_backbone(model: nn.Module) -> nn.Module:
    """Return the classifier in a network of segmentation or detection, or the model itself."""
    return model.backbone if isinstance(model, OnBackbone) else model


def init_convolution(module: nn.Module) -> None:
    """Initialize a convolution as OpenMMLab's modules do: normal, fan out; classifiers of 0.01."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    if isinstance(getattr(module, "classifier", None), nn.Conv2d):
        nn.init.normal_(module.classifier.weight, std=0.01)


def checkpoint_filter_fn(weights: dict[str, Tensor], model: OnBackbone) -> dict[str, Tensor]:
    """Return weights by the names of `model`; those of a classifier become its backbone's.

    Heads and final norm of the classifier are left out, and the decoder keeps its initial weights.
    """
    if any(name.startswith(("decoder.", "rpn.")) for name in weights):
        return weights
    backbone, heads = model.backbone, model.pretrained_cfg["classifier"]
    adapt = getattr(inspect.getmodule(type(backbone)), "checkpoint_filter_fn", None)
    taken = adapt(weights, backbone) if adapt else weights
    here = {name.partition(".")[0] for name in backbone.state_dict()}
    own = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith("backbone.") and name.rpartition(".")[0] not in heads
    }
    return own | {
        f"backbone.{name}": tensor
        for name, tensor in taken.items()
        if name.partition(".")[0] in here
    }


def build(
    model_class: type[OnBackbone],
    name: str,
    pretrained: bool = False,
    pretrained_cfg: dict | None = None,
    pretrained_cfg_overlay: dict | None = None,
    cache_dir: str | None = None,
    **kwargs,
) -> OnBackbone:
    """Build a registered network; timm passes the arguments before `kwargs` to all models.

    `pretrained` loads the weights of `pretrained_cfg`, as those of an exported folder. Raises
    RuntimeError if there are none. timm's own build_model_with_cfg would replace the configuration
    of the backbone where none is given, whose mean and standard deviation the network has.
    """
    model, source = model_class(**kwargs), pretrained_cfg_overlay or {}
    if pretrained or pretrained_cfg:
        source = resolve_pretrained_cfg(name, pretrained_cfg, pretrained_cfg_overlay).to_dict()
    if pretrained:
        load_pretrained(
            model,
            source,
            num_classes=model.num_classes,
            filter_fn=checkpoint_filter_fn,
            cache_dir=cache_dir,
        )
    model.pretrained_cfg |= source
    return model
