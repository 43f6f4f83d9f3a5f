r"""The vote channel: the probability that a committee answers right when its pre-activations are uncertain.

One pattern with target y = +1 or -1 is shown to a committee of H units (H odd). The pre-activation of unit h is
Gaussian with mean omega_h and variance V_h, independently of the others, so the unit votes for the target with
probability p_h = Phi(u_h), u_h = y omega_h / sqrt(V_h), and the number K of right votes has a Poisson binomial
distribution. With m = (H - 1)/2 the committee is right when K > m:

.. code-block:: text

    Z_out = P(K >= m + 1)           B_h = P(K without h = m)          (unit h is pivotal)
    g_h   =  d log Z_out / d omega_h     = y phi(u_h) B_h / (sqrt(V_h) Z_out)
    G_h   = -d^2 log Z_out / d omega_h^2 = g_h (g_h + omega_h / V_h)            (may be negative for H > 1)
    d log Z_out / d V_h = (g_h^2 - G_h) / 2                                     (heat equation)

Everything is a sum of non-negative terms, so nothing cancels: with F_h[k] the probability of k right votes among the
first h units and S_h[k] that of k right votes among the units after h,

.. code-block:: text

    Z_out = sum_h p_h F_{h-1}[m]                      (the deciding vote is that of unit h)
    B_h   = sum_k F_{h-1}[k] S_h[m - k]               (from prefix and suffix tables, never by deconvolution)

The tables hold probabilities where these do not underflow and their logarithms where they do.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Channel", "log_majority", "vote_channel", "vote_hessian"]

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)

#: Below this Z_out the tables are made in log space. What underflows above it changes g by less than its square root.
_LINEAR_FLOOR = {torch.float64: 1e-200, torch.float32: 1e-20}


class Channel(NamedTuple):
    """What the channel says of each pattern: ``log_z`` of shape (...), ``g`` and ``G`` of shape (H, ...)."""

    log_z: Tensor
    g: Tensor
    G: Tensor


def vote_channel(omega: Tensor, V: Tensor, y: Tensor) -> Channel:
    r"""Logarithm of Z_out, its first derivative g and minus its second derivative G in each mean (the equations above).

    Args:
        omega: Means of the pre-activations, shape (H, ...) with H odd.
        V: Their variances, positive, same shape.
        y: Targets, +1 or -1, shape (...) or what broadcasts to it.

    Returns:
        ``Channel(log_z, g, G)``. In float64 the relative error is about 1e-14 where \|u\| < 30 and grows to 1e-9 for
        g at 600 standard deviations; a g below 1e-100 may come out as zero.

    Example:
        Three units, each undecided: the committee is right with probability 1/2, and a unit is pivotal with probability
        1/2, so g = phi(0) (1/2) / (1/2) = 0.3989.

        >>> log_z, g, G = vote_channel(torch.zeros(3, 1), torch.ones(3, 1), torch.ones(1))
        >>> round(log_z.exp().item(), 4), round(g[0, 0].item(), 4), round(G[0, 0].item(), 4)
        (0.5, 0.3989, 0.1592)
    """
    _check_odd(omega.shape[0])
    shape = omega.shape
    scale = V.rsqrt()
    u = y * omega * scale
    log_z, slope = _votes(u.reshape(shape[0], -1))
    g = slope.reshape(shape) * (y * scale)
    return Channel(log_z.reshape(shape[1:]), g, g * (g + omega / V))


def vote_hessian(omega: Tensor, V: Tensor, y: Tensor) -> Tensor:
    r"""All second derivatives J_hk = d^2 log Z_out / d omega_h d omega_k, shape (H, H, ...).

    .. code-block:: text

        J_hh = -G_h
        J_hk = y phi(u_h)/sqrt(V_h) y phi(u_k)/sqrt(V_k) [P(K without h, k = m - 1) - P(K without h, k = m)] / Z_out
               - g_h g_k

    The two probabilities are those of a committee that h and k together turn from wrong to right, and from right to
    wrong. Negative for most patterns: where one unit votes right, the others need to less.

    Args:
        omega: Means of the pre-activations, shape (H, ...) with H odd.
        V: Their variances, positive, same shape.
        y: Targets, +1 or -1, shape (...) or what broadcasts to it.

    Example:
        Three undecided units: P = 1/2 for both, which cancel, and J_hk = -g^2 = -0.1592.

        >>> J = vote_hessian(torch.zeros(3, 1), torch.ones(3, 1), torch.ones(1))
        >>> [round(J[h, k].item(), 4) for h, k in ((0, 0), (0, 1))]
        [-0.1592, -0.1592]
    """
    log_z, g, G = vote_channel(omega, V, y)
    hidden, rest = omega.shape[0], omega.shape[1:]
    m = (hidden - 1) // 2
    u = (y * omega * V.rsqrt()).reshape(hidden, -1).double()
    log_p, log_q = torch.special.log_ndtr(u), torch.special.log_ndtr(-u)
    log_density = -0.5 * u.square() - _LOG_SQRT_2PI
    J = g.new_empty(hidden, hidden, *rest)
    for h in range(hidden):
        J[h, h] = -G[h]
        for k in range(h):
            others = [i for i in range(hidden) if i not in (h, k)]
            votes = _log_prefix(log_p[others], log_q[others], m)[-1]
            both = log_density[h] + log_density[k] - log_z.reshape(-1)
            turned = (both + votes[m - 1]).exp() - (both + votes[m]).exp()
            turned = turned.to(g.dtype).reshape(rest) * (V[h] * V[k]).rsqrt()
            J[h, k] = J[k, h] = turned - g[h] * g[k]
    return J


def log_majority(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Logarithm of P(K >= (H + 1)/2) for K the number of successes in H independent trials (H odd).

    Exchange the arguments for the logarithm of the opposite event. Both stay exact where the probabilities underflow.

    Args:
        log_p: Logarithms of the probabilities of success, shape (H, ...).
        log_q: Logarithms of the probabilities of failure, same shape.

    Example:
        Two of three fair coins:

        >>> half = torch.full((3,), 0.5).log()
        >>> round(log_majority(half, half).exp().item(), 4)
        0.5
    """
    hidden = log_p.shape[0]
    _check_odd(hidden)
    p, q = log_p.reshape(hidden, -1), log_q.reshape(hidden, -1)
    m = (hidden - 1) // 2
    prefix = _log_prefix(p, q, m)
    win = torch.logsumexp(p + prefix[:-1, m], dim=0)
    lose = torch.logsumexp(prefix[-1], dim=0)
    return _log_of_smaller_tail(win, lose).reshape(log_p.shape[1:])


def _check_odd(hidden: int) -> None:
    if hidden % 2 == 0:
        raise ValueError(f"the number of hidden units must be odd, so that a vote cannot be tied; got {hidden}")


def _votes(u: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithm of Z_out of shape (n,) and d log Z_out / d u of shape (H, n), for u of shape (H, n)."""
    log_z, slope, small = _linear_votes(u)
    if small.any():
        index = small.nonzero().squeeze(1)
        log_z_small, slope_small = _log_votes(u[:, index].double())  # differences of logarithms as large as 1e5
        log_z[index] = log_z_small.to(u.dtype)
        slope[:, index] = slope_small.to(u.dtype)
    return log_z, slope


def _linear_votes(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As ``_votes``, by tables of probabilities; also the mask of the patterns where that is not precise enough."""
    hidden, n = u.shape
    m = (hidden - 1) // 2
    tail = torch.special.erfc(u.abs() * math.sqrt(0.5)).mul_(0.5)
    body = 1 - tail
    right = u > 0
    p, q = torch.where(right, body, tail), torch.where(right, tail, body)
    density = torch.exp(-0.5 * u * u - _LOG_SQRT_2PI)
    # prefix[h, k] = F_h[k]; suffix[h, k] = S_h[m - k]: both have the k of the prefix, so they multiply as they stand
    prefix, suffix = u.new_zeros(hidden, m + 1, n), u.new_zeros(hidden, m + 1, n)
    prefix[0, 0] = 1
    suffix[-1, m] = 1
    for h in range(hidden - 1):
        torch.mul(prefix[h], q[h], out=prefix[h + 1])
        prefix[h + 1, 1:].addcmul_(prefix[h, :-1], p[h])
    for h in range(hidden - 1, 0, -1):
        torch.mul(suffix[h], q[h], out=suffix[h - 1])
        suffix[h - 1, :-1].addcmul_(suffix[h, 1:], p[h])
    win = (p * prefix[:, m]).sum(0)
    lose = (prefix[-1] * q[-1]).sum(0).add_((prefix[-1, :-1] * p[-1]).sum(0))
    pivotal = (prefix * suffix).sum(1)
    log_z = torch.where(lose < 0.5, torch.log1p(-lose), win.log())
    small = ~(win > _LINEAR_FLOOR.get(u.dtype, 1e-20))  # true for NaN too
    return log_z, density.mul_(pivotal).div_(win), small


def _log_votes(u: Tensor) -> tuple[Tensor, Tensor]:
    """As ``_votes``, by tables of logarithms: exact at any argument, and slower."""
    log_p, log_q = torch.special.log_ndtr(u), torch.special.log_ndtr(-u)
    m = (u.shape[0] - 1) // 2
    prefix = _log_prefix(log_p, log_q, m)
    suffix = _log_prefix(log_p.flip(0), log_q.flip(0), m).flip(0)
    win = torch.logsumexp(log_p + prefix[:-1, m], dim=0)
    lose = torch.logsumexp(prefix[-1], dim=0)
    pivotal = torch.logsumexp(prefix[:-1] + suffix[1:].flip(1), dim=1)
    slope = torch.exp(-0.5 * u * u - _LOG_SQRT_2PI + pivotal - win)
    return _log_of_smaller_tail(win, lose), slope


def _log_prefix(log_p: Tensor, log_q: Tensor, m: int) -> Tensor:
    """Logarithm of F_h[k] for h = 0..H and k = 0..m, shape (H + 1, m + 1, n)."""
    hidden, n = log_p.shape
    prefix = log_p.new_full((hidden + 1, m + 1, n), -torch.inf)
    prefix[0, 0] = 0
    for h in range(hidden):
        prefix[h + 1] = prefix[h] + log_q[h]
        prefix[h + 1, 1:] = torch.logaddexp(prefix[h + 1, 1:], prefix[h, :-1] + log_p[h])
    return prefix


def _log_of_smaller_tail(log_win: Tensor, log_lose: Tensor) -> Tensor:
    """Logarithm of P(win), from log P(lose) where winning is the likelier, so that values near 1 keep their digits."""
    near_one = torch.log1p(-log_lose.clamp(max=-math.log(2)).exp())
    return torch.where(log_lose < -math.log(2), near_one, log_win)
