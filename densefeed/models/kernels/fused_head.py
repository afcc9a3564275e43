"""A linear head fused with sparse cross entropy, in chunks of rows, so logits never exist whole.

The gradients are computed together with the loss while a chunk's logits exist, so nothing is
computed twice. It is one operator of `torch.library`, so that `torch.compile` keeps its loop.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from densefeed.models.kernels import sparse_cross_entropy as kernels

# N images   T tokens   D width   K classes   M classes of an image's palette   R rows of a chunk

# Bytes of a chunk's logits, and again of their gradient. The weight gradient of a head with 21,841
# classes and width 384 takes 32 MiB in any case. Two chunks of 12 MiB keep the peak memory (N = 64,
# P = 14, float32) at 1/21 of that with whole logits. With 288 rows of bfloat16 the matrix products
# are still large.
CHUNK_BYTES = 12 << 20
# Chunks of a batch on a GPU, at the most. Each is about 12 launches, and 288 rows leave most of a
# GPU idle: 256 images of LV-ViT, with 21,841 classes in bfloat16, were 175 chunks. Two chunks of a
# 32nd and the weight gradient keep the peak memory above at 1/21 of that with whole logits.
GPU_CHUNKS = 32


def chunk_rows(count: int, num_classes: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the rows of a chunk of the logits of `count` tokens."""
    rows = max(1, CHUNK_BYTES // (num_classes * dtype.itemsize))
    return rows if device.type == "cpu" else max(rows, -(-count // GPU_CHUNKS))


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product of two matrices to a matrix of their dtype or of float32, in place."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        # Without a temporary: 17 MB a chunk for 21,841 classes and bfloat16, which rounds it.
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        # A CPU has no products with a sum of another dtype.
        total += a @ b


def chunked_loss_and_gradients(
    features_NTD: Tensor,
    weight_KD: Tensor,
    bias_K: Tensor,
    palette_NM: Tensor,
    extra_NTM: Tensor,
    base_NT: Tensor,
    total_NT: Tensor,
    row_weight_NT: Tensor,
    dtype: torch.dtype,
    features_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sum of losses times `row_weight_NT` and its gradients for features, weight, bias.

    Gradients that are not wanted are empty. Products are in `dtype`; the loss, and over chunks the
    gradients of weight and bias, are summed in float32 (float64 for float64).
    """
    N, T, D = features_NTD.shape
    K = len(weight_KD)
    precise = torch.promote_types(dtype, torch.float32)
    features, weight, bias = features_NTD.reshape(-1, D), weight_KD.to(dtype), bias_K.to(dtype)
    extra = extra_NTM.flatten(0, 1)
    base, total, row_weight = (x.reshape(-1, 1) for x in (base_NT, total_NT, row_weight_NT))
    # The image of every row, since palettes are per image and chunks cross images.
    image = torch.arange(N, device=features.device)[:, None].expand(-1, T).reshape(-1)
    features_grad = features.new_empty(features.shape if features_wanted else 0)
    weight_grad = weight_KD.new_zeros(weight_KD.shape if weight_wanted else 0, dtype=precise)
    bias_grad = bias_K.new_zeros(bias_K.shape if bias_wanted else 0, dtype=precise)
    loss = row_weight.new_zeros((), dtype=precise)

    rows = chunk_rows(N * T, K, dtype, features.device)
    for start in range(0, N * T, rows):
        here = slice(start, start + rows)
        features_RD = features[here].to(dtype)
        targets = palette_NM[image[here]], extra[here, None], base[here], total[here]
        # The kernels take images of tokens; here every row is an image of one token.
        logits_R1K = F.linear(features_RD, weight, bias)[:, None]
        loss_R1, *sums = kernels.forward(logits_R1K, *targets)
        loss += (loss_R1 * row_weight[here]).sum()
        if not (features_wanted or weight_wanted or bias_wanted):
            continue
        # The weight of a row is the gradient of the sum for the loss of that row.
        grad_RK = kernels.backward(row_weight[here].to(precise), logits_R1K, *sums, *targets)[:, 0]
        if features_wanted:
            features_grad[here] = grad_RK @ weight
        if weight_wanted:
            add_product(weight_grad, grad_RK.T, features_RD)
        if bias_wanted:
            bias_grad += grad_RK.sum(0, dtype=precise)
    return (
        loss,
        features_grad.view(features_NTD.shape if features_wanted else 0),
        weight_grad.to(weight_KD.dtype),
        bias_grad.to(bias_K.dtype),
    )


loss_and_gradients = torch.library.custom_op(
    "densefeed::fused_token_loss", chunked_loss_and_gradients, mutates_args=()
)


@loss_and_gradients.register_fake
def _(features, weight, bias, palette, extra, base, total, row_weight, dtype, *wanted):
    loss = row_weight.new_empty((), dtype=torch.promote_types(dtype, torch.float32))
    pairs = zip((features, weight, bias), wanted, strict=True)
    return loss, *(tensor.new_empty(tensor.shape if want else 0) for tensor, want in pairs)
