"""The weights of many committee machines, and an epoch of each algorithm on them.

**What a step costs.** There are few training patterns (P = 500) and every update is a combination of them, so a weight
vector is kept as its pre-activations A = w X^T on all patterns, and as coordinates C with w = w_start + C X. A gradient
step on a mini-batch with coefficients c is then

    A <- A + c G[batch],        G = X X^T,        C[batch] <- C[batch] + c

with H B P multiplications and no forward pass, where weights need 2 H B N: the pre-activations of the next mini-batch
are read off A. Norms come from the same numbers, |w + c X|^2 = |w|^2 + sum_batch c (A_before + A_after). This is
exact: all vectors of the algorithms (replicas, their barycenter, the explorer w' and the mean mu of eSGD) are linear in
these. Every ``refresh`` epochs the weights are computed from the coordinates and everything starts from there, so that
rounding errors do not pile up.

**Rows that are not needed.** The sum over rows of G is a kernel in C (:mod:`wideflat.kernels.committee`) or, without a
compiler, ``embedding_bag``: each restart picks its own rows, nothing is copied, the time is proportional to the rows,
and the result of one restart is independent of the others bit for bit.
Coefficients so small that they cannot move a pre-activation by 1/16 of a rounding error are set to zero; when part of
a mini-batch is like that (late in a run: omega is large, the pattern has a margin), only the others are added.
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

from wideflat.committee.machine import Setting
from wideflat.committee.randomness import NOISE, generator
from wideflat.kernels.committee import CommitteeKernel, padded

__all__ = ["Batch", "Direct", "Form", "Gram", "coefficients"]

#: Columns of the Gram matrix that are added at a time. The accumulators then stay in registers.
_COLUMNS = 112

#: Rows without a coefficient are left out when fewer than this share of the rows have one.
_SPARSE = 0.75


class Batch(NamedTuple):
    """A mini-batch of every network, padded with the pattern of zeros to a multiple of 16 patterns."""

    patterns: Tensor  # by their numbers, (n, B')
    rows: Tensor  # those that are not padding, once for every unit, for embedding_bag: (n H B,)
    inside: Tensor  # -4 omega target / sqrt(H), (n, B')
    outside: Tensor  # 4 rate beta target / sqrt(H), (n, B')
    mask: Tensor | None  # dropout, (n, H, B')


def coefficients(u: Tensor, batch: Batch) -> Tensor:
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


class Form(abc.ABC):
    """One way to hold and move the weight vectors of r restarts with y replicas each; what both ways share.

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
    def distance(self) -> Tensor:
        """Of the replicas from their barycenter, or of mu from w; above the tolerance a lower bound will do."""

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
        index = _pad(orders, count * B, self.num_patterns).view(n, count, B).transpose(0, 1)
        rows = index.int().unsqueeze(2).expand(count, n, H, B).reshape(count, -1)
        index = _pad(index, padded(B, 16), self.num_patterns).contiguous()
        target = self.target[index] * (4 / math.sqrt(H))
        inside = target * -setting.omega(epoch)
        outside = target * (lr * self.rate * setting.tanh_beta(epoch))
        if masks is None:
            return [Batch(*parts, None) for parts in zip(index, rows, inside, outside, strict=True)]
        masks = _pad(masks, count * B).view(n, H, count, B).movedim(2, 0)
        masks = _pad(masks, padded(B, 16)).contiguous()
        return [Batch(*parts) for parts in zip(index, rows, inside, outside, masks, strict=True)]

    def _wrong(self, z: Tensor) -> Tensor:
        votes = (z[..., : self.num_patterns] >= 0).sum(dim=1) * 2 > self.hidden
        return (votes != (self.target[: self.num_patterns] > 0)).sum(dim=1)

    def _losses(self, z: Tensor, target: Tensor, epoch: int) -> Tensor:
        """What each pattern adds to the mean loss, from its pre-activations (n, H, p) and target; (n, p)."""
        omega = self.setting.omega(epoch)
        output = torch.tanh(z * self.setting.tanh_beta(epoch)).sum(dim=1) / math.sqrt(self.hidden)
        return F.logsigmoid(2 * omega * output * target) * (target.abs() / (-2 * omega * self.num_patterns))


class Gram(Form):
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
        """Their pre-activations, no coordinates yet."""
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
        """From the coordinates."""
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
        """From the pre-activations of the first replica."""
        return self._wrong(self._preactivations())

    def loss(self, epoch: int, exact: bool = False) -> Tensor:
        """From the patterns that were worst before, if these are bad enough."""
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
        """From the pre-activations, if these are far enough from each other."""
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
        """By the kernel where there is one for the algorithm."""
        self.measure = True
        step = getattr(self, f"_{self.setting.algorithm}_epoch")
        step(epoch, orders, masks)

    def _add_rows(self, a: Tensor, batch: Batch, c: Tensor) -> bool:
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
        """What the coefficients of an epoch depend on, for the kernel; see `present` and `coefficients`."""
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
            dc = F.hardshrink(coefficients(before * (slope / norm), batch).mul_(norm), self.threshold)
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
            dc = F.hardshrink(coefficients(a.gather(2, wide).mul_(slope), batch), self.threshold)
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
                dc = coefficients((w * sloped[0]).addcmul_(in_s, sloped[1]), batch)
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


class Direct(Form):
    """The weights themselves: two matrix products a step and network, for any number of patterns."""

    def load(self, weights: Tensor) -> None:
        """As they are."""
        self.restarts = len(weights)
        w = _pad(weights.to(self.dtype), self.N).flatten(0, 1).clone()
        self.state = {"w": w, "d": w.new_zeros(len(w), 1)}

    def weights(self, rows: Sequence[int] | None = None) -> Tensor:
        """A copy."""
        w = self.state["w"].view(self.restarts, self.y, self.hidden, self.N)[..., : self.num_inputs]
        return (w if rows is None else w[list(rows)]).clone()

    def errors(self) -> Tensor:
        """Of the first replica."""
        return self._wrong(torch.stack([w @ self.x.T for w in self.state["w"][:: self.y]]))

    def loss(self, epoch: int, exact: bool = False) -> Tensor:
        """Of the first replica, always exact."""
        z = torch.stack([w @ self.x.T for w in self.state["w"][:: self.y]])
        return self._losses(z, self.target, epoch).sum(dim=1)

    def distance(self) -> Tensor:
        """Always exact."""
        if self.setting.algorithm == "esgd":
            return self.state["d"].squeeze(1).clone()
        w = self.state["w"].view(self.restarts, self.y, self.hidden, self.N)
        return (w - w.mean(dim=1, keepdim=True)).square_().sum(dim=(1, 2, 3)) / (2 * self.y)

    def _step(self, w: Tensor, batch: Batch, epoch: int) -> Tensor:
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
        noise = [generator(seed, NOISE, epoch) for seed in self.seeds] if size else []
        passes = ((orders[:, p], None if masks is None else masks[:, p]) for p in range(orders.shape[1]))
        batches = [batch for one in passes for batch in self.present(*one, epoch, setting.inner_lr)]
        outer_steps = len(batches) // L
        for outer in range(outer_steps):
            explorer, mean = w.clone(), w.clone()
            for batch in batches[outer * L : (outer + 1) * L]:
                step = self._step(explorer, batch, epoch)
                explorer.lerp_(w, k).add_(step)
                for one, stream in zip(explorer, noise, strict=True) if size else ():
                    drawn = stream.standard_normal((self.hidden, self.num_inputs), dtype=np.float32)
                    one[:, : self.num_inputs] += size * torch.from_numpy(drawn)
                mean.lerp_(explorer, 1 - alpha)
                explorer /= explorer.norm(dim=-1, keepdim=True)
            if outer == outer_steps - 1:
                self.state["d"] = (w - mean).square().sum(dim=(1, 2)).unsqueeze(1) / 2
            w.lerp_(mean, setting.lr)
            w /= w.norm(dim=-1, keepdim=True)
