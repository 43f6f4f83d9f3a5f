"""A chart: named series with error bars, drawn as SVG or PNG, and written as the CSV behind it."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from wideflat.files import atomic_write
from wideflat.report.palette import Look, looks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Chart", "Series", "scatter"]

Values: TypeAlias = "Sequence[float] | np.ndarray"

#: What matplotlib calls the lines and points of a look.
_STYLES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_MARKERS = {"circle": "o", "square": "s", "triangle-up": "^", "diamond": "D"}

#: The colour of axes and text in a drawing; in the page it becomes the colour of the page's own text.
_FOREGROUND = "#1a1b1c"


@dataclass(frozen=True)
class Series:
    """One curve, cloud of points, or sample of values.

    Args:
        label: What the legend says.
        x: Abscissae. For a distribution: not used.
        y: Ordinates, or the values of a distribution. NaN leaves a gap.
        error: Half-width of the error bar or band at each point, if there is one.
        x_error: Half-width of the horizontal error bar at each point (points only).
        n: How many values each point (or the whole series) is made of, if it is known. Of a distribution: its length.
        names: What each point is called when one asks it, such as the name of a network.

    Example:
        >>> Series("eSGD", [0, 1], [0, 2], n=3).legend, Series("SGD", [0, 1], [0, 2], n=[3, 2]).legend
        ('eSGD (n = 3)', 'SGD (n = 2 to 3)')
    """

    label: str
    x: Values
    y: Values
    error: Values | None = None
    x_error: Values | None = None
    n: int | Sequence[int] | None = None
    names: Sequence[str] = ()

    @property
    def counts(self) -> list[int | None]:
        """N at each point."""
        if self.n is None or isinstance(self.n, int):
            return [self.n] * len(self.y)
        return list(self.n)

    @property
    def legend(self) -> str:
        """The label with n."""
        known = sorted({count for count in self.counts if count is not None})
        if not known:
            return self.label
        return f"{self.label} (n = {known[0]}{f' to {known[-1]}' if len(known) > 1 else ''})"


@dataclass
class Chart:
    """A figure that can be drawn, saved and downloaded as the table behind it.

    Args:
        name: A file-safe name, unique on a page.
        title: The heading.
        x_label: Name (and unit) of the horizontal axis.
        y_label: Name (and unit) of the vertical axis.
        series: What is drawn, in the order of the legend.
        kind: ``"line"`` (with a band for the error), ``"step"`` (the same for what changes at once, such as a learning
            rate), ``"points"`` (with error bars), or ``"distribution"`` (every value as a point beside mean and
            standard deviation, one column a series).
        caption: A sentence or two for under the figure: what is seen, n, what the error is.
        error_label: What the error of a point is, for its table and for those who ask a point.
        x_scale: ``"linear"`` or ``"log"``.
        y_scale: ``"linear"`` or ``"log"``.

    Example:
        >>> chart = Chart("profile", "Local energy", "sigma", "dE", [Series("SGD", [0, 1], [0, 2], error=[0, 0.5])])
        >>> print(chart.csv())
        series,x,y,error,x_error,n
        SGD,0,0,0,,
        SGD,1,2,0.5,,
        >>> "<svg" in chart.svg()
        True
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: list[Series] = field(default_factory=list)
    kind: Literal["line", "step", "points", "distribution"] = "line"
    caption: str = ""
    error_label: str = "error"
    x_scale: str = "linear"
    y_scale: str = "linear"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ValueError(f"a chart's name must be file-safe (letters, digits, . _ -), got {self.name!r}")

    def csv(self) -> str:
        """The table behind the figure, one row a point."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["series", "x", "y", "error", "x_error", "n"])
        for row in self.rows():
            writer.writerow(row)
        return text.getvalue()

    def rows(self) -> Iterable[list[object]]:
        """Rows (series, x, y, error, x_error, n); empty strings where there is nothing."""
        for series in self.series:
            empty: list[Any] = [""] * len(series.y)
            columns = [series.x if len(series.x) else empty, series.y, series.error, series.x_error]
            numbers = ["" if count is None else count for count in series.counts]
            for *values, n in zip(*(empty if column is None else column for column in columns), numbers, strict=True):
                yield [series.label, *(value if value == "" else f"{float(value):.8g}" for value in values), n]

    @property
    def empty(self) -> bool:
        """Whether there is no point to draw."""
        return not any(math.isfinite(float(value)) for series in self.series for value in series.y)

    def looks(self) -> list[Look]:
        """How each series is drawn."""
        return looks([series.label for series in self.series])

    def draw(self, ax: Axes, legend: bool = True) -> None:
        """Draw into matplotlib axes."""
        draw = {"distribution": self._draw_distribution, "points": self._draw_points}.get(self.kind, self._draw_line)
        for index, (series, look) in enumerate(zip(self.series, self.looks(), strict=True)):
            draw(ax, index, series, look)
        ax.set_xlabel(self.x_label)
        ax.set_ylabel(self.y_label)
        if self.kind == "distribution":
            names = [f"{series.label}\nn = {len(series.y)}" for series in self.series]
            ax.set_xticks(range(len(self.series)), names)
        else:
            ax.set_xscale(self.x_scale)
            if legend and any(series.label for series in self.series):
                ax.legend(frameon=False)
        ax.set_yscale(self.y_scale)
        _plain_logs(ax)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.set_axisbelow(True)

    def _draw_line(self, ax: Axes, index: int, series: Series, look: Look) -> None:
        x, y, color = np.asarray(series.x, float), np.asarray(series.y, float), look.color
        step: Literal["post"] | None = "post" if self.kind == "step" else None
        marker = _MARKERS[look.symbol] if len(x) <= 40 and not step else ""
        style: dict[str, Any] = {
            "color": color,
            "linestyle": _STYLES[look.dash],
            "drawstyle": "steps-post" if step else "default",
        }
        (line,) = ax.plot(x, y, marker=marker, markersize=3.5, linewidth=1.6, label=series.legend, **style)
        line.set_gid(f"{self.name}-series-{index}-line")
        if series.error is not None:
            error = np.asarray(series.error, float)
            band = ax.fill_between(x, y - error, y + error, color=color, alpha=0.2, linewidth=0, step=step)
            band.set_gid(f"{self.name}-series-{index}-band")

    def _draw_points(self, ax: Axes, index: int, series: Series, look: Look) -> None:
        color = look.color
        if series.error is not None or series.x_error is not None:
            bars = ax.errorbar(
                series.x, series.y, yerr=series.error, xerr=series.x_error, fmt="none", ecolor=color, elinewidth=1
            )
            for number, artist in enumerate(bars.get_children()):
                artist.set_gid(f"{self.name}-series-{index}-bar-{number}")
        points = ax.scatter(
            series.x, series.y, s=26, color=color, marker=_MARKERS[look.symbol], label=series.legend, zorder=3
        )
        points.set_gid(f"{self.name}-series-{index}-points")

    def _draw_distribution(self, ax: Axes, index: int, series: Series, look: Look) -> None:
        values = np.asarray(series.y, float)
        values = values[np.isfinite(values)]
        if not len(values):
            return
        points = ax.scatter(index + scatter(len(values)), values, s=14, color=look.color, alpha=0.55, linewidth=0)
        points.set_gid(f"{self.name}-series-{index}-points")
        deviation = [values.std(ddof=1)] if len(values) > 1 else None
        bars = ax.errorbar(
            [index + 0.3], [values.mean()], yerr=deviation, fmt="D", color=look.color, markersize=5, capsize=4
        )
        for number, artist in enumerate(bars.get_children()):
            artist.set_gid(f"{self.name}-series-{index}-mean-{number}")

    def figure(self, legend: bool = True, title: bool = True) -> Figure:
        """The chart as a matplotlib figure of its own (no global state is touched)."""
        return self._figure((6.4, 4.0), legend, title)

    def _figure(self, size: tuple[float, float], legend: bool, title: bool) -> Figure:
        import matplotlib
        from matplotlib.figure import Figure

        style: dict[str, object] = dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _FOREGROUND
        )
        with matplotlib.rc_context(style):  # type: ignore[arg-type] # its keys are a union of 300 literals
            figure = Figure(figsize=size, layout="constrained")
            ax = figure.add_subplot()
            self.draw(ax, legend)
            if title:
                ax.set_title(self.title, fontsize=11)
        return figure

    def svg(self, legend: bool = False, title: bool = False) -> str:
        """An SVG element to embed in a page: text stays text, axes take the colour of the page's text."""
        import matplotlib

        text = io.StringIO()
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name, "font.family": "sans-serif"}):
            self._figure((4.8, 3.2), legend, title).savefig(
                text, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
            )
        svg = text.getvalue()
        svg = svg[svg.index("<svg") :].replace(_FOREGROUND, "currentColor")
        svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        # Ids must be unique on a page that holds many figures; those of the series have the chart's name already.
        own = re.escape(self.name) + "-series-"
        svg = re.sub(rf'\bid="(?!{own})', f'id="{self.name}-', svg)
        svg = re.sub(rf'(xlink:href="#|url\(#)(?!{own})', rf"\g<1>{self.name}-", svg)
        return svg.strip()

    def save(self, folder: str | PathLike[str]) -> list[Path]:
        """Write ``name.csv``, ``name.svg`` and ``name.png`` into a folder; returns their paths."""
        base = Path(folder)
        paths = [base / f"{self.name}.{ending}" for ending in ("csv", "svg", "png")]
        with atomic_write(paths[0]) as file:
            file.write(self.csv())
        figure = self.figure()
        styles: list[dict[str, Any]] = [{"metadata": {"Date": None}}, {"dpi": 160}]
        for path, options in zip(paths[1:], styles, strict=True):
            image = io.BytesIO()
            figure.savefig(image, format=path.suffix[1:], **options)
            with atomic_write(path, "wb") as binary:
                binary.write(image.getvalue())
        return paths


def _plain_logs(ax: Axes) -> None:
    """Ticks of logarithmic axes as the numbers that they are: 0.02 and 50, never 2 × 10⁻²."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    for axis, scale in ((ax.xaxis, ax.get_xscale()), (ax.yaxis, ax.get_yscale())):
        if scale == "log":
            low, high = sorted(axis.get_view_interval())
            if high < 30 * low:  # powers of ten would be one tick, or none
                axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if high > 3 * low else MaxNLocator(5))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())


def scatter(count: int) -> np.ndarray:
    """Where the points of a distribution lie beside its middle: apart, and the same every time."""
    spread = np.linspace(-0.18, 0.18, count) if count > 1 else np.zeros(count)
    return spread[np.argsort(np.argsort(np.random.default_rng(0).random(count)))]
