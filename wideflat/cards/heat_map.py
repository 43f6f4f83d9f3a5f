"""A grid of values as an SVG drawing: one square a point, the colour by the square root, its value on hover."""

from __future__ import annotations

import html

import numpy as np

from wideflat.landscape.slices import Slice

__all__ = ["heat_map"]

#: From low to high, even steps for the eye, also for those who see no red and green.
_STOPS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
_SIDE, _LEFT, _TOP, _BAR = 420.0, 46.0, 10.0, 16.0


def heat_map(found: Slice) -> str:
    """A two-dimensional slice as a drawing; text has the colour of the page."""
    values = found.mean
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    count, cell = len(found.positions), _SIDE / len(found.positions)
    parts = []
    for i, x in enumerate(found.positions):
        for j, y in enumerate(found.positions):
            value, bar = values[i, j], found.stderr[i, j]
            words = html.escape(f"x {x:.3g}, y {y:.3g}: {value:.4g} ± {bar:.1g}")
            color = _color(_level(float(value), low, high))
            parts.append(
                f'<rect x="{_LEFT + i * cell:.2f}" y="{_TOP + (count - 1 - j) * cell:.2f}" width="{cell + 0.4:.2f}" '
                f'height="{cell + 0.4:.2f}" fill="{color}"><title>{words}</title></rect>'
            )
    middle = _LEFT + _SIDE / 2, _TOP + _SIDE / 2
    parts.append(
        f'<path d="M{middle[0] - 6} {middle[1]}h12M{middle[0]} {middle[1] - 6}v12" stroke="#fff" stroke-width="2"/>'
    )
    for position in (0, (count - 1) // 2, count - 1):
        label = f"{found.positions[position]:g}"
        at = (position + 0.5) * cell
        parts.append(_text(_LEFT + at, _TOP + _SIDE + 16, label, "middle"))
        parts.append(_text(_LEFT - 6, _TOP + _SIDE - at + 4, label, "end"))
    left = _LEFT + _SIDE + 18
    for step in range(40):
        parts.append(
            f'<rect x="{left}" y="{_TOP + _SIDE * (1 - (step + 1) / 40):.2f}" width="{_BAR}" '
            f'height="{_SIDE / 40 + 0.4:.2f}" fill="{_color((step + 0.5) / 40)}"/>'
        )
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(_text(left + _BAR + 5, _TOP + _SIDE * (1 - share) + 4, f"{_value(share, low, high):.2g}", "start"))
    width, height = left + _BAR + 62, _TOP + _SIDE + 26
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" style="width:100%;max-width:560px;height:auto;display:block" '
        f'font-size="12" fill="currentColor">{"".join(parts)}</svg>'
    )


def _level(value: float, low: float, high: float) -> float:
    """Where a value lies between the lowest and the highest, by the square root: small differences are seen at w."""
    if not np.isfinite(value):
        return 1.0
    return float(np.sqrt((value - low) / (high - low))) if high > low else 0.0


def _value(level: float, low: float, high: float) -> float:
    return low + (high - low) * level**2


def _color(level: float) -> str:
    place = min(max(level, 0.0), 1.0) * (len(_STOPS) - 1)
    k = min(int(place), len(_STOPS) - 2)
    mixed = (round(a + (b - a) * (place - k)) for a, b in zip(_STOPS[k], _STOPS[k + 1], strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>'
