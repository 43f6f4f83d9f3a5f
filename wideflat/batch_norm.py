"""Batch-norm statistics for weights that training never visited: the center w, the barycenter, an average."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

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

    Raises:
        ValueError: If there is no batch: the statistics would be those of nothing.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(1, affine=False), nn.Dropout())
        >>> refresh_batch_norm(model, [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [7.0]])])
        >>> model[0].running_mean.item(), model[0].running_var.item()
        (4.0, 2.0)
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    if not norms:
        return
    modes = [(module, module.training) for module in model.modules()]
    momenta = [norm.momentum for norm in norms]
    before = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]
    seen = 0

    def batches() -> Iterator[_Batch]:
        nonlocal seen
        for batch in islice(loader, num_batches):
            seen += 1
            yield _Batch(batch)

    try:
        update_bn(batches(), _OnlyBatchNormTrains(model, forward or _forward))
        if not seen:
            raise ValueError("refresh_batch_norm needs at least one batch, got an empty loader; pass training data")
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


def _forward(model: nn.Module, batch: Any) -> object:
    """The usual kinds of batches."""
    if isinstance(batch, (list, tuple)):
        batch = batch[0]
    device = next((tensor.device for tensor in model.parameters()), None)
    if device is None:
        device = next(model.buffers()).device
    if isinstance(batch, Tensor):
        return model(batch.to(device))
    if isinstance(batch, Mapping):
        return model(**{key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()})
    raise TypeError(
        f"a batch must be a tensor, a list or tuple that starts with one, or a mapping, got {type(batch).__name__}; "
        "pass forward=lambda model, batch: ... for anything else"
    )
