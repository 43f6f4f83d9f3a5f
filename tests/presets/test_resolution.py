"""From the names of a row and an algorithm to the settings."""

import pytest

from wideflat.algorithms import ALGORITHMS
from wideflat.presets import COLUMNS, PRESETS, preset


def test_wrong_names_suggest_the_nearest():
    with pytest.raises(ValueError, match=r"there is no preset 'cifar10-resnet-18'\. Did you mean 'cifar10-resnet18'"):
        preset("cifar10-resnet-18")
    with pytest.raises(ValueError, match="algorithm must be one of sgd, rsgd"):
        preset("cifar10-resnet18", "adam")
    with pytest.raises(TypeError, match="name must be the name of a preset, got 3"):
        preset(3)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_columns_are_the_papers_and_the_others_are_marked_as_ours(name, algorithm):
    cell = preset(name, algorithm)
    assert (cell.name, cell.algorithm) == (name, algorithm)
    if algorithm in COLUMNS:
        assert cell is PRESETS[name][algorithm]
    else:
        assert cell.paper_error is None and "ours" in dict(cell.notes)["algorithm"]
