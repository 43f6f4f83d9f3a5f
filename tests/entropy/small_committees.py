"""Committees that make no errors, and a sweep that is interrupted."""

import sys

import torch

from wideflat.entropy.fixed_point import sweep
from wideflat.entropy.measure import training_errors


def committee(hidden=3, num_inputs=50, patterns=30, references=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    common = torch.rand(num_inputs, generator=generator) < 0.5
    same = torch.rand(patterns, num_inputs, generator=generator) < 0.6
    other = torch.rand(patterns, num_inputs, generator=generator) < 0.5
    x = torch.where(torch.where(same, common, other), 1.0, -1.0).double()
    w = torch.randn(hidden, num_inputs, dtype=torch.float64, generator=generator)
    y = (w @ x.T).sign().sum(0).sign()
    w = w + 1e-3 * torch.randn(references, hidden, num_inputs, dtype=torch.float64, generator=generator)
    assert not training_errors(w, x, y).any()
    return w, x, y


def interrupt_after(monkeypatch, points):
    """Ctrl-C when so many points of a sweep are finished."""

    def interrupted(*arguments):
        for k, point in enumerate(sweep(*arguments)):
            if k == points:
                raise KeyboardInterrupt
            yield point

    monkeypatch.setattr(sys.modules["wideflat.entropy.measure"], "sweep", interrupted)
