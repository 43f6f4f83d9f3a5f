import copy
import functools

import pytest
import torch
from torch import nn

import wideflat
from wideflat.baselines.rmsprop import TensorFlowRMSprop


def twin(w, gradients, lr, alpha, eps, weight_decay, momentum):
    """The algorithm box, weight by weight."""
    ms, mom = [1.0] * len(w), [0.0] * len(w)
    for gradient in gradients:
        for i, g in enumerate(gradient):
            g = g + weight_decay * w[i]
            ms[i] = alpha * ms[i] + (1 - alpha) * g**2
            mom[i] = momentum * mom[i] + lr * g / (ms[i] + eps) ** 0.5
            w[i] = w[i] - mom[i]
    return w


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("alpha, eps", [(0.9, 1e-3), (0.5, 0.0)])
def test_it_is_its_definition(alpha, eps, weight_decay, momentum):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(40, dtype=torch.float64, generator=generator)
    gradients = torch.randn(30, 40, dtype=torch.float64, generator=generator)
    settings = {"lr": 0.05, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
    parts = [nn.Parameter(part.clone()) for part in (start[:3].view(3, 1), start[3:])]
    opt = TensorFlowRMSprop(parts, **settings)
    for gradient in gradients:
        parts[0].grad, parts[1].grad = gradient[:3].view(3, 1).clone(), gradient[3:].clone()
        opt.step()
        assert torch.equal(parts[1].grad, gradient[3:])  # weight decay does not write into the gradients
    expected = torch.tensor(twin(start.tolist(), gradients.tolist(), **settings), dtype=torch.float64)
    torch.testing.assert_close(torch.cat([p.detach().flatten() for p in parts]), expected, rtol=1e-12, atol=1e-13)


def test_the_stabiliser_is_within_the_root():
    """For a gradient that stays at 1e-3 torch's steps are 16 times as long."""
    moved = []
    for optimizer in (torch.optim.RMSprop, TensorFlowRMSprop):
        w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        opt = optimizer([w], lr=1.0, alpha=0.9, eps=1e-3)
        for _ in range(300):  # until the mean square has forgotten its start
            before = w.item()
            w.grad = torch.full_like(w, 1e-3)
            opt.step()
        moved.append(before - w.item())
    assert moved[0] / moved[1] == pytest.approx((1e-6 + 1e-3) ** 0.5 / (1e-3 + 1e-3), rel=1e-6)
    assert round(moved[0] / moved[1]) == 16


def test_a_drop_of_the_rate_does_not_touch_the_steps_under_way():
    w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    opt = TensorFlowRMSprop([w], lr=1.0, alpha=1.0, eps=0.0, momentum=0.5)
    w.grad = torch.ones_like(w)
    opt.step()
    opt.param_groups[0]["lr"] = 0.0
    opt.step()
    assert w.item() == -1.5


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_resumed_run_goes_on(momentum):
    def train(network, opt, steps):
        for step in steps:
            opt.zero_grad()
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            network(x).square().mean().backward()
            opt.step(lambda: None)

    torch.manual_seed(0)
    network = nn.Linear(4, 2)
    opt = TensorFlowRMSprop(network.parameters(), lr=0.01, momentum=momentum, weight_decay=1e-3)
    train(network, opt, range(3))
    other = copy.deepcopy(network)
    resumed = TensorFlowRMSprop(other.parameters(), lr=1.0)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(network, opt, range(3, 6))
    train(other, resumed, range(3, 6))
    assert torch.equal(network.weight, other.weight) and torch.equal(network.bias, other.bias)


@pytest.mark.parametrize("layout", ["channels_last", "slice", "transposed"])
def test_any_memory_layout(layout):
    torch.manual_seed(0)
    whole = torch.randn(4, 6, 3, 3, dtype=torch.float64)
    gradient = torch.randn_like(whole)
    p = {
        "channels_last": whole.clone().to(memory_format=torch.channels_last),
        "slice": torch.cat([whole, whole], 1)[:, :6],
        "transposed": whole.transpose(0, 3).contiguous().transpose(0, 3),
    }[layout]
    weights = [nn.Parameter(whole.clone()), nn.Parameter(p)]
    assert weights[1].stride() != weights[0].stride()
    for w in weights:
        opt = TensorFlowRMSprop([w], lr=0.1, momentum=0.9, weight_decay=0.1)
        for _ in range(3):
            w.grad = gradient.clone()
            opt.step()
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-14, atol=1e-15)


def test_it_is_an_inner_optimizer_of_entropy_sgd():
    """A cycle by hand: its state, velocity and mean square, lives on from cycle to cycle."""
    inner = functools.partial(TensorFlowRMSprop, momentum=0.9, alpha=0.9, eps=1e-3)
    w = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    opt = wideflat.EntropySGD([w], lr=0.5, inner_lr=0.1, inner_steps=2, gamma=0.3, epsilon=0.0, alpha=0.5, inner=inner)
    center, ms, mom = w.detach().clone(), torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for _ in range(3):
        explorer, mean = center.clone(), center.clone()
        for _ in range(2):
            g = 2 * explorer + 0.3 * (explorer - center)
            ms = 0.9 * ms + 0.1 * g**2
            mom = 0.9 * mom + 0.1 * g / (ms + 1e-3).sqrt()
            explorer = explorer - mom
            mean = 0.5 * mean + 0.5 * explorer
            opt.zero_grad()
            w.square().sum().backward()
            opt.step()
        center = center - 0.5 * (center - mean)
    torch.testing.assert_close(w.detach(), center, rtol=1e-12, atol=1e-14)


def test_parameters_without_gradient_stay_and_nonsense_is_refused():
    w, still = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    opt = TensorFlowRMSprop([w, still], lr=0.1, weight_decay=1.0)
    w.grad = torch.ones(2)
    opt.step()
    assert torch.equal(still, torch.ones(2)) and still not in opt.state and (w < 1).all()
    for wrong in ({"lr": -1.0}, {"eps": -1.0}, {"momentum": float("nan")}, {"alpha": 1.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            TensorFlowRMSprop([w], **wrong)
    w.grad = torch.ones(2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradients"):
        opt.step()
