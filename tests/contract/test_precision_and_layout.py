"""Half precision, any layout in memory, casts, checked shapes: what holds for every optimizer of the package."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import CENTERED, COVERING, CYCLE, OPTIMIZERS, SGD, gradients_at, step, weights, without_noise
from torch import nn

import wideflat

pytestmark = pytest.mark.filterwarnings("ignore:.*SAM perturbs 16-bit weights")
every = pytest.mark.parametrize("name", COVERING)


# ------------------------------------------------------------------------------------------------------ half precision

#: 16-bit weights go in vectors of 16, 8 or 4 through a kernel; the rest of them one by one.
SIZES = [3, 16, 17, 40, 10_000]


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_trains_as_float32_does(name, dtype):
    half, single = weights(SIZES, dtype), [nn.Parameter(p.detach().float()) for p in weights(SIZES, dtype)]
    first = [p.detach().clone() for p in single]
    opts = [OPTIMIZERS[name](params) for params in (half, single)]
    for t in range(9):
        step(opts[0], half, t)
        step(opts[1], single, t)
    for p, q, before in zip(half, single, first, strict=True):
        rounding = torch.finfo(dtype).eps * p.detach().float().abs().max().item()
        assert (p.float() - q).abs().max() < 6 * rounding  # of nine steps, which do not all go one way
        assert (q - before).abs().mean() > 2 * rounding  # they have gone far


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["rSGD", "EASGD", "Parle"])
def test_replicas_in_half_precision_train_as_in_float32(kind, dtype):
    def make():
        torch.manual_seed(0)
        return wideflat.Replicas(lambda: nn.Linear(40, 17).to(dtype), 3)

    half = make()
    single = copy.deepcopy(half).float()
    for replicas in (half, single):
        params = list(replicas.parameters())
        if kind == "Parle":
            opt = wideflat.EntropySGD(params, epsilon=0.0, **CYCLE, **SGD)
            coupling = wideflat.Parle(replicas, opt, gamma=0.3)
        else:
            opt = torch.optim.SGD(params, lr=0.02, **SGD)
            coupling = {"rSGD": wideflat.ReplicaCoupling, "EASGD": wideflat.EASGD}[kind](replicas, period=2, gamma=0.3)
        for t in range(9):
            opt.zero_grad()
            gradients_at(params, t)
            if kind != "Parle":
                coupling.couple()
            opt.step()
            if kind == "Parle":
                coupling.couple()
    for p, q in zip(half.parameters(), single.parameters(), strict=True):
        assert (p.float() - q).abs().max() < 8 * torch.finfo(dtype).eps * q.abs().max()


@pytest.mark.parametrize("fused", [None, False])
def test_steps_below_the_rounding_of_the_weights_are_not_lost(fused):
    centers = {}
    for dtype in (torch.float32, torch.bfloat16):
        w = nn.Parameter(torch.ones(40, dtype=dtype))
        opt = wideflat.EntropySGD([w], lr=0.02, inner_lr=0.01, epsilon=0.0, momentum=0, fused=fused)
        for _ in range(500):
            w.grad = w.detach().clone()
            opt.step()
        centers[dtype] = opt.state[w]["center"]
    assert centers[torch.bfloat16].dtype == torch.float32
    assert centers[torch.float32][0].item() == pytest.approx(0.948, abs=5e-4)
    assert (centers[torch.bfloat16] - centers[torch.float32]).abs().max() < torch.finfo(torch.bfloat16).eps


def test_a_float32_center_of_half_precision_weights_survives_a_file_and_casts():
    make = OPTIMIZERS["EntropySGD"]
    params = weights([40], torch.bfloat16)
    opt = make(params)
    for t in range(7):
        step(opt, params, t)
    again = [nn.Parameter(p.detach().clone()) for p in params]
    other = make(again)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    for p, q in zip(params, again, strict=True):
        for name in ("center", "mean", "momentum_buffer", "outer_momentum_buffer"):
            assert other.state[q][name].dtype == torch.float32
            assert torch.equal(other.state[q][name], opt.state[p][name])
    for t in range(7, 12):
        step(opt, params, t)
        step(other, again, t)
    assert torch.equal(params[0], again[0])


# -------------------------------------------------------------------------------------------------- layouts in memory


def lay_out(values, kind):
    """A parameter with these values, in a memory of its own or as part of a larger one; and that larger one."""
    if kind == "column":
        whole = torch.full((*values.shape, 3), 7.0, dtype=values.dtype)
        return nn.Parameter(whole[..., 1].copy_(values)), whole
    if kind == "slice":
        whole = torch.full((values.shape[0] * 2, *values.shape[1:]), 7.0, dtype=values.dtype)
        return nn.Parameter(whole[::2].copy_(values)), whole
    if kind == "transposed":
        return nn.Parameter(values.transpose(0, -1).contiguous().transpose(0, -1)), None
    formats = {"channels_last": torch.channels_last, "channels_last_3d": torch.channels_last_3d}
    if kind in formats and values.dim() == (4 if kind == "channels_last" else 5):
        return nn.Parameter(values.to(memory_format=formats[kind])), None
    return nn.Parameter(values.clone()), None


KINDS = ["contiguous", "column", "slice", "transposed", "channels_last", "channels_last_3d"]
tensors = st.tuples(
    st.sampled_from([(7,), (40,), (5, 6), (4, 3, 2, 2), (2, 3, 2, 2, 2), (1, 5), (3, 1, 2, 1)]),
    st.sampled_from(KINDS),
    st.sampled_from([*KINDS, "expanded"]),
)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(COVERING)),
    made=st.lists(tensors, min_size=1, max_size=3),
    double=st.booleans(),
)
def test_the_layout_of_weights_and_gradients_changes_nothing(name, made, double):
    """Noise counts weights in the order of memory, so it is off here; memory beside the weights is not touched."""
    amplified = name == "LookSAM"  # it divides by what is left of two nearly parallel gradients: 1e-16 becomes 1e-10
    double = double or amplified
    dtype = torch.float64 if double else torch.float32
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator, dtype=dtype) for shape, _, _ in made]
    laid_out = [lay_out(value, kind) for value, (_, kind, _) in zip(values, made, strict=True)]
    odd, plain = [p for p, _ in laid_out], [nn.Parameter(value.clone()) for value in values]
    results = []
    for params in (odd, plain):
        opt = OPTIMIZERS[name](params)
        for group in opt.param_groups:
            group.update({"epsilon": 0.0} if "epsilon" in group else {})
        for t in range(7):

            def closure(params=params, opt=opt, t=t):
                opt.zero_grad()
                gradients_at(params, t)
                for p, (_, _, kind) in zip(params, made, strict=True):
                    p.grad = torch.full_like(p[:1], 0.3).expand(p.shape) if kind == "expanded" else p.grad
                    if params is odd and kind not in ("expanded", "contiguous"):
                        p.grad = lay_out(p.grad, kind)[0].detach()
                return torch.zeros(())

            if isinstance(opt, wideflat.SAM):
                opt.step(closure)
            else:
                closure()
                opt.step()
        results.append([p.detach().clone() for p in params])
    for p, q in zip(*results, strict=True):
        rtol, atol = (1e-7, 1e-8) if amplified else (1e-11, 1e-12) if double else (1e-4, 1e-5)
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol)
    for (p, whole), (_, kind, _) in zip(laid_out, made, strict=True):
        if whole is not None:
            beside = whole[..., [0, 2]] if kind == "column" else whole[1::2]
            assert (beside == 7).all(), p.shape


@pytest.mark.parametrize("name", [name for name in CENTERED if name in COVERING])
def test_an_expanded_parameter_is_refused(name):
    with pytest.raises(ValueError, match="its elements share memory"):
        OPTIMIZERS[name]([nn.Parameter(torch.zeros(1).expand(5))])


def convolutions(memory_format=torch.contiguous_format):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3)).double()
    return net.to(memory_format=memory_format)


def train(net, opt, steps, start=0):
    for t in range(start, start + steps):
        x = torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(t))

        def closure(x=x):
            opt.zero_grad()
            loss = net(x.to(net[0].weight.dtype)).square().sum()
            loss.backward()
            return loss

        opt.step(closure)


@every
@pytest.mark.parametrize("when", [0, 2, 3])
def test_channels_last_after_the_optimizer_was_made(name, when):
    nets = [convolutions(), convolutions()]
    for turned, net in enumerate(nets):
        opt = without_noise(OPTIMIZERS[name](list(net.parameters())))
        train(net, opt, when)
        if turned:
            net.to(memory_format=torch.channels_last)
        train(net, opt, 7 - when, start=when)
    torch.testing.assert_close(*(list(net.parameters()) for net in nets), rtol=1e-11, atol=1e-12)


# Not LookSAM, which divides by the length of what is left of two nearly parallel gradients: 1e-16 becomes 1e-10 there.
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "LookSAM"])
def test_a_contiguous_checkpoint_in_a_channels_last_model(name):
    net = convolutions()
    opt = without_noise(OPTIMIZERS[name](list(net.parameters())))
    train(net, opt, 4)
    again = convolutions(torch.channels_last)
    other = without_noise(OPTIMIZERS[name](list(again.parameters())))
    again.load_state_dict(net.state_dict())
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert again[0].weight.is_contiguous(memory_format=torch.channels_last)
    train(net, opt, 7, start=4)
    train(again, other, 7, start=4)
    torch.testing.assert_close(list(net.parameters()), list(again.parameters()), rtol=1e-11, atol=1e-12)


@every
def test_a_parameter_turned_in_place_between_two_steps(name):
    """``p.data = p.data.t()`` keeps the address."""
    values = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = []
    for turn in (lambda p: p.data.t(), lambda p: p.data.t().contiguous()):
        p = nn.Parameter(values.clone())
        opt = without_noise(OPTIMIZERS[name]([p]))
        for t in range(7):
            if t == 3:  # the start of a cycle
                p.data = turn(p)
            step(opt, [p], t)
        results.append(p.detach())
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)


# -------------------------------------------------------------------------------------------------- casts and shapes


@every
@pytest.mark.parametrize("when", [0, 3, 4])
def test_the_model_may_be_cast_after_the_optimizer_was_made(name, when):
    net, twin = convolutions().float(), convolutions()
    opt, other = without_noise(OPTIMIZERS[name](list(net.parameters()))), OPTIMIZERS[name](list(twin.parameters()))
    without_noise(other)
    train(net, opt, when)
    net.double()
    train(net, opt, 7 - when, start=when)
    train(twin, other, 7)
    torch.testing.assert_close(list(net.parameters()), list(twin.parameters()), rtol=1e-4, atol=1e-5)
    net.bfloat16()
    train(net, opt, 3, start=7)
    train(twin, other, 3, start=7)
    assert net[0].weight.dtype == torch.bfloat16
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        if name == "LookSAM":  # in bfloat16 what it takes from two nearly parallel gradients is mostly their rounding
            assert p.isfinite().all()
        else:
            torch.testing.assert_close(p.double(), q, rtol=0, atol=0.03)


@pytest.mark.parametrize("name", [name for name in CENTERED if name in COVERING])
def test_another_shape_is_refused_and_never_reaches_the_kernel(name):
    make = OPTIMIZERS[name]
    small, large = weights([100]), weights([100_000])
    opt, other = make(small), make(large)
    step(opt, small, 0)
    step(other, large, 0)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=r"has the shape \(100,\), the parameter \(100000,\)"):
        other.load_state_dict(opt.state_dict())
    assert torch.equal(other.state[large[0]]["center"], before["state"][0]["center"])  # nothing has changed
    for t in (1, 2):  # within a cycle and at its end
        small[0].data = torch.ones(1_000_000)
        small[0].grad = None
        gradients_at(small, t)
        with pytest.raises(RuntimeError, match=r"has the shape \(1000000,\), and had \(100,\)"):
            opt.step()


def entropic(params, **settings):
    return wideflat.Entropic(torch.optim.AdamW(params), inner_steps=3, **settings)


BYTES = {  # a weight of state in float32 and in bfloat16: the table of docs/devices.md
    "SGD": (partial(torch.optim.SGD, momentum=0.9), 4, 2),
    "momentum in both loops": (wideflat.EntropySGD, 16, 18),
    "outer_momentum=0": (partial(wideflat.EntropySGD, momentum=0.9, outer_momentum=0.0), 12, 14),
    "alpha=0": (partial(wideflat.EntropySGD, alpha=0.0), 12, 14),
    "both": (partial(wideflat.EntropySGD, momentum=0.9, outer_momentum=0.0, alpha=0.0), 8, 10),
    "no momentum": (partial(wideflat.EntropySGD, momentum=0.0), 8, 10),
    "no momentum, alpha=0": (partial(wideflat.EntropySGD, momentum=0.0, alpha=0.0), 4, 6),
    "nearest": (partial(wideflat.EntropySGD, rounding="nearest"), 16, 16),
    "AdamW": (torch.optim.AdamW, 8, 4),
    "Entropic(AdamW)": (entropic, 16, 12),
    "Entropic(AdamW), alpha": (partial(entropic, alpha=0.5), 20, 16),
}


@pytest.mark.parametrize("kind", [0, 1], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", BYTES)
def test_state_takes_the_bytes_that_the_documents_say(name, kind):
    make, expected, size = BYTES[name][0], BYTES[name][1 + kind], 1000
    p = nn.Parameter(torch.ones(size, dtype=(torch.float32, torch.bfloat16)[kind]))
    opt = make([p])
    for _ in range(7):
        p.grad = torch.ones_like(p)
        opt.step()
    parts = [opt, *getattr(opt, "inner", []), *([opt.outer] if hasattr(opt, "outer") else [])]
    kept = {}
    for state in (state for part in parts for state in part.state.values()):
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.numel() >= size:
                kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    kept.pop(p.untyped_storage().data_ptr(), None)  # w' itself, where it stands for its mean
    assert sum(kept.values()) == expected * size
