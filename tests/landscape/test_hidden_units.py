"""Hidden units read off the graph of a network; what is not known to treat them alike is refused."""

import pytest
from permutable import NETWORKS, build
from torch import nn

from wideflat.landscape.hidden_units import Axis, hidden_units


def tied():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else x


class Halves(nn.Module):
    """Flattens two halves of the channels apart."""

    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(2, 4, 3), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.conv(x).reshape(4, -1))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Softmax(1), nn.Linear(4, 2)), "Softmax .* may not treat all units alike"),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, groups=2)), "Conv2d"),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.Linear(2, 3)), "Linear"),
        (Halves(), "reshape"),
        (nn.TransformerEncoderLayer(4, 2), "cannot be aligned"),
        (Branching(), "torch.fx cannot trace it"),
        (tied(), "2.weight is tied to another parameter"),
        (
            nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 2)),
            "0.weight is computed from other parameters",
        ),
        (nn.Sequential(nn.Linear(3, 6), nn.Flatten(), nn.Linear(9, 2)), "length 9, which 6 units do not divide"),
    ],
)
def test_what_is_not_known_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        hidden_units(model)


@pytest.mark.parametrize("name", NETWORKS)
def test_each_group_has_the_size_of_its_axes(name):
    model, _, count = build(name)
    groups = hidden_units(model)
    assert len(groups) == count and len({units.size for units in groups}) > (count > 1)
    for units in groups:
        for axis in units.axes:
            assert model.state_dict()[axis.name].shape[axis.axis] % units.size == 0


def test_rows_bias_and_columns_of_a_layer_belong_together():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    (units,) = hidden_units(model)
    names = {(axis.name, axis.axis) for axis in units.axes}
    assert names >= {("0.weight", 0), ("0.bias", 0), ("1.weight", 0), ("1.running_var", 0), ("4.weight", 1)}
    assert units.size == 4 and units.free and Axis("4.bias", 0) not in units.axes
