"""Committee machines by their pre-activations: the steps of each algorithm through the Gram matrix of the patterns.

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

import torch
from torch import Tensor
from torch.nn import functional as F

from wideflat.committee.forms import Batch, Form, coefficients, lengthen
from wideflat.committee.settings import Setting
from wideflat.kernels.committee import CommitteeKernel, padded

__all__ = ["Gram", "GramESGD", "GramRSGD", "GramSGD"]

#: Columns of the Gram matrix that are added at a time. The accumulators then stay in registers.
_COLUMNS = 112

#: Rows without a coefficient are left out when fewer than this share of the rows have one.
_SPARSE = 0.75


class Gram(Form):
    """Vectors by their pre-activations and coordinates; see the head of this file. What the algorithms share."""

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

    @abc.abstractmethod
    def begin(self, start: Tensor, a: Tensor) -> dict[str, Tensor]:
        """The state of networks with weights ``start`` (r, y, H, N) and pre-activations ``a`` (n, H, P)."""

    @abc.abstractmethod
    def coordinates(self) -> tuple[Tensor, Tensor]:
        """C (n, H, P) and M (n, H, y) of all vectors: w = M w_start + C X, up to its norm."""

    @abc.abstractmethod
    def preactivations(self) -> Tensor:
        """A of the first replica, normalised."""

    @abc.abstractmethod
    def steps(self, epoch: int, orders: Tensor, masks: Tensor | None) -> None:
        """One epoch, by the kernel where there is one for the algorithm."""

    def load(self, weights: Tensor) -> None:
        """Their pre-activations, no coordinates yet."""
        self.restarts = len(weights)
        self.noise = 0.0
        start = lengthen(weights.to(self.dtype), self.N)
        a = torch.stack([w @ self.x.T for w in start.flatten(0, 1)])
        self.state = {"start": start.flatten(0, 1), **self.begin(start, a)}

    def expand(self, c: Tensor, m: Tensor, rows: Sequence[int]) -> Tensor:
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
        w = self.expand(*self.coordinates(), range(self.restarts) if rows is None else rows)
        return (w / w.norm(dim=-1, keepdim=True))[..., : self.num_inputs]

    def errors(self) -> Tensor:
        """From the pre-activations of the first replica."""
        return self.count_errors(self.preactivations())

    def loss(self, epoch: int, exact: bool = False) -> Tensor:
        """From the pre-activations, always exact."""
        return self.losses(self.preactivations(), self.target, epoch).sum(dim=1)

    def epoch(self, epoch: int, orders: Tensor, masks: Tensor | None) -> None:
        """By the kernel where there is one for the algorithm."""
        self.measure = True
        self.steps(epoch, orders, masks)

    def add_rows(self, a: Tensor, batch: Batch, c: Tensor) -> bool:
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

    def constants(self, epoch: int, lr: float) -> dict[str, float]:
        """What the coefficients of an epoch depend on, for the kernel; see `present` and `coefficients`."""
        beta, root = self.setting.tanh_beta(epoch), math.sqrt(self.hidden)
        return {
            "slope": 2 * beta,
            "inside": -4 * self.setting.omega(epoch) / root,
            "outside": 4 * lr * self.rate * beta / root,
            "threshold": self.threshold,
        }


class GramSGD(Gram):
    """State of a network: A, C (H, P) of an unnormalised v = w_start + C X, and its squared norm; w = v / |v|."""

    def begin(self, start: Tensor, a: Tensor) -> dict[str, Tensor]:
        """No coordinates, norm one."""
        return {"a": a, "c": torch.zeros_like(a), "norm2": a.new_ones(len(a), self.hidden, 1)}

    def coordinates(self) -> tuple[Tensor, Tensor]:
        """C, and all of w_start."""
        c = self.state["c"]
        return c, c.new_ones(len(c), self.hidden, 1)

    def preactivations(self) -> Tensor:
        """A / |v|."""
        return self.state["a"] / self.state["norm2"].sqrt()

    def distance(self, exact: bool = False) -> Tensor:
        """One network is its own barycenter."""
        return self.state["a"].new_zeros(self.restarts)

    def loss(self, epoch: int, exact: bool = False) -> Tensor:
        """From the patterns that were worst before, if these are bad enough."""
        worst = self.state.get("worst")
        if worst is not None and not exact:  # few patterns are enough to see that the loss is still too large
            z = self.state["a"].gather(2, worst.unsqueeze(1).expand(-1, self.hidden, -1)) / self.state["norm2"].sqrt()
            bound = self.losses(z, self.target[worst], epoch).sum(dim=1)
            if bool((bound > 1.001 * self.setting.tolerance).all()):
                return bound
        losses = self.losses(self.preactivations(), self.target, epoch)
        self.state["worst"] = losses.topk(min(16, self.num_patterns), dim=1).indices
        return losses.sum(dim=1)

    def steps(self, epoch: int, orders: Tensor, masks: Tensor | None) -> None:
        """By torch's operations, but for the sum over rows."""
        a, c, norm2 = (self.state[name] for name in ("a", "c", "norm2"))
        n, H, slope = len(a), self.hidden, 2 * self.setting.tanh_beta(epoch)
        for batch in self.present(orders[:, 0], None if masks is None else masks[:, 0], epoch, self.setting.lr):
            wide = batch.patterns.unsqueeze(1).expand(n, H, -1)
            norm = norm2.sqrt()
            before = a.gather(2, wide)
            dc = F.hardshrink(coefficients(before * (slope / norm), batch).mul_(norm), self.threshold)
            if self.add_rows(a, batch, dc):
                c.scatter_add_(2, wide, dc)
                norm2 += before.add_(a.gather(2, wide)).mul_(dc).sum(dim=2, keepdim=True)


class GramRSGD(Gram):
    """State of a network: one tensor V with columns A | I | J | C | M of normalised w = M w_start + C X.

    M (y columns) mixes the replicas at the last refresh, I = M w_start X^T and J = M w_start w_start^T. All of it is
    linear in w, so the elastic step acts on all columns alike; |w|^2 = C . (A + I) + M . J.
    """

    def __init__(self, setting: Setting, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> None:
        super().__init__(setting, inputs, targets, dtype)
        self.can_skip = setting.stop == "distance" and not setting.dropout

    def begin(self, start: Tensor, a: Tensor) -> dict[str, Tensor]:
        """Each replica is all of itself and nothing of the others."""
        P, y = self.P, self.y
        v = a.new_zeros(len(a), self.hidden, padded(3 * P + 2 * y))
        v[..., :P] = v[..., P : 2 * P] = a
        # w_a . w_b of the replicas of a restart, unit by unit: (y, H, y)
        v[..., 2 * P : 2 * P + y] = torch.cat([torch.einsum("ahi,bhi->ahb", w, w) for w in start])
        v[..., 3 * P + y : 3 * P + 2 * y] = torch.eye(y, dtype=self.dtype).repeat(self.restarts, 1).unsqueeze(1)
        return {"v": v}

    def coordinates(self) -> tuple[Tensor, Tensor]:
        """The columns C and M."""
        P, y, v = self.P, self.y, self.state["v"]
        return v[..., 2 * P + y : 3 * P + y], v[..., 3 * P + y : 3 * P + 2 * y]

    def preactivations(self) -> Tensor:
        """The columns A of every y-th network."""
        return self.state["v"][:: self.y, :, : self.P]

    def distance(self, exact: bool = False) -> Tensor:
        """From the pre-activations, if these are far enough from each other and nobody asks for more."""
        P, y, H, r = self.P, self.y, self.hidden, self.restarts
        a = self.state["v"].view(r, y, H, -1)[..., :P]
        # |dA|^2 <= (largest eigenvalue of G) |dw|^2, so this is a lower bound, which costs no matrix product
        bound = (a - a.mean(dim=1, keepdim=True)).square_().sum(dim=(1, 2, 3)) / (2 * y * self.largest)
        asked = list(range(r)) if exact else (bound < self.setting.tolerance).nonzero().squeeze(1).tolist()
        if asked:
            c, m = (t.reshape(r, y, H, -1) for t in self.coordinates())
            dc, dm = c - c.mean(dim=1, keepdim=True), m - m.mean(dim=1, keepdim=True)
            dw = self.expand(dc, dm, asked)
            bound[asked] = dw.square_().sum(dim=(1, 2, 3)) / (2 * y)
        return bound

    def steps(self, epoch: int, orders: Tensor, masks: Tensor | None) -> None:
        """By the kernel, which has no dropout."""
        setting, n = self.setting, len(self.state["v"])
        orders = orders.reshape(n, -1)
        strength = setting.lr * setting.period * setting.gamma(epoch)
        if self.kernel is None or masks is not None:
            masks = None if masks is None else masks.reshape(n, self.hidden, -1)
            self._steps_by_torch(epoch, orders, masks, strength)
            return
        self.kernel.rsgd_epoch(
            self.state["v"],
            orders.contiguous(),
            self.target,
            self.batch_size,
            replicas=self.y,
            period=setting.period,
            number=1 + epoch * -(-self.num_patterns // self.batch_size),
            strength=strength,
            **self.constants(epoch, setting.lr),
        )

    def _steps_by_torch(self, epoch: int, orders: Tensor, masks: Tensor | None, strength: float) -> None:
        P, y, H, v = self.P, self.y, self.hidden, self.state["v"]
        setting, n, slope = self.setting, len(v), 2 * self.setting.tanh_beta(epoch)
        by_restart = v.view(self.restarts, y, H, -1)
        a, i, j = v[..., :P], v[..., P : 2 * P], v[..., 2 * P : 2 * P + y]
        c, m = self.coordinates()
        batches = self.present(orders, masks, epoch, setting.lr)
        for number, batch in enumerate(batches, start=1 + epoch * len(batches)):
            wide = batch.patterns.unsqueeze(1).expand(n, H, -1)
            dc = F.hardshrink(coefficients(a.gather(2, wide).mul_(slope), batch), self.threshold)
            coupled = number % setting.period == 0
            if coupled:
                by_restart.lerp_(by_restart.mean(dim=1, keepdim=True), strength)
            moved = self.add_rows(a, batch, dc)
            if moved:
                c.scatter_add_(2, wide, dc)
            if moved or coupled:
                norm2 = (a + i).mul_(c).sum(dim=2, keepdim=True) + (m * j).sum(dim=2, keepdim=True)
                v.mul_(norm2.rsqrt_())


class GramESGD(Gram):
    """State of a network: A, C, M of normalised w, and the distance of w from mu in the last outer step.

    The explorer is w' = e w + f S, where S begins at zero and is kept as its pre-activations alone: the coordinates of
    mu follow from the steps at the end of the inner loop.
    """

    def begin(self, start: Tensor, a: Tensor) -> dict[str, Tensor]:
        """All of w_start."""
        n = len(a)
        return {"a": a, "c": torch.zeros_like(a), "m": a.new_ones(n, self.hidden, 1), "d": a.new_zeros(n, 1)}

    def coordinates(self) -> tuple[Tensor, Tensor]:
        """C and M."""
        return self.state["c"], self.state["m"]

    def preactivations(self) -> Tensor:
        """A."""
        return self.state["a"]

    def distance(self, exact: bool = False) -> Tensor:
        """Of mu from w in the last outer step, always exact."""
        return self.state["d"].squeeze(1).clone()

    def steps(self, epoch: int, orders: Tensor, masks: Tensor | None) -> None:
        """By the kernel, which has no dropout; the noise is gathered for the next refresh."""
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
                **self.constants(epoch, setting.inner_lr),
            )
        else:
            self._steps_by_torch(epoch, orders, masks, k)
        # noise of inner step l reaches w with the weight eta sum_{l' >= l} (1 - alpha) alpha^(L-1-l') (1 - k)^(l'-l)
        reach = 0.0
        for inner in range(L):
            reach += sum((1 - alpha) * alpha ** (L - 1 - i) * (1 - k) ** (i - inner) for i in range(inner, L)) ** 2
        self.noise += num_batches * eta**2 * setting.inner_lr * setting.epsilon**2 * reach

    def _steps_by_torch(self, epoch: int, orders: Tensor, masks: Tensor | None, k: float) -> None:
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
                if self.add_rows(s, batch, step):
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
