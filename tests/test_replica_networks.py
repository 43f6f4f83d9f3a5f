"""The sum of the replicas' losses, and what networks return for mappings."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import wideflat
from wideflat.replica_networks import Replicas


class Own(nn.Module):
    """A network that takes names and returns logits, and its loss if it is given labels."""

    def __init__(self, result=lambda **fields: SimpleNamespace(**fields)):
        super().__init__()
        self.net, self.result = nn.Linear(2, 3), result

    def forward(self, values, labels=None):
        logits = self.net(values)
        return self.result(logits=logits, loss=None if labels is None else F.cross_entropy(logits, labels))


@pytest.mark.parametrize("vectorize", [False, True])
def test_the_loss_is_the_sum_over_replicas(vectorize):
    torch.manual_seed(0)
    replicas = Replicas(lambda: nn.Linear(2, 3), 3, vectorize=vectorize)
    batches = [(torch.randn(4, 2), torch.randint(3, (4,))) for _ in range(3)]
    expected = sum(F.cross_entropy(m(x), y, label_smoothing=0.1) for m, (x, y) in zip(replicas, batches, strict=True))
    torch.testing.assert_close(replicas.loss(batches, label_smoothing=0.1), expected)
    with pytest.raises(ValueError, match="each of the 3 replicas, got 2"):
        replicas.loss(batches[:2])


@pytest.mark.parametrize("result", [lambda **fields: SimpleNamespace(**fields), dict])
def test_mappings(result):
    torch.manual_seed(0)
    replicas = Replicas(lambda: Own(result), 2)
    batches = [{"values": torch.randn(4, 2), "labels": torch.randint(3, (4,))} for _ in range(2)]
    expected = sum(F.cross_entropy(m.net(b["values"]), b["labels"]) for m, b in zip(replicas, batches, strict=True))
    torch.testing.assert_close(replicas.loss(batches), expected)
    shown = replicas.ensemble(batches[0])
    torch.testing.assert_close(shown, torch.stack([m.net(batches[0]["values"]).softmax(-1) for m in replicas]).mean(0))
    with pytest.raises(TypeError, match="must return its loss"):
        replicas.loss([{"values": b["values"]} for b in batches])


def test_a_network_without_logits_is_named():
    replicas = Replicas(lambda: Own(lambda **fields: (fields,)), 2)
    with pytest.raises(TypeError, match="got tuple"):
        replicas.ensemble({"values": torch.randn(4, 2)})


def test_a_training_without_hand_work_is_resumed_exactly():
    data = DataLoader(TensorDataset(torch.randn(12, 2), torch.randint(3, (12,))), batch_size=4)

    def parts():
        torch.manual_seed(0)
        replicas = Replicas(lambda: nn.Linear(2, 3), 2)
        opt = torch.optim.SGD(replicas.parameters(), lr=0.1, momentum=0.9)
        coupling = wideflat.ReplicaCoupling(replicas, period=2, gamma=0.1, optimizer=opt)
        focusing = wideflat.Focusing.from_epochs(coupling, epochs=2, steps=data, factor=10.0)
        return replicas, opt, coupling, focusing, replicas.batches(data)

    def train(all_parts, steps):
        replicas, opt, coupling, focusing, batches = all_parts
        while steps:
            for batch in batches:
                opt.zero_grad()
                replicas.loss(batch).backward()
                coupling.couple()
                opt.step()
                focusing.step()
                steps -= 1
                if not steps:
                    return

    whole, first, again = parts(), parts(), parts()
    train(whole, 6)
    train(first, 2)
    for saved, new in zip(first, again, strict=True):
        new.load_state_dict(saved.state_dict())
    train(again, 4)
    for p, q in zip(whole[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(p, q)
    assert whole[2].gamma == again[2].gamma == pytest.approx(1.0)


# ---------------------------------------------------------------------------------------------------- a shared base


class Adapted(nn.Module):
    """A frozen matrix, the same in all, and an adapter B A beside it."""

    def __init__(self, seed=0):
        super().__init__()
        base = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        self.base = nn.Linear(4, 3, bias=False)
        self.base.weight = nn.Parameter(base, requires_grad=False)
        self.tied = self.base
        self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, x):
        return self.tied(x) + self.b(self.a(x))


@pytest.mark.parametrize("independent", [True, False])
def test_a_frozen_base_is_kept_once(independent):
    torch.manual_seed(0)
    replicas = Replicas(Adapted, 3, independent=independent, share_frozen=True)
    assert len({model.base.weight.data_ptr() for model in replicas}) == 1
    assert len({id(model.tied.weight) for model in replicas}) == 1
    assert sum(p.numel() for p in replicas.parameters()) == 12 + 3 * (8 + 6)
    torch.manual_seed(0)
    apart = Replicas(Adapted, 3, independent=independent)
    x = torch.randn(3, 5, 4)
    torch.testing.assert_close(replicas(x), apart(x), rtol=0, atol=0)
    for these in (replicas, apart):
        opt = torch.optim.SGD([p for p in these.parameters() if p.requires_grad], lr=0.1)
        coupling = wideflat.ReplicaCoupling(these, period=1, gamma=0.3)
        for t in range(4):
            opt.zero_grad()
            generator = torch.Generator().manual_seed(t)
            these(torch.randn(3, 5, 4, generator=generator)).square().mean((1, 2)).sum().backward()
            coupling.couple()
            opt.step()
    torch.testing.assert_close(replicas(x), apart(x))
    torch.testing.assert_close(replicas.distances(), apart.distances())
    center = replicas.barycenter()
    torch.testing.assert_close(center(x[0]), apart.barycenter()(x[0]))
    assert center.base.weight.data_ptr() == replicas[0].base.weight.data_ptr()
    before = replicas[0].base.weight.clone()
    with coupling.at_barycenter():
        pass
    assert torch.equal(replicas[0].base.weight, before)


def test_a_shared_base_survives_copies_casts_and_files(tmp_path):
    torch.manual_seed(0)
    replicas = Replicas(Adapted, 2, share_frozen=True)
    other = copy.deepcopy(replicas).double()
    assert other[0].base.weight is other[1].base.weight and other[0].base.weight.dtype == torch.float64
    assert len(other.own(other[0])) == 2
    torch.save(replicas.state_dict(), tmp_path / "replicas.pt")
    again = Replicas(Adapted, 2, share_frozen=True)
    again.load_state_dict(torch.load(tmp_path / "replicas.pt", weights_only=True))
    x = torch.randn(2, 5, 4)
    torch.testing.assert_close(again(x), replicas(x), rtol=0, atol=0)
    assert again[0].base.weight is again[1].base.weight


def test_bases_that_differ_are_refused():
    seeds = iter(range(9))
    with pytest.raises(ValueError, match=r"base\.weight differs between replicas"):
        Replicas(lambda: Adapted(next(seeds)), 2, share_frozen=True)
    Replicas(lambda: Adapted(next(seeds)), 2)  # not shared, they may


def test_the_mean_of_factors_is_not_the_mean_of_products():
    torch.manual_seed(0)
    replicas = Replicas(Adapted, 3, share_frozen=True)
    center = replicas.barycenter()
    products = torch.stack([model.b.weight @ model.a.weight for model in replicas])
    assert (center.b.weight @ center.a.weight - products.mean(0)).norm() > 0.1 * products.mean(0).norm()
    with torch.no_grad():  # collapsed: there is no difference
        for model in replicas:
            model.load_state_dict(replicas[0].state_dict())
    center = replicas.barycenter()
    torch.testing.assert_close(center.b.weight @ center.a.weight, replicas[0].b.weight @ replicas[0].a.weight)


def test_an_ensemble_of_probabilities_and_of_images():
    torch.manual_seed(0)
    x = torch.randn(5, 3)
    replicas = Replicas(lambda: nn.Sequential(nn.Linear(3, 4), nn.Softmax(1)), num_replicas=2)
    expected = torch.stack([model(x) for model in replicas.models]).mean(0)
    torch.testing.assert_close(replicas.ensemble(x), expected)  # no softmax of a softmax
    replicas, images = Replicas(lambda: nn.Conv2d(2, 3, 1), num_replicas=2), torch.randn(5, 2, 4, 4)
    torch.testing.assert_close(replicas.ensemble(images).sum(1), torch.ones(5, 4, 4))


def test_an_ensemble_of_one_output_is_refused():
    for make in (lambda: nn.Linear(3, 1), lambda: nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))):
        with pytest.raises(ValueError, match="one output an example"):
            Replicas(make, num_replicas=2).ensemble(torch.randn(5, 3))
