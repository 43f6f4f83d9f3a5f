"""Sums over rows in C against einsum, and what an epoch of eSGD refuses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wideflat.kernels.committee import CommitteeKernel

pytestmark = pytest.mark.skipif(not CommitteeKernel.available(torch.zeros(1)), reason="no C compiler here")


@settings(max_examples=60, deadline=None)
@given(
    networks=st.integers(1, 4),
    hidden=st.integers(1, 11),
    batch=st.integers(1, 20),
    used=st.integers(1, 70),
    gap=st.integers(0, 3),
    zeros=st.floats(0, 1),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 100),
)
def test_sums_over_rows(networks, hidden, batch, used, gap, zeros, dtype, seed):
    """Any sizes, with gaps between units as rSGD's table of columns has them, and with rows that are left out."""
    g = torch.Generator().manual_seed(seed)
    size = -(-(used + 1) // 32) * 32
    gram = torch.zeros(size, size, dtype=dtype)
    gram[:used, :used] = torch.randn(used, used, dtype=dtype, generator=g)
    patterns = torch.randint(used + 1, (networks, batch), generator=g)
    c = torch.randn(networks, hidden, batch, dtype=dtype, generator=g)
    c *= (torch.rand(networks, 1, batch, generator=g) >= zeros).to(dtype)
    wide = torch.randn(networks, hidden, size + gap, dtype=dtype, generator=g)
    a, beside = wide[..., :size], wide[..., size:].clone()
    expected = a + torch.einsum("nhb,nbp->nhp", c, gram[patterns])
    count = CommitteeKernel(gram, used).add_rows(a, patterns, c)
    assert count == int((c != 0).any(dim=1).sum())
    torch.testing.assert_close(a, expected, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-5)
    assert torch.equal(wide[..., size:], beside)


def test_rows_without_coefficients_change_nothing():
    """Bit for bit: the sums run in the order of the mini-batch, with the others as if they were not there."""
    g = torch.Generator().manual_seed(0)
    gram = torch.randn(64, 64, generator=g)
    c = torch.randn(2, 9, 16, generator=g)
    c[:, :, ::3] = 0
    kernel, patterns = CommitteeKernel(gram, 63), torch.randint(63, (2, 16), generator=g)
    some, all_of_them = torch.zeros(2, 9, 64), torch.zeros(2, 9, 64)
    kernel.add_rows(some, patterns, c)
    kept = [b for b in range(16) if b % 3]
    kernel.add_rows(all_of_them, patterns[:, kept], c[:, :, kept].contiguous())
    assert torch.equal(some, all_of_them)


def test_refuses_what_does_not_fit():
    kernel = CommitteeKernel(torch.zeros(32, 32), 20)
    with pytest.raises(ValueError, match="do not fit together"):
        kernel.add_rows(torch.zeros(1, 9, 31), torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 9, 4))
    a, m = torch.zeros(1, 9, 32), torch.ones(1, 9, 1)
    with pytest.raises(ValueError, match="do not fit the Gram matrix"):
        kernel.esgd_epoch(a, a.clone(), m, torch.zeros(1, 2, 19, dtype=torch.int64), torch.zeros(32), 10)
