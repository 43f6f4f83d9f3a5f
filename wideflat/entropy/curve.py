"""The local entropy of a committee machine as a curve over the distance: read off, drawn, saved, loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from wideflat.checks import numbers_of, whole
from wideflat.checks.options import check_fields
from wideflat.checks.records import reading
from wideflat.files import atomic_write, read_npz
from wideflat.notebook import Result, axes_or_new

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["LocalEntropy"]


@dataclass(repr=False)
class LocalEntropy(Result):
    r"""The curve Phi(w, d) of one or several references.

    Arrays have the shape (points,), or (references, points) where several references were given.

    Attributes:
        deltas: Variances of the Gaussian around the reference, shape (points,).
        distance: d* = E \|w' - w\|^2 / 2 with hidden units of norm sqrt N.
        phi: The normalised local entropy Phi(w, d*).
        log_z: log Z(Delta).
        phi_stderr: Standard error of phi: zero unless sampled.
        log_z_stderr: Standard error of log_z: zero unless sampled.
        residual: Of the undamped message passing at each point (zero if sampled).
        iterations: Evaluations of the channel (moves of a particle if sampled).
        converged: Whether the point can be relied on. The values of those that cannot are kept, but never drawn.
        training_errors: Patterns the reference itself gets wrong, a number or shape (references,).
        on_errors: What was done about these: "keep" (Z counts solutions of all patterns, so Phi does not go to 0) or
            "drop" (the reference's wrong patterns are no constraints, which flatters it).
        num_weights: D = H N.
        method: "bp", "tap", "ep", "ep-vector" (whose distance is that of "ep") or "sample".
        others: The curves of the other methods, where these were compared.
    """

    deltas: Tensor
    distance: Tensor
    phi: Tensor
    log_z: Tensor
    phi_stderr: Tensor
    log_z_stderr: Tensor
    residual: Tensor
    iterations: Tensor
    converged: Tensor
    training_errors: Tensor
    on_errors: str
    num_weights: int
    method: str
    others: dict[str, LocalEntropy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        self.num_weights = whole("num_weights", self.num_weights, 1, 2**53)
        rows = [self.distance, self.phi, self.log_z, self.phi_stderr, self.log_z_stderr, self.residual]
        shapes = {tuple(each.shape) for each in (*rows, self.iterations, self.converged)}
        if self.deltas.dim() != 1 or not len(self.deltas) or {shape[-1:] for shape in shapes} != {self.deltas.shape}:
            raise ValueError(
                f"every one of {self.deltas.numel()} deltas must have a value, got tensors of the shapes "
                f"{sorted(shapes)}"
            )
        if len(shapes) != 1:
            raise ValueError(f"the tensors of a curve must have one shape, got {sorted(shapes)}")

    @property
    def relative_distance(self) -> Tensor:
        """d/D = E |w' - w|^2 / (2 |w|^2): free of the scale of the weights. Noise sigma is at d/D = sigma^2/2."""
        return self.distance / self.num_weights

    @property
    def status(self) -> np.ndarray:
        """A word for each point: "converged", "sampled", "not converged", or "not computed" after an interruption."""
        good = "sampled" if self.method == "sample" else "converged"
        bad = np.where(self.iterations.numpy() > 0, "not converged", "not computed")
        return np.where(self.converged.numpy(), good, bad)

    def at(self, relative_distance: float | Sequence[float]) -> Tensor:
        """Phi at given d/D, between the converged points on both sides; NaN outside them.

        Phi is interpolated linearly in log d. The last dimension of the result is that of the argument (none for a
        number).
        """
        wanted = np.array(numbers_of("relative_distance", relative_distance))
        rows = []
        for x, y, ok in zip(*(t.reshape(-1, len(self.deltas)).numpy() for t in self._curve()), strict=True):
            x, y = x[ok], y[ok]
            order = np.argsort(x)
            if not len(x):
                rows.append(np.full(len(wanted), np.nan))
                continue
            rows.append(np.interp(np.log(wanted), np.log(x[order]), y[order], left=np.nan, right=np.nan))
        found = torch.tensor(np.stack(rows)).reshape(*self.phi.shape[:-1], len(wanted))
        return found[..., 0] if np.ndim(relative_distance) == 0 else found

    def _curve(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.relative_distance, self.phi, self.converged

    def plot(self, ax: Axes | None = None, **style: Any) -> Axes:
        """Draw Phi over d/D, and return the axes. Points that did not converge are left out.

        Several references are drawn thin, with their mean over those that converged. Samples have error bars.

        Args:
            ax: Axes to draw in; new ones if None.
            style: For ``Axes.plot``: ``label``, ``color`` and so on.
        """
        ax = axes_or_new(ax)
        x, y, ok = (t.reshape(-1, len(self.deltas)).numpy() for t in self._curve())
        x, y = np.where(ok, x, np.nan), np.where(ok, y, np.nan)
        error = self.phi_stderr.reshape(y.shape).numpy()
        if len(y) == 1:
            style.setdefault("marker", "o")
            style.setdefault("markersize", 3)
            (line,) = ax.plot(x[0], y[0], **style)
        else:
            some = ok.any(0)
            mean_x, mean_y = np.nanmean(x[:, some], 0), np.nanmean(y[:, some], 0)
            (line,) = ax.plot(mean_x, mean_y, **style)
            ax.plot(x.T, y.T, color=line.get_color(), linewidth=0.5, alpha=0.4)
        if self.method == "sample":
            for x_row, y_row, error_row in zip(x, y, error, strict=True):
                ax.errorbar(x_row, y_row, error_row, color=line.get_color(), linestyle="none", capsize=2)
        ax.set_xscale("log")
        ax.set_xlabel("d / D")
        ax.set_ylabel("Φ(w, d)")
        return ax

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the curve to ``path`` in NumPy's .npz format, whole or not at all."""
        arrays = {}
        for curve in (self, *self.others.values()):
            prefix = "" if curve is self else f"{curve.method}/"
            arrays.update({prefix + name: np.asarray(getattr(curve, name)) for name in _saved()})
        with atomic_write(path, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, kind=np.array(_KIND), **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LocalEntropy:
        """Read a curve written by ``save``. Nothing in the file is executed."""
        try:
            found = read_npz(path)
            if str(found.get("kind")) != _KIND:
                raise ValueError(f"{path} is not a curve written by LocalEntropy.save()")
            with reading("curve"):
                curve = cls._from_arrays(found, "")
                others = [name.removesuffix("/phi") for name in found if name.endswith("/phi")]
                curve.others = {name: cls._from_arrays(found, f"{name}/") for name in others}
                return curve
        except ValueError as error:
            if str(path) in str(error):
                raise
            raise ValueError(f"{path} is damaged and cannot be read ({error}): compute it again") from error

    @classmethod
    def _from_arrays(cls, found: dict[str, np.ndarray], prefix: str) -> LocalEntropy:
        words: dict[str, Any] = {"on_errors": str, "num_weights": int, "method": str}
        values = {name: words.get(name, torch.from_numpy)(found[prefix + name]) for name in _saved()}
        return cls(**values)

    def _columns(self) -> dict[str, list[Any]]:
        """One row a point of a reference."""
        count, points = self.phi.numel() // len(self.deltas), len(self.deltas)
        names = ("relative_distance", "phi", "phi_stderr", "log_z", "iterations")
        return {
            "reference": [r for r in range(count) for _ in range(points)],
            "delta": self.deltas.tolist() * count,
            **{name: getattr(self, name).flatten().tolist() for name in names},
            "status": [str(word) for word in self.status.flatten()],
        }

    def _remarks(self) -> list[str]:
        return [f"method: {self.method}, {self.num_weights} weights; training errors: {self.training_errors.tolist()}"]

    def __str__(self) -> str:
        """A table, one line for each point (the mean over the references that converged)."""
        rows = [f"{'Delta':>8}  {'d/D':>8}  {'log Z':>12}  {'Phi':>12}  {'residual':>9}  {'iterations':>10}  status"]
        ok = self.converged.reshape(-1, len(self.deltas))
        columns = [
            getattr(self, name).reshape(ok.shape).double()
            for name in ("relative_distance", "log_z", "phi", "residual", "iterations", "log_z_stderr", "phi_stderr")
        ]
        for k, delta in enumerate(self.deltas.tolist()):
            good = ok[:, k]
            count = int(good.sum())
            words = self.status.reshape(ok.shape)[:, k]
            if not count:  # "not converged" if that is so of any, else "not computed"
                rows.append(f"{delta:8.4g}  {'':8}  {'':12}  {'':12}  {'':9}  {'':10}  {max(words)}")
                continue
            d, log_z, phi, _, iterations, log_z_error, phi_error = (c[good, k].mean().item() for c in columns)
            status = str(words[good.numpy()][0])
            if self.method == "sample":
                residual_text, status = "", f"{status}, log Z +- {log_z_error:.2g}, Phi +- {phi_error:.1g}"
            else:
                residual_text = f"{columns[3][good, k].max().item():.1e}"
            if len(ok) > 1:
                status += f" ({count} of {len(ok)})"
            rows.append(
                f"{delta:8.4g}  {d:8.4f}  {log_z:12.5f}  {phi:12.4e}  {residual_text:>9}  {iterations:10.0f}  {status}"
            )
        return "\n".join(rows)


_KIND = "wideflat local entropy"


def _saved() -> list[str]:
    """The names of the fields that are arrays or words."""
    return [f.name for f in fields(LocalEntropy) if f.name != "others"]
