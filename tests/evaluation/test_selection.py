"""Which parameters are perturbed."""

import pytest
import torch
from torch import nn

from wideflat.evaluation.selection import NothingSelected, select_parameters


def network():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4), nn.LayerNorm(4)
    ).eval()


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ("all", {"0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias", "5.weight", "5.bias"}),
        ("no batch norm", {"0.weight", "0.bias", "4.weight", "4.bias"}),
        ("no biases", {"0.weight", "1.weight", "4.weight", "5.weight"}),
        ("weights", {"0.weight", "4.weight"}),
        ("4[.].*", {"4.weight", "4.bias"}),
        (["0.weight", "5.bias"], {"0.weight", "5.bias"}),
        (lambda name, parameter: parameter.dim() == 4, {"0.weight"}),
    ],
)
def test_selection(selection, expected):
    assert set(select_parameters(network(), selection)[0]) == expected


def test_what_is_trainable():
    model = network()
    model[0].requires_grad_(False)
    assert set(select_parameters(model, "trainable")[0]) == set(select_parameters(model, "[145].*")[0])
    with pytest.raises(NothingSelected, match="'trainable' selects none"):
        select_parameters(model.requires_grad_(False), "trainable")


def test_normalisation_layers_of_other_libraries_are_known_by_their_names():
    class LlamaRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    class Normal(LlamaRMSNorm):
        pass

    model = nn.Sequential(nn.Linear(2, 2), LlamaRMSNorm(), Normal())
    assert select_parameters(model, "no batch norm")[0] == ["0.weight", "0.bias", "2.weight"]


def test_a_selection_of_nothing_is_refused_with_the_names():
    with pytest.raises(ValueError, match=r"selects none of the 8 parameters.*0\.weight"):
        select_parameters(network(), "fc.*")
    with pytest.raises(ValueError, match="regular expression"):
        select_parameters(network(), "(")


def test_tied_parameters_are_selected_once():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert select_parameters(model)[0] == ["0.weight"]


def test_parameters_in_the_same_memory_are_refused_and_neighbours_in_one_storage_are_not():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight lie in the same memory"):
        select_parameters(model)
    with pytest.raises(ValueError, match="tie them"):
        select_parameters(model, "1.weight")
    assert select_parameters(model, "2.weight")[0] == ["2.weight"]
    whole = torch.randn(4, 8)
    model[0].weight.data, model[1].weight.data = whole[:, :4], whole[:, 4:]  # columns: no number in common
    assert len(select_parameters(model)[0]) == 3
    model[1].weight.data = whole[:, 3:7]
    with pytest.raises(ValueError, match="same memory"):
        select_parameters(model)


def test_parameters_that_are_no_numbers_of_their_own_are_refused():
    expanded = nn.ParameterDict({"w": nn.Parameter(torch.ones(1).expand(3))})
    with pytest.raises(ValueError, match="w is an expanded view"):
        select_parameters(expanded)
    with pytest.raises(ValueError, match="run the network on one batch first"):
        select_parameters(nn.LazyLinear(3))


def test_a_selection_of_nothing_has_its_own_kind_of_error():
    with pytest.raises(NothingSelected):
        select_parameters(network(), "nothing")
