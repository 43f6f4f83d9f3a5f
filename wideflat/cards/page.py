"""The page of a card: the finding first, then a section for each measure, then what all of it depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from wideflat.cards.heat_map import heat_map
from wideflat.cards.measures import MEASURES, AtTheWeights
from wideflat.cards.summary import amount, bounds, crossed, growth, lines_of, reach, with_bar
from wideflat.energy.profile import LocalEnergy
from wideflat.hessian.eigenvalues import Spectrum
from wideflat.landscape.shift import ShiftProfile
from wideflat.landscape.slices import Slice
from wideflat.report.chart import Chart, Series
from wideflat.report.page import Page
from wideflat.volume.volumes import FreeEntropy

if TYPE_CHECKING:
    from wideflat.cards.card import Card

__all__ = ["page_of", "verdict"]


def page_of(card: Card) -> str:
    """The page as HTML."""
    page = Page(f"Card of {card.title}", _about(card), _sentence(card.headline))
    if card.comparison:
        page.section("Beside another")
        refused = card.comparison.startswith("Not compared")
        page.paragraph(_sentence(card.comparison), "warning" if refused else "finding")
    for title, names, draw in _SECTIONS:
        page.section(title)
        there = {name: card.get(name) for name in names if card.get(name) is not None}
        if there:
            draw(page, there)
        for name in names:
            if name in card.refused:
                words = next(measure.title for measure in MEASURES if measure.name == name)
                page.paragraph(f"No {words}: {card.refused[name]}", "warning")
    _conventions(page, card)
    return page.html()


def _about(card: Card) -> str:
    """The line below the title."""
    c = card.conventions
    chosen = str(c.get("parameters", "all"))
    parts = [str(c.get("architecture", "")), f"of its parameters: {chosen}" if chosen != "all" else ""]
    parts += [f"{c['examples']} examples, from the worst case on {c['few']} of them" if "few" in c else ""]
    parts += [_day(str(c.get("date", ""))), f"measured in {card.seconds:.0f} s"]
    return " · ".join(part for part in parts if part)


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}{'' if words.endswith('.') else '.'}"


def _day(date: str) -> str:
    """A date without what nobody reads.

    >>> _day("2026-11-18T14:02:15+00:00"), _day("")
    ('2026-11-18 14:02 UTC', '')
    """
    return f"{date[:10]} {date[11:16]} UTC" if date.endswith("+00:00") else date


def _at_w(page: Page, results: dict[str, Any]) -> None:
    found: AtTheWeights = results["at_w"]
    rows = [
        [found.metric_name, amount(found.metric, found.metric_stderr, found.metric_name)],
        [found.loss_name, amount(found.loss, found.loss_stderr, found.loss_name)],
    ]
    page.table(["", "value"], rows)
    words = f"Over {found.examples} examples. The error bar says what another {found.examples} would change."
    page.paragraph(words, "quiet")


def _noise(page: Page, results: dict[str, Any]) -> None:
    metric = next(iter(results.values())).conventions.get("metric", "error")
    factor = 100.0 if metric == "error" else 1.0
    series = [
        Series(f"{name} noise", found.sigmas, factor * found.mean, factor * found.stderr)
        for name, found in results.items()
    ]
    unit = " (points)" if metric == "error" else ""
    caption = (
        "How much is added when every weight gets normal noise: relative to its own size, or to the size of its filter "
        "(row). Bands are standard errors over noise."
    )
    page.charts(Chart("noise", "Local energy", "sigma", f"growth of the {metric}{unit}", series, caption=caption))
    for name, found in results.items():
        extra = [line for line in lines_of(name, found) if "cannot move" in line]
        step = 0.05 if metric == "error" else 0.1
        page.paragraph(f"Under {name} noise the {reach(found, step)}{''.join(f'; {line}' for line in extra)}.")


def _layers(page: Page, results: dict[str, Any]) -> None:
    found: dict[str, LocalEnergy] = results["layers"]
    first = next(iter(found.values()))
    metric, sigma = first.conventions["metric"], float(first.sigmas[0])
    height = max(max(float(profile.mean[0]) for profile in found.values()), 1e-12)
    names, shared = without_shared(list(found))
    rows = [
        [
            name or "(the network itself)",
            profile.conventions["perturbed"],
            growth(float(profile.mean[0]), float(profile.stderr[0]), metric),
            _bar(float(profile.mean[0]), float(profile.stderr[0]), height),
        ]
        for name, profile in zip(names, found.values(), strict=True)
    ]
    page.table(
        ["layer", "weights", f"growth of the {metric}", "share"],
        rows,
        f"relative noise of sigma = {sigma:g} on one layer alone, in the order of the network"
        + (f"; all names are within {shared.strip('.')}" if shared else "")
        + ("; a pale bar is within two standard errors of 0" if any("░" in str(row[-1]) for row in rows) else ""),
    )


def _bar(value: float, stderr: float, height: float) -> str:
    """A bar as long as a value, pale where the value may as well be 0.

    >>> _bar(6.0, 1.0, 12.0), _bar(6.0, 4.0, 12.0), _bar(-1.0, 1.0, 12.0)
    ('██████', '░░░░░░', '·')
    """
    return ("█" if value > 2 * stderr else "░") * max(0, round(12 * value / height)) or "·"


def without_shared(names: list[str]) -> tuple[list[str], str]:
    """Names of layers without what all of them begin and end with, and that, with dots for what is between.

    Example:
        >>> without_shared(["net.h.0.lora.default", "net.h.1.lora_B.default"])
        (['h.0.lora', 'h.1.lora_B'], 'net. ... .default')
        >>> without_shared(["conv1", "conv2"]), without_shared(["net.0", "net"]), without_shared(["net.0"])
        ((['conv1', 'conv2'], ''), (['net.0', 'net'], ''), (['net.0'], ''))
    """
    parts = [name.split(".") for name in names]
    most = min(map(len, parts)) - 1 if len(parts) > 1 else 0
    begin = next((k for k in range(most) if len({part[k] for part in parts}) > 1), most)
    if begin and any(part[begin][:1].isdigit() for part in parts):  # a number says nothing alone
        begin -= 1
    end = next((k for k in range(most - begin) if len({part[-1 - k] for part in parts}) > 1), most - begin)
    words = (
        "".join(f"{part}." for part in parts[0][:begin]),
        "".join(f".{part}" for part in parts[0][len(parts[0]) - end :]),
    )
    short = [".".join(part[begin : len(part) - end]) for part in parts]
    return short, " ... ".join(words) if all(words) else "".join(words)


def _shift(page: Page, results: dict[str, Any]) -> None:
    rows = []
    found: dict[str, ShiftProfile] = results["shift"]
    for kind, shift in found.items():
        metric = shift.conventions["metric"]
        for k, position in enumerate(shift.positions):
            rows.append(
                [
                    f"{position:g} bits" if kind == "quantize" else f"{100 * position:g} % pruned",
                    growth(float(shift.mean[k]), float(shift.stderr[k]), metric),
                    f"{shift.sigmas[k]:.2g}",
                    growth(float(shift.noise_mean[k]), float(shift.noise_stderr[k]), metric),
                    verdict(shift, k),
                ]
            )
    page.table(
        ["change", f"growth of the {metric}", "sigma of equal length", "noise of that length", "against noise"],
        rows,
        "weights rounded to the nearest (symmetric, one step a tensor), or the smallest set to zero; the error "
        "bar of a change is over examples, that of noise over noise",
    )


def verdict(shift: ShiftProfile, k: int) -> str:
    """Whether a change does what noise of its length does, less or more, by two standard errors."""
    gap = float(shift.mean[k] - shift.noise_mean[k])
    bar = float(np.hypot(shift.stderr[k], shift.noise_stderr[k]))
    if not np.isfinite(gap) or abs(gap) <= 2 * bar:
        return "as noise"
    return "better than noise" if gap < 0 else "worse than noise"


def _worst(page: Page, results: dict[str, Any]) -> None:
    found: dict[str, LocalEnergy] = results["worst"]
    labels = {"l2": "worst of the l2 ball, at least", "linf": "worst of the box, at least", "average": "average"}
    series = [  # a logarithmic axis has no place for an average that noise has put below 0
        Series(labels[name], p.sigmas, np.where(p.mean > 0, p.mean, np.nan), np.where(p.mean > 0, p.stderr, 0.0))
        for name, p in found.items()
    ]
    c = found["l2"].conventions
    caption = (
        f"Largest loss that {c['steps']} steps of ascent{' and a restart' if c['restarts'] else ''} find within sigma "
        "of the weights (relative to their size): a lower bound of the worst. The average is that of noise of the same "
        "sigma."
    )
    if (found["average"].mean <= 0).any():
        caption += " An average that is not above 0 has no place on this axis."
    page.charts(Chart("worst", "Worst case and average", "sigma", f"growth of the {c['metric']}", series,
                      caption=caption, y_scale="log"))  # fmt: skip


def _spectrum(page: Page, results: dict[str, Any]) -> None:
    found: Spectrum = results["spectrum"]
    density = found.density()
    drawn = np.where(density.mean > density.mean.max() * 1e-9, density.mean, np.nan)
    series = [Series("density", density.points, drawn, np.where(np.isnan(drawn), 0.0, density.stderr))]
    caption = (
        f"Density of the eigenvalues of diag(w) H diag(w), smoothed by a Gaussian of width {density.width:.2g}, from "
        f"{len(found.nodes)} random probes of {found.nodes.shape[1]} products each. A few large eigenvalues stand "
        "apart from the bulk around 0 in most trained networks. The band is the standard error over probes."
    )
    page.charts(Chart("spectrum", "Spectrum of the Hessian", "eigenvalue", "density", series, caption=caption,
                      y_scale="log"))  # fmt: skip
    rows = [
        [f"eigenvalue {k + 1}", f"{value:.4g}", f"± {bar:.1g}"]
        for k, (value, bar) in enumerate(zip(found.eigenvalues, found.residuals, strict=True))
    ]
    low, high = found.trace_interval
    rows.append(["trace", f"{found.trace:.4g}", f"[{low:.3g}, {high:.3g}]"])
    page.table(["", "value", "error"], rows)
    words = "The error of an eigenvalue is its residual; of the trace there is the interval at 95 % over probes."
    page.paragraph(words, "quiet")
    for note in found.conventions.get("notes", []):
        page.paragraph(_sentence(note), "quiet")


def _slice(page: Page, results: dict[str, Any]) -> None:
    found: Slice = results["slice"]
    caption = (
        f"Growth of the {found.conventions['metric']} on a plane through the weights (the cross), along two random "
        "directions in which every filter moves by its own size. Colours go by the square root. Standard errors over "
        f"data are up to {np.nanmax(found.stderr):.2g}."
    )
    page.picture("Slice of the loss", heat_map(found), caption)


def _entropy(page: Page, results: dict[str, Any]) -> None:
    found: FreeEntropy = results["entropy"]
    rows = [
        [
            f"{p.sigma:g}",
            *bounds(p),
            with_bar(p.llc[-1], p.llc_stderr[-1]) if p.llc else "",
        ]
        for p in found.points
    ]
    page.table(["sigma", "log Z at least", "log Z at most", "learning coefficient"], rows)
    page.paragraph(f"The two bounds of the free entropy, with their errors over chains: {found.about()}.", "quiet")
    for words in {crossed(p) for p in found.points} - {""}:
        page.paragraph(_sentence(words), "quiet")


def _conventions(page: Page, card: Card) -> None:
    page.section("How it was measured")
    titles = {measure.name: measure.title for measure in MEASURES}
    rows = [
        [titles[name], f"{entry.seconds:.1f}", entry.rounds, entry.reason or "measured"]
        for name, entry in card.entries.items()
    ]
    page.table(["measure", "seconds", "rounds", ""], rows, "what was measured, and how long it took")
    page.details("Conventions of the card", card.conventions)
    for name in card.measured:
        result = card.entries[name].result
        parts = result if isinstance(result, dict) else {"": result}
        first = next(iter(parts.values()))
        if getattr(first, "conventions", None):
            page.details(f"Conventions: {titles[name]}", first.conventions)


_SECTIONS: tuple[tuple[str, tuple[str, ...], Callable[[Page, dict[str, Any]], None]], ...] = (
    ("At the weights", ("at_w",), _at_w),
    ("Under noise", ("relative", "filter"), _noise),
    ("Layer by layer", ("layers",), _layers),
    ("What comes later: rounding and pruning", ("shift",), _shift),
    ("In the worst case", ("worst",), _worst),
    ("Curvature", ("spectrum",), _spectrum),
    ("A picture", ("slice",), _slice),
    ("Room around it", ("entropy",), _entropy),
)
