"""Sharded parameters train as whole ones do, noise included, however they are cut; files fit any number of ranks."""

import dataclasses
import math
from functools import cache, partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import wideflat
from wideflat.algorithms import ema
from wideflat.baselines import TensorFlowRMSprop
from wideflat.kernels.shards import is_sharded
from wideflat.presets import preset

STEPS = 50
SGD = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
CYCLE = {"inner_steps": 3, "lr": 0.7, "inner_lr": 0.02}
#: Nothing divides evenly by 2 or 3, one has fewer rows than there are ranks, one is larger than noise drawn at a time.
SHAPES = [(7, 5), (7,), (5, 3, 2), (1, 4), (), (0, 3), (211, 311)]


def entropic(params, inner=torch.optim.SGD, **changes):
    settings = {"inner_steps": 3, "pull": 0.5, "alpha": 0.3, "epsilon": 0.01} | changes
    return wideflat.Entropic(inner(params, lr=0.02), **settings)


AVERAGED = dataclasses.replace(
    preset("cifar10-smallconvnet", "ema"), alpha=0.9, lr=0.002, optimizer="rmsprop", nesterov=False
)

OPTIMIZERS = {
    "EntropySGD": lambda params: wideflat.EntropySGD(params, epsilon=0.01, **CYCLE, **SGD),
    "EntropySGD, no kernel": lambda params: wideflat.EntropySGD(params, epsilon=0.01, fused=False, **CYCLE, **SGD),
    "EntropySGD(inner=Adam)": lambda params: wideflat.EntropySGD(
        params, gamma=0.0, epsilon=0.01, inner=torch.optim.Adam, **CYCLE
    ),
    "Lookahead": lambda params: wideflat.Lookahead(params, **CYCLE, **SGD),
    "Entropic": entropic,
    "Entropic(AdamW), no mean, Adam outside": partial(
        entropic, inner=torch.optim.AdamW, alpha=0.0, outer=partial(torch.optim.Adam, lr=0.01)
    ),
    "EMA": lambda params: ema.make_optimizer(AVERAGED, params, 0),
    "TensorFlowRMSprop": lambda params: TensorFlowRMSprop(params, lr=0.002, momentum=0.9, weight_decay=0.01),
    "SAM": lambda params: wideflat.SAM(params, rho=0.5, lr=0.02, **SGD),
    "ASAM": lambda params: wideflat.ASAM(params, rho=0.5, lr=0.02, **SGD),
    "GSAM": lambda params: wideflat.GSAM(params, rho=0.5, lr=0.02, **SGD),
    "FriendlySAM": lambda params: wideflat.FriendlySAM(params, rho=0.5, lr=0.02, **SGD),
    "LookSAM": lambda params: wideflat.LookSAM(params, rho=5.0, alpha=0.2, period=3, lr=0.02, **SGD),
}


def values(name):
    """In float32; but LookSAM divides by a difference of gradients, so that rounding grows from step to step."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float64 if name == "LookSAM" else torch.float32
    return [(0.5 + 0.1 * torch.randn(shape, generator=generator)).to(dtype) for shape in SHAPES]


@cache
def target(shape, number):
    """Where the loss of a step is smallest; the curvature of all of them is number -1."""
    if number < 0:
        return torch.linspace(0.5, 1.5, math.prod(shape)).view(shape)
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
        like = partial(cut_target, mesh=p.device_mesh, placements=p.placements) if is_sharded(p) else target
        p.grad = like(tuple(p.shape), -1) * (p.detach() - like(tuple(p.shape), 10 * t + index))


def take_steps(opt, params, first, last):
    for t in range(first, last):

        def closure(t=t):
            opt.zero_grad()
            set_gradients(params, t)
            return torch.zeros(())

        opt.step(closure)


def train(name, params, steps=STEPS):
    """The weights at the end, what is averaged of them, and how far the optimizer says that it is from its center."""
    opt = OPTIMIZERS[name](params)
    take_steps(opt, params, 0, steps)
    distance = opt.distance().item() if hasattr(opt, "distance") else 0.0
    means = [whole(opt.state[p]["mean"]) for p in params if "mean" in opt.state[p]]
    return [whole(p) for p in params] + means, distance


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


def train_cut(forms, names, shape, steps=STEPS):
    mesh = init_device_mesh("cpu", shape)
    return {
        (form, name): train(name, [cut(form, mesh, i, value) for i, value in enumerate(values(name))], steps)
        for form in forms
        for name in names
    }


def check(results, names, steps=STEPS):
    expected = {name: train(name, [nn.Parameter(value) for value in values(name)], steps) for name in names}
    for result in results:
        for (form, name), (found, distance) in result.items():
            weights, distance_then = expected[name]
            for mine, theirs in zip(found, weights, strict=True):
                np.testing.assert_allclose(mine, theirs, atol=1e-6, rtol=0, err_msg=f"{form}, {name}, {theirs.shape}")
            assert distance == pytest.approx(distance_then, rel=1e-5)


@pytest.mark.parametrize(("world", "forms"), [(2, ["rows", "not all sharded"]), (3, ["all kinds"])])
def test_fifty_steps_on_shards_are_those_on_the_whole(ranks, world, forms):
    check(ranks(train_cut, world, forms, list(OPTIMIZERS), (world,), timeout=240), list(OPTIMIZERS))


def test_two_dimensions_of_a_mesh(ranks):
    forms, names = ["hybrid", "rows and columns", "rows twice"], ["EntropySGD", "Entropic"]
    check(ranks(train_cut, 4, forms, names, (2, 2), 10, timeout=240), names, 10)


# --------------------------------------------------------------------------------------------- networks and checkpoints


def make_network(shard=True):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3), nn.Linear(3, 1))
    if shard:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def train_network(model, opt, first, last):
    for t in range(first, last):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(t))

        def closure(x=x):
            opt.zero_grad()
            loss = F.mse_loss(model(x), x[:, :1].sin())
            loss.backward()
            return loss

        opt.step(closure)


def weights_of(model):
    return [whole(p) for p in model.parameters()]


def save(folder, names):
    """In mid-cycle, nested and flattened."""
    found = {}
    for name in names:
        model = make_network()
        opt = OPTIMIZERS[name](list(model.parameters()))
        train_network(model, opt, 0, 5)
        for flatten in (False, True):
            weights, state = get_state_dict(model, opt, options=StateDictOptions(flatten_optimizer_state_dict=flatten))
            dcp.save({"model": weights, "opt": state}, checkpoint_id=f"{folder}/{name}{flatten}")
        train_network(model, opt, 5, 12)
        found[name] = weights_of(model)
    return found


def load(folder, names):
    found = {}
    for name in names:
        for flatten in (False, True):
            options = StateDictOptions(flatten_optimizer_state_dict=flatten)
            model = make_network()
            opt = OPTIMIZERS[name](list(model.parameters()))
            weights, state = get_state_dict(model, opt, options=options)
            content = {"model": weights, "opt": state}
            dcp.load(content, checkpoint_id=f"{folder}/{name}{flatten}")
            set_state_dict(
                model, opt, model_state_dict=content["model"], optim_state_dict=content["opt"], options=options
            )
            train_network(model, opt, 5, 12)
            found[name, flatten] = weights_of(model)
    return found


def test_saved_on_two_ranks_and_loaded_on_three_and_on_one(ranks, tmp_path):
    expected = {}
    for name in OPTIMIZERS:
        model = make_network(shard=False)
        train_network(model, OPTIMIZERS[name](list(model.parameters())), 0, 12)
        expected[name] = weights_of(model)
    found = ranks(save, 2, str(tmp_path), list(OPTIMIZERS), timeout=240)
    for world in (3, 1):
        found += ranks(load, world, str(tmp_path), list(OPTIMIZERS), timeout=240)
    for result in found:
        for key, weights in result.items():
            name = key if isinstance(key, str) else key[0]
            for mine, theirs in zip(weights, expected[name], strict=True):
                np.testing.assert_allclose(mine, theirs, atol=1e-6, rtol=0, err_msg=str(key))


# -------------------------------------------------------------------------------- summands, and files of whole tensors


def odd_ones():
    """Gradients that ranks hold summands of; a state of whole tensors in a sharded optimizer, and the reverse."""
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    rest = [1 / 4, 3 / 4][mesh.get_local_rank()]
    for name in ("EntropySGD", "Entropic", "SAM"):
        params = [cut("all kinds", mesh, i, value) for i, value in enumerate(values(name))]
        opt = OPTIMIZERS[name](params)
        for t in range(7):

            def closure(opt=opt, params=params, t=t):
                opt.zero_grad()
                set_gradients(params, t)
                for p in params:
                    if p.grad is not None:
                        whole_one = p.grad.full_tensor()
                        p.grad = DTensor.from_local(whole_one * rest, mesh, [Partial()], run_check=False)
                return torch.zeros(())

            opt.step(closure)
        found[name] = [whole(p) for p in params]
    files = {}
    for there in (True, False):
        made = [cut("rows", mesh, i, v) if there else nn.Parameter(v) for i, v in enumerate(values("EntropySGD"))]
        opt = OPTIMIZERS["EntropySGD"](made)
        take_steps(opt, made, 0, 5)
        files[there] = made, opt
    for there, (_, opt) in files.items():
        again = [nn.Parameter(p.detach().clone()) for p in files[not there][0]]
        other = OPTIMIZERS["EntropySGD"](again)
        other.load_state_dict(opt.state_dict())
        take_steps(other, again, 5, 12)
        found[f"sharded file: {there}"] = [whole(p) for p in again]
    return found


def test_summands_of_gradients_and_states_of_whole_tensors(ranks):
    results = ranks(odd_ones, 2, timeout=240)
    for name in results[0]:
        kind, steps = (name, 7) if name in OPTIMIZERS else ("EntropySGD", 12)
        expected, _ = train(kind, [nn.Parameter(value) for value in values(kind)], steps)
        for result in results:
            for mine, theirs in zip(result[name], expected, strict=False):
                np.testing.assert_allclose(mine, theirs, atol=1e-6, rtol=0, err_msg=f"{name}, {theirs.shape}")
