"""Many committee machines trained at once: the engine of :func:`wideflat.committee.train`.

**What a step costs.** There are few training patterns (P = 500) and every update is a combination of them, so a weight
vector is kept as its pre-activations A = w X^T on all patterns, and as coordinates C with w = w_start + C X. A gradient
step on a mini-batch with coefficients c is then

    A <- A + c G[batch],        G = X X^T,        C[batch] <- C[batch] + c

with H B P multiplications and no forward pass, where weights need 2 H B N: the pre-activations of the next mini-batch
are read off A. Norms come from the same numbers, |w + c X|^2 = |w|^2 + sum_batch c (A_before + A_after). This is
exact: all vectors of the algorithms (replicas, their barycenter, the explorer w' and the mean mu of eSGD) are linear in
these. Every ``refresh`` epochs the weights are computed from the coordinates and everything starts from there, so that
rounding errors do not pile up.

**Rows that are not needed.** The sum over rows of G is a kernel in C (:mod:`wideflat.committee_kernel`) or, without a
compiler, ``embedding_bag``: each restart picks its own rows, nothing is copied, the time is proportional to the rows,
and the result of one restart is independent of the others bit for bit.
Coefficients so small that they cannot move a pre-activation by 1/16 of a rounding error are set to zero; when part of
a mini-batch is like that (late in a run: omega is large, the pattern has a margin), only the others are added. Where
no pattern of any replica can have a coefficient until the next refresh, rSGD goes there at once:
:mod:`wideflat.committee_mixing`.

**Randomness** is a function of (seed of the restart, purpose, epoch), never of a state. So a run can go on from any
refresh, and restarts can be grouped in any way.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from wideflat.committee import Interrupted, Setting, Solutions, balanced_error, errors
from wideflat.committee_kernel import CommitteeKernel, padded
from wideflat.committee_mixing import largest_coefficient, mixing, movement, spread
from wideflat.data.patterns import Patterns
from wideflat.files import atomic_write
from wideflat.progress import Progress

__all__ = ["align", "assign", "dropout_mask", "initial_weights", "order", "run"]

#: What random numbers are for; part of the key of the generator.
_START, _ORDER, _DROPOUT, _NOISE, _POLISH = range(5)

#: Networks (restarts times replicas) that are computed together: enough to hide the cost of a call, few enough for the
#: caches.
_GROUP = 128

#: Columns of the Gram matrix that are added at a time. The accumulators then stay in registers.
_COLUMNS = 112

#: Rows without a coefficient are left out when fewer than this share of the rows have one.
_SPARSE = 0.75

#: Seconds between two checkpoints.
_CHECKPOINT_INTERVAL = 30.0


# ---------------------------------------------------------------------------------------------------------- randomness


def _generator(seed: int, purpose: int, epoch: int = 0) -> np.random.Generator:
    key = np.array([seed % 2**64, purpose], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, epoch]))


_reused = threading.local()


def _stream(seed: int, purpose: int, epoch: int) -> np.random.Generator:
    """The numbers of ``_generator`` from an object that is used again: good until the next call in this thread.

    To make a new object takes longer than to permute 500 patterns with it.
    """
    if not hasattr(_reused, "generator"):
        _reused.generator = _generator(0, 0)
        _reused.state = {**_reused.generator.bit_generator.state, "buffer_pos": 4, "has_uint32": 0, "uinteger": 0}
    counter, key = _reused.state["state"]["counter"], _reused.state["state"]["key"]
    counter[:] = 0, 0, 0, epoch
    key[:] = seed % 2**64, purpose
    _reused.generator.bit_generator.state = _reused.state
    return _reused.generator


def initial_weights(setting: Setting, seed: int, num_inputs: int) -> Tensor:
    """Uniform weights with every hidden unit at norm one, (y, H, N) in float64."""
    shape = (setting.num_replicas, setting.hidden, num_inputs)
    weights = torch.from_numpy(_generator(seed, _START).uniform(-1, 1, shape))
    return weights / weights.norm(dim=-1, keepdim=True)


def order(setting: Setting, seed: int, epoch: int, num_patterns: int, purpose: int = _ORDER) -> np.ndarray:
    """The order of the data in one epoch: permutations (passes, num_patterns).

    A pass is for one replica of rSGD, or one of the L passes that eSGD makes in an epoch.
    """
    passes = setting.num_replicas * (setting.inner_steps if setting.algorithm == "esgd" else 1)
    rows = np.empty((passes, num_patterns), dtype=np.int64)
    rows[:] = np.arange(num_patterns)
    return _stream(seed, purpose, epoch).permuted(rows, axis=1, out=rows)


def dropout_mask(setting: Setting, seed: int, epoch: int, num_patterns: int) -> np.ndarray:
    """Factors 0 or 1/(1 - p) of the hidden units in the order of presentation, (passes, H, num_patterns)."""
    passes = setting.num_replicas * (setting.inner_steps if setting.algorithm == "esgd" else 1)
    draw = _stream(seed, _DROPOUT, epoch).random((passes, setting.hidden, num_patterns), dtype=np.float32)
    return (draw >= setting.dropout) / (1.0 - setting.dropout)


# ---------------------------------------------------------------------------------------------------- aligning replicas


def assign(score: np.ndarray) -> np.ndarray:
    """The permutation p that maximises sum_i score[i, p[i]] (the Hungarian method with potentials).

    Example:
        >>> assign(np.array([[1.0, 9.0, 8.0], [0.0, 8.0, 1.0], [2.0, 3.0, 4.0]])).tolist()
        [2, 1, 0]
    """
    cost = -np.asarray(score, dtype=float)
    n = len(cost)
    row_potential, column_potential = np.zeros(n + 1), np.zeros(n + 1)
    row_of = np.zeros(n + 1, dtype=int)  # column -> row, both from 1; 0 is free
    for row in range(1, n + 1):
        row_of[0], column = row, 0
        shortest, used = np.full(n + 1, np.inf), np.zeros(n + 1, dtype=bool)
        before = np.zeros(n + 1, dtype=int)
        while row_of[column]:
            used[column] = True
            i = row_of[column]
            reduced = cost[i - 1] - row_potential[i] - column_potential[1:]
            better = ~used[1:] & (reduced < shortest[1:])
            shortest[1:][better] = reduced[better]
            before[1:][better] = column
            nearest = int(np.where(used, np.inf, shortest)[1:].argmin()) + 1
            delta = shortest[nearest]
            row_potential[row_of[used]] += delta
            column_potential[used] -= delta
            shortest[~used] -= delta
            column = nearest
        while column:
            row_of[column] = row_of[before[column]]
            column = before[column]
    permutation = np.empty(n, dtype=int)
    permutation[row_of[1:] - 1] = np.arange(n)
    return permutation


def align(weights: Tensor) -> Tensor:
    """Permute the hidden units of each replica to overlap most with those of the first; (y, H, N) -> (y, H, N).

    The network that a replica computes stays the same, since all units vote with equal weight.
    """
    first = weights[0].double()
    aligned = [weights[0]]
    for replica in weights[1:]:
        aligned.append(replica[torch.from_numpy(assign((first @ replica.double().T).numpy()))])
    return torch.stack(aligned)


# ------------------------------------------------------------------------------------------------------- the inner step


class _Batch(NamedTuple):
    """A mini-batch of every network, padded with the pattern of zeros to a multiple of 16 patterns."""

    patterns: Tensor  # by their numbers, (n, B')
    rows: Tensor  # those that are not padding, once for every unit, for embedding_bag: (n H B,)
    inside: Tensor  # -4 omega target / sqrt(H), (n, B')
    outside: Tensor  # 4 rate beta target / sqrt(H), (n, B')
    mask: Tensor | None  # dropout, (n, H, B')


def _coefficients(u: Tensor, batch: _Batch) -> Tensor:
    """-rate times the derivative of the summed loss by the pre-activations z (n, H, B'), from u = 2 beta z.

    With s = sigmoid(u), tanh(beta z) = 2 s - 1, and its derivative by beta z is 4 s (1 - s). Overwrites u.
    """
    s = u.sigmoid_()
    if batch.mask is None:
        half = s.sum(dim=1).sub_(s.shape[1] / 2)
    else:
        half = s.sub(0.5).mul_(batch.mask).sum(dim=1)
    slope = half.mul_(batch.inside).sigmoid_().mul_(batch.outside)
    c = s.addcmul_(s, s, value=-1).mul_(slope.unsqueeze(1))
    return c if batch.mask is None else c.mul_(batch.mask)


def _pad(tensor: Tensor, size: int, value: float = 0) -> Tensor:
    """Lengthen the last dimension."""
    return F.pad(tensor, (0, size - tensor.shape[-1]), value=value)


class _Form:
    """One way to hold and move the weight vectors of r restarts with y replicas each; what both ways share.

    A form has ``load(weights)`` to start from weights (r, y, H, N) of norm one, ``epoch(epoch, orders, masks)`` for one
    epoch with the orders (r, passes, P) and dropout masks (r, passes, H, P), ``weights(rows)`` for the weights of some
    restarts, and ``errors()``, ``loss(epoch)``, ``distance()`` for what the stopping rules measure, (r,) each. Loss and
    distance may be lower bounds where these are above the tolerance; ``loss(epoch, exact=True)`` is the loss.

    Patterns and inputs are padded to multiples of 32 and mini-batches to multiples of 16, by patterns of zeros with
    target 0. Without that, the last few numbers of a tensor would go through scalar instead of vector instructions,
    whose exponentials differ in the last bit, and a result would depend on where in the batch it stands.
    """

    state: dict[str, Tensor]

    def __init__(self, setting: Setting, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> None:
        self.setting, self.dtype = setting, dtype
        self.num_patterns, self.num_inputs = inputs.shape
        self.P, self.N = padded(self.num_patterns + 1), padded(self.num_inputs)
        self.x = torch.zeros(self.P, self.N, dtype=dtype)
        self.x[: self.num_patterns, : self.num_inputs] = inputs
        self.target = _pad(targets.to(dtype), self.P)
        self.y, self.hidden = setting.num_replicas, setting.hidden
        self.rate = setting.gradient_scale / setting.batch_size
        self.batch_size = min(setting.batch_size, self.num_patterns)
        self.restarts = 0
        self.seeds: Sequence[int] = ()  # of the restarts, for the noise of the direct form
        self.noise = 0.0  # variance of the noise that w has still to get at the refresh, for the Gram form

    def select(self, rows: Sequence[int]) -> None:
        for name, tensor in self.state.items():
            shaped = tensor.view(self.restarts, -1, *tensor.shape[1:])
            self.state[name] = shaped[list(rows)].flatten(0, 1)
        self.restarts = len(rows)

    def present(self, orders: Tensor, masks: Tensor | None, epoch: int, lr: float) -> list[_Batch]:
        """The mini-batches of a pass over the patterns in the orders (n, P), for updates with learning rate ``lr``."""
        setting, n, B, H = self.setting, len(orders), self.batch_size, self.hidden
        count = -(-self.num_patterns // B)
        index = _pad(orders, count * B, self.num_patterns).view(n, count, B).transpose(0, 1)
        rows = index.int().unsqueeze(2).expand(count, n, H, B).reshape(count, -1)
        index = _pad(index, padded(B, 16), self.num_patterns).contiguous()
        target = self.target[index] * (4 / math.sqrt(H))
        inside = target * -setting.omega(epoch)
        outside = target * (lr * self.rate * setting.tanh_beta(epoch))
        if masks is None:
            return [_Batch(*parts, None) for parts in zip(index, rows, inside, outside, strict=True)]
        masks = _pad(masks, count * B).view(n, H, count, B).movedim(2, 0)
        masks = _pad(masks, padded(B, 16)).contiguous()
        return [_Batch(*parts) for parts in zip(index, rows, inside, outside, masks, strict=True)]

    def _wrong(self, z: Tensor) -> Tensor:
        votes = (z[..., : self.num_patterns] >= 0).sum(dim=1) * 2 > self.hidden
        return (votes != (self.target[: self.num_patterns] > 0)).sum(dim=1)

    def _losses(self, z: Tensor, target: Tensor, epoch: int) -> Tensor:
        """What each pattern adds to the mean loss, from its pre-activations (n, H, p) and target; (n, p)."""
        omega = self.setting.omega(epoch)
        output = torch.tanh(z * self.setting.tanh_beta(epoch)).sum(dim=1) / math.sqrt(self.hidden)
        return F.logsigmoid(2 * omega * output * target) * (target.abs() / (-2 * omega * self.num_patterns))


class _Gram(_Form):
    """Vectors by their pre-activations and coordinates; see the head of this file.

    State of a network, by algorithm (n networks, H units, P patterns):

    * sgd: A, C (n, H, P) of an unnormalised v = w_start + C X, and its squared norm; w = v / |v|.
    * rsgd: one tensor V with columns A | I | J | C | M of normalised w = M w_start + C X, where M (y columns) mixes the
      replicas at the last refresh, I = M w_start X^T and J = M w_start w_start^T. All of it is linear in w, so the
      elastic step acts on all columns alike; |w|^2 = C . (A + I) + M . J.
    * esgd: A, C, M of normalised w. The explorer is w' = e w + f S, where S begins at zero and is kept as its
      pre-activations alone: the coordinates of mu follow from the steps at the end of the inner loop.
    """

    def __init__(self, setting: Setting, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> None:
        super().__init__(setting, inputs, targets, dtype)
        exact = torch.zeros(self.P, self.N, dtype=torch.float64)
        exact[: self.num_patterns, : self.num_inputs] = inputs
        gram = exact @ exact.T
        self.gram = gram.to(dtype)
        columns = padded(self.num_patterns, 8)  # the rest is padding, and stays zero
        self.blocks = [(start, min(start + _COLUMNS, columns)) for start in range(0, columns, _COLUMNS)]
        self.tables = [self.gram[:, start:end].contiguous() for start, end in self.blocks]
        self.largest = float(torch.linalg.eigvalsh(gram)[-1]) * (1 + 1e-6)
        self.threshold = torch.finfo(dtype).eps / 16 / float(gram.diagonal().max())
        self.active = 1.0  # fraction of patterns with a coefficient, measured once an epoch
        self.kernel = CommitteeKernel(self.gram, self.num_patterns) if CommitteeKernel.available(self.gram) else None

    # .............................................................................................. start and finish

    def load(self, weights: Tensor) -> None:
        P, y, H = self.P, self.y, self.hidden
        self.restarts = len(weights)
        self.noise = 0.0
        start = _pad(weights.to(self.dtype), self.N)
        a = torch.stack([w @ self.x.T for w in start.flatten(0, 1)])
        n = len(a)
        state = {"start": start.flatten(0, 1)}
        if self.setting.algorithm == "sgd":
            state |= {"a": a, "c": torch.zeros_like(a), "norm2": a.new_ones(n, H, 1)}
        elif self.setting.algorithm == "rsgd":
            v = a.new_zeros(n, H, padded(3 * P + 2 * y))
            v[..., :P] = v[..., P : 2 * P] = a
            # w_a . w_b of the replicas of a restart, unit by unit: (y, H, y)
            v[..., 2 * P : 2 * P + y] = torch.cat([torch.einsum("ahi,bhi->ahb", w, w) for w in start])
            v[..., 3 * P + y : 3 * P + 2 * y] = torch.eye(y, dtype=self.dtype).repeat(self.restarts, 1).unsqueeze(1)
            state |= {"v": v}
        else:
            state |= {"a": a, "c": torch.zeros_like(a), "m": a.new_ones(n, H, 1), "d": a.new_zeros(n, 1)}
        self.state = state

    def _coordinates(self) -> tuple[Tensor, Tensor]:
        """C (n, H, P) and M (n, H, y) of all vectors."""
        P, y = self.P, self.y
        if self.setting.algorithm == "sgd":
            c = self.state["c"]
            return c, c.new_ones(len(c), self.hidden, 1)
        if self.setting.algorithm == "esgd":
            return self.state["c"], self.state["m"]
        v = self.state["v"]
        return v[..., 2 * P + y : 3 * P + y], v[..., 3 * P + y : 3 * P + 2 * y]

    def _expand(self, c: Tensor, m: Tensor, rows: Sequence[int]) -> Tensor:
        """M w_start + C X of some restarts, (r, y, H, N)."""
        y, H, N = self.y, self.hidden, self.N
        start = self.state["start"].view(self.restarts, y, H, N)
        c, m = c.reshape(self.restarts, y, H, -1), m.reshape(self.restarts, y, H, y)
        out = []
        for row in rows:
            mixed = torch.einsum("ahb,bhi->ahi", m[row], start[row])
            out.append(mixed + torch.stack([unit @ self.x for unit in c[row]]))
        return torch.stack(out)

    def weights(self, rows: Sequence[int] | None = None) -> Tensor:
        w = self._expand(*self._coordinates(), range(self.restarts) if rows is None else rows)
        return (w / w.norm(dim=-1, keepdim=True))[..., : self.num_inputs]

    # ................................................................................................. measurements

    def _preactivations(self) -> Tensor:
        """A of the first replica, normalised where that is not implied."""
        if self.setting.algorithm == "sgd":
            return self.state["a"] / self.state["norm2"].sqrt()
        if self.setting.algorithm == "esgd":
            return self.state["a"]
        return self.state["v"][:: self.y, :, : self.P]

    def errors(self) -> Tensor:
        return self._wrong(self._preactivations())

    def loss(self, epoch: int, exact: bool = False) -> Tensor:
        worst = self.state.get("worst")
        if worst is not None and not exact:  # few patterns are enough to see that the loss is still too large
            z = self.state["a"].gather(2, worst.unsqueeze(1).expand(-1, self.hidden, -1)) / self.state["norm2"].sqrt()
            bound = self._losses(z, self.target[worst], epoch).sum(dim=1)
            if bool((bound > 1.001 * self.setting.tolerance).all()):
                return bound
        losses = self._losses(self._preactivations(), self.target, epoch)
        if self.setting.algorithm == "sgd":
            self.state["worst"] = losses.topk(min(16, self.num_patterns), dim=1).indices
        return losses.sum(dim=1)

    def distance(self) -> Tensor:
        if self.setting.algorithm == "esgd":
            return self.state["d"].squeeze(1).clone()
        P, y, H, r = self.P, self.y, self.hidden, self.restarts
        a = self.state["v"].view(r, y, H, -1)[..., :P]
        # |dA|^2 <= (largest eigenvalue of G) |dw|^2, so this is a lower bound, which costs no matrix product
        bound = (a - a.mean(dim=1, keepdim=True)).square_().sum(dim=(1, 2, 3)) / (2 * y * self.largest)
        near = (bound < self.setting.tolerance).nonzero().squeeze(1).tolist()
        if near:
            c, m = (t.reshape(r, y, H, -1) for t in self._coordinates())
            dc, dm = c - c.mean(dim=1, keepdim=True), m - m.mean(dim=1, keepdim=True)
            dw = self._expand(dc, dm, near)
            bound[near] = dw.square_().sum(dim=(1, 2, 3)) / (2 * y)
        return bound

    # ................................................................................................... the steps

    def epoch(self, epoch: int, orders: Tensor, masks: Tensor | None) -> None:
        self.measure = True
        step = getattr(self, f"_{self.setting.algorithm}_epoch")
        step(epoch, orders, masks)

    def _add_rows(self, a: Tensor, batch: _Batch, c: Tensor) -> bool:
        """Add c (n, H, B') times rows of the Gram matrix to a (n, H, P), in place; False if all c are zero.

        The sums run in the order of the mini-batch in both branches, and adding a zero changes nothing, so the
        branches agree bit for bit.
        """
        if self.kernel is not None:
            return self.kernel.add_rows(a, batch.patterns, c) > 0
        n, H, B = len(c), self.hidden, self.batch_size
        if self.measure or self.active < _SPARSE:
            some = c.abs().amax(dim=1) > 0
            count = some.sum(dim=1)
            total = int(count.sum())
            if self.measure:
                self.active, self.measure = total / max(n * B, 1), False
            if total == 0:
                return False
            if self.active < _SPARSE:
                chosen = some.view(-1).nonzero().squeeze(1)
                rows = batch.patterns.view(-1)[chosen].repeat(H)
                first = count.cumsum(0).sub_(count)
                offsets = (torch.arange(0, H * total, total).unsqueeze(1) + first).view(-1)
                weights = c.transpose(1, 2).reshape(-1, H)[chosen].t().reshape(-1)
                for (start, end), table in zip(self.blocks, self.tables, strict=True):
                    out = torch.embedding_bag(table, rows, offsets, False, 0, False, weights)[0]
                    a[..., start:end] += out.view(H, n, end - start).transpose(0, 1)
                return True
        offsets = torch.arange(0, n * H * B, B, dtype=torch.int32)
        weights = c[..., :B].reshape(-1)
        for (start, end), table in zip(self.blocks, self.tables, strict=True):
            out = torch.embedding_bag(table, batch.rows, offsets, False, 0, False, weights)[0]
            a[..., start:end] += out.view(n, H, end - start)
        return True

    def _constants(self, epoch: int, lr: float) -> dict[str, float]:
        """What the coefficients of an epoch depend on, for the kernel; see `present` and `_coefficients`."""
        beta, root = self.setting.tanh_beta(epoch), math.sqrt(self.hidden)
        return {
            "slope": 2 * beta,
            "inside": -4 * self.setting.omega(epoch) / root,
            "outside": 4 * lr * self.rate * beta / root,
            "threshold": self.threshold,
        }

    def _sgd_epoch(self, epoch: int, orders: Tensor, masks: Tensor | None) -> None:
        a, c, norm2 = (self.state[name] for name in ("a", "c", "norm2"))
        n, H, slope = len(a), self.hidden, 2 * self.setting.tanh_beta(epoch)
        for batch in self.present(orders[:, 0], None if masks is None else masks[:, 0], epoch, self.setting.lr):
            wide = batch.patterns.unsqueeze(1).expand(n, H, -1)
            norm = norm2.sqrt()
            before = a.gather(2, wide)
            dc = F.hardshrink(_coefficients(before * (slope / norm), batch).mul_(norm), self.threshold)
            if self._add_rows(a, batch, dc):
                c.scatter_add_(2, wide, dc)
                norm2 += before.add_(a.gather(2, wide)).mul_(dc).sum(dim=2, keepdim=True)

    def _rsgd_epoch(self, epoch: int, orders: Tensor, masks: Tensor | None) -> None:
        P, y, H, r = self.P, self.y, self.hidden, self.restarts
        setting, v, slope = self.setting, self.state["v"], 2 * self.setting.tanh_beta(epoch)
        n = len(v)
        by_restart = v.view(r, y, H, -1)
        a, i, j = v[..., :P], v[..., P : 2 * P], v[..., 2 * P : 2 * P + y]
        c, m = v[..., 2 * P + y : 3 * P + y], v[..., 3 * P + y : 3 * P + 2 * y]
        orders = orders.reshape(n, -1)
        masks = None if masks is None else masks.reshape(n, H, -1)
        strength = setting.lr * setting.period * setting.gamma(epoch)
        if self.kernel is not None and masks is None:
            self.kernel.rsgd_epoch(
                v,
                orders.contiguous(),
                self.target,
                self.batch_size,
                replicas=y,
                period=setting.period,
                number=1 + epoch * -(-self.num_patterns // self.batch_size),
                strength=strength,
                **self._constants(epoch, setting.lr),
            )
            return
        batches = self.present(orders, masks, epoch, setting.lr)
        for number, batch in enumerate(batches, start=1 + epoch * len(batches)):
            wide = batch.patterns.unsqueeze(1).expand(n, H, -1)
            dc = F.hardshrink(_coefficients(a.gather(2, wide).mul_(slope), batch), self.threshold)
            coupled = number % setting.period == 0
            if coupled:
                by_restart.lerp_(by_restart.mean(dim=1, keepdim=True), strength)
            moved = self._add_rows(a, batch, dc)
            if moved:
                c.scatter_add_(2, wide, dc)
            if moved or coupled:
                norm2 = (a + i).mul_(c).sum(dim=2, keepdim=True) + (m * j).sum(dim=2, keepdim=True)
                v.mul_(norm2.rsqrt_())

    def _esgd_epoch(self, epoch: int, orders: Tensor, masks: Tensor | None) -> None:
        setting, L = self.setting, self.setting.inner_steps
        eta, alpha = setting.lr, setting.alpha
        k = setting.inner_lr * setting.gamma(epoch)
        num_batches = -(-self.num_patterns // self.batch_size)
        if self.kernel is not None and masks is None:
            self.state["d"] = self.kernel.esgd_epoch(
                self.state["a"],
                self.state["c"],
                self.state["m"],
                orders.contiguous(),
                self.target,
                self.batch_size,
                pull=k,
                alpha=alpha,
                lr=eta,
                **self._constants(epoch, setting.inner_lr),
            )
        else:
            self._esgd_steps(epoch, orders, masks, k)
        # noise of inner step l reaches w with the weight eta sum_{l' >= l} (1 - alpha) alpha^(L-1-l') (1 - k)^(l'-l)
        reach = 0.0
        for inner in range(L):
            reach += sum((1 - alpha) * alpha ** (L - 1 - i) * (1 - k) ** (i - inner) for i in range(inner, L)) ** 2
        self.noise += num_batches * eta**2 * setting.inner_lr * setting.epsilon**2 * reach

    def _esgd_steps(self, epoch: int, orders: Tensor, masks: Tensor | None, k: float) -> None:
        """The steps of an epoch by torch's operations; ``k`` is the pull of an inner step."""
        setting, H, L = self.setting, self.hidden, self.setting.inner_steps
        a, c, m = (self.state[name] for name in ("a", "c", "m"))
        n, slope = len(a), 2 * setting.tanh_beta(epoch)
        eta, alpha = setting.lr, setting.alpha
        pull = a.new_tensor([k, 0, k]).view(3, 1, 1, 1)
        s, q, q_c = torch.empty_like(a), torch.empty_like(a), torch.empty_like(a)
        steps = a.new_empty(n, H, L, padded(self.batch_size, 16))  # the coefficients that were added to S
        number, num_batches = 0, -(-self.num_patterns // self.batch_size)
        for outer in range(num_batches):
            for tensor in (s, q, q_c):
                tensor.zero_()
            # the explorer is w' = e w + f S; its mean mu = in_mean w + Q; overlap = w . w'
            factors = a.new_ones(3, n, H, 1)
            e, f, overlap = factors
            in_mean = a.new_full((n, H, 1), alpha**L)
            shares, patterns = [], []
            for inner in range(L):
                which, position = divmod(number, num_batches)
                if position == 0:
                    masks_now = None if masks is None else masks[:, which]
                    batches = self.present(orders[:, which], masks_now, epoch, setting.inner_lr)
                batch = batches[position]
                number += 1
                wide = batch.patterns.unsqueeze(1).expand(n, H, -1)
                w, in_s = a.gather(2, wide), s.gather(2, wide)
                sloped = factors[:2] * slope
                dc = _coefficients((w * sloped[0]).addcmul_(in_s, sloped[1]), batch)
                dc = F.hardshrink(dc, self.threshold)
                # w' <- (1 - k) w' + k w + dc X, normalised below
                torch.add(pull, factors, alpha=1 - k, out=factors)
                norm2 = overlap.mul(2 * k).add_(1 - 2 * k)
                step = torch.div(dc, f, out=steps[:, :, inner])
                patterns.append(batch.patterns)
                if self._add_rows(s, batch, step):
                    along = (w * dc).sum(dim=2, keepdim=True)
                    own = in_s.add_(s.gather(2, wide)).mul_(dc).sum(dim=2, keepdim=True)
                    norm2.addcmul_(e, along, value=2).addcmul_(f, own)
                    overlap += along
                weight = (1 - alpha) * alpha ** (L - 1 - inner)
                in_mean.add_(e, alpha=weight)
                shares.append(f * weight)
                q.addcmul_(s, shares[-1])
                factors /= norm2.sqrt_()
            # a step is in S from then on, so it is in Q with all later shares
            steps.mul_(torch.cat(shares, dim=2).flip(2).cumsum(2).flip(2).unsqueeze(3))
            q_c.scatter_add_(2, torch.cat(patterns, dim=1).unsqueeze(1).expand(n, H, -1), steps.flatten(2))
            w_q = (a * q_c).sum(dim=2, keepdim=True)
            q_q = (q * q_c).sum(dim=2, keepdim=True)
            away = 1 - in_mean
            if outer == num_batches - 1:
                self.state["d"] = (away**2 - 2 * away * w_q + q_q).sum(dim=1) / 2
            keep = 1 - eta * away
            norm = (keep**2 + 2 * eta * keep * w_q + eta**2 * q_q).sqrt()
            kept, added = keep / norm, eta / norm
            a.mul_(kept).addcmul_(q, added)
            c.mul_(kept).addcmul_(q_c, added)
            m.mul_(kept)


class _Direct(_Form):
    """The weights themselves: two matrix products a step and network, for any number of patterns."""

    def load(self, weights: Tensor) -> None:
        self.restarts = len(weights)
        w = _pad(weights.to(self.dtype), self.N).flatten(0, 1).clone()
        self.state = {"w": w, "d": w.new_zeros(len(w), 1)}

    def weights(self, rows: Sequence[int] | None = None) -> Tensor:
        w = self.state["w"].view(self.restarts, self.y, self.hidden, self.N)[..., : self.num_inputs]
        return (w if rows is None else w[list(rows)]).clone()

    def errors(self) -> Tensor:
        return self._wrong(torch.stack([w @ self.x.T for w in self.state["w"][:: self.y]]))

    def loss(self, epoch: int, exact: bool = False) -> Tensor:
        z = torch.stack([w @ self.x.T for w in self.state["w"][:: self.y]])
        return self._losses(z, self.target, epoch).sum(dim=1)

    def distance(self) -> Tensor:
        if self.setting.algorithm == "esgd":
            return self.state["d"].squeeze(1).clone()
        w = self.state["w"].view(self.restarts, self.y, self.hidden, self.N)
        return (w - w.mean(dim=1, keepdim=True)).square_().sum(dim=(1, 2, 3)) / (2 * self.y)

    def _step(self, w: Tensor, batch: _Batch, epoch: int) -> Tensor:
        """The update -lr grad of networks w (n, H, N) on their mini-batches. The products run one network at a time,
        so that the result cannot depend on the others.
        """
        rows = [self.x[one] for one in batch.patterns]
        z = torch.stack([one @ row.T for one, row in zip(w, rows, strict=True)])
        c = _coefficients(z.mul_(2 * self.setting.tanh_beta(epoch)), batch)
        return torch.stack([one @ row for one, row in zip(c, rows, strict=True)])

    def epoch(self, epoch: int, orders: Tensor, masks: Tensor | None) -> None:
        setting, w = self.setting, self.state["w"]
        n, H = len(w), self.hidden
        if setting.algorithm == "esgd":
            self._esgd_epoch(epoch, orders, masks)
            return
        masks = None if masks is None else masks.reshape(n, H, -1)
        by_restart = w.view(self.restarts, self.y, H, -1)
        strength = setting.lr * setting.period * setting.gamma(epoch)
        batches = self.present(orders.reshape(n, -1), masks, epoch, setting.lr)
        for number, batch in enumerate(batches, start=1 + epoch * len(batches)):
            dw = self._step(w, batch, epoch)
            if self.y > 1 and number % setting.period == 0:
                by_restart.lerp_(by_restart.mean(dim=1, keepdim=True), strength)
            w += dw
            w /= w.norm(dim=-1, keepdim=True)

    def _esgd_epoch(self, epoch: int, orders: Tensor, masks: Tensor | None) -> None:
        setting, w = self.setting, self.state["w"]
        L, alpha = setting.inner_steps, setting.alpha
        k = setting.inner_lr * setting.gamma(epoch)
        size = math.sqrt(setting.inner_lr) * setting.epsilon
        noise = [_generator(seed, _NOISE, epoch) for seed in self.seeds] if size else []
        passes = ((orders[:, p], None if masks is None else masks[:, p]) for p in range(orders.shape[1]))
        batches = [batch for one in passes for batch in self.present(*one, epoch, setting.inner_lr)]
        outer_steps = len(batches) // L
        for outer in range(outer_steps):
            explorer, mean = w.clone(), w.clone()
            for batch in batches[outer * L : (outer + 1) * L]:
                step = self._step(explorer, batch, epoch)
                explorer.lerp_(w, k).add_(step)
                for one, generator in zip(explorer, noise, strict=True) if size else ():
                    drawn = generator.standard_normal((self.hidden, self.num_inputs), dtype=np.float32)
                    one[:, : self.num_inputs] += size * torch.from_numpy(drawn)
                mean.lerp_(explorer, 1 - alpha)
                explorer /= explorer.norm(dim=-1, keepdim=True)
            if outer == outer_steps - 1:
                self.state["d"] = (w - mean).square().sum(dim=(1, 2)).unsqueeze(1) / 2
            w.lerp_(mean, setting.lr)
            w /= w.norm(dim=-1, keepdim=True)


# ---------------------------------------------------------------------------------------------------------- the runner


@dataclass
class _Restart:
    """Where one restart stands: its weights at an epoch, and how it ended if it has."""

    seed: int
    weights: Tensor  # (y, H, N)
    epoch: int = 0
    stop: str = ""
    value: float = math.nan


class _Job:
    """The restarts of one setting, and how to train a group of them."""

    def __init__(
        self,
        setting: Setting,
        patterns: Patterns,
        restarts: list[_Restart],
        dtype: torch.dtype,
        form: str,
        refresh: int,
        purpose: int = _ORDER,
    ) -> None:
        self.setting, self.restarts, self.refresh, self.purpose = setting, restarts, refresh, purpose
        self.patterns, self.dtype, self.form = patterns, dtype, form
        self.lock = threading.Lock()
        self.cancel = threading.Event()
        self.at: dict[int, int] = {}  # epochs that the groups have come to since the last refresh, for progress

    def groups(self, workers: int) -> list[list[_Restart]]:
        """Restarts to train together: at the same epoch, of a size that suits the caches, as many for each worker."""
        by_epoch: dict[int, list[_Restart]] = {}
        for restart in self.restarts:
            if not restart.stop:
                by_epoch.setdefault(restart.epoch, []).append(restart)
        groups = []
        for same in by_epoch.values():
            rounds = math.ceil(len(same) * self.setting.num_replicas / (_GROUP * workers))
            count = min(len(same), rounds * workers)
            groups += [same[k::count] for k in range(count)]
        return groups

    def make_form(self) -> _Gram | _Direct:
        make = _Gram if self.form == "gram" else _Direct
        return make(self.setting, self.patterns.inputs, self.patterns.targets, self.dtype)

    @torch.inference_mode()
    def train(self, group: list[_Restart]) -> None:
        """Train a group to its end, or until cancelled. Restarts are brought up to date at every refresh."""
        setting, form = self.setting, self.make_form()
        P = self.patterns.inputs.shape[0]
        block = max(1, 16 // (setting.num_replicas * setting.inner_steps))
        epoch = group[0].epoch
        orders: dict[int, Tensor] = {}
        ahead: list[_Restart] = []  # those that have skipped the epochs until the next refresh
        fresh = False
        while (group or ahead) and not self.cancel.is_set():
            if not fresh or epoch % self.refresh == 0:
                if fresh:
                    self._publish(group, form, epoch)
                group, ahead = group + ahead, []
                weights = torch.stack([restart.weights for restart in group])
                if setting.align and setting.num_replicas > 1 and epoch % self.refresh == 0:
                    weights = torch.stack([align(w) for w in weights])
                skipped = self._skip(group, weights, form, epoch) if epoch % self.refresh == 0 else []
                if skipped:
                    ahead = [group[row] for row in skipped if not group[row].stop]
                    kept = [row for row in range(len(group)) if row not in set(skipped)]
                    group, weights, orders = [group[row] for row in kept], weights[kept], {}
                    if not group:
                        epoch, fresh = epoch + self.refresh, False
                        self.at[threading.get_ident()] = epoch
                        continue
                form.load(weights)
                fresh = True
            form.seeds = [restart.seed for restart in group]
            if epoch not in orders:
                drawn = [
                    [order(setting, restart.seed, e, P, self.purpose) for restart in group]
                    for e in range(epoch, epoch + block)
                ]
                orders = {epoch + k: torch.from_numpy(np.stack(rows)) for k, rows in enumerate(drawn)}
            masks = None
            if setting.dropout:
                drawn_masks = [dropout_mask(setting, restart.seed, epoch, P) for restart in group]
                masks = torch.from_numpy(np.stack(drawn_masks)).to(self.dtype)
            form.epoch(epoch, orders[epoch], masks)
            epoch += 1
            self.at[threading.get_ident()] = epoch
            value = self._rule(form, epoch)
            ended = self._ended(form, value, epoch)
            if ended:
                last = form.weights(ended)
                with self.lock:
                    for row, weights in zip(ended, last, strict=True):
                        restart = group[row]
                        restart.weights, restart.epoch, restart.value = weights.clone(), epoch, float(value[row])
                        restart.stop = setting.stop if self._met(value[row]) else "max_epochs"
                kept = [row for row in range(len(group)) if row not in set(ended)]
                group = [group[row] for row in kept]
                orders = {e: rows[kept] for e, rows in orders.items()}
                form.select(kept)
                if not group:  # the next refresh is that of those ahead
                    epoch, fresh = padded(epoch, self.refresh), False

    def _skip(self, group: list[_Restart], weights: Tensor, form: _Gram | _Direct, epoch: int) -> list[int]:
        """Take the restarts of rSGD that have no gradient until the next refresh there; their rows.

        Decided for each restart from its own weights, so that it does not depend on its neighbours.
        """
        setting = self.setting
        if setting.algorithm != "rsgd" or setting.stop != "distance" or setting.dropout or not isinstance(form, _Gram):
            return []
        epochs = min(self.refresh, setting.max_epochs - epoch)
        ends = (epoch, epoch + epochs - 1)
        targets = self.patterns.targets.double()
        inputs = self.patterns.inputs.to(self.dtype)

        def felt(z: Tensor, reach: Tensor | float = 0.0) -> bool:
            return largest_coefficient(setting, z, reach, targets, ends).item() > form.threshold / 2

        still = {}  # row -> pre-activations of restarts that have no gradient where they are
        for row, w in enumerate(weights):
            if not felt(
                (w[0] @ inputs.T).double().view(1, 1, *w.shape[1:2], -1)
            ):  # most are known by the first replica
                z = (w.flatten(0, 1) @ inputs.T).double().view(1, *w.shape[:2], -1)
                if not felt(z):
                    still[row] = z
        if not still:
            return []
        starts = {row: weights[row].double() for row in still}
        overlaps = torch.stack([torch.einsum("ahi,bhi->hab", w, w) for w in starts.values()])
        mixtures = mixing(setting, overlaps, epoch, epochs, -(-len(inputs) // setting.batch_size))
        distances = torch.stack([spread(mixture, overlaps) for mixture in mixtures])
        skipped = []
        for k, (row, z) in enumerate(still.items()):
            if felt(z, movement(mixtures[:, k : k + 1], z)):
                continue
            skipped.append(row)
            near = (distances[:, k] < setting.tolerance).nonzero()
            last = int(near[0]) if len(near) else epochs - 1
            mixed = torch.einsum("hab,bhi->ahi", mixtures[last, k], starts[row])
            mixed /= mixed.norm(dim=-1, keepdim=True)
            restart = group[row]
            with self.lock:
                restart.weights, restart.epoch = mixed.to(self.dtype), epoch + last + 1
                if len(near) or restart.epoch >= setting.max_epochs:
                    restart.value = distances[last, k].item()
                    restart.stop = setting.stop if len(near) else "max_epochs"
        return skipped

    def _publish(self, group: list[_Restart], form: _Gram | _Direct, epoch: int) -> None:
        """Compute the weights from scratch and put them where a checkpoint finds them."""
        weights = form.weights()
        if form.noise:
            for w, restart in zip(weights, group, strict=True):
                draw = _generator(restart.seed, _NOISE, epoch).standard_normal(w.shape)
                w += math.sqrt(form.noise) * torch.from_numpy(draw).to(w.dtype)
            weights /= weights.norm(dim=-1, keepdim=True)
        with self.lock:
            for w, restart in zip(weights, group, strict=True):
                restart.weights, restart.epoch = w.clone(), epoch

    def _rule(self, form: _Gram | _Direct, epoch: int) -> Tensor:
        """What the stopping rule measures, for each restart."""
        if self.setting.stop == "errors":
            return form.errors()
        if self.setting.stop == "loss":
            return form.loss(epoch - 1, exact=epoch >= self.setting.max_epochs)
        return form.distance()

    def _met(self, value: Tensor) -> Tensor:
        return value == 0 if self.setting.stop == "errors" else value < self.setting.tolerance

    def _ended(self, form: _Gram | _Direct, value: Tensor, epoch: int) -> list[int]:
        """The restarts that end now. Zero errors must hold for the weights themselves, computed from scratch."""
        last = epoch >= self.setting.max_epochs
        ended = list(range(len(value))) if last else self._met(value).nonzero().squeeze(1).tolist()
        if ended and self.setting.stop == "errors":
            exact = errors(_center(form.weights(ended)), self.patterns.inputs, self.patterns.targets)
            value[ended] = exact.to(value.dtype)
            ended = [row for row in ended if last or bool(self._met(value[row]))]
        return ended

    def done(self) -> float:
        """Restarts that have ended, and parts of the others as far as one can tell."""
        typical = self.setting.typical_epochs
        latest = max(self.at.values(), default=0)
        with self.lock:
            return sum(
                1.0 if restart.stop else min(max(restart.epoch, latest if restart.epoch else 0) / typical, 0.99)
                for restart in self.restarts
            )


def _center(weights: Tensor) -> Tensor:
    """The solution that replicas (..., y, H, N) stand for: their barycenter, normalised."""
    center = weights.mean(dim=-3)
    return center / center.norm(dim=-1, keepdim=True)


def run(
    setting: Setting,
    patterns: Patterns,
    seeds: list[int],
    *,
    name: str,
    dtype: torch.dtype,
    form: str,
    refresh: int,
    threads: int | None,
    checkpoint: str | os.PathLike[str] | None,
    progress: bool,
) -> Solutions:
    """Train, polish and measure; the arguments are those of :func:`wideflat.committee.train`."""
    form = _choose_form(form, setting, patterns, refresh)
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    if refresh < 1:
        raise ValueError(f"refresh must be >= 1, got {refresh}")
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise ValueError(f"seeds must be different whole numbers >= 0, at least one; got {list(seeds)[:10]}")
    workers = torch.get_num_threads() if threads is None else threads
    if workers < 1:
        raise ValueError(f"threads must be >= 1, got {threads}")
    num_inputs = patterns.inputs.shape[1]
    restarts = [_Restart(seed, initial_weights(setting, seed, num_inputs).to(dtype)) for seed in seeds]
    options = {"dtype": str(dtype).removeprefix("torch."), "form": form, "refresh": refresh, "source": patterns.source}
    identity = {"setting": setting.identity(), "seeds": seeds, "data": _digest(patterns), **options}
    if checkpoint is not None and os.path.exists(checkpoint):
        _resume(checkpoint, identity, restarts, dtype)
    job = _Job(setting, patterns, restarts, dtype, form, refresh)

    def save() -> None:
        if checkpoint is not None:
            _save(checkpoint, identity, job)

    try:
        bar = Progress(f"committee {name}", len(seeds), progress, before=job.done())
        _execute(job, workers, save, bar)
    except KeyboardInterrupt:
        save()
        finished = sum(bool(restart.stop) for restart in restarts)
        hint = f"; run it again to go on from {os.fspath(checkpoint)}" if checkpoint is not None else ""
        message = f"interrupted with {finished} of {len(seeds)} restarts finished{hint}"
        raise Interrupted(message, _measure(setting, patterns, restarts, name, options, job)) from None
    except Exception:
        save()  # whatever went wrong, the last refresh is good
        raise
    save()
    return _measure(setting, patterns, restarts, name, options, job)


def _choose_form(form: str, setting: Setting, patterns: Patterns, refresh: int) -> str:
    if form not in ("auto", "gram", "direct"):
        raise ValueError(f'form must be "auto", "gram" or "direct", got {form!r}')
    if form != "auto":
        return form
    num_patterns, num_inputs = patterns.inputs.shape
    # the noise that a pre-activation gathers in an inner step, against its own size of about |x| |w|
    felt = setting.algorithm == "esgd" and setting.epsilon * math.sqrt(setting.inner_lr * num_inputs) > 1e-4
    return "direct" if felt or num_patterns > 1.5 * num_inputs else "gram"


def _execute(job: _Job, workers: int, save: Callable[[], None], progress: Progress) -> None:
    """Train all groups on worker threads, with progress and checkpoints from this one."""
    groups = job.groups(workers)
    if not groups:
        return
    threads_before = torch.get_num_threads()

    def single_threaded() -> None:
        torch.set_num_threads(1)  # of this worker; the other core has the other group

    saved = time.monotonic()
    try:
        with progress, ThreadPoolExecutor(min(workers, len(groups)), initializer=single_threaded) as pool:
            futures = [pool.submit(job.train, group) for group in groups]
            try:
                while True:
                    ended, going = wait(futures, timeout=0.2, return_when=FIRST_EXCEPTION)
                    if not going or any(future.exception() for future in ended):
                        break
                    progress.update(job.done(), epoch=max(job.at.values(), default=0))
                    if time.monotonic() - saved > _CHECKPOINT_INTERVAL:
                        save()
                        saved = time.monotonic()
                for future in ended:
                    future.result()  # raises what a worker raised
                progress.update(job.done())
            except BaseException:
                job.cancel.set()
                raise
    finally:
        torch.set_num_threads(threads_before)


def _measure(
    setting: Setting, patterns: Patterns, restarts: list[_Restart], name: str, options: dict, job: _Job
) -> Solutions:
    """Polish where that is asked for, count errors, and put everything together."""
    weights = _center(torch.stack([restart.weights for restart in restarts]))
    before = errors(weights, patterns.inputs, patterns.targets).tolist()
    polish_epochs, movement = [0] * len(restarts), [0.0] * len(restarts)
    wrong = [i for i, count in enumerate(before) if count and restarts[i].stop]
    if setting.polish_epochs and wrong:
        weights, steps = _polish(setting, patterns, weights, restarts, wrong, job)
        for i, moved, epochs in steps:
            movement[i], polish_epochs[i] = moved, epochs
    count = max(len(patterns.test_inputs), 1)
    test = errors(weights, patterns.test_inputs, patterns.test_targets).double() / count
    if len(patterns.test_inputs) == 0:
        test = torch.full_like(test, math.nan)
    return Solutions(
        weights=weights,
        inputs=patterns.inputs,
        targets=patterns.targets,
        test_inputs=patterns.test_inputs,
        test_targets=patterns.test_targets,
        name=name,
        setting=setting,
        seeds=[restart.seed for restart in restarts],
        epochs=[restart.epoch for restart in restarts],
        stop=[restart.stop or "interrupted" for restart in restarts],
        value=[restart.value for restart in restarts],
        errors_before=before,
        train_errors=errors(weights, patterns.inputs, patterns.targets).tolist(),
        polish_epochs=polish_epochs,
        polish_movement=movement,
        test_error=test.tolist(),
        balanced_test_error=balanced_error(weights, patterns.test_inputs, patterns.test_targets).tolist(),
        options=options,
    )


def _polish(
    setting: Setting, patterns: Patterns, weights: Tensor, restarts: list[_Restart], wrong: list[int], job: _Job
) -> tuple[Tensor, list[tuple[int, float, int]]]:
    """Plain SGD with growing beta on solutions that have errors, until they have none."""
    plain = Setting(
        "sgd",
        lr=setting.polish_lr,
        tanh_beta0=setting.polish_beta0,
        tanh_beta1=setting.polish_beta1,
        omega0=setting.polish_omega,
        omega1=0.0,
        stop="errors",
        max_epochs=setting.polish_epochs,
        hidden=setting.hidden,
        batch_size=setting.batch_size,
        gradient_scale=setting.gradient_scale,
        tanh_beta_max=setting.tanh_beta_max,
    )
    chosen = [_Restart(restarts[i].seed, weights[i : i + 1].clone()) for i in wrong]
    polishing = _Job(plain, patterns, chosen, job.dtype, job.form, job.refresh, purpose=_POLISH)
    for group in polishing.groups(1):
        polishing.train(group)
    weights = weights.clone()
    steps = []
    for i, restart in zip(wrong, chosen, strict=True):
        moved = float((restart.weights[0] - weights[i]).square().sum()) / setting.hidden
        steps.append((i, moved, restart.epoch))
        weights[i] = restart.weights[0]
    return weights, steps


# --------------------------------------------------------------------------------------------------------- checkpoints


def _digest(patterns: Patterns) -> str:
    digest = hashlib.sha256(patterns.inputs.contiguous().numpy().tobytes())
    digest.update(patterns.targets.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _save(path: str | os.PathLike[str], identity: dict, job: _Job) -> None:
    with job.lock:
        record = [{"epoch": r.epoch, "stop": r.stop, "value": r.value} for r in job.restarts]
        weights = torch.stack([r.weights for r in job.restarts]).numpy()
    with atomic_write(path, "wb") as file:
        metadata = {"format": "wideflat committee checkpoint 1", "identity": identity, "restarts": record}
        np.savez(file, metadata=np.array(json.dumps(metadata)), weights=weights)


def _resume(path: str | os.PathLike[str], identity: dict, restarts: list[_Restart], dtype: torch.dtype) -> None:
    """Bring restarts to where a checkpoint has them."""
    where = Path(path)
    try:
        with open(where, "rb") as file, np.load(file, allow_pickle=False) as content:
            metadata = json.loads(str(content["metadata"]))
            weights = torch.from_numpy(content["weights"])
        saved, record = metadata["identity"], metadata["restarts"]
    except (zipfile.BadZipFile, EOFError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{where} is not a whole checkpoint of committee training ({error}); delete it to start again"
        ) from error
    identity = json.loads(json.dumps(identity))
    if saved != identity:
        differs = [key for key in identity if saved.get(key) != identity[key]]
        raise ValueError(
            f"{where} is the checkpoint of another run: it differs in {', '.join(differs)}; "
            "give the same arguments, or another file"
        )
    for restart, w, line in zip(restarts, weights, record, strict=True):
        restart.weights, restart.epoch = w.to(dtype), line["epoch"]
        restart.stop, restart.value = line["stop"], line["value"]
