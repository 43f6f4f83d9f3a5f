r"""The local learning coefficient of any network, with an error bar.

.. code-block:: text

    lambda(beta) = beta <V>_beta = n beta (<L>_beta - L(w)),       beta = 1/log n

is what is called the local learning coefficient, here of the posterior with the prior N(w, sigma^2): in the words of
those who estimate it by Langevin dynamics, a localisation gamma = 1/sigma^2. For a regular minimum it tends to half the
number of directions that are stiffer than the prior. It is one node of :func:`wideflat.free_entropy`, whose chains have
to come to equilibrium from two sides.

The value of Laplace's approximation stands beside it, 1/2 sum_i beta h_i/(1 + beta h_i) over the eigenvalues of the
Hessian of V at the weights (by stochastic Lanczos quadrature). It is a guess: what it knows is the curvature at one
point.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wideflat.checks import network as checked_network
from wideflat.checks import number, whole
from wideflat.distributed.whole import whole_network
from wideflat.evaluation.evaluation import Forward, Metric
from wideflat.evaluation.selection import Selection
from wideflat.hessian.lanczos import Krylov
from wideflat.noise.scales import Scale
from wideflat.seeds import derive_seed
from wideflat.volume.fixed_data import FixedData
from wideflat.volume.free_entropy import free_entropy
from wideflat.volume.network_energy import Network, block_size
from wideflat.volume.volumes import FreeEntropy

__all__ = ["LLC", "lanczos_quadrature", "llc"]


@dataclass
class LLC:
    """The local learning coefficient, and the free entropy that it was found with.

    Attributes:
        value: lambda(beta).
        stderr: Its error.
        beta: The inverse temperature.
        laplace: What Laplace's approximation says: a guess.
        laplace_stderr: The error of its trace, not of the approximation.
        entropy: All that the chains have seen.
    """

    value: float
    stderr: float
    beta: float
    laplace: float
    laplace_stderr: float
    entropy: FreeEntropy

    @property
    def converged(self) -> bool:
        """Whether the chains came to equilibrium."""
        return bool(self.entropy.converged.all())

    def __str__(self) -> str:
        lines = [
            f"local learning coefficient {self.value:.4g} ± {self.stderr:.2g} at beta = {self.beta:.4g}"
            + ("" if self.converged else " (not converged)"),
            f"Laplace's guess {self.laplace:.4g} ± {self.laplace_stderr:.1g}",
        ]
        return "\n".join([*lines, str(self.entropy)])


def llc(
    model: nn.Module,
    data: Any,
    sigma: float = 0.1,
    beta: float | None = None,
    measure: Metric = "loss",
    scale: Scale = "absolute",
    parameters: Selection = "all",
    seed: int = 0,
    *,
    probes: int = 4,
    lanczos_steps: int = 24,
    forward: Forward | None = None,
    subset: int | None = None,
    subset_seed: int = 0,
    batch_size: int | None = None,
    **options: Any,
) -> LLC:
    """The local learning coefficient lambda = beta <V>_beta around the weights of a network.

    Args:
        model: Any network; it is left as it was found.
        data: See :func:`wideflat.free_entropy`.
        sigma: Width of the prior around the weights: 1/sqrt(gamma) of a localisation gamma.
        beta: Inverse temperature of the sum of losses; 1/log n when left out.
        measure: ``"loss"`` or a function of outputs and targets that gives one value an example.
        scale: See :func:`wideflat.free_entropy`.
        parameters: Which parameters move.
        seed: Of everything random.
        probes: Random vectors of Laplace's guess.
        lanczos_steps: Products with the Hessian for each of them.
        forward: See :func:`wideflat.free_entropy`.
        subset: See :func:`wideflat.free_entropy`.
        subset_seed: See :func:`wideflat.free_entropy`.
        batch_size: See :func:`wideflat.free_entropy`.
        **options: More arguments of :func:`wideflat.free_entropy`.

    Example:
        A quadratic loss of n = 1000 examples and one weight: lambda = beta h/(1 + beta h)/2 with h = 1000 sigma^2.

        >>> model = nn.Linear(1, 1, bias=False)
        >>> with torch.no_grad(): _ = model.weight.fill_(2.0)
        >>> data = torch.ones(1000, 1), torch.full((1000,), 2.0)
        >>> squares = lambda outputs, targets: (outputs[:, 0] - targets) ** 2 / 2
        >>> found = llc(model, data, sigma=0.1, measure=squares, progress=False)
        >>> round(found.laplace, 3), abs(found.value - 0.2957) < 4 * found.stderr
        (0.296, True)
    """
    if isinstance(measure, str) and measure == "error":
        raise ValueError('the error has no learning coefficient: it is a step function; use measure="loss"')
    model = whole_network(checked_network(model))
    sigma = number("sigma", sigma, above=0)
    probes, lanczos_steps = whole("probes", probes, 1, 10**6), whole("lanczos_steps", lanczos_steps, 1, 10**6)
    size = block_size(model) if batch_size is None else whole("batch_size", batch_size, 1)
    fixed = FixedData(data, size, subset, subset_seed)
    beta = 1 / math.log(max(fixed.examples, 3)) if beta is None else number("beta", beta, above=0)
    shared: dict[str, Any] = {"scale": scale, "parameters": parameters, "forward": forward}
    batches = [block.batch for block in fixed.blocks]
    entropy = free_entropy(model, batches, sigma, measure, beta, seed=seed, **shared, **options)
    if not entropy.points:
        raise ValueError("no chain was finished: give more minutes")
    point = entropy.points[0]
    apart = abs(point.up[-1] - point.down[-1])  # of the two sides; there is one only where it was quick
    lag = 0.0 if math.isnan(apart) else max(0.0, apart - 2 * point.llc_stderr[-1]) / 2
    guess, error = _laplace(Network(model, fixed, measure, **shared), sigma, beta, probes, lanczos_steps, seed)
    return LLC(point.llc[-1], math.hypot(point.llc_stderr[-1], lag), beta, guess, error, entropy)


def _laplace(network: Network, sigma: float, beta: float, probes: int, steps: int, seed: int) -> tuple[float, float]:
    """1/2 sum_i beta h_i/(1 + beta h_i) with its error; NaN for a network that cannot be differentiated twice."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "probes"))

    def half_degree(h: np.ndarray) -> np.ndarray:  # directions that go down count as flat ones
        positive = np.maximum(beta * h, 0.0)
        return 0.5 * positive / (1 + positive)

    with network.prepared():
        product = lambda v: network.hessian_product(v, sigma)  # noqa: E731
        like = torch.zeros(network.size, dtype=network.dtype, device=network.device)
        try:
            return lanczos_quadrature(product, half_degree, like, probes, steps, generator)
        except (RuntimeError, NotImplementedError):
            return math.nan, math.nan


def lanczos_quadrature(
    product: Callable[[Tensor], Tensor],
    function: Callable[[np.ndarray], np.ndarray],
    like: Tensor,
    probes: int,
    steps: int,
    generator: torch.Generator,
) -> tuple[float, float]:
    """The trace of a function of a symmetric operator, and its error over the probes.

    Args:
        product: Multiplies a vector by the operator.
        function: Of its eigenvalues.
        like: A vector of the right size, type and device.
        probes: Vectors of random signs.
        steps: Products for each of them.
        generator: Of the probes.

    Example:
        >>> h = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
        >>> value, error = lanczos_quadrature(lambda v: h * v, np.sqrt, h, 2, 3, torch.Generator().manual_seed(0))
        >>> round(value, 6) == round(1 + 2**0.5 + 3**0.5, 6), error < 1e-6
        (True, True)
    """
    values = []
    for _ in range(probes):
        signs = 2 * torch.randint(0, 2, (like.numel(),), generator=generator) - 1
        krylov = Krylov(signs.to(like)[:, None], steps)
        while not krylov.ended:
            krylov.take(product(krylov.columns[:, 0])[:, None])
        (rule,) = krylov.rules()
        values.append(like.numel() * float(rule.weights @ function(rule.nodes)))
    spread = float(np.std(values, ddof=1) / math.sqrt(probes)) if probes > 1 else math.nan
    return float(np.mean(values)), spread
