"""What rounding loses is kept to the last bit, or made up for by chance."""

import copy

import pytest
import torch
from torch import nn

import wideflat
from wideflat.kernels.rounding import ROUNDED, empty_rest, join, part, round_by_chance


def numbers():
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-100, 100, (4000,), generator=generator)
    return torch.cat([torch.ldexp(torch.randn(4000, generator=generator), exponents), torch.tensor([0.0, 1.0, -1.0])])


def test_a_bfloat16_weight_and_its_rest_are_the_float32_weight():
    w = numbers()
    rounded, rest = torch.empty_like(w, dtype=torch.bfloat16), torch.empty_like(w, dtype=torch.int16)
    part(w, rounded, rest)
    assert torch.equal(join(rounded, rest), w)
    assert ((rounded.float() - w).abs() <= (w.bfloat16().float() - w).abs()).all()  # it is the nearest


def test_a_float16_weight_and_its_rest_have_22_bits():
    w = numbers()
    w = w[(w.abs() > 1e-4) & (w.abs() < 6e4)]
    rounded, rest = torch.empty_like(w, dtype=torch.float16), torch.empty_like(w, dtype=torch.float16)
    part(w, rounded, rest)
    assert torch.equal(rounded, w.half())
    assert ((join(rounded, rest) - w).abs() <= 2.0**-22 * w.abs()).all()


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", ROUNDED)
def test_what_is_no_number_stays_so(value, dtype):
    rounded, rest = torch.empty(1, dtype=dtype), torch.empty(1, dtype=ROUNDED[dtype])
    part(torch.tensor([value]), rounded, rest)
    assert torch.equal(rounded.isnan(), torch.tensor([value != value])) and not rounded.isfinite().any()
    round_by_chance(torch.tensor([value]), rounded, torch.tensor([65535]))
    assert not rounded.isfinite().any()


@pytest.mark.parametrize("dtype", ROUNDED)
def test_rounding_by_chance_is_right_on_average(dtype):
    chance = torch.arange(65536)
    for w in (1.0017, -0.3333, 0.02):
        rounded = torch.empty(65536, dtype=dtype)
        round_by_chance(torch.full((65536,), w), rounded, chance)
        eps = torch.finfo(dtype).eps * abs(w)
        assert len(set(rounded.tolist())) == 2
        assert rounded.double().mean().item() == pytest.approx(w, abs=2e-4 * eps + 1e-7 * abs(w))


def centers(dtype, steps, **settings):
    """The center of w^2/2 from 1, with gradients at the weights that the model holds."""
    w = nn.Parameter(torch.ones(500, dtype=dtype))
    opt = wideflat.EntropySGD([w], lr=0.02, inner_lr=0.01, epsilon=0.0, **({"momentum": 0.0} | settings))
    found = []
    for _ in range(steps):
        w.grad = w.detach().clone()
        opt.step()
        found.append(opt.state[w]["center"].mean().item())
    return torch.tensor(found)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("dtype", ROUNDED)
def test_the_center_is_that_of_float32_over_2000_steps(dtype, fused):
    single, half = centers(torch.float32, 2000), centers(dtype, 2000, fused=fused)
    assert single[499].item() == pytest.approx(0.948, abs=5e-4)
    assert (half - single).abs().max() < 1e-5  # bfloat16's rounding is 4e-3


def test_by_chance_it_is_so_on_average_and_to_the_nearest_it_is_not():
    single = centers(torch.float32, 1000)
    chance, nearest = (centers(torch.bfloat16, 1000, rounding=way) for way in ("stochastic", "nearest"))
    assert (chance - single).abs().max() < 3e-4 < (nearest - single).abs().max()


def test_chance_is_a_function_of_seed_and_step():
    one, same, other = (centers(torch.bfloat16, 7, rounding="stochastic", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_what_is_kept_costs_two_bytes_a_weight_and_goes_with_the_type():
    w = nn.Parameter(torch.ones(500, dtype=torch.bfloat16))
    opt = wideflat.EntropySGD([w], inner_steps=4, momentum=0.9)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16):
        w.data = w.data.to(dtype)
        w.grad = w.detach().clone()
        opt.step()
        if dtype in ROUNDED:
            rest = opt.state[w]["rest"]
            assert rest.dtype == ROUNDED[dtype] and rest.numel() * rest.element_size() == 2 * w.numel()


def test_a_run_goes_on_from_a_file_to_the_last_bit():
    def run(w, opt, steps):
        for _ in range(steps):
            w.grad = w.detach() * 0.3
            opt.step()

    w = nn.Parameter(torch.linspace(0.5, 2, 40).bfloat16())
    opt = wideflat.EntropySGD([w], inner_lr=1e-3, inner_steps=4, momentum=0.9)
    run(w, opt, 6)
    twin = nn.Parameter(w.detach().clone())
    other = wideflat.EntropySGD([twin], inner_lr=1e-3, inner_steps=4, momentum=0.9)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    run(w, opt, 7)
    run(twin, other, 7)
    assert torch.equal(opt.state[w]["rest"], other.state[twin]["rest"]) and torch.equal(w, twin)
    assert torch.equal(opt.state[w]["center"], other.state[twin]["center"])


def test_rest_of_nothing_is_zero():
    assert not join(torch.zeros(3, dtype=torch.float16), empty_rest(torch.zeros(3, dtype=torch.float16))).any()


def test_another_way_to_round_is_refused():
    with pytest.raises(ValueError, match=r'rounding must be "kept", "nearest" or "stochastic", got .up.'):
        wideflat.EntropySGD([nn.Parameter(torch.ones(1))], rounding="up")
