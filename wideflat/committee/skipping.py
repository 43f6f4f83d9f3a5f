"""Replicas that only attract each other: epochs of Replicated-SGD in which no pattern has a gradient.

When beta and omega are large, tanh(beta z) and the loss are flat nearly everywhere, and a step of Algorithm 2 is

    w_a <- (1 - k) w_a + k w_bar,   then |w_a| = 1 for every hidden unit,   k = eta K gamma

so all replicas stay combinations of where they were: w = M w_start with a y x y matrix M for every hidden unit, whose
norms follow from the overlaps O = w_start w_start^T, |w_a|^2 = (M O M^T)_aa. A step then costs y^2 numbers a unit in
place of the pre-activations of all patterns.

:func:`largest_coefficient` says when that is allowed. :func:`movement` bounds how far each pre-activation goes while
the replicas follow M; from that follows the largest coefficient that any pattern can get. The batched training takes
coefficients below a threshold (1/16 of a rounding error of a pre-activation) for zero, so where the bound is below it,
the epochs with and without gradient are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wideflat.committee.settings import Setting

__all__ = ["Ahead", "largest_coefficient", "mixing", "movement", "skip", "spread"]


class Ahead(NamedTuple):
    """A restart that has gone through epochs at once."""

    row: int  # which of the restarts
    weights: Tensor  # (y, H, N)
    epoch: int  # where it is now
    distance: float  # of its replicas from their barycenter, there


def skip(
    setting: Setting, weights: Tensor, inputs: Tensor, targets: Tensor, *, epoch: int, epochs: int, threshold: float
) -> list[Ahead]:
    """Take restarts through the coming epochs that have no gradient in any of them, or to the epoch that ends them.

    Decided for each restart from its own weights, so that it does not depend on its neighbours.

    Args:
        setting: Of rSGD that ends by its distance, without dropout.
        weights: Of all restarts, (r, y, H, N).
        inputs: All patterns, in the type of the weights.
        targets: (P,).
        epoch: The first of the epochs.
        epochs: How many.
        threshold: Coefficients below it are taken for zero.

    Returns:
        The restarts that could be taken.
    """
    targets, ends = targets.double(), (epoch, epoch + epochs - 1)

    def has_gradient(z: Tensor, reach: Tensor | float = 0.0) -> bool:
        return largest_coefficient(setting, z, reach, targets, ends).item() > threshold / 2

    silent = {}  # row -> pre-activations of restarts that have no gradient where they are
    for row, w in enumerate(weights):
        first = (w[0] @ inputs.T).double().view(1, 1, *w.shape[1:2], -1)
        if not has_gradient(first):  # most are known by the first replica
            z = (w.flatten(0, 1) @ inputs.T).double().view(1, *w.shape[:2], -1)
            if not has_gradient(z):
                silent[row] = z
    if not silent:
        return []
    starts = {row: weights[row].double() for row in silent}
    overlaps = torch.stack([torch.einsum("ahi,bhi->hab", w, w) for w in starts.values()])
    mixtures = mixing(setting, overlaps, epoch, epochs, -(-len(inputs) // setting.batch_size))
    distances = torch.stack([spread(mixture, overlaps) for mixture in mixtures])
    taken = []
    for k, (row, z) in enumerate(silent.items()):
        if has_gradient(z, movement(mixtures[:, k : k + 1], z)):
            continue
        met = (distances[:, k] < setting.tolerance).nonzero()
        last = int(met[0]) if len(met) else epochs - 1
        mixed = torch.einsum("hab,bhi->ahi", mixtures[last, k], starts[row])
        mixed /= mixed.norm(dim=-1, keepdim=True)
        taken.append(Ahead(row, mixed.to(weights.dtype), epoch + last + 1, distances[last, k].item()))
    return taken


def mixing(setting: Setting, overlaps: Tensor, epoch: int, epochs: int, num_batches: int) -> Tensor:
    """The matrices M after each of the coming epochs, if there is no gradient in them; (epochs, r, H, y, y).

    Args:
        setting: Its ``lr``, ``period`` and gamma give the strength of the coupling.
        overlaps: w_a . w_b of the replicas now, by hidden unit, (r, H, y, y) in float64.
        epoch: The first of the epochs.
        epochs: How many.
        num_batches: Steps in an epoch.

    Example:
        Two orthogonal replicas approach each other, and each stays at norm one:

        >>> from wideflat.committee import SETTINGS
        >>> setting = SETTINGS["rsgd-fast"].replace(num_replicas=2, lr=1.0, gamma0=0.5, gamma1=0.0)
        >>> mixing(setting, torch.eye(2, dtype=torch.float64).view(1, 1, 2, 2), 0, 1, 1)[0, 0, 0]
        tensor([[0.9487, 0.3162],
                [0.3162, 0.9487]], dtype=torch.float64)
    """
    y = overlaps.shape[-1]
    # M and M O side by side: a step is the same linear map for both
    state = torch.cat([torch.eye(y, dtype=overlaps.dtype).expand_as(overlaps), overlaps], dim=-1)
    after = []
    for now in range(epoch, epoch + epochs):
        k = setting.lr * setting.period * setting.gamma(now)
        for number in range(1 + now * num_batches, 1 + (now + 1) * num_batches):
            if number % setting.period == 0:
                state.lerp_(state.mean(dim=-2, keepdim=True), k)
                state /= (state[..., :y] * state[..., y:]).sum(dim=-1, keepdim=True).sqrt_()
        after.append(state[..., :y].clone())
    return torch.stack(after)


def movement(mixtures: Tensor, z: Tensor) -> Tensor:
    """A bound on |M z - z| for the pre-activations z (r, y, H, P) of replicas that follow M; the shape of z.

    On the way to the last M the replicas go nearly straight: M(t) - 1 = theta(t) (M(end) - 1) + E(t), 0 <= theta <= 1.
    So the bound is the movement to the end, plus what E can do with its largest elements on the way:
    (E z)_a = sum_b E_ab (z_b - z_a) + (sum_b E_ab) z_a. The epochs' ends stand for the way; a twentieth is added.
    """
    y = z.shape[1]
    apart = 1 - torch.eye(y, dtype=z.dtype)
    change = mixtures - torch.eye(y, dtype=z.dtype)
    total = (change * apart).sum(dim=-1, keepdim=True)  # what a replica has taken from the others
    theta = torch.where(total[-1] > 0, total / total[-1], 0.0)
    bend = change - theta * change[-1]
    bound = torch.einsum("rhab,rbhp->rahp", change[-1], z).abs_()
    bound.addcmul_(z.abs(), bend.sum(dim=-1).abs_().amax(dim=0).transpose(1, 2).unsqueeze(-1))
    bend = (bend.abs_() * apart).amax(dim=0).transpose(1, 2)  # (r, y, H, y)
    for b in range(y):
        bound.addcmul_((z - z[:, b : b + 1]).abs_(), bend[..., b : b + 1])
    return bound.mul_(1.05)


def largest_coefficient(
    setting: Setting, z: Tensor, reach: Tensor | float, targets: Tensor, epochs: Sequence[int]
) -> Tensor:
    """A bound on the coefficients that patterns can get in the updates of some epochs, by restart; (r,).

    Args:
        setting: Gives beta, omega, the learning rate and the gradient scale. No dropout.
        z: Pre-activations of all patterns, (r, y, H, P).
        reach: How far each of them may move, at most.
        targets: (P,).
        epochs: The first and the last epoch.

    Example:
        With beta = 1000 and a margin of 0.1, no coefficient is left; where a pattern is wrong by less, there is one:

        >>> from wideflat.committee import SETTINGS
        >>> setting = SETTINGS["rsgd-slow"].replace(hidden=1, tanh_beta0=1000.0, omega0=1000.0)
        >>> z = torch.tensor([0.1, -0.01], dtype=torch.float64).view(2, 1, 1, 1)
        >>> largest_coefficient(setting, z, 0.0, torch.ones(1, dtype=torch.float64), (0, 0)) > 1e-11
        tensor([False,  True])
    """
    root = math.sqrt(z.shape[2])
    (beta, steepest), (omega, sharpest) = (
        [schedule(epochs[0]), schedule(epochs[-1])] for schedule in (setting.tanh_beta, setting.omega)
    )
    low = z * targets - reach  # least margin of a unit
    output = torch.tanh(low * torch.where(low > 0, beta, steepest)).sum(dim=2) / root
    slope = torch.sigmoid(output * torch.where(output > 0, -2 * omega, -2 * sharpest))
    curve = (-2 * beta * (z.abs() - reach).clamp_(min=0)).exp_().clamp_(max=0.25).amax(dim=2)  # s (1 - s)
    rate = setting.lr * setting.gradient_scale / setting.batch_size
    return (slope * curve).amax(dim=(1, 2)) * (4 * rate * steepest / root)


def spread(mixture: Tensor, overlaps: Tensor) -> Tensor:
    """Mean over replicas of half the squared distance from the barycenter, from M and O (r, H, y, y); (r,)."""
    apart = mixture - mixture.mean(dim=-2, keepdim=True)
    near = (apart.unsqueeze(-1) * overlaps.unsqueeze(-3)).sum(dim=-2)  # apart @ overlaps, by elements: no restart
    return (near * apart).sum(dim=(1, 2, 3)) / (2 * mixture.shape[-1])  # can depend on how many there are
