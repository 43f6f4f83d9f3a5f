r"""The spectrum of the Hessian or of the Gauss-Newton matrix: density, trace, largest eigenvalues, with error bars.

.. code-block:: text

    rho(x) = (1/D) sum_i g_width(x - lambda_i)          g a Gaussian, lambda_i the eigenvalues of diag(a) H diag(a)

is a mean over eigenvalues, (1/D) tr f(A), and so are the trace per weight and all other moments. For q uniform on the
sphere the expectation of q^T f(A) q is just that, and Lanczos iteration gives it for every f at once
(:mod:`wideflat.hessian.lanczos`). What is random are the P probes q, and their variance is known:

.. code-block:: text

    Var q^T f(A) q = 2 (m_2 - m_1^2) / (D + 2),         m_k = (1/D) tr f(A)^k,  from the same rules

so that an error bar does not need many probes. For f >= 0 the mean over probes is nearly m_1 / nu times a chi^2 of

.. code-block:: text

    nu(m_1) = P (D + 2) m_1 / (r - m_1),                r = m_2 / m_1

degrees of freedom, at least one a probe. The interval of a density holds all m_1 for which what was seen is no
surprise; it is right also where a single eigenvalue lies. Two things make it hold with few probes: r is never below
what one eigenvalue at the node of the largest f has, since probes that hardly see it have a small mean and a small r
alike; and the tails are smaller than 2.5 % by P / (P + 6), since r is estimated by the same P probes. So the interval
held in 94.8 % of cases or more, and often in 97 to 99.

The error bar is that of the probes. The rule itself has an error that no probe shows: a density is right where its
width is not much below (largest - smallest) / steps, or where the eigenvalues stand alone (those at the ends are found
first).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wideflat.checks import choice, network, whole
from wideflat.distributed.whole import whole_network
from wideflat.energy.opening import Opened, opened
from wideflat.evaluation.evaluation import Forward, Metric
from wideflat.evaluation.selection import Selection, layers_of
from wideflat.hessian.eigenvalues import Spectrum
from wideflat.hessian.lanczos import Krylov, Rule
from wideflat.hessian.products import MATRICES, SecondDerivative
from wideflat.noise.scales import NothingMoves, Scale, Scales
from wideflat.progress import Progress
from wideflat.seeds import derive_seed

__all__ = ["layer_spectra", "spectrum"]

#: Numbers of all the vectors that are kept at once; probes go in groups where they need more.
ROOM = 2**27


def spectrum(
    model: nn.Module,
    data: Any,
    *,
    matrix: str = "hessian",
    probes: int = 8,
    steps: int = 40,
    top: int = 3,
    scale: Scale = "relative",
    metric: Metric = "loss",
    batch_norm: str = "eval",
    parameters: Selection = "all",
    seed: int = 0,
    progress: bool = True,
    batch_size: int | None = None,
    forward: Forward | None = None,
) -> Spectrum:
    """The spectrum of the Hessian, or of the Gauss-Newton matrix, of the mean loss over the data.

    Args:
        model: Any network that can be differentiated twice; it is left as it was found.
        data: See :func:`wideflat.local_energy`; it is gone through ``steps`` times.
        matrix: ``"hessian"`` or ``"ggn"`` (generalised Gauss-Newton).
        probes: Random vectors. All of them share the forward passes.
        steps: Lanczos steps. Each keeps a vector of the size of the parameters for each probe.
        top: How many of the largest eigenvalues to name.
        scale: The a of diag(a) H diag(a); see :func:`wideflat.curvature`.
        metric: ``"loss"`` or a differentiable function of outputs and targets.
        batch_norm: ``"eval"`` (running statistics) or ``"batch"`` (those of each batch).
        parameters: Which parameters; see :func:`wideflat.evaluation.selection.select_parameters`.
        seed: Of the probes.
        progress: Show progress.
        batch_size: Examples a batch, where batches are made here.
        forward: See :func:`wideflat.local_energy`.

    Example:
        L = (1/2) sum_i h_i w_i^2 has the eigenvalues h.

        >>> model = nn.Linear(3, 1, bias=False)
        >>> h = torch.tensor([3.0, 2.0, 1.0])
        >>> loss = lambda outputs, targets: 0.5 * (h * model.weight[0] ** 2).sum()
        >>> found = spectrum(model, (torch.zeros(1, 3), torch.zeros(1)), scale="absolute", metric=loss, progress=False)
        >>> found.eigenvalues.round(3).tolist()
        [3.0, 2.0, 1.0]
    """
    effort = _checked_effort(matrix, probes, steps, top, metric)
    begun = opened(
        model, data, metric, parameters, batch_norm=batch_norm, forward=forward, batch_size=batch_size, seed=seed
    )
    return _Measurement(begun, matrix, effort).run({begun.words: begun.names}, scale, progress)[begun.words]


def layer_spectra(
    model: nn.Module,
    data: Any,
    layers: Iterable[str] | None = None,
    *,
    matrix: str = "hessian",
    probes: int = 4,
    steps: int = 24,
    top: int = 1,
    scale: Scale = "relative",
    metric: Metric = "loss",
    batch_norm: str = "eval",
    seed: int = 0,
    progress: bool = True,
    batch_size: int | None = None,
    forward: Forward | None = None,
) -> dict[str, Spectrum]:
    """One spectrum for each layer: that of the diagonal block of the matrix that belongs to its parameters.

    All layers share the forward passes, and the data are gone through ``steps`` times in all. Layers whose parameters
    are all tied to those of another, or that cannot move under the scale, are left out.

    Args:
        model: See :func:`spectrum`.
        data: See there.
        layers: Names of modules; by default all that have parameters of their own.
        matrix: See :func:`spectrum`.
        probes: Random vectors for each layer.
        steps: See :func:`spectrum`.
        top: See there.
        scale: See there.
        metric: See there.
        batch_norm: See there.
        seed: See there.
        progress: See there.
        batch_size: See there.
        forward: See there.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> data = torch.randn(20, 3), torch.randint(2, (20,))
        >>> {name: found.size for name, found in layer_spectra(model, data, progress=False).items()}
        {'0': 16, '2': 10}
    """
    effort = _checked_effort(matrix, probes, steps, top, metric)
    model = whole_network(network(model))
    groups = layers_of(model, layers)
    names = {name for group in groups.values() for name in group}
    begun = opened(
        model, data, metric, lambda name, _: name in names, batch_norm=batch_norm, forward=forward,
        batch_size=batch_size, seed=seed,
    )  # fmt: skip
    return _Measurement(begun, matrix, effort).run(groups, scale, progress)


def _checked_effort(matrix: str, probes: int, steps: int, top: int, metric: Metric) -> tuple[int, int, int]:
    """Probes, steps and eigenvalues to name, or an error that says what was expected."""
    choice("matrix", matrix, MATRICES)
    if isinstance(metric, str) and metric == "error":
        raise ValueError('the error has no Hessian: it is a step function; use metric="loss"')
    return whole("probes", probes, 1, 10**6), whole("steps", steps, 1, 10**6), whole("top", top, 0, 10**6)


class _Measurement:
    """Spectra of several groups of parameters of one network."""

    def __init__(self, begun: Opened, matrix: str, effort: tuple[int, int, int]) -> None:
        self.begun, self.matrix, (self.probes, self.steps, self.top) = begun, matrix, effort
        self.operator: SecondDerivative = MATRICES[matrix](begun.evaluation, begun.blocks, begun.names)

    def run(self, groups: dict[str, list[str]], scale: Scale, progress: bool) -> dict[str, Spectrum]:
        """The spectrum of each group, by its words."""
        scales, refused = {}, None
        for words, names in groups.items():
            try:
                scales[words] = Scales(self.begun.model, names, scale)
            except NothingMoves as reason:
                refused = reason
        if not scales:
            raise refused or ValueError("the network has no layer with parameters of its own")
        total = sum(len(batch) for batch in self._batches(scales)) * self.steps
        found: dict[str, list[Rule]] = {words: [] for words in scales}
        evaluation = self.begun.evaluation
        with evaluation.prepared(), Progress("spectrum", total, enabled=progress) as bar:
            with evaluation.explained():
                baseline = self.operator.loss()
            for batch in self._batches(scales):
                for words, rule in zip([words for words, _ in batch], self._rules(batch, scales, bar), strict=True):
                    found[words].append(rule)
        return {words: self._spectrum(words, scales[words], found[words], baseline) for words in scales}

    def _batches(self, scales: dict[str, Scales]) -> list[list[tuple[str, int]]]:
        """Pairs of group and probe, in batches that fit into memory."""
        batches: list[list[tuple[str, int]]] = []
        room = 0
        for words, scale in scales.items():
            for probe in range(self.probes):
                need = scale.size * min(self.steps, scale.size)
                if not batches or room + need > ROOM:
                    batches.append([])
                    room = 0
                batches[-1].append((words, probe))
                room += need
        return batches

    def _rules(self, batch: list[tuple[str, int]], scales: dict[str, Scales], bar: Progress) -> list[Rule]:
        """The rules of a batch of probes, which share the forward passes."""
        place = {name: i for i, name in enumerate(self.begun.names)}
        each = {words: [probe for w, probe in batch if w == words] for words in dict.fromkeys(w for w, _ in batch)}
        groups = {words: [place[name] for name in scales[words].values] for words in each}
        a = {words: scales[words].flat()[:, None] for words in each}
        iterations = {words: Krylov(self._starts(words, each[words], a[words]), self.steps) for words in each}
        while live := [words for words, iteration in iterations.items() if not iteration.ended]:
            vectors = [a[words] * iterations[words].columns for words in live]
            products = self.operator.parts([groups[words] for words in live], vectors)
            for words, out in zip(live, products, strict=True):
                iterations[words].take(a[words] * out)
            bar.advance(sum(len(each[words]) for words in live))
        return [rule for iteration in iterations.values() for rule in iteration.rules()]

    def _starts(self, words: str, numbers: list[int], like: Tensor) -> Tensor:
        """Random vectors as columns; their directions are uniform."""
        columns = []
        for probe in numbers:
            generator = torch.Generator().manual_seed(derive_seed(self.begun.seed, "probe", words, probe))
            columns.append(torch.randn(len(like), generator=generator).to(like))
        return torch.stack(columns, 1)

    def _spectrum(self, words: str, scales: Scales, found: list[Rule], baseline: float) -> Spectrum:
        wide = max(len(rule.nodes) for rule in found)
        nodes, weights = (
            np.stack([np.pad(getattr(rule, name), (0, wide - len(rule.nodes))) for rule in found])
            for name in ("nodes", "weights")
        )
        tops = [(rule.nodes[::-1][: self.top], rule.residuals[::-1][: self.top]) for rule in found]
        eigenvalues, residuals = min(tops, key=lambda pair: float(pair[1].sum()))
        return Spectrum(
            nodes, weights, eigenvalues, residuals, scales.size, baseline,
            self.begun.conventions(
                "spectrum", matrix=self.matrix, scale=scales.name, unmoved=scales.unmoved, parameters=words,
                perturbed=scales.size, examples=self.operator.examples, steps=self.steps, probes=len(found),
                notes=self.operator.notes,
            ),
        )  # fmt: skip
