"""Energies V(xi) whose log Z = log E exp(-beta V) is known: random instances of families, and traps."""

import math

import numpy as np
import torch

T = np.linspace(-10, 10, 8001)
GAUSS = np.exp(-T * T / 2)
GAUSS /= GAUSS.sum()


class ClosedForm:
    """V of xi (N,) in float64 by a function that gives the value and the gradient, and the exact log Z at ``beta``."""

    dtype, device = torch.float64, torch.device("cpu")

    def __init__(self, name, size, function, exact, beta=1.0, solutions=False):
        self.name, self.size, self.function, self.exact = name, size, function, float(exact)
        self.beta, self.solutions = beta, solutions

    def gradient(self, xi):
        value, gradient = self.function(xi)
        return float(value), gradient

    def value(self, xi):
        return float(self.function(xi)[0])


def _tensor(values):
    return torch.tensor(np.asarray(values), dtype=torch.float64)


def quadratic(rng, size=None, decades=None):
    """Sum of h xi^2/2 + g sqrt(h) xi: log Z = sum of -log(1 + h)/2 + g^2 h/(1 + h)/2."""
    size = size or int(rng.integers(30, 120))
    h = 10 ** rng.uniform(-2, (decades or rng.uniform(2.5, 4)) - 2, size)
    g = rng.normal(0, 0.2, size)
    H, G = _tensor(h), _tensor(g * np.sqrt(h))
    exact = (-0.5 * np.log1p(h) + 0.5 * g**2 * h / (1 + h)).sum()
    return ClosedForm("quadratic", size, lambda x: ((0.5 * H * x**2 + G * x).sum(), H * x + G), exact)


def logistic(rng, size=None):
    """softplus(-m - s xi) - softplus(-m) for each component."""
    size = size or int(rng.integers(100, 400))
    m, s = rng.normal(1, 1, size), rng.uniform(1, 3)
    V = np.logaddexp(0, -m[:, None] - s * T) - np.logaddexp(0, -m)[:, None]
    M, soft = _tensor(m), torch.nn.functional.softplus
    function = lambda x: ((soft(-M - s * x) - soft(-M)).sum(), -s * torch.sigmoid(-M - s * x))  # noqa: E731
    return ClosedForm("logistic", size, function, np.log(np.exp(-V) @ GAUSS).sum())


def monomials(rng, size=None):
    """c |xi|^p/2 with p = 2, 4 and 6."""
    size = size or int(rng.integers(30, 90))
    p, c = rng.choice([2.0, 4.0, 6.0], size), 10 ** rng.uniform(0, 2.5, size)
    exact = np.log(np.exp(-0.5 * c[:, None] * np.abs(T) ** p[:, None]) @ GAUSS).sum()
    P, C = _tensor(p), _tensor(c)
    function = lambda x: ((0.5 * C * x.abs() ** P).sum(), 0.5 * C * P * x.sign() * x.abs() ** (P - 1))  # noqa: E731
    return ClosedForm("monomials", size, function, exact)


def relu_nets(rng, nets=None):
    """Many networks of two weights, c (a relu(b) - 1)^2 with a = 1 + s xi, b = 1 + s xi'."""
    nets = nets or int(rng.integers(15, 50))
    c, s = rng.uniform(2, 8), rng.uniform(0.5, 1.5)
    t = np.linspace(-9, 9, 2001)
    w = np.exp(-t * t / 2) / np.exp(-t * t / 2).sum()
    exact = nets * math.log(w @ np.exp(-c * ((1 + s * t)[:, None] * np.maximum(0, 1 + s * t) - 1) ** 2) @ w)

    def function(x):
        a, b = 1 + s * x[:nets], 1 + s * x[nets:]
        e = a * b.clamp(min=0) - 1
        return (c * e**2).sum(), 2 * c * s * torch.cat([e * b.clamp(min=0), e * a * (b > 0)])

    return ClosedForm("relu nets", 2 * nets, function, exact)


FAMILIES = {"quadratic": quadratic, "logistic": logistic, "monomials": monomials, "relu nets": relu_nets}


def hard(rng, size=None, beta=8.0):
    """Orthogonal patterns of margins kappa: the probability that all are right, sum of log Phi(kappa)."""
    size = size or int(rng.integers(10, 30))
    kappa = rng.uniform(0.2, 1.2, size)
    K = _tensor(kappa)
    exact = sum(math.log(0.5 * math.erfc(-k / math.sqrt(2))) for k in kappa)
    function = lambda x: ((-K - x).clamp(min=0).sum(), -(x < -K).double())  # noqa: E731
    return ClosedForm("hard", size, function, exact, beta, solutions=True)


# ---- other forms, that nothing was tuned on


def separable(name, size, function):
    """The sum over components of a function of tensors; log Z by one-dimensional integrals, gradient by autograd."""
    exact = size * np.logaddexp.reduce(-function(_tensor(T)).numpy() + np.log(GAUSS))

    def with_gradient(x):
        x = x.clone().requires_grad_(True)
        value = function(x).sum()
        return value.detach(), torch.autograd.grad(value, x)[0]

    return ClosedForm(name, size, with_gradient, exact)


def rotated(rng, size=30, decades=4):
    """A quadratic whose axes are turned, and whose minimum is away from the weights."""
    h = 10 ** rng.uniform(-2, decades - 2, size)
    g = rng.normal(0, 0.5, size) * np.sqrt(h)
    Q = np.linalg.qr(rng.normal(size=(size, size)))[0]
    H, G = _tensor(Q * h @ Q.T), _tensor(Q @ g)
    exact = (-0.5 * np.log1p(h) + 0.5 * g**2 / (1 + h)).sum()
    return ClosedForm("rotated", size, lambda x: (0.5 * x @ H @ x + G @ x, H @ x + G), exact)


def saddle(rng, size=20):
    """Half of the directions go down, but not so fast as the Gaussian goes up."""
    h = np.r_[rng.uniform(-0.8, 0, size // 2), 10 ** rng.uniform(0, 2, size - size // 2)]
    H = _tensor(h)
    return ClosedForm("saddle", size, lambda x: (0.5 * (H * x**2).sum(), H * x), -0.5 * np.log1p(h).sum())


def mixture(rng, size=5, wells=4, width=0.5):
    """exp(-V) is a sum of Gaussians away from the weights."""
    mu, logs = rng.normal(0, 1, (wells, size)), rng.normal(0, 1, wells)
    M, L = _tensor(mu), _tensor(logs)
    density = lambda x: torch.logsumexp(L - ((x - M) ** 2).sum(1) / (2 * width**2), 0)  # noqa: E731
    here = density(torch.zeros(size, dtype=torch.float64))
    share = logs - (mu**2).sum(1) / (2 * (width**2 + 1)) + size / 2 * math.log(width**2 / (1 + width**2))

    def function(x):
        x = x.clone().requires_grad_(True)
        value = here - density(x)
        return value.detach(), torch.autograd.grad(value, x)[0]

    return ClosedForm("mixture", size, function, np.logaddexp.reduce(share) - here.item())


OTHERS = {
    "rotated": rotated,
    "saddle": saddle,
    "mixture": mixture,
    "Cauchy": lambda rng: separable("Cauchy", 5, lambda x: torch.log1p(20 * x**2)),
    "one Cauchy": lambda rng: separable("one Cauchy", 1, lambda x: torch.log1p(5 * x**2)),
    "double well": lambda rng: separable("double well", 5, lambda x: 5 * ((x**2 - 2) ** 2 - 4) / 4),
    "cusp": lambda rng: separable("cusp", 2, lambda x: 3 * x.abs()),
    "slope": lambda rng: separable("slope", 20, lambda x: 1.0 * x),
    "ceiling": lambda rng: separable("ceiling", 20, lambda x: 4 * x**2 / (1 + x**2)),
    "waves": lambda rng: separable("waves", 5, lambda x: 2 * (1 - torch.cos(5 * x)) + 0.5 * x**2),
}


# ---- traps


def _radial(size, V):
    """log E exp(-V(|xi|)) for xi of so many dimensions."""
    r = np.linspace(1e-6, math.sqrt(size) + 12, 200_001)
    log_density = (size - 1) * np.log(r) - r * r / 2
    log_density -= np.logaddexp.reduce(log_density)
    return np.logaddexp.reduce(log_density - V(r))


def narrow_well(rng, depth, width, size=15, bowl=0.0):
    """depth (1 - exp(-|xi|^2/(2 width^2))) + bowl |xi|^2/2: a well at the weights that no random point meets."""

    def V(r):
        return depth * (1 - np.exp(-(r**2) / (2 * width**2))) + 0.5 * bowl * r**2

    def function(x):
        e = depth * torch.exp(-(x**2).sum() / (2 * width**2))
        return depth - e + 0.5 * bowl * (x**2).sum(), (e / width**2 + bowl) * x

    return ClosedForm("narrow well", size, function, _radial(size, V))


def core_and_plain(rng, size=10, power=11.0, stiffness=100.0):
    """power/2 log(1 + stiffness |xi|^2): a core at the weights that short steps are needed for, and a wide plain."""

    def function(x):
        square = (x**2).sum()
        return 0.5 * power * torch.log1p(stiffness * square), power * stiffness / (1 + stiffness * square) * x

    exact = _radial(size, lambda r: 0.5 * power * np.log1p(stiffness * r * r))
    return ClosedForm("core and plain", size, function, exact)


def wells_on_a_line(rng, wells=3, width=0.1, depth=8.0):
    """Narrow wells of different depths in one dimension, anywhere: chains hardly go from one to another."""
    C, D = _tensor(rng.normal(0, 1.2, wells)), _tensor(depth * rng.uniform(0.6, 1.4, wells))
    t = np.linspace(-12, 12, 200_001)

    def each(x):
        return D * torch.exp(-((x[:, None] - C) ** 2) / (2 * width**2))

    def function(x):
        e = each(x)
        return float(here - e.sum()), (e * (x[:, None] - C) / width**2).sum(1)

    here = each(torch.zeros(1, dtype=torch.float64)).sum()
    logs = -t * t / 2
    exact = np.logaddexp.reduce(logs + (each(_tensor(t)).sum(1) - here).numpy()) - np.logaddexp.reduce(logs)
    return ClosedForm("wells on a line", 1, function, exact)


def wells_in_the_plane(rng):
    """A few narrow wells of different depths in two dimensions."""
    wells, width = int(rng.choice([2, 3, 4])), rng.uniform(0.12, 0.3)
    C = _tensor(rng.normal(0, 1.0, (wells, 2)))
    D = _tensor(rng.uniform(5, 11) * rng.uniform(0.6, 1.4, wells))

    def each(x):
        return D * torch.exp(-((x[..., None, :] - C) ** 2).sum(-1) / (2 * width**2))

    def function(x):
        e = each(x)
        return float(here - e.sum()), (e[:, None] * (x - C) / width**2).sum(0)

    here = each(torch.zeros(2, dtype=torch.float64)).sum()
    t = np.linspace(-6, 6, 1201)
    x = _tensor(np.stack(np.meshgrid(t, t, indexing="ij"), -1).reshape(-1, 2))
    logs = -(x**2).sum(1).numpy() / 2
    exact = np.logaddexp.reduce(logs + (each(x).sum(1) - here).numpy()) - np.logaddexp.reduce(logs)
    return ClosedForm("wells in the plane", 2, function, exact)


def core_in_a_halo(rng):
    """exp(-V) is a narrow Gaussian at the weights in a wide one, each with a share of Z."""
    size, share = int(rng.integers(2, 13)), rng.uniform(0.1, 0.9)
    h = np.array([rng.uniform(0.05, 0.3), rng.uniform(0.7, 2.0)]) ** -2.0
    logs = np.log([share, 1 - share]) + size / 2 * np.log1p(h)
    here = np.logaddexp(*logs)

    def function(x):
        each = logs - 0.5 * h * float((x**2).sum())
        total = np.logaddexp(*each)
        return here - total, float(h @ np.exp(each - total)) * x

    return ClosedForm("core in a halo", size, function, -here)


def wells_apart(rng):
    """exp(-V) is a sum of Gaussians of different widths and weights in a few dimensions, away from the weights."""
    size, wells = int(rng.integers(3, 13)), int(rng.choice([2, 3, 4]))
    mu, width = rng.normal(0, 1, (wells, size)), rng.uniform(0.1, 0.5, wells)
    logs = rng.normal(0, 2, wells) - 0.5 * size * np.log(width**2)
    M, L, W = _tensor(mu), _tensor(logs), _tensor(width)
    each = lambda x: L - ((x - M) ** 2).sum(1) / (2 * W**2)  # noqa: E731
    here = torch.logsumexp(each(torch.zeros(size, dtype=torch.float64)), 0)
    share = logs - (mu**2).sum(1) / (2 * (width**2 + 1)) + size / 2 * np.log(width**2 / (1 + width**2))

    def function(x):
        e = each(x)
        return here - torch.logsumexp(e, 0), (torch.softmax(e, 0) / W**2) @ (x - M)

    return ClosedForm("wells apart", size, function, np.logaddexp.reduce(share) - here.item())


def _random_core(rng):
    size = int(rng.choice([1, 2, 3, 5, 10, 20, 50]))
    return core_and_plain(rng, size, size * rng.uniform(1.0, 2.5) + rng.uniform(0, 2), 10 ** rng.uniform(1, 3))


def _random_wells(rng):
    return wells_on_a_line(rng, int(rng.choice([2, 3, 5])), rng.uniform(0.08, 0.2), rng.uniform(5, 12))


#: Where a few chains may agree by chance, all in the wrong place: an instance for every seed.
TRAPS = {
    "cores and plains": _random_core,
    "that of ten dimensions": core_and_plain,
    "wells on a line": _random_wells,
    "three of width 0.1": wells_on_a_line,
    "wells in the plane": wells_in_the_plane,
    "cores in halos": core_in_a_halo,
    "wells apart": wells_apart,
}


def funnel(rng, kappa, tilt, size=20):
    """exp(kappa xi_0) |xi_1..|^2/2 + tilt xi_0: one component sets the width of all others."""
    t = np.linspace(-60, 60, 60_001)
    exact = np.logaddexp.reduce(-tilt * t - (size - 1) / 2 * np.logaddexp(0, kappa * t) - t * t / 2)
    exact += math.log((t[1] - t[0]) / math.sqrt(2 * math.pi))

    def function(x):
        scale, rest = torch.exp(kappa * x[0]), (x[1:] ** 2).sum()
        first = 0.5 * kappa * scale * rest + tilt
        return 0.5 * scale * rest + tilt * x[0], torch.cat([first[None], scale * x[1:]])

    return ClosedForm("funnel", size, function, exact)


def heavy_tail(rng, s, size=10):
    """exp(s xi_0) - 1 and a bowl: exp(-V) hardly has a mean."""
    exact = np.logaddexp.reduce(1 - np.exp(np.minimum(s * T, 700)) + np.log(GAUSS)) - 0.5 * (size - 1) * math.log(2)

    def function(x):
        e = torch.exp(s * x[0])
        return e - 1 + 0.5 * (x[1:] ** 2).sum(), torch.cat([(s * e)[None], x[1:]])

    return ClosedForm("heavy tail", size, function, exact)


def stiff_directions(rng, stiffness, size=60, stiff=5):
    """A few stiff directions whose well is away from the weights, and many soft ones that drift."""
    h = np.r_[np.full(stiff, stiffness), np.full(size - stiff, 0.3)]
    mu = np.r_[rng.normal(0, 0.3, stiff), np.full(size - stiff, 1.5)]
    H, M = _tensor(h), _tensor(mu)
    # V = h (xi - mu)^2/2 - h mu^2/2
    exact = (-0.5 * np.log1p(h) - 0.5 * h * mu**2 / (1 + h) + 0.5 * h * mu**2).sum()
    function = lambda x: ((0.5 * H * (x - M) ** 2 - 0.5 * H * M**2).sum(), H * (x - M))  # noqa: E731
    return ClosedForm("stiff directions", size, function, exact)


def steps(rng, height, size=40):
    """A jump of ``height`` at xi_i = 1 for each component, without a gradient."""
    above = 0.5 * math.erfc(1 / math.sqrt(2))
    exact = size * math.log(1 - above + above * math.exp(-height))
    function = lambda x: (height * (x > 1).double().sum(), torch.zeros_like(x))  # noqa: E731
    return ClosedForm("steps", size, function, exact)


def hidden_well(rng, size=30, depth=900.0, width=0.1, distance=20.0):
    """A bowl, and a deep narrow well far from the weights: nothing finds it."""
    center = torch.zeros(size, dtype=torch.float64)
    center[0] = distance
    # away from the well Z is that of the bowl, in it a Gaussian integral around its bottom
    h = 1 + 1 + depth / width**2
    well = depth - 0.5 * 2 * distance**2 - 0.5 * size * math.log(h) + 0.5 * (2 * distance) ** 2 / h
    exact = np.logaddexp(-0.5 * size * math.log(2), well)

    def function(x):
        e = depth * torch.exp(-((x - center) ** 2).sum() / (2 * width**2))
        return 0.5 * (x**2).sum() - e, x + e / width**2 * (x - center)

    return ClosedForm("hidden well", size, function, exact)
