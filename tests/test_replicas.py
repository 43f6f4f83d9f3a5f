"""Replicated-SGD against a transcription of Algorithm 2, Eq. 6 by autograd, and its limits."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wideflat
from wideflat.replicas import _growth


def make_model():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def make_replicas(num_replicas=3, **arguments):
    torch.manual_seed(0)
    return wideflat.Replicas(make_model, num_replicas, **arguments)


def batch(t, a):
    """A mini-batch that depends on the iteration and the replica."""
    generator = torch.Generator().manual_seed(1000 * t + a)
    return torch.randn(4, 3, dtype=torch.float64, generator=generator), torch.randint(2, (4,), generator=generator)


def loss_sum(replicas, t):
    batches = [batch(t, a) for a in range(len(replicas))]
    outputs = replicas([x for x, _ in batches])
    return sum(F.cross_entropy(output, y) for output, (_, y) in zip(outputs, batches, strict=True))


def naive_algorithm_2(models, steps, lr, momentum, nesterov, weight_decay, period, gammas):
    """Algorithm 2, transcribed: lists of tensors in, lists of tensors out."""
    w = [[p.detach().clone() for p in model.parameters()] for model in models]
    velocity = [[torch.zeros_like(p) for p in w_a] for w_a in w]
    model = copy.deepcopy(models[0])
    for t in range(1, steps + 1):
        w_bar = [sum(ps) / len(ps) for ps in zip(*w, strict=True)]
        for a, w_a in enumerate(w):
            for p, value in zip(model.parameters(), w_a, strict=True):
                p.data.copy_(value)
            x, y = batch(t - 1, a)
            dw = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
            for i, g in enumerate(dw):
                if t % period == 0:
                    g = g + period * gammas[t - 1] * (w_a[i] - w_bar[i])
                g = g + weight_decay * w_a[i]
                velocity[a][i] = momentum * velocity[a][i] + g
                w_a[i] = w_a[i] - lr * (g + momentum * velocity[a][i] if nesterov else velocity[a][i])
    return w


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equals_algorithm_2(period, momentum):
    replicas = make_replicas()
    start = copy.deepcopy(replicas)
    settings = {"lr": 0.1, "momentum": momentum, "nesterov": momentum > 0, "weight_decay": 0.01}
    opt = torch.optim.SGD(replicas.parameters(), **settings)
    coupling = wideflat.ReplicaCoupling(replicas, period=period, gamma=0.2)
    focusing = wideflat.Focusing(coupling, factor=10.0, total=7)
    gammas = []
    for t in range(7):
        opt.zero_grad()
        loss_sum(replicas, t).backward()
        assert coupling.couple() == ((t + 1) % period == 0)
        gammas.append(coupling.gamma)
        opt.step()
        focusing.step()
    expected = naive_algorithm_2(list(start), 7, period=period, gammas=gammas, **settings)
    for model, w in zip(replicas, expected, strict=True):
        torch.testing.assert_close([p.detach() for p in model.parameters()], w, rtol=1e-11, atol=1e-12)


def test_period_one_is_the_gradient_of_the_replicated_loss():
    replicas, gamma = make_replicas(), 0.7
    members = [list(model.parameters()) for model in replicas]
    w_bar = [sum(ps) / len(ps) for ps in zip(*members, strict=True)]
    distance = sum((p - q).square().sum() / 2 for w in members for p, q in zip(w, w_bar, strict=True))
    expected = torch.autograd.grad(loss_sum(replicas, 0) + gamma * distance, list(replicas.parameters()))
    loss_sum(replicas, 0).backward()
    wideflat.ReplicaCoupling(replicas, period=1, gamma=gamma).couple()
    torch.testing.assert_close([p.grad for p in replicas.parameters()], list(expected), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mode", ["gradient", "proximal"])
def test_one_replica_is_plain_sgd_bit_for_bit(mode):
    replicas = make_replicas(1)
    plain = copy.deepcopy(replicas[0])
    settings = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
    opt = torch.optim.SGD(replicas.parameters(), **settings)
    other = torch.optim.SGD(plain.parameters(), **settings)
    coupling = wideflat.ReplicaCoupling(replicas, period=2, gamma=3.0, mode=mode, optimizer=opt)
    for t in range(6):
        opt.zero_grad()
        other.zero_grad()
        loss_sum(replicas, t).backward()
        x, y = batch(t, 0)
        F.cross_entropy(plain(x), y).backward()
        coupling.couple()
        opt.step()
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(replicas.parameters(), plain.parameters(), strict=True))


def test_without_gamma_the_replicas_are_independent():
    replicas = make_replicas(2)
    alone = copy.deepcopy(replicas[1])
    opt = torch.optim.Adam(replicas.parameters())
    other = torch.optim.Adam(alone.parameters())
    coupling = wideflat.ReplicaCoupling(replicas, period=1, gamma=0.0)
    for t in range(4):
        opt.zero_grad()
        other.zero_grad()
        loss_sum(replicas, t).backward()
        x, y = batch(t, 1)
        F.cross_entropy(alone(x), y).backward()
        coupling.couple()
        opt.step()
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(replicas[1].parameters(), alone.parameters(), strict=True))


def test_the_attraction_does_not_move_the_barycenter():
    replicas = make_replicas()
    before = replicas.barycenter()
    opt = torch.optim.SGD(replicas.parameters(), lr=0.1)
    wideflat.ReplicaCoupling(replicas, period=1, gamma=1.0).couple()
    opt.step()
    wideflat.ReplicaCoupling(replicas, period=1, gamma=50.0, mode="proximal", optimizer=opt).couple()
    torch.testing.assert_close(list(replicas.barycenter().parameters()), list(before.parameters()))


# ------------------------------------------------------------------------------------------------ proximal, stability


def test_proximal_solves_the_attraction_exactly_for_each_learning_rate():
    replicas = make_replicas(2)
    weights = [model[0].weight for model in replicas]
    rest = [p for p in replicas.parameters() if all(p is not w for w in weights)]
    opt = torch.optim.SGD([{"params": weights, "lr": 0.5}, {"params": rest, "lr": 0.0}])
    before = copy.deepcopy(replicas)
    center = replicas.barycenter()
    coupling = wideflat.ReplicaCoupling(replicas, period=4, gamma=100.0, mode="proximal", optimizer=opt)
    assert [coupling.couple() for _ in range(4)] == [False, False, False, True]
    s = 0.5 * 4 * 100.0
    for after, old in zip(weights, [model[0].weight for model in before], strict=True):
        # The minimum over w of |w - old|^2 / 2 + s |w - w_bar|^2 / 2.
        torch.testing.assert_close(after, (old + s * center[0].weight) / (1 + s))
    torch.testing.assert_close(replicas[0][2].weight, before[0][2].weight)
    opt.param_groups[0]["lr"] = 1e9  # any strength only collapses them
    for _ in range(4):
        coupling.couple()
    torch.testing.assert_close(weights[0], weights[1])


@pytest.mark.parametrize("mode", ["gradient", "proximal"])
def test_one_optimizer_for_each_replica_is_one_for_all(mode):
    weights = []
    for split in (False, True):
        replicas = make_replicas()
        parts = [list(model.parameters()) for model in replicas] if split else [list(replicas.parameters())]
        optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
        coupling = wideflat.ReplicaCoupling(
            replicas, period=1, gamma=0.5, mode=mode, optimizer=optimizers if split else optimizers[0]
        )
        coupling.couple()
        for opt in optimizers:
            opt.step()
        weights.append([p.detach() for p in replicas.parameters()])
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    assert not torch.equal(weights[0][0], next(make_replicas().parameters()))
    optimizers[-1].param_groups[0]["lr"] = 10.0
    if mode == "gradient":
        with pytest.warns(UserWarning, match="lr K gamma = 5 "):  # also if it is not the first that is unstable
            coupling.couple()


def test_a_small_step_is_the_same_in_both_modes():
    distances = []
    for mode in ("gradient", "proximal"):
        replicas = make_replicas()
        opt = torch.optim.SGD(replicas.parameters(), lr=1e-4)
        opt.zero_grad()
        wideflat.ReplicaCoupling(replicas, period=1, gamma=0.1, mode=mode, optimizer=opt).couple()
        opt.step()
        distances.append(replicas.distances())
    torch.testing.assert_close(distances[0], distances[1], rtol=1e-9, atol=0)
    assert (distances[0] < make_replicas().distances()).all()


@pytest.mark.filterwarnings("ignore:the distances between replicas grow")
@pytest.mark.parametrize(
    ("momentum", "period", "nesterov"),
    [(0.0, 1, False), (0.9, 1, False), (0.9, 1, True), (0.9, 4, True), (0.5, 10, False)],
)
@pytest.mark.parametrize("s", [0.05, 0.5, 1.9, 2.1, 5.0])
def test_the_predicted_growth_is_what_sgd_does(s, momentum, period, nesterov):
    lr = 0.1
    replicas = wideflat.Replicas(lambda: nn.Linear(1, 1, bias=False).double(), 2)
    opt = torch.optim.SGD(replicas.parameters(), lr=lr, momentum=momentum, nesterov=nesterov)
    coupling = wideflat.ReplicaCoupling(replicas, period=period, gamma=s / (lr * period))
    for model, w in zip(replicas, (-1.0, 1.0), strict=True):  # a barycenter of exactly zero, so that nothing is lost
        nn.init.constant_(model.weight, w)
    logarithms = []
    for _ in range(60):
        for _ in range(period):
            opt.zero_grad(set_to_none=False)
            coupling.couple()
            opt.step()
        logarithms.append(0.5 * torch.log(replicas.distances().sum()).item())
    measured = (logarithms[-1] - logarithms[19]) / 40
    predicted = torch.log(torch.tensor(_growth(s, period, momentum, nesterov))).item()
    assert measured == pytest.approx(predicted, abs=0.12)


@pytest.mark.parametrize(("period", "limit"), [(1, 1.36), (10, 0.37)])
def test_limits_of_the_gradient_mode_with_nesterov_momentum(period, limit):
    assert _growth(limit - 0.01, period, momentum=0.9, nesterov=True) < 1
    assert _growth(limit + 0.01, period, momentum=0.9, nesterov=True) > 1


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_gradient_mode_acts_through_the_momentum_and_the_proximal_mode_does_not(nesterov):
    left = {}
    for mode in ("gradient", "proximal"):
        replicas = make_replicas().double()
        opt = torch.optim.SGD(replicas.parameters(), lr=1e-3, momentum=0.9, nesterov=nesterov)
        coupling = wideflat.ReplicaCoupling(replicas, period=10, gamma=1e-3, mode=mode, optimizer=opt)
        before = coupling.distances()
        for _ in range(2000):
            opt.zero_grad(set_to_none=False)
            coupling.couple()
            opt.step()
        left[mode] = torch.log(coupling.distances() / before)
    torch.testing.assert_close(left["gradient"], 10 * left["proximal"], rtol=0.02, atol=0)


def test_warns_once_where_the_gradient_mode_is_unstable():
    replicas = make_replicas()
    opt = torch.optim.SGD(replicas.parameters(), lr=1.0)
    coupling = wideflat.ReplicaCoupling(replicas, period=1, gamma=1.9, optimizer=opt)
    coupling.couple()
    coupling.gamma = 2.1
    with pytest.warns(UserWarning, match=r"lr K gamma = 2\.1 makes the attraction unstable.*mode='proximal'") as caught:
        coupling.couple()
    assert caught[0].filename == __file__  # the user's line, not torch's
    coupling.couple()  # warnings are errors here: there is no second one
    adaptive = torch.optim.Adam(replicas.parameters(), lr=1.0)
    wideflat.ReplicaCoupling(replicas, period=1, gamma=100.0, optimizer=adaptive).couple()


def train_apart(coupling, replicas, lr, steps):
    opt = torch.optim.SGD(replicas.parameters(), lr=lr)
    for _ in range(steps):
        opt.zero_grad()
        coupling.couple()
        opt.step()


def test_warns_once_where_replicas_are_thrown_apart_and_no_optimizer_was_given():
    replicas = make_replicas()
    coupling = wideflat.ReplicaCoupling(replicas, period=1, gamma=3.0)
    with pytest.warns(UserWarning, match="distances between replicas grow at every interaction") as caught:
        train_apart(coupling, replicas, lr=1.0, steps=12)
    assert len(caught) == 1
    train_apart(wideflat.ReplicaCoupling(make_replicas(), period=1, gamma=1.9), make_replicas(), lr=1.0, steps=12)


def test_replicas_that_leave_one_point_are_not_taken_for_unstable():
    replicas = make_replicas(3, independent=False)
    coupling = wideflat.ReplicaCoupling(replicas, period=1, gamma=0.01)
    opt = torch.optim.SGD(replicas.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    torch.manual_seed(0)
    for _ in range(30):
        opt.zero_grad()
        sum(model(torch.randn(8, 3, dtype=torch.float64)).square().mean() for model in replicas).backward()
        coupling.couple()  # warnings are errors here
        opt.step()
    assert float(coupling.distances().sum()) > 0


def test_warns_once_where_gamma_was_never_set():
    coupling = wideflat.ReplicaCoupling(make_replicas(), period=2)
    assert coupling.gamma == 0 and not coupling.couple()
    with pytest.warns(UserWarning, match="gamma is not set") as caught:
        coupling.couple()
    assert caught[0].filename == __file__  # the user's line
    coupling.couple()
    coupling.couple()
    assert len(caught) == 1
    meant = wideflat.ReplicaCoupling(make_replicas(), period=1, gamma=0.0)
    meant.couple()
    later = wideflat.ReplicaCoupling(make_replicas(), period=1)
    later.gamma = 0
    later.couple()


def test_says_its_settings():
    replicas = make_replicas()
    opt = torch.optim.SGD(replicas.parameters(), lr=0.05)
    coupling = wideflat.ReplicaCoupling(replicas, period=7, mode="proximal", optimizer=opt)
    text = "ReplicaCoupling(3 replicas, period=7, gamma=not set, mode='proximal', lr=0.05; 0 iterations)"
    assert repr(coupling) == text
    coupling.gamma = 0.25
    assert "gamma=0.25" in repr(coupling)


# --------------------------------------------------------------------------------------- gamma_0, distances, barycenter


def test_distances_are_half_the_squared_norm():
    replicas = make_replicas(2)
    flat = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in replicas]
    expected = (flat[0] - flat[1]).square().sum() / 8  # each at half of the way
    torch.testing.assert_close(replicas.distances(), torch.stack([expected, expected]))
    coupling = wideflat.ReplicaCoupling(replicas)
    torch.testing.assert_close(coupling.distances(), replicas.distances())
    assert coupling.initial_gamma([1.0, torch.tensor(3.0, requires_grad=True)]) == pytest.approx(2 / expected.item())
    with pytest.raises(ValueError, match="expected the loss of each of the 2 replicas, got 1"):
        coupling.initial_gamma([1.0])


def test_losses_that_are_python_numbers_keep_all_their_digits():
    models = iter([torch.nn.Linear(1, 1, bias=False).double() for _ in range(2)])
    replicas = wideflat.Replicas(lambda: next(models), 2)
    for model, w in zip(replicas, (0.0, 2.0), strict=True):
        torch.nn.init.constant_(model.weight, w)
    loss = 1 / 3
    assert wideflat.ReplicaCoupling(replicas).initial_gamma([loss, loss]) == 2 * loss  # the distances add up to 1


@pytest.mark.parametrize("replicas", [lambda: make_replicas(1), lambda: make_replicas(3, independent=False)])
def test_replicas_that_coincide_have_no_initial_gamma(replicas):
    coupling = wideflat.ReplicaCoupling(replicas())
    with pytest.raises(ValueError, match="they coincide; start them from independent initialisations"):
        coupling.initial_gamma([1.0] * len(coupling.group.members))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_copies_of_a_trained_network_have_no_initial_gamma_until_they_are_moved_apart(dtype):
    torch.manual_seed(0)
    trained = nn.Linear(40, 40).to(dtype)
    replicas = wideflat.Replicas(lambda: copy.deepcopy(trained), 3)
    coupling = wideflat.ReplicaCoupling(replicas)
    with pytest.raises(ValueError, match="copies of one trained network must be moved apart first"):
        coupling.initial_gamma([0.7, 0.7, 0.7])
    with torch.no_grad():
        for p in replicas.parameters():
            p.mul_(1 + 0.05 * torch.randn_like(p))
    assert 0 < coupling.initial_gamma([0.7, 0.7, 0.7]) < 1e4


def test_equal_replicas_are_copies_and_independent_ones_are_not():
    equal, independent = make_replicas(independent=False), make_replicas()
    assert torch.equal(equal[0][0].weight, equal[2][0].weight)
    assert equal[0][0].weight is not equal[2][0].weight
    assert not torch.equal(independent[0][0].weight, independent[2][0].weight)


def test_barycenter_of_buffers():
    torch.manual_seed(0)
    replicas = wideflat.Replicas(lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), 2)
    for a, model in enumerate(replicas):
        model[1].running_mean.fill_(float(a))
        model[1].num_batches_tracked.fill_(5 + a)
    replicas[0](torch.randn(4, 3)).sum().backward()
    center = replicas.barycenter()
    torch.testing.assert_close(center[0].weight, (replicas[0][0].weight + replicas[1][0].weight) / 2)
    assert all(p.grad is None for p in center.parameters())
    assert center[1].num_batches_tracked == replicas[0][1].num_batches_tracked
    torch.testing.assert_close(center[1].running_mean, (replicas[0][1].running_mean + replicas[1][1].running_mean) / 2)
    assert torch.equal(replicas.barycenter(buffers="first")[1].running_mean, replicas[0][1].running_mean)
    with pytest.raises(ValueError, match="buffers must be"):
        replicas.barycenter(buffers="none")
    wideflat.refresh_batch_norm(center, [torch.ones(4, 3)])
    torch.testing.assert_close(center[1].running_mean, center[0](torch.ones(3)).detach())


def test_ensemble_averages_the_probabilities():
    replicas = make_replicas(2)
    x = torch.randn(6, 3, dtype=torch.float64)
    expected = (replicas[0](x).softmax(1) + replicas[1](x).softmax(1)) / 2
    torch.testing.assert_close(replicas.ensemble(x), expected)


# -------------------------------------------------------------------------------------------------------- all at once


def conv_net():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


@pytest.mark.parametrize("training", [True, False])
def test_vectorised_equals_the_loop(training):
    torch.manual_seed(0)
    loop = wideflat.Replicas(lambda: conv_net().double(), 3, vectorize=False).train(training)
    at_once = copy.deepcopy(loop)
    at_once.vectorize = True
    for _ in range(2):
        x = torch.randn(3, 5, 2, 6, 6, dtype=torch.float64)
        outputs, vectorised = loop(x), at_once(list(x))
        torch.testing.assert_close(outputs, vectorised)
        for replicas, values in ((loop, outputs), (at_once, vectorised)):
            replicas.zero_grad()
            values.square().sum().backward()
    torch.testing.assert_close([p.grad for p in loop.parameters()], [p.grad for p in at_once.parameters()])
    torch.testing.assert_close(list(loop.buffers()), list(at_once.buffers()))  # running statistics moved alike


def test_auto_falls_back_to_the_loop_with_a_warning(monkeypatch):
    class Branches(nn.Linear):
        def forward(self, x):
            return super().forward(x) if self.weight.sum() > 0 else -super().forward(x)

    replicas = wideflat.Replicas(lambda: Branches(3, 2), 2)
    x = torch.randn(2, 4, 3)
    assert not replicas._may_vectorize()  # the CPU
    monkeypatch.setattr(replicas, "_may_vectorize", lambda: not replicas._fails_to_vectorize)
    with pytest.warns(UserWarning, match="one after the other"):
        outputs = replicas(x)
    torch.testing.assert_close(outputs, torch.stack([model(b) for model, b in zip(replicas, x, strict=True)]))
    replicas(x)  # no second warning
    replicas.vectorize = True
    with pytest.raises(RuntimeError):
        replicas(x)


# --------------------------------------------------------------------------------------------------- bad input, state


def test_refuses_bad_input():
    with pytest.raises(TypeError, match="must be a function that makes a network"):
        wideflat.Replicas(make_model(), 3)
    with pytest.raises(ValueError, match="num_replicas must be a whole number >= 1, got 0"):
        wideflat.Replicas(make_model, 0)
    with pytest.raises(ValueError, match="vectorize must be"):
        wideflat.Replicas(make_model, 2, vectorize="yes")
    one = make_model()
    with pytest.raises(ValueError, match="returned the same one twice"):
        wideflat.Replicas(lambda: one, 2)
    sizes = iter([2, 3])
    with pytest.raises(ValueError, match="one architecture"):
        wideflat.Replicas(lambda: nn.Linear(2, next(sizes)), 2)
    replicas = make_replicas()
    with pytest.raises(ValueError, match="expected a mini-batch for each of the 3 replicas, got 2"):
        replicas(torch.ones(2, 4, 3, dtype=torch.float64))
    for arguments, message in (
        ({"period": 0}, "period must be a whole number >= 1, got 0"),
        ({"mode": "hard"}, "mode must be"),
        ({"mode": "proximal"}, "needs the optimizer"),
        ({"mode": "proximal", "optimizer": []}, "needs the optimizer"),
    ):
        with pytest.raises(ValueError, match=message):
            wideflat.ReplicaCoupling(replicas, **arguments)
    with pytest.raises(TypeError, match=r"expected wideflat\.Replicas, got Sequential"):
        wideflat.ReplicaCoupling(make_model())


def test_frozen_parameters_are_left_alone_and_unused_ones_attracted():
    replicas = make_replicas(2)
    for model in replicas:
        model[0].requires_grad_(False)
    wideflat.ReplicaCoupling(replicas, period=1, gamma=1.0).couple()  # no backward: no parameter has a gradient
    assert replicas[0][0].weight.grad is None
    torch.testing.assert_close(replicas[0][2].weight.grad, (replicas[0][2].weight - replicas[1][2].weight).detach() / 2)


def test_the_gradient_of_a_large_tensor_is_cut_into_blocks_without_a_seam():
    torch.manual_seed(0)
    replicas = wideflat.Replicas(lambda: nn.Linear(400, 700, bias=False), 3)
    coupling = wideflat.ReplicaCoupling(replicas, period=2, gamma=0.5)
    coupling.load_state_dict({"calls": 1, "gamma": 2.0, "period": 2})
    assert coupling.couple()
    w = torch.stack([model.weight.detach() for model in replicas])
    torch.testing.assert_close(torch.stack([model.weight.grad for model in replicas]), 4.0 * (w - w.mean(0)))
    assert coupling.state_dict() == {"calls": 2, "gamma": 2.0, "period": 2}


@pytest.mark.parametrize("kind", ["ReplicaCoupling", "EASGD"])
@pytest.mark.parametrize("shown", [False, True])
def test_eval_shows_the_solution_and_train_goes_on_bit_for_bit(kind, shown):
    def made():
        torch.manual_seed(0)
        replicas = wideflat.Replicas(lambda: nn.Linear(3, 2), num_replicas=3)
        return replicas, getattr(wideflat, kind)(replicas, period=2, gamma=0.1)

    def go(replicas, coupling, first, last):
        opt = torch.optim.SGD(replicas.parameters(), lr=0.1)
        for t in range(first, last):
            opt.zero_grad()
            replicas(torch.randn(3, 8, 3, generator=torch.Generator().manual_seed(t))).square().sum().backward()
            coupling.couple()
            opt.step()

    whole, coupling = made()
    go(whole, coupling, 0, 9)
    replicas, coupling = made()
    go(replicas, coupling, 0, 5)
    if shown:
        solution = coupling.center if kind == "EASGD" else list(replicas.barycenter().parameters())
        coupling.eval()
        for model in replicas:
            torch.testing.assert_close(list(model.parameters()), list(solution))
        with pytest.raises(RuntimeError, match=r"coupling.train\(\) first"):
            coupling.couple()
    saved = copy.deepcopy((replicas.state_dict(), coupling.state_dict()))
    again, other = made()
    for one, state in zip((again, other), saved, strict=True):
        one.load_state_dict(state)
    for networks, each in ((replicas, coupling), (again, other)):
        each.train()
        go(networks, each, 5, 9)
        assert all(torch.equal(p, q) for p, q in zip(networks.parameters(), whole.parameters(), strict=True))
