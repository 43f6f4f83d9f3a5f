"""The noise of `wideflat.kernels.noise` by torch's operations on whole numbers, at a step that is a tensor.

What is traced or captured cannot call C or NumPy, and must not read the number of the step. The generator, PCG64DXSM,
has 128 bits, which are five whole numbers of torch here. Its state after n words is a product and a sum, so that any
word is reached at once: by the digits of the step, by the row, and by the column of the word, each of which is one look
into a table. The same numbers as in C and NumPy, compiled or not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wideflat.kernels.noise import STRIDE, GaussianNoise
from wideflat.kernels.normal_parts import TAIL_BITS, TAIL_LEVELS, TAIL_PARTS, body_means, tail_means
from wideflat.kernels.numpy_noise import GOLDEN

__all__ = ["TABLES", "TracedNoise", "drawn"]

_PERIOD = 1 << 128
#: The multiplier of the generator, and of its output function.
_FACTOR = 0xDA942042E4DD58B5
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

#: The step is read in so many digits of so many bits each: 10^12 steps.
DIGITS, DIGIT_BITS = 4, 10

#: A number of 128 bits is five of 26, the last of them of 24: no product or sum of them goes beyond the 63 bits of a
#: positive number, beyond which a compiler may do what it likes.
LIMBS, LIMB_BITS = 5, 26
_LIMB = (1 << LIMB_BITS) - 1


def _signed(number: int) -> int:
    """As torch has it: 64 bits of which the first is the sign."""
    return number - (1 << 64) if number >> 63 else number


def _shifted(number: Tensor, bits: int) -> Tensor:
    """Shifted to the right as a number without a sign."""
    if not bits:  # the mask would be all 64 bits, which is no number of torch's
        return number
    return (number >> bits) & ((1 << (64 - bits)) - 1)


def _limbs(number: int) -> list[int]:
    return [(number >> LIMB_BITS * k) & _LIMB for k in range(LIMBS)]


def _advanced(state: list[Tensor], jump: Tensor) -> list[Tensor]:
    """A state times the first number of a jump plus the second; the first dimension of ``jump`` has their limbs."""
    factor, added = jump[:LIMBS], jump[LIMBS:]
    carry: Tensor | int = 0
    advanced = []
    for k in range(LIMBS):
        limb = added[k] + carry
        for i in range(k + 1):
            limb = limb + state[i] * factor[k - i]
        advanced.append(limb & _LIMB)
        carry = limb >> LIMB_BITS
    return advanced


def _mixed(number: Tensor) -> Tensor:
    """The output function of SplitMix64."""
    number = (number ^ _shifted(number, 30)) * _signed(_FIRST)
    number = (number ^ _shifted(number, 27)) * _signed(_SECOND)
    return number ^ _shifted(number, 31)


class _Jumps:
    """Jumps of the generator: x <- a x + c, as Python's numbers."""

    def __init__(self, increment: int) -> None:
        self._one = (_FACTOR, increment)

    def by(self, count: int) -> tuple[int, int]:
        """So many words at once."""
        a, c, (power_a, power_c) = 1, 0, self._one
        while count:
            if count & 1:
                a, c = a * power_a % _PERIOD, (c * power_a + power_c) % _PERIOD
            power_a, power_c = power_a * power_a % _PERIOD, power_c * (power_a + 1) % _PERIOD
            count >>= 1
        return a, c

    def table(self, distance: int, length: int, first: int = 0) -> Tensor:
        """Jumps by ``first``, ``first + distance``, ... words: (2 LIMBS, length)."""
        a, c = self.by(first)
        more_a, more_c = self.by(distance % _PERIOD)
        rows = []
        for _ in range(length):
            rows.append([*_limbs(a), *_limbs(c)])
            a, c = a * more_a % _PERIOD, (c * more_a + more_c) % _PERIOD
        return torch.tensor(rows, dtype=torch.int64).t().contiguous()


class TracedNoise:
    """The numbers of a seed at ``count`` places from ``start`` on, for any step.

    Args:
        seed: As for `wideflat.kernels.noise.GaussianNoise`.
        start: The first place.
        count: How many.
        device: Where they are made.

    Attributes:
        key: A number that depends on the seed.
        tables: What they are made of, for `drawn`.

    Example:
        >>> noise = TracedNoise(seed=1, start=5, count=1000)
        >>> torch.equal(noise(torch.tensor(7)), GaussianNoise(seed=1)(step=7, start=5, count=1000))
        True
    """

    def __init__(self, seed: int, start: int, count: int, device: torch.device | str = "cpu") -> None:
        self.start, self.count = start, count
        (state, increment), key = GaussianNoise(seed).origin
        self.key = _signed(key)
        word, skip = divmod(start, 4)
        words = (skip + count) // 4 + 1  # one number at least that nobody needs
        columns = 1 << (words.bit_length() + 1) // 2
        rows = -(-words // columns)
        jumps = _Jumps(increment)
        steps = [jumps.table(STRIDE << DIGIT_BITS * digit, 1 << DIGIT_BITS) for digit in range(DIGITS)]
        body, tails = body_means(torch.float32), tail_means(torch.float32)
        made = (
            torch.tensor(_limbs(state)),
            torch.stack(steps),
            jumps.table(columns, rows, word),
            jumps.table(1, columns),
            body,
            tails.reshape(-1),
        )
        self.tables = [table.to(device) for table in made]

    def __call__(self, step: Tensor) -> Tensor:
        """The numbers of a step, in float32."""
        return drawn(step, self.start, self.count, self.key, self.tables)


#: Tables of a `TracedNoise`.
TABLES = 6


def drawn(step: Tensor, start: int, count: int, key: int, tables: list[Tensor]) -> Tensor:
    """The numbers of a `TracedNoise`, by what it is made of: what is traced holds no objects."""
    origin, steps, rows, columns, body, tails = tables
    skip = start % 4
    parts = _parts(step, origin, steps, rows, columns)
    numbers = body[parts]
    is_outermost = ((parts + TAIL_PARTS) & 0xFFFF) < 2 * TAIL_PARTS
    expected = len(parts) * TAIL_PARTS / 32768
    most = min(len(parts), int(expected + 10 * math.sqrt(expected) + 16))  # there are more once in 10^25 steps
    at = torch.nonzero_static(is_outermost, size=most, fill_value=len(parts) - 1).view(-1)
    more = _mixed((at + (start - skip + 1)) * _signed(GOLDEN) + _mixed(step * _signed(GOLDEN) + key))
    numbers = numbers.index_put((at,), _tail(parts[at], more, tails))
    return numbers[skip : skip + count]


def _parts(step: Tensor, origin: Tensor, steps: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The 16 bits of each number; four of them share a word."""
    state = list(origin.unbind())
    for digit in range(DIGITS):
        number = (step >> DIGIT_BITS * digit) & ((1 << DIGIT_BITS) - 1)
        state = _advanced(state, steps[digit].index_select(1, number.view(1)).view(-1))
    limb = _advanced([limb[:, None] for limb in _advanced(state, rows)], columns[:, None])
    low = limb[0] | (limb[1] << 26) | (limb[2] << 52)
    high = (limb[2] >> 12) | (limb[3] << 14) | (limb[4] << 40)
    high = (high ^ _shifted(high, 32)) * _signed(_FACTOR)
    words = ((high ^ _shifted(high, 48)) * (low | 1)).view(-1)
    return torch.stack([(words >> 16 * lane) & 0xFFFF for lane in range(4)], dim=-1).view(-1)


def _tail(parts: Tensor, more: Tensor, tails: Tensor) -> Tensor:
    """The numbers of the outermost parts, cut by further bits until they are fine enough; ``tail`` in noise.h."""
    is_lower = parts < TAIL_PARTS
    part = torch.where(is_lower, parts, 65535 - parts) & (TAIL_PARTS - 1)  # that of the filling is any
    index, going = torch.zeros_like(part), torch.ones_like(is_lower)
    for level in range(TAIL_LEVELS):
        part = (part << TAIL_BITS) | (_shifted(more, TAIL_BITS * level) & ((1 << TAIL_BITS) - 1))
        index = torch.where(going, part + level * (TAIL_PARTS << TAIL_BITS), index)
        going = going & (part < TAIL_PARTS)
    number = tails[index]
    return torch.where(is_lower, -number, number)
