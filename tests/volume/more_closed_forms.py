"""Closed forms that came after every threshold was chosen: random instances, other shapes than the families."""

import math

import closed_forms as forms
import numpy as np
import torch

tensor = forms._tensor


def turned(rng, size):
    """A random orthogonal matrix."""
    return np.linalg.qr(rng.normal(size=(size, size)))[0]


def by_autograd(name, size, function, exact, **options):
    def with_gradient(x):
        x = x.clone().requires_grad_(True)
        value = function(x)
        return value.detach(), torch.autograd.grad(value, x)[0]

    return forms.ClosedForm(name, size, with_gradient, exact, **options)


def along(functions):
    """Sum of log E exp(-f(xi)) over functions of one Gaussian number, on a grid."""
    t = np.linspace(-12, 12, 48_001)
    logs = -t * t / 2
    norm = np.logaddexp.reduce(logs)
    return sum(np.logaddexp.reduce(logs - f(t)) - norm for f in functions)


def ring(rng):
    """c (|xi| - r)^2/2: a shell around the weights."""
    size, c, r = int(rng.integers(2, 20)), 10 ** rng.uniform(0.5, 2.5), rng.uniform(0.5, 3)
    exact = forms._radial(size, lambda s: 0.5 * c * (s - r) ** 2 - 0.5 * c * r**2)
    return by_autograd("ring", size, lambda x: 0.5 * c * ((x.norm() + 1e-300) - r) ** 2 - 0.5 * c * r**2, exact)


def turned_quartic(rng):
    """Fourth powers along turned axes, of scales over four decades."""
    size = int(rng.integers(5, 40))
    c, Q = 10 ** rng.uniform(-2, 2, size), turned(rng, size)
    exact = along([lambda t, k=k: k * t**4 for k in c])
    C, Q = tensor(c), tensor(Q)
    return by_autograd("quartic", size, lambda x: (C * (Q @ x) ** 4).sum(), exact)


def log_cosh(rng):
    """c (log cosh(s xi + g) - log cosh g): linear far away, quadratic at the bottom, which is beside the weights."""
    size = int(rng.integers(10, 80))
    c, s, g = 10 ** rng.uniform(-1, 1.5, size), 10 ** rng.uniform(-0.5, 1, size), rng.normal(0, 0.5, size)
    smooth = lambda z: np.logaddexp(z, -z)  # noqa: E731
    exact = along([lambda t, k=k: c[k] * (smooth(s[k] * t + g[k]) - smooth(g[k])) for k in range(size)])
    C, S, G = tensor(c), tensor(s), tensor(g)
    f = lambda z: torch.logaddexp(z, -z)  # noqa: E731
    return by_autograd("log cosh", size, lambda x: (C * (f(S * x + G) - f(G))).sum(), exact)


def scales(rng):
    """A product of factors of different shape and scale: bowls, roofs, and counts with log-linear rates."""
    size = int(rng.integers(4, 16))
    h, c = 10 ** rng.uniform(-3, 4, size), 10 ** rng.uniform(-1, 1, size)
    k, s = rng.integers(0, 6, size).astype(float), rng.uniform(0.3, 1.0, size)
    exact = along([lambda t, a=a: 0.5 * a * t * t for a in h]) + along([lambda t, a=a: a * np.abs(t) for a in c])
    exact += along([lambda t, i=i: np.exp(s[i] * t) - 1 - k[i] * s[i] * t for i in range(size)])
    H, C, K, S = (tensor(v) for v in (h, c, k, s))

    def function(x):
        a, b, z = x.split(size)
        return (0.5 * H * a**2).sum() + (C * b.abs()).sum() + (torch.exp(S * z) - 1 - K * S * z).sum()

    return by_autograd("scales", 3 * size, function, exact)


def near_mixture(rng):
    """exp(-V) is a sum of Gaussians around the weights that overlap."""
    size, wells = int(rng.integers(2, 11)), int(rng.integers(2, 5))
    mu, width = rng.normal(0, 0.4, (wells, size)), rng.uniform(0.4, 1.0, wells)
    logs = rng.normal(0, 1, wells) - size * np.log(width)
    M, L, W = tensor(mu), tensor(logs), tensor(width)
    density = lambda x: torch.logsumexp(L - ((x - M) ** 2).sum(1) / (2 * W**2), 0)  # noqa: E731
    here = density(torch.zeros(size, dtype=torch.float64))
    share = logs - (mu**2).sum(1) / (2 * (width**2 + 1)) + size / 2 * np.log(width**2 / (1 + width**2))
    exact = np.logaddexp.reduce(share) - here.item()
    return by_autograd("near mixture", size, lambda x: here - density(x), exact)


def bananas(rng):
    """c (a - b^2 s)^2/2 for pairs (a, b): curved valleys."""
    pairs, c, s = int(rng.integers(2, 12)), 10 ** rng.uniform(0.5, 2), rng.uniform(0.3, 1.0)
    exact = pairs * (along([lambda t: 0.5 * c / (1 + c) * s**2 * t**4]) - 0.5 * math.log1p(c))
    function = lambda x: 0.5 * c * ((x[:pairs] - s * x[pairs:] ** 2) ** 2).sum()  # noqa: E731
    return by_autograd("bananas", 2 * pairs, function, exact)


def bilinear(rng):
    """c a b for pairs: E exp(-c a b) = (1 - c^2)^(-1/2), the weights are a saddle."""
    c = rng.uniform(0.1, 0.8, int(rng.integers(5, 30)))
    C = tensor(c)
    function = lambda x: (C * x[: len(C)] * x[len(C) :]).sum()  # noqa: E731
    return by_autograd("bilinear", 2 * len(c), function, -0.5 * np.log1p(-(c**2)).sum())


def hinges(rng):
    """max(0, 1 - m - s xi) - max(0, 1 - m)."""
    size = int(rng.integers(50, 300))
    m, s = rng.normal(1.5, 1, size), rng.uniform(0.5, 4)
    exact = along([lambda t, a=a: np.maximum(0, 1 - a - s * t) - max(0, 1 - a) for a in m])
    M = tensor(m)
    function = lambda x: ((1 - M - s * x).clamp(min=0) - (1 - M).clamp(min=0)).sum()  # noqa: E731
    return by_autograd("hinges", size, function, exact)


def half_spaces(rng):
    """Pairs of half-spaces through the weights whose normals have correlation rho: P = 1/4 + arcsin(rho)/(2 pi)."""
    pairs, size = int(rng.integers(2, 8)), int(rng.integers(20, 60))
    rho, Q = rng.uniform(-0.7, 0.9, pairs), turned(rng, size)
    first = Q[:pairs]
    second = rho[:, None] * first + np.sqrt(1 - rho**2)[:, None] * Q[pairs : 2 * pairs]
    U = tensor(np.concatenate([first, second]))
    exact = np.log(0.25 + np.arcsin(rho) / (2 * math.pi)).sum()
    function = lambda x: ((-(U @ x)).clamp(min=0).sum(), -U.T @ (U @ x < 0).double())  # noqa: E731
    return forms.ClosedForm("half-spaces", size, function, exact, 8.0, solutions=True)


def slabs(rng):
    """|u . xi| < k for turned directions: P = product of erf(k/sqrt 2)."""
    count, size = int(rng.integers(3, 12)), int(rng.integers(15, 60))
    k, U = rng.uniform(0.3, 1.5, count), tensor(turned(rng, size)[:count])
    K = tensor(k)
    exact = sum(math.log(math.erf(a / math.sqrt(2))) for a in k)

    def function(x):
        z = U @ x
        return (z.abs() - K).clamp(min=0).sum(), U.T @ (z.sign() * (z.abs() > K))

    return forms.ClosedForm("slabs", size, function, exact, 8.0, solutions=True)


MORE = {
    "ring": ring,
    "quartic": turned_quartic,
    "log cosh": log_cosh,
    "scales": scales,
    "near mixture": near_mixture,
    "bananas": bananas,
    "bilinear": bilinear,
    "hinges": hinges,
    "half-spaces": half_spaces,
    "slabs": slabs,
}
