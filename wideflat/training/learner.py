"""The algorithms side by side: what each trains, how it steps, and where its center is.

=========  ====================  =====================================  =======================================
algorithm  networks              one iteration                          center
=========  ====================  =====================================  =======================================
sgd        1                     a step of SGD or RMSprop               the network
sam        1                     the same, with the gradient at the     the network
                                 worst point of a small ball
esgd       1                     an inner step of Entropy-SGD; each     w, where the outer steps lead
                                 L-th also an outer one (Algorithm 1)
lookahead  1                     the same, epsilon = alpha = gamma = 0  w
rsgd(xy)   y                     a step for every replica; each K-th    the barycenter
                                 with K gamma (w_a - w_bar) (Alg. 2)
easgd      y and a center        a step for every replica; each K-th    the center variable
                                 pulls replicas and center together
parle      y                     esgd in every replica, replicas        the barycenter of the w's
                                 coupled at the outer steps
=========  ====================  =====================================  =======================================

All of them are one object here, :class:`Learner`, so that the training loop does not know which it runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

import wideflat
from wideflat.baselines import EASGD, SAM, Lookahead, Parle
from wideflat.presets import Preset
from wideflat.replicas import ReplicaGroup
from wideflat.seeds import derive_seed

__all__ = ["Learner", "Place"]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where this process is among those that train the other replicas.

    Args:
        index: Which replica is trained here.
        group: Makes the group of all replicas from the network that is trained here.
    """

    index: int
    group: Callable[[nn.Module], ReplicaGroup]


class Learner:
    """The networks of one algorithm, their optimizers, the coupling between them and the focusing.

    Args:
        experiment: Algorithm and hyper-parameters.
        make_network: Makes the network of replica ``a``.
        seed: Of the Langevin noise; every replica has its own.
        place: Where this process is, if each replica has its own.
    """

    def __init__(
        self, experiment: Preset, make_network: Callable[[int], nn.Module], seed: int, place: Place | None = None
    ) -> None:
        self.experiment = experiment
        here = range(experiment.num_replicas) if place is None else [place.index]
        indices = iter(here)
        self.replicas = wideflat.Replicas(lambda: make_network(next(indices)), len(here))
        self.networks: list[nn.Module] = list(self.replicas)
        self.optimizers = [
            _optimizer(experiment, network, seed, a) for a, network in zip(here, self.networks, strict=True)
        ]
        group = self.replicas if place is None else place.group(self.networks[0])
        self.coupling = _coupling(experiment, group, self.optimizers)
        self.focusing: list[wideflat.Focusing] = []

    # ---- before training

    def start(
        self,
        losses: Callable[[], Sequence[float]],
        gradients: Callable[[int], Callable[[], Tensor]],
        total_steps: int,
    ) -> None:
        """Choose gamma0 where it is automatic, and lay out the focusing over ``total_steps`` iterations.

        Args:
            losses: The training loss of every replica; called only for the automatic gamma0 of replicas.
            gradients: Of replica ``a``, makes a function that puts the gradients on a mini-batch into ``grad`` and
                returns the loss; called only for the automatic gamma0 of Entropy-SGD.
            total_steps: Iterations of the whole training.
        """
        x = self.experiment
        entropic = [
            opt for opt in self.optimizers if isinstance(opt, wideflat.EntropySGD) and x.algorithm != "lookahead"
        ]
        for a, optimizer in enumerate(entropic):
            gamma0 = self._automatic_gamma0(a, gradients(a)) if x.gamma0 is None else x.gamma0
            self._focus(optimizer, gamma0, x.gamma_factor, x.focusing, total_steps)
        if self.coupling is not None:
            parle = x.algorithm == "parle"
            chosen = x.replica_gamma0 if parle else x.gamma0
            gamma0 = self.coupling.initial_gamma(losses()) if chosen is None else chosen
            factor, kind = (x.replica_gamma_factor, x.replica_focusing) if parle else (x.gamma_factor, x.focusing)
            self._focus(self.coupling, gamma0, factor, kind, total_steps)

    def _automatic_gamma0(self, a: int, gradients: Callable[[], Tensor]) -> float:
        """gamma0 of Entropy-SGD from one loop without pull; the batch-norm statistics it moves are put back."""
        optimizer = self.optimizers[a]
        assert isinstance(optimizer, wideflat.EntropySGD)
        before = [(buffer, buffer.clone()) for buffer in self.networks[a].buffers()]
        gamma0 = wideflat.automatic_gamma0(optimizer, gradients)
        for buffer, value in before:
            buffer.copy_(value)
        return gamma0

    def _focus(self, target: Any, gamma0: float, factor: float, kind: str, total_steps: int) -> None:
        gamma_max = gamma0 if kind == "cosine" else None
        kind = kind if gamma0 else "constant"
        self.focusing.append(
            wideflat.Focusing(target, factor, total_steps, kind=kind, gamma0=gamma0, gamma_max=gamma_max)
        )

    # ---- an iteration

    def set_progress(self, tau: float) -> None:
        """Learning rate and period K at epoch ``tau``."""
        experiment = self.experiment
        inner = experiment.algorithm == "lookahead"
        value = (experiment.inner_lr if inner else experiment.lr) * experiment.schedule(tau)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["inner_lr" if inner else "lr"] = value
        if self.coupling is not None and experiment.algorithm != "parle":  # which couples at its outer steps
            self.coupling.period = experiment.period_at(tau)

    def zero_grad(self) -> None:
        """Forget the gradients of all networks."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def update(self, gradients: Callable[[], Tensor], scaler: GradScaler | None = None) -> Tensor:
        """One iteration: gradients, attraction between the replicas, a step of every optimizer.

        Args:
            gradients: Puts the gradients of all networks into ``grad`` and returns the mean loss.
            scaler: For mixed precision with float16.
        """
        if self.experiment.algorithm == "sam":
            loss: Tensor = self.optimizers[0].step(gradients)  # type: ignore[arg-type,assignment]
        else:
            loss = gradients()
            if scaler is not None:
                for optimizer in self.optimizers:
                    scaler.unscale_(optimizer)
            after_the_step = self.experiment.algorithm == "parle"
            if self.coupling is not None and not after_the_step:
                self.coupling.couple()
            for optimizer in self.optimizers:
                optimizer.step() if scaler is None else scaler.step(optimizer)
            if self.coupling is not None and after_the_step:
                self.coupling.couple()
            if scaler is not None:
                scaler.update()
        for focusing in self.focusing:
            focusing.step()
        return loss

    # ---- the center

    @property
    def refreshes(self) -> bool:
        """Whether the center is somewhere the training did not gather batch-norm statistics."""
        return self.experiment.algorithm not in ("sgd", "sam")

    def center(self) -> nn.Module:
        """A copy of the center: see the table above. Its batch norm is not refreshed."""
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                if isinstance(optimizer, wideflat.EntropySGD):
                    stack.enter_context(optimizer.center())
            center = self.replicas.barycenter() if self.coupling is None else self.coupling.barycenter()
        if isinstance(self.coupling, EASGD):
            trainable = [p.detach() for p in center.parameters() if p.requires_grad]
            with torch.no_grad():
                torch._foreach_copy_(trainable, self.coupling.center)
        return center

    def figures(self) -> dict[str, Any]:
        """Learning rate, gamma, K and the mean distance of the replicas to their barycenter, where they exist."""
        group = self.optimizers[0].param_groups[0]
        row: dict[str, Any] = {"lr": group["inner_lr" if self.experiment.algorithm == "lookahead" else "lr"]}
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
        inner = [opt.distance().item() for opt in self.optimizers if isinstance(opt, wideflat.EntropySGD)]
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

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a learner of the same experiment stood."""
        for network, saved in zip(self.networks, state["networks"], strict=True):
            network.load_state_dict(saved)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if self.coupling is not None:
            self.coupling.load_state_dict(state["coupling"])
        for focusing, saved in zip(self.focusing, state["focusing"], strict=True):
            focusing.load_state_dict(saved)


def _optimizer(experiment: Preset, network: nn.Module, seed: int, a: int) -> Optimizer:
    """The optimizer of replica ``a``."""
    x = experiment
    if x.optimizer == "rmsprop":
        base: Callable[..., Optimizer] = partial(
            torch.optim.RMSprop, momentum=x.momentum, alpha=x.smoothing, eps=x.stabiliser, weight_decay=x.weight_decay
        )
    else:
        base = partial(
            torch.optim.SGD, momentum=x.momentum, nesterov=x.nesterov, weight_decay=x.weight_decay, fused=True
        )
    parameters = list(network.parameters())
    if x.algorithm in ("sgd", "rsgd", "rsgdxy", "easgd"):
        return base(parameters, lr=x.lr)
    if x.algorithm in ("esgd", "parle"):
        return wideflat.EntropySGD(
            parameters,
            lr=x.lr,
            inner_lr=x.inner_lr,
            inner_steps=x.inner_steps,
            gamma=x.gamma0 or 0.0,
            epsilon=x.epsilon,
            alpha=x.alpha,
            momentum=x.momentum,
            nesterov=x.nesterov,
            weight_decay=x.weight_decay,
            inner=base if x.optimizer == "rmsprop" else None,
            seed=derive_seed(seed, "langevin", a),
        )
    if x.algorithm == "lookahead":
        momenta = {"momentum": x.momentum, "nesterov": x.nesterov, "weight_decay": x.weight_decay}
        return Lookahead(
            parameters,
            lr=x.lr,
            inner_lr=x.inner_lr,
            inner_steps=x.inner_steps,
            **({"inner": base} if x.optimizer == "rmsprop" else momenta),
        )
    return SAM(parameters, base, rho=x.rho, lr=x.lr)


def _coupling(
    experiment: Preset, replicas: wideflat.Replicas | ReplicaGroup, optimizers: Sequence[Optimizer]
) -> wideflat.ReplicaCoupling | None:
    """The attraction between the replicas, for the algorithms that have it."""
    if experiment.algorithm in ("rsgd", "rsgdxy"):
        return wideflat.ReplicaCoupling(
            replicas, period=experiment.period, mode=experiment.coupling, optimizer=optimizers
        )
    if experiment.algorithm == "easgd":
        return EASGD(replicas, period=experiment.period)
    if experiment.algorithm == "parle":
        return Parle(replicas, optimizers)  # type: ignore[arg-type] # Parle checks that they are EntropySGD
    return None
