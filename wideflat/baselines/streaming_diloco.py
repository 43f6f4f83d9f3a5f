"""Streaming DiLoCo: the outer step of one fragment of the weights at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wideflat.baselines.diloco import DiLoCo
from wideflat.kernels.foreach import put_back
from wideflat.kernels.parts import Part
from wideflat.kernels.shards import local

__all__ = ["StreamingDiLoCo"]


class StreamingDiLoCo(DiLoCo):
    r"""Streaming DiLoCo: a part of the weights at a time goes through its outer step (Douillard et al., 2025).

    .. code-block:: text

        every L / P steps, for the fragments 1, ..., P in turn:
            d <- mean over the replicas of (w - mu)               of that fragment alone
            w <- step of the outer optimizer on d;   w', mu <- w

    Each fragment has its outer step at every L-th step, as in `wideflat.DiLoCo`, but never more than a part of the
    weights is sent at once: the peak of the traffic falls by P. The fragments are never at their centers together, so
    that `eval`, `center` and `flush` are always those of mid-cycle.

    Note on the paper:
        It also hides the communication behind further steps and then mixes both weights (tau and alpha there, delay and
        update_alpha in torchft). That is not done here: an outer step waits for its mean.

    Args:
        *optimizers: The inner optimizers of this process.
        fragments: P, for parts of about equal size in the order of the parameters; or the parts, each a module or
            parameters (for one replica in a process).
        **settings: Those of `wideflat.DiLoCo`.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> from wideflat.replicas import Replicas
        >>> replicas = Replicas(lambda: model, num_replicas=1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = StreamingDiLoCo(sgd, replicas=replicas, fragments=list(model), inner_steps=10)
        >>> opt.inner_steps, opt.num_fragments
        (10, 2)
    """

    _kept = (*DiLoCo._kept, "num_fragments", "_fragment_of")

    def __init__(
        self,
        *optimizers: Optimizer,
        fragments: int | Iterable[nn.Module | Iterable[Tensor]],
        inner_steps: int = 500,
        **settings: Any,
    ) -> None:
        if isinstance(fragments, int):
            self.num_fragments, parts = fragments, None
        else:
            tensors = (part.parameters() if isinstance(part, nn.Module) else part for part in fragments)
            parts = [list[Tensor](part) for part in tensors]
            self.num_fragments = len(parts)
        if self.num_fragments < 1 or inner_steps % self.num_fragments:
            raise ValueError(
                f"inner_steps must be a multiple of the number of fragments, got {inner_steps} and {self.num_fragments}"
            )
        super().__init__(*optimizers, inner_steps=inner_steps, **settings)
        self._fragment_of = dict(self._in_order() if parts is None else self._as_given(parts))
        self._record.update(inner_steps=inner_steps // self.num_fragments, fragment=0, fresh=True)

    def _in_order(self) -> Iterator[tuple[Tensor, int]]:
        """Parts of about equal size."""
        for member in self._mine:
            total, before = sum(p.numel() for p in member), 0
            for p in member:
                middle = before + p.numel() / 2
                yield p, min(int(middle / total * self.num_fragments), self.num_fragments - 1)
                before += p.numel()

    def _as_given(self, parts: list[list[Tensor]]) -> Iterator[tuple[Tensor, int]]:
        where = {p: number for number, part in enumerate(parts) for p in part}
        missing = [tuple(p.shape) for member in self._mine for p in member if p not in where]
        if missing or sum(map(len, parts)) != len(where):
            raise ValueError(
                f"every trainable parameter belongs to one fragment; {len(missing)} belong to none (shapes "
                f"{missing[:3]}), {sum(map(len, parts)) - len(where)} to several"
            )
        yield from where.items()

    @property
    def inner_steps(self) -> int:
        """L: the steps between two outer steps of a fragment."""
        return int(self._record["inner_steps"]) * self.num_fragments

    def _takes_part(self, p: Tensor) -> bool:
        return p.requires_grad and self._fragment_of[p] == self._record["fragment"]

    def _is_open(self) -> bool:
        return not self._record["fresh"]

    def _start_idle(self) -> None:
        if self._record["fresh"]:
            super()._start_idle()

    def _inner_step(self, parts: list[Part], starting: bool) -> None:
        fresh, self._record["fresh"] = self._record["fresh"], False
        super()._inner_step(parts, starting=fresh)

    def _outer_step(self) -> None:
        super()._outer_step()
        for p, state in self.state.items():
            if "mean" in state and self._takes_part(p):
                put_back([local(state["mean"])], [local(p)])
        self._record["fragment"] = (self._record["fragment"] + 1) % self.num_fragments

    @torch.no_grad()
    def flush(self) -> None:
        """An outer step of all fragments now; afterwards the model holds w."""
        self._refuse_at_center("flush()")
        if self._is_open():
            for _ in range(self.num_fragments):
                self._outer_step()
            self._record.update(fragment=0, fresh=True)

    def recenter(self) -> None:
        """Start anew at the weights that the model holds now."""
        super().recenter()
        self._record.update(fragment=0, fresh=True)
