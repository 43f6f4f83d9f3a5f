"""Batch-norm statistics for weights that training never visited: the center w, the barycenter, an average."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

from wideflat.checks import function, instance, network, shown, whole
from wideflat.checks.calls import called
from wideflat.checks.streams import MOST_BATCHES, ending
from wideflat.kernels.float64 import has_float64

__all__ = ["refresh_batch_norm"]


class _Batch:
    """One batch of any type, on its way through `update_bn`, which would take lists apart itself."""

    def __init__(self, content: Any) -> None:
        self.content = content


class _OnlyBatchNormTrains(nn.Module):
    """A model whose `train()` concerns its batch norm alone, so that dropout stays off."""

    def __init__(self, model: nn.Module, forward: Callable[[nn.Module, Any], object]) -> None:
        super().__init__()
        self.model = model
        self.call = forward

    def train(self, mode: bool = True) -> _OnlyBatchNormTrains:
        self.training = mode
        self.model.eval()
        for module in self.model.modules():
            if isinstance(module, _BatchNorm):
                module.training = mode
        return self

    def forward(self, batch: _Batch) -> None:
        self.call(self.model, batch.content)


def refresh_batch_norm(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    forward: Callable[[nn.Module, Any], object] | None = None,
    num_batches: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Recompute the running statistics of all batch-norm layers as plain averages over the batches of ``loader``.

    Needed wherever the weights are not those the statistics were gathered with: at the center w of
    `wideflat.EntropySGD`, at the barycenter of replicas, after averaging weights. It is torch's
    `torch.optim.swa_utils.update_bn` with dropout off, for batches of any type, and with every module's train or eval
    mode as it was afterwards. If anything fails on the way, the old statistics are put back.

    Args:
        model: Changed in place. A model without batch norm is left alone, and the loader is not touched.
        loader: Training batches: tensors; lists or tuples, of which the first entry is the input; mappings, which are
            passed as keyword arguments; all moved to the device of the model.
        forward: Called as ``forward(model, batch)`` instead, for any other kind of batch.
        num_batches: Use that many batches at most.
        group: Merge the statistics of the processes in this group, for example ``torch.distributed.group.WORLD``, each
            of which gives its own part of the training data: the result is that of one process with all batches. All
            processes of the group call it; one without data takes part.

    Raises:
        ValueError: If there is no batch: the statistics would be those of nothing.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(1, affine=False), nn.Dropout())
        >>> refresh_batch_norm(model, [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [7.0]])])
        >>> model[0].running_mean.item(), model[0].running_var.item()
        (4.0, 2.0)
    """
    _check(model, loader, forward, group)
    if num_batches is not None:
        num_batches = whole("num_batches", num_batches, 0)
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    if not norms:
        return
    seen = 0

    def batches() -> Iterator[_Batch]:
        nonlocal seen
        for batch in islice(ending("loader", loader, num_batches or MOST_BATCHES), num_batches):
            seen += 1
            yield _Batch(batch)

    with _settings_kept(model, norms):
        with _merged(norms, lambda: seen, group):
            update_bn(batches(), _OnlyBatchNormTrains(model, forward or _forward))
        if not seen and group is None:
            raise ValueError("refresh_batch_norm needs at least one batch, got an empty loader; pass training data")


def _check(model: object, loader: object, forward: object, group: object) -> None:
    network(model)
    if not isinstance(loader, Iterable) or isinstance(loader, Tensor):
        raise TypeError(f"loader must be an iterable of batches, got {shown(loader)}; one batch is [batch]")
    if forward is not None:
        function("forward", forward)
    if group is not None:
        instance("group", group, dist.ProcessGroup)


@contextmanager
def _settings_kept(model: nn.Module, norms: list[_BatchNorm]) -> Iterator[None]:
    """Momenta and every module's mode are put back at the end of the block; if it fails, the statistics too."""
    modes = [(module, module.training) for module in model.modules()]
    momenta = [norm.momentum for norm in norms]
    before = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
        raise
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, mode in modes:
            module.training = mode


@contextmanager
def _merged(norms: list[_BatchNorm], seen: Callable[[], int], group: dist.ProcessGroup | None) -> Iterator[None]:
    """Average over the processes of a group the statistics that each gathers within the block, by their batches.

    A process that raises within it tells the others, so that none waits for it.
    """
    if group is None:
        yield
        return
    failure: BaseException | None = None
    try:
        yield
    except Exception as error:
        failure = error
    _tell(failure, group)
    counts: list[int] = [0] * dist.get_world_size(group)
    dist.all_gather_object(counts, seen(), group=group)
    if not (total := sum(counts)):
        raise ValueError("refresh_batch_norm needs at least one batch, got an empty loader on every process")
    with torch.no_grad():
        for norm in norms:
            assert norm.running_mean is not None and norm.running_var is not None
            for buffer in (norm.running_mean, norm.running_var):
                _average(buffer, seen(), total, group)
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.fill_(total)


def _tell(failure: BaseException | None, group: dist.ProcessGroup) -> None:
    """Raise on every process what one of them has raised."""
    reports: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, None if failure is None else f"{type(failure).__name__}: {failure}", group=group)
    if failure is not None:
        raise failure
    for rank, report in enumerate(reports):
        if report is not None:
            raise RuntimeError(f"refresh_batch_norm failed on process {rank} of the group: {report}")


def _average(buffer: Tensor, seen: int, total: int, group: dist.ProcessGroup) -> None:
    """The mean over the ``total`` batches of all processes, of which this one has ``seen`` some.

    It is summed in float64, or where the device has none in float32: there are as many terms as processes.
    """
    exact = torch.float64 if has_float64(buffer.device) else torch.promote_types(buffer.dtype, torch.float32)
    part = buffer.to(exact) * seen if seen else torch.zeros_like(buffer, dtype=exact)
    dist.all_reduce(part, group=group)
    buffer.copy_(part / total)


def _forward(model: nn.Module, batch: Any) -> object:
    """The usual kinds of batches."""
    if isinstance(batch, (list, tuple)):
        if not batch:
            raise ValueError("a batch is empty; expected inputs, (inputs, ...) or a mapping of inputs")
        batch = batch[0]
    device = next((tensor.device for tensor in model.parameters()), None)
    if device is None:
        device = next(model.buffers()).device
    if isinstance(batch, Tensor):
        return called("the network", model, batch.to(device))
    if isinstance(batch, Mapping):
        named = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
        try:
            return model(**named)
        except TypeError as error:
            raise TypeError(
                f"the network was called with all of a batch by name ({', '.join(map(str, batch))}), and failed: "
                f'{error}; pass forward=lambda model, batch: model(batch["..."])'
            ) from error
    raise TypeError(
        f"a batch must be a tensor, a list or tuple that starts with one, or a mapping, got {type(batch).__name__}; "
        "pass forward=lambda model, batch: ... for anything else"
    )
