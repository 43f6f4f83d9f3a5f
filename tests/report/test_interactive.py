import json
import math

import pytest

from wideflat.report.chart import Chart, Series
from wideflat.report.interactive import figure, figure_json

KINDS = ["line", "step", "points", "distribution"]


def chart(kind):
    series = [
        Series("SGD <b>", [0.0, 0.1, 0.2], [1.0, 0.5, math.nan], error=[0.0, 0.1, math.nan], n=[3, 3, 2]),
        Series("eSGD", [0.0, 0.1, 0.2], [1.0, 0.2, 0.4]),
    ]
    return Chart("profile", "Local <energy>", "σ", "δE", series, kind=kind, y_scale="log")


@pytest.mark.parametrize("kind", KINDS)
def test_plotly_accepts_the_figure_and_json_can_stand_in_a_page(kind):
    objects = pytest.importorskip("plotly.graph_objects")
    found = objects.Figure(figure(chart(kind)))
    assert {trace.meta["series"] for trace in found.data} == {0, 1}
    assert found.layout.yaxis.type == "log"
    text = figure_json(chart(kind))
    assert "<" not in text and "NaN" not in text
    assert json.loads(text) == figure(chart(kind))


def test_a_point_says_its_error_and_n():
    line = next(trace for trace in figure(chart("line"))["data"] if trace["meta"] == {"series": 0, "part": "line"})
    assert [words for words, _ in line["customdata"]] == [" ± 0 (n = 3)", " ± 0.1 (n = 3)", " (n = 2)"]
    assert "SGD &lt;b&gt;" in line["hovertemplate"] and line["y"] == [1.0, 0.5, None]


def test_the_band_goes_around_the_curve_where_it_is():
    band = next(trace for trace in figure(chart("line"))["data"] if trace["meta"]["part"] == "band")
    assert band["x"] == [0.0, 0.1, 0.1, 0.0] and band["y"] == pytest.approx([1.0, 0.6, 0.4, 1.0])


def test_one_value_has_no_spread():
    one = Chart("c", "t", "", "y", [Series("SGD", [], [0.5])], kind="distribution")
    mean = next(trace for trace in figure(one)["data"] if trace["meta"]["part"] == "mean")
    assert "error_y" not in mean and "no spread" in mean["hovertemplate"]


def test_an_algorithm_has_one_colour_in_every_figure_and_still_picture():
    alone = figure(Chart("a", "", "", "", [Series("eSGD", [0], [1])]))["data"][0]["line"]["color"]
    last = figure(Chart("b", "", "", "", [Series("SGD", [0], [1]), Series("esgd", [0], [1])]))["data"][1]
    assert alone == last["line"]["color"]
    drawn = Chart("c", "", "x", "y", [Series("rSGD", [0, 1], [1, 2]), Series("esgd, 3 seeds", [0, 1], [1, 2])])
    assert drawn.svg().count(alone) and drawn.looks()[1].color == alone
