r"""Descents from random points: is there a deeper well that no chain has met?

Cooling leads chains into the wide wells; a narrow one that is far off may have most of Z and be missed by all of them.
Some random points lie in its basin, and a descent costs a few gradients:

.. code-block:: text

    U(xi) = beta V(xi) + |xi|^2/2         its bottom is where a well of exp(-|xi|^2/2 - beta V) is deepest
    xi <- xi - t grad U                   t after Barzilai and Borwein, shortened where U would rise
    met   the lowest U of descents from the weights and from where the chains ended
    low   the lowest U of descents from random points

Where low < met - 0.5 a chain is started there and walks at beta. Only if descents from four places on its way all end
below met - 0.5, and its V is below that of the other chains too, has it stayed in a well that they have not met: the
value is refused. In a landscape of many shallow wells that chains go between, the four are all below the lowest of four
others in one case of seventy.

A well whose basin no random point lies in is not found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from wideflat.kernels.float64 import fetched, number, summed
from wideflat.volume.gaussian_hmc import Energy, launched

__all__ = ["DEEPER", "MOST", "Descent", "descend", "most_gradients"]

#: Most gradients of a descent.
LONGEST = 30
#: Descents, and the share of the walked gradients that they may take; more in few dimensions, where they are cheap.
MOST, SHARE, SHARE_OF_FEW, FEW = 64, 0.05, 0.15, 64
#: How much deeper, in U, another well is.
DEEPER = 0.5
#: A descent ends where the next step would gain less.
GAIN = 0.1


@dataclass(frozen=True)
class Descent:
    """Where a descent ended: the place, U there, and the gradients it took."""

    xi: Tensor
    potential: float
    gradients: int


def descend(energy: Energy, beta: float, xi: Tensor, step: float) -> Descent:
    """The descent from xi, with a first step of that length times the gradient.

    Example:
        V = 3 xi^2/2 - 3 xi at beta = 1: U = 2 xi^2 - 3 xi is lowest at 3/4, where it is -9/8.

        >>> import torch
        >>> class Bowl:
        ...     gradient = lambda self, x: (float(1.5 * x @ x - 3 * x.sum()), 3 * x - 3)
        >>> found = descend(Bowl(), 1.0, torch.tensor([5.0]), 0.1)
        >>> found.xi.item(), found.potential, found.gradients
        (0.75, -1.125, 3)
    """

    def at(place: Tensor, before: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, list[float]]:
        """The gradient of U; in one look U, the gradient's square, the move's, and its product with their change."""
        value, gradient = launched(energy, place)
        slope = beta * gradient + place
        products = [summed(place * place), summed(slope * slope)]
        if before is not None:
            moved = place - before[0]
            products += [summed(moved * moved), summed(moved * (slope - before[1]))]
        v, square, *others = map(number, fetched([value, *products]))
        return slope, [beta * v + 0.5 * square, *others]

    (g, (u, square)), used = at(xi), 1
    lately = [u]
    while used < LONGEST and math.isfinite(u) and step * square >= GAIN:
        place = xi - step * g
        (slope, (low, steepness, length, bend)), used = at(place, (xi, g)), used + 1
        if not low <= max(lately[-3:]):
            step /= 4
            continue
        xi, u, g, square = place, low, slope, steepness
        lately.append(u)
        step = min(1.0, length / bend if bend > 1e-9 * length else 4 * step)
    return Descent(xi, u, used)


def most_gradients(walked: int, size: int) -> int:
    """How many the descents from random points may take where so many were walked."""
    return math.ceil(walked * (SHARE_OF_FEW if size <= FEW else SHARE))
