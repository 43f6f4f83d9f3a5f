r"""What is done to weights after training: rounded to a few bits, pruned.

.. code-block:: text

    quantised to b bits    round(w / s) s,   s = max |w| / (2^(b-1) - 1)      symmetric, to the nearest (ties to even)
    pruned by a share f    the floor(f D) weights of least size become 0      of all chosen tensors together
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from wideflat.checks import choice, shown
from wideflat.noise.scales import by_channel

__all__ = ["pruned", "quantized"]


def quantized(weight: Tensor, bits: int, per: str = "tensor", groups: int | None = None) -> Tensor:
    """A weight rounded to 2^bits - 1 values around 0.

    Args:
        weight: Any shape; the first axis counts output channels, but for a transposed convolution.
        bits: At least 2.
        per: One step for the ``"tensor"`` or one for each output ``"channel"``.
        groups: Of a transposed convolution (:func:`wideflat.noise.scales.transposed_groups`).

    Example:
        >>> quantized(torch.tensor([0.2, -1.0, 0.6]), 2)  # -1, 0 and 1
        tensor([ 0., -1.,  1.])
    """
    choice("per", per, ("tensor", "channel"))
    if bits != int(bits) or not 2 <= bits <= 64:
        raise ValueError(f"bits must be whole numbers >= 2, and at most 64, got {shown(bits)}")
    if weight.numel() == 0:
        return weight
    whole = per == "tensor" or weight.dim() < 2
    size = weight.abs()
    largest = size.max() if whole else by_channel(size, groups, lambda part, axes: part.amax(axes, keepdim=True))
    step = largest / (2 ** (int(bits) - 1) - 1)
    return torch.where(step > 0, torch.round(weight / torch.where(step > 0, step, 1)) * step, 0.0).to(weight.dtype)


def pruned(weights: Mapping[str, Tensor], fraction: float) -> dict[str, Tensor]:
    """Weights of which the share ``fraction`` of least size is 0.

    Example:
        >>> pruned({"a": torch.tensor([3.0, -1.0]), "b": torch.tensor([2.0, 0.5])}, 0.5)
        {'a': tensor([3., 0.]), 'b': tensor([2., 0.])}
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fractions must be between 0 and 1, got {shown(fraction)}")
    flat = torch.cat([weight.abs().flatten().float() for weight in weights.values()])
    kept = torch.ones(len(flat), dtype=torch.bool, device=flat.device)
    kept[flat.argsort(stable=True)[: int(fraction * len(flat) + 1e-9)]] = False
    parts = kept.split([weight.numel() for weight in weights.values()])
    return {
        name: torch.where(part.view(weight.shape), weight, 0.0)
        for (name, weight), part in zip(weights.items(), parts, strict=True)
    }
