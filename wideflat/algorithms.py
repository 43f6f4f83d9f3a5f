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
import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

import wideflat
from wideflat.presets import Preset
from wideflat.seeds import derive_seed

__all__ = ["Learner"]


class Learner:
    """The networks of one algorithm, their optimizers, the coupling between them and the focusing.

    Args:
        experiment: Algorithm and hyper-parameters.
        make_network: Makes the network of replica ``a``.
        seed: Of the Langevin noise; every replica has its own.
    """

    def __init__(self, experiment: Preset, make_network: Callable[[int], nn.Module], seed: int) -> None:
        self.experiment = experiment
        count = itertools.count()
        self.replicas = wideflat.Replicas(lambda: make_network(next(count)), experiment.num_replicas)
        self.networks: list[nn.Module] = list(self.replicas)
        self.optimizers = [_optimizer(experiment, network, seed, a) for a, network in enumerate(self.networks)]
        self.coupling: Any = None
        if experiment.algorithm in ("rsgd", "rsgdxy"):
            self.coupling = wideflat.ReplicaCoupling(
                self.replicas, period=experiment.period, optimizer=self.optimizers[0]
            )
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
        experiment = self.experiment
        for a, target in enumerate(self._targets()):
            gamma0 = experiment.gamma0
            if gamma0 is None:
                if self.coupling is not None:
                    gamma0 = self.coupling.initial_gamma(losses())
                else:
                    buffers = copy.deepcopy(dict(self.networks[a].named_buffers()))
                    gamma0 = wideflat.automatic_gamma0(target, gradients(a))
                    for name, buffer in self.networks[a].named_buffers():
                        buffer.copy_(buffers[name])
            self.focusing.append(
                wideflat.Focusing(
                    target,
                    factor=experiment.gamma_factor,
                    total=total_steps,
                    kind=experiment.focusing if gamma0 else "constant",
                    gamma0=gamma0,
                    gamma_max=gamma0 if experiment.focusing == "cosine" else None,
                )
            )

    def _targets(self) -> list[Any]:
        """What has a gamma: the coupling, or every Entropy-SGD."""
        if self.coupling is not None:
            return [self.coupling]
        return [opt for opt in self.optimizers if isinstance(opt, wideflat.EntropySGD)]

    # ---- an iteration

    def set_progress(self, tau: float) -> None:
        """Learning rate and period K at epoch ``tau``."""
        experiment = self.experiment
        inner = experiment.algorithm == "lookahead"
        value = (experiment.inner_lr if inner else experiment.lr) * experiment.schedule(tau)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["inner_lr" if inner else "lr"] = value
        if self.coupling is not None:
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
            if self.coupling is not None:
                self.coupling.couple()
            for optimizer in self.optimizers:
                optimizer.step() if scaler is None else scaler.step(optimizer)
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
        """A copy of the center: the network, w of Entropy-SGD, or the barycenter. Batch norm is not refreshed."""
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                if isinstance(optimizer, wideflat.EntropySGD):
                    stack.enter_context(optimizer.center())
            return self.replicas.barycenter()

    def figures(self) -> dict[str, Any]:
        """Learning rate, gamma, K and the mean distance of the replicas to their barycenter, where they exist."""
        group = self.optimizers[0].param_groups[0]
        row: dict[str, Any] = {"lr": group["inner_lr" if self.experiment.algorithm == "lookahead" else "lr"]}
        if self.focusing:
            row["gamma"] = self.focusing[0].gamma
        if len(self.networks) > 1:
            row["period"] = self.experiment.period if self.coupling is None else self.coupling.period
            row["distance"] = float(self.replicas.distances().mean())
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
        base = partial(torch.optim.SGD, momentum=x.momentum, nesterov=x.nesterov, weight_decay=x.weight_decay)
    parameters = list(network.parameters())
    if x.algorithm in ("sgd", "rsgd", "rsgdxy"):
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
    raise NotImplementedError(x.algorithm)
