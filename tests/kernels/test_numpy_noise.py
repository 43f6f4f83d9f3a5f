"""Without a compiler the same numbers are drawn, whatever they are cut into."""

import pytest
import torch

from wideflat.kernels.library import kernel_is_there
from wideflat.kernels.noise import GaussianNoise
from wideflat.kernels.numpy_noise import CHUNK, SERIAL


def by_numpy(seed, step, start, count):
    """Without the kernel, in one piece."""
    z = torch.zeros(count)
    noise = GaussianNoise(seed)
    noise._by_numpy.add_([z], noise._first(step), [start], noise._tail_key(step), alpha=1.0)
    return z


@pytest.mark.skipif(not kernel_is_there(torch.zeros(1)), reason="no C compiler here")
@pytest.mark.parametrize("count", [1, 5, 1023, 1025, 3_000_001])
def test_the_kernel_and_numpy_draw_the_same(count):
    z = by_numpy(4, 9, 0, count)
    assert torch.equal(GaussianNoise(4).fill(torch.empty(count), step=9), z)
    assert torch.equal(GaussianNoise(4)(9, 0, count), z)
    assert torch.equal(GaussianNoise(4)(9, 2**40 + 3, min(count, 5000)), by_numpy(4, 9, 2**40 + 3, min(count, 5000)))
    assert count < 10**6 or z.abs().max() > 4.39  # the largest there was when 16 bits were all


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 3, 700, CHUNK, CHUNK + 1, 3 * CHUNK + 77])
def test_filling_without_a_compiler(count, dtype):
    """The tails come at the end: also where the weights are overwritten, and for every type."""
    z = by_numpy(4, 9, 0, count).to(dtype) if count else torch.empty(0, dtype=dtype)
    weights = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)
    noise, out = GaussianNoise(4), torch.empty(count, dtype=dtype)
    stream = noise._first(9), noise._tail_key(9)
    noise._by_numpy.fill(out, None, *stream)
    assert torch.equal(out, z)
    noise._by_numpy.fill(out, weights, *stream)
    assert torch.equal(out, z * weights)
    assert torch.equal(
        GaussianNoise(4).fill(torch.empty_like(out), weights, step=9), out
    )  # by the kernel, if it is there
    noise._by_numpy.fill(weights, weights, *stream)
    assert torch.equal(weights, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_many_tensors_at_once_are_each_alone(dtype):
    """The tails of all of them are put right together: some have none, some begin within a word."""
    sizes = [3, 0, 5, SERIAL, CHUNK - 3, 1, CHUNK + 2, 2 * CHUNK + 9, 700]
    places = [1, 4, 2**40 + 3, 9, 10**6 + 3, 7, 2, 10**7 + 1, 5 * 10**6]
    noise = GaussianNoise(8)
    start = [torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype) for n in sizes]
    together, alone = [t.clone() for t in start], [t.clone() for t in start]
    noise._by_numpy.add_(together, noise._first(6), places, noise._tail_key(6), alpha=0.3)
    for t, place in zip(alone, places, strict=True):
        noise._by_numpy.add_([t], noise._first(6), [place], noise._tail_key(6), alpha=0.3)
    expected = [t + 0 for t in start]
    for t, place in zip(expected, places, strict=True):
        t.add_(by_numpy(8, 6, place, t.numel()), alpha=0.3)
    for a, b, c in zip(together, alone, expected, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("where", ["in the body", "between the chunks"])
def test_an_interrupted_draw_leaves_the_generator_where_it_knows_it_to_be(where, monkeypatch):
    from wideflat.kernels import numpy_noise

    noise, z = GaussianNoise(3), torch.zeros(3 * CHUNK)
    looked_up, calls = numpy_noise._looked_up, []

    def fails(*arguments):
        calls.append(1)
        if len(calls) == (1 if where == "in the body" else 3):
            raise KeyboardInterrupt
        return looked_up(*arguments)

    monkeypatch.setattr(numpy_noise, "_looked_up", fails)
    with pytest.raises(KeyboardInterrupt):
        noise._by_numpy.add_([z], noise._first(2), [0], noise._tail_key(2), alpha=1.0)
    monkeypatch.undo()
    again = torch.zeros(1000)
    noise._by_numpy.add_([again], noise._first(5), [11], noise._tail_key(5), alpha=1.0)
    assert torch.equal(again, by_numpy(3, 5, 11, 1000))
