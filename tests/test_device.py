"""Optimizers and measures on a device of one's own against the CPU: ``make test-device DEVICE=cuda``.

Without ``WIDEFLAT_TEST_DEVICE`` the device is the CPU itself, with the kernel against torch's operations, so that this
file does not rot where there is no accelerator.
"""

import copy
import os

import pytest
import torch
from torch import nn

import wideflat
from wideflat.kernels.counter import key_of, normal

DEVICE = torch.device(os.environ.get("WIDEFLAT_TEST_DEVICE", "cpu"))
SGD = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
CYCLE = {"inner_steps": 3, "lr": 0.7, "inner_lr": 0.02}
OPTIMIZERS = {
    "EntropySGD": lambda params, **more: wideflat.EntropySGD(params, epsilon=0.0, **CYCLE, **SGD, **more),
    "whole tensors": lambda params, **more: wideflat.EntropySGD(
        params, epsilon=0.0, fused=False, **CYCLE, **SGD, **more
    ),
    "capturable": lambda params, **more: wideflat.EntropySGD(
        params, epsilon=0.0, capturable=True, **CYCLE, **SGD, **more
    ),
    "Lookahead": lambda params: wideflat.Lookahead(params, **CYCLE, **SGD),
    "Entropic": lambda params, **more: wideflat.Entropic(
        torch.optim.AdamW(params, lr=0.01), inner_steps=3, pull=1.0, alpha=0.3, **more
    ),
    "SAM": lambda params: wideflat.SAM(params, lr=0.02, **SGD),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 4, 3))


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 2, 6, 6, generator=generator), torch.randint(3, (24,), generator=generator)


def train(model, opt, device, steps=8):
    x, y = (tensor.to(device) for tensor in data())

    def closure():
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)), y)
        loss.backward()
        return loss

    for _ in range(steps):
        if isinstance(opt, wideflat.SAM):
            opt.step(closure)
        else:
            closure()
            opt.step()
    return [p.detach().cpu().float() for p in model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_trains_there_as_on_the_cpu(name):
    here, there = network(), network().to(DEVICE)
    ours = train(there, OPTIMIZERS[name](there.parameters()), DEVICE)
    theirs = train(here, OPTIMIZERS[name](here.parameters()), "cpu")
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["EntropySGD", "whole tensors", "Entropic"])
def test_the_state_may_stay_on_the_cpu(name):
    near, far = network().to(DEVICE), network().to(DEVICE)
    ours = train(near, OPTIMIZERS[name](near.parameters()), DEVICE)
    opt = OPTIMIZERS[name](far.parameters(), state_device="cpu")
    theirs = train(far, opt, DEVICE)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    centers = [state["center"] for state in opt.state.values()]
    assert all(center.device.type == "cpu" for center in centers)
    assert DEVICE.type == "cpu" or all(center.is_pinned() for center in centers)


@pytest.mark.parametrize("rounding", ["kept", "stochastic", "nearest"])
def test_bfloat16_there_as_on_the_cpu(rounding):
    results = []
    for device in (DEVICE, torch.device("cpu")):
        w = nn.Parameter(torch.linspace(0.5, 2, 300).bfloat16().to(device))
        opt = wideflat.EntropySGD([w], rounding=rounding, epsilon=0.0, **CYCLE, **SGD)
        for _ in range(8):
            w.grad = w.detach() * 0.3
            opt.step()
        results.append(opt.state[w]["center"].cpu())
    assert (results[0] - results[1]).abs().max() < 0.02


def test_the_noise_there_is_a_function_of_the_place():
    key = key_of(seed=3, step=5)
    assert torch.equal(normal(torch.arange(1000, device=DEVICE), key).cpu(), normal(torch.arange(1000), key))


def test_a_file_written_there_goes_on_on_the_cpu():
    there = network().to(DEVICE)
    opt = wideflat.EntropySGD(there.parameters(), epsilon=0.0, **CYCLE, **SGD)
    train(there, opt, DEVICE, steps=4)
    here = copy.deepcopy(there).cpu()
    twin = wideflat.EntropySGD(here.parameters(), epsilon=0.0, **CYCLE, **SGD)
    twin.load_state_dict(copy.deepcopy(opt.state_dict()))
    for p, q in zip(train(there, opt, DEVICE), train(here, twin, "cpu"), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_the_local_energy_there_is_that_on_the_cpu():
    model = network().eval()
    x, y = data()
    settings = {"sigmas": [0.1, 0.5], "max_passes": 20, "progress": False, "metric": "loss"}
    ours = wideflat.local_energy(copy.deepcopy(model).to(DEVICE), (x, y), **settings)
    theirs = wideflat.local_energy(model, (x, y), **settings)
    assert (abs(ours.mean - theirs.mean) < 5 * (ours.stderr + theirs.stderr) + 1e-6).all()


def with_fixed_gradients():
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in ((7, 5), (3,), (64, 65))]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(DEVICE)
    return params


@pytest.mark.filterwarnings("ignore:Profiler record function", "ignore:.torch.jit.:DeprecationWarning")
def test_a_compiled_step_has_the_noise_of_the_device():
    params, others = with_fixed_gradients(), with_fixed_gradients()
    opt, other = (wideflat.EntropySGD(its, epsilon=0.1, **CYCLE, **SGD) for its in (params, others))
    torch._dynamo.reset()
    step = torch.compile(other.step, fullgraph=True, backend="eager" if DEVICE.type == "cpu" else "inductor")
    for _ in range(8):
        opt.step()
        step()
    torch.testing.assert_close(others, params, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs")
def test_a_step_in_a_cuda_graph():
    params, others = with_fixed_gradients(), with_fixed_gradients()
    opt = wideflat.EntropySGD(params, epsilon=0.1, **CYCLE, **SGD)
    other = wideflat.EntropySGD(others, epsilon=0.1, capturable=True, **CYCLE, **SGD)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            other.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other.step()
    for _ in range(7):
        graph.replay()
    for _ in range(10):
        opt.step()
    torch.testing.assert_close(others, params, rtol=1e-4, atol=1e-5)
