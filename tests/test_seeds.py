import numpy as np

from wideflat.seeds import derive_seed


def test_seeds_do_not_collide():
    seeds = {derive_seed(a, b, c) for a in range(20) for b in range(20) for c in range(20)}
    assert len(seeds) == 8000 and all(0 <= seed < 2**63 for seed in seeds)


def test_a_number_of_numpy_is_that_number():
    assert derive_seed(np.int64(3), "noise", np.int32(5)) == derive_seed(3, "noise", 5)
