"""A chart: named series with error bars, drawn as SVG or PNG, and written as the CSV behind it."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from wideflat.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLORS", "Chart", "Series"]

Values: TypeAlias = "Sequence[float] | np.ndarray"

#: A palette that colour-blind readers can tell apart (Okabe and Ito), readable on white and on black.
COLORS = ("#1f83c9", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c8c00", "#888888")

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
    """

    label: str
    x: Values
    y: Values
    error: Values | None = None
    x_error: Values | None = None


@dataclass
class Chart:
    """A figure that can be drawn, saved and downloaded as the table behind it.

    Args:
        name: A file-safe name, unique on a page.
        title: The heading.
        x_label: Name (and unit) of the horizontal axis.
        y_label: Name (and unit) of the vertical axis.
        series: What is drawn, in the order of the legend.
        kind: ``"line"`` (with a band for the error), ``"points"`` (with error bars), or ``"distribution"`` (every
            value as a point beside mean and standard deviation, one column a series).
        caption: A sentence or two for under the figure: what is seen, n, what the error is.
        x_scale: ``"linear"`` or ``"log"``.
        y_scale: ``"linear"`` or ``"log"``.

    Example:
        >>> chart = Chart("profile", "Local energy", "sigma", "dE", [Series("SGD", [0, 1], [0, 2], error=[0, 0.5])])
        >>> print(chart.csv())
        series,x,y,error,x_error
        SGD,0,0,0,
        SGD,1,2,0.5,
        >>> "<svg" in chart.svg()
        True
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: list[Series] = field(default_factory=list)
    kind: Literal["line", "points", "distribution"] = "line"
    caption: str = ""
    x_scale: str = "linear"
    y_scale: str = "linear"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ValueError(f"a chart's name must be file-safe (letters, digits, . _ -), got {self.name!r}")

    def csv(self) -> str:
        """The table behind the figure, one row a point."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["series", "x", "y", "error", "x_error"])
        for row in self.rows():
            writer.writerow(row)
        return text.getvalue()

    def rows(self) -> Iterable[list[object]]:
        """Rows (series, x, y, error, x_error); empty strings where there is nothing."""
        for series in self.series:
            n = len(series.y)
            empty: list[object] = [""] * n
            columns = [series.x if len(series.x) else empty, series.y, series.error, series.x_error]
            for values in zip(*(empty if column is None else column for column in columns), strict=True):
                yield [series.label, *(value if value == "" else f"{float(value):.8g}" for value in values)]

    def draw(self, ax: Axes, legend: bool = True) -> None:
        """Draw into matplotlib axes."""
        for index, series in enumerate(self.series):
            color = COLORS[index % len(COLORS)]
            getattr(self, f"_draw_{self.kind}")(ax, index, series, color)
        ax.set_xlabel(self.x_label)
        ax.set_ylabel(self.y_label)
        if self.kind == "distribution":
            ax.set_xticks(range(len(self.series)), [series.label for series in self.series])
        else:
            ax.set_xscale(self.x_scale)
            if legend and len(self.series) > 1:
                ax.legend(frameon=False)
        ax.set_yscale(self.y_scale)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.set_axisbelow(True)

    def _draw_line(self, ax: Axes, index: int, series: Series, color: str) -> None:
        x, y = np.asarray(series.x, float), np.asarray(series.y, float)
        marker = "o" if len(x) <= 40 else ""
        (line,) = ax.plot(x, y, color=color, marker=marker, markersize=3.5, linewidth=1.6, label=series.label)
        line.set_gid(f"{self.name}-series-{index}-line")
        if series.error is not None:
            error = np.asarray(series.error, float)
            band = ax.fill_between(x, y - error, y + error, color=color, alpha=0.2, linewidth=0)
            band.set_gid(f"{self.name}-series-{index}-band")

    def _draw_points(self, ax: Axes, index: int, series: Series, color: str) -> None:
        if series.error is not None or series.x_error is not None:
            bars = ax.errorbar(
                series.x, series.y, yerr=series.error, xerr=series.x_error, fmt="none", ecolor=color, elinewidth=1
            )
            for number, artist in enumerate(bars.get_children()):
                artist.set_gid(f"{self.name}-series-{index}-bar-{number}")
        points = ax.scatter(series.x, series.y, s=26, color=color, label=series.label, zorder=3)
        points.set_gid(f"{self.name}-series-{index}-points")

    def _draw_distribution(self, ax: Axes, index: int, series: Series, color: str) -> None:
        values = np.asarray(series.y, float)
        values = values[np.isfinite(values)]
        if not len(values):
            return
        spread = np.linspace(-0.18, 0.18, len(values)) if len(values) > 1 else np.zeros(1)
        order = np.argsort(np.argsort(np.random.default_rng(0).random(len(values))))  # scatter, the same every time
        points = ax.scatter(index + spread[order], values, s=14, color=color, alpha=0.55, linewidth=0)
        points.set_gid(f"{self.name}-series-{index}-points")
        deviation = values.std(ddof=1) if len(values) > 1 else 0.0
        bars = ax.errorbar(
            [index + 0.3], [values.mean()], yerr=[deviation], fmt="D", color=color, markersize=5, capsize=4
        )
        for number, artist in enumerate(bars.get_children()):
            artist.set_gid(f"{self.name}-series-{index}-mean-{number}")

    def figure(self, legend: bool = True, title: bool = True) -> Figure:
        """The chart as a matplotlib figure of its own (no global state is touched)."""
        import matplotlib
        from matplotlib.figure import Figure

        style: dict[str, object] = dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _FOREGROUND
        )
        with matplotlib.rc_context(style):  # type: ignore[arg-type] # its keys are a union of 300 literals
            figure = Figure(figsize=(6.4, 4.0), layout="constrained")
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
            self.figure(legend, title).savefig(
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
