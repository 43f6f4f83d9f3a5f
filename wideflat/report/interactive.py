"""A chart as a figure of plotly: what its script draws, with values on hover and axes that zoom.

The script is that of the Python package ``plotly``: nothing of it is copied into this repository, and what is installed
is what is drawn. It goes into a page once, packed (2 of its 5 MB), so that a page of forty figures stays below six
megabytes; see :mod:`wideflat.report.page`.
"""

from __future__ import annotations

import base64
import functools
import gzip
import html
import json
import math
import textwrap
from typing import Any

import numpy as np

from wideflat.report.chart import Chart, Series, scatter
from wideflat.report.palette import Look

__all__ = ["figure", "figure_json", "packed_script"]

#: More series than this are not listed together beside the pointer: they would hide the figure.
_TOGETHER = 8


def figure(chart: Chart) -> dict[str, Any]:
    """The chart as plotly's ``data`` and ``layout``.

    Every trace has ``meta``: the number of its series, and what it is ("line", "band", "points", "mean"). Colours of
    axes and text are left to the page, which has a light and a dark side.

    Example:
        >>> from wideflat.report.chart import Series
        >>> chart = Chart("c", "Title", "x", "y", [Series("eSGD", [0, 1], [2, 3], error=[0.1, 0.2], n=4)])
        >>> [(trace["meta"]["part"], trace["meta"]["series"]) for trace in figure(chart)["data"]]
        [('band', 0), ('line', 0)]
    """
    draw = {"distribution": _distribution, "points": _points}.get(chart.kind, _line)
    traces: list[dict[str, Any]] = []
    for index, (series, look) in enumerate(zip(chart.series, chart.looks(), strict=True)):
        for part, trace in draw(chart, index, series, look).items():
            shared = {"type": "scatter", "legendgroup": str(index), "name": _plain(series.legend)}
            traces.append({**shared, "showlegend": part != "band", **trace, "meta": {"series": index, "part": part}})
    return {"data": traces, "layout": _layout(chart)}


def figure_json(chart: Chart) -> str:
    """The same as text that may stand in a ``<script>`` element."""
    return json.dumps(figure(chart), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


@functools.cache
def packed_script() -> str:
    """The script of plotly, compressed, in letters that a page can hold."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ModuleNotFoundError(
            "a page with figures needs plotly: pip install plotly (it comes with the extra `experiments`)"
        ) from None
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode("ascii")


# ------------------------------------------------------------------------------------------------------------- traces


def _line(chart: Chart, index: int, series: Series, look: Look) -> dict[str, dict[str, Any]]:
    x, y = np.asarray(series.x, float), np.asarray(series.y, float)
    stepped = chart.kind == "step"
    shape = {"shape": "hv"} if stepped else {}
    line = {
        "x": _numbers(x),
        "y": _numbers(y),
        "mode": "lines+markers" if len(x) <= 40 and not stepped else "lines",
        "line": {"color": look.color, "dash": look.dash, "width": 2, **shape},
        "marker": {"color": look.color, "symbol": look.symbol, "size": 6},
        **_hover(chart, series),
    }
    if series.error is None:
        return {"line": line}
    error = np.nan_to_num(np.asarray(series.error, float))
    if not error.any():
        return {"line": line}
    there = np.isfinite(y)
    at, low, high = x[there], (y - error)[there], (y + error)[there]
    if stepped:  # a level holds until the next point
        at, low, high = np.repeat(at, 2)[1:], np.repeat(low, 2)[:-1], np.repeat(high, 2)[:-1]
    band = {
        "x": _numbers(np.concatenate([at, at[::-1]])),
        "y": _numbers(np.concatenate([high, low[::-1]])),
        "mode": "lines",
        "line": {"width": 0, "color": look.color},
        "fill": "toself",
        "fillcolor": _faint(look.color),
        "hoverinfo": "skip",
    }
    return {"band": band, "line": line}


def _points(chart: Chart, index: int, series: Series, look: Look) -> dict[str, dict[str, Any]]:
    trace: dict[str, Any] = {
        "x": _numbers(series.x),
        "y": _numbers(series.y),
        "mode": "markers",
        "marker": {"color": look.color, "symbol": look.symbol, "size": 8},
        **_hover(chart, series),
    }
    for name, error in (("error_y", series.error), ("error_x", series.x_error)):
        if error is not None:
            trace[name] = {"type": "data", "array": _numbers(error), "color": look.color, "thickness": 1, "width": 3}
    return {"points": trace}


def _distribution(chart: Chart, index: int, series: Series, look: Look) -> dict[str, dict[str, Any]]:
    values = np.asarray(series.y, float)
    values = values[np.isfinite(values)]
    if not len(values):
        return {}
    n, mean = len(values), float(values.mean())
    deviation = float(values.std(ddof=1)) if n > 1 else None
    unit = _plain(chart.y_label)
    points = {
        "x": _numbers(index + scatter(n)),
        "y": _numbers(values),
        "mode": "markers",
        "showlegend": False,
        "marker": {"color": look.color, "size": 6, "opacity": 0.55},
        "hovertemplate": f"{unit}: %{{y:.4~g}}<br>one of {n}<extra>{_plain(series.label)}</extra>",
    }
    spread = "one value: no spread" if deviation is None else f"standard deviation {deviation:.3g}, n = {n}"
    middle: dict[str, Any] = {
        "x": [index + 0.3],
        "y": [mean],
        "mode": "markers",
        "marker": {"color": look.color, "size": 10, "symbol": "diamond"},
        "hovertemplate": f"mean {unit}: %{{y:.4~g}}<br>{spread}<extra>{_plain(series.label)}</extra>",
    }
    if deviation is not None:
        middle["error_y"] = {"type": "data", "array": [deviation], "color": look.color, "thickness": 1.5, "width": 5}
    return {"points": points, "mean": middle}


def _hover(chart: Chart, series: Series) -> dict[str, Any]:
    """What a point says: its coordinates, its error and n."""
    lines = []
    for i, n in enumerate(series.counts):
        words = ""
        if series.error is not None and math.isfinite(float(series.error[i])):
            words += f" ± {float(series.error[i]):.3g}"
        if n is not None:
            words += f" (n = {n})"
        name = f"{_plain(series.names[i])}<br>" if series.names else ""
        lines.append([words, name])
    template = "%{y:.4~g}%{customdata[0]}<extra>" + _plain(series.label) + "</extra>"
    if not _together(chart):
        x, y = _plain(chart.x_label or "x"), _plain(chart.y_label or "y")
        template = f"%{{customdata[1]}}{y}: {template}".replace("<extra>", f"<br>{x}: %{{x:.4~g}}<extra>")
    return {"customdata": lines, "hovertemplate": template}


# ------------------------------------------------------------------------------------------------------------- layout


def _layout(chart: Chart) -> dict[str, Any]:
    x: dict[str, Any] = {"title": {"text": _plain(chart.x_label), "standoff": 8}, "automargin": True}
    y: dict[str, Any] = {"title": {"text": _plain(chart.y_label), "standoff": 8}, "automargin": True}
    for axis in (x, y):
        axis.update({"zeroline": False, "ticks": "outside", "ticklen": 4, "showline": True})
    if chart.kind == "distribution":
        x |= {
            "tickvals": list(range(len(chart.series))),
            "tickangle": 0,
            "ticktext": [f"{_lines(series.label)}<br>n = {len(series.y)}" for series in chart.series],
            "range": [-0.5, len(chart.series) - 0.3],
            "showgrid": False,
        }
    elif chart.x_scale == "log":
        x |= _logarithmic()
    if chart.y_scale == "log":
        y |= _logarithmic()
    return {
        "xaxis": x,
        "yaxis": y,
        "margin": {"l": 58, "r": 14, "t": 12, "b": 46},
        "showlegend": False,
        "hovermode": "x unified" if _together(chart) else "closest",
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "dragmode": "zoom",
    }


def _lines(label: str) -> str:
    """A name below its column, broken at hyphens: one that does not fit would not be shown."""
    lines = textwrap.wrap(label.replace("-", "- "), 14)
    return "<br>".join(_plain(line.replace("- ", "-")) for line in lines)


def _logarithmic() -> dict[str, Any]:
    return {"type": "log", "tickformat": "~g", "nticks": 6}


def _together(chart: Chart) -> bool:
    return chart.kind in ("line", "step") and len(chart.series) <= _TOGETHER


def _plain(text: str) -> str:
    """Text that plotly, which knows a few tags, shows as it is."""
    return html.escape(text, quote=False)


def _numbers(values: Any) -> list[float | None]:
    """Numbers for JSON, of nine digits; None where there is none."""
    return [float(f"{value:.9g}") if math.isfinite(value) else None for value in np.asarray(values, float).tolist()]


def _faint(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.2)"
