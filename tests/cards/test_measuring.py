"""How a card is measured: what is refused, interrupted, repeated."""

import dataclasses
import math
import time

import pytest

from wideflat import Card, card, progress
from wideflat.cards import measures, measuring
from wideflat.cards.measures import MEASURES, Measure
from wideflat.cards.measuring import Interrupted
from wideflat.energy.profile import LocalEnergy


def replaced(monkeypatch, **runs):
    """Other functions in the place of some measures; those that are not named are dropped."""
    chosen = tuple(
        dataclasses.replace(measure, run=runs[measure.name]) for measure in measures.MEASURES if measure.name in runs
    )
    monkeypatch.setattr(measuring, "MEASURES", chosen)


def fake(stderr, seconds=0.0):
    """A profile of this error bar, from every seed."""

    def run(subject, seed, minutes):
        time.sleep(seconds)
        return LocalEnergy([0.1], [1.0], [stderr], 0.0, evaluations=[10], conventions={"seed": seed})

    return run


def test_a_refused_measure_is_not_fatal(subject, monkeypatch):
    def refuses(subject, seed, minutes):
        raise ValueError("no gradient: use another")

    replaced(monkeypatch, relative=fake(0.1), spectrum=refuses)
    found = card(*subject, quick=True, progress=False)
    assert found.measured == ["relative"] and found.refused == {"spectrum": "no gradient: use another"}


def test_ctrl_c_keeps_what_is_measured(subject, monkeypatch):
    def pressed(subject, seed, minutes):
        raise KeyboardInterrupt

    replaced(monkeypatch, relative=fake(0.1), filter=pressed, slice=fake(0.1))
    with pytest.raises(Interrupted) as stopped:
        card(*subject, quick=True, progress=False)
    found = stopped.value.card
    assert found.measured == ["relative"]
    assert found.refused == {"filter": "interrupted", "slice": "interrupted before it"}


def test_time_goes_where_the_error_bars_are_largest(subject, monkeypatch):
    replaced(monkeypatch, relative=fake(0.4, 0.02), filter=fake(0.02, 0.02))
    found = card(*subject, quick=True, minutes=0.02, progress=False)
    rounds = {name: entry.rounds for name, entry in found.entries.items()}
    assert rounds["relative"] > 5 and rounds["relative"] > 2 * rounds["filter"]
    expected = 0.4 / math.sqrt(rounds["relative"])
    assert (
        found["relative"].stderr[0] == pytest.approx(expected)
        and found["relative"].evaluations[0] == 10 * rounds["relative"]
    )


def test_of_equal_error_bars_none_is_forgotten(subject, monkeypatch):
    """Bars that do not shrink: each has its turn."""
    names = ("relative", "filter")
    same = {"join": lambda a, b: a, "uncertainty": lambda _: math.inf}
    equal = tuple(Measure(name, name, LocalEnergy, 1, fake(0.1, 0.01), **same) for name in names)
    monkeypatch.setattr(measuring, "MEASURES", equal)
    found = card(*subject, quick=True, minutes=0.02, progress=False)
    rounds = [found.entries[name].rounds for name in names]
    assert min(rounds) > 1 and max(rounds) - min(rounds) <= 1


def test_nothing_is_measured_again_that_is_exact_enough(subject, monkeypatch):
    replaced(monkeypatch, relative=fake(0.001))
    assert card(*subject, quick=True, minutes=0.05, progress=False).entries["relative"].rounds == 1


def test_minutes_that_are_over_leave_measures_out(subject, monkeypatch):
    replaced(monkeypatch, relative=fake(0.4, 0.2), filter=fake(0.4))
    found = card(*subject, quick=True, minutes=0.001, progress=False)
    assert found.refused == {"filter": "the minutes were over"} and found.entries["relative"].rounds == 1


def test_progress_says_what_is_running_and_what_is_left(subject, monkeypatch):
    seen = []
    monkeypatch.setattr(measuring.Progress, "update", lambda self, done, **figures: seen.append(figures))
    replaced(monkeypatch, relative=fake(0.1), filter=fake(0.1))
    card(*subject, quick=True, progress=False)
    shown = [figures for figures in seen if figures]
    assert shown[:2] == [{"now": "relative", "then": "filter"}, {"now": "filter", "then": "done"}]


def test_a_line_of_progress_has_80_columns(subject, monkeypatch, capsys):
    """All measures, a while later; then the rounds that the minutes are spent on."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.Progress, "plain_interval", -1.0)

    def slow(mean):
        def run(subject, seed, minutes):
            now[0] += 400.0
            return fake(mean)(subject, seed, minutes)

        return run

    names = [measure.name for measure in MEASURES]
    records = [
        Measure(n, n, LocalEnergy, 100, slow(0.2), join=lambda a, b: a, uncertainty=lambda _: 0.1) for n in names
    ]
    monkeypatch.setattr(measuring, "MEASURES", tuple(records))
    card(*subject, quick=True, minutes=100)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 15 and max(map(len, lines)) <= 80
    assert lines[1].endswith("now relative  then filter and 6 more") and "left" in lines[1]
    assert lines[9].endswith("now at_w, round 2  then 40.0 min more")


def test_the_network_is_left_as_it_was(subject, measured):
    model, (x, y) = subject
    assert bool((model(x).argmax(1) == y).all()) and all(p.requires_grad and p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"minutes": 0}, ValueError, "minutes must be"),
        ({"examples": 1}, ValueError, "examples must be a whole number >= 2"),
        ({"against": "card.json"}, TypeError, "against must be a Card"),
        ({"batch_norm": "batch"}, ValueError, 'batch_norm="eval"'),
        ({"parameters": "nothing"}, ValueError, "selects none"),
    ],
)
def test_bad_input(subject, options, error, message):
    with pytest.raises(error, match=message):
        card(*subject, progress=False, **options)


def test_against(subject, measured, monkeypatch):
    replaced(monkeypatch, relative=measures.MEASURES[1].run)
    same = card(*subject, quick=True, examples=16, seed=0, against=measured, progress=False)
    assert same.comparison.startswith("No difference in flatness to net <1> is seen")
    other = card(*subject, quick=True, examples=8, against=measured, progress=False)
    assert other.comparison.startswith("Not compared with net <1>: these cards are not comparable: data is")
    assert isinstance(same, Card)
