"""What results/README.md says beyond its tables is what the committed tables give."""

import importlib.util
import sys
from pathlib import Path

import pytest

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
