"""What a network uses its parameters for."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from wideflat.noise.uses import treatments, uses


def treatment(function, *shapes, x=None):
    parameters = [nn.Parameter(torch.rand(shape)) for shape in shapes]
    x = torch.rand(6, 4) if x is None else x
    with torch.no_grad():
        found = uses(lambda batch: function(batch, *parameters), [(x, len(x)), (x[:-1], len(x) - 1)], parameters)
    return list(treatments(found).values())


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (lambda x, w, b: F.linear(x, w, b), [(3, 4), (3,)], ["independent", "independent"]),
        (lambda x, w, b: F.linear(x, weight=w, bias=b), [(3, 4), (3,)], ["independent", "independent"]),
        (lambda x, w: F.linear(input=x, weight=w), [(3, 4)], ["shared"]),
        (lambda x, w: F.linear(F.linear(x, w), w), [(4, 4)], ["flipout"]),
        (lambda x, w: F.linear(x[:, None].expand(-1, 2, -1), w), [(3, 4)], ["flipout"]),
        (lambda x, w: F.linear(x, w) + x @ w.T, [(3, 4)], ["shared"]),
        (lambda x, w: F.linear(x, w * 1), [(3, 4)], ["shared"]),
        (lambda x, w: F.linear(x, w) * w.sum().item(), [(3, 4)], ["shared"]),
        (lambda x, w: F.linear(x, w) * torch.from_numpy(w.detach().numpy())[0, 0], [(3, 4)], ["shared"]),
        (lambda x, w: F.linear(x, w) * w.shape[0], [(3, 4)], ["independent"]),
        (lambda x, w: torch.cat([F.linear(x, w), w]), [(4, 4)], ["shared"]),
        (lambda x, w: F.linear(x, w), [(4,)], ["shared"]),
        (lambda x, w: F.linear(x[x[:, 0] > 2], w), [(3, 4)], ["shared"]),
        (lambda x, w: x, [(3, 4)], ["shared"]),
        (lambda x, w, b: F.layer_norm(x, [4], w, b), [(4,), (4,)], ["independent", "independent"]),
        (lambda x, w: F.layer_norm(x, [4], w, w), [(4,)], ["shared"]),
        (lambda x, w: F.linear(F.layer_norm(x, [4], w), torch.eye(4), w), [(4,)], ["shared"]),
    ],
)
def test_treatments(function, shapes, expected):
    assert treatment(function, *shapes) == expected


def test_a_list_of_parameters_is_seen():
    """Recurrent layers get their parameters in a list."""
    layer = nn.LSTM(4, 3, batch_first=True)
    x = torch.rand(6, 2, 4)
    with torch.no_grad():
        found = uses(layer, [(x, 6), (x[:5], 5)], list(layer.parameters()))
    assert set(treatments(found).values()) == {"shared"} and all(seen[0] for seen in found.values())
