"""Mixed precision: gradients come out in their own size, an overflow is left out and halves the scale."""

import pytest
import torch

from wideflat.training.precision import Precision


def after(precision, loss, w):
    w.grad = None
    precision.backward(loss(w))
    return precision.unscale([w])


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
def test_gradients_come_out_in_their_own_size(amp):
    precision, w = Precision(amp, "cpu"), torch.nn.Parameter(torch.tensor(3.0))
    assert after(precision, torch.square, w) and w.grad.item() == 6.0
    precision.update()
    with precision.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == {"off": torch.float32}.get(amp, precision.format)


def test_an_overflow_anywhere_halves_the_scale_once():
    precision, w = Precision("fp16", "cpu"), torch.nn.Parameter(torch.tensor(1.0))
    scale = precision.scaler.get_scale()
    assert not after(precision, lambda w: w * 1e38, w)
    precision.update()
    assert precision.scaler.get_scale() == scale / 2
    assert after(precision, torch.square, w)
    precision.update(fits=False)  # elsewhere one was not finite
    assert precision.scaler.get_scale() == scale / 4
    assert not after(precision, lambda w: w * 1e38, w)
    precision.update(fits=False)  # here and elsewhere is not twice
    assert precision.scaler.get_scale() == scale / 8


def test_without_scaling_there_is_nothing_to_save_and_with_it_the_scale_goes_on():
    assert Precision("bf16", "cpu").state_dict() is None
    one, two = Precision("fp16", "cpu"), Precision("fp16", "cpu")
    w = torch.nn.Parameter(torch.tensor(1.0))
    after(one, lambda w: w * 1e38, w)
    one.update()
    two.load_state_dict(one.state_dict())
    assert two.scaler.get_scale() == one.scaler.get_scale() != Precision("fp16", "cpu").scaler.get_scale()
