"""The noise by torch's operations: the numbers of C and NumPy, to the last bit."""

import pytest
import torch

from wideflat.kernels.noise import GaussianNoise
from wideflat.kernels.traced_noise import TracedNoise


@pytest.mark.parametrize("seed", [0, -5, 10**20])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (5, 1000), (3, 100_001), (10**10 + 2, 4097)])
def test_the_numbers_are_those_of_the_other_noise(seed, start, count):
    noise = TracedNoise(seed, start, count)
    for step in (0, 7, 1025, 123_456_789, 2**35 + 17):
        assert torch.equal(noise(torch.tensor(step)), GaussianNoise(seed)(step, start, count))


@pytest.mark.slow
def test_the_furthest_tails_are_the_same_too():
    noise, count = TracedNoise(3, 0, 3_000_000), 3_000_000
    for step in range(30):
        assert torch.equal(noise(torch.tensor(step)), GaussianNoise(3)(step, 0, count))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
def test_compiled_they_are_the_same():
    """Whole numbers that go beyond 63 bits may be anything in compiled C++; here none does that matters."""
    noise = TracedNoise(1, 5, 30_001)
    compiled = torch.compile(noise.__call__, fullgraph=True)
    for step in (0, 3, 2**20):
        assert torch.equal(compiled(torch.tensor(step)), GaussianNoise(1)(step, 5, 30_001))
