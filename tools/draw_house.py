"""Draws docs/architecture.svg from the table of docs/architecture.md: layers, rooms, and the way of three commands.

python tools/draw_house.py            writes the drawing
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE, DRAWING = ROOT / "docs" / "architecture.md", ROOT / "docs" / "architecture.svg"
#: The layers that a command goes through, in this order, and what it does there.
WAYS = {
    "train": {12: "options", 9: "the loop", 4: "a step", 3: "images", 1: "run on disk"},
    "local-energy": {12: "options", 9: "opens a run", 7: "measures", 6: "evaluates", 2: "noise", 1: "profile"},
    "reproduce": {12: "options", 11: "an item", 9: "trains", 7: "measures", 10: "draws"},
}
WIDTH, LEFT, FIRST, HEIGHT, GAP = 1660, 250, 84, 46, 12
STYLE = """.t{font-size:18px;font-weight:600;fill:#1b2733}
.n{font-size:15px;font-weight:600;fill:#1b2733}.w{font-size:12px;fill:#51606e}
.m{font-size:13px;fill:#1b2733;font-family:ui-monospace,monospace}.lib{fill:#e8f1fa}.exp{fill:#f6efe2}
.room{fill:#fff;stroke:#0b6fb8;stroke-width:1.5}.mod{fill:#fff;stroke:#9fb1c1}.d{font-size:11px;fill:#1b2733}
.way{stroke:#b4541a;stroke-width:1.5;fill:none}.dot{fill:#b4541a}"""


def table(text: str) -> list[tuple[int, str, list[str], str]]:
    """Number, name, modules and words of each layer, from the top."""
    rows = re.findall(r"^\| (\d+) ([^|]*?) \| ([^|]*?) \| ([^|]*?) \|", text, re.MULTILINE)
    return [(int(k), name, re.findall(r"`(\w+)`", modules), words) for k, name, modules, words in reversed(rows)]


def drawing(text: str) -> str:
    """The whole picture."""
    rows = table(text)
    top = {number: FIRST + k * (HEIGHT + GAP) for k, (number, *_) in enumerate(rows)}
    parts = []
    for number, name, modules, words in rows:
        parts += layer(number, name, modules, words, top[number])
    for k, (command, stations) in enumerate(WAYS.items()):
        parts += way(WIDTH - 330 + 115 * k, command, stations, top)
    height = FIRST + len(rows) * (HEIGHT + GAP) + 40
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, '
            'sans-serif" role="img" aria-label="The rooms of wideflat in layers, and the way of three commands">',
            f"<style>{STYLE}</style>",
            f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
            '<text x="20" y="36" class="t">An import goes down, never up</text>',
            *parts,
            f'<text x="20" y="{height - 18}" class="w">Blue border: a folder; grey: a module. The blue layers need '
            "torch and NumPy only; the yellow ones are the experiments half.</text>",
            "</svg>",
            "",
        ]
    )


def layer(number: int, name: str, modules: list[str], words: str, y: int) -> list[str]:
    """One layer with its rooms."""
    half = "lib" if number <= 8 else "exp"
    short = re.split(r"[:;,]", words)[0]
    parts = [
        f'<rect x="20" y="{y}" width="{WIDTH - 40}" height="{HEIGHT}" rx="8" class="{half}"/>',
        f'<text x="34" y="{y + 20}" class="n">{number}  {name}</text>',
        f'<text x="34" y="{y + 37}" class="w">{short}</text>',
    ]
    x = LEFT
    for module in modules:
        width = round(12 + 7.9 * len(module))
        kind = "room" if (ROOT / "wideflat" / module).is_dir() else "mod"
        parts.append(f'<rect x="{x}" y="{y + 9}" width="{width}" height="{HEIGHT - 18}" rx="5" class="{kind}"/>')
        parts.append(f'<text x="{x + width / 2:g}" y="{y + 28}" class="m" text-anchor="middle">{module}</text>')
        x += width + 5
    return parts


def way(x: int, command: str, stations: dict[int, str], top: dict[int, int]) -> list[str]:
    """The way of a command: a line from layer to layer, with what is done at each."""
    points = [(x, top[number] + HEIGHT / 2) for number in stations]
    line = " ".join(f"{px:g},{py:g}" for px, py in points)
    parts = [
        f'<text x="{x}" y="{FIRST - 16}" class="m" text-anchor="middle">{command}</text>',
        f'<polyline points="{line}" class="way"/>',
    ]
    for (px, py), words in zip(points, stations.values(), strict=True):
        parts.append(f'<circle cx="{px:g}" cy="{py:g}" r="4" class="dot"/>')
        parts.append(f'<text x="{px + 9:g}" y="{py + 4:g}" class="d">{words}</text>')
    return parts


if __name__ == "__main__":
    DRAWING.write_text(drawing(PAGE.read_text()))
    print(DRAWING)
