"""The noise is Gaussian, and a function of where it is used."""

import multiprocessing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from wideflat.langevin_noise import GaussianNoise, _quantiles


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


@pytest.fixture
def threads(monkeypatch):
    """Pretend that torch has three threads: the noise takes as many, whatever torch itself uses."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


def added(step):
    pieces = [torch.zeros(300_001), torch.zeros(5, 7), torch.zeros(400, 500).t(), torch.zeros(40_000)]
    places = [2, 300_003, 300_038, 500_038]
    noise = GaussianNoise(2)
    for _ in range(3):  # the same three times: what one call leaves behind does not matter to the next
        noise.add_(pieces, step, places, alpha=1.0)
    return torch.cat([piece.reshape(-1) for piece in pieces])


def test_threads_do_not_matter(threads, monkeypatch):
    several = added(4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert torch.equal(several, added(4))
    assert torch.equal(several[:10], 3 * GaussianNoise(2)(4, 2, 10))


def test_parameters_that_require_a_gradient_on_every_thread(threads):
    p = torch.nn.Parameter(torch.zeros(500_000))
    with torch.no_grad():
        GaussianNoise(2).add_([p], 0, [0], alpha=1.0)
    assert torch.equal(p, GaussianNoise(2)(0, 0, 500_000))


def test_an_error_on_any_thread_is_raised(threads):
    with pytest.raises((RuntimeError, TypeError, IndexError)):
        GaussianNoise(2).add_([torch.zeros(500_000, dtype=torch.bool)], 0, [0], alpha=1.0)


def _send_sum(connection):
    connection.send(added(4).sum().item())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own(threads):
    expected = added(4).sum().item()  # starts the threads of this process
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_send_sum, args=(there,))
    process.start()
    try:
        assert here.poll(30)
        assert here.recv() == expected
    finally:
        process.kill()
        process.join()
