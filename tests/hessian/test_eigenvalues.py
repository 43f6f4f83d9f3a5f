"""How often the stated intervals of a density hold, on spectra that were written down before any of them was looked at.

The interval had been changed twice after it had failed on the matrix of ``test_spectrum.py``, so that one shows little.
The spectra of :data:`FIRST` were written down then, with everything that is reported of them: 2,000 repetitions, 40
steps and the default width, at five quantiles of the eigenvalues and at all that stand alone. An interval *holds* where
it covers at least 93.5 % of the time (three standard deviations of 2,000 repetitions below 95 %).
"""

import numpy as np
import pytest
import torch

from wideflat import Spectrum
from wideflat.hessian.lanczos import Krylov

REPETITIONS, STEPS, HOLDS = 2000, 40, 0.935
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def clustered():
    """Five narrow clusters of falling size."""
    rng = np.random.default_rng(11)
    sizes = {0.0: 200, 0.5: 100, 1.0: 60, 2.0: 30, 4.0: 10}
    return np.concatenate([rng.normal(center, 0.02, count) for center, count in sizes.items()]), []


def heavy_tailed():
    """Quantiles of a Pareto law of exponent 1.5: the largest is a hundred times the median."""
    return (1 - (np.arange(500) + 0.5) / 500) ** (-1 / 1.5), [99.5, 47.9]


def low_rank():
    """Ten large eigenvalues above a bulk near 0, as in trained classifiers."""
    rng = np.random.default_rng(12)
    top = np.geomspace(1, 50, 10)
    return np.concatenate([0.02 * rng.standard_normal(990) ** 2, top]), [50.0, top[8], top[7]]


def negative():
    """A semicircle around -0.3 and one eigenvalue far out on either side."""
    rng = np.random.default_rng(13)
    bulk = 2 * rng.beta(1.5, 1.5, 298) - 1 - 0.3
    return np.concatenate([bulk, [-3.0, 4.0]]), [-3.0, 4.0]


def few():
    """Forty eigenvalues, evenly spaced: as many as there are steps."""
    return (np.arange(40) + 0.5) / 40, []


def power_law():
    """1/i, i = 1 .. 800 (3,000 were planned: too long, seen before any result)."""
    return 1 / np.arange(1.0, 801.0), [1.0, 0.5]


FIRST = {f.__name__: f for f in (clustered, heavy_tailed, low_rank, negative, few, power_law)}


# Written down after the standard error of a trace had been seen 3.4 of itself off in a network of 75 weights with two
# large eigenvalues, and before the interval that was made for it had been tried on anything: 1,000 repetitions, the
# density as above, and the trace by its interval instead of two standard errors.


def one_large():
    """One eigenvalue that is nearly all of the trace."""
    return np.concatenate([np.random.default_rng(21).normal(0, 0.01, 200), [5.0]]), [5.0]


def two_sided():
    """A few large ones on both sides."""
    rng = np.random.default_rng(22)
    return np.concatenate([rng.normal(0, 0.1, 295), [4.0, 3.9, 4.1], [-3.0, -2.5]]), [-3.0]


def decaying():
    """exp(-i/5)."""
    return np.exp(-np.arange(300) / 5), [1.0]


def wishart():
    """Eigenvalues of a sample covariance, 256 of 512."""
    x = np.random.default_rng(23).standard_normal((512, 256))
    return np.linalg.eigvalsh(x.T @ x / 512), []


SECOND = {f.__name__: f for f in (one_large, two_sided, decaying, wishart)}


# Matrices of trained networks, whose eigenvalues nobody chose, written down before either was looked at: 2,000
# repetitions, all as above; the two largest eigenvalues and the lowest count as standing alone.


def _trained(model, inputs, targets):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(200):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    names, weights = zip(*((name, p.detach()) for name, p in model.named_parameters()), strict=True)
    sizes, shapes = [w.numel() for w in weights], [w.shape for w in weights]

    def outputs(flat):
        parts = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        return torch.func.functional_call(model, dict(zip(names, parts, strict=True)), (inputs,))

    return outputs, torch.cat([w.flatten() for w in weights])


def _eigenvalues(matrix):
    values = np.linalg.eigvalsh(matrix.detach().numpy())
    return values, [values[-1], values[-2], values[0]]


def hessian_of_a_perceptron():
    """diag(w) H diag(w) of a tanh network of 185 weights on labels that it cannot all learn."""
    torch.manual_seed(31)
    inputs = torch.randn(200, 6, dtype=torch.float64)
    targets = (inputs[:, :3] + torch.randn(200, 3)).argmax(1)
    layers = [torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)]
    outputs, w = _trained(torch.nn.Sequential(*layers).double(), inputs, targets)
    h = torch.autograd.functional.hessian(lambda v: torch.nn.functional.cross_entropy(outputs(v), targets), w)
    return _eigenvalues(w[:, None] * h * w)


def fisher_of_a_convolution():
    """The Gauss-Newton matrix of a convolutional network of 151 weights on noisy images of stripes."""
    torch.manual_seed(32)
    targets = torch.randint(3, (150,))
    stripes = torch.stack([torch.sin(torch.arange(8.0) * k)[:, None].expand(8, 8) for k in (1, 2, 3)])
    inputs = (stripes[targets] + 1.5 * torch.randn(150, 8, 8))[:, None].double()
    layers = [torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten()]
    outputs, w = _trained(torch.nn.Sequential(*layers, torch.nn.Linear(36, 3)).double(), inputs, targets)
    jacobian = torch.func.jacrev(outputs)(w)
    p = outputs(w).softmax(1)
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return _eigenvalues(torch.einsum("nkd,nkl,nle->de", jacobian, inner, jacobian) / len(inputs))


THIRD = {f.__name__: f for f in (hessian_of_a_perceptron, fisher_of_a_convolution)}


# Written down after the interval had been widened for few probes, which had been tried on five of those above, and
# before it had been tried on any of these: 2,000 repetitions, all as above.


def spiked():
    """Two large ones above ninety small ones."""
    return np.concatenate([np.random.default_rng(41).gamma(0.5, 0.1, 88), [3.0, 6.0]]), [6.0, 3.0]


def lognormal():
    """Of every size."""
    values = np.sort(np.exp(2 * np.random.default_rng(42).standard_normal(150)))
    return values, [values[-1], values[-2]]


def saddle():
    """A bulk around 0, one direction down and two up."""
    return np.concatenate([np.random.default_rng(43).normal(0, 0.2, 247), [-2.0, 1.4, 1.5]]), [-2.0, 1.5]


def hessian_of_learned_labels():
    """The Hessian of a ReLU network of 130 weights that has learned random labels."""
    torch.manual_seed(44)
    inputs, targets = torch.randn(40, 4, dtype=torch.float64), torch.randint(2, (40,))
    layers = [torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)]
    outputs, w = _trained(torch.nn.Sequential(*layers).double(), inputs, targets)
    return _eigenvalues(
        torch.autograd.functional.hessian(lambda v: torch.nn.functional.cross_entropy(outputs(v), targets), w)
    )


class _Attention(torch.nn.Module):
    """One head over words of three letters."""

    def __init__(self):
        super().__init__()
        self.words, self.three, self.out = torch.nn.Embedding(6, 5), torch.nn.Linear(5, 15), torch.nn.Linear(5, 3)

    def forward(self, words):
        q, k, v = self.three(self.words(words)).chunk(3, -1)
        return self.out(((q @ k.transpose(1, 2)).softmax(-1) @ v).mean(1))


def fisher_of_an_attention():
    """diag(w) G diag(w), G the Gauss-Newton matrix of an attention layer of 138 weights on a rule with exceptions."""
    torch.manual_seed(45)
    words = torch.randint(6, (120, 3))
    targets = torch.where(torch.rand(120) < 0.8, words.sum(1) % 3, torch.randint(3, (120,)))
    outputs, w = _trained(_Attention().double(), words, targets)
    jacobian = torch.func.jacrev(outputs)(w) * w
    p = outputs(w).softmax(1)
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return _eigenvalues(torch.einsum("nkd,nkl,nle->de", jacobian, inner, jacobian) / len(words))


FOURTH = {f.__name__: f for f in (spiked, lognormal, saddle, hessian_of_learned_labels, fisher_of_an_attention)}


# Of those the trace of the saddle did not hold with 16 probes (93.5 %): the covariance of its two parts had been left
# out. Written down after that was mended, and before either was tried.


def balanced():
    """As much on either side, with long tails."""
    values = np.sort(np.random.default_rng(51).laplace(0, 1, 160))
    return values, [values[-1], values[0]]


def hessian_of_a_new_network():
    """The Hessian of a tanh network of 98 weights before any training: as much down as up."""
    torch.manual_seed(52)
    model = torch.nn.Sequential(torch.nn.Linear(5, 14), torch.nn.Tanh(), torch.nn.Linear(14, 1, bias=False)).double()
    inputs, targets = torch.randn(60, 5, dtype=torch.float64), torch.randn(60, 1, dtype=torch.float64)
    names, weights = zip(*((name, p.detach()) for name, p in model.named_parameters()), strict=True)

    def loss(flat):
        parts = [x.view(w.shape) for x, w in zip(flat.split([w.numel() for w in weights]), weights, strict=True)]
        found = torch.func.functional_call(model, dict(zip(names, parts, strict=True)), (inputs,))
        return (found - targets).square().mean()

    flat = torch.cat([w.flatten() for w in weights])
    return _eigenvalues(torch.autograd.functional.hessian(loss, flat))


FIFTH = {f.__name__: f for f in (balanced, hessian_of_a_new_network)}


def rules_of(values, probes, seed, steps=STEPS):
    """Quadrature rules of a diagonal matrix for so many probes: nodes and weights, shape (probes, steps)."""
    h = torch.tensor(values, dtype=torch.float64)
    starts = torch.randn(len(h), probes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    iteration = Krylov(starts, steps)
    while not iteration.ended:
        iteration.take(h[:, None] * iteration.columns)
    rules = iteration.rules()
    pairs = (("nodes", "weights"), [np.zeros((probes, steps)), np.zeros((probes, steps))])
    for name, found in zip(*pairs, strict=True):
        for row, rule in zip(found, rules, strict=True):
            row[: len(rule.nodes)] = getattr(rule, name)
    return pairs[1]


def coverage(spectrum, counts, repetitions, seed):
    """For each number of probes: how often the interval of the density holds at each point, and that of the trace."""
    values, alone = spectrum
    points = np.array([*np.quantile(values, QUANTILES), *alone])
    hits = {probes: [] for probes in counts}
    most = max(counts)
    group = max(1, min(repetitions, 4_000_000 // (len(values) * STEPS * most)))
    for done in range(0, repetitions, group):
        count = min(group, repetitions - done)
        nodes, weights = rules_of(values, most * count, seed + done)
        for k in range(count):
            for probes in counts:
                rows = slice(k * most, k * most + probes)
                found = Spectrum(nodes[rows], weights[rows], np.zeros(0), np.zeros(0), len(values), 0.0)
                density = found.density(points)
                bell = np.exp(-0.5 * ((points[:, None] - values) / density.width) ** 2)
                exact = bell.mean(1) / (density.width * np.sqrt(2 * np.pi))
                trace = found.trace_interval[0] <= values.sum() <= found.trace_interval[1]
                hits[probes].append([*((density.lower <= exact) & (exact <= density.upper)), trace])
    return {probes: np.mean(rows, axis=0) for probes, rows in hits.items()}


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", [*FIRST, *SECOND, *THIRD, *FOURTH, *FIFTH])
def test_the_intervals_hold_on_spectra_that_nothing_was_chosen_by(name):
    spectrum = {**FIRST, **SECOND, **THIRD, **FOURTH, **FIFTH}[name]()
    found = coverage(spectrum, (2, 4, 8, 16), REPETITIONS, seed=100_000)
    for probes, (*covered, trace) in found.items():
        print(f"\n{name} probes={probes} density {[round(100 * c, 1) for c in covered]} trace {100 * trace:.1f}")
    assert all((covered >= HOLDS).all() for covered in found.values())


def test_the_intervals_hold_in_a_short_run():
    for spectrum in (negative(), one_large()):
        assert (coverage(spectrum, (4,), 120, seed=0)[4] > 0.88).all()
