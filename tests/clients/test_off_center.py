"""Measures that are asked about w' say so, once; about w they are silent."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

import wideflat
from wideflat.hessian.curvature import curvature
from wideflat.landscape.worst_case import worst_case

DATA = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2

MEASURES = {
    "local_energy": lambda net: wideflat.local_energy(net, DATA, [0.1], max_passes=1, progress=False),
    "worst_case": lambda net: worst_case(net, DATA, [0.1], progress=False),
    "curvature": lambda net: curvature(net, DATA, top=1, probes=2, progress=False),
}


def in_mid_cycle(**settings):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    opt = wideflat.EntropySGD(net.parameters(), inner_steps=4, **settings)
    one_step(net, opt)
    return net, opt


def one_step(net, opt):
    opt.zero_grad()
    nn.functional.cross_entropy(net(DATA[0]), DATA[1]).backward()
    opt.step()


@pytest.mark.parametrize("measure", ["local_energy", "worst_case", "curvature"])
def test_the_explorer_is_warned_of_once(measure):
    net, opt = in_mid_cycle()
    with pytest.warns(UserWarning, match="holds the explorer w' of EntropySGD"):
        MEASURES[measure](net)
    MEASURES[measure](net)  # warnings are errors here
    one_step(net, opt)
    MEASURES[measure](net)


def at_block(net, opt):
    with opt.center(net):
        MEASURES["local_energy"](net)


def after_eval(net, opt):
    opt.eval()
    MEASURES["local_energy"](net)


def after_flush(net, opt):
    opt.flush()
    MEASURES["local_energy"](net)


def of_another(net, opt):
    MEASURES["local_energy"](copy.deepcopy(net))


@pytest.mark.parametrize("use", [at_block, after_eval, after_flush, of_another])
def test_the_center_and_other_networks_are_measured_in_silence(use):
    use(*in_mid_cycle())


def test_a_barycenter_of_explorers_is_warned_of_at_the_line_that_asks_for_it():
    torch.manual_seed(0)
    replicas = wideflat.Replicas(lambda: nn.Linear(3, 2), num_replicas=2)
    opt = wideflat.EntropySGD(replicas.parameters(), inner_steps=4)
    replicas.loss([DATA, DATA]).backward()
    opt.step()
    with pytest.warns(UserWarning, match="explorer w' of EntropySGD") as caught:
        replicas.barycenter()
    assert caught[0].filename == __file__
    opt.eval()
    wideflat.ReplicaCoupling(replicas, gamma=1.0).barycenter()  # warnings are errors here


def test_a_wrapped_model_is_recognised():
    net, _ = in_mid_cycle()
    with pytest.warns(UserWarning, match="explorer"):
        MEASURES["local_energy"](nn.Sequential(net))


def test_a_copied_optimizer_warns_for_its_own_model():
    net, opt = in_mid_cycle()
    net, opt = copy.deepcopy((net, opt))
    with pytest.warns(UserWarning, match="explorer"):
        MEASURES["local_energy"](net)


def test_an_optimizer_is_not_kept_alive():
    net, opt = in_mid_cycle()
    seen = weakref.ref(opt)
    del opt
    gc.collect()
    assert seen() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MEASURES["local_energy"](net)
