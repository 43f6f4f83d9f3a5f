"""The general path of the entropic family: which code it runs, and cycles that are closed early or joined late."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import wideflat

#: What a step without the kernel enters beside checks, as docs/architecture.md tells: nothing for a special case alone.
GENERAL = {
    "cycles.py", "entropy_sgd.py", "kernels/foreach.py", "kernels/noise.py", "kernels/library.py",
    "kernels/numpy_noise.py", "kernels/flat_blocks.py", "centered.py", "captured.py", "kernels/parts.py",
    "kernels/shards.py", "kernels/choice.py",
}  # fmt: skip


def made(**settings):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(5))]
    return params, wideflat.EntropySGD(params, lr=0.5, inner_lr=0.1, inner_steps=3, momentum=0.9, **settings)


def step(params, opt, t):
    for p in params:
        p.grad = torch.sin(p.detach() + t)
    opt.step()


def files_of(function):
    """The modules of the package whose functions it calls."""
    package, seen = Path(wideflat.__file__).parent, set()

    def called(frame, event, _):
        file = Path(frame.f_code.co_filename)
        if event == "call" and package in file.parents:
            seen.add(file.relative_to(package).as_posix())

    sys.setprofile(called)
    try:
        function()
    finally:
        sys.setprofile(None)
    return seen


def test_without_the_kernel_a_step_enters_none_of_the_fast_paths():
    params, opt = made(fused=False, epsilon=1e-3, nesterov=True, weight_decay=0.1)
    for t in range(3):
        step(params, opt, t)
    found = files_of(lambda: [step(params, opt, t) for t in range(3, 6)])
    found = {file for file in found if not file.startswith("checks/")}
    assert {"cycles.py", "entropy_sgd.py", "kernels/foreach.py"} <= found <= GENERAL


def test_flush_closes_a_cycle_with_what_the_mean_has_gathered():
    params, opt = made(alpha=0.5, epsilon=0.0, gamma=0.0, outer_momentum=0.0)
    w = [p.detach().clone() for p in params]
    opt.flush()  # at the start of a cycle there is nothing to close
    assert all(map(torch.equal, params, w))
    for t in range(2):
        step(params, opt, t)
    mean = [opt.state[p]["mean"].clone() for p in params]
    opt.flush()
    assert opt.at_center
    for p, start, mu in zip(params, w, mean, strict=True):
        torch.testing.assert_close(p.detach(), start - 0.5 * (start - mu))


@pytest.mark.parametrize("fused", [None, False])
def test_a_parameter_that_never_has_a_gradient_stays_and_one_that_comes_late_joins_in(fused):
    params, opt = made(fused=fused, epsilon=0.0)
    idle = params[1].detach().clone()
    for t in range(3):
        step(params[:1], opt, t)
    assert torch.equal(params[1].detach(), idle)
    step(params[:1], opt, 3)
    step(params, opt, 4)  # in the middle of a cycle
    moved = params[1].detach().clone()
    step(params, opt, 5)
    assert opt.at_center and not torch.equal(moved, idle) and not torch.equal(params[1].detach(), idle)


def test_weights_that_somebody_changed_between_two_cycles_are_where_the_next_begins():
    params, opt = made(epsilon=0.0, gamma=0.0, alpha=0.0, outer_momentum=0.0)
    for t in range(3):
        step(params, opt, t)
    with torch.no_grad():
        params[0].fill_(2.0)
    step(params, opt, 3)
    assert (opt.state[params[0]]["center"] == 2).all()
