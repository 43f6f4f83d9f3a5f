"""What results/README.md says beyond its tables is what the committed tables give."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).parent.parent
TEXT = " ".join((ROOT / "results" / "README.md").read_text().split())


@pytest.fixture(scope="module")
def recompute():
    """The tool as a module."""
    spec = importlib.util.spec_from_file_location("recompute_results", ROOT / "tools" / "recompute_results.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # where dataclasses look their annotations up
        spec.loader.exec_module(module)
    return module


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
    for algorithm, name in (("sgd", "SGD"), ("esgd", "eSGD")):
        folder = ROOT / f"results/table1-original/{algorithm}-seed0"
        last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
        assert last["passes"] == 300 and f"{name} {100 * last['test_error']:.2f}" in TEXT
        profile = json.loads((folder / "local_energy.json").read_text())
        pairs = zip(profile["mean"], profile["stderr"], strict=True)
        assert ", ".join(f"{100 * mean:.2f} ± {100 * error:.2f}" for mean, error in pairs) in TEXT
    about = [json.loads((ROOT / f"results/table1-original/{a}-seed0/model.json").read_text()) for a in ("sgd", "esgd")]
    first, second = (100 * found["about"]["train_error"] for found in about)
    assert f"training error {first:.2f} and {second:.2f} %" in TEXT


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
