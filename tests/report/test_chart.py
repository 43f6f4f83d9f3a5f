import csv
import io
import xml.etree.ElementTree as ElementTree

import pytest

from wideflat.report.chart import Chart, Series
from wideflat.report.page import Page


def example(kind="line"):
    return Chart(
        "profile",
        "Local <energy>",
        "sigma",
        "dE",
        [
            Series("SGD & co", [0.0, 0.1, 0.2], [0.0, 0.5, float("nan")], error=[0.0, 0.1, 0.1]),
            Series("eSGD", [0.0, 0.1, 0.2], [0.0, 0.2, 0.4]),
        ],
        kind=kind,
    )


@pytest.mark.parametrize("kind", ["line", "step", "points", "distribution"])
def test_svg_is_well_formed_with_unique_ids_and_one_group_a_series(kind):
    svg = example(kind).svg()
    root = ElementTree.fromstring(svg)
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    assert all(identifier.startswith("profile-") for identifier in ids)
    for index in (0, 1):
        assert any(identifier.startswith(f"profile-series-{index}-") for identifier in ids)
    references = [element.get("{http://www.w3.org/1999/xlink}href") for element in root.iter()]
    assert {reference[1:] for reference in references if reference} <= set(ids)
    assert "currentColor" in svg


def test_svg_is_the_same_every_time():
    assert example().svg() == example().svg()


def test_csv_holds_every_point():
    rows = list(csv.DictReader(io.StringIO(example().csv())))
    assert len(rows) == 6
    assert rows[1] == {"series": "SGD & co", "x": "0.1", "y": "0.5", "error": "0.1", "x_error": "", "n": ""}


def test_a_distribution_has_no_abscissae():
    chart = Chart("test-error", "Test error", "", "error", [Series("SGD", [], [0.1, 0.2])], kind="distribution")
    assert chart.csv().splitlines()[1:] == ["SGD,,0.1,,,", "SGD,,0.2,,,"]


def test_save_writes_table_and_pictures(tmp_path):
    paths = example().save(tmp_path)
    assert [path.name for path in paths] == ["profile.csv", "profile.svg", "profile.png"]
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_names_that_are_not_file_safe_are_refused():
    with pytest.raises(ValueError, match="file-safe"):
        Chart("../x", "", "", "")


@pytest.mark.parametrize(("values", "ticks"), [([2.30, 2.34], "2.32"), ([3.0, 40.0], "20"), ([1e-4, 0.5], "0.001")])
def test_logarithmic_axes_have_plain_numbers(values, ticks):
    svg = Chart("loss", "Loss", "x", "y", [Series("SGD", [0, 1], values)], y_scale="log").svg()
    assert f">{ticks}<" in svg and "10^" not in svg and "mathdefault" not in svg


def test_a_lonely_series_says_whose_it_is():
    chart = Chart("one", "One", "x", "y", [Series("rSGD", [0, 1], [1, 2], n=3)])
    page = Page("One")
    page.charts(chart)
    assert "rSGD (n = 3)" in chart.svg(legend=True) and "rSGD (n = 3)</button>" in page.html()
