r"""The committee machine of Sec. 5 and Appendix B.1: the network, its loss, and which patterns it gets wrong.

A committee of H units votes on a pattern x with N inputs (Eq. 7):

    y(w, x) = sign[ 1/sqrt(H) sum_h sign(w_h . x) ]

Gradients come from the surrogate tanh(beta z) in place of the hidden sign(z), and from the loss of Eq. 8. Only the
direction of each w_h matters, so every hidden unit is kept at norm one.

Conventions where the paper is silent or cannot be meant literally:

* |w_h| = 1 with pre-activation w_h . x, which is the same as |w_h| = sqrt(N) with w_h . x / sqrt(N). (Norm one *and*
  the factor 1/sqrt(N) of Eq. 7 would leave tanh linear.)
* sign(0) = +1 for a hidden unit. H is odd, so that no vote is a tie. :func:`votes` is the one place that says so.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wideflat.checks import choice, instance, number, shown, whole
from wideflat.checks.doors import asks
from wideflat.checks.options import device as checked_device
from wideflat.checks.options import dtype as checked_dtype
from wideflat.checks.records import dense, fitting

__all__ = [
    "CommitteeMachine",
    "balanced_error",
    "check_hidden",
    "committee_loss",
    "errors",
    "says_yes",
    "votes",
    "wrong_patterns",
]

#: Larger machines are never meant; their weights would fill the memory.
MOST_INPUTS, MOST_HIDDEN = 10**7, 10**4


def check_hidden(hidden: int) -> None:
    """Refuse numbers of hidden units whose vote can be a tie."""
    if whole("hidden", hidden, 1, MOST_HIDDEN) % 2 == 0:
        raise ValueError(f"hidden must be an odd number, so that no vote is a tie; got {hidden}")


def votes(z: Tensor, dim: int) -> Tensor:
    """How many more units say +1 than -1, from pre-activations with the units along ``dim``; sign(0) = +1.

    Example:
        >>> votes(torch.tensor([[1.0, 0.0, -2.0]]), dim=1)
        tensor([1])
    """
    return (z >= 0).sum(dim=dim) * 2 - z.shape[dim]


def says_yes(z: Tensor, dim: int) -> Tensor:
    """Whether committees answer +1, from pre-activations with the units along ``dim``."""
    return votes(z, dim) > 0


class CommitteeMachine(nn.Module):
    r"""A network of ``hidden`` sign units that vote with equal weight (Eq. 7).

    In training mode the output is the differentiable surrogate 1/sqrt(H) sum_h tanh(beta w_h . x), with dropout of
    hidden units if asked for. In evaluation mode it is the exact network 1/sqrt(H) sum_h sign(w_h . x), where
    sign(0) = +1: an odd multiple of 1/sqrt(H), never zero, whose sign is the answer.

    Args:
        num_inputs: N.
        hidden: H, an odd number, so that no vote is a tie.
        tanh_beta: The slope beta; set the attribute ``tanh_beta`` to change it while training.
        dropout: The probability with which a hidden unit is left out of the surrogate in training mode.
        generator: Source of the initial weights, which are uniform and then normalised.
        device: Where the weights live.
        dtype: Their type.

    Attributes:
        weight: The only parameter, (H, N). Call :meth:`normalize_` after each update to keep its rows at norm one.

    Example:
        Two of three units say yes:

        >>> network = CommitteeMachine(2, hidden=3)
        >>> with torch.no_grad():
        ...     _ = network.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, -0.8]]))
        >>> (network.eval()(torch.tensor([[1.0, 1.0]])) * 3**0.5).round()
        tensor([1.])
        >>> network.predict(torch.tensor([[1.0, 1.0], [-1.0, 1.0]]))
        tensor([ 1., -1.])

        It trains like any other network:

        >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        >>> loss = committee_loss(network.train()(torch.tensor([[1.0, 1.0]])), torch.tensor([-1.0]), omega=5.0)
        >>> loss.backward(); optimizer.step(); network.normalize_()
        >>> network.weight.norm(dim=1).detach().allclose(torch.ones(3))
        True
    """

    def __init__(
        self,
        num_inputs: int,
        hidden: int = 9,
        *,
        tanh_beta: float = 1.0,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_inputs = whole("num_inputs", num_inputs, 1, MOST_INPUTS)
        check_hidden(hidden)
        dropout, tanh_beta = number("dropout", dropout, 0, 1), number("tanh_beta", tanh_beta, above=0)
        if dropout == 1:
            raise ValueError("dropout must be a probability below 1, got 1")
        self.num_inputs, self.hidden, self.dropout, self.tanh_beta = num_inputs, hidden, dropout, tanh_beta
        if generator is not None:
            instance("generator", generator, torch.Generator)
        dtype = None if dtype is None else checked_dtype("dtype", dtype)
        weight = torch.rand(hidden, num_inputs, generator=generator, dtype=dtype) * 2 - 1
        self.weight = nn.Parameter(weight.to(checked_device("device", device)))
        self.normalize_()

    def forward(self, x: Tensor) -> Tensor:
        """The surrogate output in training mode, the scaled vote in evaluation mode; shape (..., N) -> (...)."""
        if self.training:
            return self.surrogate(x)
        return votes(F.linear(self._patterns(x), self.weight), dim=-1).to(x.dtype) / math.sqrt(self.hidden)

    def _patterns(self, x: Tensor) -> Tensor:
        """Patterns, or a refusal of what is none for this machine."""
        dense("x", x)
        alike = x.dtype == self.weight.dtype or torch.is_autocast_enabled(x.device.type)
        if x.dim() == 0 or x.shape[-1] != self.num_inputs or not alike:
            raise ValueError(
                f"x must have {self.num_inputs} inputs of {self.weight.dtype}, got {shown(x)} of {x.dtype}"
            )
        return x

    def surrogate(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """1/sqrt(H) sum_h tanh(beta w_h . x), whatever the mode.

        Args:
            x: Patterns, (..., N).
            mask: Factors of the hidden units, (..., H), in place of those that dropout draws in training mode.
        """
        hidden = torch.tanh(self.tanh_beta * F.linear(self._patterns(x), self.weight))
        if mask is not None and dense("mask", mask).device != x.device:
            raise ValueError(f"mask must be where x is, on {x.device}, and is on {mask.device}")
        if mask is not None and not _multiplies(mask, hidden):
            raise ValueError(f"mask must have a factor for each of {self.hidden} hidden units, got {shown(mask)}")
        hidden = F.dropout(hidden, self.dropout, self.training) if mask is None else hidden * mask
        return hidden.sum(dim=-1) / math.sqrt(self.hidden)

    def predict(self, x: Tensor) -> Tensor:
        """The answer of the exact network, +1 or -1, whatever the mode."""
        return torch.where(says_yes(F.linear(self._patterns(x), self.weight), dim=-1), 1.0, -1.0).to(x.dtype)

    @torch.no_grad()
    def normalize_(self) -> None:
        """Give the weights of every hidden unit norm one, in place."""
        self.weight.div_(self.weight.norm(dim=1, keepdim=True))

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"num_inputs={self.num_inputs}, hidden={self.hidden}, tanh_beta={self.tanh_beta}, dropout={self.dropout}"


@asks
def committee_loss(output: Tensor, target: Tensor, omega: float | Tensor, reduction: str = "mean") -> Tensor:
    r"""The cross entropy of Eq. 8 with the scale omega: f(x) = -x/2 + log(2 cosh(omega x)) / (2 omega), x = y * output.

    Computed as log(1 + exp(-2 omega x)) / (2 omega), which is the same and neither overflows nor cancels.

    Args:
        output: What the network says, any shape.
        target: The labels +1 and -1, same shape.
        omega: The scale, > 0.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Example:
        f(0) = log(2) / (2 omega); for a large omega the loss is max(-x, 0):

        >>> one = torch.ones(1)
        >>> round(committee_loss(0 * one, one, omega=0.5).item(), 6)
        0.693147
        >>> committee_loss(torch.tensor([-2.0, 3.0]), torch.ones(2), omega=1e6, reduction="none").abs()
        tensor([2., 0.])
    """
    choice("reduction", reduction, ("mean", "sum", "none"))
    fitting(output=output, target=target, omega=omega)
    loss = -F.logsigmoid(2 * omega * target * output) / (2 * omega)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


@asks
def wrong_patterns(weight: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """Which patterns committees (..., H, N) get wrong, exactly (Eq. 7); shape (..., P).

    One committee at a time: what is said of it must not depend on the others, to the last bit.

    Example:
        Two units say yes, one of them with nothing to go by:

        >>> weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
        >>> wrong_patterns(weight, torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([1.0, -1.0]))
        tensor([False,  True])
    """
    fits = weight.dim() >= 2 and inputs.dim() == 2 and weight.shape[-1] == inputs.shape[-1]
    if not fits or targets.shape != inputs.shape[:1] or not weight.is_floating_point():
        raise ValueError(
            "weights must be real (..., H, N), inputs (P, N) and targets (P,), got "
            f"{tuple(weight.shape)} of {weight.dtype}, {tuple(inputs.shape)} and {tuple(targets.shape)}"
        )
    inputs = inputs.to(weight.dtype)
    committees = weight.reshape(-1, *weight.shape[-2:])
    answers = [says_yes(units @ inputs.T, dim=0) for units in committees]
    yes = torch.stack(answers) if answers else torch.empty(0, len(inputs), dtype=torch.bool, device=weight.device)
    return (yes != (targets > 0)).reshape(*weight.shape[:-2], len(inputs))


@asks
def errors(weight: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """The number of patterns that committees (..., H, N) get wrong; shape (...).

    Example:
        >>> errors(torch.tensor([[[1.0, 0.0]], [[-1.0, 0.0]]]), torch.tensor([[2.0, 1.0]]), torch.tensor([1.0]))
        tensor([0, 1])
    """
    return wrong_patterns(weight, inputs, targets).sum(dim=-1)


@asks
def balanced_error(weight: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean of the error rates in the two classes, for committees (..., H, N); NaN without patterns of a class."""
    wrong = wrong_patterns(weight, inputs, targets).double()
    return torch.stack([wrong[..., targets == label].mean(dim=-1) for label in (-1, 1)]).mean(dim=0)


def _multiplies(mask: Tensor, hidden: Tensor) -> bool:
    """Whether a mask can be multiplied with the hidden units, and leaves their shape."""
    try:
        alike = torch.broadcast_shapes(mask.shape, hidden.shape) == hidden.shape
        return alike and torch.promote_types(mask.dtype, hidden.dtype) is not None
    except RuntimeError:  # they do not fit; and types of 8 bits have no common one
        return False
