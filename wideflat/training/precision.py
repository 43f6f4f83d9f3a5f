"""Mixed precision: forward and backward pass in a smaller format, gradients that come out in their own size.

With float16 the loss is multiplied by a large number before the backward pass, so that small gradients are not rounded
to zero. They are divided by it as soon as they are there: no algorithm ever sees a scaled gradient. Where one of them
has overflowed, the iteration is left out and the number is halved, as `torch.amp.GradScaler` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Overflow", "Precision"]

#: The formats by the names they have on the command line; float32 throughout with "off".
FORMATS = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Overflow(ArithmeticError):
    """A gradient does not fit into float16, so that the iteration has to be left out."""


class Precision:
    """How the gradients of a training are computed.

    Args:
        amp: ``off``, ``bf16`` or ``fp16``.
        device: Where.

    Example:
        The gradient of w^2 at 3, and the one of a loss that is too large for the scale:

        >>> precision = Precision("fp16", "cpu")
        >>> w = torch.nn.Parameter(torch.tensor(3.0))
        >>> for factor in (1.0, 1e38):
        ...     w.grad = None
        ...     precision.backward(factor * w**2)
        ...     print(precision.unscale([w]), w.grad.item())
        ...     precision.update()
        True 6.0
        False inf
        >>> precision.state_dict()["scale"]  # half of what it was
        32768.0
    """

    def __init__(self, amp: str, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.format = FORMATS[amp]
        self.scaler = torch.amp.GradScaler(self.device.type) if self.format is torch.float16 else None
        self._passes: list[_Pass] = []

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Within it, the forward pass is computed in the smaller format."""
        return contextlib.nullcontext() if self.format is None else torch.autocast(self.device.type, self.format)

    def backward(self, loss: Tensor) -> None:
        """The backward pass; the gradients are scaled until `unscale`."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def unscale(self, parameters: Iterable[Tensor]) -> bool:
        """Bring the gradients of these parameters to their own size; says whether all are finite.

        Without scaling nobody looks: a loss that is not finite is found by the checks of the training.
        """
        if self.scaler is None:
            return True
        gradients = _Pass(list(parameters))
        self._passes.append(gradients)  # the scaler knows it by its address until `update`
        self.scaler.unscale_(gradients)  # type: ignore[arg-type]
        self.scaler.step(gradients)  # type: ignore[arg-type]
        return gradients.finite

    def update(self, fits: bool = True) -> None:
        """Adapt the scale, at the end of an iteration.

        Args:
            fits: Whether gradients elsewhere, which this process has not seen, were finite too.
        """
        if self.scaler is None:
            return
        if not fits and all(gradients.finite for gradients in self._passes):
            self.unscale([_overflown(self.device)])
        self.scaler.update()
        self._passes.clear()

    def state_dict(self) -> dict[str, Any] | None:
        """The scale and what it depends on; None without one."""
        return None if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on with a scale."""
        if self.scaler is not None and state is not None:
            self.scaler.load_state_dict(state)


class _Pass:
    """The gradients of one backward pass, in the shape in which `torch.amp.GradScaler` takes them: an optimizer, whose
    step it leaves out if one of them is not finite.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self.param_groups = [{"params": parameters}]
        self.finite = False

    def step(self) -> None:
        self.finite = True


def _overflown(device: torch.device) -> Tensor:
    """A parameter whose gradient is not finite."""
    parameter = torch.zeros((), device=device, requires_grad=True)
    parameter.grad = torch.full((), torch.inf, device=device)
    return parameter
