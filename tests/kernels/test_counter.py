"""Normal numbers by torch's operations: their distribution, and that they are a function of the place."""

import pytest
import torch

from wideflat.kernels.counter import key_of, normal, table_on, words


def test_words_are_those_of_splitmix64():
    # Its published first numbers from the state 1234567.
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [word % 2**64 for word in words(torch.arange(4), 1234567).tolist()] == first


@pytest.mark.parametrize("seed", [0, 7, -7, 2**70])
def test_a_step_in_a_tensor_has_the_same_key(seed):
    assert int(key_of(seed, torch.tensor(9))) == key_of(seed, 9)
    assert len({key_of(seed, step, stream) for step in range(10) for stream in range(3)}) == 30


def test_the_distribution():
    z = normal(torch.arange(4_000_000), key_of(seed=3, step=1)).double()
    count = len(z)
    assert abs(z.mean().item()) < 4 / count**0.5
    assert abs(z.square().mean().item() - 1) < 4 * (2 / count) ** 0.5
    assert z.pow(4).mean().item() == pytest.approx(3, abs=4 * (96 / count) ** 0.5)
    for beyond in (0.5, 1.0, 2.0, 3.0, 4.0):
        expected = count * torch.special.erfc(torch.tensor(beyond / 2**0.5, dtype=torch.float64)).item()
        assert abs((z.abs() > beyond).sum().item() - expected) < 4 * expected**0.5
    assert abs((z[1:] * z[:-1]).mean().item()) < 4 / count**0.5  # neighbours are independent


def test_the_table_is_a_whole_distribution():
    table = table_on(torch.device("cpu"))
    assert (table.diff() <= 0).all() and table[0] > 7.5 and table[-1] == 0


def test_any_part_of_it_alone():
    key = key_of(seed=4, step=2)
    whole = normal(torch.arange(40), key)
    assert torch.equal(normal(torch.arange(12, 30), key), whole[12:30])
    assert not torch.equal(normal(torch.arange(40), key_of(seed=4, step=3)), whole)
    assert not torch.equal(normal(torch.arange(40), key_of(seed=4, step=2, stream=1)), whole)


def test_far_places_are_no_others():
    far = 2**45
    assert torch.isfinite(normal(torch.arange(far, far + 5), key_of(1, 1))).all()
    assert not torch.equal(normal(torch.arange(far, far + 5), 1), normal(torch.arange(5), 1))
