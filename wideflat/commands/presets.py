"""``wideflat presets``: every cell of Table 1 and every setting of Appendix B.1, with the paper's number."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from typing import Annotated, Any

import tyro

from wideflat.commands import UsageError, usage
from wideflat.commands.answers import answer
from wideflat.committee.settings import SETTINGS
from wideflat.experiments.options import MaybeText
from wideflat.presets import ALGORITHMS, COLUMNS, PRESETS, Preset, nearest, preset
from wideflat.report.terminal import aligned, on_screen, stacked


@dataclasses.dataclass
class Command:
    """Every cell of Table 1 and every setting of Appendix B.1, with the paper's number.

    Examples:
      wideflat presets                                    the table
      wideflat presets cifar10-resnet18                   all settings of a row, its four columns
      wideflat presets cifar10-resnet18 --algorithm esgd  one cell
      wideflat presets cifar10-resnet18 --as-coded        the row as the authors' program has it
      wideflat presets committee-sgd-fast                 a setting of the committee machine
      wideflat presets --json                             everything, for scripts
    """

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET", help_behavior_hint="")] = None
    """A row of Table 1, or a setting of the committee machine; all of them when left out."""
    algorithm: MaybeText = None
    """Only this algorithm: sgd, rsgd, esgd, rsgdxy, lookahead, easgd, parle, sam or ema."""
    as_coded: bool = False
    """As the authors' program has it, where public copies of that differ from the paper's text."""
    json: bool = False
    """As JSON."""

    def run(self) -> int:
        """Print the presets."""
        committee = committee_settings()
        if self.name is None and not self.json:
            print(on_screen(_overview(committee)))
        elif self.name in committee:
            setting = {self.name: committee[self.name]}
            self._print(setting, _committee_detail(self.name, setting[self.name]))
        elif self.name is None or self.name in PRESETS:
            self._print_cells(list(PRESETS) if self.name is None else [self.name], committee)
        else:
            raise UsageError(f"there is no preset {self.name!r}. {nearest(self.name, [*PRESETS, *committee])}")
        return 0

    def _print_cells(self, rows: list[str], committee: dict[str, dict[str, Any]]) -> None:
        columns = COLUMNS if self.algorithm is None else (self.algorithm,)
        with usage():
            cells = {row: {column: preset(row, column, self.as_coded) for column in columns} for row in rows}
        table = {row: {column: cell.to_dict() for column, cell in of_row.items()} for row, of_row in cells.items()}
        details = [_detail(cell) for of_row in cells.values() for cell in of_row.values()]
        content = {"table1": table, "committee": committee if self.name is None else {}}
        self._print(content, "\n\n".join(details).split("\n"))

    def _print(self, content: dict[str, Any], lines: list[str]) -> None:
        if self.json:
            answer(content)
        else:
            print(on_screen(lines))


def committee_settings() -> dict[str, dict[str, Any]]:
    """The settings of Appendix B.1 by the name that ``wideflat train`` knows them by: ``committee-sgd-fast``, ..."""
    return {f"committee-{name}": _plain(setting) for name, setting in SETTINGS.items()}


def _plain(setting: Any) -> dict[str, Any]:
    return dataclasses.asdict(setting) if dataclasses.is_dataclass(setting) else dict(setting)  # type: ignore[arg-type]


def _overview(committee: dict[str, dict[str, Any]]) -> list[str]:
    header = ["preset", "data", "model", "epochs", "baseline", "rSGD", "eSGD", "rSGD x y"]
    rows = [
        [name, cells["sgd"].dataset, cells["sgd"].model, str(cells["sgd"].epochs), *(_error(cells[c]) for c in COLUMNS)]
        for name, cells in PRESETS.items()
    ]
    algorithms = [[name, text] for name, text in ALGORITHMS.items()]
    return [
        "Table 1: test error (%) in the paper, with its spread",
        "",
        *_as_wide_as_the_screen(header, rows),
        "",
        "Algorithms, for any row (wideflat train PRESET --algorithm ...)",
        "",
        *aligned(algorithms),
        "",
        "Committee machine, Appendix B.1",
        "",
        *(f"  {name}" for name in committee),
        "",
        "wideflat presets PRESET  every hyper-parameter, which are not the paper's, and in what the authors' program "
        "differs (--as-coded)",
    ]


def _as_wide_as_the_screen(header: list[str], rows: list[list[str]]) -> list[str]:
    """The table; on a narrow screen without data and network, which the names say too; on a very narrow one stacked."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    short_header, *short_rows = ([row[0], *row[3:]] for row in (header, *rows))
    tables = [aligned([header, *rows]), aligned([short_header, *short_rows]), stacked(short_header, short_rows)]
    return next((table for table in tables if len(max(table, key=len)) <= width), tables[-1])


def _error(cell: Preset) -> str:
    if cell.paper_error is None:
        return "-"
    return f"{cell.paper_error:.1f}" + ("" if cell.paper_spread is None else f" ± {cell.paper_spread:g}")


def _detail(cell: Preset) -> str:
    flag = " --as-coded" if cell.as_coded else ""
    lines = [f"{cell.name} --algorithm {cell.algorithm}{flag}", f"  {ALGORITHMS[cell.algorithm]}"]
    if cell.paper_error is None:
        lines.append("  not in the paper")
    else:
        lines.append(f"  paper: {_error(cell)} % test error")
    lines += ["", *_fields(cell)]
    if cell.notes:
        lines += ["", "  ours, not the paper's:", *(f"    {name}: {reason}" for name, reason in cell.notes)]
    if cell.coded:
        lines += ["", "  the authors' program's, not the paper's:"]
        lines += [f"    {name}: {reason}" for name, reason in cell.coded]
    elif cell.algorithm in COLUMNS:
        lines += ["", *_as_coded(preset(cell.name, cell.algorithm, as_coded=True))]
    return "\n".join(lines)


def _fields(cell: Preset) -> list[str]:
    """Every field that the cell makes use of, with whose value it is where that is not the paper's."""
    whose = {field: "ours" for field, _ in cell.notes} | {field: "program" for field, _ in cell.coded}
    table = []
    for field in dataclasses.fields(cell):
        if field.name in ("name", "algorithm", "as_coded", "notes", "coded", "paper_error", "paper_spread"):
            continue
        value = getattr(cell, field.name)
        used = field.default is dataclasses.MISSING or value != field.default or field.name in ("momentum", "nesterov")
        if used or field.name in whose:
            table.append([f"  {field.name}", _value(value, field.name), whose.get(field.name, "")])
    table.append(["  passes over the data", str(cell.passes), ""])
    return [line.rstrip() for line in aligned(table)]


def _as_coded(cell: Preset) -> list[str]:
    """In what the authors' program differs, field by field."""
    if not cell.coded:
        return ["  with --as-coded: the same; nothing of this cell is known to differ in the authors' program"]
    rows = [[f"    {field}", _value(getattr(cell, field), field), reason] for field, reason in cell.coded]
    return ["  with --as-coded, as in the authors' program:", *aligned(rows)]


def _value(value: Any, field: str) -> str:
    if value is None:
        return "automatic" if field == "gamma0" else "-"
    if field == "period_changes":
        return ", ".join(f"{period} from epoch {epoch:g} on" for epoch, period in value)
    if isinstance(value, tuple) and all(isinstance(number, float) for number in value):
        return " ".join(f"{number:g}" for number in value)
    if field == "model_arguments":
        return ", ".join(f"{name}={argument}" for name, argument in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _committee_detail(name: str, setting: dict[str, Any]) -> list[str]:
    return [name, *aligned([[f"  {key}", str(value)] for key, value in setting.items()])]
