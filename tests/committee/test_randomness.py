import numpy as np

from wideflat.committee import SETTINGS
from wideflat.committee.randomness import _stream, dropout_mask, generator, order


def test_randomness_is_a_function_of_seed_and_epoch():
    setting = SETTINGS["rsgd-fast"]
    first = order(setting, 3, 7, 50)
    assert first.shape == (10, 50) and np.array_equal(first, order(setting, 3, 7, 50))
    assert all(sorted(row) == list(range(50)) for row in first)
    for other in (order(setting, 4, 7, 50), order(setting, 3, 8, 50)):
        assert not np.array_equal(first, other)
    assert order(SETTINGS["esgd"], 0, 0, 50).shape == (20, 50)
    mask = dropout_mask(setting.replace(dropout=0.25), 0, 0, 1000)
    assert set(np.unique(mask)) == {0.0, 1 / 0.75} and abs((mask == 0).mean() - 0.25) < 0.01


def test_a_generator_that_is_used_again_gives_the_same_numbers():
    for seed, purpose, epoch in [(0, 1, 0), (3, 1, 7), (2**64 - 1, 2, 10**6), (3, 1, 7)]:
        first = generator(seed, purpose, epoch)
        again = _stream(seed, purpose, epoch)
        assert np.array_equal(first.random(7, dtype=np.float32), again.random(7, dtype=np.float32))  # leaves a buffer
        assert np.array_equal(first.permutation(50), again.permutation(50))
