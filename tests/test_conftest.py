"""no_host_read detects host reads."""

import pytest
import torch

READS = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool(x[0] > 0),
    "if": lambda x: 1 if x.any() else 2,
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "mask assigned": lambda x: x.clone().__setitem__(x > 0, x[:1]),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x.repeat_interleave(x.long()),
    "slice": lambda x: x[: x.long()[0]],
    "equal": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("name", READS)
def test_host_reads_raise(name, no_host_read):
    x = torch.tensor([1.0, 0.0, 2.0])
    with pytest.raises(AssertionError, match="host read"), no_host_read():
        READS[name](x)
    # Afterwards reads work again.
    assert x[0].item() == 1.0
    assert "item" not in vars(torch.Tensor)


def test_host_read_in_the_backward_pass_raises(no_host_read):
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * float(grad.sum())

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(AssertionError, match="host read"), no_host_read():
        Reads.apply(x).sum().backward()


def test_host_read_inside_a_densefeed_operator_raises(no_host_read):
    @torch.library.custom_op("densefeed::reads", mutates_args=())
    def reads(x: torch.Tensor) -> torch.Tensor:
        return x * (1 if x.sum() > 0 else 2)

    with pytest.raises(AssertionError, match="host read"), no_host_read():
        reads(torch.ones(2))
