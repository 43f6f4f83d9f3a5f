"""DiLoCo: workers that train alone for many steps, and one outer step on the mean of what they did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wideflat.distributed.group import ReplicaGroup
from wideflat.entropic import Entropic
from wideflat.kernels.parts import Part
from wideflat.kernels.shards import local, norm
from wideflat.replicas import Replicas, replica_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DiLoCo", "Manager"]


class Manager(Protocol):
    """What is used of a ``torchft.Manager``, which is made with ``use_async_quorum=False``."""

    def start_quorum(self) -> None:
        """Find out who takes part."""

    def allreduce(self, tensor: Tensor) -> Any:
        """Start to average a tensor over those who take part."""

    def should_commit(self) -> bool:
        """Did all of it succeed for all of them?"""

    def register_state_dict_fn(self, key: str, load_state_dict: Any, state_dict: Any) -> None:
        """Say what is given to one who joins."""


class DiLoCo(Entropic):
    r"""DiLoCo: every replica takes L steps alone, then w moves by the mean of their ways (Douillard et al., 2023).

    .. code-block:: text

        for t = 1, 2, ...
            each replica a:   w'_a, mu_a <- w;   L steps of its inner optimizer on its own mini-batches
            d <- mean over a of (w - mu_a)                        the only communication, within the L-th call of step()
            w <- step of the outer optimizer on d                 SGD with Nesterov momentum, the same for all

    It is `wideflat.Entropic` with a mean in its outer step, and has all else of it: with ``pull`` > 0, focused by
    `wideflat.Focusing`, noise or a running mean it is *entropic DiLoCo*. With one replica and no pull it is
    `wideflat.SNOO`. `wideflat.StreamingDiLoCo` sends a part of the weights at a time.

    Where the replicas are: all in this process (`wideflat.Replicas`, with ``independent=False``), one on each rank of a
    mesh, or wherever a ``torchft.Manager`` finds them. With a manager an outer step that did not succeed for all is
    left out: w' goes back to w. Buffers, such as batch-norm statistics, are each replica's own.

    Notes:
        - The replicas start from one w: an error says if they do not.
        - All ranks take the same number of steps. A `torch.amp.GradScaler` that skips a step on one rank makes the
          others wait for it; with bfloat16 nothing is skipped.

    Args:
        *optimizers: The inner optimizers of this process, made as usual; their state is kept.
        replicas: The replicas, or this rank's network.
        mesh: Where the other replicas are, as for `wideflat.ReplicaCoupling`.
        manager: A ``torchft.Manager`` in place of the mesh.
        inner_steps: L, which the paper calls H.
        outer_lr: Learning rate of the outer step.
        outer_momentum: Its Nesterov momentum.
        **settings: Further arguments of `wideflat.Entropic`, such as ``pull``; DiLoCo itself has none.

    Example:
        Two replicas from w = 1 with the gradients 1 and 3 and a rate of 0.1 go to 0.9 and 0.7; w follows their mean:

        >>> replicas = Replicas(lambda: nn.Linear(1, 1, bias=False), num_replicas=2, independent=False)
        >>> for model in replicas:
        ...     _ = nn.init.constant_(model.weight, 1.0)
        >>> sgd = torch.optim.SGD(replicas.parameters(), lr=0.1)
        >>> opt = DiLoCo(sgd, replicas=replicas, inner_steps=1, outer_lr=1.0, outer_momentum=0.0)
        >>> for model, gradient in zip(replicas, (1.0, 3.0)):
        ...     model.weight.grad = torch.full((1, 1), gradient)
        >>> opt.step()
        >>> [round(model.weight.item(), 6) for model in replicas]
        [0.8, 0.8]
    """

    _kept = (*Entropic._kept, "group", "manager", "_mine")
    _obstacle = "because its replicas exchange what they did at the end of a cycle"
    #: Means that are on their way, and what to wait for.
    _sent_by_manager: tuple[list[Tensor], list[Any]] | None

    def __init__(
        self,
        *optimizers: Optimizer,
        replicas: Replicas | nn.Module | ReplicaGroup,
        mesh: DeviceMesh | None = None,
        manager: Manager | None = None,
        inner_steps: int = 500,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        **settings: Any,
    ) -> None:
        outer: dict[str, Any] = {"outer_lr": outer_lr, "outer_momentum": outer_momentum}
        super().__init__(*optimizers, inner_steps=inner_steps, **outer, **settings)
        self.manager = manager
        self.group: ReplicaGroup | None = None
        if manager is None:
            self.group = replica_group(replicas, mesh)
            members = self.group.members
        elif mesh is not None or not isinstance(replicas, nn.Module) or isinstance(replicas, Replicas):
            raise TypeError("with manager= there is one replica in this process: pass its network, and no mesh")
        else:
            members = [list(replicas.parameters())]
            manager.register_state_dict_fn("wideflat_diloco", self.load_state_dict, self.state_dict)
        #: The trainable parameters of each replica in this process.
        self._mine = [[p for p in member if p.requires_grad] for member in members]
        self._check_parameters()
        self._check_start()

    def _check_parameters(self) -> None:
        trained = {p for group in self.param_groups for p in group["params"] if p.requires_grad}
        there = {p for member in self._mine for p in member}
        if trained != there:
            raise ValueError(
                f"the optimizers train {len(trained)} parameters and the replicas have {len(there)} trainable ones, "
                f"of which {len(trained & there)} are the same; all of them take part in DiLoCo's mean"
            )

    @torch.no_grad()
    def _check_start(self) -> None:
        if self.group is None:
            return
        distance, square, rounding = self.group.distances().sum().item(), 0.0, 0.0
        for member in self._mine:
            square += norm(member).item() ** 2
            rounding = max(rounding, *(torch.finfo(p.dtype).eps for p in member))
        if distance > square * (4 * rounding) ** 2:
            raise ValueError(
                "DiLoCo's replicas start from one w, and these differ: make them with "
                "Replicas(..., independent=False), or load one state dict on every rank"
            )

    # ------------------------------------------------------------------------------------------------- the outer step

    def _takes_part(self, p: Tensor) -> bool:
        """Is the parameter in the next outer step?"""
        return p.requires_grad

    def _parts_that_moved(self) -> list[Part]:
        """All that take part: what did not move here may have moved elsewhere."""
        return self._parts(self._takes_part)

    def _follow(self, parts: list[Part]) -> None:
        """By torch's operations: the mean over the replicas is taken between w - mu and the outer step."""
        super(Entropic, self)._follow(parts)

    def _step_outer(self) -> None:
        self._exchange()

    def _exchange(self) -> bool:
        """Average what the replicas did, and step; or go back to w, if the manager says so. Whether it succeeded."""
        gradients = [[self._centers[p].grad for p in member if self._takes_part(p)] for member in self._mine]
        found: list[list[Tensor]] = [[g for g in member if g is not None] for member in gradients]
        succeeded = self._average(found)
        if succeeded:
            super()._step_outer()
        return succeeded

    def _average(self, gradients: list[list[Tensor]]) -> bool:
        """Replace them by their mean over the replicas; whether that succeeded."""
        if self.manager is not None:
            means, works = self._sent_by_manager or self._send_by_manager(self.manager, gradients[0])
            self._sent_by_manager = None
            for work in works:
                work.wait()
            for gradient, found in zip(gradients[0], means, strict=True):
                local(gradient).copy_(found)
            return self.manager.should_commit()
        assert self.group is not None
        for mine, _, mean in self.group.blocks(gradients):
            for pieces in mine:
                torch._foreach_copy_(pieces, mean)
        return True

    def _send(self, gradients: list[list[Tensor]]) -> None:
        """Start on what `_average` will be asked for; they stay as they are until then."""
        if self.manager is not None:
            self._sent_by_manager = self._send_by_manager(self.manager, gradients[0])
        elif self.group is not None:
            self.group.send(*gradients)

    @staticmethod
    def _send_by_manager(manager: Manager, gradients: list[Tensor]) -> tuple[list[Tensor], list[Any]]:
        manager.start_quorum()
        copies = [local(gradient).clone() for gradient in gradients]
        return copies, [manager.allreduce(copy) for copy in copies]

    def _make_working_memory(self) -> None:
        super()._make_working_memory()
        self._sent_by_manager = None
