"""Steps of many committee machines in C (:mod:`.library`): sums over rows of the Gram matrix, and whole epochs.

Each network picks its own rows, so the sum is not a matrix product. Torch's nearest operation is ``embedding_bag``,
which reads a row once for every hidden unit; the kernel reads it once for three. A step of eSGD or rSGD is some twenty
small operations besides, which in C are one.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from wideflat.kernels.library import compile_kernel, kernel_is_there, pointer

__all__ = ["CommitteeKernel"]

#: Networks that go through an epoch together: their numbers stay in the cache, and a tile of the Gram matrix serves all
#: of them.
TOGETHER = 16


def padded(size: int, unit: int = 32) -> int:
    """The next multiple of ``unit``."""
    return -(-size // unit) * unit


class EsgdEpoch(ctypes.Structure):
    """Sizes and constants of an epoch; the fields of the same name in C."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("networks", "hidden", "patterns", "width")),
        *((name, ctypes.c_int64) for name in ("rows", "size", "batch", "inner_steps")),
        *((name, ctypes.c_double) for name in ("slope", "inside", "outside", "threshold", "pull", "alpha", "lr")),
    ]


class RsgdEpoch(ctypes.Structure):
    """The same for replicas."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("networks", "hidden", "patterns", "width", "stride")),
        *((name, ctypes.c_int64) for name in ("rows", "size", "batch", "replicas", "period", "number")),
        *((name, ctypes.c_double) for name in ("slope", "inside", "outside", "threshold", "strength")),
    ]


class CommitteeKernel:
    """The Gram matrix as the kernel takes it.

    Args:
        gram: Products of all patterns, padded with zeros.
        used: Patterns that are not padding; ``gram`` has at least one that is.

    Raises:
        KernelError: There is no kernel; ask `available` first.

    Example:
        >>> gram = torch.tensor([[1.0, 2.0, 0.0], [3.0, 4.0, 0.0], [0.0, 0.0, 0.0]])
        >>> a, c = torch.zeros(1, 2, 3), torch.tensor([[[1.0, 0.0], [2.0, 0.0]]])
        >>> if CommitteeKernel.available(gram):
        ...     count = CommitteeKernel(gram, 2).add_rows(a, torch.tensor([[1, 0]]), c)  # only one has coefficients
        ... else:
        ...     count, a = 1, torch.stack([gram[1], 2 * gram[1]]).unsqueeze(0)
        >>> count, a.tolist()
        (1, [[[3.0, 4.0, 0.0], [6.0, 8.0, 0.0]]])
    """

    def __init__(self, gram: Tensor, used: int) -> None:
        self.rows, self.columns = gram.shape
        self.used = used
        tile = 96 // gram.element_size()  # three vectors of 32 bytes
        padded = torch.nn.functional.pad(gram, (0, -self.columns % tile))
        self._tiles = padded.view(self.rows, -1, tile).transpose(0, 1).contiguous()
        library = compile_kernel(gram.dtype)
        self._add_rows, self._esgd_epoch, self._rsgd_epoch = library.add_rows, library.esgd_epoch, library.rsgd_epoch
        self._add_rows.restype = ctypes.c_int64
        self._working: dict[tuple[tuple[int, ...], ...], list[Tensor]] = {}

    @staticmethod
    def available(gram: Tensor) -> bool:
        """Is there a kernel?"""
        return kernel_is_there(gram)

    def add_rows(self, a: Tensor, patterns: Tensor, c: Tensor) -> int:
        """Add c (n, H, B) times the rows ``patterns`` (n, B) to a (n, H, columns), in place.

        Returns:
            How many rows of all networks had a coefficient; the others are left out.
        """
        n, hidden, batch = c.shape
        fitting = patterns.shape == (n, batch) and a.shape == (n, hidden, self.columns)
        if not (fitting and a.stride(2) == c.stride(2) == 1 and self._has_type(a, c) and self._are_rows(patterns)):
            raise ValueError(
                f"a {tuple(a.shape)}, patterns {tuple(patterns.shape)} and c {tuple(c.shape)} do not fit together"
            )
        patterns = patterns.contiguous()
        chosen, counts = torch.empty(n * batch, dtype=torch.int32), torch.empty(n, dtype=torch.int64)
        numbers = (n, hidden, batch, self.rows, self.columns, self.used)
        return int(
            self._add_rows(
                *map(ctypes.c_int64, numbers),
                pointer(patterns),
                pointer(self._tiles),
                pointer(c),
                *map(ctypes.c_int64, c.stride()[:2]),
                pointer(a),
                *map(ctypes.c_int64, a.stride()[:2]),
                pointer(chosen),
                pointer(counts),
            )
        )

    def esgd_epoch(
        self, a: Tensor, c: Tensor, m: Tensor, orders: Tensor, target: Tensor, size: int, **constants: float
    ) -> Tensor:
        """One epoch of eSGD, in place.

        Args:
            a: Pre-activations of w, (n, H, columns).
            c: Coordinates of w, of the same shape.
            m: What w holds of the weights at the last refresh, (n, H, 1).
            orders: Permutations of the patterns, (n, L, used).
            target: Of all patterns, 0 for the padding.
            size: Patterns in a mini-batch.
            constants: slope, inside, outside, threshold, pull, alpha and lr; the two in the middle are multiplied with
                the target.

        Returns:
            The distance of w from mu in the last outer step, (n, 1).
        """
        n, hidden, width = a.shape
        inner_steps, batch = orders.shape[1], padded(size, 16)
        fitting = width == self.columns and c.shape == a.shape and m.shape == (n, hidden, 1)
        fitting = fitting and orders.shape == (n, inner_steps, self.used)
        if not (fitting and self._is_ready(orders, target, size, a, c, m)):
            raise ValueError(f"a {tuple(a.shape)} and orders {tuple(orders.shape)} do not fit the Gram matrix")
        distance = a.new_empty(n, 1)
        for part in range(0, n, TOGETHER):
            some = slice(part, part + TOGETHER)
            count = len(a[some])
            sizes = (count, hidden, self.used, width, self.rows, size, batch, inner_steps)
            tensors = [orders[some], target, self._tiles, a[some], c[some], m[some], distance[some]]
            tensors += self._memory(
                a.dtype,
                *((count, hidden, width) for _ in range(3)),
                (count, hidden, 7),
                (count, inner_steps, hidden, batch),
                (count, inner_steps, hidden),
                (4, batch),
                long=[(count, inner_steps, batch), (count,)],
                int=[(count, batch)],
            )
            self._esgd_epoch(ctypes.byref(EsgdEpoch(*sizes, **constants)), *map(pointer, tensors))
        return distance

    def rsgd_epoch(
        self,
        v: Tensor,
        orders: Tensor,
        target: Tensor,
        size: int,
        *,
        replicas: int,
        period: int,
        number: int,
        **constants: float,
    ) -> None:
        """One epoch of rSGD, in place.

        Args:
            v: The columns A | I | J | C | M of all replicas of all restarts, (n, H, columns).
            orders: A permutation of the patterns for each network, (n, used).
            target: Of all patterns, 0 for the padding.
            size: Patterns in a mini-batch.
            replicas: Of a restart; they follow each other.
            period: Replicas are coupled at every period-th mini-batch,
            number: of which the first one here has this number.
            constants: slope, inside, outside, threshold and strength (of the coupling).
        """
        n, hidden, stride = v.shape
        batch = padded(size, 16)
        fitting = orders.shape == (n, self.used) and n % replicas == 0 and stride % 32 == 0
        fitting = fitting and stride >= 3 * self.columns + 2 * replicas
        if not (fitting and period >= 1 and self._is_ready(orders, target, size, v)):
            raise ValueError(f"v {tuple(v.shape)} and orders {tuple(orders.shape)} do not fit the Gram matrix")
        together = max(1, TOGETHER // replicas) * replicas
        for part in range(0, n, together):
            some = slice(part, part + together)
            count = len(v[some])
            sizes = (count, hidden, self.used, self.columns, stride, self.rows, size, batch, replicas, period, number)
            tensors = [orders[some], target, self._tiles, v[some]]
            tensors += self._memory(
                v.dtype, (count, hidden, batch), (3, batch), long=[(count, batch), (count,)], int=[(count, batch)]
            )
            self._rsgd_epoch(ctypes.byref(RsgdEpoch(*sizes, **constants)), *map(pointer, tensors))

    def _has_type(self, *tensors: Tensor) -> bool:
        return all(tensor.dtype == self._tiles.dtype and tensor.device.type == "cpu" for tensor in tensors)

    def _are_rows(self, numbers: Tensor) -> bool:
        """Are these numbers of rows? C reads where they point."""
        if numbers.dtype != torch.int64 or numbers.device.type != "cpu":
            return False
        if not numbers.numel():
            return True
        least, most = numbers.aminmax()
        return int(least) >= 0 and int(most) < self.rows

    def _is_ready(self, orders: Tensor, target: Tensor, size: int, *state: Tensor) -> bool:
        """Can an epoch go over these: without gaps, of one type, with a target for every row that is pointed to?"""
        contiguous = all(tensor.is_contiguous() for tensor in (orders, target, *state))
        lengths = size >= 1 and target.shape == (self.rows,) and self.used < self.rows and self.columns % 16 == 0
        return contiguous and lengths and self._has_type(target, *state) and self._are_rows(orders)

    def _memory(
        self, dtype: torch.dtype, *real: tuple[int, ...], long: list[tuple[int, ...]], int: list[tuple[int, ...]]
    ) -> list[Tensor]:
        """Working memory: numbers of the given shapes, then long and short whole ones; used again in every epoch."""
        key = (*real, *long, *int)
        if key not in self._working:
            self._working[key] = [
                *(torch.empty(shape, dtype=dtype) for shape in real),
                *(torch.empty(shape, dtype=torch.int64) for shape in long),
                *(torch.empty(shape, dtype=torch.int32) for shape in int),
            ]
        return self._working[key]
