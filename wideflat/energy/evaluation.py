"""A network evaluated on batches with a metric, and left exactly as it was found."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from wideflat.batch_norm import refresh_batch_norm
from wideflat.energy.blocks import to_device
from wideflat.energy.folding import FoldedNetwork
from wideflat.interruption import undisturbed

__all__ = ["Evaluation", "Forward", "Metric", "error_metric", "loss_metric"]

Metric: TypeAlias = Literal["error", "loss"] | Callable[[Any, Any], Tensor]
Forward: TypeAlias = Callable[[nn.Module, Any], tuple[Any, Any]]


def error_metric(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the answer is wrong: by the largest output, or by the sign where there is one output an example.

    Example:
        >>> error_metric(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([1, 1])).tolist()
        [0.0, 1.0]
        >>> error_metric(torch.tensor([0.3, -2.0]), torch.tensor([1.0, 1.0])).tolist()
        [0.0, 1.0]
    """
    if outputs.dim() == 2 and outputs.shape[1] == 1:
        outputs = outputs[:, 0]
    if outputs.dim() == 1:
        targets = targets.reshape(outputs.shape)
        return ((outputs > 0) != (targets > 0)).to(torch.float32)
    if targets.is_floating_point() and targets.shape == outputs.shape:
        targets = targets.argmax(1)
    return (
        (outputs.argmax(1) != targets).float().flatten(1).mean(1)
        if outputs.dim() > 2
        else (outputs.argmax(1) != targets).float()
    )


def loss_metric(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every example."""
    loss = F.cross_entropy(outputs, targets, reduction="none")
    return loss if loss.dim() == 1 else loss.flatten(1).mean(1)


_METRICS: dict[str, Callable[[Any, Any], Tensor]] = {"error": error_metric, "loss": loss_metric}


class Evaluation:
    """Evaluates a network on batches: what to call, on which device, with which metric and batch-norm statistics.

    Inside :meth:`prepared` the network is in the mode that was asked for; afterwards its weights, buffers and modes,
    and the random states of torch, NumPy and Python, are exactly as before, also after an exception or Ctrl-C.

    Args:
        model: The network.
        metric: See :func:`local_energy`.
        batch_norm: See :func:`local_energy`.
        forward: See :func:`local_energy`.
    """

    def __init__(self, model: nn.Module, metric: Metric, batch_norm: str, forward: Forward | None) -> None:
        self.model = model
        self.module = model  # what is evaluated: the model, or a folded copy
        if not callable(metric) and metric not in _METRICS:
            raise ValueError(f'metric must be "error", "loss" or a function of outputs and targets; got {metric!r}')
        self.metric = metric if callable(metric) else _METRICS[metric]
        self.metric_name = metric if isinstance(metric, str) else getattr(metric, "__qualname__", type(metric).__name__)
        self.forward = forward
        self.batch_norm = batch_norm
        first = next((p for p in model.parameters()), None)
        if first is None:
            raise ValueError(f"{type(model).__name__} has no parameters to perturb")
        self.device = first.device
        self.has_conv2d = any(p.dim() == 4 for p in model.parameters())
        self.norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]

    @property
    def recalibrates(self) -> bool:
        """Whether batch-norm statistics are computed anew for each perturbation."""
        return self.batch_norm == "recalibrate" and bool(self.norms)

    @contextlib.contextmanager
    def prepared(self) -> Iterator[Evaluation]:
        """The network in the mode that was asked for, and everything as it was at the end."""
        modes = [(module, module.training) for module in self.model.modules()]
        tracked = [(norm, norm.track_running_stats) for norm in self.norms]
        buffers = [
            (module, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
        ]
        state = _random_state(self.device)
        try:
            with torch.no_grad():
                self.model.eval()
                if self.batch_norm == "batch":
                    for norm in self.norms:  # statistics of the batch, and none are recorded
                        norm.training, norm.track_running_stats = True, False
                yield self
        finally:
            with undisturbed():
                for module, training in modes:
                    module.training = training
                for norm, track in tracked:
                    norm.track_running_stats = track
                for module, name, buffer, value in buffers:
                    if buffer is not None and value is not None and not _same(buffer, value):
                        buffer.data.copy_(value)
                    module._buffers[name] = buffer
                _restore_random_state(state)

    @contextlib.contextmanager
    def differentiable(self, names: Sequence[str]) -> Iterator[dict[str, nn.Parameter]]:
        """The named parameters, with gradients switched on; their ``requires_grad`` and ``grad`` stay as they were."""
        parameters = dict(self.model.named_parameters())
        flags = [(parameter, parameter.requires_grad) for parameter in parameters.values()]
        wanted = set(names)
        try:
            for name, parameter in parameters.items():
                parameter.requires_grad_(name in wanted)
            with torch.enable_grad():
                yield {name: parameters[name] for name in names}
        finally:
            for parameter, flag in flags:
                parameter.requires_grad_(flag)

    def fold(self, example: Any) -> None:
        """Evaluate a copy with folded batch norm from here on, if the network allows it and gives the same answer."""
        if self.batch_norm != "eval" or self.forward is not None:
            return
        folded = FoldedNetwork.fold(self.model)
        if folded is None:
            return
        try:
            ours, theirs = folded(self._inputs(example)), self.model(self._inputs(example))
            scale = float(theirs.abs().max())
            agree = bool(torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4 * max(scale, 1e-6)))
        except Exception:  # a graph that does not run is not used
            return
        if agree:
            self.module = folded

    def load(self, batch: Any) -> Any:
        """The batch on the network's device, images in the order of memory that convolutions like."""
        batch = to_device(batch, self.device)
        if self.has_conv2d and self.forward is None and self.device.type == "cpu":
            inputs = self._inputs(batch)
            if isinstance(inputs, Tensor) and inputs.dim() == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
                return (inputs, batch[1]) if isinstance(batch, (tuple, list)) else inputs
        return batch

    def _inputs(self, batch: Any) -> Any:
        return batch[0] if isinstance(batch, (tuple, list)) else batch

    def source(self, batch: Any) -> Any:
        """The input of the network, where it is known."""
        return None if self.forward is not None else self._inputs(batch)

    def outputs(self, batch: Any) -> tuple[Any, Any]:
        """Outputs and targets of a batch."""
        if self.forward is not None:
            result = self.forward(self.module, batch)
            if not isinstance(result, tuple) or len(result) != 2:
                raise TypeError(f"forward must return (outputs, targets), got {type(result).__name__}")
            return result
        if isinstance(batch, Tensor):
            return self.module(batch), None
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise TypeError(
                f"a batch must be (inputs, targets); for a {type(batch).__name__}"
                f"{f' of {len(batch)}' if hasattr(batch, '__len__') else ''} give forward=, a function of the model "
                "and the batch that returns (outputs, targets)"
            )
        return self.module(batch[0]), batch[1]

    def values(self, batch: Any, size: int) -> Tensor:
        """The metric of every example in float64, or one number for all of them."""
        return self.score(*self.outputs(batch), size)

    def score(self, outputs: Any, targets: Any, size: int) -> Tensor:
        """As :meth:`values`, from outputs and targets."""
        value = self.metric(outputs, targets)
        if not isinstance(value, Tensor):
            value = torch.as_tensor(value, dtype=torch.float64)
        value = value.detach()
        if value.dim() > 1 or (value.dim() == 1 and len(value) != size):
            raise ValueError(
                f"metric must return one number for each of the {size} examples, or one for the batch; got a tensor of "
                f"shape {tuple(value.shape)}"
            )
        return value.to(torch.float64) if value.device.type != "mps" else value.cpu().to(torch.float64)

    def recalibrate(self, batches: Sequence[Any]) -> None:
        """Compute the batch-norm statistics anew, with the weights as they are now: the plain average over batches."""
        refresh_batch_norm(self.model, batches, forward=lambda model, batch: self.outputs(batch))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


def _random_state(device: torch.device) -> tuple[Any, ...]:
    own = torch.get_device_module(device).get_rng_state(device) if device.type in ("cuda", "xpu") else None
    return torch.get_rng_state(), np.random.get_state(), random.getstate(), device, own  # noqa: NPY002


def _restore_random_state(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])  # noqa: NPY002
    random.setstate(state[2])
    if state[4] is not None:
        torch.get_device_module(state[3]).set_rng_state(state[4], state[3])
