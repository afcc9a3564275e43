"""Layers of compiled regions on a GPU, with fewer launches for casts and sums.

Under autocast every layer casts its weight, and its gradient back: 11 launches for a block of
LV-ViT. Here one foreach operation casts all weights, and a product writes the gradient of a weight
in float32. The gradient of a bias is a sum over all rows, which takes two kernels; here it is
summed over the tokens of each image, together with what computes it, and over images at the end
for all biases together.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.models.lvvit import PatchProjection, flatten_kernel, multiply_patches

# R rows of the input   I inputs   O outputs   N images


def float32_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two matrices of 16 bits in float32, the dtype that it is summed in."""
    # Only CUDA has products with an output of another dtype.
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


class LinearProduct(torch.autograd.Function):
    """`F.linear` with copies of the weight and the bias; the originals get float32 gradients.

    With `bias_NO` the gradient of the bias is that tensor's: sums of each image.
    """

    @staticmethod
    def forward(ctx, x, weight_OI, bias_O, low_weight_OI, low_bias_O, bias_NO):
        ctx.save_for_backward(x, low_weight_OI)
        ctx.images = None if bias_NO is None else len(bias_NO)
        return F.linear(x, low_weight_OI, low_bias_O)

    @staticmethod
    def backward(ctx, grad):
        x, low_weight_OI = ctx.saved_tensors
        grad_RO, x_RI = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grads = [None] * 6
        if ctx.needs_input_grad[0]:
            grads[0] = grad @ low_weight_OI
        if ctx.needs_input_grad[1]:
            grads[1] = float32_product(grad_RO.T, x_RI)
        if ctx.needs_input_grad[2]:
            grads[2] = grad_RO.sum(0, dtype=torch.float32)
        if ctx.needs_input_grad[5]:
            # One kernel, which inductor fuses with what makes the gradient. The sum over all rows
            # would be two, and read the gradient again.
            grad_NTO = grad_RO.unflatten(0, (ctx.images, -1))
            grads[5] = grad_NTO.sum(1, dtype=torch.float32)
        return tuple(grads)


class ImageSums(torch.autograd.Function):
    """Expand vectors to a row per image; sum the gradients of all of them in one pass."""

    @staticmethod
    def forward(ctx, images, *vectors):
        ctx.set_materialize_grads(False)
        return tuple(vector.expand(images, -1) for vector in vectors)

    @staticmethod
    def backward(ctx, *grads):
        given = [grad for grad in grads if grad is not None]
        if not given:
            return None, *grads
        sums = torch.cat(given, 1).sum(0).split([grad.shape[1] for grad in given])
        rest = iter(sums)
        return None, *(None if grad is None else next(rest) for grad in grads)


class LayerNormSums(torch.autograd.Function):
    """`F.layer_norm` whose gradients of weight and bias are sums of each image, for `[N, T, D]`."""

    @staticmethod
    def forward(ctx, x_NTD, weight_D, bias_D, eps, weight_ND, bias_ND):
        out, mean_NT1, rstd_NT1 = torch.native_layer_norm(
            x_NTD, x_NTD.shape[-1:], weight_D, bias_D, eps
        )
        ctx.save_for_backward(x_NTD, mean_NT1, rstd_NT1, weight_D, bias_D)
        return out

    @staticmethod
    def backward(ctx, grad_NTD):
        x_NTD, mean_NT1, rstd_NT1, weight_D, bias_D = ctx.saved_tensors
        grad_x, *_ = torch.ops.aten.native_layer_norm_backward(
            grad_NTD,
            x_NTD,
            x_NTD.shape[-1:],
            mean_NT1,
            rstd_NT1,
            weight_D,
            bias_D,
            [True, False, False],
        )
        # Not (x - mean) rstd, which inductor would recognize in the kernel of grad_x, write there
        # and read here: 154 MB for a block of LV-ViT-S and 256 images. So it moves as many bytes as
        # inductor's own form, in two launches instead of four.
        normal_NTD = x_NTD * rstd_NT1 - mean_NT1 * rstd_NT1
        sums = (grad_NTD * normal_NTD).sum(1), grad_NTD.sum(1)
        return grad_x, None, None, None, *sums


class WithCopies(nn.Module):
    """Base of layers that take the place of a layer `of` and compute with copies of its parameters.

    Copies are not buffers, and in no state dict. They are not copied with the layer, since nothing
    would update those.
    """

    COPIES = ("low_weight", "low_bias", "image_weight", "image_bias")

    def __init__(self, of: nn.Module) -> None:
        vars(self).update(vars(of))
        self.forget()

    def forget(self) -> None:
        """Compute without copies, until there are others."""
        vars(self).update(dict.fromkeys(self.COPIES))

    def __getstate__(self) -> dict:
        return {name: None if name in self.COPIES else v for name, v in vars(self).items()}


class MixedLinear(WithCopies, nn.Linear):
    """A linear layer that computes with the copies of `WeightCopies`, where there are any."""

    def forward(self, x: Tensor) -> Tensor:
        # Evaluation comes after an update, which the copies have not seen.
        if self.low_weight is None or not torch.is_grad_enabled():
            return super().forward(x)
        return multiply(self, x, self.weight, self.low_weight)

    def with_constant_bias(self, x: Tensor) -> Tensor:
        """Compute with a bias that gets no gradient here."""
        if self.low_weight is None:
            return F.linear(x, self.weight, self.bias.detach())
        x, copies = x.to(self.low_weight.dtype), (self.low_weight, self.low_bias)
        return LinearProduct.apply(x, self.weight, None, *copies, None)


class MixedPatchProjection(WithCopies, PatchProjection):
    """A projection of patches that multiplies by the copies, where there are any."""

    def forward(self, x_NCHW: Tensor) -> Tensor:
        if self.low_weight is None or not torch.is_grad_enabled():
            return super().forward(x_NCHW)
        low_DI = flatten_kernel(self.low_weight)

        def linear(x: Tensor, weight_DI: Tensor, bias_D: Tensor) -> Tensor:
            return multiply(self, x, weight_DI, low_DI)

        return multiply_patches(x_NCHW, self.weight, self.bias, linear)


def multiply(layer: WithCopies, x: Tensor, weight_OI: Tensor, low_weight_OI: Tensor) -> Tensor:
    """Multiply by the copy of a matrix, and add that of the layer's bias."""
    bias, image_bias = layer.bias, layer.image_bias
    # A number of rows that the images do not divide cannot be summed by image.
    if image_bias is not None and x.numel() // x.shape[-1] % len(image_bias) == 0:
        bias = None
    else:
        image_bias = None
    x = x.to(low_weight_OI.dtype)
    return LinearProduct.apply(x, weight_OI, bias, low_weight_OI, layer.low_bias, image_bias)


class MixedLayerNorm(WithCopies, nn.LayerNorm):
    """A layer norm, in float32, whose parameters get their gradients from `WeightCopies`."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.image_weight
        # First, because the rows of an earlier step are views of weights that changed since: the
        # compiler may not even look at them.
        if not torch.is_grad_enabled():
            return super().forward(x)
        if rows is None or x.ndim != 3 or len(x) != len(rows):
            return super().forward(x)
        constants = self.weight.detach(), self.bias.detach(), self.eps
        return LayerNormSums.apply(x.float(), *constants, rows, self.image_bias)


class LowCopy(torch.autograd.Function):
    """Use a copy in place of a tensor, which gets the gradient in its own dtype."""

    @staticmethod
    def forward(ctx, tensor, low):
        ctx.dtype = tensor.dtype
        return low.view_as(low)

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype), None


class MixedConv2d(WithCopies, nn.Conv2d):
    """A convolution that computes with the copies of `WeightCopies`, where there are any."""

    def forward(self, x: Tensor) -> Tensor:
        if self.low_weight is None or not torch.is_grad_enabled():
            return super().forward(x)
        bias = None if self.bias is None else LowCopy.apply(self.bias, self.low_bias)
        return self._conv_forward(x, LowCopy.apply(self.weight, self.low_weight), bias)


MIXED = {nn.Linear: MixedLinear, nn.Conv2d: MixedConv2d, PatchProjection: MixedPatchProjection}


class WeightCopies:
    """The copies of weights of layers in autocast's dtype, cast in one operation.

    Args:
        regions: modules whose layers of the classes in MIXED become their values, and those of
            class `nn.LayerNorm` with the name `norm2` `MixedLayerNorm`.
        by_image: whether gradients of biases and norms are summed over images at the end of the
            backward pass. DDP, which averages gradients while others are computed, would have to
            wait.
    """

    def __init__(self, regions: Iterable[nn.Module], by_image: bool) -> None:
        self.by_image = by_image
        self.layers: list[MixedLinear | MixedConv2d | MixedPatchProjection] = []
        self.norms: list[MixedLayerNorm] = []
        for region in regions:
            for name, part in list(region.named_modules()):
                self._replace(region, name, part)
        self._dtype: torch.dtype | None = None
        self._low: list[Tensor] = []

    def _replace(self, region: nn.Module, name: str, part: nn.Module) -> None:
        # Not what computes something else: subclasses, and layers with hooks or other parameters.
        hooks = part._forward_hooks or part._forward_pre_hooks
        if hooks or not {n for n, _ in part.named_parameters(recurse=False)} <= {"weight", "bias"}:
            return
        mixed = MIXED.get(type(part))
        if name and mixed:
            self.layers.append(mixed(part))
            region.set_submodule(name, self.layers[-1])
        # The norm whose input the block computes, by timm's name. Sums by image are a pass of their
        # own, which inductor needs for this one anyway, to compute the input again.
        plain = type(part) is nn.LayerNorm and part.bias is not None
        if self.by_image and plain and name.rpartition(".")[2] == "norm2":
            self.norms.append(MixedLayerNorm(part))
            region.set_submodule(name, self.norms[-1])

    def update(self, dtype: torch.dtype | None, images: int) -> None:
        """Cast the weights as they are now, for the next forward pass of `images` images.

        `dtype` is that of autocast, None for none.
        """
        if dtype != self._dtype:
            self._allocate(dtype)
        if dtype is None:
            return
        if self.layers:
            torch._foreach_copy_(self._low, self._weights())
        if self.by_image:
            self._expand(images)

    def _expand(self, images: int) -> None:
        linear = [layer for layer in self.layers if not isinstance(layer, MixedConv2d)]
        slots = [(layer, "bias") for layer in linear if layer.bias is not None]
        slots += [(norm, name) for norm in self.norms for name in ("weight", "bias")]
        if not slots:
            return
        rows = ImageSums.apply(images, *(getattr(part, name) for part, name in slots))
        for (part, name), row_N in zip(slots, rows, strict=True):
            setattr(part, f"image_{name}", row_N)

    def _weights(self) -> list[Tensor]:
        pairs = ((layer.weight, layer.bias) for layer in self.layers)
        return [part.detach() for pair in pairs for part in pair if part is not None]

    def _allocate(self, dtype: torch.dtype | None) -> None:
        self._dtype, self._low = dtype, []
        for part in (*self.layers, *self.norms):
            part.forget()
        for layer in self.layers if dtype else ():
            layer.low_weight = torch.empty_like(layer.weight.detach(), dtype=dtype)
            self._low.append(layer.low_weight)
            if layer.bias is not None:
                layer.low_bias = torch.empty_like(layer.bias.detach(), dtype=dtype)
                self._low.append(layer.low_bias)
