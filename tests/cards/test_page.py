"""The page of a card: one file, offline, every section, everything escaped."""

import dataclasses
import re

import numpy as np

from wideflat import ShiftProfile, Slice
from wideflat.cards.card import Entry
from wideflat.cards.heat_map import heat_map
from wideflat.cards.page import verdict
from wideflat.cards.summary import bounds, crossed
from wideflat.volume.volume import Integration


def test_the_page_has_every_section_and_loads_nothing(measured):
    page = measured.html()
    for title in ("At the weights", "Under noise", "Layer by layer", "In the worst case", "Curvature", "A picture",
                  "Room around it", "How it was measured"):  # fmt: skip
        assert f">{title}</h2>" in page
    assert "net &lt;1&gt;" in page and not re.search(r'(src|href)="https?:', page)
    assert "default-src 'none'" in page and page.count('id="card"') == 1
    assert "prefers-color-scheme: dark" in page


def test_a_comparison_and_a_refusal_are_shown(measured):
    entries = {**measured.entries, "spectrum": Entry(reason="no <second> derivative")}
    card = dataclasses.replace(measured, entries=entries, comparison="Flatter than b & c.")
    page = card.html()
    assert "Flatter than b &amp; c." in page and "No spectrum of the Hessian: no &lt;second&gt; derivative" in page


def test_the_heat_map_has_a_square_for_each_point_and_survives_an_overflow():
    mean = np.array([[0.0, 1.0, np.inf], [0.5, 0.0, np.nan], [2.0, 4.0, 1.0]])
    found = Slice(np.array([-1.0, 0.0, 1.0]), mean, np.zeros((3, 3)), 0.1, 0.0, np.ones(2), {"metric": "loss"})
    drawing = heat_map(found)
    assert drawing.count("<title>") == 9 and "x 1, y 0: 4 ± 0" in drawing
    flat = dataclasses.replace(found, mean=np.zeros((3, 3)))
    assert heat_map(flat).count("#440154") >= 9


def test_a_change_that_does_what_noise_does_is_called_so_also_without_error_bars():
    zero = np.zeros(1)
    found = ShiftProfile(zero, zero, zero, 0.5, 0.1, zero, zero, zero, zero, zero, None, None, "prune")
    assert verdict(found, 0) == "as noise"
    found.mean = np.ones(1)
    assert verdict(found, 0) == "worse than noise"


def test_bounds_that_noise_has_put_the_wrong_way_round_are_explained():
    near = Integration(0.1, 1.0, np.nan, np.nan, np.nan, lower=-0.47, lower_stderr=0.01, upper=-0.53, upper_stderr=0.03)
    assert bounds(near) == ("-0.470 ± 0.010", "-0.530 ± 0.030") and "closer to each other" in crossed(near)
    far = dataclasses.replace(near, lower=0.0)
    assert "by more than their errors" in crossed(far) and crossed(dataclasses.replace(near, upper=-0.4)) == ""
