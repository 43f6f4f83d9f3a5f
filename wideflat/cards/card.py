"""A card: what was measured of a minimum, kept whole in one file, shown as text, as a page, in a notebook."""

from __future__ import annotations

import html
import json
import math
import os
import re
from dataclasses import dataclass, field
from typing import Any

from wideflat.cards.comparison import Comparison, compared
from wideflat.cards.measures import MEASURES
from wideflat.cards.summary import headline, lines_of
from wideflat.checks import choice, flag, instance, shown
from wideflat.checks.options import check_fields
from wideflat.checks.records import location, parts_of, reading
from wideflat.files import atomic_write, read_whole

__all__ = ["Card", "Entry"]

_KIND = "wideflat card"


@dataclass
class Entry:
    """One measure of a card.

    Attributes:
        result: What came out; None where it was not measured.
        reason: Why it was not.
        seconds: How long it took.
        rounds: How often it was measured, each time with other noise or probes; the result has all of them.
    """

    result: Any = None
    reason: str = ""
    seconds: float = 0.0
    rounds: int = 0


@dataclass
class Card:
    """Everything that was measured of a minimum.

    Attributes:
        title: What the network is called.
        entries: The measures by name, in the order of the page; see :data:`wideflat.cards.measures.MEASURES`.
        conventions: What all of them depend on: architecture, examples, data, batch norm, parameters, seed.
        comparison: How it compares with another card, in one sentence; empty for none.

    Example:
        >>> card = Card("net", {"at_w": Entry(reason="not asked for")}, {"architecture": "Linear, 3 parameters"})
        >>> card.measured, list(card.refused)
        ([], ['at_w'])
    """

    title: str
    entries: dict[str, Entry] = field(default_factory=dict)
    conventions: dict[str, Any] = field(default_factory=dict)
    comparison: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        for name, entry in self.entries.items():
            choice("the name of an entry", name, [measure.name for measure in MEASURES])
            instance(name, entry, Entry)

    def __getitem__(self, name: str) -> Any:
        """The result of a measure, such as ``card["relative"]``, a :class:`wideflat.LocalEnergy`."""
        entry = self.entries.get(name) if isinstance(name, str) else None
        if entry is None:
            raise KeyError(f"a card has {', '.join(self.entries)}; not {shown(name)}")
        if entry.result is None:
            raise KeyError(f"{name} was not measured: {entry.reason}")
        return entry.result

    def get(self, name: str) -> Any:
        """The result of a measure, or None."""
        entry = self.entries.get(instance("name", name, str, "the name of a measure"))
        return None if entry is None else entry.result

    @property
    def measured(self) -> list[str]:
        """The measures that have a result."""
        return [name for name, entry in self.entries.items() if entry.result is not None]

    @property
    def refused(self) -> dict[str, str]:
        """The others, with the reason."""
        return {name: entry.reason for name, entry in self.entries.items() if entry.result is None}

    @property
    def seconds(self) -> float:
        """Time spent."""
        return sum(entry.seconds for entry in self.entries.values())

    def compare(self, other: Card, force: bool = False) -> Comparison:
        """How flat this minimum is beside another, with the uncertainty of that.

        Args:
            other: The card to compare with: same architecture, data, conventions.
            force: Compare in spite of other conventions.

        Raises:
            ValueError: With the reason, if the cards are not comparable.
        """
        instance("other", other, Card)
        force = flag("force", force)
        profiles = {name: (self.get(name), other.get(name)) for name in ("relative", "filter")}
        return compared(profiles, (self.conventions, other.conventions), (self.title, other.title), force)

    # ---- on disk

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and words."""
        measures = {measure.name: measure for measure in MEASURES}
        entries = {
            name: {
                "result": None if entry.result is None else measures[name].to_plain(entry.result),
                "reason": entry.reason,
                "seconds": entry.seconds,
                "rounds": entry.rounds,
            }
            for name, entry in self.entries.items()
        }
        content = {"kind": _KIND, "format": 1, "title": self.title, "comparison": self.comparison}
        plain: dict[str, Any] = _plain({**content, "conventions": self.conventions, "entries": entries})
        return plain

    @classmethod
    def from_dict(cls, content: Any) -> Card:
        """The inverse of :meth:`to_dict`."""
        content = parts_of(_KIND, content, kind=_KIND)
        measures = {measure.name: measure for measure in MEASURES}
        with reading("card"):
            content = _numbers(content)
            entries = {
                name: Entry(
                    None if entry["result"] is None else measures[name].from_plain(entry["result"]),
                    str(entry["reason"]),
                    float(entry["seconds"]),
                    int(entry["rounds"]),
                )
                for name, entry in content["entries"].items()
                if name in measures
            }
            return cls(
                instance("title", content["title"], str, "a text"),
                entries,
                instance("conventions", content["conventions"], dict),
                instance("comparison", content["comparison"], str, "a text"),
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page (``.html``) or the numbers (``.json``), whole or not at all; a page holds the numbers too."""
        kind = location("path", path).suffix.lower()
        if kind not in (".html", ".json"):
            raise ValueError(f"a card is saved as .html or .json, got {str(path)!r}")
        text = self.html() if kind == ".html" else json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"
        with atomic_write(path) as file:
            file.write(text)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Card:
        """Read what :meth:`save` wrote, a page or a file of numbers."""
        place = location("path", path)
        try:
            text = read_whole(place).decode("utf-8")
            if place.suffix.lower() == ".html":
                found = re.search(r'<script type="application/json" id="card">(.*?)</script>', text, re.DOTALL)
                if found is None:
                    raise ValueError("this page holds no card")
                text = found.group(1)
            with reading("card"):
                return cls.from_dict(json.loads(text))
        except ValueError as error:
            raise ValueError(f"{place} is not a whole card: {error}") from None

    # ---- looking at it

    @property
    def headline(self) -> str:
        """The most important of it, in one sentence."""
        return headline({name: self.entries[name].result for name in self.measured})

    def html(self) -> str:
        """One page that needs nothing but itself; matplotlib and plotly draw it."""
        from wideflat.cards.page import page_of  # which draws: a card that is not looked at needs no charts

        with reading("card"):
            numbers = json.dumps(self.to_dict(), allow_nan=False).replace("<", "\\u003c")
        end = f'<script type="application/json" id="card">{numbers}</script>\n</body>'
        return page_of(self).replace("</body>", end)

    def _lines(self) -> list[tuple[str, list[str]]]:
        titles = {measure.name: measure.title for measure in MEASURES}
        found = []
        for name, entry in self.entries.items():
            lines = [entry.reason] if entry.result is None else lines_of(name, entry.result)
            found.append((titles[name] + (" (not measured)" if entry.result is None else ""), lines))
        return found

    def __str__(self) -> str:
        parts = [f"{self.title}: {self.headline}" if self.measured else f"{self.title}: nothing was measured"]
        for title, lines in self._lines():
            parts += [f"\n{title}", *(f"  {line}" for line in lines)]
        parts += [f"\n{self.comparison}"] if self.comparison else []
        return "\n".join([*parts, f"\n{_about(self)}"])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left;vertical-align:top'>{html.escape(title)}</th>"
            f"<td style='text-align:left'>{'<br>'.join(map(html.escape, lines))}</td></tr>"
            for title, lines in self._lines()
        )
        last = f"<p>{html.escape(self.comparison)}</p>" if self.comparison else ""
        head = f"<p><b>{html.escape(self.title)}</b>: {html.escape(self.headline)}</p>"
        return f"{head}<table>{rows}</table>{last}<p>{html.escape(_about(self))}</p>"


def _about(card: Card) -> str:
    c = card.conventions
    parts = [
        str(c.get("architecture", "")),
        f"{c['examples']} examples ({c['few']} for worst case, spectrum, slice and free entropy)" if "few" in c else "",
        f"{card.seconds:.0f} s",
    ]
    return "; ".join(part for part in parts if part)


def _plain(value: Any) -> Any:
    """What JSON has no number for becomes a word."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": repr(float(value))}
    return value


def _numbers(value: Any) -> Any:
    """The inverse of :func:`_plain`."""
    if isinstance(value, dict):
        if set(value) == {"number"}:
            return float(value["number"])
        return {name: _numbers(item) for name, item in value.items()}
    return [_numbers(item) for item in value] if isinstance(value, list) else value
