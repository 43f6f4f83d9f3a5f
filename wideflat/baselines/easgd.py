"""EASGD: Replicated-SGD with a center that has an inertia of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wideflat.checks import number, shown
from wideflat.checks.records import of_shape
from wideflat.distributed.group import detached
from wideflat.replicas import ReplicaCoupling, ReplicaGroup, Replicas

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["EASGD"]


class EASGD(ReplicaCoupling):
    r"""Elastic averaging SGD: the replicas are tied to a center with an inertia of its own (Zhang et al., 2015).

    .. code-block:: text

        at every K-th iteration
            dw_a   <- dw_a + K gamma (w_a - center)
            center <- center + rate (w_bar - center)

    In the symmetric form of the paper, ``rate`` is y lr K gamma. With ``rate=1`` the center is the barycenter of the
    last interaction, so that Replicated-SGD is EASGD without delay.

    Args:
        replicas: The replicas, or this rank's network.
        mesh: Where the other replicas are, as for `wideflat.ReplicaCoupling`.
        rate: How far the center follows the barycenter at an interaction; the authors' default is 0.9.
        period: K.
        gamma: The strength of the tie.

    Example:
        >>> from torch import nn
        >>> replicas = Replicas(lambda: nn.Linear(1, 1, bias=False), num_replicas=2)
        >>> for model, w in zip(replicas, (0.0, 2.0)):
        ...     _ = nn.init.constant_(model.weight, w)
        >>> coupling = EASGD(replicas, rate=0.5, period=1, gamma=0.5)
        >>> _ = nn.init.constant_(replicas[1].weight, 4.0)  # a step of training
        >>> coupling.couple()
        True
        >>> [model.weight.grad.item() for model in replicas]  # the center was at 1
        [-0.5, 1.5]
        >>> coupling.center[0].item()  # half of the way from 1 to the barycenter, 2
        1.5
    """

    def __init__(
        self,
        replicas: Replicas | nn.Module | ReplicaGroup,
        *,
        mesh: DeviceMesh | None = None,
        rate: float = 0.9,
        period: int = 10,
        gamma: float = 0.0,
    ) -> None:
        super().__init__(replicas, mesh=mesh, period=period, gamma=gamma)
        self.rate = number("rate", rate)
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must be above 0 and at most 1, got {rate}")
        #: The center, parameter by parameter; at the barycenter to begin with.
        self.center: list[Tensor] = [p.detach().clone() for p in self._trainable()[0]]
        with torch.no_grad():
            for _, (center,), w_bar in self.group.blocks(detached(self._trainable()), self.center):
                torch._foreach_copy_(center, w_bar)

    def _attract(self) -> None:
        members = self._trainable()
        strength = self.period * float(self.gamma)
        gradients = self._gradients(members)
        for w, (center, *dw), w_bar in self.group.blocks(detached(members), self.center, *gradients):
            for w_a, dw_a in zip(w, dw, strict=True):
                torch._foreach_add_(dw_a, torch._foreach_sub(w_a, center), alpha=strength)
            torch._foreach_lerp_(center, w_bar, self.rate)

    @torch.no_grad()
    def _show_solution(self) -> None:
        """The center; what is not trained stays."""
        for w in detached(self._trainable()):
            torch._foreach_copy_(w, self.center)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, the center included."""
        return {**super().state_dict(), "rate": self.rate, "center": self.center}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        super().load_state_dict(state_dict)
        self.rate = state_dict["rate"]
        center = state_dict["center"]
        if not isinstance(center, (list, tuple)) or len(center) != len(self.center):
            raise ValueError(
                f"center must have {len(self.center)} tensors, as state_dict() gave them, got {shown(center)}"
            )
        for mine, saved in zip(self.center, center, strict=True):
            mine.copy_(of_shape("center", saved, mine))
