"""Attention with alpha-entmax in place of softmax: ViT-Sparse of Bootstrapping ViTs, Table 1.

alpha-entmax (arXiv 1905.05702) gives weights of exactly 0 to low scores: softmax for alpha 1,
sparsemax for alpha 2. Each block learns its own alpha, from 1.5 on, as in the published code;
arXiv 1909.00015, which the paper cites for ViT-Sparse, learns one for each head.

The package `entmax` does 50 bisections where 10 Newton steps suffice below, and its gradient of
alpha divides by (alpha - 1)², where this one divides by alpha - 1.
"""

import torch
from timm.layers import Attention
from torch import Tensor, nn

# With up to 1,000 tokens and an alpha of 1.02 to 2, the sums of weights are then off by
# float32's rounding alone; of 8 steps by 2e-9.
STEPS = 10
# How far a learned alpha may be from 1.5. In float32 sums of weights are off by 5e-4 at an alpha of
# 1.0001, and at 1 there is no number.
REACH = 0.48

# N images   H heads   T tokens   C channels of a head


class Entmax(torch.autograd.Function):
    """`entmax` with its exact gradients."""

    @staticmethod
    def forward(ctx, scores: Tensor, alpha: Tensor) -> Tensor:
        # The result does not depend on a constant. Now the largest is 0, and threshold + 1 at most.
        scores = scores - scores.amax(-1, keepdim=True)
        weights = solve_entmax(scores, alpha)
        ctx.save_for_backward(scores, alpha, weights)
        return weights

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        scores, alpha, weights = ctx.saved_tensors
        # By implicit differentiation: the threshold changes so that the weights sum to 1.
        slopes = torch.where(weights > 0, weights ** (2 - alpha), 0)
        mean = (grad * slopes).sum(-1, keepdim=True) / slopes.sum(-1, keepdim=True)
        grad = grad - mean
        # entr is -p log p, 0 at 0.
        change = (slopes * scores + torch.special.entr(weights)) / (alpha - 1)
        return grad * slopes, (grad * change).sum()


def solve_entmax(scores: Tensor, alpha: Tensor) -> Tensor:
    """Return [(alpha - 1) s - t]+ ^ (1 / (alpha - 1)) with the t for which it sums to 1.

    `scores` must have a maximum of 0 in the last dimension. Its power sum's root is a norm, so it
    is convex in t, and Newton's steps from t = -1 rise to the solution. They are exact at once if
    one weight is 1, and if all are equal.
    """
    power = 1 / (alpha - 1)
    scaled = (alpha - 1) * scores
    threshold = torch.full_like(scaled[..., :1], -1)
    for _ in range(STEPS):
        over = (scaled - threshold).clamp(min=0)
        # 0 to the power of 0 would be 1.
        lower = torch.where(over > 0, over ** (power - 1), 0)
        total = (lower * over).sum(-1, keepdim=True)
        threshold += (total - total ** (1 - 1 / power)) / lower.sum(-1, keepdim=True)
    return (scaled - threshold).clamp(min=0) ** power


def entmax(scores: Tensor, alpha: Tensor) -> Tensor:
    """Return alpha-entmax over the last dimension, with exact gradients of both arguments.

    `scores` float32 or float64 of any shape, `alpha` `[]` of the same dtype, from 1.02 to 2.
    """
    return Entmax.apply(scores, alpha)


class SparseAttention(Attention):
    """timm's attention with `entmax`, whose alpha is learned between 1.02 and 1.98, from 1.5 on.

    The published code learns alpha itself, which may leave the range from 1 to 2.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.gate is not None:
            raise ValueError("sparse attention has no gate")
        self.alpha_logit = nn.Parameter(self.proj.weight.new_zeros(()))

    @property
    def alpha(self) -> Tensor:
        """The exponent of this block, float32 `[]`."""
        return 1.5 + 2 * REACH * (self.alpha_logit.sigmoid() - 0.5)

    def forward(
        self, x_NTD: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        if attn_mask is not None or is_causal:
            raise ValueError("sparse attention takes no mask")
        heads = self.qkv(x_NTD).unflatten(-1, (3, self.num_heads, self.head_dim))
        q_NHTC, k_NHTC, v_NHTC = (part.transpose(1, 2) for part in heads.unbind(2))
        q_NHTC, k_NHTC = self.q_norm(q_NHTC) * self.scale, self.k_norm(k_NHTC)
        scores_NHTT = q_NHTC @ k_NHTC.mT
        # Powers of 16 bits would be too coarse.
        scores_NHTT = scores_NHTT.to(self.alpha_logit.dtype)
        weights_NHTT = self.attn_drop(entmax(scores_NHTT, self.alpha).to(v_NHTC.dtype))
        x_NTD = (weights_NHTT @ v_NHTC).transpose(1, 2).flatten(2)
        return self.proj_drop(self.proj(self.norm(x_NTD)))
