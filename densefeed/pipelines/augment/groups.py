"""Apply an operation to the samples of a batch that it was chosen for."""

from collections.abc import Callable

from torch import Tensor

from densefeed.pipelines.augment.choices import AugmentPlan, Group
from densefeed.pipelines.augment.operations import OPERATIONS, apply_tables


def apply_group(image_NHWC: Tensor, group: Group, choice: AugmentPlan) -> None:
    """Apply one operation to the samples of its group, in place."""
    part = slice(group.start, group.stop)
    operation, argument = apply_tables, choice.table[:, None]
    if group.name != "Table":
        operation, argument = OPERATIONS[group.name], choice.argument
    apply_rows(image_NHWC, choice.row[part], operation, argument[part])


def apply_rows(
    image_NHWC: Tensor, row_M: Tensor, operation: Callable[..., Tensor], *arguments: Tensor
) -> None:
    """Replace the samples `row_M` by `operation` of them and of its arguments `[M, ...]`, in place.

    On a GPU all at once. On a CPU one by one: the floats of one crop of 224 px fit its second-level
    cache, those of two do not.
    """
    if not image_NHWC.is_cpu:
        image_NHWC.index_copy_(0, row_M, operation(image_NHWC.index_select(0, row_M), *arguments))
        return
    for at, row in enumerate(row_M.tolist()):
        sample = image_NHWC[row : row + 1]
        sample.copy_(operation(sample, *(argument[at : at + 1] for argument in arguments)))
