"""Gaussian noise that is a function of (seed, step, place): random access, no state to save, and cheap.

The Langevin noise of Entropy-SGD must be the same on every data-parallel rank, and the same after a resume in the
middle of a run. So it is not drawn from a generator that runs along with the training, but computed from where it is
used. The perturbations of the local energy take their noise from here too, because it is cheaper than torch's.

How the numbers are made of random bits: `wideflat.kernels.normal_parts`.
"""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import torch
from torch import Tensor

from wideflat.kernels.library import Source, compile_kernel, is_aligned, kernel_is_there, pointer, threads_for
from wideflat.kernels.normal_parts import body_means, tail_means
from wideflat.kernels.numpy_noise import GOLDEN, MASK, PERIOD, SERIAL, NumpyNoise, mix

__all__ = ["STRIDE", "GaussianNoise"]

#: The distance between the streams of two steps: 2^128 / golden ratio, odd, as numpy's ``PCG64DXSM.jumped``.
STRIDE = 210306068529402873165736369884012333109


class _Scratch(threading.local):
    """Memory for some numbers, one of it a thread: to ask the system for it would take longer than to fill it."""

    def __init__(self) -> None:
        self.values = torch.empty(SERIAL)


_scratch = _Scratch()


def _check(out: Tensor, weights: Tensor | None) -> None:
    """Refuse what a loop over memory would overrun."""
    if not out.is_contiguous() or out.device.type != "cpu":
        raise ValueError(f"noise fills contiguous tensors on the CPU; got strides {out.stride()} on {out.device}")
    if weights is None:
        return
    like = weights.numel() == out.numel() and weights.dtype == out.dtype and weights.device == out.device
    if not (like and weights.is_contiguous()):
        raise ValueError(
            f"weights must be contiguous and like out, {tuple(out.shape)} of {out.dtype}; got {tuple(weights.shape)} "
            f"of {weights.dtype} with strides {weights.stride()} on {weights.device}"
        )


class GaussianNoise:
    """Independent normal numbers at places 0, 1, 2, ... of steps 0, 1, 2, ...

    A number is the mean of one of the small parts that the normal distribution is cut into.
    The distribution function is right to 2^-17, and the probability of lying beyond a point to 0.6 %, as far out as the
    largest number, 9.2. The mean is 0, the variance 1 to 1e-9 (the rounding of the tables to float32), the kurtosis
    2.99998. For weights in float32 this is finer than the rounding of the sum of weight and noise, and it costs much
    less than ``torch.randn``, whose Mersenne twister takes most of its time.

    The first 16 bits come from PCG64DXSM, which can be advanced to any place at once; the streams of different steps
    are apart by numpy's own jump distance. The further bits, which one number in 256 needs, come from SplitMix64 at a
    counter made of seed, step and place.

    Args:
        seed: Any integer. Different seeds give independent noise.

    Example:
        >>> noise = GaussianNoise(seed=1)
        >>> z = noise(step=7, start=0, count=100_000)
        >>> round(abs(z.mean().item()), 1), round(z.var().item(), 1)
        (0.0, 1.0)
        >>> torch.equal(noise(step=7, start=96, count=5), z[96:101])  # any part alone, in any order
        True
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        bits = np.random.PCG64DXSM(abs(seed) * 2 + (seed < 0))
        start = bits.state["state"]
        self._origin = (start["state"], start["inc"])
        self._by_numpy = NumpyNoise(bits)

    def __call__(self, step: int, start: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """``count`` numbers of the given step, from place ``start`` on."""
        out = torch.zeros(count, dtype=dtype)
        self.add_([out], step, [start], alpha=1.0)
        return out

    @torch.no_grad()
    def add_(self, pieces: list[Tensor], step: int, places: list[int], alpha: float) -> None:
        """Add ``alpha`` times the noise of a step to the pieces, the first elements of which stand at the given places.

        >>> noise, a, b = GaussianNoise(seed=1), torch.zeros(2, 3), torch.zeros(4)
        >>> noise.add_([a, b], step=0, places=[0, 6], alpha=2.0)
        >>> torch.equal(torch.cat([a.flatten(), b]), 2 * noise(0, 0, 10))
        True
        """
        flats, firsts = [], []
        for piece, place in zip(pieces, places, strict=True):
            if piece.is_contiguous():
                flats.append(piece.view(-1))
                firsts.append(place)
            else:
                piece.add_(self(step, place, piece.numel(), piece.dtype).view(piece.shape), alpha=alpha)
        if not kernel_is_there(_scratch.values):
            self._by_numpy.add_(flats, self._first(step), firsts, self._tail_key(step), alpha)
            return
        for flat, place in zip(flats, firsts, strict=True):
            for at, part in enumerate(flat.split(SERIAL)):
                values = _scratch.values[: len(part)]
                self._by_kernel(values, None, step, place + at * SERIAL)
                part.add_(values, alpha=alpha)

    @torch.no_grad()
    def fill(self, out: Tensor, weights: Tensor | None = None, step: int = 0) -> Tensor:
        """Set ``out`` to the noise of a step, times ``weights`` if given, which may be ``out`` itself.

        Args:
            out: What is written: contiguous, on the CPU.
            weights: As many numbers of the same type, contiguous too.
            step: Whose noise.

        Example:
            >>> noise = GaussianNoise(seed=1)
            >>> z = noise.fill(torch.empty(5))
            >>> torch.equal(noise.fill(torch.empty(5), torch.full((5,), 2.0)), 2 * z)
            True
        """
        _check(out, weights)
        if kernel_is_there(out) and is_aligned(out) and (weights is None or is_aligned(weights)):
            self._by_kernel(out, weights, step, 0)
            torch.autograd.graph.increment_version(out)
            return out
        self._by_numpy.fill(out, weights, self._first(step), self._tail_key(step))
        return out

    def source(self, step: int) -> Source:
        """What a kernel needs to draw the numbers of a step itself."""
        numbers = (*self._origin, self._first(step))
        halves = [half for number in numbers for half in (number >> 64, number & MASK)]
        # The number of the bits b is minus that of the bits 65535 - b: the upper half of the table is enough.
        upper, tails = body_means(torch.float32)[32768:], tail_means(torch.float32)
        return Source(*halves, upper.data_ptr(), self._tail_key(step), tails.data_ptr())

    @property
    def origin(self) -> tuple[tuple[int, int], int]:
        """State and increment of the generator at place 0 of step 0, and where SplitMix64 begins for all steps."""
        state, increment = self._origin
        return (state, increment), mix((state ^ (state >> 64)) & MASK)

    @staticmethod
    def _first(step: int) -> int:
        """The word of the generator that place 0 of a step uses."""
        return step * STRIDE % PERIOD

    def _tail_key(self, step: int) -> int:
        """Where SplitMix64 begins, so that the further bits of a place are those of its ``place``-th number."""
        return mix(self.origin[1] + step * GOLDEN & MASK)

    def _by_kernel(self, out: Tensor, weights: Tensor | None, step: int, start: int) -> None:
        compile_kernel(out.dtype).multiply(
            ctypes.c_int64(threads_for(out.numel())),
            ctypes.c_int64(out.numel()),
            ctypes.c_int64(start),
            ctypes.byref(self.source(step)),
            pointer(out),
            None if weights is None else pointer(weights),
        )
