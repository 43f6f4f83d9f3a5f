"""Learning rates over a training: warm-up, drops, cosine, exponential decay, each a closed form of the epoch."""

from __future__ import annotations

import dataclasses
import math

from wideflat.checks import flag, instance, number

__all__ = ["Schedule"]


@dataclasses.dataclass(frozen=True)
class Schedule:
    r"""What the initial learning rate is multiplied with at a given moment of the training.

    .. math:: s(\tau) = [\text{warm-up}] \cdot f^{\#\{i : t_i \le \tau\}} \cdot r^{\lfloor \tau / p \rfloor}
              \cdot [\tfrac12 (1 + \cos \pi \tau / T)]

    with :math:`\tau` in epochs, fractions allowed. Parts that are not used are 1. All times scale with ``epochs``
    (:meth:`rescaled`), as Appendix C does for the entropic algorithms, "giving a comparable final learning rate".

    Args:
        epochs: T, the length of the training that the times are written for.
        drops: The epochs t_i at which the rate is multiplied with ``drop_factor``.
        drop_factor: f.
        warmup_epochs: How long the rate is ``warmup_factor`` of the initial one before it jumps up.
        warmup_factor: See there.
        cosine: One cosine annealing to zero over the whole training.
        decay: r, the factor of an exponential decay in stairs.
        decay_every: p, the epochs between two stairs.

    Example:
        >>> schedule = Schedule(epochs=300, drops=(150, 225))
        >>> [round(schedule(tau), 4) for tau in (0, 149.9, 150, 299)]
        [1.0, 1.0, 0.1, 0.01]
        >>> schedule.rescaled(60).drops
        (30.0, 45.0)
        >>> round(Schedule(epochs=350, decay=0.97, decay_every=2)(349.9), 6) == round(0.97**174, 6)
        True
    """

    epochs: float
    drops: tuple[float, ...] = ()
    drop_factor: float = 0.1
    warmup_epochs: float = 0.0
    warmup_factor: float = 1.0
    cosine: bool = False
    decay: float = 1.0
    decay_every: float = 1.0

    def __post_init__(self) -> None:
        number("epochs", self.epochs, above=0)
        number("decay_every", self.decay_every, above=0)
        for name in ("drop_factor", "warmup_epochs", "warmup_factor", "decay"):
            number(name, getattr(self, name), 0)
        flag("cosine", self.cosine)
        for drop in instance("drops", self.drops, (list, tuple), "a sequence of epochs"):
            number("an epoch of drops", drop)
        if any(later < earlier for earlier, later in zip(self.drops, self.drops[1:], strict=False)):
            raise ValueError(f"drops must be in increasing order, got {self.drops}")

    def __call__(self, tau: float) -> float:
        """The factor at epoch ``tau``."""
        tau = number("tau", tau)
        try:
            factor = self.drop_factor ** sum(drop <= tau for drop in self.drops)
            if tau < self.warmup_epochs:
                factor *= self.warmup_factor
            if self.cosine:
                factor *= 0.5 * (1 + math.cos(math.pi * min(tau / self.epochs, 1.0)))
            if self.decay != 1:
                factor *= self.decay ** math.floor(tau / self.decay_every)
        except ArithmeticError as error:
            raise ValueError(f"there is no finite learning rate at epoch {tau:g} ({self}): {error}") from error
        return factor

    def rescaled(self, epochs: float) -> Schedule:
        """The same schedule over another number of epochs: all its times are scaled."""
        if number("epochs", epochs, above=0) == self.epochs:
            return self
        scale = epochs / self.epochs
        return dataclasses.replace(
            self,
            epochs=epochs,
            drops=tuple(drop * scale for drop in self.drops),
            warmup_epochs=self.warmup_epochs * scale,
            decay_every=self.decay_every * scale,
        )

    def __str__(self) -> str:
        parts = []
        if self.warmup_epochs:
            parts.append(f"x {self.warmup_factor:g} for {self.warmup_epochs:g} epochs")
        if self.drops:
            parts.append(f"x {self.drop_factor:g} at epochs {', '.join(f'{drop:g}' for drop in self.drops)}")
        if self.cosine:
            parts.append("cosine to 0")
        if self.decay != 1:
            parts.append(f"x {self.decay:g} every {self.decay_every:g} epochs")
        return ", then ".join(parts) or "constant"
