"""The noise is Gaussian, and a function of where it is used."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from wideflat.kernels.noise import GaussianNoise
from wideflat.kernels.normal_parts import TAIL_BITS, TAIL_LEVELS, TAIL_PARTS, body_means, tail_means
from wideflat.kernels.numpy_noise import CHUNK


def test_the_distribution_is_normal():
    z = GaussianNoise(seed=11)(step=3, start=0, count=1_000_000, dtype=torch.float64).numpy()
    assert stats.kstest(z, "norm").pvalue > 1e-3
    assert abs(z.mean()) < 4 / np.sqrt(len(z))
    assert abs(z.var() - 1) < 4 * np.sqrt(2 / len(z))
    assert abs((z**4).mean() - 3) < 4 * np.sqrt(96 / len(z))
    counts = np.histogram(z, bins=stats.norm.ppf(np.linspace(0, 1, 101)[1:-1]))[0]
    assert stats.chisquare(counts).pvalue > 1e-3


def by_hand(seed, step, place):
    """One number from the definition, with Python's integers."""
    bits = np.random.PCG64DXSM(seed * 2)
    origin = bits.state["state"]["state"]
    bits.advance((step * 210306068529402873165736369884012333109 + place // 4) % 2**128)
    part = int(bits.random_raw()) >> 16 * (place % 4) & 0xFFFF
    sign, part = (1, 65535 - part) if part >= 32768 else (-1, part)
    if part >= TAIL_PARTS:
        return sign * float(body_means(torch.float32)[65535 - part])

    def mix(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    golden = 0x9E3779B97F4A7C15
    key = mix((mix(origin % 2**64 ^ origin >> 64) + step * golden) % 2**64)
    more = mix((key + (place + 1) * golden) % 2**64)
    level = -1
    while part < TAIL_PARTS and level < TAIL_LEVELS - 1:
        level += 1
        part = part * 2**TAIL_BITS + more % 2**TAIL_BITS
        more >>= TAIL_BITS
    return sign * float(tail_means(torch.float32)[level, part])


def test_every_number_is_that_of_the_definition():
    places = [*range(40), *range(10**6 + 3, 10**6 + 400), 2**40 + 7]
    for step in (0, 12345):
        for place in places:
            assert GaussianNoise(6)(step, place, 1).item() == by_hand(6, step, place)
    z = GaussianNoise(6)(3, 0, 400_000)
    far = (z.abs() > 4).nonzero().squeeze(1).tolist()
    assert len(far) > 10
    assert [z[place].item() for place in far] == [by_hand(6, 3, place) for place in far]


def check_the_distribution(draws):
    """Kolmogorov and Smirnov at 20,001 points, and the numbers beyond many points, against the binomial."""
    edges = np.concatenate([[-np.inf], stats.norm.ppf(np.linspace(0, 1, 20_001)[1:-1]), [np.inf]])
    beyond = np.arange(2.4, 5.6, 0.05)
    counts, tails, done = np.zeros(len(edges) - 1), np.zeros((2, len(beyond))), 0
    noise, part = GaussianNoise(23), 5_000_000
    while done < draws:
        z = noise.fill(torch.empty(part), step=done // part).numpy()
        counts += np.histogram(z, edges)[0]
        tails += [[(z > t).sum() for t in beyond], [(z < -t).sum() for t in beyond]]
        done += part
    distance = np.abs(counts.cumsum() / draws - stats.norm.cdf(edges[1:])).max()
    assert stats.kstwobign.sf(distance * math.sqrt(draws)) > 1e-3
    for side in tails:
        low, high = stats.binom.ppf([1e-5, 1 - 1e-5], draws, stats.norm.sf(beyond)[:, None]).T
        assert ((low <= side) & (side <= high)).all(), list(zip(beyond, low, side, high, strict=True))


def test_ten_million_draws():
    check_the_distribution(10**7)


@pytest.mark.slow
def test_a_hundred_million_draws():
    check_the_distribution(10**8)


@pytest.mark.parametrize(
    "what", ["next step", "next place", "next seed", "negative seed", "far seed", "far step", "lag 1 within"]
)
def test_no_correlation(what):
    n = 400_000
    z = GaussianNoise(0)(step=100, start=0, count=n)
    other = {
        "next step": lambda: GaussianNoise(0)(step=101, start=0, count=n),
        "next place": lambda: GaussianNoise(0)(step=100, start=n, count=n),
        "next seed": lambda: GaussianNoise(1)(step=100, start=0, count=n),
        "negative seed": lambda: GaussianNoise(-1)(step=100, start=0, count=n),
        "far seed": lambda: GaussianNoise(2**64)(step=100, start=0, count=n),
        "far step": lambda: GaussianNoise(0)(step=100 + 2**16, start=0, count=n),
        "lag 1 within": lambda: z.roll(1),
    }[what]()
    for f in (lambda x: x, torch.square, torch.abs):
        correlation = torch.corrcoef(torch.stack([f(z), f(other)]))[0, 1].item()
        assert abs(correlation) < 4.5 / np.sqrt(n)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 500), st.integers(1, 50)), min_size=1, max_size=6))
def test_any_part_in_any_order(requests):
    used = GaussianNoise(5)
    for step, start, count in requests:
        whole = GaussianNoise(5)(step, 0, start + count)
        assert torch.equal(used(step, start, count), whole[start:])


@pytest.mark.parametrize("seeds", [(3, -3), (3, 4), (0, 2**63)], ids=str)
def test_two_seeds_are_independent(seeds):
    """No correlation of the numbers, their squares or their signs, at equal places and at neighbouring ones; and the
    tails, whose further bits come from elsewhere, are not at the same places, nor of the same sizes.
    """
    n = 400_000
    one, other = (GaussianNoise(seed)(0, 0, n) for seed in seeds)
    for shift in (0, 1, 4, 1024):
        for f in (lambda x: x, torch.square, torch.sign):
            correlation = torch.corrcoef(torch.stack([f(one), f(other.roll(shift))]))[0, 1].item()
            assert abs(correlation) < 4.5 / math.sqrt(n)
    both = (one.abs() > 2.9) & (other.abs() > 2.9)
    assert stats.binom.cdf(int(both.sum()), n, (2 * stats.norm.sf(2.9)) ** 2) < 1 - 1e-4


def test_the_further_bits_do_not_depend_on_the_first():
    """Where in its part a number of the tail lies is uniform, and says nothing of the number beside it."""
    z = GaussianNoise(8)(1, 0, 4_000_000).double()
    places = (z[:-1].abs() > 2.9).nonzero().squeeze(1)
    within = torch.special.ndtr(-z[places].abs() / (1 - 1.8e-5)) * 65536 % 1
    assert stats.chisquare(np.histogram(within, bins=16, range=(0, 1))[0]).pvalue > 1e-3
    for beside in (z[places + 1], z[places + 1].abs(), z[places].sign()):
        assert abs(torch.corrcoef(torch.stack([within, beside]))[0, 1].item()) < 4.5 / math.sqrt(len(places))


def test_added_to_pieces_of_every_kind():
    shapes, places = [(3,), (2, 5), (270_000,), (), (7,), (1,), (300, 300)], []
    pieces = [torch.zeros(shape) for shape in shapes]
    pieces[-1] = pieces[-1].t()
    place = 3
    for piece in pieces:
        places.append(place)
        place += piece.numel()
    places[4:] = [place + 11 for place in places[4:]]  # a gap, as a parameter without a gradient leaves
    noise = GaussianNoise(2)
    noise.add_(pieces, 9, places, alpha=0.5)
    for piece, place in zip(pieces, places, strict=True):
        assert torch.equal(piece, 0.5 * GaussianNoise(2)(9, place, piece.numel()).view(piece.shape))


def test_every_place_takes_a_number_of_its_own():
    """Of the values of the body, as many are met as independent draws would meet, also far beyond a chunk."""
    z = GaussianNoise(2)(4, 0, 10 * CHUNK)
    expected = (65536 - 2 * TAIL_PARTS) * (1 - math.exp(-len(z) / 65536))
    body = z[z.abs() <= body_means(torch.float32)[-TAIL_PARTS - 1]]
    assert abs(len(body.unique()) - expected) < 300
    chunks = z.view(10, CHUNK).double()
    overlaps = torch.corrcoef(chunks) - torch.eye(10, dtype=torch.float64)
    assert overlaps.abs().max() < 5 / math.sqrt(CHUNK)


def test_parameters_that_require_a_gradient_and_other_types():
    p = torch.nn.Parameter(torch.zeros(100_000, dtype=torch.float64))
    GaussianNoise(2).add_([p], 0, [0], alpha=1.0)
    assert torch.equal(p, GaussianNoise(2)(0, 0, 100_000, torch.float64))
    half = torch.zeros(1000, dtype=torch.bfloat16)
    GaussianNoise(2).add_([half], 0, [0], alpha=1.0)
    assert torch.equal(half, p[:1000].bfloat16())
