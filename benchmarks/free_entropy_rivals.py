"""Other ways to log Z, each for any energy and for so many gradients; compared in ``benchmarks/free_entropy.py``.

SGLD: Langevin steps with full gradients at the same temperatures, thermodynamic integral over their means: what local
learning coefficients are estimated with today. The steps are devinterp's own (``pip install --no-deps devinterp``), or
its update transcribed where that is not installed.

AIS: annealed importance sampling, one rotated leapfrog step a temperature.

Laplace: -log det(1 + beta H)/2 + the term of the gradient, exact for few weights; by stochastic Lanczos for many.

Star: random directions, the radius at which beta V reaches lambda, log-mean-exp of the Gaussian mass inside.
"""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import torch
from torch import Tensor, nn

from wideflat.volume.gaussian_hmc import Energy, normal
from wideflat.volume.learning_coefficient import lanczos_quadrature
from wideflat.volume.network_energy import NetworkEnergy
from wideflat.volume.temperatures import Grid
from wideflat.volume.volume import Integration

try:
    from devinterp.optim.sgmcmc import SGMCMC
except ImportError:
    SGMCMC = None

#: Energies of at most so many weights have their Hessian written out.
FEW = 400


class Langevin:
    """xi <- xi - step/2 (xi + beta grad V) + N(0, step): the prior N(0, 1) is a localisation of strength 1 at 0."""

    def __init__(self, energy: Energy, beta: float, step: float, xi: Tensor) -> None:
        self.beta, self.step, self.energy = beta, step, energy
        self.xi, self.optimizer = nn.Parameter(torch.zeros_like(xi)), None
        if SGMCMC is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.optimizer = SGMCMC.sgld([self.xi], lr=step, localization=1.0, nbeta=beta)  # centered at 0
        self.xi.data.copy_(xi)

    def advance(self) -> float:
        """One step; V before it."""
        value, gradient = self.energy.gradient(self.xi.detach())
        if self.optimizer is not None:
            self.xi.grad = gradient
            self.optimizer.step()
        else:
            noise = math.sqrt(self.step) * torch.randn_like(self.xi)
            self.xi.data += noise - 0.5 * self.step * (self.xi.detach() + self.beta * gradient)
        return value


def sgld(energy: Energy, found: Integration, gradients: int, seed: int) -> tuple[float, float]:
    """Log Z from Langevin chains at the nodes, and lambda at the top; the first third of each is thrown away.

    It is given what it has no way to find: our nodes, our steps (half their square), our log Z(beta_low).
    """
    if len(found.betas) == 1:
        return found.log_z, found.llc[-1]  # independent points were enough: nothing to walk
    torch.manual_seed(seed)
    betas = np.array(found.betas)
    xi = normal(energy, torch.Generator().manual_seed(seed))
    means, count = [found.llc[0] / betas[0]], max(6, gradients // (len(betas) - 1))
    for k, beta in enumerate(betas[1:].tolist()):
        chain = Langevin(energy, beta, 0.5 * found.diagnostics["step_up"][k] ** 2, xi)
        values = [chain.advance() for _ in range(count)]
        xi = chain.xi.detach()
        means.append(float(np.mean(values[count // 3 :])))
    grid = Grid(found.beta_low, found.beta, len(betas) - 1)
    ours = np.array(found.llc) / betas
    return found.log_z + float(grid.weights @ (ours - np.array(means))), float(betas[-1] * means[-1])


def ais(energy: Energy, beta: float, gradients: int, chains: int, seed: int) -> float:
    """Log mean of the weights of annealed chains, beta growing geometrically after a first linear part."""
    generator = torch.Generator().manual_seed(seed)
    ladder = beta * np.concatenate([[0.0], np.geomspace(1e-6, 1, max(2, gradients // chains))])
    logs = []
    for _ in range(chains):
        xi, log_w = normal(energy, generator), 0.0
        value, gradient = energy.gradient(xi)
        step = 1.0
        for low, high in itertools.pairwise(ladder.tolist()):
            log_w -= (high - low) * value
            p = normal(energy, generator)
            kick = -0.5 * step * high * gradient
            new_p = p + kick
            new = math.cos(step) * xi + math.sin(step) * new_p
            new_p = math.cos(step) * new_p - math.sin(step) * xi
            new_value, new_gradient = energy.gradient(new)
            new_kick = -0.5 * step * high * new_gradient
            error = high * (new_value - value) + float(kick @ (p + 0.5 * kick) + new_kick @ (new_p + 0.5 * new_kick))
            accept = math.exp(-max(error, 0.0)) if math.isfinite(error) else 0.0
            if torch.rand((), generator=generator).item() < accept:
                xi, value, gradient = new, new_value, new_gradient
            step = min(1.2, step * math.exp(0.1 * (accept - 0.7)))
        logs.append(log_w)
    return float(np.logaddexp.reduce(logs) - math.log(chains))


def laplace(energy: Energy, beta: float, seed: int, probes: int = 2, steps: int = 20) -> float:
    """-log det(1 + beta H)/2; with few weights also beta^2 g (1 + beta H)^-1 g/2. Curvatures below zero count as 0."""
    zero = torch.zeros(energy.size, dtype=energy.dtype, device=energy.device)
    if energy.size > FEW:
        assert isinstance(energy, NetworkEnergy)
        product = lambda v: energy.network.hessian_product(v, energy.sigma)  # noqa: E731
        half = lambda h: 0.5 * np.log1p(np.maximum(beta * h, 0.0))  # noqa: E731
        return -lanczos_quadrature(product, half, zero, probes, steps, torch.Generator().manual_seed(seed))[0]
    g = energy.gradient(zero)[1].double()
    rows = []
    for i in range(energy.size):
        step = zero.clone()
        step[i] = 1e-3
        rows.append((energy.gradient(step)[1] - energy.gradient(-step)[1]).double() / 2e-3)
    H = torch.stack(rows)
    A = torch.eye(energy.size, dtype=torch.float64) + beta * 0.5 * (H + H.T)
    return float(-0.5 * torch.linalg.slogdet(A).logabsdet + 0.5 * beta**2 * g @ torch.linalg.solve(A, g))


def star(energy: Energy, beta: float, level: float, evaluations: int, seed: int) -> float:
    """Log E over directions of the mass of the Gaussian within the radius at which beta V = level, by bisection."""
    generator = torch.Generator().manual_seed(seed)
    logs = []
    for _ in range(max(4, evaluations // 20)):
        direction = normal(energy, generator)
        direction = direction / direction.norm()
        low, high = 0.0, 4 * math.sqrt(energy.size)
        for _ in range(20):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if beta * energy.value(middle * direction) < level else (low, middle)
        # P(chi_N < r): for small r the leading term of the incomplete gamma function is enough
        half, x = energy.size / 2, low**2 / 2
        mass = torch.special.gammainc(torch.tensor(half, dtype=torch.float64), torch.tensor(x, dtype=torch.float64))
        logs.append(math.log(mass) if mass > 1e-290 else half * math.log(max(x, 1e-300)) - x - math.lgamma(half + 1))
    return float(np.logaddexp.reduce(logs) - math.log(len(logs)))


def rivals(energy: Energy, found: Integration, seed: int, share: float = 1.0) -> dict[str, float]:
    """Log Z of each with ``share`` of the gradients that ``found`` took."""
    gradients = int(share * found.gradients)
    return {
        "SGLD": sgld(energy, found, gradients, seed)[0],
        "AIS": ais(energy, found.beta, gradients, 8, seed),
        "Laplace": laplace(energy, found.beta, seed),
        "star": star(energy, found.beta, max(found.llc[-1], 0.5), gradients, seed),
    }
