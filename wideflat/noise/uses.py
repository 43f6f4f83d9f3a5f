"""What a network uses each of its parameters for, and so how it can have noise of its own for every example.

.. code-block:: text

    one input vector an example, once      independent   (a linear layer)
    affine part of a normalisation         independent
    several positions, or several times    flipout       (convolutions, layers along a sequence)
    anything else                          shared        one z for the batch

A layer whose input is differentiated inside of the network (a force that is the gradient of an energy, ``torch.func``)
is "anything else": noise that has the right distribution at a point has not the right derivative there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

__all__ = [
    "CONVOLUTIONS",
    "Unforeseen",
    "Use",
    "is_description",
    "is_differentiated",
    "tensors_in",
    "treatments",
    "use_of",
    "uses",
]

#: Convolutions and the number of axes of a batch of their inputs.
CONVOLUTIONS: dict[Callable[..., Tensor], int] = {F.conv1d: 3, F.conv2d: 4, F.conv3d: 5}


class Unforeseen(RuntimeError):
    """The network does something that the plan of a measurement did not foresee, so the plan does not hold."""


class Use(NamedTuple):
    """What a parameter is to one operation.

    Attributes:
        kind: ``"vector"``, ``"positions"``, ``"affine"`` or ``"other"``.
        role: ``"weight"``, ``"bias"`` or ``""``.
    """

    kind: str
    role: str


_OTHER = Use("other", "")


def use_of(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], parameter: Tensor, size: int
) -> Use:
    """What ``parameter`` is to an operation on a batch of ``size`` examples."""
    x = args[0] if args else None
    if not isinstance(x, Tensor) or x is parameter or x.dim() < 2 or x.shape[0] != size or is_differentiated(x):
        return _OTHER
    place = {F.batch_norm: 3, F.layer_norm: 2, F.group_norm: 2}.get(func, 1)
    weight = args[place] if len(args) > place else kwargs.get("weight")
    bias = args[place + 1] if len(args) > place + 1 else kwargs.get("bias")
    found = [leaf is parameter for leaf in tensors_in(args, kwargs)]
    if sum(found) != 1 or not (weight is parameter or bias is parameter):
        return _OTHER
    return Use(_kind(func, args, kwargs, x, weight), "weight" if weight is parameter else "bias")


def _kind(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor, weight: Any) -> str:
    if func is F.linear:
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            return "other"
        return "vector" if x.dim() == 2 else "positions"
    if func in CONVOLUTIONS:
        return "positions" if x.dim() == CONVOLUTIONS[func] else "other"
    if func is F.batch_norm:
        training = args[5] if len(args) > 5 else kwargs.get("training", False)
        return "other" if training else "affine"
    if func is F.layer_norm:
        shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
        return "affine" if x.dim() > len(shape) else "other"
    return "affine" if func is F.group_norm else "other"


def uses(
    run: Callable[[Any], Any], batches: Sequence[tuple[Any, int]], parameters: Sequence[nn.Parameter]
) -> dict[int, list[list[Use]]]:
    """All uses of each parameter (by its id) for each batch.

    Args:
        run: Evaluates the network on a batch.
        batches: Batches of different sizes, each with its number of examples: an operation works example by example
            only if the first axis of its input is as long as the batch is, for all of them.
        parameters: Whose uses.
    """
    found: dict[int, list[list[Use]]] = {id(parameter): [] for parameter in parameters}
    for batch, size in batches:
        recorder = _Recorder(list(parameters), size)
        with recorder:
            run(batch)
        for key, seen in recorder.seen.items():
            found[key].append(seen)
    return found


def treatments(found: dict[int, list[list[Use]]]) -> dict[int, str]:
    """``"independent"``, ``"flipout"`` or ``"shared"`` for each parameter, by the table at the head of this module."""
    plan = {}
    for key, batches in found.items():
        kinds = {use.kind for seen in batches for use in seen}
        roles = {use.role for seen in batches for use in seen}
        once = max(map(len, batches), default=0) == 1
        if "other" in kinds or len(roles) != 1:
            plan[key] = "shared"
        elif kinds == {"affine"} or (kinds == {"vector"} and once):
            plan[key] = "independent"
        else:
            plan[key] = "flipout" if kinds <= {"vector", "positions"} else "shared"
    return plan


def is_differentiated(x: Tensor) -> bool:
    """Whether a tensor carries more than its values: a graph, a tangent, or a level of ``torch.func``.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> with torch.no_grad(): is_differentiated(x)
        False
        >>> is_differentiated(2 * x), is_differentiated(torch.ones(2))
        (True, False)
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return True
    if torch.compiler.is_compiling():  # a graph of values, in which levels cannot be asked for
        return False
    return torch._C._functorch.is_functorch_wrapped_tensor(x) or forward_ad.unpack_dual(x).tangent is not None


def tensors_in(*arguments: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (tuple, list)):
            yield from tensors_in(*argument)
        elif isinstance(argument, dict):
            yield from tensors_in(*argument.values())


def is_description(func: Callable[..., Any], result: Any) -> bool:
    """Whether an operation on a parameter only describes it (shape, type), so that its values go nowhere."""
    if result is None:
        return getattr(func, "__name__", "") == "__get__"
    if isinstance(result, (tuple, list)):
        return all(is_description(func, part) for part in result)
    return isinstance(result, (bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format))


class _Recorder(TorchFunctionMode):
    """Notes for each parameter what it is used for."""

    def __init__(self, parameters: Sequence[Tensor], size: int) -> None:
        super().__init__()
        self._parameters = {id(parameter): parameter for parameter in parameters}
        self.seen: dict[int, list[Use]] = {key: [] for key in self._parameters}
        self._size = size

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        keys = {id(leaf) for leaf in tensors_in(args, kwargs)} & self.seen.keys()
        if keys and not is_description(func, result):
            for key in keys:
                self.seen[key].append(use_of(func, args, kwargs, self._parameters[key], self._size))
        return result
