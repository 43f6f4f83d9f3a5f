"""The page of a card: one file, offline, every section, everything escaped."""

import dataclasses
import re

import numpy as np

from wideflat import ShiftProfile
from wideflat.cards.card import Entry
from wideflat.cards.page import verdict


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


def test_a_change_that_does_what_noise_does_is_called_so_also_without_error_bars():
    zero = np.zeros(1)
    found = ShiftProfile(zero, zero, zero, 0.5, 0.1, zero, zero, zero, zero, zero, None, None, "prune")
    assert verdict(found, 0) == "as noise"
    found.mean = np.ones(1)
    assert verdict(found, 0) == "worse than noise"
