"""A schedule of gamma, which grows during training, from wide exploration to a collapse (Sec. 4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sized
from typing import Any

from torch import Tensor

from wideflat.checks import a_kind, choice, instance, number, numbers_of, shown, whole
from wideflat.checks.calls import called
from wideflat.checks.records import reading

__all__ = ["Focusing"]


class Focusing:
    r"""A schedule of gamma, for anything that has one.

    .. code-block:: text

        exponential   gamma(tau) = gamma0 factor^(tau / total)
        cosine        gamma(tau) = gamma_max (1 - cos(pi tau / total)) / 2
        constant      gamma(tau) = gamma0

    tau counts the calls of `step`: call it once a step or once an epoch, with ``total`` in the same unit. gamma is a
    function of tau alone, so a resumed run continues exactly. After ``total`` it stays where it is.

    Note on the paper:
        It prints gamma_0 (1 + gamma_1)^tau with a gamma_1 that fits no one clock, and "chosen such that gamma increases
        by a factor": ``factor`` is that total factor, 10 for Entropy-SGD and 10^4 for Replicated-SGD. Its cosine
        schedule, 0.5 gamma_max cos(pi tau / total), falls and turns negative; the rising one is meant.

    Args:
        target: An optimizer whose param groups have a ``gamma`` (all are written, each from its own gamma0), or any
            object with an attribute ``gamma``, like `wideflat.ReplicaCoupling`, or ``pull``, like `wideflat.Entropic`.
        factor: gamma at the end over gamma at the start (exponential).
        total: tau at the end (exponential and cosine).
        kind: ``"exponential"``, ``"cosine"``, ``"constant"``, or a function of tau that returns gamma.
        gamma0: gamma at the start; None takes what the target has now.
        gamma_max: gamma at the end (cosine); None means ``factor`` times gamma0.
        every: gamma changes at every so many calls of `step` and is held in between: L for a clock in cycles of
            Entropy-SGD, the steps of an epoch for one in epochs.

    Example:
        >>> from types import SimpleNamespace
        >>> target = SimpleNamespace(gamma=0.1)
        >>> focusing = Focusing(target, factor=100.0, total=2)
        >>> for _ in range(3):
        ...     print(round(target.gamma, 6))
        ...     focusing.step()
        0.1
        1.0
        10.0
    """

    def __init__(
        self,
        target: Any,
        factor: float = 10.0,
        total: float | None = None,
        *,
        kind: str | Callable[[float], float] = "exponential",
        gamma0: float | None = None,
        gamma_max: float | None = None,
        every: int = 1,
    ) -> None:
        if not callable(kind) and (not isinstance(kind, str) or kind not in ("exponential", "cosine", "constant")):
            raise ValueError(
                f"kind must be 'exponential', 'cosine', 'constant' or a function of tau, got {shown(kind)}"
            )
        if isinstance(kind, str) and kind != "constant" and total is None:
            raise ValueError("total must be > 0: the calls of step() until the end of training; got None")
        if total is not None and not (total := _as_given("total", total)) > 0:
            raise ValueError(f"total must be > 0: the calls of step() until the end of training; got {total}")
        if gamma_max is not None:
            gamma_max = _as_given("gamma_max", gamma_max, 0)
        self.target = target
        self.every = whole("every", every, 1)
        self.factor = number("factor", factor)
        if not self.factor > 0:
            raise ValueError(f"factor must be > 0 (gamma at the end over gamma at the start), got {factor}")
        self.total = total
        self.kind = kind
        self.gamma_max = gamma_max
        self.tau = 0
        now = self._read()
        self.gamma0: list[float] = now if gamma0 is None else [number("gamma0", gamma0)] * len(now)
        if kind == "exponential" and not all(gamma > 0 for gamma in self.gamma0):
            raise ValueError(
                f"exponential focusing starts from a gamma0 > 0, got {self.gamma0}; set gamma first, "
                "for example coupling.gamma = coupling.initial_gamma(losses), or pass gamma0"
            )
        self._write()

    @classmethod
    def from_epochs(
        cls, target: Any, epochs: float, steps: int | Sized, factor: float = 10.0, *, by: str = "step", **settings: Any
    ) -> Focusing:
        """A schedule for a training of so many epochs; `step` is called after each step of the optimizer.

        Args:
            target: As above.
            epochs: The length of training.
            steps: Steps of the optimizer in an epoch, or the loader whose batches they are.
            factor: gamma at the end over gamma at the start.
            by: ``"step"`` changes gamma with each step, ``"epoch"`` holds it during an epoch.
            **settings: Further arguments of `Focusing`.

        Example:
            >>> from types import SimpleNamespace
            >>> focusing = Focusing.from_epochs(SimpleNamespace(gamma=0.1), epochs=2, steps=5, factor=100.0, by="epoch")
            >>> for _ in range(7):
            ...     focusing.step()
            >>> round(focusing.gamma, 6)
            1.0
        """
        choice("by", by, ("step", "epoch"))
        is_loader = not hasattr(steps, "ndim")  # a tensor is a number of steps, if anything
        steps = called("len", len, steps) if is_loader and isinstance(steps, Sized) else whole("steps", steps)
        if steps < 1:
            raise ValueError(f"an epoch must have at least one step, got {steps}")
        return cls(
            target, factor, number("epochs", epochs, above=0) * steps, every=steps if by == "epoch" else 1, **settings
        )

    @property
    def gamma(self) -> float:
        """The present gamma (of the first param group)."""
        return self._at(self.tau, self.gamma0[0])

    def step(self) -> None:
        """Advance tau by one and write gamma."""
        self.tau += 1
        self._write()

    def __repr__(self) -> str:
        kind = self.kind if isinstance(self.kind, str) else "function"
        gammas = ", ".join(f"{value:.4g}" for value in self._read())
        return (
            f"Focusing({type(self.target).__name__}, kind={kind!r}, factor={self.factor:g}, total={self.total}, "
            f"every={self.every}; at {self.tau}, gamma={gammas})"
        )

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs. A function given as ``kind`` must be given again."""
        return {
            "tau": self.tau,
            "gamma0": list(self.gamma0),
            "factor": self.factor,
            "total": self.total,
            "gamma_max": self.gamma_max,
            "every": self.every,
            "kind": self.kind if isinstance(self.kind, str) else "function",
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave, and write gamma."""
        with reading("state of a focusing"):
            self._load(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        kind = self.kind if isinstance(self.kind, str) else "function"
        if instance("kind", state_dict["kind"], str) != kind:
            raise ValueError(f"the saved focusing is of kind {shown(state_dict['kind'])}, this one of kind {kind!r}")
        if len(state_dict["gamma0"]) != len(self.gamma0):
            raise ValueError(
                f"the saved focusing is for {len(state_dict['gamma0'])} param groups, the target has {len(self.gamma0)}"
            )
        self.tau, self.gamma0 = whole("tau", state_dict["tau"]), numbers_of("gamma0", state_dict["gamma0"])
        total, most = state_dict["total"], state_dict["gamma_max"]
        self.factor = number("factor", state_dict["factor"], above=0)
        self.total = None if total is None else _as_given("total", total, 0)
        self.gamma_max = None if most is None else _as_given("gamma_max", most, 0)
        self.every = whole("every", state_dict.get("every", 1), 1)
        self._write()

    def _at(self, tau: int, gamma0: float) -> float:
        tau -= tau % self.every
        if not isinstance(self.kind, str):
            return number("what kind returns", self.kind(tau))
        if self.kind == "constant":
            return gamma0
        assert self.total is not None
        part = min(tau / self.total, 1.0)
        if self.kind == "exponential":
            return gamma0 * self.factor**part
        gamma_max = self.factor * gamma0 if self.gamma_max is None else self.gamma_max
        return 0.5 * gamma_max * (1 - math.cos(math.pi * part))

    def _read(self) -> list[float]:
        if self._attribute is not None:
            return [number(f"the {self._attribute} of target", getattr(self.target, self._attribute))]
        if not hasattr(self.target, "param_groups"):
            raise ValueError(f"{a_kind(self.target)} has no gamma to focus")
        if not all("gamma" in group for group in self.target.param_groups):
            raise ValueError(
                f"the param groups of {type(self.target).__name__} have no gamma to focus; "
                "pass an EntropySGD, an Entropic, or the ReplicaCoupling instead of its optimizer"
            )
        return [float(group["gamma"]) for group in self.target.param_groups]

    def _write(self) -> None:
        if self._attribute is not None:
            try:
                setattr(self.target, self._attribute, self._at(self.tau, self.gamma0[0]))
            except AttributeError as error:
                raise ValueError(f"the gamma of {a_kind(self.target)} cannot be set: {error}") from error
            return
        for group, gamma0 in zip(self.target.param_groups, self.gamma0, strict=True):
            gamma = self._at(self.tau, gamma0)
            if isinstance(group["gamma"], Tensor):  # a compiled step goes on reading it
                group["gamma"].fill_(gamma)
            else:
                group["gamma"] = gamma

    @property
    def _attribute(self) -> str | None:
        """The name of the target's strength; None if it is in the param groups."""
        return next((name for name in ("pull", "gamma") if hasattr(self.target, name)), None)


def _as_given(name: str, value: float, least: float = -math.inf) -> float:
    """A number, of the type that was given where that is a plain one: a whole number of steps is saved as one."""
    plain = number(name, value, least)
    return value if type(value) in (int, float) else plain
