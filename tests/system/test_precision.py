import pytest
import torch

from densefeed.system.precision import autocast_dtype, choose_precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "want"), [((7, 5), None), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)]
)
def test_auto_is_bf16_if_the_device_computes_it(monkeypatch, capability, want):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert autocast_dtype("auto", CUDA) == want
    assert choose_precision("auto", CUDA) == ("bf16" if want else "fp32")
    assert autocast_dtype("auto", CPU) is None


def test_a_chosen_precision_is_that_of_every_device():
    for device in (CPU, CUDA):
        assert autocast_dtype("fp16", device) == torch.float16
        assert autocast_dtype("bf16", device) == torch.bfloat16
        assert autocast_dtype("fp32", device) is None
