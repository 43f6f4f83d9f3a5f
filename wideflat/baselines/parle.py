"""Parle: Entropy-SGD within replicas that attract each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from wideflat.entropy_sgd import EntropySGD
from wideflat.replicas import ReplicaCoupling, ReplicaGroup, Replicas

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Parle"]


class Parle(ReplicaCoupling):
    r"""Parle: Entropy-SGD inside each replica, and replicas that attract each other at its outer steps
    (Chaudhari et al., 2017).

    `wideflat.EntropySGD` trains all replicas, their cycles in phase. Whenever a cycle has ended, and each
    replica stands at its own w_a, they are pulled together by w_a <- w_a - s/(1+s) (w_a - w_bar) with s = lr gamma and
    the outer ``lr``. Both strengths are focused by a `wideflat.Focusing` each: of the optimizer, and of this.

    Args:
        replicas: The replicas, or this rank's network.
        optimizer: An `wideflat.EntropySGD` over the parameters of all replicas in this process, or one for each of
            them.
        mesh: Where the other replicas are, as for `wideflat.ReplicaCoupling`.
        gamma: The strength of the attraction between replicas; that within each is the optimizer's.

    Example:
        >>> from torch import nn
        >>> replicas = Replicas(lambda: nn.Linear(2, 1), num_replicas=3)
        >>> opt = EntropySGD(replicas.parameters(), inner_steps=2)
        >>> coupling = Parle(replicas, opt, gamma=1.0)
        >>> for _ in range(4):
        ...     replicas(torch.ones(3, 8, 2)).sum().backward()
        ...     opt.step()
        ...     print(coupling.couple())  # after the step, not before it
        False
        True
        False
        True
    """

    optimizers: list[EntropySGD]  # type: ignore[assignment]

    def __init__(
        self,
        replicas: Replicas | nn.Module | ReplicaGroup,
        optimizer: EntropySGD | Sequence[EntropySGD],
        *,
        mesh: DeviceMesh | None = None,
        gamma: float = 0.0,
    ) -> None:
        super().__init__(replicas, mesh=mesh, period=1, gamma=gamma, mode="proximal", optimizer=optimizer)
        for each in self.optimizers:
            if not isinstance(each, EntropySGD):
                raise TypeError(f"Parle couples replicas that EntropySGD trains, got {type(each).__name__}")

    @torch.no_grad()
    def couple(self) -> bool:
        """Call it after every step of the optimizer; it acts when a cycle has ended.

        In the middle of one it does nothing, also when w is shown for an evaluation (``opt.eval()``).
        """
        if self.optimizers[0].param_groups[0]["position"] > 0:
            return False
        return super().couple()
