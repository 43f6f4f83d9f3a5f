"""Sharded parameters train as whole ones do, noise included, however they are cut; and their files fit any number of ranks."""

from functools import cache, partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import wideflat
from wideflat.algorithms import ema
from wideflat.kernels.shards import is_sharded
from wideflat.presets import PRESETS

STEPS = 50
SGD = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
CYCLE = {"inner_steps": 3, "lr": 0.7, "inner_lr": 0.02}
#: Nothing divides evenly by 2 or 3, one has fewer rows than there are ranks, one is larger than what is drawn at a time.
SHAPES = [(7, 5), (7,), (5, 3, 2), (1, 4), (), (0, 3), (11, 13), (211, 311)]


def entropic(params, inner=torch.optim.SGD, **changes):
    settings = {"inner_steps": 3, "pull": 0.5, "alpha": 0.3, "epsilon": 0.01} | changes
    return wideflat.Entropic(inner(params, lr=0.02), **settings)


OPTIMIZERS = {
    "EntropySGD": lambda params: wideflat.EntropySGD(params, epsilon=0.01, **CYCLE, **SGD),
    "EntropySGD, no kernel": lambda params: wideflat.EntropySGD(params, epsilon=0.01, fused=False, **CYCLE, **SGD),
    "EntropySGD(inner=Adam)": lambda params: wideflat.EntropySGD(params, epsilon=0.01, inner=torch.optim.Adam, **CYCLE),
    "Lookahead": lambda params: wideflat.Lookahead(params, **CYCLE, **SGD),
    "Entropic": entropic,
    "Entropic(AdamW), no mean, Adam outside": partial(
        entropic, inner=torch.optim.AdamW, alpha=0.0, outer=partial(torch.optim.Adam, lr=0.01)
    ),
    #"SAM": lambda params: wideflat.SAM(params, rho=0.5, lr=0.02, **SGD),
}


def values(shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [0.5 + 0.1 * torch.randn(shape, generator=generator) for shape in shapes]


@cache
def target(shape, number):
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


@cache
def cut_target(shape, number, mesh, placements):
    """Without communication: all ranks make the whole."""
    return distribute_tensor(target(shape, number), mesh, placements, src_data_rank=None)


def whole(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def set_gradients(params, t):
    """Those of a smooth loss. That of one parameter comes late, and stays away for once."""
    for index, p in enumerate(params):
        if index == 1 and t in (0, 4, 5):
            p.grad = None
            continue
        where = tuple(p.shape), 10 * t + index
        p.grad = p.detach() - (cut_target(*where, p.device_mesh, p.placements) if is_sharded(p) else target(*where))


def take_steps(opt, params, first, last):
    for t in range(first, last):

        def closure(t=t):
            opt.zero_grad()
            set_gradients(params, t)
            return torch.zeros(())

        opt.step(closure)


def train(name, params, steps=STEPS):
    """The weights at the end, and how far the optimizer says that it is from its center."""
    opt = OPTIMIZERS[name](params)
    take_steps(opt, params, 0, steps)
    distance = opt.distance().item() if hasattr(opt, "distance") else 0.0
    return [whole(p) for p in params], distance


FORMS = {
    "rows": [[Shard(0)]],
    "columns": [[Shard(-1)]],
    "all kinds": [[Shard(0)], [Shard(-1)], [Replicate()]],
    "not all sharded": [None, [Shard(-1)], [Shard(0)], [Replicate()]],
    "hybrid": [[Replicate(), Shard(0)]],
    "rows and columns": [[Shard(0), Shard(-1)], [Shard(-1), Shard(0)]],
    "rows twice": [[Shard(0), Shard(0)], [Shard(0), Replicate()]],
}


def cut(form, mesh, index, value):
    """A parameter, cut over the ranks as the form says; a number without dimensions is on each of them."""
    placements = FORMS[form][index % len(FORMS[form])]
    if placements is None:
        return nn.Parameter(value.clone())
    placements = placements if value.dim() else [Replicate()] * len(placements)
    return nn.Parameter(distribute_tensor(value, mesh, placements, src_data_rank=None))


def train_cut(forms, names, shape):
    mesh = init_device_mesh("cpu", shape)
    return {
        (form, name): train(name, [cut(form, mesh, i, value) for i, value in enumerate(values())])
        for form in forms
        for name in names
    }


def check(results, names):
    expected = {name: train(name, [nn.Parameter(value) for value in values()]) for name in names}
    for result in results:
        for (form, name), (found, distance) in result.items():
            weights, distance_then = expected[name]
            for shape, mine, theirs in zip(SHAPES, found, weights, strict=True):
                np.testing.assert_allclose(mine, theirs, atol=1e-6, rtol=0, err_msg=f"{form}, {name}, {shape}")
            assert distance == pytest.approx(distance_then, rel=1e-5)


@pytest.mark.parametrize(("world", "forms"), [(2, ["rows", "not all sharded"]), (3, ["all kinds"])])
def test_fifty_steps_on_shards_are_those_on_the_whole(ranks, world, forms):
    check(ranks(train_cut, world, forms, list(OPTIMIZERS), (world,)), list(OPTIMIZERS))
