"""Networks aligned by permutation: a permuted copy is found exactly, what is not known is refused."""

import numpy as np
import pytest
import torch
from permutable import NETWORKS, build, shuffled
from torch import nn

from wideflat import shift_profile
from wideflat.landscape.alignment import aligned
from wideflat.landscape.hidden_units import hidden_units


@pytest.mark.parametrize("name", NETWORKS)
def test_a_permuted_copy_is_the_same_function_and_is_found(name):
    model, x, count = build(name)
    assert len(hidden_units(model)) == count
    for seed in range(3):
        state = shuffled(model, seed)
        assert any(not torch.equal(state[key], value) for key, value in model.state_dict().items())
        torch.testing.assert_close(torch.func.functional_call(model, state, (x,)), model(x), rtol=1e-4, atol=1e-4)
        found = aligned(model, state)
        assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", NETWORKS)
def test_a_permuted_copy_has_no_barrier(name):
    model, x, _ = build(name)
    y = torch.randint(3, (30,), generator=torch.Generator().manual_seed(0))
    options = {"metric": "loss", "noise": False, "progress": False}
    plain = shift_profile(model, (x, y), shuffled(model), **options)
    found = shift_profile(model, (x, y), shuffled(model), align=True, **options)
    assert found.barrier == 0 and found.barrier_interval == (0.0, 0.0) and (found.lengths == 0).all()
    assert plain.lengths[-1] > 0 and np.abs(plain.mean).max() > 1e-3 and plain.mean[-1] == pytest.approx(0, abs=1e-4)
    assert "hidden units aligned" in found.about() and "aligned" not in plain.about()


@pytest.mark.parametrize("name", NETWORKS)
def test_another_network_comes_nearer_and_computes_the_same(name):
    (model, x, _), (other, _, _) = build(name), build(name, seed=1)
    state = aligned(model, other.state_dict())
    torch.testing.assert_close(torch.func.functional_call(model, state, (x,)), other(x), rtol=1e-4, atol=1e-4)

    def distance(theirs):
        return sum(float((p - theirs[name]).square().sum()) for name, p in model.named_parameters())

    assert distance(state) < distance(other.state_dict())


def hooked():
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    model[1].register_forward_hook(lambda _, inputs, output: output * torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0]))
    return model


UNSEEN = {  # what a graph does not show
    "positions before units": (
        lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 2)),
        (4, 3),
    ),
    "normalised positions": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(16, 2)),
        (4, 3),
    ),
    "hook": (hooked, (3,)),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_units_that_are_not_treated_alike_are_refused_though_the_graph_does_not_show_it(name):
    make, shape = UNSEEN[name]
    torch.manual_seed(0)
    model, other, x = make(), make(), torch.randn(12, *shape)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    options = {"metric": "loss", "noise": False, "progress": False}
    with pytest.raises(ValueError, match="it answers differently when its hidden units are permuted"):
        shift_profile(model, (x, torch.zeros(12, dtype=torch.long)), other, align=True, **options)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_half_precision_may_round():
    model, x, _ = build("mlp")
    other, _, _ = build("mlp", seed=1)
    model, other, x = model.bfloat16(), other.bfloat16(), x.bfloat16()
    options = {"metric": "loss", "noise": False, "progress": False}
    y = torch.randint(3, (30,), generator=torch.Generator().manual_seed(0))
    assert np.isfinite(shift_profile(model, (x, y), other, align=True, **options).mean).all()


def test_bad_input():
    model, x, _ = build("mlp")
    with pytest.raises(ValueError, match=r"no 0.weight of shape \(8, 4\)"):
        aligned(model, {**model.state_dict(), "0.weight": torch.ones(2, 2)})
    with pytest.raises(ValueError, match="align is for other weights"):
        shift_profile(model, (x, torch.zeros(30).long()), prune=[0.5], align=True, progress=False)
    with pytest.raises(TypeError, match="state dictionary or a network"):
        shift_profile(model, (x, torch.zeros(30).long()), 3, align=True, progress=False)
