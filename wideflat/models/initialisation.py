"""How the weights of a network begin."""

from __future__ import annotations

from torch import nn

from wideflat.checks import network
from wideflat.checks.records import dense

__all__ = ["kaiming_normal"]


def kaiming_normal(model: nn.Module) -> nn.Module:
    r"""Draw every convolution and dense weight from N(0, 2 / fan_in) and put every bias to zero; batch norm is (1, 0).

    Appendix C says "Kaiming normal" and no more. This is ``torch.nn.init.kaiming_normal_`` as it comes: fan_in, gain
    :math:`\sqrt 2`. With groups, fan_in counts the inputs of one group, so depthwise convolutions keep their scale
    too (fan_out would not). PyTorch's own default, kept for SmallConvNet, is a uniform law of variance 1 / (3 fan_in).

    Args:
        model: Changed in place, and returned. The numbers come from torch's global generator.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> layer = kaiming_normal(nn.Linear(200, 1000))
        >>> round(layer.weight.std().item(), 3), layer.bias.abs().max().item()  # sqrt(2 / 200) = 0.1
        (0.1, 0.0)
    """
    for module in network(model).modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            dense("a weight", module.weight)  # not that of a lazy layer, which has no shape yet
            nn.init.kaiming_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
    return model
