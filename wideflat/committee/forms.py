"""The weights of many committee machines, what an epoch of each algorithm needs, and the form that keeps the weights.

There are two forms: `Direct` and `DirectESGD` here keep the weight vectors themselves; those of
:mod:`wideflat.committee.gram` keep their pre-activations on all patterns, which is cheaper where there are few.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from wideflat.committee.machine import says_yes
from wideflat.committee.randomness import NOISE, generator
from wideflat.committee.settings import Setting
from wideflat.kernels.committee import padded

__all__ = ["Batch", "Direct", "DirectESGD", "Form", "coefficients", "lengthen", "sigmoid_"]


class Batch(NamedTuple):
    """A mini-batch of every network, padded with the pattern of zeros to a multiple of 16 patterns."""

    patterns: Tensor  # by their numbers, (n, B')
    rows: Tensor  # those that are not padding, once for every unit, for embedding_bag: (n H B,)
    inside: Tensor  # -4 omega target / sqrt(H), (n, B')
    outside: Tensor  # 4 rate beta target / sqrt(H), (n, B')
    mask: Tensor | None  # dropout, (n, H, B')


def lengthen(tensor: Tensor, size: int, value: float = 0) -> Tensor:
    """Lengthen the last dimension."""
    return F.pad(tensor, (0, size - tensor.shape[-1]), value=value)


def sigmoid_(u: Tensor) -> Tensor:
    """In place, each number the same wherever it stands.

    Torch works on two vectors at a time, up to 32 numbers, and gives the rest to scalar instructions, whose exponential
    differs in the last bit. So there must be no rest.
    """
    if u.numel() % 64 == 0:
        return u.sigmoid_()
    whole = lengthen(u.view(-1), padded(u.numel(), 64)).sigmoid_()
    return u.copy_(whole[: u.numel()].view_as(u))


def coefficients(u: Tensor, batch: Batch) -> Tensor:
    """-rate times the derivative of the summed loss by the pre-activations z (n, H, B'), from u = 2 beta z.

    With s = sigmoid(u), tanh(beta z) = 2 s - 1, and its derivative by beta z is 4 s (1 - s). Overwrites u.
    """
    s = sigmoid_(u)
    if batch.mask is None:
        half = s.sum(dim=1).sub_(s.shape[1] / 2)
    else:
        half = s.sub(0.5).mul_(batch.mask).sum(dim=1)
    slope = sigmoid_(half.mul_(batch.inside)).mul_(batch.outside)
    c = s.addcmul_(s, s, value=-1).mul_(slope.unsqueeze(1))
    return c if batch.mask is None else c.mul_(batch.mask)


class Form(abc.ABC):
    """One way to hold and move the weight vectors of r restarts with y replicas each; what both ways share.

    Patterns and inputs are padded to multiples of 32 and mini-batches to multiples of 16, by patterns of zeros with
    target 0, for whole vectors.
    """

    state: dict[str, Tensor]

    #: Whether epochs without a gradient can be skipped (:mod:`wideflat.committee.skipping`),
    can_skip = False
    #: for which coefficients below this one are taken for zero.
    threshold = 0.0

    def __init__(self, setting: Setting, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> None:
        self.setting, self.dtype = setting, dtype
        self.num_patterns, self.num_inputs = inputs.shape
        self.P, self.N = padded(self.num_patterns + 1), padded(self.num_inputs)
        self.x = torch.zeros(self.P, self.N, dtype=dtype)
        self.x[: self.num_patterns, : self.num_inputs] = inputs
        self.target = lengthen(targets.to(dtype), self.P)
        self.y, self.hidden = setting.num_replicas, setting.hidden
        self.rate = setting.gradient_scale / setting.batch_size
        self.batch_size = min(setting.batch_size, self.num_patterns)
        self.restarts = 0
        self.seeds: Sequence[int] = ()  # of the restarts, for the noise of the direct form
        self.noise = 0.0  # variance of the noise that w has still to get at the refresh, for the Gram form

    @abc.abstractmethod
    def load(self, weights: Tensor) -> None:
        """Start from weights (r, y, H, N) of norm one."""

    @abc.abstractmethod
    def weights(self, rows: Sequence[int] | None = None) -> Tensor:
        """Of all restarts or some, (r, y, H, N)."""

    @abc.abstractmethod
    def epoch(self, epoch: int, orders: Tensor, masks: Tensor | None) -> None:
        """One epoch with the orders (r, passes, P) and dropout masks (r, passes, H, P)."""

    @abc.abstractmethod
    def errors(self) -> Tensor:
        """Training errors of each restart, (r,)."""

    @abc.abstractmethod
    def loss(self, epoch: int, exact: bool = False) -> Tensor:
        """Training loss of each restart; where it is above the tolerance a lower bound will do, unless ``exact``."""

    @abc.abstractmethod
    def distance(self, exact: bool = False) -> Tensor:
        """Of the replicas from their barycenter, or of mu from w; above the tolerance a lower bound will do, unless
        ``exact``.
        """

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some of the restarts only."""
        for name, tensor in self.state.items():
            shaped = tensor.view(self.restarts, -1, *tensor.shape[1:])
            self.state[name] = shaped[list(rows)].flatten(0, 1)
        self.restarts = len(rows)

    def present(self, orders: Tensor, masks: Tensor | None, epoch: int, lr: float) -> list[Batch]:
        """The mini-batches of a pass over the patterns in the orders (n, P), for updates with learning rate ``lr``."""
        setting, n, B, H = self.setting, len(orders), self.batch_size, self.hidden
        count = -(-self.num_patterns // B)
        index = lengthen(orders, count * B, self.num_patterns).view(n, count, B).transpose(0, 1)
        rows = index.int().unsqueeze(2).expand(count, n, H, B).reshape(count, -1)
        index = lengthen(index, padded(B, 16), self.num_patterns).contiguous()
        target = self.target[index] * (4 / math.sqrt(H))
        inside = target * -setting.omega(epoch)
        outside = target * (lr * self.rate * setting.tanh_beta(epoch))
        if masks is None:
            return [Batch(*parts, None) for parts in zip(index, rows, inside, outside, strict=True)]
        masks = lengthen(masks, count * B).view(n, H, count, B).movedim(2, 0)
        masks = lengthen(masks, padded(B, 16)).contiguous()
        return [Batch(*parts) for parts in zip(index, rows, inside, outside, masks, strict=True)]

    def count_errors(self, z: Tensor) -> Tensor:
        """Training errors of each network, from its pre-activations (n, H, P); (n,)."""
        yes = says_yes(z[..., : self.num_patterns], dim=1)
        return (yes != (self.target[: self.num_patterns] > 0)).sum(dim=1)

    def losses(self, z: Tensor, target: Tensor, epoch: int) -> Tensor:
        """What each pattern adds to the mean loss, from its pre-activations (n, H, p) and target; (n, p)."""
        omega = self.setting.omega(epoch)
        output = torch.tanh(z * self.setting.tanh_beta(epoch)).sum(dim=1) / math.sqrt(self.hidden)
        return F.logsigmoid(2 * omega * output * target) * (target.abs() / (-2 * omega * self.num_patterns))


class Direct(Form):
    """SGD and Replicated-SGD on the weights: two matrix products a step and network, for any number of patterns."""

    def load(self, weights: Tensor) -> None:
        """As they are."""
        self.restarts = len(weights)
        self.state = {"w": lengthen(weights.to(self.dtype), self.N).flatten(0, 1).clone()}

    def weights(self, rows: Sequence[int] | None = None) -> Tensor:
        """A copy."""
        w = self.state["w"].view(self.restarts, self.y, self.hidden, self.N)[..., : self.num_inputs]
        return (w if rows is None else w[list(rows)]).clone()

    def errors(self) -> Tensor:
        """Of the first replica."""
        return self.count_errors(torch.stack([w @ self.x.T for w in self.state["w"][:: self.y]]))

    def loss(self, epoch: int, exact: bool = False) -> Tensor:
        """Of the first replica, always exact."""
        z = torch.stack([w @ self.x.T for w in self.state["w"][:: self.y]])
        return self.losses(z, self.target, epoch).sum(dim=1)

    def distance(self, exact: bool = False) -> Tensor:
        """Of the replicas from their barycenter, always exact."""
        w = self.state["w"].view(self.restarts, self.y, self.hidden, self.N)
        return (w - w.mean(dim=1, keepdim=True)).square_().sum(dim=(1, 2, 3)) / (2 * self.y)

    def step(self, w: Tensor, batch: Batch, epoch: int) -> Tensor:
        """The update -lr grad of networks w (n, H, N) on their mini-batches. The products run one network at a time,
        so that the result cannot depend on the others.
        """
        rows = [self.x[one] for one in batch.patterns]
        z = torch.stack([one @ row.T for one, row in zip(w, rows, strict=True)])
        c = coefficients(z.mul_(2 * self.setting.tanh_beta(epoch)), batch)
        return torch.stack([one @ row for one, row in zip(c, rows, strict=True)])

    def epoch(self, epoch: int, orders: Tensor, masks: Tensor | None) -> None:
        """Step by step, by torch's operations."""
        setting, w = self.setting, self.state["w"]
        n, H = len(w), self.hidden
        masks = None if masks is None else masks.reshape(n, H, -1)
        by_restart = w.view(self.restarts, self.y, H, -1)
        strength = setting.lr * setting.period * setting.gamma(epoch)
        batches = self.present(orders.reshape(n, -1), masks, epoch, setting.lr)
        for number, batch in enumerate(batches, start=1 + epoch * len(batches)):
            dw = self.step(w, batch, epoch)
            if self.y > 1 and number % setting.period == 0:
                by_restart.lerp_(by_restart.mean(dim=1, keepdim=True), strength)
            w += dw
            w /= w.norm(dim=-1, keepdim=True)


class DirectESGD(Direct):
    """Entropy-SGD on the weights, with its noise in every inner step."""

    def load(self, weights: Tensor) -> None:
        """As they are."""
        super().load(weights)
        self.state["d"] = self.state["w"].new_zeros(len(self.state["w"]), 1)

    def distance(self, exact: bool = False) -> Tensor:
        """Of mu from w in the last outer step."""
        return self.state["d"].squeeze(1).clone()

    def epoch(self, epoch: int, orders: Tensor, masks: Tensor | None) -> None:
        """As many outer steps as a pass has mini-batches."""
        setting, w = self.setting, self.state["w"]
        L, alpha = setting.inner_steps, setting.alpha
        k = setting.inner_lr * setting.gamma(epoch)
        streams = [generator(seed, NOISE, epoch) for seed in self.seeds]
        passes = ((orders[:, p], None if masks is None else masks[:, p]) for p in range(orders.shape[1]))
        batches = [batch for one in passes for batch in self.present(*one, epoch, setting.inner_lr)]
        outer_steps = len(batches) // L
        for outer in range(outer_steps):
            explorer, mean = w.clone(), w.clone()
            for batch in batches[outer * L : (outer + 1) * L]:
                step = self.step(explorer, batch, epoch)
                explorer.lerp_(w, k).add_(step)
                self._add_noise(explorer, streams)
                mean.lerp_(explorer, 1 - alpha)
                explorer /= explorer.norm(dim=-1, keepdim=True)
            if outer == outer_steps - 1:
                self.state["d"] = (w - mean).square().sum(dim=(1, 2)).unsqueeze(1) / 2
            w.lerp_(mean, setting.lr)
            w /= w.norm(dim=-1, keepdim=True)

    def _add_noise(self, explorer: Tensor, streams: list[np.random.Generator]) -> None:
        """sqrt(eta') epsilon N(0, 1), where there is any, from the stream of each restart."""
        size = math.sqrt(self.setting.inner_lr) * self.setting.epsilon
        if not size:
            return
        for one, stream in zip(explorer, streams, strict=True):
            drawn = stream.standard_normal((self.hidden, self.num_inputs), dtype=np.float32)
            one[:, : self.num_inputs] += size * torch.from_numpy(drawn)
