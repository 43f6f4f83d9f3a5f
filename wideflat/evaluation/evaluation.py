"""A network evaluated on batches with a metric, and left exactly as it was found."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from wideflat.batch_norm import refresh_batch_norm
from wideflat.centered import warn_off_center
from wideflat.checks import a_kind, network, shown
from wideflat.checks.calls import called
from wideflat.evaluation.blocks import random_state, restore_random_state, to_device
from wideflat.evaluation.folding import FoldedNetwork
from wideflat.evaluation.inputs import InputForm
from wideflat.evaluation.labelled import LabelAlignment, has_labels
from wideflat.evaluation.metrics import ErrorMetric, LossMetric, NamedMetric, NormalizedLossMetric
from wideflat.evaluation.registered import require_values, warn_of_hidden_weights
from wideflat.interruption import undisturbed
from wideflat.kernels.float64 import has_float64

__all__ = ["Evaluation", "Forward", "Metric"]

Metric: TypeAlias = Literal["error", "loss", "normalized loss"] | Callable[[Any, Any], Tensor]
Forward: TypeAlias = Callable[[nn.Module, Any], tuple[Any, Any]]

_METRICS: dict[str, type[NamedMetric]] = {
    "error": ErrorMetric,
    "loss": LossMetric,
    "normalized loss": NormalizedLossMetric,
}


@dataclass
class Trial:
    """Whether what was tried went well."""

    succeeded: bool = False


class NotCompiled(RuntimeError):
    """torch compiles a part of the network where it is called, and cannot do so within a measurement."""


class Evaluation:
    """Evaluates a network on batches: what to call, on which device, with which metric and batch-norm statistics.

    Inside :meth:`prepared` the network is in the mode that was asked for; afterwards its weights, buffers and modes,
    and the random states of torch, NumPy and Python, are exactly as before, also after an exception or Ctrl-C.

    Args:
        model: The network.
        metric: See :func:`local_energy`.
        batch_norm: See :func:`local_energy`.
        forward: See :func:`local_energy`.

    Attributes:
        metric: The function of outputs and targets.
        metric_name: Its name.
        counted: Examples of the batch that was scored last that have a target that counts: all, but for targets -100.
        answers: Its targets that count: several an example where each token or pixel has one.
        reset: Called before every evaluation, for networks that carry something from call to call.
    """

    def __init__(self, model: nn.Module, metric: Metric, batch_norm: str, forward: Forward | None) -> None:
        self.model = network(model)
        warn_off_center(model.parameters())
        warn_of_hidden_weights(model)
        self.module = model  # what is evaluated: the model, or a folded copy
        if not callable(metric) and (not isinstance(metric, str) or metric not in _METRICS):
            raise ValueError(
                'metric must be "error", "loss", "normalized loss" or a function of outputs and targets; '
                f"got {shown(metric)}"
            )
        if forward is not None and not callable(forward):
            raise TypeError(f"forward must be a function of the model and a batch, got {type(forward).__name__}")
        self.metric: Callable[[Any, Any], Any] = metric if callable(metric) else _METRICS[metric]()
        self.metric_name = metric if isinstance(metric, str) else getattr(metric, "__qualname__", type(metric).__name__)
        self.counted = self.answers = 0
        self.reset: Callable[[], None] | None = None
        self._alignment = LabelAlignment()
        self._without_labels = False
        self.forward = forward
        self.batch_norm = batch_norm
        first = next((p for p in model.parameters()), None)
        if first is None:
            raise ValueError(f"{type(model).__name__} has no parameters to perturb")
        for name, parameter in model.named_parameters():
            require_values(name, parameter)
        self.device = first.device
        self._form = InputForm(model, self.device)
        self.norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]

    @property
    def meaning(self) -> str | None:
        """What the metric measures, in words: known for one with a name, after the first batch."""
        return self.metric.meaning if isinstance(self.metric, NamedMetric) else None

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
        state = random_state(self.device)
        try:
            with torch.no_grad():
                with contextlib.suppress(NotImplementedError):  # an exported program has the mode it was exported in
                    self.model.eval()
                if self.batch_norm == "batch":
                    for norm in self.norms:  # statistics of the batch, and none are recorded
                        norm.training, norm.track_running_stats = True, False
                try:
                    yield self
                except KeyboardInterrupt:  # what was measured until then may still be used
                    self.settle()
                    raise
                self.settle()
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
                restore_random_state(state)

    def settle(self) -> None:
        """Read what a device found to contradict the first batches (:class:`~wideflat.evaluation.doubts.Doubts`)."""
        if isinstance(self.metric, NamedMetric):
            self.metric.doubts.settle()

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
        if self.batch_norm != "eval" or self.forward is not None or self._form.usual:
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
        """The batch on the network's device, its inputs in the precision and order of memory that the network likes."""
        return self._over_inputs(self._form.laid_out, to_device(batch, self.device))

    def _over_inputs(self, function: Callable[[Any], Any], batch: Any) -> Any:
        """A batch with a function applied to its inputs, where it is known what they are."""
        if self.forward is not None:
            return batch
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            return tree_map(function, batch[0]), batch[1]
        if has_labels(batch):
            return {name: value if name == "labels" else function(value) for name, value in batch.items()}
        return function(batch) if isinstance(batch, Tensor) else batch

    def _inputs(self, batch: Any) -> Any:
        return batch[0] if isinstance(batch, (tuple, list)) else batch

    def source(self, batch: Any) -> Any:
        """The input of the network, where it is known."""
        return None if self.forward is not None else self._inputs(batch)

    def outputs(self, batch: Any) -> tuple[Any, Any]:
        """Outputs and targets of a batch, whose inputs are in the form that the network takes.

        Inside of autocast, weights that were cast before they were perturbed are forgotten.

        Raises:
            NotCompiled: With what to do instead.
        """
        torch.clear_autocast_cache()
        if self.reset is not None:
            self.reset()
        try:
            return self._form.answer(self._outputs, batch, self._over_inputs)
        except RuntimeError as error:
            if not type(error).__module__.startswith("torch._dynamo"):
                raise
            raise NotCompiled(
                f"torch cannot compile a part of the network ({type(self.model).__name__}) within a measurement: "
                f"{str(error).strip().splitlines()[0]}. torch.cond, while_loop, scan and whatever was given to "
                "torch.compile are compiled where they are called. The network can be measured without that:\n"
                '    with torch.compiler.set_stance("force_eager"):\n        ...    # the same call again'
            ) from error

    def _outputs(self, batch: Any) -> tuple[Any, Any]:
        if self.forward is not None:
            result = self.forward(self.module, batch)
            if not isinstance(result, tuple) or len(result) != 2:
                raise TypeError(f"forward must return (outputs, targets), got {type(result).__name__}")
            return result
        if isinstance(batch, Tensor):
            return called("the network", self.module, batch), None
        if has_labels(batch):
            result = self._answer_named(batch)
            named = isinstance(self.metric, NamedMetric)
            return self._alignment.aligned(result, batch["labels"]) if named else (result, batch["labels"])
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise TypeError(
                f"a batch must be (inputs, targets), or a dictionary with labels; for {a_kind(batch)}"
                f"{f' of {len(batch)}' if hasattr(batch, '__len__') else ''} give forward=, a function of the model "
                "and the batch that returns (outputs, targets):\n    def forward(model, batch):\n"
                "        outputs = model(...)    # whatever of the batch it takes\n        return outputs, batch[...]"
            )
        return self._answer(batch[0]), batch[1]

    @contextlib.contextmanager
    def trying_without_labels(self, batch: Any) -> Iterator[Trial]:
        """The network is not given the labels inside, nor afterwards if the trial succeeded.

        It has then told by its own loss where they belong, and that loss is work which nobody reads.
        """
        trial = Trial()
        if not has_labels(batch) or self.forward is not None or not isinstance(self.metric, NamedMetric):
            yield trial
            return
        self._without_labels = True
        try:
            yield trial
        except Exception:  # it needs them, or fails anyway: it is asked again with them
            trial.succeeded = False
        finally:
            self._without_labels = trial.succeeded

    def _answer_named(self, batch: Mapping[str, Any]) -> Any:
        """What the network makes of a dictionary, labels included unless it is known to do without."""
        try:
            if self._without_labels:
                return self.module(**{name: value for name, value in batch.items() if name != "labels"})
            return self.module(**batch)
        except TypeError as error:
            if _takes_names(self.model, batch):
                raise
            raise TypeError(
                f"{type(self.model).__name__} does not take all of {', '.join(map(str, batch))} by name ({error}). Say "
                "how it is called:\n    def forward(model, batch):\n        outputs = model(...)    # whatever of the "
                'batch it takes\n        return outputs, batch["labels"]\nand give forward=forward'
            ) from error

    def _answer(self, inputs: Any) -> Any:
        """What the network makes of its inputs: a tensor, or several of them, one by one where it takes so many."""
        if isinstance(inputs, Tensor):
            return called("the network", self.module, inputs)
        if isinstance(inputs, Mapping) and _takes_names(self.model, inputs):
            return called("the network", self.module, **inputs)
        if isinstance(inputs, (tuple, list)) and _takes_apart(self.model, len(inputs)):
            return self.module(*inputs)
        try:
            return self.module(inputs)
        except (TypeError, AttributeError) as error:
            raise TypeError(
                f"the network got its inputs as one {type(inputs).__name__}, since its forward does not take as many "
                f"arguments, and failed: {error}. Say how it is called, for example "
                "forward=lambda model, batch: (model(*batch[0]), batch[1])"
            ) from error

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Say of an error from deep inside the network that it is the network's, on these data."""
        try:
            yield
        except NotCompiled:
            raise
        except (RuntimeError, IndexError, AttributeError) as error:
            raise RuntimeError(
                f"the network ({type(self.model).__name__}) fails on these data: {error}. Try model(inputs) on a "
                "batch of them, or say how it is called with forward="
            ) from error

    def values(self, batch: Any, size: int) -> Tensor:
        """The metric of every example, or one number for all of them: in float64 where the device has that.

        Elsewhere it is in the precision of the network, to be summed where it is fetched to
        (:func:`wideflat.kernels.float64.fetched`).
        """
        return self.score(*self.outputs(batch), size)

    def score(self, outputs: Any, targets: Any, size: int) -> Tensor:
        """As :meth:`values`, from outputs and targets."""
        value = self._value(outputs, targets, size).detach()
        return value.double() if has_float64(value.device) else value

    def mean(self, batch: Any, size: int) -> tuple[Tensor, int]:
        """The mean of the metric over a batch, with its graph, and the number of examples that count."""
        return self.mean_of(*self.outputs(batch), size)

    def mean_of(self, outputs: Any, targets: Any, size: int) -> tuple[Tensor, int]:
        """As :meth:`mean`, from outputs and targets."""
        return self._value(outputs, targets, size).mean(), self.counted

    def _value(self, outputs: Any, targets: Any, size: int) -> Tensor:
        metric = self.metric
        value = metric(outputs, targets)
        self.counted = self.answers = size
        if isinstance(metric, NamedMetric):
            self.counted, self.answers = metric.counted, metric.answers
        if value is None or (isinstance(value, Tensor) and value.is_complex()):
            kind = "None" if value is None else "complex numbers"
            raise TypeError(f"metric must return one real number for each example, or one for the batch; got {kind}")
        if not isinstance(value, Tensor):
            value = torch.as_tensor(value, dtype=torch.float64)
        if value.dim() > 1 or (value.dim() == 1 and len(value) != size):
            raise ValueError(
                f"metric must return one number for each of the {size} examples, or one for the batch; got a tensor of "
                f"shape {tuple(value.shape)}"
            )
        return value

    def recalibrate(self, batches: Sequence[Any]) -> None:
        """Compute the batch-norm statistics anew, with the weights as they are now: the plain average over batches."""
        refresh_batch_norm(self.model, batches, forward=lambda model, batch: self.outputs(batch))


def _arguments(model: nn.Module) -> list[inspect.Parameter]:
    """What the forward of a network takes; that of the network itself where it is compiled or wrapped."""
    while (inner := getattr(model, "_orig_mod", None) or _wrapped(model)) is not None:
        model = inner
    return list(inspect.signature(model.forward).parameters.values())


def _wrapped(model: nn.Module) -> nn.Module | None:
    return model.module if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) else None


def _takes_apart(model: nn.Module, count: int) -> bool:
    """Whether the forward of a network takes several inputs as arguments of their own, rather than as one list."""
    arguments = _arguments(model)
    if any(argument.kind is argument.VAR_POSITIONAL for argument in arguments):
        return True
    positional = [a for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
    needed = sum(argument.default is argument.empty for argument in positional)
    return needed != 1 and needed <= count <= len(positional)


def _takes_names(model: nn.Module, inputs: Mapping[Any, Any]) -> bool:
    """Whether the forward of a network takes inputs by these names, rather than as one dictionary."""
    arguments = _arguments(model)
    if any(argument.kind is argument.VAR_KEYWORD for argument in arguments):
        return True
    return set(inputs) <= {a.name for a in arguments if a.kind is not a.POSITIONAL_ONLY}


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
