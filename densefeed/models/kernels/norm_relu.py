"""BatchNorm with the ReLU after it, whose backward pass reads its input and the gradient alone.

PyTorch's also reads the saved output, as ReLU's mask: 1.6 GB of a step of LV-ViT-S with 256 images
(computed). The plain twins are `nn.BatchNorm2d` and `nn.ReLU`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.models.lvvit import Stem

# N images   C channels   H, W pixels


class NormReLU(nn.BatchNorm2d):
    """BatchNorm2d and ReLU."""

    def forward(self, x_NCHW: Tensor) -> Tensor:
        if not self.training or self.running_mean.dtype != torch.float32:
            return F.relu(super().forward(x_NCHW))
        out, mean_C, var_C = NormReLUFunction.apply(x_NCHW, self.weight, self.bias, self.eps)
        self._follow(mean_C, var_C, x_NCHW.numel() // len(mean_C))
        return out

    @torch.no_grad()
    def _follow(self, mean_C: Tensor, var_C: Tensor, count: int) -> None:
        """Update the running statistics; `count` are the numbers of a channel."""
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean_C, self.momentum)
        # The running variance is that of a sample.
        self.running_var.lerp_(var_C * (count / (count - 1)), self.momentum)


class NormReLUFunction(torch.autograd.Function):
    """Normalize, scale, shift, and cut at zero, in float32; also return mean and variance."""

    @staticmethod
    def forward(ctx, x_NCHW, weight_C, bias_C, eps):
        wide = x_NCHW.float()
        var_C, mean_C = torch.var_mean(wide, (0, 2, 3), correction=0)
        rstd_C = torch.rsqrt(var_C + eps)
        ctx.save_for_backward(x_NCHW, weight_C, bias_C, mean_C, rstd_C)
        ctx.mark_non_differentiable(mean_C, var_C)
        ctx.set_materialize_grads(False)
        scale_C = weight_C * rstd_C
        out = wide * spread(scale_C) + spread(bias_C - mean_C * scale_C)
        return torch.relu(out).to(x_NCHW.dtype), mean_C, var_C

    @staticmethod
    def backward(ctx, grad_NCHW, *_):
        x_NCHW, weight_C, bias_C, mean_C, rstd_C = ctx.saved_tensors
        wide, scale_C = x_NCHW.float(), weight_C * rstd_C
        # As in the forward pass, so that the mask is the same.
        out = wide * spread(scale_C) + spread(bias_C - mean_C * scale_C)
        grad = torch.where(out > 0, grad_NCHW.float(), 0.0)
        normal = (wide - spread(mean_C)) * spread(rstd_C)
        bias_grad, weight_grad = grad.sum((0, 2, 3)), (grad * normal).sum((0, 2, 3))
        count = x_NCHW.numel() // len(mean_C)
        rest = spread(bias_grad / count) + normal * spread(weight_grad / count)
        return (spread(scale_C) * (grad - rest)).to(x_NCHW.dtype), weight_grad, bias_grad, None


def spread(vector_C: Tensor) -> Tensor:
    """Return a view that is broadcast over images and pixels."""
    return vector_C[:, None, None]


def use(model: nn.Module) -> None:
    """Join the BatchNorms of every stem with the ReLUs after them."""
    for stem in model.modules():
        for place in range(len(stem) - 1) if isinstance(stem, Stem) else ():
            norm = stem[place]
            if type(norm) is nn.BatchNorm2d and type(stem[place + 1]) is nn.ReLU:
                norm.__class__ = NormReLU
                # The places of the layers are those of the names of their parameters.
                stem[place + 1] = nn.Identity()
