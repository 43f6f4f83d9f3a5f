"""The report page: headings, tables and charts in one HTML file that needs nothing but itself.

The figures are matplotlib's SVG with a small script of ours for toggles, zoom and downloads, rather than a chart
library: the page stays below a megabyte, prints, works without JavaScript, and shows exactly the figures that are saved
beside the tables. Nothing is loaded from anywhere; a content-security policy in the page forbids it.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from os import PathLike

import wideflat
from wideflat.files import atomic_write
from wideflat.report.chart import COLORS, Chart

__all__ = ["Page"]


#: Nothing may be loaded; the page's own style, script and the pictures it makes of its figures are allowed.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


class Page:
    """A page under construction; everything given to it is escaped.

    Args:
        title: The heading of the page.
        subtitle: A line under it, such as when and from what it was made.

    Example:
        >>> page = Page("Flatness of <my> network")
        >>> page.section("Summary")
        >>> page.paragraph("Flat & wide.")
        >>> page.table(["algorithm", "test error"], [["SGD", "16.5%"]])
        >>> text = page.html()
        >>> "&lt;my&gt;" in text and "Flat &amp; wide." in text
        True
    """

    def __init__(self, title: str, subtitle: str = "") -> None:
        self.title = title
        self.subtitle = subtitle
        self._body: list[str] = []
        self._sections: list[tuple[str, str]] = []
        self._charts: set[str] = set()

    def section(self, title: str) -> None:
        """Start a section; it appears in the table of contents."""
        key = f"section-{len(self._sections) + 1}"
        self._sections.append((key, title))
        self._body.append(f'<h2 id="{key}">{_text(title)}</h2>')

    def paragraph(self, text: str, kind: str = "") -> None:
        """A paragraph; ``kind`` may be ``"warning"`` or ``"quiet"``."""
        attribute = f' class="{_text(kind)}"' if kind else ""
        self._body.append(f"<p{attribute}>{_text(text)}</p>")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> None:
        """A table; columns whose every entry starts with a digit, sign or dash are aligned to the right."""
        numeric = [all(_looks_numeric(row[i]) for row in rows) if rows else False for i in range(len(columns))]
        kinds = [' class="number"' if flag else "" for flag in numeric]
        head = "".join(f'<th scope="col"{kind}>{_text(name)}</th>' for kind, name in zip(kinds, columns, strict=True))
        body = "\n".join(
            "<tr>" + "".join(f"<td{kind}>{_text(entry)}</td>" for kind, entry in zip(kinds, row, strict=True)) + "</tr>"
            for row in rows
        )
        top = f"<caption>{_text(caption)}</caption>" if caption else ""
        self._body.append(
            f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(caption or "table")}"><table>{top}'
            f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
        )

    def charts(self, *charts: Chart) -> None:
        """Figures side by side where there is room. A chart without any point says so instead of showing empty axes."""
        self._body.append('<div class="figures">' + "\n".join(self._figure(chart) for chart in charts) + "</div>")

    def details(self, summary: str, content: str | Mapping[str, object]) -> None:
        """Text (or a mapping, written as JSON) behind a line that opens it."""
        if not isinstance(content, str):
            content = json.dumps(content, indent=2, default=str)
        self._body.append(f"<details><summary>{_text(summary)}</summary><pre>{_text(content)}</pre></details>")

    def html(self) -> str:
        """The whole page."""
        folder = resources.files("wideflat.report")
        style = (folder / "page.css").read_text(encoding="utf-8")
        script = (folder / "page.js").read_text(encoding="utf-8")
        contents = "".join(f'<li><a href="#{key}">{_text(title)}</a></li>' for key, title in self._sections)
        return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="generator" content="wideflat {_text(wideflat.__version__)}">
<link rel="icon" href="data:,">
<title>{_text(self.title)}</title>
<style>
{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<header>
<h1>{_text(self.title)}</h1>
<p class="quiet">{_text(self.subtitle)}</p>
<nav aria-label="Contents"><ul>{contents}</ul></nav>
</header>
<main id="main">
{chr(10).join(self._body)}
</main>
<script>
{script}</script>
</body>
</html>
"""

    def write(self, path: str | PathLike[str]) -> None:
        """Write the page to a file, whole or not at all."""
        with atomic_write(path) as file:
            file.write(self.html())

    def _figure(self, chart: Chart) -> str:
        if chart.name in self._charts:
            raise ValueError(f"two charts on one page are named {chart.name!r}; give each a name of its own")
        self._charts.add(chart.name)
        title, name = _text(chart.title), _text(chart.name)
        if not any(len(series.y) for series in chart.series):
            return f'<figure aria-label="{title}"><h3>{title}</h3><p class="quiet">Nothing to draw yet.</p></figure>'
        legend = "".join(
            f'<button type="button" aria-pressed="true" data-series="{index}">'
            f'<span class="swatch" style="background:{COLORS[index % len(COLORS)]}"></span>'
            f"{_text(series.label)}</button>"
            for index, series in enumerate(chart.series)
        )
        tools = "".join(
            f'<button type="button" data-action="{action}" aria-label="{label}: {title}">{sign}</button>'
            for action, sign, label in (
                ("in", "+", "Zoom in"),
                ("out", "−", "Zoom out"),
                ("reset", "Reset", "Show all"),
                ("svg", "SVG", "Download as SVG"),
                ("png", "PNG", "Download as PNG"),
                ("csv", "CSV", "Download the data"),
            )
        )
        rows = "".join(
            "<tr>" + "".join(f"<td>{_text(entry)}</td>" for entry in row) + "</tr>" for row in list(chart.rows())[:400]
        )
        data = chart.csv().replace("</", "<\\/")  # a script element ends at the first closing tag, whatever it holds
        return f"""<figure data-name="{name}" id="{name}">
<div class="head"><h3>{title}</h3><div class="tools" hidden>{tools}</div></div>
<div class="legend" role="group" aria-label="Series of {title}: press to hide or show">{legend}</div>
<div class="plot" tabindex="0" role="group" aria-label="{title}. Plus and minus zoom, arrows move, zero resets.">
{_describe(chart.svg(), f"{chart.title}: {chart.y_label} against {chart.x_label}")}</div>
<figcaption>{_text(chart.caption)}</figcaption>
<details><summary>Data</summary><div class="scroll" tabindex="0" role="region" aria-label="Data of {title}"><table>
<thead><tr><th scope="col">series</th><th scope="col">{_text(chart.x_label or "x")}</th>
<th scope="col">{_text(chart.y_label or "y")}</th><th scope="col">error</th><th scope="col">x error</th></tr></thead>
<tbody>{rows}</tbody></table></div></details>
<script type="text/csv">
{data}</script>
</figure>"""


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _looks_numeric(value: object) -> bool:
    text = str(value).strip()
    return not text or text[0].isdigit() or text[0] in "+-−–.<"


def _describe(svg: str, label: str) -> str:
    """Give an SVG element a role and a name that a screen reader says."""
    return svg.replace("<svg ", f'<svg role="img" aria-label="{_text(label)}" ', 1)
