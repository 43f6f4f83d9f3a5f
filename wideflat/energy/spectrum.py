r"""The spectrum of the Hessian or of the Gauss-Newton matrix: density, trace, largest eigenvalues, with error bars.

.. code-block:: text

    rho(x) = (1/D) sum_i g_width(x - lambda_i)          g a Gaussian, lambda_i the eigenvalues of diag(a) H diag(a)

is a mean over eigenvalues, (1/D) tr f(A), and so are the trace per weight and all other moments. For q uniform on the
sphere the expectation of q^T f(A) q is just that, and Lanczos iteration gives it for every f at once
(:mod:`wideflat.energy.lanczos`). What is random are the P probes q, and their variance is known:

.. code-block:: text

    Var q^T f(A) q = 2 (m_2 - m_1^2) / (D + 2),         m_k = (1/D) tr f(A)^k,  from the same rules

so that an error bar does not need many probes. For f >= 0 the mean over probes is nearly m_1 / nu times a chi^2 of

.. code-block:: text

    nu(m_1) = P (D + 2) m_1 / (r - m_1),                r = m_2 / m_1

degrees of freedom, at least one a probe. The interval of a density holds all m_1 for which what was seen is no
surprise; it is right also where a single eigenvalue lies.

The error bar is that of the probes. The rule itself has an error that no probe shows: a density is right where its
width is not much below (largest - smallest) / steps, or where the eigenvalues stand alone (those at the ends are found
first).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wideflat.checks import choice, whole
from wideflat.energy.evaluation import Evaluation, Forward, Metric
from wideflat.energy.hessian import MATRICES, SecondDerivative
from wideflat.energy.lanczos import Krylov, Rule
from wideflat.energy.profile import architecture, conventions
from wideflat.energy.request import whole_passes
from wideflat.energy.scales import NothingMoves, Scale, Scales
from wideflat.energy.selection import Selection, layers_of, select_parameters
from wideflat.files import atomic_write
from wideflat.progress import Progress
from wideflat.seeds import derive_seed

__all__ = ["Density", "Spectrum", "layer_spectra", "spectrum"]

#: Numbers of all the vectors that are kept at once; probes go in groups where they need more.
ROOM = 2**27


@dataclass
class Density:
    """The density of eigenvalues, smoothed by a Gaussian.

    Attributes:
        points: Where, shape (X,).
        mean: rho there.
        stderr: Its standard error over probes.
        lower: End of its interval at 95 %.
        upper: The other end.
        width: Of the Gaussian.
    """

    points: np.ndarray
    mean: np.ndarray
    stderr: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    width: float


@dataclass
class Spectrum:
    """Eigenvalues of a matrix of second derivatives, as far as random probes see them.

    Attributes:
        nodes: Of the quadrature rule of each probe, shape (P, M).
        weights: Of the nodes; each row has the sum 1 (0 for nodes that only fill a row).
        eigenvalues: The largest ones, in falling order: those of the probe that came nearest.
        residuals: |A v - lambda v| of each, an upper bound of its error.
        size: D, the number of weights.
        baseline: The loss.
        conventions: As in :class:`wideflat.LocalEnergy`.
    """

    nodes: np.ndarray
    weights: np.ndarray
    eigenvalues: np.ndarray
    residuals: np.ndarray
    size: int
    baseline: float
    conventions: dict[str, Any] = field(default_factory=dict)

    _ARRAYS = ("nodes", "weights", "eigenvalues", "residuals")

    def mean(self, function: Callable[[np.ndarray], np.ndarray]) -> tuple[float, float]:
        """(1/D) sum_i f(lambda_i), and its standard error over probes.

        Args:
            function: The f, of arrays; the smoother it is, the fewer steps it needs.
        """
        mean, variance = self._moments(function(self.nodes))
        return float(mean), math.sqrt(variance)

    def _moments(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The mean of values at the nodes (last two axes) over eigenvalues, and the variance of it over probes."""
        first, second = ((values**power * self.weights).sum(-1).mean(-1) for power in (1, 2))
        return first, 2 * np.maximum(second - first**2, 0.0) / ((self.size + 2) * len(self.nodes))

    @property
    def trace(self) -> float:
        """The sum of the eigenvalues."""
        return self.size * self.mean(lambda x: x)[0]

    @property
    def trace_stderr(self) -> float:
        """Standard error of the trace over probes."""
        return self.size * self.mean(lambda x: x)[1]

    @property
    def extent(self) -> tuple[float, float]:
        """The smallest and the largest node: the ends of the spectrum, from inside."""
        seen = self.nodes[self.weights > 0]
        return float(seen.min()), float(seen.max())

    def density(self, points: Sequence[float] | np.ndarray | None = None, width: float | None = None) -> Density:
        """The density of the eigenvalues with its interval over probes.

        Args:
            points: Where; 201 over the whole spectrum when left out.
            width: Standard deviation of the Gaussian; the length of the spectrum over the steps when left out.
        """
        low, high = self.extent
        if width is None:
            width = (high - low) / self.nodes.shape[1] or max(abs(high), 1.0) * 1e-3
        if not width > 0:
            raise ValueError(f"width must be positive, got {width}")
        where = np.linspace(low - 3 * width, high + 3 * width, 201) if points is None else np.asarray(points, float)
        bell = np.exp(-0.5 * ((where[:, None, None] - self.nodes) / width) ** 2) / (width * math.sqrt(2 * math.pi))
        mean, variance = self._moments(bell)
        second = (bell**2 * self.weights).sum(-1).mean(-1)
        lower, upper = (self._end(share, mean, second) for share in (0.975, 0.025))
        return Density(where, mean, np.sqrt(variance), lower, upper, float(width))

    def _end(self, share: float, mean: np.ndarray, second: np.ndarray) -> np.ndarray:
        """The m_1 of which the mean that was seen is this quantile, by bisection of its logarithm."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(mean > 0, second / mean, 1.0)
        low, high = np.full(len(mean), -12.0), np.full(len(mean), 12.0)
        for _ in range(50):
            middle = (low + high) / 2
            found = mean * np.exp(middle)
            below = np.maximum(ratio - found, 1e-12 * ratio)
            freedom = np.clip(len(self.nodes) * (self.size + 2) * found / below, len(self.nodes), 1e6)
            half = torch.from_numpy(freedom / 2)
            seen = torch.special.gammainc(half, half * torch.from_numpy(np.exp(-middle))).numpy()
            low, high = np.where(seen > share, middle, low), np.where(seen > share, high, middle)
        return mean * np.exp((low + high) / 2)

    def joined(self, other: Spectrum) -> Spectrum:
        """This one with the probes of another of the same matrix, from another seed."""
        ours, theirs = ({**s.conventions, "seed": None, "probes": None} for s in (self, other))
        if ours != theirs or self.size != other.size:
            raise ValueError("only spectra of the same matrix can be joined: their conventions differ")
        if self.conventions.get("seed") == other.conventions.get("seed"):
            raise ValueError("these spectra have the same seed, so the same probes: there is nothing to join")
        wide = max(self.nodes.shape[1], other.nodes.shape[1])
        nodes, weights = (
            np.concatenate([np.pad(getattr(s, name), ((0, 0), (0, wide - s.nodes.shape[1]))) for s in (self, other)])
            for name in ("nodes", "weights")
        )
        best = self if self.residuals.sum() <= other.residuals.sum() else other
        words = {**self.conventions, "probes": len(nodes)}
        return Spectrum(nodes, weights, best.eigenvalues, best.residuals, self.size, self.baseline, words)

    # ---- on disk and on paper

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        content = asdict(self)
        return {"format": 1, **content, **{name: content[name].tolist() for name in self._ARRAYS}}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Spectrum:
        """The inverse of :meth:`to_dict`."""
        content = dict(content)
        if content.pop("format", None) != 1:
            raise ValueError("expected a spectrum of format 1")
        try:
            return cls(**{**content, **{name: np.array(content[name], dtype=float) for name in cls._ARRAYS}})
        except (KeyError, TypeError) as error:
            raise ValueError(f"a part is missing or damaged ({error})") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, whole or not at all."""
        with atomic_write(path) as file:
            json.dump(self.to_dict(), file)
            file.write("\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Spectrum:
        """Read what :meth:`save` wrote."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path} is not a whole spectrum: {error}") from None

    def plot(self, ax: Any = None, label: str | None = None, **style: Any) -> Any:
        """Draw the density over eigenvalues, logarithmically, with its interval; returns the axes of matplotlib."""
        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots()
        found = self.density()
        (line,) = ax.plot(found.points, found.mean, label=label, **style)
        ax.fill_between(found.points, found.lower, found.upper, color=line.get_color(), alpha=0.2, linewidth=0)
        ax.set_yscale("log")
        ax.set_ylim(max(found.mean.max() * 1e-8, 1e-3 / (self.size * found.width)), found.mean.max() * 3)
        ax.set_xlabel(r"eigenvalue $\lambda$")
        ax.set_ylabel("density")
        if label is not None:
            ax.legend()
        return ax

    def about(self) -> str:
        """What it is the spectrum of, in one line."""
        c = self.conventions
        parts = [
            f"{_NAMES.get(c.get('matrix', ''), 'matrix')} of the {c['metric']} of {c['architecture']}"
            if "architecture" in c
            else "",
            f"{c['examples']} examples" if "examples" in c else "",
            f"{c['parameters']}, scale: {c['scale']}" if "scale" in c else "",
            f"{len(self.nodes)} probes",
            *c.get("notes", []),
        ]
        return "; ".join(part for part in parts if part)

    def __str__(self) -> str:
        top = ", ".join(f"{v:.4g} +- {r:.1g}" for v, r in zip(self.eigenvalues, self.residuals, strict=True))
        low, high = self.extent
        return "\n".join(
            [
                f"largest eigenvalues {top}",
                f"trace {self.trace:.4g} +- {self.trace_stderr:.2g} over {self.size} weights, nodes from {low:.4g} to "
                f"{high:.4g}",
                f"loss {self.baseline:.4g}",
                self.about(),
            ]
        )


_NAMES = {"hessian": "Hessian", "ggn": "Gauss-Newton matrix"}


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
        parameters: Which parameters; see :func:`wideflat.energy.selection.select_parameters`.
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
    names, words = select_parameters(model, parameters)
    measurement = _Measurement(
        model, data, matrix, (probes, steps, top), metric, batch_norm, seed, batch_size, forward, names
    )
    return measurement.run({words: names}, scale, progress)[words]


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
    groups = layers_of(model, layers)
    names = [name for group in groups.values() for name in group]
    measurement = _Measurement(
        model, data, matrix, (probes, steps, top), metric, batch_norm, seed, batch_size, forward, names
    )
    return measurement.run(groups, scale, progress)


class _Measurement:
    """Spectra of several groups of parameters of one network."""

    def __init__(
        self, model: nn.Module, data: Any, matrix: str, effort: tuple[int, int, int], metric: Metric, batch_norm: str,
        seed: int, batch_size: int | None, forward: Forward | None, names: list[str],
    ) -> None:  # fmt: skip
        choice("matrix", matrix, MATRICES)
        choice("batch_norm", batch_norm, ("eval", "batch"))
        self.probes, self.steps, self.top = (
            whole(name, value, least, 10**6)
            for name, value, least in zip(("probes", "steps", "top"), effort, (1, 1, 0), strict=True)
        )
        if isinstance(metric, str) and metric == "error":
            raise ValueError('the error has no Hessian: it is a step function; use metric="loss"')
        self.model, self.matrix, self.seed, self.names = model, matrix, seed, names
        self.evaluation = Evaluation(model, metric, batch_norm, forward)
        self.blocks, self.batch_size = whole_passes(self.evaluation, data, batch_size, seed)
        self.operator: SecondDerivative = MATRICES[matrix](self.evaluation, self.blocks, names)

    def run(self, groups: dict[str, list[str]], scale: Scale, progress: bool) -> dict[str, Spectrum]:
        """The spectrum of each group, by its words."""
        scales, refused = {}, None
        for words, names in groups.items():
            try:
                scales[words] = Scales(self.model, names, scale)
            except NothingMoves as reason:
                refused = reason
        if not scales:
            raise refused or ValueError("the network has no layer with parameters of its own")
        total = sum(len(batch) for batch in self._batches(scales)) * self.steps
        found: dict[str, list[Rule]] = {words: [] for words in scales}
        with self.evaluation.prepared(), Progress("spectrum", total, enabled=progress) as bar:
            with self.evaluation.explained():
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
        place = {name: i for i, name in enumerate(self.names)}
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
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "probe", words, probe))
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
        evaluation, norms = self.evaluation, bool(self.evaluation.norms)
        return Spectrum(
            nodes, weights, eigenvalues, residuals, scales.size, baseline,
            conventions(
                "spectrum", matrix=self.matrix, metric=evaluation.metric_name, meaning=evaluation.meaning,
                scale=scales.name, unmoved=scales.unmoved, batch_norm=evaluation.batch_norm if norms else None,
                batch_size=self.batch_size if norms and evaluation.batch_norm == "batch" else None, parameters=words,
                perturbed=scales.size, architecture=architecture(self.model), examples=self.operator.examples,
                steps=self.steps, probes=len(found), seed=self.seed,
                notes=self.operator.notes,
            ),
        )  # fmt: skip
