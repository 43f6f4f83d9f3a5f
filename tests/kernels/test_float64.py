"""On a device without float64 (MPS) nothing puts any there: measures, optimizers, couplings, batch norm.

There is no such device here. One is played, and refuses float64 as MPS does.
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import wideflat
from tests.energy.test_no_surprises import MEASURES, example
from tests.played_device import DEVICE, played
from tests.test_no_surprises import COUPLINGS, FAMILY, OPTIMIZERS, SGD
from wideflat.kernels.float64 import doubled, fetched, has_float64, number, squared_length, summed, two_parts


def moved(model, data):
    return model.to(DEVICE), tuple(tensor.to(DEVICE) for tensor in data)


def test_the_played_device_refuses_float64():
    with played(has_float64=False):
        x = torch.ones(3, device=DEVICE)
        assert not has_float64(x.device) and doubled(x).device.type == "cpu"
        with pytest.raises(TypeError, match="no float64"):
            x.double()
        with pytest.raises(TypeError, match="no float64"):
            torch.zeros(2, dtype=torch.float64, device=DEVICE)
    assert has_float64(DEVICE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MEASURES)
def test_no_measure_puts_float64_on_a_device_that_has_none(name):
    with played(has_float64=False):
        MEASURES[name](*moved(*example()))


@pytest.mark.filterwarnings("ignore")
def test_nor_does_a_card():
    with played(has_float64=False):
        model, data = moved(*example())
        card = wideflat.card(model, data, quick=True, progress=False)
    assert [entry.reason for entry in card.entries.values()] == [""] * len(card.entries)


@pytest.mark.parametrize("method", ["bp", "ep", "sample"])
def test_committees_are_computed_on_the_cpu(method):
    generator = torch.Generator().manual_seed(5)
    weights, inputs = torch.randn(3, 9, generator=generator), torch.randn(12, 9, generator=generator).sign()
    targets = torch.sign(inputs @ weights.T).sum(1).sign()
    settings = {"method": method, "deltas": [0.1, 0.5], "particles": 32, "runs": 2, "sweeps": 4}
    here = wideflat.local_entropy(weights, inputs, targets, **settings)
    exact = wideflat.committee_local_energy(weights, inputs, targets, [0.1])
    for with_it in (True, False):
        with played(has_float64=with_it) as device:
            there = [tensor.to(DEVICE) for tensor in (weights, inputs, targets)]
            curve = wideflat.local_entropy(*there, **settings)
            waits = device.waits.total()
            energy = wideflat.committee_local_energy(*there, [0.1]).cpu()
        assert torch.equal(curve.phi, here.phi) and waits == 3
        torch.testing.assert_close(energy, exact)


def trained(make, there, steps=5):
    """Parameters after some steps on a quadratic loss, on the played device or on the CPU."""
    generator = torch.Generator().manual_seed(2)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (5,), ())]
    with played(has_float64=False):
        params = [nn.Parameter(p.detach().to(DEVICE)) for p in params] if there else params
        opt = make(params)
        for _ in range(steps):
            for p in params:
                p.grad = 0.3 * p.detach()
            if isinstance(opt, wideflat.SAM):
                opt.perturb()
                for p in params:
                    p.grad = 0.3 * p.detach()
                opt.restore()
            opt.step()
        if hasattr(opt, "distance"):
            float(opt.distance())
        return [p.detach().cpu() for p in params]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_needs_it(name):
    trained(OPTIMIZERS[name], there=True)


QUIET = {
    "EntropySGD": lambda params: wideflat.EntropySGD(params, inner_steps=2, epsilon=0.0, inner_lr=0.02, **SGD),
    "EntropySGD, no mean": lambda params: wideflat.EntropySGD(params, inner_steps=2, epsilon=0.0, alpha=0.0),
    "Lookahead": lambda params: wideflat.Lookahead(params, inner_steps=2, inner_lr=0.02, **SGD),
    "Entropic": lambda params: wideflat.Entropic(torch.optim.AdamW(params, lr=0.01), inner_steps=2, pull=1.0),
    "SNOO": lambda params: wideflat.SNOO(torch.optim.AdamW(params, lr=0.01), inner_steps=2),
    **{kind.__name__: lambda params, kind=kind: kind(params, rho=0.05, lr=0.02, **SGD) for kind in FAMILY},
}


@pytest.mark.parametrize("name", QUIET)
def test_an_optimizer_trains_there_as_on_the_cpu(name):
    """Without noise, of which every device has its own."""
    torch.testing.assert_close(trained(QUIET[name], there=True), trained(QUIET[name], there=False))


@pytest.mark.parametrize("name", COUPLINGS)
def test_no_coupling_needs_it(name):
    with played(has_float64=False):
        replicas = wideflat.Replicas(lambda: nn.Linear(4, 3).to(DEVICE), 3)
        for p in replicas.parameters():
            p.grad = torch.zeros_like(p)
        coupling = COUPLINGS[name](replicas)
        coupling.couple()
        assert all(float(d) >= 0 for d in coupling.distances())


def test_ranks_share_statistics_without_it(monkeypatch):
    """One process that takes itself for a group: its statistics stay what they are."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(dist, "all_gather_object", lambda found, value, group: found.__setitem__(0, value))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: None)
    batches = [torch.randn(8, 3, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    norms = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    wideflat.refresh_batch_norm(norms[0], batches)
    with played(has_float64=False):
        wideflat.refresh_batch_norm(norms[1].to(DEVICE), batches, group=dist.ProcessGroup(0, 1))
        found = {name: value.cpu() for name, value in norms[1].state_dict().items()}
    torch.testing.assert_close(found, dict(norms[0].state_dict()))


def test_many_tensors_are_fetched_by_one_wait():
    with played() as device:
        tensors = [torch.full((k, 2), float(k), device=DEVICE) for k in range(4)]
        found = fetched([*tensors, torch.ones(2)])
        assert squared_length(tensors) == 2 * (1 + 2 * 4 + 3 * 9)
    assert [part.sum().item() for part in found] == [0, 2, 8, 18, 2] and found[3].shape == (3, 2)
    assert all(part.dtype == torch.float64 for part in found) and device.waits.total() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float64_where_the_device_has_it(dtype):
    x = torch.randn(3).to(dtype)
    assert torch.equal(doubled(x), x.double())


@pytest.mark.parametrize("size", [1, 2, 1000, 300_001])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_sum_in_two_parts_is_that_of_float64(size, scale):
    numbers = scale * torch.randn(size, generator=torch.Generator().manual_seed(size))
    numbers[0] = 1e-4 * scale  # others are up to 1e8 times smaller than the largest
    exact = math.fsum(numbers.tolist())
    assert abs(number(two_parts(numbers)) - exact) <= 2e-12 * float(numbers.abs().double().sum())
    assert abs(float(numbers.sum()) - exact) > 1e-10 * scale or size <= 2  # what float32 alone would lose


def test_a_sum_in_two_parts_of_other_numbers():
    for given in ([], [0.0, 0.0], [math.inf, 1.0], [-math.inf, 2.0], [math.nan, 1.0], [math.inf, -math.inf]):
        expected = sum(given)
        found = number(two_parts(torch.tensor(given)))
        assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_a_sum_waits_for_nothing():
    x = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    with played(has_float64=False) as device:
        parts = summed(x.to(DEVICE))
        assert device.waits.total() == 0
        assert number(parts) == pytest.approx(math.fsum(x.tolist()), rel=1e-12) and device.waits.total() == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["free_entropy", "worst_case"])
def test_a_measure_gives_there_what_it_gives_on_the_cpu(name):
    found = MEASURES[name](*example())
    with played(has_float64=False):
        there = MEASURES[name](*moved(*example()))
    ours, theirs = [[*m.log_z, *m.stderr] if name == "free_entropy" else [m.baseline, *m.mean] for m in (found, there)]
    assert theirs == pytest.approx(ours, rel=1e-3)
