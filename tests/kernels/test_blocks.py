"""Torch's operations on blocks of memory are those on whole tensors, for every layout, type and place of the state."""

import pytest
import torch
from torch import nn

import wideflat
from wideflat.kernels import blocks
from wideflat.kernels.blocks import BlockLists

SETTINGS = {
    "plain": {},
    "no mean": {"alpha": 0.0},
    "momentum": {"momentum": 0.9},
    "Nesterov, decay": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "velocity kept": {"momentum": 0.9, "inner_state": "keep"},
    "far away": {"momentum": 0.9, "state_device": "cpu"},
    "far away, without pull and mean": {"alpha": 0.0, "gamma": 0.0, "state_device": "cpu"},
}


@pytest.fixture(autouse=True)
def no_kernel(monkeypatch):
    monkeypatch.setattr("wideflat.kernels.choice.kernel_is_there", lambda tensor: False)
    monkeypatch.setattr(blocks, "CACHE", 5000)  # so that there are several blocks


def weights():
    generator = torch.Generator().manual_seed(0)
    shapes = [(100, 130), (7,), (40, 3, 5, 5), (), (3, 4), (0,), (9000,)]
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    params[2].data = params[2].data.to(memory_format=torch.channels_last)
    params[4].data = params[4].data.t().clone().t()
    return params


def train(params, opt, steps, order=torch.contiguous_format):
    for t in range(steps):
        for k, p in enumerate(params):
            generator = torch.Generator().manual_seed(100 * t + k)
            p.grad = (p.detach() * 0.5 + torch.randn(p.shape, generator=generator)).contiguous()
        opt.step()


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_equals_torch_operations_on_whole_tensors(setting):
    common = {"lr": 0.4, "inner_lr": 0.05, "inner_steps": 3, "epsilon": 0.01} | setting
    ours, theirs = weights(), weights()
    opts = [wideflat.EntropySGD(ours, **common), wideflat.EntropySGD(theirs, fused=False, **common)]
    for params, opt in zip((ours, theirs), opts, strict=True):
        train(params, opt, 8)
    assert {type(lists) for lists in opts[0]._kernels.values()} == {BlockLists} and not opts[1]._kernels
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        for name in ("center", "mean", "momentum_buffer", "outer_momentum_buffer"):
            assert (name in opts[0].state[p]) == (name in opts[1].state[q])
            if name in opts[1].state[q]:
                torch.testing.assert_close(opts[0].state[p][name], opts[1].state[q][name], rtol=1e-5, atol=1e-6)


def test_what_lies_differently_goes_the_general_way():
    wide = torch.zeros(10, 4)
    p = nn.Parameter(wide[:, :2])
    assert not BlockLists.fits([p], [torch.zeros(10, 2)])
    assert not BlockLists.fits([torch.zeros(2, 3)], [torch.zeros(3, 2).t()])
    assert not BlockLists.fits([torch.zeros(2), torch.zeros(2).double()], [torch.zeros(2), torch.zeros(2)])
    assert BlockLists.fits([torch.zeros(2, 3)], [torch.zeros(2, 3)], None, None, None)


def test_every_element_is_in_one_block_and_small_tensors_come_together():
    params = [torch.arange(n, dtype=torch.float32) for n in (12_000, 3, 6_000, 4, 5)]
    places = [0, 12_000, 12_003, 18_003, 18_007]
    lists = BlockLists(params, [p.clone() for p in params], offsets=places)
    cuts = sorted(cut for block in lists._blocks for cut in block.cuts)
    assert [(m, sum(n for k, _, n in cuts if k == m)) for m in range(5)] == list(enumerate([12_000, 3, 6_000, 4, 5]))
    (gathered,) = [block for block in lists._blocks if block.gathered]
    assert gathered.places == [12_000, 18_003] and gathered.lengths == [3, 9]


def test_a_gradient_of_another_shape_is_refused():
    lists = BlockLists([torch.zeros(3)], [torch.zeros(3)], offsets=[0])
    with pytest.raises(RuntimeError, match="another shape"):
        lists.inner_step([torch.zeros(4)], blocks.Rule(lr=0.1), None, 0)


def test_the_center_far_away_is_touched_once_in_a_cycle(monkeypatch):
    """Without pull and mean, and unless somebody has written to the model."""
    loads = []
    load = blocks._Block.load
    monkeypatch.setattr(blocks._Block, "load", lambda block, k: loads.append(k) or load(block, k))
    params = [nn.Parameter(torch.ones(10))]
    opt = wideflat.EntropySGD(params, alpha=0.0, gamma=0.0, inner_steps=4, state_device="cpu")
    touched = []
    store = blocks._Block.store
    monkeypatch.setattr(blocks._Block, "store", lambda b, k, t: touched.append((b, k)) or store(b, k, t))
    train(params, opt, 4)
    for cycle in range(3):
        if cycle == 2:
            with torch.no_grad():
                params[0].add_(1)  # now w has to follow
        for at in range(4):
            loads.clear(), touched.clear()
            train(params, opt, 1)
            reads = 1 in loads or any(k == 1 for _, k in touched)
            assert reads == (at == 3 or (cycle == 2 and at == 0))
    assert opt.at_center and torch.equal(opt.state[params[0]]["center"], params[0])
