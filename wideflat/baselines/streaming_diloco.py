"""Streaming DiLoCo: the outer step of one fragment of the weights at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wideflat.baselines.diloco import DiLoCo
from wideflat.checks import instance, number, shown, whole
from wideflat.cycles import Cycles
from wideflat.kernels.foreach import put_back
from wideflat.kernels.parts import Part
from wideflat.kernels.shards import like, local

__all__ = ["StreamingDiLoCo"]


class StreamingDiLoCo(DiLoCo):
    r"""Streaming DiLoCo: a part of the weights at a time goes through its outer step (Douillard et al., 2025).

    .. code-block:: text

        every L / P steps, for the fragments 1, ..., P in turn:
            d <- mean over the replicas of (w - mu)               of that fragment alone, as it was delay steps before
            w <- step of the outer optimizer on d
            w' <- w + mix (w' - w);   mu <- w'

    Each fragment has its outer step at every L-th step, as in `wideflat.DiLoCo`, but never more than a part of the
    weights is sent at once: the peak of the traffic falls by P. The fragments are never at their centers together, so
    that `eval`, `center` and `flush` are always those of mid-cycle.

    With ``delay`` the exchange runs beside the computation of so many further steps, on a mesh and with a manager. What
    w' did in them is lost with ``mix = 0``, and kept in part with more (tau and alpha of the paper; in torchft
    fragment_sync_delay and fragment_update_alpha).

    Args:
        *optimizers: The inner optimizers of this process.
        fragments: P, for parts of about equal size in the order of the parameters; or the parts, each a module or
            parameters (for one replica in a process).
        delay: Steps between the moment at which a fragment is sent and its outer step, which waits for what has not
            arrived by then; below L / P.
        mix: The share of its own w' that a replica keeps at an outer step.
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

    _kept = (*DiLoCo._kept, "num_fragments", "delay", "mix", "_fragment_of")

    def __init__(
        self,
        *optimizers: Optimizer,
        fragments: int | Iterable[nn.Module | Iterable[Tensor]],
        inner_steps: int = 500,
        delay: int = 0,
        mix: float = 0.0,
        **settings: Any,
    ) -> None:
        if isinstance(fragments, int):
            self.num_fragments, parts = fragments, None
        else:
            if not isinstance(fragments, (list, tuple, nn.ModuleList, nn.Sequential, Iterator)):
                raise TypeError(
                    f"fragments must be a number, or modules or lists of parameters, got {shown(fragments)}"
                )
            tensors = (part.parameters() if isinstance(part, nn.Module) else part for part in fragments)
            parts = [[instance("what a fragment has", p, Tensor) for p in part] for part in map(_several, tensors)]
            self.num_fragments = len(parts)
        inner_steps = whole("inner_steps", inner_steps, 1)
        if self.num_fragments < 1 or inner_steps % self.num_fragments:
            raise ValueError(
                f"inner_steps must be a multiple of the number of fragments, got {inner_steps} and {self.num_fragments}"
            )
        self.delay = whole("delay", delay, 0, inner_steps // self.num_fragments - 1)
        self.mix = number("mix", mix, 0, 1)
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

    # ------------------------------------------------------------------------------------------------- on its way

    def _count(self, position: int) -> None:
        super()._count(position)
        if self.delay and position == self._record["inner_steps"] - self.delay:
            self._send(self._differences())
            self._on_its_way = True

    def _differences(self) -> list[list[Tensor]]:
        """Compute w - mu of the fragment that is next, if it was not before, and keep it until its outer step."""
        for part in self._parts(self._takes_part):
            if any("sent" not in state for state in part.states):
                self._fit(part.params)
                for center, state, d in zip(
                    part.centers, part.states, Cycles._pseudo_gradients(self, part), strict=True
                ):
                    state["sent"] = like(d, center)
        return [[self.state[p]["sent"] for p in member if self._takes_part(p)] for member in self._mine]

    def _follow(self, parts: list[Part]) -> None:
        self._differences()
        self._on_its_way = False
        parts = [part for part in parts if part.w_prime]
        for part in parts:
            for center, state in zip(part.centers, part.states, strict=True):
                center.grad = state.pop("sent")
        self._succeeded = self._exchange()
        for part in parts:
            kept = [torch.lerp(w, p.to(w), self.mix) for w, p in zip(part.w, part.w_prime, strict=True)]
            put_back(part.w_prime, kept if self._succeeded and self.mix else part.w)
            for center in part.centers:
                center.grad = None

    def _outer_step(self) -> None:
        """One fragment; one whose exchange did not succeed is next again."""
        super()._outer_step()
        for p, state in self.state.items():
            if "mean" in state and self._takes_part(p):
                put_back([local(state["mean"])], [local(p)])
        self._record["fragment"] = (self._record["fragment"] + self._succeeded) % self.num_fragments

    def _adopt(self, saved: dict[Tensor, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """What was on its way when it was saved is sent again, by all replicas."""
        self._forget_sent()
        sent = {p: self._like(p).copy_(state["sent"]) for p, state in saved.items() if "sent" in state}
        super()._adopt(saved, groups)
        for p, d in sent.items():
            self.state[p]["sent"] = d

    @torch.no_grad()
    def flush(self) -> None:
        """An outer step of all fragments now; afterwards the model holds w."""
        self._refuse_at_center("flush()")
        if self._is_open():
            mix, self.mix = self.mix, 0.0
            first = self._record["fragment"]
            for number in range(first, first + self.num_fragments):
                self._record["fragment"] = number % self.num_fragments
                self._outer_step()
            self.mix = mix
            self._record.update(fragment=0, fresh=True)

    def _forget_sent(self) -> None:
        """Wait for what is on its way, and do nothing with it."""
        if self._on_its_way:
            self._average(self._differences())
        for state in self.state.values():
            state.pop("sent", None)
        self._on_its_way = False

    def _make_working_memory(self) -> None:
        super()._make_working_memory()
        self._on_its_way, self._succeeded = False, True

    def recenter(self) -> None:
        """Start anew at the weights that the model holds now."""
        self._forget_sent()
        super().recenter()
        self._record.update(fragment=0, fresh=True)


def _several(part: Any) -> Iterable[Any]:
    if not isinstance(part, Iterable):
        raise TypeError(f"a fragment must be a module or a list of parameters, got {shown(part)}")
    return part
