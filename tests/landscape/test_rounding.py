"""Rounding to few bits and pruning, against loops."""

import pytest
import torch
from torch import nn

from wideflat.landscape.rounding import pruned, quantized
from wideflat.noise.scales import transposed_groups


@pytest.mark.parametrize("per", ["tensor", "channel"])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_each_weight_goes_to_the_nearest_level(bits, per):
    weight = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(bits))
    found = quantized(weight, bits, per)
    for channel in range(4):
        part = weight if per == "tensor" else weight[channel]
        top = 2 ** (bits - 1) - 1
        levels = torch.arange(-top, top + 1) * (part.abs().max() / top)
        nearest = levels[(weight[channel].flatten()[:, None] - levels).abs().argmin(1)]
        torch.testing.assert_close(found[channel].flatten(), nearest)
        assert len(found[channel].unique()) <= 2**bits - 1


@pytest.mark.parametrize("groups", [1, 2])
def test_the_channels_of_a_transposed_convolution_are_on_its_second_axis(groups):
    layer = nn.ConvTranspose2d(4, 6, 3, groups=groups)
    weight = layer.weight.detach()
    with torch.no_grad():
        weight[:2] *= 10
    found = quantized(weight, 4, "channel", transposed_groups(nn.Sequential(layer))["0.weight"])
    for group in range(groups):
        inputs = slice(4 // groups * group, 4 // groups * (group + 1))
        for channel in range(6 // groups):
            expected = quantized(weight[inputs, channel], 4)  # as one tensor
            torch.testing.assert_close(found[inputs, channel], expected)


def test_zeros_stay_and_quantising_twice_is_once():
    weight = torch.tensor([[0.0, 0.0], [0.3, -1.0]])
    assert quantized(weight, 4, "channel")[0].tolist() == [0.0, 0.0]
    once = quantized(weight, 4)
    torch.testing.assert_close(quantized(once, 4), once)
    assert quantized(torch.zeros(3), 2).tolist() == [0.0] * 3


def test_pruning_takes_the_smallest_of_all():
    g = torch.Generator().manual_seed(0)
    weights = {"a": torch.randn(5, 4, generator=g), "b": 0.1 * torch.randn(10, generator=g)}
    for share in (0.0, 0.1, 0.5, 1.0):
        found = pruned(weights, share)
        zero = torch.cat([found[name].flatten() == 0 for name in weights])
        size = torch.cat([weights[name].abs().flatten() for name in weights])
        assert int(zero.sum()) == int(share * 30)
        if 0 < share < 1:
            assert size[zero].max() <= size[~zero].min()


def test_bad_input():
    with pytest.raises(ValueError, match="bits must be whole numbers >= 2, and at most 64, got 1"):
        quantized(torch.ones(2), 1)
    with pytest.raises(ValueError, match='per must be "tensor" or "channel"'):
        quantized(torch.ones(2), 4, "row")
    with pytest.raises(ValueError, match=r"fractions must be between 0 and 1, got 1.5"):
        pruned({"a": torch.ones(2)}, 1.5)
