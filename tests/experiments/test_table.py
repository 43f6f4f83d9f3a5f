import math

import numpy as np
import pytest

from wideflat.experiments.table import Table


def test_round_trip_is_exact(tmp_path):
    table = Table(["setting", "n", "value", "solved"], provenance={"commit": "abc", "n": 3})
    table.add(setting="a, b", n=np.int64(3), value=np.float64(0.1) + 0.2, solved=True)
    table.add(setting="c", value=math.inf)
    table.add(setting="d", value=math.nan, solved=False)
    table.save(tmp_path / "t.csv")
    read = Table.load(tmp_path / "t.csv")
    assert read.columns == table.columns and read.provenance == table.provenance
    assert read.rows[:2] == table.rows[:2] == [["a, b", 3, 0.1 + 0.2, True], ["c", None, math.inf, None]]
    assert math.isnan(read.rows[2][2]) and read.rows[2][3] is False


def test_unknown_columns_are_refused():
    with pytest.raises(ValueError, match="no column"):
        Table(["a"]).add(b=1)


def test_a_truncated_table_is_named(tmp_path):
    table = Table(["a", "b"], [[1, 2], [3, 4]])
    table.save(tmp_path / "t.csv")
    text = (tmp_path / "t.csv").read_text()
    (tmp_path / "t.csv").write_text(text[:-3])
    with pytest.raises(ValueError, match=r"t\.csv is not a table of results"):
        Table.load(tmp_path / "t.csv")
    (tmp_path / "t.json").unlink()
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(FileNotFoundError, match=r"t\.json is missing"):
        Table.load(tmp_path / "t.csv")


def test_join():
    joined = Table.join([Table(["a"], [[1]], {"x": 1}), Table(["a"], [[2]], {"y": 2})])
    assert joined["a"].tolist() == [1, 2] and joined.provenance == {"x": 1, "y": 2}
    with pytest.raises(ValueError, match="different columns"):
        Table.join([Table(["a"]), Table(["b"])])
