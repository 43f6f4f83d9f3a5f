"""A measurement beside earlier ones: the differences, or why there are none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Compared", "compared"]


@dataclass(frozen=True)
class Compared:
    """What ``--compare`` says of one earlier result.

    Args:
        path: Its file.
        difference: Of the new result and this one; None where it is refused.
        refused: Why.
    """

    path: Path
    difference: Any = None
    refused: str = ""

    def record(self) -> dict[str, Any]:
        """For JSON."""
        if self.difference is None:
            return {"with": self.path, "refused": self.refused}
        columns = ("sigmas", "mean", "stderr", "deviations")
        return {"with": self.path, **{name: getattr(self.difference, name) for name in columns}}

    def __str__(self) -> str:
        if self.difference is None:
            return f"compared with {self.path}: {self.refused}"
        lines = [f"minus {self.path}:", f"{'sigma':>8} {'difference':>11} {'stderr':>10} {'deviations':>10}"]
        found = self.difference
        for row in zip(found.sigmas, found.mean, found.stderr, found.deviations, strict=True):
            lines.append("{:8.4g} {:11.5f} {:10.2g} {:10.1f}".format(*row))
        note = getattr(found, "note", "")
        return "\n".join([*lines, *([note] if note else [])])


def compared(found: Any, paths: Sequence[Path], others: Sequence[Any], force: bool) -> Iterator[Compared]:
    """A profile of noise or a free entropy against others of its kind, which were at these paths."""
    for path, other in zip(paths, others, strict=True):
        try:
            yield Compared(path, found.compare(other, force=force))
        except ValueError as error:
            yield Compared(path, refused=str(error).replace("force=True", "--force"))
