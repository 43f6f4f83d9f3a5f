"""What moves the networks: gamma, period and learning rate over a training, and where the center is."""

import pytest
import torch
from small_trainings import images, small, trained, vector

from wideflat.training import Training
from wideflat.training.scores import evaluate


def test_focusing_and_the_center():
    data = images(40, 16)
    esgd = trained(small("esgd", epochs=2), data)
    assert esgd.learner.metrics()["gamma"] == pytest.approx(5.0)  # gamma0 0.5, factor 10
    rsgd = trained(small("rsgd", epochs=2), data)
    assert rsgd.learner.metrics()["gamma"] == pytest.approx(10.0)  # 1e-3, factor 1e4
    mean = torch.stack([vector(n) for n in rsgd.learner.networks]).mean(0)
    torch.testing.assert_close(vector(rsgd.center()), mean)
    # mid-cycle, the center of Entropy-SGD is w and not w'
    esgd = Training(small("esgd", epochs=2), data)
    start = vector(esgd.learner.networks[0]).clone()
    for _ in range(3):
        esgd.iterate()
    assert torch.equal(vector(esgd.center()), start)
    assert not torch.equal(vector(esgd.learner.networks[0]), start)
    easgd = trained(small("easgd", epochs=4, period=2), data)
    center = torch.cat([p.reshape(-1) for p in easgd.learner.coupling.center])
    assert torch.equal(vector(easgd.center()), center)


def test_the_period_changes_at_its_epoch():
    data = images(40, 16)
    training = Training(small("rsgd", epochs=3, period=10, period_changes=((200 / 3, 3),)), data)  # of 100
    periods = []
    while training.step < training.total_steps:
        training.iterate()
        periods.append(training.learner.coupling.period)
    assert periods == [10] * 6 + [3] * 3


def test_automatic_gamma0():
    data = images(40, 16)
    training = Training(small("rsgd", gamma0=None), data)
    losses = evaluate(training.learner.networks, training._plain("train")).losses
    distances = training.learner.replicas.distances()
    assert training.learner.coupling.gamma == pytest.approx(sum(losses) / distances.sum().item(), rel=1e-6)
    before = Training(small("esgd"), data).learner.networks[0].state_dict()
    training = Training(small("esgd", gamma0=None), data)
    assert training.learner.focusing[0].gamma0[0] > 0
    for name, value in training.learner.networks[0].state_dict().items():
        assert torch.equal(value, before[name])  # measuring it has moved nothing


def test_states_of_processes_with_a_replica_each_are_joined_and_taken_apart():
    """As on ranks: every process has one replica, its optimizer and the focusing of that; the rest is of all."""
    data, cell = images(40, 16), small("parle", epochs=2)
    whole = trained(small("parle", epochs=1), data).learner
    state = whole.state_dict()
    parts = []
    for a in range(3):
        part = {**state, "networks": [state["networks"][a]], "optimizers": [state["optimizers"][a]]}
        parts.append({**part, "focusing": [state["focusing"][a], *state["focusing"][3:]]})
    joined = whole.joined(parts)
    assert joined.keys() == state.keys() and joined["focusing"] == state["focusing"] and len(state["focusing"]) == 4
    assert [id(each) for each in joined["networks"]] == [id(each) for each in state["networks"]]
    other = Training(cell, data).learner
    other.load_state_dict(joined)
    for ours, theirs in zip(whole.networks, other.networks, strict=True):
        assert torch.equal(vector(ours), vector(theirs))


def test_metrics_say_what_the_algorithm_has():
    data = images(40, 16)
    rows = {name: Training(small(name), data).learner.metrics() for name in ("sgd", "esgd", "rsgd", "parle")}
    assert {name: sorted(row) for name, row in rows.items()} == {
        "sgd": ["lr"],
        "esgd": ["gamma", "lr"],
        "rsgd": ["distance", "gamma", "lr", "period"],
        "parle": ["distance", "gamma", "lr", "period", "replica_gamma"],
    }
