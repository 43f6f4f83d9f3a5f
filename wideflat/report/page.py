"""The report page: what was found, tables and figures in one HTML file that needs nothing but itself.

plotly draws the figures in the browser. Its script stands in the page once, packed, and is unpacked by the browser.
Where scripts are off, in a browser that cannot unpack, and on paper, the same figure is there as drawn by matplotlib.
Nothing is loaded from anywhere; a content-security policy in the page forbids it.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from os import PathLike

import wideflat
from wideflat.files import atomic_write
from wideflat.report.chart import Chart
from wideflat.report.glossary import WORDS, explained, key_of
from wideflat.report.interactive import figure_json, packed_script

__all__ = ["Page"]


#: Nothing may be loaded; the page's own style, script and the pictures it makes of its figures are allowed.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"

#: Buttons of a figure: what they do, what they show, what a screen reader says.
_TOOLS = (
    ("in", "+", "Zoom in"),
    ("out", "−", "Zoom out"),
    ("reset", "Reset", "Show all"),
    ("log", "log y", "Logarithmic vertical axis"),
    ("svg", "SVG", "Download as SVG"),
    ("png", "PNG", "Download as PNG"),
    ("csv", "CSV", "Download the data"),
)

#: As many rows of a figure's data are listed under it; the download has all.
_MOST_ROWS = 400


class Page:
    """A page under construction; everything given to it is escaped.

    Args:
        title: What the page is.
        subtitle: A line under it, such as when and from what it was made.
        finding: What came out, in one sentence: the first line of the page.

    Example:
        >>> page = Page("Flatness of <my> network", finding="It is flat.")
        >>> page.section("Summary")
        >>> page.paragraph("Flat & wide.")
        >>> page.table(["algorithm", "test error"], [["SGD", "16.5%"]])
        >>> text = page.html()
        >>> "&lt;my&gt;" in text and "Flat &amp; wide." in text and "<h1>It is flat.</h1>" in text
        True
    """

    def __init__(self, title: str, subtitle: str = "", finding: str = "") -> None:
        self.title = title
        self.subtitle = subtitle
        self.finding = finding
        self._body: list[str] = []
        self._sections: list[tuple[str, str]] = []
        self._charts: set[str] = set()
        self._met: set[str] = set()

    def section(self, title: str) -> None:
        """Start a section; it appears in the table of contents."""
        key = f"section-{len(self._sections) + 1}"
        self._sections.append((key, title))
        self._body.append(f'<h2 id="{key}">{_text(title)}</h2>')

    def paragraph(self, text: str, kind: str = "") -> None:
        """A paragraph; ``kind`` may be ``"finding"``, ``"warning"`` or ``"quiet"``."""
        attribute = f' class="{_text(kind)}"' if kind else ""
        self._body.append(f"<p{attribute}>{explained(text, self._met)}</p>")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> None:
        """A table; columns whose every entry starts with a digit, sign or dash are aligned to the right."""
        numeric = [all(_looks_numeric(row[i]) for row in rows) if rows else False for i in range(len(columns))]
        kinds = [' class="number"' if flag else "" for flag in numeric]
        head = "".join(
            f'<th scope="col"{kind}>{explained(name, self._met)}</th>'
            for kind, name in zip(kinds, columns, strict=True)
        )
        body = "\n".join(
            "<tr>"
            + "".join(f"<td{kind}>{_foldable(entry)}</td>" for kind, entry in zip(kinds, row, strict=True))
            + "</tr>"
            for row in rows
        )
        top = f"<caption><span>{explained(caption, self._met)}</span></caption>" if caption else ""
        self._body.append(
            f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(caption or "table")}"><table>{top}'
            f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
        )

    def charts(self, *charts: Chart) -> None:
        """Figures side by side where there is room. A chart without any point says so instead of showing empty axes."""
        kind = "figures alone" if len(charts) == 1 else f"figures of{len(charts)}"
        self._body.append(f'<div class="{kind}">' + "\n".join(self._figure(chart) for chart in charts) + "</div>")

    def picture(self, title: str, svg: str, caption: str = "") -> None:
        """A drawing of one's own, an SVG element, as a figure; it is not escaped."""
        self._body.append(
            f'<div class="figures alone"><figure aria-label="{_text(title)}"><h3>{_text(title)}</h3>\n'
            f"{_describe(svg, title)}<figcaption>{explained(caption, self._met)}</figcaption></figure></div>"
        )

    def details(self, summary: str, content: str | Mapping[str, object]) -> None:
        """Text (or a mapping, written as JSON) behind a line that opens it."""
        if not isinstance(content, str):
            content = json.dumps(content, indent=2, default=str)
        self._body.append(
            f'<details><summary>{_text(summary)}</summary><pre tabindex="0">{_text(content)}</pre></details>'
        )

    def code(self, text: str) -> None:
        """Lines of code."""
        self._body.append(f'<pre tabindex="0">{_text(text)}</pre>')

    def html(self) -> str:
        """The whole page."""
        folder = resources.files("wideflat.report")
        style = (folder / "page.css").read_text(encoding="utf-8")
        script = (folder / "page.js").read_text(encoding="utf-8")
        words = self._words()
        sections = [*self._sections, ("words", "Words")] if words else self._sections
        contents = "".join(f'<li><a href="#{key}">{_text(title)}</a></li>' for key, title in sections)
        navigation = f'<nav aria-label="Contents"><ul>{contents}</ul></nav>' if len(sections) > 1 else ""
        packed = f'<script type="application/gzip" id="plotly">{packed_script()}</script>' if self._charts else ""
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
{self._head()}
{navigation}
</header>
<main id="main">
{chr(10).join(self._body)}
{words}
</main>
<div id="tip" role="tooltip" hidden></div>
{packed}
<script>
{script}</script>
</body>
</html>
"""

    def write(self, path: str | PathLike[str]) -> None:
        """Write the page to a file, whole or not at all."""
        with atomic_write(path) as file:
            file.write(self.html())

    def _head(self) -> str:
        """The finding first where there is one, then what the page is."""
        about = f'<p class="quiet">{_text(self.subtitle)}</p>' if self.subtitle else ""
        if self.finding:
            # a number and its error stay together
            whole = self.finding.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
            return f'<h1>{_text(whole)}</h1>\n<p class="about">{_text(self.title)}</p>\n{about}'
        return f"<h1>{_text(self.title)}</h1>\n{about}"

    def _words(self) -> str:
        """What the words mean that were used."""
        used = [word for word in WORDS if word in self._met]
        if not used:
            return ""
        entries = "".join(f'<dt>{_text(word)}</dt><dd id="{key_of(word)}">{_text(WORDS[word])}</dd>' for word in used)
        return f'<h2 id="words">Words</h2><dl>{entries}</dl>'

    def _figure(self, chart: Chart) -> str:
        if chart.name in self._charts:
            raise ValueError(f"two charts on one page are named {chart.name!r}; give each a name of its own")
        title, name = _text(chart.title), _text(chart.name)
        if chart.empty:
            why = _text(chart.caption) if chart.caption else ""
            return (
                f'<figure aria-label="{title}"><h3>{title}</h3><p class="quiet">Nothing to draw yet.</p>'
                f"<figcaption>{why}</figcaption></figure>"
            )
        self._charts.add(chart.name)
        tools = "".join(
            f'<button type="button" data-action="{action}" aria-label="{label}: {title}"'
            f"{_pressed(chart) if action == 'log' else ''}>{sign}</button>"
            for action, sign, label in _TOOLS
        )
        data = chart.csv().replace("</", "<\\/")  # a script element ends at the first closing tag, whatever it holds
        return f"""<figure data-name="{name}" id="{name}">
<h3>{title}</h3>
{_legend(chart)}
<div class="plot" tabindex="0" role="group" aria-label="{title}. Plus and minus zoom, arrows move, zero resets.">
<div class="still">{_describe(chart.svg(legend=True), f"{chart.title}: {chart.y_label} against {chart.x_label}")}</div>
<div class="live"></div></div>
<div class="tools" role="group" aria-label="Tools of {title}" hidden>{tools}</div>
<figcaption>{explained(chart.caption, self._met)}</figcaption>
{_data_table(chart)}
<script type="application/json">{figure_json(chart)}</script>
<script type="text/csv">
{data}</script>
</figure>"""


def _legend(chart: Chart) -> str:
    """Buttons that hide and show a series: in the page, so that the keyboard reaches them."""
    if chart.kind == "distribution" or not any(series.label for series in chart.series):
        return '<div class="legend"></div>'  # empty: figures beside each other stay in line
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-series="{index}">'
        f'<span class="swatch {look.dash}" style="--color:{look.color}"></span>{_text(series.legend)}</button>'
        for index, (series, look) in enumerate(zip(chart.series, chart.looks(), strict=True))
        if len(series.y)
    )
    label = f"Series of {_text(chart.title)}: press to hide or show"
    return f'<div class="legend" role="group" aria-label="{label}">{buttons}</div>'


def _data_table(chart: Chart) -> str:
    """The numbers behind a figure, columns without any left out."""
    rows = list(chart.rows())
    headings = ["series", chart.x_label or "x", chart.y_label or "y", chart.error_label, "horizontal error", "n"]
    used = [i for i in range(len(headings)) if any(row[i] != "" for row in rows)]
    head = "".join(f'<th scope="col">{_text(headings[i])}</th>' for i in used)
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(_rounded(row[i]) if 0 < i < 5 else row[i])}</td>" for i in used) + "</tr>"
        for row in rows[:_MOST_ROWS]
    )
    rest = len(rows) - _MOST_ROWS
    more = f"<p class='quiet'>{rest} more rows are in the CSV.</p>" if rest > 0 else ""
    return (
        f'<details><summary>Data</summary><div class="scroll" tabindex="0" role="region" aria-label="Data of '
        f'{_text(chart.title)}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}</details>'
    )


def _rounded(entry: object) -> str:
    return f"{float(entry):.4g}" if isinstance(entry, str) and entry else ""


def _pressed(chart: Chart) -> str:
    """Whether the vertical axis begins as a logarithmic one."""
    return f' aria-pressed="{"true" if chart.y_scale == "log" else "false"}"'


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _foldable(value: object) -> str:
    """An entry of a table; a long name without spaces may be folded after its dots.

    >>> _foldable("transformer.h.0.ln_1"), _foldable(0.25)
    ('transformer.<wbr>h.<wbr>0.<wbr>ln_1', '0.25')
    """
    text = _text(value)
    return text.replace(".", ".<wbr>") if len(text) > 16 and " " not in text else text


def _looks_numeric(value: object) -> bool:
    text = str(value).strip()
    return not text or text[0].isdigit() or text[0] in "+-−–.<"


def _describe(svg: str, label: str) -> str:
    """Give an SVG element a role and a name that a screen reader says."""
    return svg.replace("<svg ", f'<svg role="img" aria-label="{_text(label)}" ', 1)
