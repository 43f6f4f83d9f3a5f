from wideflat.algorithms import ALGORITHMS as RECORDS
from wideflat.report.palette import ALGORITHMS, looks


def test_every_algorithm_has_a_colour_of_its_own():
    assert set(RECORDS) == set(ALGORITHMS)
    assert len(set(ALGORITHMS.values())) == len(ALGORITHMS)


def test_strangers_take_no_colour_of_an_algorithm_that_is_there():
    found = looks(["mine", "sgd", "yours"])
    assert len({look.color for look in found}) == 3


def test_nine_of_one_algorithm_share_its_colour():
    found = looks([f"esgd {i}" for i in range(9)])
    assert {look.color for look in found} == {ALGORITHMS["esgd"]} and len({look.dash for look in found}) == 4
