"""The local energy of committee machines, which needs no sampling: their votes under the noise are independent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from wideflat.checks import real_tensor
from wideflat.committee.channel import log_majority
from wideflat.committee.machine import wrong_patterns
from wideflat.energy.profile import LocalEnergy, check_sigmas, conventions
from wideflat.kernels.float64 import doubled

__all__ = ["committee_local_energy", "committee_profile"]


def committee_local_energy(
    weights: Tensor, inputs: Tensor, targets: Tensor, sigmas: Sequence[float] | Tensor | np.ndarray
) -> Tensor:
    r"""dE(w, sigma) of committee machines, exactly.

    The pre-activation of unit h on pattern x under the noise is N(w_h . x, sigma^2 sum_i w_hi^2 x_i^2), so the unit
    votes for the target y with probability Phi(y w_h . x / (sigma sqrt(sum_i w_hi^2 x_i^2))), independently of the
    others, and the number of right votes has a Poisson binomial distribution (:mod:`wideflat.committee.channel`).

    Args:
        weights: Shape (..., H, N) with H odd: one committee, or any number of them at once.
        inputs: Shape (P, N).
        targets: +1 or -1, shape (P,).
        sigmas: Strengths of the noise, S of them.

    Returns:
        dE in float64, shape (..., S); on the CPU where the device of the weights has no float64 (MPS).

    Example:
        One unit, one weight, one pattern: wrong when 1 + sigma z < 0.

        >>> committee_local_energy(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1), [0.0, 1.0]).round(decimals=4)
        tensor([0.0000, 0.1587], dtype=torch.float64)
    """
    weights, inputs = real_tensor("weights", weights), real_tensor("inputs", inputs)
    targets = real_tensor("targets", targets, (1,))
    if weights.dim() < 2 or inputs.dim() != 2 or weights.shape[-1] != inputs.shape[1] or len(targets) != len(inputs):
        raise ValueError(
            "expected weights (..., H, N), inputs (P, N) and targets (P,); got "
            f"{tuple(weights.shape)}, {tuple(inputs.shape)}, {tuple(targets.shape)}"
        )
    w, x, y = (doubled(tensor.detach()) for tensor in (weights, inputs, targets))
    lead = w.shape[:-2]
    w = w.reshape(-1, *w.shape[-2:])  # (R, H, N)
    field = torch.einsum("rhn,pn->hrp", w, x) * y  # y w_h . x
    scale = torch.einsum("rhn,pn->hrp", w * w, x * x).sqrt()
    right = (field > 0) | ((field == 0) & (y > 0))  # sign(0) = +1, as in CommitteeMachine
    baseline = (right.sum(0) * 2 < w.shape[1]).double().mean(-1)  # (R,)
    out = []
    for sigma in check_sigmas(sigmas):
        if sigma == 0:
            out.append(torch.zeros_like(baseline))
            continue
        u = field / (sigma * scale)
        log_p, log_q = torch.special.log_ndtr(u), torch.special.log_ndtr(-u)
        out.append(log_majority(log_q, log_p).exp().mean(-1) - baseline)
    return torch.stack(out, -1).reshape(*lead, len(out))


def committee_profile(
    weights: Tensor, inputs: Tensor, targets: Tensor, sigmas: Sequence[float] | Tensor | np.ndarray
) -> LocalEnergy:
    """The exact profile of several committee machines: the mean over them, with its standard error.

    Args:
        weights: Shape (..., H, N); every leading axis counts machines.
        inputs: Shape (P, N).
        targets: +1 or -1, shape (P,).
        sigmas: Strengths of the noise.

    Example:
        >>> profile = committee_profile(torch.ones(2, 1, 1), torch.ones(1, 1), torch.ones(1), [1.0])
        >>> profile.mean.round(4).tolist(), profile.stderr.tolist(), profile.baseline
        ([0.1587], [0.0], 0.0)
    """
    if weights.dim() < 2 or 0 in weights.shape:
        raise ValueError(f"weights must have the shape (..., H, N), got {tuple(weights.shape)}")
    for name, tensor in (("weights", weights), ("inputs", inputs), ("targets", targets)):
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} has values that are not finite; drop or repair them first")
    weights = weights.reshape(-1, *weights.shape[-2:])
    values = committee_local_energy(weights, inputs, targets, sigmas).cpu().numpy()
    count, sigma = len(values), check_sigmas(sigmas)
    size = weights[0].numel()
    return LocalEnergy(
        sigmas=sigma,
        mean=values.mean(0),
        stderr=values.std(0, ddof=1) / np.sqrt(count) if count > 1 else np.zeros(len(sigma)),
        degrees_of_freedom=np.full(len(sigma), float(count - 1) if count > 1 else np.inf),
        baseline=float(wrong_patterns(*map(doubled, (weights, inputs, targets))).double().mean()),
        samples=values,
        conventions=conventions(
            "local energy",
            metric="error",
            noise="exact",
            stderr=f"over {count} solutions",
            parameters="all",
            perturbed=size,
            architecture=f"CommitteeMachine, {size} parameters",
            examples=len(inputs),
        ),
    )
