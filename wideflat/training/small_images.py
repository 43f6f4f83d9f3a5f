r"""Convolutions of very small images as dense layers: the same numbers to rounding, several times as fast on the CPU.

Late in a network an image has one or four pixels, and most of a 3x3 kernel lies on the padding around it. Which pixel i
a pixel o of the result sees, and through which weight of the kernel, is a short list of pairs:

.. code-block:: text

    y_o = sum_i  W[tap(i, o)] x_i            tap(i, o) = i - stride * o + padding, where the kernel has it
    dW[tap] = sum over its pairs (i, o) of  dy_o x_i^T

The first is one matrix product with the blocks of W laid out as a matrix, the second one product for each weight that
any pair uses; the gradient of the others is zero. Sums and roundings are those of a convolution in the same format.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from wideflat.landscape.pooling import pair

__all__ = ["SmallImages", "convolution"]

#: In which it was seen to be faster than torch's.
FORMATS = (torch.float32, torch.bfloat16)
#: So many pairs always pay; so many if the matrices are that large.
FEW_PAIRS, MOST_PAIRS, LARGE = 4, 16, 128 * 128


class SmallImages(TorchFunctionMode):
    """Within it, convolutions of very small images are computed as dense layers where that is faster."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace a convolution."""
        kwargs = kwargs or {}
        if func is F.conv2d:
            result = convolution(*args, **kwargs)
            if result is not None:
                return result
        return func(*args, **kwargs)


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """As ``torch.nn.functional.conv2d``, to be differentiated once; None for what is better left to torch.

    Example:
        >>> x, weight = torch.ones(1, 1, 1, 1), torch.arange(9.0).view(1, 1, 3, 3).requires_grad_()
        >>> convolution(x, weight, padding=1).item()
        4.0
        >>> convolution(torch.ones(1, 1, 8, 8), weight, padding=1) is None
        True
    """
    steps, around = pair(stride), pair(padding)
    if steps is None or around is None or groups != 1 or pair(dilation) != (1, 1):
        return None
    format = _format(input, weight, bias)
    if format is None or input.shape[2] * input.shape[3] > MOST_PAIRS:
        return None
    plan = _plan(*input.shape[2:], *weight.shape[2:], *steps, *around)
    if plan is None or (plan.count > FEW_PAIRS and weight.shape[0] * weight.shape[1] < LARGE):
        return None
    return _Dense.apply(input, weight, bias, format, plan)


def _format(input: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """The format that torch would compute in; None where this is no ordinary convolution that is differentiated."""
    if type(input) is not Tensor or type(weight) not in (Tensor, nn.Parameter) or input.device.type != "cpu":
        return None
    if input.dim() != 4 or weight.dim() != 4 or input.shape[1] != weight.shape[1] or not input.numel():
        return None
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return None
    if bias is not None and (bias.dtype != weight.dtype or bias.shape != weight.shape[:1]):
        return None
    if torch.is_autocast_enabled("cpu"):
        format = torch.get_autocast_dtype("cpu")
        return format if format in FORMATS else None
    return input.dtype if input.dtype == weight.dtype and input.dtype in FORMATS else None


class _Plan:
    """Which pixels of a result see which pixels of an image, by the place in the kernel."""

    def __init__(self, size: tuple[int, int], taps: dict[tuple[int, int], list[tuple[int, int]]]) -> None:
        self.size, self.taps = size, taps
        self.count = sum(map(len, taps.values()))


@functools.lru_cache(maxsize=256)
def _plan(h: int, w: int, kh: int, kw: int, sh: int, sw: int, ph: int, pw: int) -> _Plan | None:
    """All pairs of pixels; None if they are too many, or if there is nothing to gain (a kernel of one pixel)."""
    if kh * kw == 1 or min(sh, sw) < 1 or min(ph, pw) < 0:
        return None
    oh, ow = (h + 2 * ph - kh) // sh + 1, (w + 2 * pw - kw) // sw + 1
    if min(oh, ow) < 1 or oh * ow > MOST_PAIRS:
        return None
    taps: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for o in range(oh * ow):
        for i in range(h * w):
            tap = i // w - o // ow * sh + ph, i % w - o % ow * sw + pw
            if 0 <= tap[0] < kh and 0 <= tap[1] < kw:
                taps.setdefault(tap, []).append((i, o))
    plan = _Plan((oh, ow), taps)
    return plan if 0 < plan.count <= MOST_PAIRS else None


class _Dense(torch.autograd.Function):
    """The convolution of a plan. Images and results have their channels last in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, format: torch.dtype, plan: _Plan) -> Tensor:
        n, channels, h, w = x.shape
        places = plan.size[0] * plan.size[1]
        rows = x.permute(0, 2, 3, 1).reshape(n, h * w * channels).to(format)
        blocks = weight.new_zeros((places, len(weight), h * w, channels), dtype=format)
        for (a, b), pairs in plan.taps.items():
            block = weight[:, :, a, b].to(format)
            for i, o in pairs:
                blocks[o, :, i] = block
        matrix = blocks.view(places * len(weight), h * w * channels)
        ctx.save_for_backward(rows, matrix)
        ctx.plan, ctx.image, ctx.kernel, ctx.formats = plan, x.shape, weight.shape, (x.dtype, weight.dtype)
        added = None if bias is None else bias.to(format).repeat(places)
        return F.linear(rows, matrix, added).view(n, *plan.size, len(weight)).permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        rows, matrix = ctx.saved_tensors
        n, channels, h, w = ctx.image
        out, _, kh, kw = ctx.kernel
        gradient = gradient.permute(0, 2, 3, 1).reshape(n, -1)
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = (gradient @ matrix).view(n, h, w, channels).permute(0, 3, 1, 2).to(ctx.formats[0])
        if ctx.needs_input_grad[1]:
            of_weight = rows.new_zeros((out, kh, kw, channels), dtype=ctx.formats[1]).permute(0, 3, 1, 2)
            seen, given = rows.view(n, h * w, channels), gradient.view(n, -1, out)
            for (a, b), pairs in ctx.plan.taps.items():
                left, right = (
                    torch.cat(parts) for parts in zip(*((given[:, o], seen[:, i]) for i, o in pairs), strict=True)
                )
                of_weight[:, :, a, b] = left.T @ right
        if ctx.needs_input_grad[2]:
            of_bias = gradient.view(-1, out).sum(0, dtype=torch.float32).to(ctx.formats[1])
        return of_x, of_weight, of_bias, None, None
