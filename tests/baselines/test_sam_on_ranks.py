"""SAM on two ranks: e along the mean gradient, or along each rank's own (m-sharpness)."""

import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # a rank has no conftest

import torch
from sam_twins import FAMILY, RATE, RHO, Twin
from small_regression import loss_of, make_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(name, own):
    """Eight steps of a rank; ``own``: e along the rank's own gradient."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model())
    opt = FAMILY[name](model.parameters(), lr=RATE, model=model)
    for t in range(8):
        opt.zero_grad()
        with model.no_sync() if own else nullcontext():
            loss_of(model, 2 * t + rank).backward()
        if opt.perturb():
            loss_of(model, 2 * t + rank).backward()
        opt.restore()
        opt.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def train_all():
    results = {(name, own): train(name, own) for name, own in (("sam", True), ("sam", False), ("gsam", False))}
    try:
        train("look", True)
    except RuntimeError as error:
        results["refused"] = str(error)
    return results


class RanksTwin(Twin):
    """Both ranks in one process: ``batch`` is the pair of theirs."""

    def gradient(self, w, batch):
        return (super().gradient(w, 2 * batch) + super().gradient(w, 2 * batch + 1)) / 2

    def own_sam(self, w, batch):
        total = torch.zeros_like(w)
        for part in (2 * batch, 2 * batch + 1):
            g = Twin.gradient(self, w, part)
            total += Twin.gradient(self, w + RHO * g / g.norm(), part) / 2
        return total


def test_on_two_ranks(ranks):
    first, second = ranks(train_all, 2)
    for name, own in (("sam", True), ("sam", False), ("gsam", False)):
        assert (first[name, own] == second[name, own]).all()
        torch.manual_seed(0)
        twin = RanksTwin(make_model())
        for t in range(8):
            twin.step("own_sam" if own else name, t)
        torch.testing.assert_close(torch.as_tensor(first[name, own]), twin.w, rtol=1e-6, atol=1e-8)
    assert "they would part" in first["refused"]
