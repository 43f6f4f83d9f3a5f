"""What fuzzers found and no other test holds, a line each: refused by a ``raise`` of ours, in its words."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import wideflat
from wideflat import data, presets
from wideflat.environment import choose_device
from wideflat.experiments import item
from wideflat.experiments.statistics import Correlation, pearson
from wideflat.experiments.sweep import sweep
from wideflat.integrations.guide import with_center
from wideflat.integrations.lightning import FocusingCallback
from wideflat.models import kaiming_normal
from wideflat.training import Training
from wideflat.training.state_files import save_state

sys.path.insert(0, str(Path(__file__).parent))
from room_doors import cell, images
from strange import Failing, OwnTensor, nested
from test_strange import is_ours


def entropy_sgd(**changed: Any) -> wideflat.EntropySGD:
    """One whose settings have been changed since."""
    opt = wideflat.EntropySGD([nn.Parameter(torch.ones(2))])
    opt.param_groups[0].update(changed)
    return opt


def stepped(inner: torch.optim.Optimizer, **changed: Any) -> None:
    """A step with a setting of the optimizer inside that has been changed since."""
    opt = wideflat.Entropic(inner)
    inner.param_groups[0].update(changed)
    for p in opt.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    opt.step()


def loaded(opt: torch.optim.Optimizer, **changed: Any) -> None:
    """A state of it, after a step and with a setting that has been changed since."""
    for p in opt.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    opt.step()
    opt.param_groups[0].update(changed)
    opt.load_state_dict(opt.state_dict())


double = torch.Tensor.double


def spoilt_at_the_end(change: Any, restored: bool) -> None:
    """A parameter that is made another one before or after restore(), in a step without second gradients."""
    p = nn.Parameter(torch.ones(2))
    opt = wideflat.LookSAM([p], lr=0.1, period=2)
    for k in range(2):
        p.grad = torch.ones(2)
        if opt.perturb():
            p.grad = torch.ones(2)
        if k == 1 and not restored:
            p.data = change(p.data)
        opt.restore()
        if k == 1 and restored:
            p.data = change(p.data)
        opt.step()


def after_a_step(opt: Any, method: str, outer_momentum: Any = None, change: Any = lambda weight: torch.ones(7)) -> None:
    """A method after a step, and after an outer momentum, or else a parameter, was replaced."""
    (p,) = opt.param_groups[0]["params"]
    p.grad = torch.ones_like(p)
    opt.step()
    if outer_momentum is None:
        p.data = change(p.data)
    opt.param_groups[0]["outer_momentum"] = outer_momentum
    getattr(opt, method)()


def foreign_state(opt: Any) -> None:
    opt.load_state_dict({**opt.state_dict(), "state": {7: {"sharpness": TWO}}})


def loaded_alpha(alpha: Any) -> None:
    opt = wideflat.Entropic(torch.optim.SGD([nn.Parameter(torch.ones(2))]))
    state = opt.state_dict()
    state["param_groups"][0]["entropic"]["alpha"] = alpha
    opt.load_state_dict(state)


def spoilt_on_the_way(before: bool, change: Any) -> None:
    """A parameter that is made another one before or after perturb()."""
    p = nn.Parameter(torch.ones(2))
    opt = wideflat.LookSAM([p], lr=0.1)
    p.sum().backward()
    if before:
        p.data = change(p.data)
    opt.perturb()
    p.data = change(p.data)
    opt.restore()


TWO = torch.ones(2)
FOUND = {
    "a network of meta in a state": (
        lambda: save_state(Path("unwritten"), nn.Linear(2, 2, device="meta").state_dict()),
        "dense tensors with content; weight",
    ),
    "names nested too deeply": (lambda: presets.nearest("a", nested()), "an entry of known must be a text"),
    "a dictionary as a data set": (lambda: data.from_datasets({"x": TWO}, {"x": TWO}), "must give \\(image, label\\)"),
    "saved gammas without end": (
        lambda: FocusingCallback(factor=10.0).load_state_dict({"gamma0": range(10**12)}),
        "gamma0 must have at most",
    ),
    "a flag of a preset that fails": (
        lambda: dataclasses.replace(presets.preset("cifar10-resnet18", "esgd"), gamma_in_lr=Failing("__bool__")),
        "gamma_in_lr must be True or False",
    ),
    "a device that is an array": (lambda: choose_device(np.array([1, "a"], dtype=object)), "device must be a device"),
    "evaluating that is a tensor": (lambda: entropy_sgd(evaluating=TWO).eval(), "evaluating must be True or False"),
    "inner_steps that are a tensor": (
        lambda: entropy_sgd(inner_steps=TWO).add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
        "inner_steps must be a whole number",
    ),
    "fields of a preset nested too deeply": (
        lambda: presets.Preset.from_dict({"schedule": {}, "paper_spread": nested()}),
        "this is not a whole preset",
    ),
    "optimizers without end": (lambda: with_center(range(10**12)), "optimizers must have at most"),
    "a weight decay of the optimizer inside that is a tensor": (
        lambda: stepped(torch.optim.SGD([nn.Parameter(torch.ones(2))]), weight_decay=TWO),
        "weight_decay must be a finite number",
    ),
    "an outer momentum that is a tensor, loaded": (
        lambda: loaded(wideflat.Lookahead([nn.Parameter(torch.ones(2))]), outer_momentum=TWO),
        "outer_momentum, unless it is None, must be a finite number",
    ),
    "a dictionary as params": (
        lambda: wideflat.ASAM([nn.Parameter(torch.ones(2))]).add_param_group({"params": {(): 1}}),
        "params must be a tensor, or a sequence",
    ),
    "a data set as params": (
        lambda: wideflat.ASAM([nn.Parameter(torch.ones(2))]).add_param_group({"params": TensorDataset(TWO)}),
        "params must be a tensor, or a sequence",
    ),
    "a saved alpha of meta": (lambda: loaded_alpha(torch.zeros((), device="meta")), "alpha must be a finite number"),
    "double() between the gradient and perturb()": (
        lambda: spoilt_on_the_way(True, torch.Tensor.double),
        "has become torch.float64 since",
    ),
    "an outer momentum that is a list, flushed": (
        lambda: after_a_step(wideflat.EntropySGD([nn.Parameter(torch.ones(2))], inner_steps=2), "flush", []),
        "outer_momentum, unless it is None, must be a finite number",
    ),
    "the distance of a parameter of another shape": (
        lambda: after_a_step(wideflat.EntropySGD([nn.Parameter(torch.ones(2))], inner_steps=2), "distance"),
        "a center must have the shape",
    ),
    "words in a correlation": (lambda: pearson(["\0"], [1.0]), "x must be an array of numbers"),
    "double() between the gradient and a step": (
        lambda: after_a_step(wideflat.EntropySGD([nn.Parameter(torch.ones(2))], fused=False), "step", change=double),
        "has become torch.float64 since",
    ),
    "a correlation of no number": (lambda: Correlation.of(0.9, 14).interval(TWO), "confidence must be a finite number"),
    "a correlation above 1": (lambda: Correlation.of(9.0, 14), "r must lie in"),
    "a lazy network in a state": (
        lambda: save_state(Path("unwritten"), nn.LazyLinear(2).state_dict()),
        "dense tensors with content; weight",
    ),
    "eval() of a parameter of another shape": (
        lambda: after_a_step(wideflat.EntropySGD([nn.Parameter(torch.ones(2))], inner_steps=2), "eval"),
        "make a new optimizer for other parameters",
    ),
    "what is remembered of a parameter that there is not": (
        lambda: foreign_state(wideflat.LookSAM([nn.Parameter(torch.ones(2))], lr=0.1)),
        "of a parameter that the optimizer does not have: 7",
    ),
    "a name of a preset that is no text": (
        lambda: dataclasses.replace(presets.preset("cifar10-resnet18", "esgd"), name=iter("a")),
        "name must be a text",
    ),
    "arguments of a network that no run can keep": (
        lambda: dataclasses.replace(presets.preset("cifar10-resnet18", "esgd"), model_arguments=(("a", iter("a")),)),
        "model_arguments must be what JSON can say",
    ),
    "a seed that is no whole number": (lambda: data.dress_coat.load(seed=1e300), "seed must be a whole number"),
    "tasks that are none": (lambda: sweep(np.array(["a"]), "unwritten"), "an entry of tasks must be a Task"),
    "a side of images below 1": (
        lambda: data.from_datasets([(torch.zeros(8, 8), 0)], [(torch.zeros(8, 8), 0)], -32),
        "size must be a whole number >= 1",
    ),
    "a lazy network to initialise": (lambda: kaiming_normal(nn.LazyLinear(2)), "a weight must be a dense tensor"),
    "a folder that cannot be": (lambda: item("fig6").open("\0", quick=True), "folder must be"),
    "a saved training that is none": (lambda: Training(cell(), images(), saved={"a": 1}), "has no learner and no"),
    "a number of thousands of digits": (
        lambda: data.Batches(images(), 4).batch(10**5000, 0),
        "epoch must be a whole number of at most 64 bits",
    ),
    "a position that is infinite": (
        lambda: entropy_sgd(position=float("inf")).step(),
        "position must be a whole number",
    ),
    "params without end": (
        lambda: wideflat.ASAM([nn.Parameter(torch.ones(2))]).add_param_group({"params": range(10**12)}),
        "params must be at most",
    ),
    "another shape between perturb() and restore(), where w was not left": (
        lambda: spoilt_at_the_end(lambda t: torch.ones(7), restored=False),
        "a gradient has another shape than its parameter",
    ),
    "another shape between restore() and step()": (
        lambda: spoilt_at_the_end(lambda t: torch.ones(7), restored=True),
        "a gradient has another shape than its parameter",
    ),
    "another type between perturb() and restore(), where w was not left": (
        lambda: spoilt_at_the_end(torch.Tensor.half, restored=False),
        "has become torch.float16 since",
    ),
    "another shape between perturb() and restore()": (
        lambda: spoilt_on_the_way(False, lambda t: torch.ones(7)),
        "has another shape than in perturb",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_it_is_refused_in_our_words(name):
    call, words = FOUND[name]
    with pytest.raises((TypeError, ValueError, RuntimeError), match=words) as found:
        call()
    assert is_ours(found.value, {})


def test_a_number_of_another_kind_is_kept_as_a_plain_one():
    epsilon = torch.tensor(0.1).as_subclass(OwnTensor)
    opt = wideflat.Entropic(torch.optim.SGD([nn.Parameter(torch.ones(2))]), epsilon=epsilon)
    assert opt.state_dict()["param_groups"][0]["entropic"]["epsilon"] == pytest.approx(0.1)
