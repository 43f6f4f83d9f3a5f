r"""Products with the Hessian of the mean loss and with its Gauss-Newton matrix, batch by batch.

.. code-block:: text

    Hessian         H v = d/dw (dL/dw . v)                      by double backward
    Gauss-Newton    G v = (1/n) sum_i J_i^T L''_i J_i v         J = d outputs / dw, L'' = d^2 loss / d outputs^2

G is H without the curvature of the network itself. It is positive for a convex loss; for the cross-entropy it is the
Fisher matrix. J v is found by double backward of J^T u, so both ask the same of a network: two derivatives.

Attention is evaluated by torch's ``SDPBackend.MATH``: the faster kernels give the same and have no second derivative.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from wideflat.evaluation.blocks import Blocks
from wideflat.evaluation.evaluation import Evaluation
from wideflat.evaluation.metrics import NamedMetric, scores
from wideflat.kernels.float64 import fetched

__all__ = ["MATRICES", "GaussNewton", "Hessian", "SecondDerivative"]

#: The numbers of the parameters of a block and a vector in their shapes, to its product; None where that is 0.
Product: TypeAlias = Callable[[Sequence[int], Sequence[Tensor]], Sequence[Tensor | None]]


class SecondDerivative(ABC):
    """A symmetric matrix of the size of the parameters, known by its products; several vectors share a forward pass.

    Args:
        evaluation: The network, inside ``evaluation.prepared()``.
        blocks: The data.
        names: Which parameters, in the order of the entries of a vector.

    Attributes:
        examples: How many examples the mean loss is over; known after :meth:`loss`.
        attends: Whether the network has called torch's attention; known after the first product.
    """

    def __init__(self, evaluation: Evaluation, blocks: Blocks, names: Sequence[str]) -> None:
        self.evaluation, self.blocks, self.names = evaluation, blocks, list(names)
        self.examples = 0
        self.attends: bool | None = None

    @property
    def notes(self) -> list[str]:
        """What the reader of a result should know."""
        return ["attention by torch's math kernel, which has a second derivative"] if self.attends else []

    def _batches(self) -> Iterator[tuple[Any, int]]:
        for block in self.blocks.visit(0):
            yield self.evaluation.load(block.batch), block.size

    def loss(self) -> float:
        """The mean loss over the data."""
        values, counts = [], []
        for batch, size in self._batches():
            value, counted = self.evaluation.mean(batch, size)
            values.append(value)
            counts.append(counted)
        total, self.examples = 0.0, sum(counts)
        for value, counted in zip(fetched(values), counts, strict=True):
            total += float(value) * counted
        return total / self.examples

    def __call__(self, v: Tensor) -> Tensor:
        """The product with the columns of ``v``, of shape (D, k)."""
        return self.parts([range(len(self.names))], [v])[0]

    def parts(self, groups: Sequence[Sequence[int]], vectors: Sequence[Tensor]) -> list[Tensor]:
        """The products of diagonal blocks, all from the same forward passes.

        Args:
            groups: For each block the numbers of its parameters.
            vectors: For each block columns of the size of these parameters together.
        """
        outs = [torch.zeros_like(v) for v in vectors]
        if self.attends is None:
            self.attends = False
        for batch, size in self._batches():
            with (
                self.evaluation.differentiable(self.names) as named,
                sdpa_kernel(SDPBackend.MATH),
                _Attention(self),
            ):
                parameters = list(named.values())
                product = self._of_batch(batch, size, parameters)
                for out, group, v in zip(outs, groups, vectors, strict=True):
                    own = [parameters[i] for i in group]
                    for k in range(v.shape[1]):
                        out[:, k] += _joined(product(group, _split(v[:, k], own)), own)
        return outs

    @abstractmethod
    def _of_batch(self, batch: Any, size: int, parameters: Sequence[nn.Parameter]) -> Product:
        """What a batch contributes, as a function that multiplies one vector, with the forward pass behind it."""

    def _checked(self, value: Tensor) -> Tensor:
        if not value.requires_grad:
            raise ValueError(
                f"metric {self.evaluation.metric_name} has no gradient: it must be a differentiable function "
                "of the outputs, and these of the chosen parameters"
            )
        return value


class Hessian(SecondDerivative):
    """The Hessian of the mean loss; see :class:`SecondDerivative`."""

    def _of_batch(self, batch: Any, size: int, parameters: Sequence[nn.Parameter]) -> Product:
        value, counted = self.evaluation.mean(batch, size)
        value = self._checked(value) * (counted / self.examples)
        gradients = torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True)

        def product(group: Sequence[int], v: Sequence[Tensor]) -> Sequence[Tensor | None]:
            used = [j for j, i in enumerate(group) if (g := gradients[i]) is not None and g.requires_grad]
            if not used:
                return [None] * len(group)
            return torch.autograd.grad(
                [gradients[group[j]] for j in used],
                [parameters[i] for i in group],
                grad_outputs=[v[j] for j in used],
                retain_graph=True,
                allow_unused=True,
            )

        return product


class GaussNewton(SecondDerivative):
    """The generalised Gauss-Newton matrix of the mean loss; see :class:`SecondDerivative`."""

    def _of_batch(self, batch: Any, size: int, parameters: Sequence[nn.Parameter]) -> Product:
        outputs, targets = self.evaluation.outputs(batch)
        outputs = self._checked(self._tensor(outputs))
        free = outputs.detach().requires_grad_()
        value, counted = self.evaluation.mean_of(free, targets, size)
        slope = torch.autograd.grad(self._checked(value) * (counted / self.examples), free, create_graph=True)[0]
        if not slope.requires_grad:  # a loss that is linear in the outputs has no second derivative
            return lambda group, _: [None] * len(group)
        u = torch.zeros_like(outputs, requires_grad=True)
        back = torch.autograd.grad(outputs, parameters, grad_outputs=u, create_graph=True, allow_unused=True)

        def product(group: Sequence[int], v: Sequence[Tensor]) -> Sequence[Tensor | None]:
            used = [j for j, i in enumerate(group) if back[i] is not None]
            if not used:
                return [None] * len(group)
            jv = torch.autograd.grad([back[group[j]] for j in used], u, [v[j] for j in used], retain_graph=True)[0]
            bent = torch.autograd.grad(slope, free, jv, retain_graph=True)[0]
            own = [parameters[i] for i in group]
            return torch.autograd.grad(outputs, own, bent, retain_graph=True, allow_unused=True)

        return product

    def _tensor(self, outputs: Any) -> Tensor:
        if isinstance(self.evaluation.metric, NamedMetric):
            return scores(outputs, self.evaluation.metric_name)
        if not isinstance(outputs, Tensor):
            raise TypeError(
                f"the Gauss-Newton matrix needs outputs that are one tensor, got {type(outputs).__name__}; give "
                "forward=, a function of the model and a batch that returns (outputs, targets)"
            )
        return outputs


#: The matrices by their names.
MATRICES: dict[str, type[SecondDerivative]] = {"hessian": Hessian, "ggn": GaussNewton}


class _Attention(TorchFunctionMode):
    """Notices that attention is called."""

    def __init__(self, owner: SecondDerivative) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function; remember whether it was attention."""
        if func in (F.scaled_dot_product_attention, F.multi_head_attention_forward):
            self._owner.attends = True
        return func(*args, **(kwargs or {}))


def _split(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _joined(parts: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    flat = [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(like, parts, strict=True)]
    return torch.cat(flat).detach()
