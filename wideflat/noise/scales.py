r"""What the noise on a weight is proportional to: the a of w + sigma a z, z ~ N(0, I), one definition for all measures.

.. code-block:: text

    "relative"   a_i = |w_i|                                      Eq. 4: every weight by its own size
    "absolute"   a_i = 1                                          every weight alike
    "layer"      a_i = root mean square of its tensor
    "filter"     a_i = norm of its output channel / sqrt(size)    the filter normalisation of pictures of the loss
    a mapping    a tensor for each name                           whatever is known about the weights

An output channel is what one output of a layer is computed with: a row of a linear layer, a filter of a convolution; in
a vector (a bias, the affine part of a normalisation) every number is one.

A ReLU network computes the same if a layer is multiplied by c > 0 (with its bias) and the next one by 1/c: "relative",
"layer" and "filter" noise is the same for both, "absolute" is not. With another c for every hidden unit only "relative"
noise is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from wideflat.checks import real_tensor, shown
from wideflat.kernels.float64 import fetched

__all__ = ["WORDS", "NothingMoves", "Scale", "Scales", "by_channel", "transposed_groups"]

#: What the noise on a weight is proportional to: a word, or a tensor for each name.
Scale: TypeAlias = str | Mapping[str, Tensor]

#: The scales that have a name.
WORDS = ("relative", "absolute", "layer", "filter")


class NothingMoves(ValueError):
    """Noise that moves none of the chosen parameters."""


class Scales:
    """The a of every perturbed parameter of a network.

    Under ``"relative"`` it is w itself, with its sign: z is symmetric, so nothing that is averaged depends on it, and
    w + sigma z * w is Eq. 4 to the bit.

    Args:
        model: The network, at its weights.
        names: The perturbed parameters.
        scale: A word of the table at the head of this module, or a tensor for each name that can be expanded to the
            shape of the parameter, finite and not negative.

    Attributes:
        name: The scale in words; for a mapping with a digest of its numbers, by which two are told apart.
        values: a by the names of the parameters.
        size: Numbers in all of them.
        unmoved: How many of these are 0: weights that the noise cannot move.

    Raises:
        NothingMoves: If all of them are 0.

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> with torch.no_grad(): _ = model.weight.copy_(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        >>> Scales(model, ["weight"], "filter").values["weight"]  # sqrt(25/2), sqrt(1/2)
        tensor([[3.5355, 3.5355],
                [0.7071, 0.7071]])
        >>> Scales(model, ["weight"], "relative").unmoved, Scales(model, ["weight"], "layer").unmoved
        (1, 0)
    """

    def __init__(self, model: nn.Module, names: Sequence[str], scale: Scale = "relative") -> None:
        weights = dict(model.named_parameters())
        chosen = {name: weights[name].detach() for name in names}
        if isinstance(scale, Mapping):
            self.values = _given(chosen, scale)
            self.name = f"given ({_digest(self.values)})"
        else:
            kind = _kind(model, scale)
            self.values = {name: kind(name, weight) for name, weight in chosen.items()}
            self.name = scale
        self.size = sum(value.numel() for value in self.values.values())
        self.unmoved = sum(int(count) for count in fetched([(value == 0).sum() for value in self.values.values()]))
        if self.unmoved == self.size:
            others = ", ".join(f'"{word}"' for word in WORDS if word != self.name)
            raise NothingMoves(
                f'none of the {self.size} chosen weights moves: with scale="{self.name}" the noise on all is 0; '
                f"use another scale ({others}, or a tensor for each name) or perturb other parameters"
            )

    @property
    def factors(self) -> dict[str, Tensor] | None:
        """The values, or None where the weights are their own scale."""
        return None if self.name == "relative" else self.values

    def flat(self) -> Tensor:
        """All of them as one vector, in the order of the names."""
        return torch.cat([value.flatten() for value in self.values.values()])


def _kind(model: nn.Module, scale: str) -> Callable[[str, Tensor], Tensor]:
    """The function of name and weight that gives the a of a scale with a name."""
    if not isinstance(scale, str) or scale not in WORDS:
        words = ", ".join(f'"{word}"' for word in WORDS)
        raise ValueError(f"scale must be {words} or a tensor for each name, got {shown(scale)}")
    if scale == "filter":
        groups = transposed_groups(model)
        return lambda name, weight: _filter(weight, groups.get(name))
    kinds: dict[str, Callable[[str, Tensor], Tensor]] = {
        "relative": lambda _, weight: weight,
        "absolute": lambda _, weight: torch.ones_like(weight),
        "layer": lambda _, weight: _precise(weight).square().mean().sqrt().to(weight.dtype).expand_as(weight),
    }
    return kinds[scale]


def transposed_groups(model: nn.Module) -> dict[str, int]:
    """The groups of each transposed convolution, by the name of its weight: its output channels are on the second axis.

    Example:
        >>> transposed_groups(nn.Sequential(nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(4, 6, 3, groups=2)))
        {'1.weight': 2}
    """
    return {
        f"{prefix}.weight".lstrip("."): module.groups
        for prefix, module in model.named_modules()
        if isinstance(module, _ConvTransposeNd)
    }


def by_channel(weight: Tensor, groups: int | None, reduce: Callable[[Tensor, tuple[int, ...]], Tensor]) -> Tensor:
    """A number for each output channel of a weight of two axes or more, in the place of each of its weights.

    Args:
        weight: Of any layer.
        groups: Of a transposed convolution; None for every other layer, whose first axis counts output channels.
        reduce: A function of a tensor and the axes to reduce, which keeps them.
    """
    if groups is None:
        return reduce(weight, tuple(range(1, weight.dim()))).expand_as(weight)
    inputs, outputs = weight.shape[:2]
    found = reduce(weight.reshape(groups, inputs // groups, outputs, -1), (1, 3))
    found = found.expand(-1, inputs // groups, -1, -1).reshape(inputs, outputs, *(1,) * (weight.dim() - 2))
    return found.expand_as(weight)


def _filter(weight: Tensor, groups: int | None) -> Tensor:
    """Root mean square of each output channel; ``groups`` of a transposed convolution, whose second axis has them."""
    if weight.dim() < 2:
        return weight.abs()
    mean = by_channel(_precise(weight).square(), groups, lambda square, axes: square.mean(axes, keepdim=True))
    return mean.sqrt().to(weight.dtype)


def _precise(weight: Tensor) -> Tensor:
    """In single precision at least: squares of half-precision numbers overflow."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def _given(weights: Mapping[str, Tensor], scale: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a mapping, in the shapes of the weights."""
    missing = [name for name in weights if name not in scale]
    if missing:
        raise ValueError(f"scale has no tensor for {', '.join(missing[:4])}; give one for each perturbed parameter")
    found = {}
    for name, weight in weights.items():
        value = real_tensor(f"the scale of {name}", scale[name]).detach().to(weight)
        try:
            found[name] = value.expand_as(weight)
        except RuntimeError:
            raise ValueError(
                f"the scale of {name} has shape {tuple(value.shape)}, which does not fit {tuple(weight.shape)}"
            ) from None
        if not bool((value.isfinite() & (value >= 0)).all()):
            raise ValueError(f"the scale of {name} must be finite and not negative")
    return found


def _digest(values: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=4)
    for name, value in values.items():
        digest.update(name.encode())
        digest.update(value.cpu().double().contiguous().numpy().tobytes())
    return digest.hexdigest()
