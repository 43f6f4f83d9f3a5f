import math

import pytest
import torch

import wideflat
from wideflat.committee import CommitteeMachine, balanced_error, committee_loss, errors, wrong_patterns
from wideflat.committee.forms import Direct
from wideflat.committee.machine import says_yes, votes
from wideflat.committee.settings import Setting
from wideflat.entropy.measure import training_errors


def patterns(count=40, size=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, size, generator=generator).sign()
    return x, torch.randn(count, generator=generator).sign()


# ------------------------------------------------------------------------------------------------------------- network


def test_the_exact_network_is_equation_7():
    x, _ = patterns()
    network = CommitteeMachine(30, hidden=5, generator=torch.Generator().manual_seed(1)).eval()
    by_hand = [math.copysign(1, sum(math.copysign(1, float(w @ one)) for w in network.weight.detach())) for one in x]
    assert network.predict(x).tolist() == by_hand
    assert torch.sign(network(x)).tolist() == by_hand
    votes = network(x) * 5**0.5
    assert set(votes.round().int().tolist()) <= {-5, -3, -1, 1, 3, 5} and torch.allclose(votes, votes.round())


def test_a_steep_surrogate_is_the_exact_network():
    x, _ = patterns()
    network = CommitteeMachine(30, hidden=5, tanh_beta=1e6)
    assert torch.allclose(network.train()(x), network.eval()(x), atol=1e-3)
    assert network.train()(x).requires_grad


def test_the_gradient_is_the_formula():
    """d loss / d w_h = -mean of sigma(-2 omega x) y beta (1 - tanh^2) x / sqrt(H)."""
    x, y = (t.double() for t in patterns())
    network = CommitteeMachine(30, hidden=3, tanh_beta=0.7, dtype=torch.float64)
    committee_loss(network(x), y, omega=1.3).backward()
    t = torch.tanh(0.7 * x @ network.weight.T.detach())
    slope = -torch.sigmoid(-2 * 1.3 * y * t.sum(1) / 3**0.5) * y
    expected = ((slope[:, None] * 0.7 * (1 - t**2) / 3**0.5).T @ x) / len(x)
    assert torch.allclose(network.weight.grad, expected, atol=1e-14)


def test_dropout_acts_on_hidden_units_in_training_only():
    x, _ = patterns(2000)
    network = CommitteeMachine(30, hidden=5, tanh_beta=1e6, dropout=0.4)
    votes = network.train()(x) * 5**0.5 * 0.6  # kept units count 1/0.6
    assert votes.round().unique().numel() > 3
    assert votes.mean().item() == pytest.approx(0.6 * (network.eval()(x) * 5**0.5).mean().item(), abs=0.15)
    assert torch.equal(network.eval()(x), network.eval()(x))


def test_it_works_with_the_optimizers_of_the_library():
    x, y = patterns(count=12)
    torch.manual_seed(0)
    network = CommitteeMachine(30, hidden=3)
    optimizer = wideflat.EntropySGD(network.parameters(), lr=0.9, inner_lr=0.05, inner_steps=4, gamma=0.1, epsilon=0.0)
    for _ in range(400):
        optimizer.zero_grad()
        committee_loss(network(x), y, omega=3.0, reduction="sum").backward()
        optimizer.step()
        network.normalize_()
    assert int((network.predict(x) != y).sum()) == 0

    replicas = wideflat.Replicas(lambda: CommitteeMachine(30, hidden=3), num_replicas=3)
    coupling = wideflat.ReplicaCoupling(replicas, period=1, gamma=0.5)
    plain = torch.optim.SGD(replicas.parameters(), lr=0.05)
    focusing = wideflat.Focusing(coupling, factor=100.0, total=400)
    for _ in range(400):
        plain.zero_grad()
        committee_loss(replicas(x.expand(3, *x.shape)), y.expand(3, -1), omega=3.0, reduction="sum").backward()
        coupling.couple()
        plain.step()
        focusing.step()
        for network in replicas:
            network.normalize_()
    assert coupling.distances().max() < 1e-2
    center = replicas.barycenter()
    center.normalize_()
    assert int((center.predict(x) != y).sum()) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden": 4}, "hidden must be an odd number, so that no vote is a tie; got 4"),
        ({"hidden": -1}, "hidden must be a whole number >= 1, got -1"),
        ({"dropout": 1.0}, "dropout must be a probability below 1, got 1"),
        ({"tanh_beta": 0.0}, "tanh_beta must be a finite number > 0"),
        ({"num_inputs": 0}, "num_inputs must be a whole number >= 1"),
    ],
)
def test_impossible_networks_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        CommitteeMachine(**{"num_inputs": 3, **arguments})


# ---------------------------------------------------------------------------------------------------------------- loss


def test_the_loss_is_equation_8_in_a_stable_form():
    x = torch.linspace(-3, 3, 61, dtype=torch.float64)
    for omega in (0.1, 1.0, 10.0):
        literal = -x / 2 + torch.log(2 * torch.cosh(omega * x)) / (2 * omega)
        assert torch.allclose(committee_loss(x, torch.ones_like(x), omega, "none"), literal, atol=1e-13)
    # where the literal form overflows or cancels
    assert committee_loss(torch.tensor([-2.0]), torch.ones(1), 1e8).item() == 2.0
    tiny = committee_loss(torch.tensor([3.0], dtype=torch.float64), torch.ones(1), 10.0).item()
    assert tiny == pytest.approx(math.exp(-60) / 20, rel=1e-12)


def test_the_reductions_of_the_loss():
    output, target = torch.tensor([0.5, -0.2]), torch.tensor([1.0, 1.0])
    each = committee_loss(output, target, 2.0, "none")
    assert committee_loss(output, target, 2.0, "sum") == each.sum()
    assert committee_loss(output, target, 2.0) == each.mean()
    with pytest.raises(ValueError, match="reduction"):
        committee_loss(output, target, 2.0, "max")


def test_errors_and_balanced_error_count_what_the_network_gets_wrong():
    x, y = patterns()
    networks = [CommitteeMachine(30, hidden=3) for _ in range(4)]
    weights = torch.stack([network.weight.detach() for network in networks]).reshape(2, 2, 3, 30)
    counts = [int((network.predict(x) != y).sum()) for network in networks]
    assert errors(weights, x, y).flatten().tolist() == counts
    wrong = networks[0].predict(x) != y
    expected = (wrong[y > 0].double().mean() + wrong[y < 0].double().mean()) / 2
    assert balanced_error(weights, x, y)[0, 0].item() == pytest.approx(expected.item())


def test_there_is_one_convention_for_ties():
    """sign(0) = +1 for a hidden unit, wherever it is asked what a committee answers."""
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])  # on (1, 0): +1, 0, -1
    x, yes, no = torch.tensor([[1.0, 0.0]]), torch.ones(1), -torch.ones(1)
    z = x @ weight.T
    assert votes(z, dim=1).tolist() == [1] and says_yes(z, dim=1).tolist() == [True]
    network = CommitteeMachine(2, hidden=3)
    network.weight.data.copy_(weight)
    assert network.eval()(x).item() > 0 and network.predict(x).tolist() == [1.0]
    for target, wrong in ((yes, 0), (no, 1)):
        assert errors(weight, x, target).item() == wrong
        assert wrong_patterns(weight, x, target).tolist() == [bool(wrong)]
        assert training_errors(weight, x, target).tolist() == [bool(wrong)]
        form = Direct(Setting("sgd", 1.0, 1.0, 0.0, 1.0, 0.0, "errors", hidden=3), x, target, torch.float32)
        form.load(weight.view(1, 1, 3, 2))
        assert form.errors().tolist() == [wrong]
