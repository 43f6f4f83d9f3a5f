"""Small networks of every kind, for measurements that must be right or refused whatever the network does."""

import torch

from zoo import carried, examples, kept, layers, parameters, strange, unusual, wrapped

KINDS = (
    layers.plain,
    layers.normalisations,
    layers.convolutions,
    layers.sequences,
    parameters.parameters,
    examples.examples,
    wrapped.wrapped,
    unusual.unusual,
    strange.strange,
    kept.kept,
    carried.carried,
)


def zoo(kind):
    """The networks of one kind in eval mode with their inputs, the same ones every time."""
    torch.manual_seed(7)
    return {name: (model.eval(), x) for name, (model, x) in kind().items()}


NAMES = [(kind, name) for kind in KINDS for name in zoo(kind)]

_EXAMPLE = {"example"}
_ALL = {"auto", "batch", "example", "pass"}

#: Which kinds of noise refuse which network; all others measure it.
REFUSED = {
    "random in eval mode": _EXAMPLE,
    "statistics of the batch by hand": _EXAMPLE,
    "statistics of the batch": _EXAMPLE,
    "statistics of the batch, affine": _EXAMPLE,
    "attention over the batch": _EXAMPLE,
    "graph convolution": _EXAMPLE,
    "neighbours in the batch": _EXAMPLE,
    "sums over the batch": _EXAMPLE,
    "pairs of the batch": _EXAMPLE,
    "branches on the batch": _EXAMPLE,
    "softmax over the batch": _EXAMPLE,
    "sorted": _EXAMPLE,
    "sorted, one layer twice": _EXAMPLE,
    "view of a weight": _EXAMPLE,
    "scripted in part": _EXAMPLE,
    "memory shared by two parameters": _ALL,
    "memory shared in part": _ALL,
    "expanded parameter": _ALL,
    "keeps a state": _ALL,
    "complex parameter": _ALL,
    "a layer of the first example": _EXAMPLE,
    "autocast inside": _EXAMPLE,
    "a cache that outlives the call": _EXAMPLE,
    "lengths by the place in the batch": _EXAMPLE,
    "rolled by a hook": _EXAMPLE,
    "kept by its input": _EXAMPLE,
    "answers in memory of its own, view of a weight": _EXAMPLE,
    "values sorted over the batch": _EXAMPLE,
    "largest of the batch": _EXAMPLE,
    "whitened by the batch": _EXAMPLE,
    "sinkhorn": _EXAMPLE,
    "until all have converged": _EXAMPLE,
    "attention over the batch by mistake": _EXAMPLE,
    "convolution along the batch": _EXAMPLE,
    "reversed, one layer twice": _EXAMPLE,
    "reversed but for the ends, one layer twice": _EXAMPLE,
    "out of sight of torch functions": _EXAMPLE,
    "trains itself in the call": _EXAMPLE,
    "merged for a place in memory": _EXAMPLE,
    "a layer that is seldom left out": _EXAMPLE,
    "a layer that is seldom left out, by Python": _EXAMPLE,
    "a generator of its own": _ALL,
    "every other call": _ALL,
    "a new parameter in every call": _ALL,
}
