import dataclasses
import math

import numpy as np
import pytest
import torch

import wideflat
from wideflat.committee import (
    SETTINGS,
    CommitteeMachine,
    Setting,
    Solutions,
    balanced_error,
    committee_loss,
    errors,
    train,
)


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
        ({"hidden": -1}, "odd"),
        ({"dropout": 1.0}, "dropout must be a probability below 1, got 1.0"),
        ({"tanh_beta": 0.0}, "tanh_beta must be > 0"),
        ({"num_inputs": 0}, "num_inputs must be >= 1"),
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


# ------------------------------------------------------------------------------------------------------------ settings


def test_the_settings_are_those_of_the_appendix():
    fast = SETTINGS["rsgd-fast"]
    assert list(SETTINGS) == ["sgd-fast", "sgd-slow", "rsgd-fast", "rsgd-slow", "esgd"]
    assert (fast.lr, fast.num_replicas, fast.gamma0, fast.gamma1) == (1e-4, 10, 2e-3, 2e-3)
    assert all(s.hidden == 9 and s.batch_size == 100 and s.gradient_scale == 100 for s in SETTINGS.values())
    esgd = SETTINGS["esgd"]
    assert (esgd.inner_lr, esgd.inner_steps, esgd.epsilon, esgd.alpha) == (5e-3, 20, 1e-6, 0.75)


def test_schedules_grow_by_the_epoch_and_stop_at_their_limit():
    setting = SETTINGS["sgd-slow"].but(tanh_beta_max=3.0)
    assert setting.tanh_beta(0) == 0.5
    assert setting.tanh_beta(100) == pytest.approx(0.5 * 1.001**100)
    assert setting.tanh_beta(10_000) == 3.0
    assert SETTINGS["rsgd-fast"].gamma(1000) == pytest.approx(2e-3 * 1.002**1000)
    assert math.isfinite(SETTINGS["rsgd-fast"].gamma(10**7))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 8}, "odd"),
        ({"algorithm": "adam"}, 'algorithm must be "sgd", "rsgd" or "esgd"'),
        ({"stop": "distance"}, "stop must be one of"),
        ({"lr": 0.0}, "lr must be > 0, got 0.0"),
        ({"batch_size": 0}, "batch_size must be >= 1"),
        ({"num_replicas": 3}, "num_replicas is for rsgd"),
        ({"dropout": 1.5}, "dropout"),
        ({"omega1": -1.0}, "omega1 must be >= 0"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        SETTINGS["sgd-fast"].but(**changes)
    with pytest.raises(ValueError, match="rsgd needs num_replicas"):
        SETTINGS["rsgd-fast"].but(num_replicas=1)
    with pytest.raises(ValueError, match="esgd needs inner_lr"):
        SETTINGS["esgd"].but(inner_lr=0.0)


# ----------------------------------------------------------------------------------------------------------- solutions


@pytest.fixture(scope="module")
def solutions():
    x, y = patterns(count=30)
    test_x, test_y = patterns(count=20, seed=1)
    setting = SETTINGS["sgd-fast"].but(hidden=3, batch_size=10, lr=1e-3, max_epochs=300)
    return train(setting, x, y, range(4), test_inputs=test_x, test_targets=test_y, progress=False)


def test_the_record_is_true(solutions):
    assert solutions.weights.shape == (4, 3, 30)
    assert torch.allclose(solutions.weights.norm(dim=-1), torch.ones(4, 3), atol=1e-5)
    for restart in range(4):
        network = solutions.machine(restart)
        wrong = int((network.predict(solutions.inputs) != solutions.targets).sum())
        assert wrong == solutions.train_errors[restart]
        assert solutions.reached[restart] == (wrong == 0)
        test = (network.predict(solutions.test_inputs) != solutions.test_targets).double().mean()
        assert solutions.test_error[restart] == pytest.approx(test.item())
    summary = solutions.summary()
    assert summary["restarts"] == 4
    assert summary["test_error_spread"] == pytest.approx(np.std(solutions.test_error, ddof=1))


def test_a_file_gives_back_what_was_saved(solutions, tmp_path):
    path = tmp_path / "solutions.npz"
    solutions.save(path)
    again = Solutions.load(path)
    for item in dataclasses.fields(Solutions):
        old, new = getattr(solutions, item.name), getattr(again, item.name)
        assert torch.equal(old, new) if isinstance(old, torch.Tensor) else old == new, item.name
    part = again.subset([2, 0])
    assert part.seeds == [2, 0] and torch.equal(part.weights[1], solutions.weights[0])
    assert part.summary()["restarts"] == 2


def test_wrong_files_are_named(solutions, tmp_path):
    path = tmp_path / "solutions.npz"
    solutions.save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"solutions\.npz is not a whole file of committee solutions"):
        Solutions.load(path)
    np.savez(path, weights=np.ones(3))
    with pytest.raises(ValueError, match="not a whole file"):
        Solutions.load(path)
    with pytest.raises(FileNotFoundError):
        Solutions.load(tmp_path / "none.npz")


def test_without_a_test_set_the_test_error_is_not_a_number():
    x, y = patterns(count=10)
    setting = Setting("sgd", 1e-3, 2.0, 0.0, 5.0, 0.0, "errors", max_epochs=2, hidden=3, batch_size=4)
    result = train(setting, x, y, [7], progress=False)
    assert math.isnan(result.test_error[0]) and math.isnan(result.balanced_test_error[0])
    assert math.isnan(result.summary()["test_error_spread"])


def test_unknown_settings_and_wrong_arguments_are_refused():
    x, y = patterns(count=10)
    for arguments, message in [
        ({"setting": "sgd-medium"}, "there is no setting 'sgd-medium'; there are sgd-fast"),
        ({"seeds": [1, 1]}, "different whole numbers"),
        ({"seeds": []}, "at least one"),
        ({"dtype": torch.float16}, "float32 or torch.float64"),
        ({"form": "sparse"}, 'form must be "auto", "gram" or "direct"'),
        ({"refresh": 0}, "refresh must be >= 1"),
        ({"threads": 0}, "threads must be >= 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            train(**{"setting": "sgd-fast", "inputs": x, "targets": y, "progress": False, **arguments})
    with pytest.raises(ValueError, match=r"use 2 \* targets - 1"):
        train("sgd-fast", x, (y > 0).float(), progress=False)
