"""Replicated-SGD: several networks that train side by side and attract each other (Algorithm 2, Eq. 6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wideflat.centered import warn_off_center
from wideflat.checks import LARGEST, choice, number, numbers_of, warn_user, whole
from wideflat.checks import optimizer as checked_optimizer
from wideflat.checks.options import strength
from wideflat.checks.records import reading
from wideflat.distributed.group import InProcess, ReplicaGroup, detached
from wideflat.kernels.float64 import doubled
from wideflat.kernels.shards import local_gradient
from wideflat.replica_networks import Replicas

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ReplicaCoupling", "ReplicaGroup", "Replicas"]


class ReplicaCoupling:
    r"""The attraction between replicas (Algorithm 2), between ``backward()`` and the step of any torch optimizer.

    .. code-block:: text

        for t = 1, 2, ...
            w_bar <- mean of the replicas
            for a = 1, ..., y
                dw_a <- grad Loss(w_a)                              loss.backward()
                if t mod K = 0:
                    dw_a <- dw_a + K gamma (w_a - w_bar)            coupling.couple()
                w_a <- w_a - eta dw_a                               opt.step()

    With K = 1 this is the gradient of the replicated loss, sum_a Loss(w_a) + gamma sum_a d(w_a, w_bar), where d is half
    the squared distance (Eq. 6).

    Args:
        replicas: The replicas; or, with ``mesh``, the one network of this rank (also one wrapped in
            ``DistributedDataParallel(model, device_mesh=mesh["dp"])`` or sharded by ``fully_shard(model,
            mesh=mesh["dp"])``).
        mesh: A one-dimensional device mesh whose ranks hold one replica each: ``mesh["replica"]`` of a mesh with the
            dimensions ``("replica",)`` or ``("replica", "dp")``. See `wideflat.distributed.mesh`.
        period: K. The attraction acts at every K-th call of `couple`, with K times the strength.
        gamma: The strength; see `initial_gamma` and `wideflat.Focusing`. As long as none is set the replicas train
            apart, and the first interaction warns.
        mode: ``"gradient"`` adds to the gradients, as above. ``"proximal"`` moves the weights themselves,
            w_a <- w_a - s/(1+s) (w_a - w_bar) with s = lr K gamma: the exact solution of the same attraction, stable
            for any s. It stays out of the optimizer's momentum m, through which the gradient form acts 1 / (1 - m)
            times as strongly. It needs ``optimizer``.
        optimizer: Where ``lr`` is read from: the optimizer of all replicas here, or one for each of them. With it, the
            gradient mode warns once when lr K gamma is so large that the replicas would be thrown apart; without it,
            once they are being thrown apart.

    With a `torch.amp.GradScaler` call ``scaler.unscale_(opt)`` before `couple`, as before clipping.

    Example:
        Two replicas at 0 and 2, gamma = 0.5, no loss: the pull on them is -0.5 and +0.5.

        >>> replicas = Replicas(lambda: nn.Linear(1, 1, bias=False), num_replicas=2)
        >>> for model, w in zip(replicas, (0.0, 2.0)):
        ...     _ = nn.init.constant_(model.weight, w)
        >>> coupling = ReplicaCoupling(replicas, period=1, gamma=0.5)
        >>> coupling.couple()
        True
        >>> [model.weight.grad.item() for model in replicas], coupling.distances().tolist()
        ([-0.5, 0.5], [0.5, 0.5])
        >>> coupling.initial_gamma([3.0, 1.0])  # (3 + 1) / (0.5 + 0.5)
        4.0
    """

    def __init__(
        self,
        replicas: Replicas | nn.Module | ReplicaGroup,
        *,
        mesh: DeviceMesh | None = None,
        period: int = 10,
        gamma: float | None = None,
        mode: str = "gradient",
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
    ) -> None:
        period = whole("period", period, 1)
        choice("mode", mode, ("gradient", "proximal"))
        given = optimizer if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
        if mode == "proximal" and not given:
            raise ValueError("mode='proximal' needs the optimizer, whose lr it reads: pass optimizer=opt")
        self.group: ReplicaGroup = replica_group(replicas, mesh)
        self.period = period
        self._gamma = None if gamma is None else strength("gamma", gamma)
        self.mode = mode
        self.optimizers = [checked_optimizer("optimizer", each) for each in given]
        self.calls = 0
        self._warned = False
        self._growth = _Growth()
        #: The weights of the networks in this process, while they hold the solution instead.
        self._own: list[Tensor] | None = None

    def __repr__(self) -> str:
        gamma = "not set" if self._gamma is None else f"{float(self._gamma):.4g}"
        rates = sorted({group["lr"] for group in self._param_groups()})
        reads = f", lr={', '.join(f'{float(rate):g}' for rate in rates)}" if rates else ""
        return (
            f"ReplicaCoupling({self.group.num_replicas} replicas, period={self.period}, gamma={gamma}, "
            f"mode={self.mode!r}{reads}; {self.calls} iterations)"
        )

    @property
    def gamma(self) -> float:
        """The strength of the attraction; 0 as long as none is set."""
        return 0.0 if self._gamma is None else self._gamma

    @gamma.setter
    def gamma(self, value: float) -> None:
        self._gamma = strength("gamma", value)

    @torch.no_grad()
    def couple(self) -> bool:
        """Count one iteration; at every K-th, let the replicas attract each other.

        Call it at every iteration, after ``backward()`` and before the optimizer's step.

        Returns:
            Whether the attraction acted.
        """
        if self._own is not None:
            raise RuntimeError(
                "couple() was called after coupling.eval(), while the networks hold their barycenter; call "
                "coupling.train() first"
            )
        self.calls += 1
        if self.calls % self.period:
            return False
        self._attract()
        return True

    def _attract(self) -> None:
        """One interaction, of strength K gamma."""
        strength = min(self.period * float(self.gamma), LARGEST)  # float32 has none beyond; it diverges all the same
        if not strength or self.group.num_replicas == 1:
            self._warn_if_apart()
            return
        self.group.check()
        if self.mode == "proximal":
            self._attract_weights(strength)
        else:
            self._warn_if_unstable(strength)
            self._attract_gradients(strength)

    def _attract_gradients(self, strength: float) -> None:
        members = self._trainable()
        watched: list[Tensor] = []
        for weights, gradients, w_bar in self.group.blocks(detached(members), *self._gradients(members)):
            for w, dw in zip(weights, gradients, strict=True):
                away = torch._foreach_sub(w, w_bar)
                torch._foreach_add_(dw, away, alpha=strength)
                if not self.optimizers and not self._warned:
                    watched += torch._foreach_norm(away)
        if watched and self._growth.seen(watched):
            self._warned = True
            warn_user(
                f"the distances between replicas grow at every interaction: K gamma = {strength:.3g} is too large for "
                "the learning rate; pass optimizer=opt to be told before it happens, and use mode='proximal', or a "
                "smaller gamma, lr or period"
            )

    def _attract_weights(self, strength: float) -> None:
        members = self._trainable()
        rates = self._rates()
        by_rate: dict[tuple[float, ...], list[int]] = {}
        for index, same in enumerate(zip(*members, strict=True)):
            by_rate.setdefault(tuple(rates.get(p, 0.0) for p in same), []).append(index)
        for lrs, chosen in by_rate.items():
            for weights, _, w_bar in self.group.blocks(detached([[w[i] for i in chosen] for w in members])):
                for w, lr in zip(weights, lrs, strict=True):
                    s = lr * strength
                    torch._foreach_lerp_(w, w_bar, s / (1 + s))

    def _trainable(self) -> list[list[Tensor]]:
        return [[p for p in w if p.requires_grad] for w in self.group.members]

    @staticmethod
    def _gradients(members: list[list[Tensor]]) -> list[list[Tensor]]:
        """The gradients, made of zeros where the loss does not depend on a parameter: the attraction still does."""
        gradients = []
        for w in members:
            of_one = []
            for p in w:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                of_one.append(local_gradient(p))
            gradients.append(of_one)
        return gradients

    def _rates(self) -> dict[Tensor, float]:
        return {p: float(group["lr"]) for group in self._param_groups() for p in group["params"]}

    def _param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _warn_if_apart(self) -> None:
        """Once: nobody has set gamma, and the replicas are trained as if they were alone."""
        if self._gamma is None and not self._warned and self.group.num_replicas > 1:
            self._warned = True
            warn_user(
                "the replicas are not coupled: gamma is not set. Write coupling.gamma = coupling.initial_gamma(losses) "
                "before training (the losses of the replicas in eval mode), or ReplicaCoupling(..., gamma=0.1)"
            )

    def _warn_if_unstable(self, strength: float) -> None:
        if self._warned:
            return
        settings = [
            (float(group["lr"]), float(group.get("momentum", 0)), bool(group.get("nesterov")))
            for group in self._param_groups()
            if "betas" not in group and "alpha" not in group  # the rate of an adaptive optimizer says nothing
        ]
        for lr, momentum, nesterov in dict.fromkeys(settings):  # the replicas have the same, as a rule
            growth = _growth(lr * strength, self.period, momentum, nesterov)
            if growth > 1 + 1e-9:
                self._warned = True
                warn_user(
                    f"lr K gamma = {lr * strength:.3g} makes the attraction unstable: the distances "
                    f"between replicas would grow {growth:.2f} times every {self.period} iterations; use "
                    "mode='proximal' (wideflat train --coupling proximal), or a smaller gamma, lr or period"
                )
                return

    def initial_gamma(self, losses: Sequence[float] | Tensor) -> float:
        """gamma_0 = sum_a L(w_a) / sum_a d(w_a, w_bar): loss and attraction of equal size before training (Sec. 4).

        Args:
            losses: L(w_a) of each replica, over the training set or a part of it, in eval mode.

        Raises:
            ValueError: If the replicas coincide up to rounding, so that there is no distance to divide by.
        """
        numbers = numbers_of("losses", losses)
        values = torch.tensor(numbers, dtype=torch.float64)
        here = len(self.group.members)
        if len(values) != here:
            raise ValueError(f"expected the loss of each of the {here} replicas, got {len(values)}")
        distance = self.group.total(self.group.distances()).item()
        if not distance > self._rounding():
            raise ValueError(
                "initial_gamma divides by the distance of the replicas to their barycenter, and they coincide; start "
                "them from independent initialisations (more than one replica, independent=True, no fixed seed in "
                "make_model; on several ranks a seed of its own for each replica, and no DistributedDataParallel over "
                "all of them); copies of one trained network must be moved apart first (p.mul_(1 + 0.01 * "
                "torch.randn_like(p)) for every p of each replica); or set gamma by hand"
            )
        return self.group.total(values).item() / distance

    def _rounding(self) -> float:
        """The distance that rounding of the mean makes of equal replicas."""
        squares = []
        for member in detached(self.group.members):
            norms = [doubled(p.full_tensor() if hasattr(p, "full_tensor") else p).square().sum() for p in member]
            coarsest = max(torch.finfo(p.dtype).eps for p in member)
            squares.append(coarsest**2 * sum(float(norm) for norm in norms))
        return float(self.group.total(torch.tensor(squares, dtype=torch.float64)))

    def distances(self) -> Tensor:
        """d(w_a, w_bar) of each replica, on whatever rank: half the squared distance to the barycenter."""
        return self.group.gather(self.group.distances())

    @contextmanager
    def at_barycenter(self) -> Iterator[None]:
        """Within ``with coupling.at_barycenter():`` the networks hold w_bar; afterwards their own weights again.

        This is how a network that is sharded, or too large for a copy, is evaluated or saved at the barycenter. Refresh
        its batch norm within (`wideflat.refresh_batch_norm`): buffers are restored afterwards, too.
        """
        warn_off_center(p for w in self.group.members for p in w)
        tensors = [p.detach() for w in self.group.members for p in w] + list(self.group.buffers())
        kept = [tensor.clone() for tensor in tensors]
        self._show_barycenter()
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, before in zip(tensors, kept, strict=True):
                    tensor.copy_(before)

    @torch.no_grad()
    def _show_barycenter(self) -> None:
        for weights, _, w_bar in self.group.blocks(detached(self.group.members)):
            for w in weights:
                torch._foreach_copy_(w, w_bar)

    def eval(self) -> None:
        """Put the solution, w_bar, into every network, until `train`: to evaluate or save any of them. All ranks do so.

        It is in `state_dict` which weights the networks have of their own, so that what is saved now is gone on with.
        """
        if self._own is None:
            self._own = [p.detach().clone() for w in self.group.members for p in w]
            self._show_solution()

    def _show_solution(self) -> None:
        self._show_barycenter()

    @torch.no_grad()
    def train(self) -> None:
        """Give every network its own weights back after `eval`."""
        if self._own is not None:
            for p, own in zip((p for w in self.group.members for p in w), self._own, strict=True):
                p.copy_(own)
            self._own = None

    def barycenter(self, buffers: str = "average") -> nn.Module:
        """A network with the mean w_bar of the replicas' parameters; see `Replicas.barycenter`. All ranks call it."""
        choice("buffers", buffers, ("average", "first"))
        return self.group.barycenter(self.at_barycenter, buffers)

    def prefetch(self) -> bool:
        """Start on the barycenter for the next `couple`, if that will attract, while forward and backward pass run.

        It is optional and changes no result. Call it before the forward pass, on every rank; the weights must not
        change between it and `couple`. It does something only where the replicas are on several ranks.

        Returns:
            Whether communication was started.
        """
        due = (self.calls + 1) % self.period == 0 and float(self.gamma) and self.group.num_replicas > 1
        return bool(due) and self.mode == "gradient" and self.group.prefetch(*detached(self._trainable()))

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs."""
        own = {} if self._own is None else {"own": [p.clone() for p in self._own]}
        return {"calls": self.calls, "gamma": float(self.gamma), "period": self.period, **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        with reading("state of a coupling"):
            calls, period = whole("calls", state_dict["calls"]), whole("period", state_dict["period"], 1)
            self.calls, self.gamma, self.period = calls, number("gamma", state_dict["gamma"]), period
            own = state_dict.get("own")
            self._own = None if own is None else [p.clone() for p in own]


class _Growth:
    """Notices when distances double at every interaction: four times in a row no start of a training does."""

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self.before = 0.0
        self.doublings = 0

    def seen(self, norms: list[Tensor]) -> bool:
        """Take the distances of an interaction; says whether those before it were growing without end.

        On an accelerator nothing is looked at: the host would have to wait for it.
        """
        if norms[0].device.type != "cpu":
            return False
        previous, self.last = self.last, doubled(torch.stack(norms)).square().sum()
        if previous is None:
            return False
        value = float(previous)
        self.doublings = self.doublings + 1 if 0 < 2 * self.before < value else 0
        self.before = value
        return self.doublings >= 4 or not value < float("inf")


def replica_group(replicas: Replicas | nn.Module | ReplicaGroup, mesh: DeviceMesh | None = None) -> ReplicaGroup:
    """Who the replicas are: all in this process, or one on each rank of a mesh, or a group that was made before."""
    if mesh is not None:
        from wideflat.distributed.mesh import MeshReplicas  # DTensor takes longer to import than all of wideflat

        if isinstance(replicas, Replicas) or not isinstance(replicas, nn.Module):
            raise TypeError(
                "with mesh= there is one replica on each rank: pass this rank's network, built from a seed of its own; "
                f"got {type(replicas).__name__}"
            )
        return MeshReplicas(replicas, mesh)
    if isinstance(replicas, Replicas):
        return InProcess(replicas)
    if isinstance(replicas, nn.Module) or not hasattr(replicas, "blocks"):
        raise TypeError(
            f"expected wideflat.Replicas, got {type(replicas).__name__}; for one network on each rank, with the other "
            'replicas on other ranks, pass mesh=mesh["replica"]'
        )
    return replicas


def _growth(s: float, period: int, momentum: float, nesterov: bool) -> float:
    """The factor by which SGD, feeling the attraction s = lr K gamma alone, multiplies w_a - w_bar in K iterations.

    The spectral radius of K iterations as a linear map of (w_a - w_bar, lr times velocity), of which one has the pull.

    >>> _growth(0.5, period=1, momentum=0.0, nesterov=False), _growth(3.0, period=1, momentum=0.0, nesterov=False)
    (0.5, 2.0)
    """
    free = np.array([[1.0, -momentum * (momentum if nesterov else 1)], [0.0, momentum]])
    pulled = free + s * np.array([[-(1 + momentum) if nesterov else -1.0, 0.0], [1.0, 0.0]])
    whole = np.linalg.matrix_power(free, period - 1) @ pulled
    return float(np.abs(np.linalg.eigvals(whole)).max())
