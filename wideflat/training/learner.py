"""The networks of a training, and what moves them: optimizers, coupling and focusing of any algorithm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from wideflat.algorithms.algorithm import Gamma
from wideflat.entropy_sgd import EntropySGD
from wideflat.focusing import Focusing, automatic_gamma0
from wideflat.presets import Preset
from wideflat.replicas import ReplicaCoupling, Replicas
from wideflat.seeds import derive_seed
from wideflat.training.company import Alone, Company
from wideflat.training.precision import Overflow

__all__ = ["Learner"]


class Learner:
    """The networks of one algorithm that are in this process, their optimizers, the coupling and the focusing.

    What differs between algorithms is in their records (:mod:`wideflat.algorithms`), so that neither this nor the
    training loop knows which it runs.

    Args:
        preset: Algorithm and hyper-parameters.
        make_network: Makes the network of replica ``a``.
        seed: Of the Langevin noise; every replica has its own.
        company: Who trains the other replicas; by default all are here.
    """

    def __init__(
        self, preset: Preset, make_network: Callable[[int], nn.Module], seed: int, company: Company | None = None
    ) -> None:
        company = company or Alone()
        self.preset = preset
        self.algorithm = preset.record
        self.local_replicas = company.local_replicas(preset.num_replicas)
        indices = iter(self.local_replicas)
        self.replicas = Replicas(lambda: make_network(next(indices)), len(self.local_replicas))
        self.networks: list[nn.Module] = list(self.replicas)
        self.optimizers = [
            self.algorithm.make_optimizer(preset, list(network.parameters()), derive_seed(seed, "langevin", a))
            for a, network in zip(self.local_replicas, self.networks, strict=True)
        ]
        self.coupling: ReplicaCoupling | None = None
        if self.algorithm.make_coupling is not None:
            self.coupling = self.algorithm.make_coupling(preset, company.group(self.replicas), self.optimizers)
        self.focusing: list[Focusing] = []
        self._must_meet = company.must_meet

    # ---- before training

    def start(
        self,
        total_steps: int,
        losses: Callable[[], Sequence[float]] | None = None,
        gradients: Callable[[int], Callable[[], Tensor]] | None = None,
    ) -> None:
        """Lay out the focusing over ``total_steps`` iterations; choose gamma0 where it is automatic.

        Args:
            total_steps: Iterations of the whole training.
            losses: The training loss of every replica; called only for the automatic gamma0 of replicas. None, here or
                below, leaves an automatic gamma0 open, for a state that is loaded afterwards.
            gradients: Of replica ``a``, makes a function that puts the gradients on a mini-batch into ``grad`` and
                returns the loss; called only for the automatic gamma0 of Entropy-SGD.
        """
        self.focusing = []
        for gamma in self.algorithm.gammas:
            gamma0, factor, kind = gamma.schedule(self.preset)
            for a, target in enumerate(self._focused(gamma)):
                chosen = self._automatic_gamma0(gamma, a, losses, gradients) if gamma0 is None else gamma0
                self.focusing.append(
                    Focusing(
                        target,
                        factor,
                        total_steps,
                        kind=kind if chosen else "constant",
                        gamma0=chosen,
                        gamma_max=chosen if kind == "cosine" else None,
                        every=self._clock(total_steps),
                    )
                )

    def _clock(self, total_steps: int) -> int:
        """Iterations from one change of gamma to the next."""
        preset = self.preset
        return {"step": 1, "cycle": preset.inner_steps, "epoch": total_steps // preset.epochs}[preset.gamma_clock]

    def _focused(self, gamma: Gamma) -> Sequence[Any]:
        """Whose gamma it is."""
        return self.optimizers if gamma.of == "optimizer" else [self.coupling]

    def _automatic_gamma0(
        self,
        gamma: Gamma,
        a: int,
        losses: Callable[[], Sequence[float]] | None,
        gradients: Callable[[int], Callable[[], Tensor]] | None,
    ) -> float:
        if losses is None or gradients is None:
            return 1.0
        if gamma.of == "coupling":
            assert self.coupling is not None
            return self.coupling.initial_gamma(losses())
        optimizer = self.optimizers[a]
        assert isinstance(optimizer, EntropySGD)
        before = [(buffer, buffer.clone()) for buffer in self.networks[a].buffers()]
        gamma0 = automatic_gamma0(optimizer, gradients(a))
        for buffer, value in before:  # the batch-norm statistics that it has moved
            buffer.copy_(value)
        return gamma0

    # ---- an iteration

    def set_rates(self, tau: float) -> None:
        """Learning rate and period K at epoch ``tau``."""
        name = self.algorithm.drives
        value = getattr(self.preset, name) * self.preset.schedule(tau)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group[name] = value * (group["gamma"] if self.preset.gamma_in_lr else 1)
        if self.coupling is not None and self.algorithm.couples == "before":
            self.coupling.period = self.preset.period_at(tau)
        if self.coupling is not None and not self.preset.parted(tau):
            self.coupling.gamma = 0.0  # the focusing writes the next one after the step

    def zero_grad(self) -> None:
        """Forget the gradients of all networks."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def update(self, gradients: Callable[[], Tensor]) -> bool:
        """One iteration: gradients, attraction between the replicas, a step of every optimizer.

        An iteration whose gradients overflow is left out whole: weights, momenta, the cycle of Entropy-SGD and the
        count of the coupling stay as they were, in all replicas. Schedules go on.

        Args:
            gradients: Puts the gradients of all networks into ``grad`` and returns the mean loss; raises `Overflow` if
                one of them does not fit into float16.

        Returns:
            Whether the step was taken.
        """
        try:
            self._update(gradients)
            taken = True
        except Overflow:
            taken = False
            if self._must_meet and self.coupling is not None:
                self.coupling.couple()
        for focusing in self.focusing:
            focusing.step()
        return taken

    def _update(self, gradients: Callable[[], Tensor]) -> None:
        if self.algorithm.closure:
            for optimizer in self.optimizers:
                optimizer.step(gradients)  # type: ignore[arg-type] # a tensor is what closures return
            return
        gradients()
        if self.coupling is not None and self.algorithm.couples == "before":
            self.coupling.couple()
        for optimizer in self.optimizers:
            optimizer.step()
        if self.coupling is not None and self.algorithm.couples == "after":
            self.coupling.couple()

    # ---- the center

    def center(self) -> nn.Module:
        """A copy of the center, wherever the algorithm has it. Its batch norm is not refreshed."""
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                if isinstance(optimizer, EntropySGD):
                    stack.enter_context(optimizer.center())
            center = self.replicas.barycenter() if self.coupling is None else self.coupling.barycenter()
        if self.algorithm.center is not None:
            self.algorithm.center(center, self.optimizers, self.coupling)
        return center

    @property
    def needs_batch_norm(self) -> bool:
        """Whether the batch-norm statistics of the center, which training never visited, are gathered anew."""
        return self.algorithm.moves_center and self.preset.batch_norm == "refresh"

    def metrics(self) -> dict[str, Any]:
        """Learning rate, gamma, K and the mean distance of the replicas to their barycenter, where they exist."""
        row: dict[str, Any] = {"lr": self.optimizers[0].param_groups[0][self.algorithm.drives]}
        if self.focusing:
            row["gamma"] = self.focusing[0].gamma
        if self.coupling is not None:
            row["period"] = self.coupling.period
            row["distance"] = float(self.coupling.distances().mean())
            if len(self.focusing) > 1:
                row["replica_gamma"] = self.focusing[-1].gamma
        return row

    def inner_distance(self) -> float | None:
        """d(w', w) of Entropy-SGD, the mean over replicas; None for other algorithms."""
        inner = [opt.distance().item() for opt in self.optimizers if isinstance(opt, EntropySGD)]
        return sum(inner) / len(inner) if inner else None

    # ---- what a checkpoint holds

    def state_dict(self) -> dict[str, Any]:
        """Weights, buffers, and the states of optimizers, coupling and focusing; by replica."""
        return {
            "networks": [dict(network.state_dict()) for network in self.networks],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "coupling": None if self.coupling is None else self.coupling.state_dict(),
            "focusing": [focusing.state_dict() for focusing in self.focusing],
        }

    def joined(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of all replicas, from those of the processes that have them; ordered by replica."""
        whole = dict(states[0])
        for name in ("networks", "optimizers"):
            whole[name] = [part for state in states for part in state[name]]
        own = self._own_focusing(len(states[0]["networks"]))
        whole["focusing"] = [part for state in states for part in state["focusing"][:own]]
        whole["focusing"] += states[0]["focusing"][own:]
        return whole

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a learner of the same preset stood: from its whole state, or from that of the replicas here."""
        saved = len(state["networks"])
        chosen = range(saved) if saved == len(self.networks) else self.local_replicas
        for network, a in zip(self.networks, chosen, strict=True):
            network.load_state_dict(state["networks"][a])
        for optimizer, a in zip(self.optimizers, chosen, strict=True):
            optimizer.load_state_dict(state["optimizers"][a])
        if self.coupling is not None:
            self.coupling.load_state_dict(state["coupling"])
        own = self._own_focusing(saved)
        parts = [state["focusing"][a] for a in chosen if own] + state["focusing"][own:]
        for focusing, part in zip(self.focusing, parts, strict=True):
            focusing.load_state_dict(part)

    def _own_focusing(self, replicas: int) -> int:
        """How many of the focusings in a state of so many replicas belong to one replica each; they come first."""
        return replicas * sum(gamma.of == "optimizer" for gamma in self.algorithm.gammas)
