"""The noise is Gaussian, and a function of where it is used."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from wideflat.kernels.noise import CHUNK, GaussianNoise, _quantiles


def test_the_distribution_is_normal():
    z = GaussianNoise(seed=11)(step=3, start=0, count=1_000_000, dtype=torch.float64).numpy()
    assert stats.kstest(z, "norm").pvalue > 1e-3
    assert abs(z.mean()) < 4 / np.sqrt(len(z))
    assert abs(z.var() - 1) < 4 * np.sqrt(2 / len(z))
    assert abs((z**4).mean() - 3) < 4 * np.sqrt(96 / len(z))
    counts = np.histogram(z, bins=stats.norm.ppf(np.linspace(0, 1, 101)[1:-1]))[0]
    assert stats.chisquare(counts).pvalue > 1e-3


def test_the_table_has_exact_moments_and_normal_quantiles():
    table = _quantiles(torch.float64)
    assert table.mean().abs() < 1e-12
    assert (table.square().mean() - 1).abs() < 1e-12
    assert (table.pow(4).mean() - 3).abs() < 1e-3
    middles = torch.special.ndtri((torch.arange(65536, dtype=torch.float64) + 0.5) / 65536)
    assert (table - middles)[100:-100].abs().max() < 1e-3


@pytest.mark.parametrize("what", ["next step", "next place", "next seed", "far step", "lag 1 within"])
def test_no_correlation(what):
    n = 400_000
    z = GaussianNoise(0)(step=100, start=0, count=n)
    other = {
        "next step": lambda: GaussianNoise(0)(step=101, start=0, count=n),
        "next place": lambda: GaussianNoise(0)(step=100, start=n, count=n),
        "next seed": lambda: GaussianNoise(1)(step=100, start=0, count=n),
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


def test_negative_seeds_are_other_seeds():
    assert not torch.equal(GaussianNoise(-3)(0, 0, 8), GaussianNoise(3)(0, 0, 8))


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
    """Of the 65536 values, as many are met as independent draws would meet, also far beyond a chunk."""
    z = GaussianNoise(2)(4, 0, 10 * CHUNK)
    expected = 65536 * (1 - math.exp(-len(z) / 65536))
    assert abs(len(z.unique()) - expected) < 300
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
