"""What the pages in results/ say beyond their tables is what the committed tables give."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).parent.parent
SUMMARY = (ROOT / "results" / "README.md").read_text()
TEXT = " ".join(" ".join(path.read_text() for path in sorted((ROOT / "results").glob("*.md"))).split())


def load(name):
    """A tool as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # where dataclasses look their annotations up
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def recompute():
    return load("recompute_results")


@pytest.fixture(scope="module")
def restarts(recompute):
    return recompute.Rows(ROOT / "results" / "fig1" / "restarts.csv")


@pytest.mark.parametrize("setting", ["rsgd-fast", "esgd"])
@pytest.mark.parametrize("measure", ["test_error", "balanced_test_error", "energy", "phi_bp"])
def test_differences_within_subsets(recompute, restarts, measure, setting):
    difference = recompute.difference(restarts, measure, setting, "sgd-slow")
    assert str(difference) in TEXT
    assert f"{difference.mean:+.2f} ± {difference.over_restarts:.2f}" in TEXT or measure == "balanced_test_error"


def test_errors_by_class(recompute, restarts):
    names = {"sgd-fast": "SGD fast", "sgd-slow": "SGD slow", "rsgd-fast": "rSGD fast", "esgd": "eSGD"}
    for setting, name in names.items():
        coat, dress = recompute.by_class(restarts, setting)
        assert f"{name} {coat:.1f} and {dress:.1f}" in TEXT
        error = (recompute.COATS * coat + recompute.DRESSES * dress) / (recompute.COATS + recompute.DRESSES)
        assert error == pytest.approx(100 * restarts("test_error", setting=setting).mean())
        assert (coat + dress) / 2 == pytest.approx(100 * restarts("balanced_test_error", setting=setting).mean())


def test_correlations(recompute, restarts):
    for setting, words in {
        "sgd-fast": "{:+.2f} (SGD fast, n = {})",
        "sgd-slow": "{:+.2f} (SGD slow, {})",
        "rsgd-fast": "{:+.2f} (rSGD fast, {})",
        "esgd": "{:+.2f} (eSGD, {})",
        "rsgd-slow": "{:+.2f} (rSGD slow, {})",
    }.items():
        groups = [{"setting": setting, "subset": subset} for subset in recompute.SUBSETS]
        assert words.format(*recompute.rank_correlation(restarts, groups, "phi_bp", "test_error")) in TEXT
    groups = [{"subset": subset} for subset in recompute.SUBSETS]
    r, _ = recompute.rank_correlation(restarts, groups, "phi_bp", "test_error")
    assert f"have {r:.2f} over all settings" in TEXT
    fractions = [
        recompute.rank_correlation(restarts, where, "phi_bp", "test_error", fractions=True)[0]
        for where in (*([{"setting": s, "subset": u} for u in recompute.SUBSETS] for s in recompute.SETTINGS), groups)
    ]
    words = "it is {:+.2f}, {:+.2f}, {:+.2f}, {:+.2f} and {:+.2f}, and {:+.2f} over all settings"
    assert words.format(*fractions) in TEXT


def test_everything_is_printed(recompute, capsys):
    assert recompute.main([]) == 0
    text = capsys.readouterr().out
    assert "without the collapsed | +0.22 | n = 245" in text and "+0.22 without the ten collapsed" in TEXT
    assert "without errors | +0.36 | n = 191" in text and "+0.36 among those without errors" in TEXT
    assert "sgd-slow | 22 | 21" in text and "21 of the 22 restarts of SGD slow" in TEXT
    assert "esgd | 32 | 30" in text and "30 of the 32 of eSGD" in TEXT
    assert "-1.64, -0.38, -1.65 | -1.23 | 0.21 | 0.42 | 0.10" in text
    assert "0.21 over restarts and 0.42 over subsets (-1.64, -0.38, -1.65; p = 0.10)" in TEXT
    assert "8.12, 8.36, 8.00, 7.55, 7.73" in text and "8.12, 8.36, 8.00, 7.55, 7.73" in TEXT
    assert "fig7-sigma-0.1 | 0.55 | 0.36 | 0.30" in text and "without it r = 0.36" in TEXT


@pytest.mark.parametrize("setting", ["sgd-fast", "rsgd-fast", "esgd"])
def test_differences_over_ten_subsets(recompute, setting):
    rows = recompute.Rows(ROOT / "results" / "fig1-subsets" / "restarts.csv")
    for draw in ("balanced", "random"):
        for measure in ("test_error", "balanced_test_error", "energy", "phi_bp"):
            mean, half, n = recompute.over_subsets(rows, measure, setting, draw=draw)
            assert f"{mean:+.2f} ± {half:.2f}" + (f" ({n})" if n < 10 else "") in TEXT
    printed = "\n".join(recompute.figure1_over_subsets(ROOT / "results"))
    assert "4 | -3.89, -0.74, -0.34, -0.16" in printed and "-3.89, -0.74, -0.34, -0.16 (4)" in TEXT


def test_table_1_on_the_original_images():
    tool = load("collect_trainings")
    folder = ROOT / "results" / "table1-original"
    assert tool.table(folder, "cifar10-smallconvnet") in (ROOT / "results" / "table1.md").read_text()
    errors = {way: [found.test_error for found in runs] for way, runs in tool.found_in(folder).items()}
    for way, name in (("sgd", "SGD"), ("rsgd", "rSGD"), ("esgd", "eSGD")):
        mean, minus_sgd = np.mean(errors[way]), tool.difference(errors[way], errors["sgd"])
        line = next(line for line in SUMMARY.splitlines() if re.match(rf"\| .*\W{name} \|.* % \|.*seeds \|", line))
        assert f"| {mean:.2f} ± {np.std(errors[way], ddof=1):.2f} %" in line and f"| {len(errors[way])} seeds |" in line
        assert way == "sgd" or f"minus SGD {minus_sgd} |" in line
        assert f"{name} {mean:.2f}" in (ROOT / "README.md").read_text()
    for run in folder.iterdir():
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        about = json.loads((run / "model.json").read_text())["about"]
        assert last["passes"] == 300 and last["test_error"] == about["test_error"]
        line = json.loads((run / "environment.jsonl").read_text().splitlines()[0])
        assert line["host"] == "" and line["commit"]


def test_differences_of_trainings_have_the_interval_of_welch():
    difference = load("collect_trainings").difference
    one, other = [1.0, 2.0, 4.0], [3.0, 5.0, 4.5, 6.0]
    squares = [np.var(values, ddof=1) / len(values) for values in (one, other)]
    freedom = sum(squares) ** 2 / (squares[0] ** 2 / 2 + squares[1] ** 2 / 3)
    mean, half = np.mean(one) - np.mean(other), stats.t.ppf(0.975, freedom) * np.sqrt(sum(squares))
    assert difference(one, other) == f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f})"
    assert difference([1.0], other) == "-3.62"  # no interval from one seed


def test_the_check_of_bf16():
    lines = {
        kind: [
            (ROOT / f"results/bf16-check/{kind}-seed{seed}/metrics.jsonl").read_text().splitlines()[-1]
            for seed in range(3)
        ]
        for kind in ("float32", "bf16")
    }
    errors = {kind: np.array([100 * json.loads(line)["test_error"] for line in found]) for kind, found in lines.items()}
    for kind, values in errors.items():
        assert f"{kind} {', '.join(f'{value:.2f}' for value in values)} %" in TEXT
    difference = errors["bf16"] - errors["float32"]
    half = stats.t.ppf(0.975, 2) * stats.sem(difference)
    apart = stats.t.ppf(0.975, 4) * np.sqrt(sum(values.var(ddof=1) for values in errors.values()) / 3)
    assert f"{difference.mean():.2f} ± {half:.2f} points paired, ± {apart:.2f} unpaired" in TEXT
