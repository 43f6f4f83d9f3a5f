r"""The energy of a network around its weights: V(xi) = sum_i [l_i(w + sigma a xi) - l_i(w)], xi ~ N(0, 1).

.. code-block:: text

    scale a     "relative" |w_i|    "absolute" 1    and the others of wideflat.noise.scales
    "loss"      l_i = cross-entropy, or any function of outputs and targets that is differentiable
    "error"     V = sum_i max(0, -m_i)/s_i,   m_i = f_y - max over j != y of f_j

The margin m_i is negative where the answer is wrong; s_i, its standard deviation over xi, is a unit and no more. V is
zero exactly where every example is right.

The network works in its own precision; differences of single losses are summed in float64. V has to be a fixed
function: what makes it random, or dependent on how the data are cut into blocks, is refused.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from wideflat.checks import shown
from wideflat.evaluation.evaluation import Evaluation, Forward, Metric
from wideflat.evaluation.selection import Selection, select_parameters
from wideflat.kernels.float64 import has_float64, number, summed
from wideflat.noise.scales import Scale, Scales
from wideflat.noise.shared_noise import SharedNoise
from wideflat.volume.fixed_data import FixedData

__all__ = ["Network", "NetworkEnergy", "block_size", "margin"]


def margin(outputs: Tensor, targets: Tensor) -> Tensor:
    """Output of the right class less the largest of the others; positive where the answer is right.

    With one output an example it is the output times the sign of the target.

    Example:
        >>> margin(torch.tensor([[1.0, 3.0, 2.0], [3.0, 0.0, 1.0]]), torch.tensor([1, 1])).tolist()
        [1.0, -3.0]
        >>> margin(torch.tensor([0.5, -2.0]), torch.tensor([1, 0])).tolist()
        [0.5, 2.0]
    """
    if outputs.dim() == 2 and outputs.shape[1] == 1:
        outputs = outputs[:, 0]
    if outputs.dim() == 1:
        return torch.where(targets.reshape(outputs.shape) > 0, outputs, -outputs)
    if outputs.dim() != 2:
        raise ValueError(
            f'measure="error" needs outputs of shape (examples, classes) or (examples,), got {tuple(outputs.shape)}; '
            "give a function of outputs and targets as measure"
        )
    if targets.is_floating_point() and targets.shape == outputs.shape:
        targets = targets.argmax(1)
    index = targets.long().unsqueeze(1)
    return outputs.gather(1, index).squeeze(1) - outputs.scatter(1, index, -math.inf).amax(1)


def block_size(model: nn.Module) -> int:
    """Examples to evaluate at once: convolutions on a CPU like few (a block that stays in the cache)."""
    return 50 if any(p.dim() == 4 and p.device.type == "cpu" for p in model.parameters()) else 512


class Network:
    """A network with its data and scales, to be evaluated at w + sigma a xi, and left as it was found.

    Args:
        model: The network.
        data: Its data, read once.
        measure: ``"loss"``, ``"error"`` or a function of outputs and targets that gives one value an example.
        scale: What the noise is proportional to.
        parameters: Which parameters move.
        forward: A function of model and batch that returns (outputs, targets).
        batch_norm: ``"eval"``; anything else is refused.

    Attributes:
        size: Components of xi.
        moving: Those of a scale that is not zero.
        examples: n.
        digest: Of the weights.
        reference: What ``measure`` gives at w, of each example (margins for ``"error"``), shape (n,).
    """

    def __init__(
        self,
        model: nn.Module,
        data: FixedData,
        measure: Metric = "loss",
        scale: Scale = "relative",
        parameters: Selection = "all",
        forward: Forward | None = None,
        batch_norm: str = "eval",
    ) -> None:
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        if not isinstance(batch_norm, str) or batch_norm != "eval":
            raise ValueError(
                f'batch_norm must be "eval", got {shown(batch_norm)}: with statistics of batches the energy depends on '
                "how the data are cut, with recalibrated ones it is another function at every point"
            )
        self.solutions = isinstance(measure, str) and measure == "error"
        self.evaluation = Evaluation(model, margin if self.solutions else measure, "eval", forward)
        if any(norm.running_mean is None for norm in self.evaluation.norms):
            raise ValueError(
                "a batch-norm layer has no running statistics and uses those of each batch, so that the energy depends "
                "on how the data are cut; give it track_running_stats=True, or compute them with refresh_batch_norm"
            )
        self.measure = "error" if self.solutions else self.evaluation.metric_name
        names, self.parameters = select_parameters(model, parameters)
        self.digest = _digest(model)
        self.noise = SharedNoise(model, names)
        self.names = self.noise.names
        chosen = Scales(model, self.names, scale)
        scales, self.scale = [value.abs() for value in chosen.values.values()], chosen.name
        self.dtype, self.device = _precision(scales), self.evaluation.device
        self.scales = torch.cat([value.to(self.device, self.dtype).flatten() for value in scales])
        self.size = len(self.scales)
        self.moving = self.size - chosen.unmoved
        self.shapes = [value.shape for value in scales]
        self.data, self.examples = data, data.examples
        self._batches: list[Any] = []
        self.reference = torch.empty(0)

    @contextlib.contextmanager
    def prepared(self) -> Iterator[Network]:
        """The network in eval mode with weights that can be moved; everything as it was at the end."""
        with self.evaluation.prepared(), self.noise:
            self._batches = [(self.evaluation.load(block.batch), block.size) for block in self.data.blocks]
            self.reference = self.values(torch.zeros(self.size, dtype=self.dtype, device=self.device), 0.0)
            if not bool(self.reference.isfinite().all()):
                wrong = int((~self.reference.isfinite()).sum())
                raise ValueError(f"the {self.measure} of {wrong} examples is not finite at the weights themselves")
            yield self

    def place(self, xi: Tensor, sigma: float) -> None:
        """Set the weights to w + sigma a xi."""
        self.noise.point(dict(zip(self.names, self._views(self.scales * xi), strict=True)))
        self.noise.apply(sigma)

    def _views(self, flat: Tensor) -> list[Tensor]:
        """The parts of a vector that belong to the parameters, in their shapes."""
        parts = flat.split([math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def values(self, xi: Tensor, sigma: float) -> Tensor:
        """The measure of every example at w + sigma a xi, shape (n,): in float64 where the device has that."""
        self.place(xi, sigma)
        return torch.cat([self._block(batch, size).detach() for batch, size in self._batches])

    def gradient(self, xi: Tensor, sigma: float, energies: Callable[[Tensor, slice], Tensor]) -> tuple[Tensor, Tensor]:
        """The sum of ``energies`` (of the measure of some examples, and which these are) and its gradient in xi.

        The sum is a tensor of no axis, or of its two parts (:func:`wideflat.kernels.float64.summed`): nobody has waited
        for it.
        """
        self.place(xi, sigma)
        parts_of_total: list[Tensor] = []
        start = 0
        gradient = torch.zeros_like(self.scales)
        views = self._views(gradient)
        with self.evaluation.differentiable(self.names) as parameters:
            for batch, size in self._batches:
                each = energies(self._block(batch, size), slice(start, start + size))
                energy = each.sum()
                parts = torch.autograd.grad(energy, list(parameters.values()), allow_unused=True)
                parts_of_total.append(energy.detach() if has_float64(energy.device) else summed(each.detach()))
                start += size
                for view, part in zip(views, parts, strict=True):
                    if part is not None:
                        view.add_(part)
        if has_float64(gradient.device):
            total = functools.reduce(torch.add, parts_of_total, torch.zeros_like(parts_of_total[0]))
        else:
            total = summed(torch.cat(parts_of_total))
        return total, gradient.mul_(self.scales).mul_(sigma)

    def hessian_product(self, v: Tensor, sigma: float) -> Tensor:
        """The Hessian in xi of the sum of the measure, at the weights themselves, times v."""
        step = sigma * self.scales
        self.place(torch.zeros_like(v), 0.0)
        total = torch.zeros_like(self.scales)
        directions = self._views(step * v)
        with self.evaluation.differentiable(self.names) as parameters:
            weights = list(parameters.values())
            for batch, size in self._batches:
                energy = self._block(batch, size).sum()
                first = torch.autograd.grad(energy, weights, create_graph=True, allow_unused=True)
                pairs = [(g, d) for g, d in zip(first, directions, strict=True) if g is not None and g.requires_grad]
                if not pairs:
                    continue
                slope = torch.stack([(g * d.to(g)).sum() for g, d in pairs]).sum()
                second = torch.autograd.grad(slope, weights, allow_unused=True)
                for view, part in zip(self._views(total), second, strict=True):
                    if part is not None:
                        view.add_(part)
        return total.mul_(step)

    def _block(self, batch: Any, size: int) -> Tensor:
        """The measure of the examples of a block, differentiable: in float64 where the device has that."""
        with self.evaluation.explained():
            values = self.evaluation.metric(*self.evaluation.outputs(batch))
        if not isinstance(values, Tensor) or values.shape != (size,):
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"measure must give one value for each of the {size} examples of a batch, got {shape}")
        return values.double() if has_float64(values.device) else values

    def check(self, seed: int) -> None:
        """Refuse a network whose energy is not a fixed function, or has no gradient."""
        generator = torch.Generator().manual_seed(seed)
        xi = torch.empty(self.size, dtype=self.dtype).normal_(generator=generator).to(self.device)
        batch, size = self._batches[0]
        with self.evaluation.differentiable(self.names):
            if not self._block(batch, size).requires_grad:
                raise ValueError(
                    f'measure {self.measure} has no gradient, so nothing pulls a chain; measure="error" counts errors'
                )
        first = self.values(xi, 0.01)
        torch.rand(7)  # dropout that is always on draws other numbers now
        if not torch.allclose(first, self.values(xi, 0.01), rtol=1e-4, atol=1e-4, equal_nan=True):
            raise ValueError(
                "the network gives other outputs for the same weights and inputs in eval mode (dropout that is always "
                "on, or other random numbers): the energy has to be a fixed function"
            )


class NetworkEnergy:
    """V(xi) of a network at one sigma.

    Args:
        network: Inside its ``prepared()``.
        sigma: Strength of the noise.
        kept: For ``measure="error"`` which examples count, shape (n,).
        units: For ``measure="error"`` the s_i, shape (n,).
    """

    def __init__(self, network: Network, sigma: float, kept: Tensor | None = None, units: Tensor | None = None) -> None:
        self.network, self.sigma, self.kept, self.units = network, sigma, kept, units
        self.size, self.moving = network.size, network.moving
        self.dtype, self.device = network.dtype, network.device

    def energies(self, values: Tensor, which: slice = slice(None)) -> Tensor:
        """The energy of each example from what the measure gave.

        A margin of exactly zero is not a right answer: it counts, by the least there is.
        """
        if self.kept is None or self.units is None:
            return values - self.network.reference[which]
        kept, least = self.kept[which], torch.finfo(values.dtype).tiny
        violation = torch.where(values > 0, 0.0, (-values / self.units[which]).clamp(min=least))
        return torch.where(kept, violation, 0.0)

    def value(self, xi: Tensor) -> float:
        """V(xi)."""
        return number(self.launched_value(xi))

    def launched_value(self, xi: Tensor) -> Tensor:
        """V(xi) as a tensor of no axis, or of two parts, for which nobody has waited."""
        return summed(self.energies(self.network.values(xi, self.sigma)))

    def gradient(self, xi: Tensor) -> tuple[float, Tensor]:
        """V(xi) and its gradient with respect to xi."""
        value, gradient = self.launched(xi)
        return number(value), gradient

    def launched(self, xi: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`gradient`, with V as a tensor of no axis, for which nobody has waited."""
        return self.network.gradient(xi, self.sigma, self.energies)


def _digest(model: nn.Module) -> str:
    """Of the weights around which the volume is measured, and of the statistics beside them."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in (*model.parameters(), *model.buffers()):
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _precision(scales: list[Tensor]) -> torch.dtype:
    """That of the weights; they must have enough digits for differences of losses."""
    low = [value.dtype for value in scales if value.dtype not in (torch.float32, torch.float64)]
    if low:
        raise ValueError(f"weights in {low[0]} are too coarse for the energy to be smooth; convert with model.float()")
    return torch.float64 if all(value.dtype == torch.float64 for value in scales) else torch.float32
