"""The compiled steps of Entropy-SGD: the same as torch's operations, with the same noise."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import wideflat
from wideflat.kernels.entropy_sgd import KernelLists, Rule
from wideflat.kernels.library import kernel_is_there
from wideflat.kernels.noise import GaussianNoise

pytestmark = pytest.mark.skipif(not kernel_is_there(torch.zeros(1)), reason="no C compiler here")


def noise_by_the_kernel(sizes, offsets, seed, step, dtype=torch.float32):
    """A step that adds the noise to zero, and nothing else."""
    x, w, mu, g = ([torch.zeros(size, dtype=dtype) for size in sizes] for _ in range(4))
    KernelLists(x, w, mu, offsets=offsets).inner_step(g, Rule(noise=1.0), GaussianNoise(seed), step)
    return x


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tensors=st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 3, 5, 8, 1023, 1024, 1025, 5000]), st.integers(0, 9)), min_size=1
    ),
    seed=st.integers(-3, 10**6),
    step=st.integers(0, 10**9),
)
def test_the_noise_is_that_of_gaussian_noise_bit_for_bit(tensors, seed, step):
    """Also where tensors share a word of random bits, and where a parameter without a gradient leaves a gap."""
    sizes, offsets, place = [], [], 0
    for size, gap in tensors:
        sizes.append(size)
        offsets.append(place + gap)
        place += gap + size
    for size, offset, z in zip(sizes, offsets, noise_by_the_kernel(sizes, offsets, seed, step), strict=True):
        assert torch.equal(z, GaussianNoise(seed)(step, offset, size))


def test_the_noise_of_large_and_double_tensors():
    (z,) = noise_by_the_kernel([300_001], [7], seed=2, step=5, dtype=torch.float64)
    assert torch.equal(z, GaussianNoise(2)(5, 7, 300_001, torch.float64))


def network(dtype=torch.float32):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 40, 3), nn.Flatten(), nn.Linear(360, 400), nn.ReLU(), nn.Linear(400, 3))
    return net.to(dtype)


def train(net, steps, threads=1, **arguments):
    before = torch.get_num_threads()
    opt = wideflat.EntropySGD(
        net.parameters(), inner_lr=0.05, inner_steps=3, epsilon=0.01, weight_decay=1e-3, **arguments
    )
    generator = torch.Generator().manual_seed(1)
    try:
        for _ in range(steps):
            x = torch.randn(16, 3, 5, 5, generator=generator).to(net[0].weight.dtype)
            opt.zero_grad()
            nn.functional.cross_entropy(net(x), x.mean((1, 2, 3)).sign().long() + 1).backward()
            torch.set_num_threads(threads)
            opt.step()
            torch.set_num_threads(before)
    finally:
        torch.set_num_threads(before)
    return opt


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("momentum", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}], ids=str)
def test_equals_torch_operations(momentum, layout):
    nets = [network(torch.float64).to(memory_format=layout) for _ in range(2)]
    opts = [train(net, 8, fused=fused, **momentum) for net, fused in zip(nets, (True, False), strict=True)]
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-12)
        for name, value in opts[1].state[q].items():
            torch.testing.assert_close(opts[0].state[p][name], value, rtol=1e-11, atol=1e-12)
    assert set(opts[0]._kernels) == {("inner", 0), ("outer", 0)}
    assert not opts[1]._kernels


def test_threads_change_nothing():
    one, three = network(), network()
    train(one, 5, threads=1, momentum=0.9, fused=True)
    train(three, 5, threads=3, momentum=0.9, fused=True)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), three.parameters(), strict=True))


def test_gradients_that_lie_otherwise_in_memory():
    torch.manual_seed(0)
    value, gradient = torch.randn(4, 3, 2, 2), torch.randn(4, 3, 2, 2)
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(value.clone())
        p.grad = gradient.clone(memory_format=layout)
        wideflat.EntropySGD([p], epsilon=0.1, momentum=0.9, fused=True).step()
        results.append(p.detach())
    assert torch.equal(*results)


def test_autograd_notices_the_step():
    p = nn.Parameter(torch.ones(3))
    opt = wideflat.EntropySGD([p], fused=True)
    p.grad = torch.ones(3)
    loss = (p * p).sum()
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_does_not_fit_uses_torch_or_is_refused():
    single, double = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.float64))
    half = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    with_gaps = nn.Parameter(torch.ones(3, 2)[:, 0])
    for params in ([single, double], [half], [with_gaps]):
        for p in params:
            p.grad = torch.ones_like(p)
        before = [p.detach().clone() for p in params]
        wideflat.EntropySGD(params).step()
        assert not any(torch.equal(p, q) for p, q in zip(params, before, strict=True))
        opt = wideflat.EntropySGD(params, fused=True)
        with pytest.raises(RuntimeError, match="fused=None, which falls back"):
            opt.step()


def test_copies_keep_the_choice_and_make_their_own_lists():
    p = nn.Parameter(torch.ones(3))
    opt = wideflat.EntropySGD([p], fused=False)
    assert copy.deepcopy(opt)._fused is False
    opt = wideflat.EntropySGD([p], fused=True)
    p.grad = torch.ones(3)
    opt.step()
    twin = copy.deepcopy(opt)
    assert twin._fused is True
    assert not twin._kernels


def test_lists_match_only_the_same_memory_lying_as_it_did():
    whole = torch.zeros(9, 3)
    p = nn.Parameter(whole[:3])
    w, mu, v = (torch.zeros(3, 3) for _ in range(3))
    lists = KernelLists([p], [w], [mu], [v], offsets=[0])
    assert lists.matches([p], [w], [mu], [v], offsets=[0])
    assert not lists.matches([p], [w], [mu], [v], offsets=[1])
    assert not lists.matches([p], [w], [mu], [torch.zeros(3, 3)], offsets=[0])
    for other in (whole[:3].t(), whole[:6], torch.zeros(3, 3)):  # two of them begin at the same address
        p.data = other
        assert not lists.matches([p], [w], [mu], [v], offsets=[0])


def test_the_kernel_gets_no_gradient_of_another_shape():
    tensors = [[torch.zeros(100)] for _ in range(3)]
    lists = KernelLists(*tensors, offsets=[0])
    with pytest.raises(RuntimeError, match="a gradient has another shape"):
        lists.inner_step([torch.ones(3)], Rule(lr=1.0), None, 0)
    assert not tensors[0][0].any()


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has none of another type")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["EntropySGD", "Entropic"])
def test_gradients_of_another_type_are_numbers_of_that_type(kind, dtype):
    """And not the bytes of others, some of which lie behind their end."""
    found = []
    for own in (torch.float32, dtype):
        p = nn.Parameter(torch.linspace(1, 2, 1000))
        p.grad_dtype = own
        if kind == "EntropySGD":
            opt = wideflat.EntropySGD([p], inner_steps=2, inner_lr=0.1, momentum=0.9)
        else:
            opt = wideflat.Entropic(torch.optim.SGD([p], lr=0.1), inner_steps=2, pull=1.0)
        for step in range(5):
            p.grad = (torch.linspace(-1, 1, 1000) * (step + 1)).to(dtype).to(own)
            opt.step()
        found.append(p.detach())
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)
