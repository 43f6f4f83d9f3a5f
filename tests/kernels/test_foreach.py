"""The pieces of a step by torch's operations: noise in any layout, a center that is wider than the weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wideflat.kernels import foreach
from wideflat.kernels.foreach import add_noise, displacement, pull_back, running_mean
from wideflat.kernels.noise import GaussianNoise


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0, 1, 7, 30, 50]), st.integers(0, 3)), min_size=1, max_size=8))
def test_the_noise_of_a_weight_is_that_of_its_place(tensors):
    """Whether small tensors get it together, after gaps, or alone."""
    sizes, places, end = [], [], 0
    for size, gap in tensors:
        places.append(end + gap)
        sizes.append(size)
        end = places[-1] + size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foreach, "RUN", 60)
        w = [torch.zeros(size, dtype=torch.float64) for size in sizes]
        add_noise(w, places, GaussianNoise(1), step=5, scale=2.0)
    for tensor, place in zip(w, places, strict=True):
        assert torch.equal(tensor, 2 * GaussianNoise(1)(5, place, tensor.numel(), torch.float64))


def test_noise_counts_in_the_order_of_memory_where_there_are_no_gaps():
    z = GaussianNoise(0)(0, 0, 6)
    turned, gaps = torch.zeros(3, 2).t(), torch.zeros(2, 3, 2)[..., 0]
    add_noise([turned], [0], GaussianNoise(0), step=0, scale=1.0)
    add_noise([gaps], [0], GaussianNoise(0), step=0, scale=1.0)
    assert torch.equal(turned, z.view(3, 2).t())
    assert torch.equal(gaps, z.view(2, 3))


def test_the_rounding_of_a_wide_center_is_no_displacement():
    w, w_prime = torch.tensor([1.001, 3.0]), torch.tensor([1.001, 4.0]).bfloat16()
    assert displacement([w_prime], [w])[0].tolist() == [0.0, 1.0]
    pull_back([w_prime], [w], 0.5)
    assert w_prime.tolist() == [1.0, 3.5]
    mu = torch.tensor([1.001, 3.0])
    running_mean([mu], [w_prime], 0.5)
    torch.testing.assert_close(mu, torch.tensor([1.0005, 3.25]))
