import json

import pytest

from wideflat.experiments import ITEMS, item
from wideflat.experiments.experiment import Comparison, Experiment
from wideflat.experiments.statistics import Shown


def test_every_item_opens_with_its_own_options(tmp_path):
    for name in ITEMS:
        experiment = item(name).open(tmp_path / name, quick=True)
        assert experiment.name == name and isinstance(experiment.options, item(name).options)
        assert experiment.label.startswith("QUICK") and "{" not in experiment.label
        assert item(name).open(tmp_path / name).label == ""
        assert experiment.charts() == [] and experiment.cost()
        assert type(experiment).__mro__[1] is Experiment  # one floor
    with pytest.raises(ValueError, match="there is no item 'fig9'; there are fig1, table1"):
        item("fig9")
    with pytest.raises(TypeError, match="rows"):
        item("fig1").open(tmp_path, rows=("cifar10-resnet18",))


def test_options_are_recorded_and_made_again_from_json(tmp_path):
    """What a table says of its origin opens the same experiment; so does what a worker is told."""
    first = item("fig7").open(tmp_path, True, widths=(4, 4, 4), seed=3, dropouts=(0.0,), data=tmp_path)
    about = json.loads(json.dumps(first.provenance()))
    assert about["options"] == {"seed": 3, "widths": [4, 4, 4], "dropouts": [0.0], "data": tmp_path.name}
    again = item("fig7").open(tmp_path, True, **about["options"])
    assert [cell.name for cell in again.cells] == [cell.name for cell in first.cells]
    assert again.grid.preset(0.5, 8, 0.1, 0.01) == first.grid.preset(0.5, 8, 0.1, 0.01)


def test_records_have_numbers_under_keys():
    rows = [["a", Shown("1.0 ± 0.1", value=1.0, spread=0.1), 3]]
    assert Comparison(["name", "error %", "n"], rows, keys=["name", "error", "n"]).records() == [
        {"name": "a", "error": 1.0, "error_spread": 0.1, "n": 3}
    ]
    assert Comparison(["name", "error %", "n"], rows).records()[0]["error %"] == 1.0
    with pytest.raises(ValueError):
        Comparison(["name", "n"], rows).records()
