"""Recompute from the committed tables what the pages in results/ say about Figures 1, 6 and 7 beyond them.

    python tools/recompute_results.py [RESULTS]

Differences between settings are taken within training subsets. Their mean has two standard errors: over restarts (for
these subsets) and over subsets (for another subset of the same kind, of which there are only three).
"""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

RESULTS = Path(__file__).parent.parent / "results"
SUBSETS = (0, 1, 2)
SETTINGS = ("sgd-fast", "sgd-slow", "rsgd-fast", "esgd", "rsgd-slow")
DROPOUTS = ("0", "0.1", "0.2", "0.3", "0.4")
#: Columns of the tables of restarts, and what they are multiplied with: percentage points, and Phi in units of 1e-3.
MEASURES = {"test_error": 100, "balanced_test_error": 100, "energy": 100, "phi_bp": 1000, "phi_ep": 1000}
#: Test images of the two classes.
COATS, DRESSES = 603, 74


class Rows:
    """A table of results: ``rows("test_error", subset=0, setting="esgd")`` is a column of some of its rows."""

    def __init__(self, path: Path) -> None:
        with path.open(newline="") as file:
            self.rows = list(csv.DictReader(file))

    def __call__(self, column: str, **where: object) -> np.ndarray:
        """A column of the rows that have these values; NaN where the table is blank."""
        chosen = [row for row in self.rows if all(row[name] == str(value) for name, value in where.items())]
        return np.array([float(row[column]) if row[column] else np.nan for row in chosen])


@dataclass(frozen=True)
class Difference:
    """A difference between two settings in each subset where both are defined, and its mean."""

    by_subset: np.ndarray
    over_restarts: float

    @property
    def mean(self) -> float:
        """Over the subsets."""
        return float(self.by_subset.mean())

    @property
    def over_subsets(self) -> float:
        """The standard error of the mean, from how the subsets differ."""
        return float(stats.sem(self.by_subset))

    @property
    def p(self) -> float:
        """Of no difference, by Student's t over the subsets."""
        return float(stats.ttest_1samp(self.by_subset, 0).pvalue)

    def __str__(self) -> str:
        parts = ", ".join(f"{value:+.2f}" for value in self.by_subset)
        return f"{parts} | {self.mean:+.2f} | {self.over_restarts:.2f} | {self.over_subsets:.2f} | {self.p:.2f}"


def difference(rows: Rows, measure: str, setting: str, against: str) -> Difference:
    """``setting`` minus ``against`` within subsets; subsets with fewer than two values of either are left out."""
    means, variance = [], 0.0
    for subset in SUBSETS:
        pair = [MEASURES[measure] * rows(measure, setting=name, subset=subset) for name in (setting, against)]
        pair = [values[np.isfinite(values)] for values in pair]
        if min(map(len, pair)) >= 2:
            means.append(pair[0].mean() - pair[1].mean())
            variance += sum(values.var(ddof=1) / len(values) for values in pair)
    return Difference(np.array(means), float(np.sqrt(variance)) / len(means))


def by_class(rows: Rows, setting: str) -> tuple[float, float]:
    """The mean error (%) on Coat and on Dress, from error and balanced error."""
    error, balanced = 100 * rows("test_error", setting=setting), 100 * rows("balanced_test_error", setting=setting)
    coat = ((COATS + DRESSES) * error - 2 * DRESSES * balanced) / (COATS - DRESSES)
    return float(coat.mean()), float((2 * balanced - coat).mean())


def rank_correlation(
    rows: Rows, groups: list[dict[str, object]], x: str, y: str, fractions: bool = False
) -> tuple[float, int]:
    """Correlation of the ranks within each group (of at least three), over all groups together; and the number.

    With ``fractions`` ranks are divided by the number of their group, of at least two: small groups weigh more then.
    """
    ranks: list[np.ndarray] = []
    for where in groups:
        pair = np.stack([rows(x, **where), rows(y, **where)])
        pair = pair[:, np.isfinite(pair).all(0)]
        count = pair.shape[1]
        if count >= (2 if fractions else 3):
            ranked = stats.rankdata(pair, axis=1) / (count if fractions else 1)
            ranks.append(ranked - ranked.mean(1, keepdims=True))
    joined = np.concatenate(ranks, axis=1)
    return float(np.corrcoef(joined)[0, 1]), joined.shape[1]


def without_the_sharpest(networks: Rows) -> tuple[float, float, float]:
    """Pearson's r of local energy and test error over all networks, without the largest local energy; Spearman's."""
    energy, error = networks("delta_e"), networks("test_error")
    rest = np.arange(len(energy)) != energy.argmax()
    return (
        float(stats.pearsonr(energy, error).statistic),
        float(stats.pearsonr(energy[rest], error[rest]).statistic),
        float(stats.spearmanr(energy, error).statistic),
    )


def _both(rows: Rows, groups: list[dict[str, object]]) -> str:
    """The correlation of Phi and test error by ranks, and by ranks as fractions."""
    columns = groups, "phi_bp", "test_error"
    return "{:+.2f} | n = {} | {:+.2f} | n = {}".format(
        *rank_correlation(rows, *columns), *rank_correlation(rows, *columns, fractions=True)
    )


def figure1(folder: Path) -> list[str]:
    """Differences against SGD slow with both errors, errors by class, correlations, what is left unsolved."""
    rows = Rows(folder / "fig1" / "restarts.csv")
    lines = [
        "against SGD slow: measure | setting | by subset | mean | se over restarts | se over subsets | p (subsets)"
    ]
    for measure in MEASURES:
        for setting in ("rsgd-fast", "esgd", "rsgd-slow", "sgd-fast"):
            lines.append(f"{measure} | {setting} | {difference(rows, measure, setting, 'sgd-slow')}")
    lines += ["", "error (%) on Coat, on Dress"]
    lines += ["{} | {:.1f} | {:.1f}".format(setting, *by_class(rows, setting)) for setting in SETTINGS]
    lines += ["", "rank correlation of Phi (BP) and test error; with ranks divided by the number of the subset"]
    groups = [{"setting": setting, "subset": subset} for setting in SETTINGS for subset in SUBSETS]
    for setting in SETTINGS:
        own = [where for where in groups if where["setting"] == setting]
        lines.append(f"within subsets, {setting} | {_both(rows, own)}")
    lines.append(f"within subsets, all settings | {_both(rows, [{'subset': subset} for subset in SUBSETS])}")
    lines.append("all together | {:+.2f} | n = {}".format(*rank_correlation(rows, [{}], "phi_bp", "test_error")))
    lines += ["", "rank correlation of local energy and test error"]
    left, energy, error = rows("train_errors"), rows("energy"), rows("test_error")
    for name, chosen in (("all", left >= 0), ("without the collapsed", left < 200), ("without errors", left == 0)):
        r = stats.spearmanr(energy[chosen], error[chosen]).statistic
        lines.append(f"{name} | {r:+.2f} | n = {chosen.sum()}")
    lines += ["", "restarts with training errors left, and with exactly one"]
    for setting in ("sgd-slow", "esgd"):
        left = rows("train_errors", setting=setting)
        lines.append(f"{setting} | {(left > 0).sum()} | {(left == 1).sum()}")
    return lines


def over_subsets(rows: Rows, measure: str, setting: str, **where: object) -> tuple[float, float, int]:
    """``setting`` minus SGD slow, mean over subsets of the differences of their means; half its 95 % interval; n."""
    factor, differences = MEASURES[measure], []
    for subset in range(10):
        pair = [factor * rows(measure, setting=name, subset=subset, **where) for name in (setting, "sgd-slow")]
        pair = [values[np.isfinite(values)] for values in pair]
        if all(map(len, pair)):
            differences.append(pair[0].mean() - pair[1].mean())
    n = len(differences)
    if n < 2:
        return np.nan, np.nan, n
    return float(np.mean(differences)), float(stats.t.ppf(0.975, n - 1) * stats.sem(differences)), n


def figure1_over_subsets(folder: Path) -> list[str]:
    """Both draws, ten subsets each: means, differences against SGD slow, Phi without the pattern that stays wrong."""
    rows, lines = Rows(folder / "fig1-subsets" / "restarts.csv"), ["draw | setting | n | one wrong | means"]
    for draw in ("balanced", "random"):
        for setting in SETTINGS[:4]:
            left = rows("train_errors", draw=draw, setting=setting)
            if not len(left):
                continue
            columns = [factor * rows(name, draw=draw, setting=setting) for name, factor in list(MEASURES.items())[:4]]
            means = ", ".join(f"{np.nanmean(column):.2f}" for column in columns)
            lines.append(f"{draw} | {setting} | {len(left)} | {(left == 1).sum()} | {means}")
    lines.append("against SGD slow: draw | measure | setting | mean ± half of the 95 % interval | subsets")
    for draw in ("balanced", "random"):
        for measure in list(MEASURES)[:4]:
            for setting in ("sgd-fast", "rsgd-fast", "esgd"):
                mean, half, n = over_subsets(rows, measure, setting, draw=draw)
                if n > 1:
                    lines.append(f"{draw} | {measure} | {setting} | {mean:+.2f} ± {half:.2f} | {n}")
    without = Rows(folder / "fig1-subsets" / "without_one.csv")
    lines.append("Phi (BP) without the pattern that stays wrong: subset | SGD fast, SGD slow, rSGD fast, eSGD")
    for subset in (0, 2, 4):
        phis = [1000 * without("phi_bp", setting=setting, subset=subset).mean() for setting in SETTINGS[:4]]
        lines.append(f"{subset} | " + ", ".join(f"{phi:.2f}" for phi in phis))
    return lines


def figure6(folder: Path) -> list[str]:
    """Test error by dropout and subset, and what dropout 0.4 changes."""
    rows = Rows(folder / "fig6" / "restarts.csv")
    lines = ["test error (%) for dropout 0 to 0.4"]
    for subset in SUBSETS:
        errors = [100 * rows("test_error", setting=f"dropout-{rate}", subset=subset).mean() for rate in DROPOUTS]
        lines.append(f"subset {subset} | " + ", ".join(f"{error:.2f}" for error in errors))
    lines.append(f"0.4 against 0 | {difference(rows, 'test_error', 'dropout-0.4', 'dropout-0')}")
    return lines


def figure7(folder: Path) -> list[str]:
    """The correlation with and without the network of the largest local energy."""
    lines = ["Pearson | without the sharpest network | Spearman"]
    for name in ("fig7-sigma-0.1", "fig7-sigma-0.2", "fig7-sigma-0.3", "fig7"):
        numbers = without_the_sharpest(Rows(folder / name / "networks.csv"))
        lines.append(f"{name} | " + " | ".join(f"{number:.2f}" for number in numbers))
    return lines


def main(arguments: list[str]) -> int:
    """Print everything."""
    folder = Path(arguments[0]) if arguments else RESULTS
    for title, lines in (
        ("Figure 1", figure1(folder)),
        ("Figure 1 over ten subsets", figure1_over_subsets(folder)),
        ("Figure 6", figure6(folder)),
        ("Figure 7", figure7(folder)),
    ):
        print(f"## {title}", *lines, "", sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
