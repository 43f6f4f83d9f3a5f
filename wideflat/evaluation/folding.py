"""Batch norm folded into the convolution before it, so that a network is evaluated at the speed of its convolutions.

In eval mode batch norm is an affine map of each channel, and so is a part of the convolution before it:

.. code-block:: text

    gamma (W x + b - mean) / sqrt(var + eps) + beta  =  (s W) x + s (b - mean) + beta,     s = gamma / sqrt(var + eps)

Folding happens after the weights were perturbed: W, b, gamma and beta all carry their own noise.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

__all__ = ["FoldedNetwork"]

_PRODUCTS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class FoldedNetwork(nn.Module):
    """A copy of a network in eval mode whose batch norms are folded; :meth:`refold` after its parameters change.

    The copy has the parameters and buffers of the network, under the same names, in :attr:`network`.

    Args:
        network: The copy, with its parameters.
        graph: The same computation without the folded batch norms.
        pairs: Names of the folded layers: (product, batch norm).

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()).eval()
        >>> folded = FoldedNetwork.fold(model)
        >>> folded.pairs
        [('0', '1')]
        >>> x = torch.randn(4, 1, 5, 5)
        >>> torch.allclose(folded(x), model(x), atol=1e-6)
        True
    """

    def __init__(self, network: nn.Module, graph: fx.GraphModule, pairs: list[tuple[str, str]]) -> None:
        super().__init__()
        self.network = network
        self.pairs = pairs
        # The graph's modules are not registered here: its parameters are made from those of the network.
        self.__dict__["_graph"] = graph
        self._slots: list[tuple[nn.Module, _BatchNorm, nn.Module, Tensor, Tensor]] = []
        for product, norm in pairs:
            source, fused = network.get_submodule(product), graph.get_submodule(product)
            bn = network.get_submodule(norm)
            assert isinstance(bn, _BatchNorm)
            weight = torch.empty_like(source.weight.data)  # type: ignore[arg-type]
            bias = weight.new_empty(weight.shape[0])
            fused.weight = nn.Parameter(weight, requires_grad=False)
            fused.bias = nn.Parameter(bias, requires_grad=False)
            self._slots.append((source, bn, fused, weight, bias))
        self.refold()

    @classmethod
    def fold(cls, model: nn.Module) -> FoldedNetwork | None:
        """A folded copy of ``model``, or None where there is nothing to fold or its computation cannot be traced."""
        if not any(isinstance(module, _BatchNorm) for module in model.modules()) or _watched(model):
            return None
        try:
            network = copy.deepcopy(model).requires_grad_(False).eval()
            if any(parameter.dim() == 4 for parameter in network.parameters()):
                network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                graph = fx.symbolic_trace(network)
        except Exception:  # whatever the tracer of torch cannot follow; the network is then evaluated as it is
            return None
        pairs = _fold_graph(graph)
        if not pairs:
            return None
        # Layers that are folded become modules of the graph alone; all others stay those of the network.
        for product, _ in pairs:
            parent, _, name = product.rpartition(".")
            owner = graph.get_submodule(parent)
            fused = copy.copy(graph.get_submodule(product))
            fused._parameters = dict(fused._parameters)
            if owner is network.get_submodule(parent):  # never change the network's own containers
                return None
            owner._modules[name] = fused
        return cls(network, graph, pairs)

    @torch.no_grad()
    def refold(self) -> None:
        """Compute the folded weights from the parameters of :attr:`network` as they are now."""
        for source, norm, _, weight, bias in self._slots:
            assert norm.running_var is not None and norm.running_mean is not None
            s = (norm.running_var + norm.eps).rsqrt_()
            if norm.weight is not None:
                s = s * norm.weight
            torch.mul(source.weight, s.reshape(-1, *(1,) * (weight.dim() - 1)), out=weight)  # type: ignore[arg-type]
            shift = -norm.running_mean if source.bias is None else source.bias - norm.running_mean  # type: ignore[operator]
            if norm.bias is None:
                torch.mul(s, shift, out=bias)
            else:
                torch.addcmul(norm.bias, s, shift, out=bias)

    def forward(self, *inputs: Tensor) -> Tensor:
        """The output of the network."""
        return self.__dict__["_graph"](*inputs)


def _watched(model: nn.Module) -> bool:
    """Whether something besides the computation hangs on the modules: hooks, parametrisations."""
    return any(
        module._forward_hooks or module._forward_pre_hooks or parametrize.is_parametrized(module)
        for module in model.modules()
    )


def _fold_graph(graph: fx.GraphModule) -> list[tuple[str, str]]:
    """Take every batch norm out of ``graph`` that follows a product and nothing else uses; their names."""
    modules = dict(graph.named_modules())
    calls = Counter(node.target for node in graph.graph.nodes if node.op == "call_module")
    pairs = []
    for node in list(graph.graph.nodes):
        if node.op != "call_module" or not isinstance(norm := modules[node.target], _BatchNorm):
            continue
        before = node.args[0]
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) != 1:
            continue
        product = modules[before.target]
        if type(product) not in _PRODUCTS or type(norm) not in _NORMS or norm.running_var is None:
            continue
        if calls[node.target] != 1 or calls[before.target] != 1:
            continue
        node.replace_all_uses_with(before)
        graph.graph.erase_node(node)
        pairs.append((str(before.target), str(node.target)))
    graph.recompile()
    return pairs
