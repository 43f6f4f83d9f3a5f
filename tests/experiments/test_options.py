"""Options of the items: only those that were chosen are written down, folders by their name."""

import dataclasses
from pathlib import Path

import pytest

from wideflat.experiments import ITEMS, item
from wideflat.experiments.options import Options, chosen


@dataclasses.dataclass
class Mine(Options):
    data: Path | None = None
    rates: tuple[float, ...] = ()


def test_what_was_chosen_is_recorded_and_a_folder_by_its_name():
    assert chosen(Mine()) == {}
    assert chosen(Mine(seed=0, data=Path("/here/or/there/images"), rates=(0.1,))) == {"data": "images", "rates": (0.1,)}


@pytest.mark.parametrize("name", ITEMS)
def test_every_option_of_every_item_has_a_default_and_says_what_it_is(name):
    options = item(name).options
    assert issubclass(options, Options) and chosen(options()) == {}
    assert options.__doc__ and "Examples:" in options.__doc__
