"""One mini-batch of a network, divided over ranks that train this network together (data parallelism).

The gradient is that of the whole mini-batch: each rank computes the part of its images, weighted with how many they
are, and ``DistributedDataParallel`` adds the parts up while the backward pass goes on. Batch norm uses the mean and the
variance of the whole mini-batch, so that the training is that of one process; torch's own ``SyncBatchNorm`` does the
same on GPUs only, and changes the layers of the network.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

__all__ = ["SplitBatch"]


class SplitBatch:
    """A network whose mini-batches are divided over the ranks of a mesh.

    Args:
        network: Equal on all of these ranks; its parameters get the gradients of the whole mini-batch.
        mesh: The ranks, one-dimensional: ``mesh["dp"]``.
    """

    def __init__(self, network: nn.Module, mesh: DeviceMesh) -> None:
        self.rank, self.ranks, self.group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
        self.parallel = DistributedDataParallel(network, device_mesh=mesh)
        self.has_batch_norm = any(isinstance(module, _BatchNorm) for module in network.modules())
        self.whole, self.part = 0, slice(0)

    def share(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The part of a mini-batch for this rank: as many images as for the others, or one fewer; perhaps none."""
        self.whole = len(y)
        self.part = slice(self.whole * self.rank // self.ranks, self.whole * (self.rank + 1) // self.ranks)
        return x[self.part], y[self.part]

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs for this rank's part; batch norm sees all parts. All ranks call it."""
        with _WholeBatchNorm(self.group) if self.has_batch_norm else contextlib.nullcontext():
            return self.parallel(x)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """This rank's part of the cross-entropy, scaled so that the mean of the gradients is that of the whole."""
        return F.cross_entropy(logits, y, reduction="sum") * (self.ranks / self.whole)

    def own(self, loss: Tensor) -> Tensor:
        """The mean loss over the images of this rank, from what `loss` gave; 0 if it has none."""
        return loss * (self.whole / self.ranks / max(self.part.stop - self.part.start, 1))

    def mean(self, loss: Tensor) -> Tensor:
        """The mean loss over the whole mini-batch, from what `loss` gave on all ranks, which all call it."""
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total / self.ranks


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over ranks; its gradient is the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = value.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _WholeBatchNorm(TorchFunctionMode):
    """Within it, batch norm in training mode uses the statistics of the images of all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (self.batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))

    def batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """`torch.nn.functional.batch_norm` over all ranks."""
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        x = input if input.dtype == torch.float64 else input.float()
        others = [dimension for dimension in range(x.dim()) if dimension != 1]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        own = x.new_tensor([x.numel() / max(x.shape[1], 1)])
        sums = _SumOverRanks.apply(torch.cat([x.sum(others), own]), self.group)
        count = sums[-1].detach()
        if count <= 1:
            raise ValueError(f"batch norm needs more than one value a channel in training, got {int(count)}")
        mean = sums[:-1] / count
        centered = x - mean.view(shape)
        variance = _SumOverRanks.apply(centered.square().sum(others), self.group) / count
        with torch.no_grad():
            if running_mean is not None:
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            if running_var is not None:
                running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)
        scale = torch.rsqrt(variance + eps)
        if weight is not None:
            scale = scale * weight
        result = centered * scale.view(shape)
        return (result if bias is None else result + bias.view(shape)).to(input.dtype)
