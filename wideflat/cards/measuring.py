"""Measures a card: one measure after the other, then, while there is time, those again whose error bars are largest."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from wideflat import interruption
from wideflat.cards.card import Card, Entry
from wideflat.cards.measures import MEASURES, Measure, seed_of_round
from wideflat.cards.subject import QUICK, Effort, Subject
from wideflat.checks import flag, network, number, shown, whole
from wideflat.checks.options import text
from wideflat.energy.profile import architecture
from wideflat.environment import environment, now
from wideflat.evaluation.evaluation import Forward, Metric
from wideflat.evaluation.selection import Selection, select_parameters
from wideflat.progress import Progress

__all__ = ["Interrupted", "card"]

#: A relative error bar that is small enough.
ENOUGH = 0.01
#: Passes of a local energy in one round where time is limited: all measures come once before any is made more exact.
PASSES = 4


class Interrupted(interruption.Interrupted):
    """Ctrl-C while a card was measured: ``card`` has what was measured until then."""

    def __init__(self, card: Card) -> None:
        super().__init__("interrupted; the error's .card holds what was measured so far")
        self.card = card


def card(
    model: nn.Module,
    data: Any,
    *,
    title: str = "",
    quick: bool = False,
    minutes: float | None = None,
    against: Card | None = None,
    metric: Metric = "error",
    loss: Metric = "loss",
    batch_norm: str = "eval",
    parameters: Selection = "all",
    examples: int | None = None,
    seed: int = 0,
    progress: bool = True,
    forward: Forward | None = None,
) -> Card:
    """Everything one asks of a minimum, measured in one call, with error bars.

    Error and loss; the local energy for relative and for filter noise; the local energy of each layer; what rounding to
    few bits and pruning do, beside noise of the same length; the worst case beside the average; the spectrum of the
    Hessian; a slice of the loss; the free entropy's bracket with its learning coefficient. A measure that this network
    does not allow is left out with its reason.

    Args:
        model: Any network; it is left as it was found.
        data: The training data, as :func:`wideflat.local_energy` takes them, without random augmentation. As many of
            them are used as the cost of the network allows (a random choice, or the first of a loader).
        title: What to call it.
        quick: Fewer examples, points and steps: about a quarter of the time.
        minutes: Time to spend. What is left after all measures goes to those whose error bars are largest; measures
            that it does not suffice for are left out. Without it everything is measured once.
        against: Another card, to compare with.
        metric: What local energies, layers and shifts are of: ``"error"``, ``"loss"`` or a function of outputs and
            targets.
        loss: What is differentiated: ``"loss"`` or a differentiable function of outputs and targets.
        batch_norm: ``"eval"``, the running statistics.
        parameters: Which parameters are perturbed; see :func:`wideflat.evaluation.selection.select_parameters`.
        examples: How many examples the dear measures see (worst case, spectrum, slice, free entropy); the others see up
            to four times as many. Chosen by the cost of the network when left out.
        seed: Of everything random.
        progress: Show which measure is running and what is left.
        forward: See :func:`wideflat.local_energy`.

    Returns:
        ``print`` it, ``save("card.html")`` it, ``compare`` it.

    Raises:
        Interrupted: At Ctrl-C; its ``card`` has what was measured.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> inputs = torch.randn(64, 3)
        >>> found = card(model, (inputs, model(inputs).argmax(1)), quick=True, examples=16, progress=False)
        >>> found["at_w"].metric, found.refused
        (0.0, {})
    """
    network(model)
    title, quick = text("title", title) or type(model).__name__, flag("quick", quick)
    if minutes is not None:
        minutes = number("minutes", minutes, 0, 1e6, above=0)
    if examples is not None:
        examples = whole("examples", examples, 2)
    if against is not None and not isinstance(against, Card):
        raise TypeError(f"against must be a Card, such as Card.load(path) gives; got {type(against).__name__}")
    if not isinstance(batch_norm, str) or batch_norm != "eval":
        raise ValueError(f'a card is measured with batch_norm="eval", got {shown(batch_norm)}')
    effort = replace(QUICK if quick else Effort(), passes=None if minutes is None else PASSES)
    _, words = select_parameters(model, parameters)
    subject = Subject.of(model, data, effort, metric, loss, examples, forward, batch_norm, parameters, seed)
    about = {"architecture": architecture(model), "batch_norm": batch_norm, "parameters": words, **subject.conventions}
    about |= {"date": now(), "environment": environment()}
    found = Card(title, {measure.name: Entry() for measure in MEASURES}, about)
    _Measurement(subject, found, minutes, progress).run()
    if against is not None:
        compare_with(found, against)
    return found


def compare_with(found: Card, other: Card) -> bool:
    """Write the sentence of a comparison into a card; says whether they are comparable."""
    try:
        found.comparison = found.compare(other).sentence
    except ValueError as error:
        reason = str(error).replace("force=True", "card.compare(other, force=True)")
        found.comparison = f"Not compared with {other.title}: {reason}"
        return False
    return True


def shortly(left: Sequence[Measure]) -> str:
    """The measures that are left, so that a line of progress has room for it: the next ones, and how many more.

    Example:
        >>> shortly(MEASURES[1:]), shortly(MEASURES[-2:]), shortly([])
        ('relative and 7 more', 'slice, entropy', 'done')
    """
    if len(left) > 2:
        return f"{left[0].name} and {len(left) - 1} more"
    return ", ".join(measure.name for measure in left) or "done"


class _Measurement:
    """One call of :func:`card`."""

    def __init__(self, subject: Subject, card: Card, minutes: float | None, progress: bool) -> None:
        self.subject, self.card = subject, card
        self.end = None if minutes is None else time.monotonic() + 60 * minutes
        self.bar = Progress("card", 100, enabled=progress)
        self._unit = 100 / sum(measure.cost for measure in MEASURES)

    def run(self) -> None:
        """All measures once, then again where it is worth most."""
        running = MEASURES[0]
        try:
            with self.bar:
                done = 0.0
                for k, running in enumerate(MEASURES):
                    self.bar.update(round(done * self._unit), now=running.name, then=shortly(MEASURES[k + 1 :]))
                    self._first(running)
                    done += running.cost
                while (again := self._next()) is not None:
                    running = again
                    words = f"{running.name}, round {self.card.entries[running.name].rounds + 1}"
                    self.bar.update(100, now=words, then=f"{(self._left or 0) / 60:.1f} min more")
                    self._again(running)
        except KeyboardInterrupt:
            for measure in MEASURES:
                entry = self.card.entries[measure.name]
                if entry.result is None and not entry.reason:
                    entry.reason = "interrupted" if measure is running else "interrupted before it"
            raise Interrupted(self.card) from None

    @property
    def _left(self) -> float | None:
        """Seconds that are left."""
        return None if self.end is None else self.end - time.monotonic()

    def _first(self, measure: Measure) -> None:
        entry = self.card.entries[measure.name]
        if self._left is not None and self._left <= 0:
            entry.reason = "the minutes were over"
            return
        self._timed(entry, lambda: self._run(measure, 0))

    def _again(self, measure: Measure) -> None:
        entry = self.card.entries[measure.name]
        before, join = entry.result, measure.join
        assert join is not None
        self._timed(entry, lambda: join(before, self._run(measure, entry.rounds)))
        if entry.result is None:  # what was measured before is not lost
            entry.result = before

    def _run(self, measure: Measure, round_number: int) -> Any:
        left = None if self._left is None else max(self._left, 1.0) / 60
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what they say stands in the results
            subject = replace(self.subject)
            return measure.run(subject, seed_of_round(self.subject.seed, round_number), left)

    def _timed(self, entry: Entry, work: Callable[[], Any]) -> None:
        """Do the work; what is refused is noted with its reason."""
        begun = time.monotonic()
        try:
            entry.result = work()
            entry.rounds += 1
        except (ValueError, TypeError, RuntimeError, IndexError, AttributeError, MemoryError) as error:
            entry.result, entry.reason = None, str(error) or type(error).__name__
        entry.seconds += time.monotonic() - begun

    def _next(self) -> Measure | None:
        """The measure with the largest error bar of those that another round fits in for; of equal ones, that which has
        had the fewest rounds.
        """
        left = self._left
        if left is None:
            return None
        worth: list[tuple[float, int, Measure]] = []
        for measure in MEASURES:
            entry = self.card.entries[measure.name]
            if measure.join is None or entry.result is None or entry.reason:
                continue
            if entry.seconds / entry.rounds <= left:
                worth.append((measure.uncertainty(entry.result), -entry.rounds, measure))
        best = max(worth, key=lambda each: each[:2], default=None)
        return best[2] if best is not None and best[0] > ENOUGH else None
