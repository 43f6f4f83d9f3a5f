"""The picture of a slice, whatever numbers are in it."""

import dataclasses

import numpy as np

from wideflat import Slice
from wideflat.cards.heat_map import heat_map


def test_the_heat_map_has_a_square_for_each_point_and_survives_an_overflow():
    mean = np.array([[0.0, 1.0, np.inf], [0.5, 0.0, np.nan], [2.0, 4.0, 1.0]])
    found = Slice(np.array([-1.0, 0.0, 1.0]), mean, np.zeros((3, 3)), 0.1, 0.0, np.ones(2), {"metric": "loss"})
    drawing = heat_map(found)
    assert drawing.count("<title>") == 9 and "x 1, y 0: 4 ± 0" in drawing
    flat = dataclasses.replace(found, mean=np.zeros((3, 3)))
    assert heat_map(flat).count("#440154") >= 9
