"""The processes that share a measurement: one counts as rank 0 of 1, several hear of each other in order."""

from wideflat.energy.ranks import gathered, rank, world_size


def heard():
    return rank(), world_size(), gathered("x" * rank())


def test_one_process_is_all_there_are():
    value = {"a": [1]}
    assert (rank(), world_size()) == (0, 1) and gathered(value)[0] is value


def test_several_hear_of_each_other_in_the_order_of_their_ranks(ranks):
    assert ranks(heard, 3) == [(a, 3, ["", "x", "xx"]) for a in range(3)]
