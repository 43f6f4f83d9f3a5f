"""Batch norm at weights that training never visited."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

import wideflat


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.BatchNorm1d(4))


def statistics(model):
    return [b.clone() for b in model.buffers()]


def test_equals_update_bn_where_there_is_no_dropout():
    batches = [torch.randn(8, 3) for _ in range(4)]
    ours, theirs = net(), net()
    for model in (ours, theirs):
        model[0].p = model[3].p = 0.0
    wideflat.refresh_batch_norm(ours, batches)
    update_bn(batches, theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), theirs.buffers(), strict=True))


def test_dropout_is_off_and_all_modes_and_momenta_come_back():
    model = net()
    model.eval()
    model[0].train()
    model[4].momentum = 0.3
    modes = [m.training for m in model.modules()]
    batches = [torch.randn(8, 3) for _ in range(2)]
    wideflat.refresh_batch_norm(model, batches)
    first = statistics(model)
    wideflat.refresh_batch_norm(model, batches)
    assert all(torch.equal(a, b) for a, b in zip(first, statistics(model), strict=True))
    assert [m.training for m in model.modules()] == modes
    assert (model[2].momentum, model[4].momentum) == (0.1, 0.3)
    expected = torch.stack([model[1](b).mean(0) for b in batches]).mean(0).detach()
    torch.testing.assert_close(model[2].running_mean, expected)


def test_any_kind_of_batch():
    class Keywords(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3, affine=False)

        def forward(self, inputs, scale=1.0):
            return self.norm(inputs * scale)

    x = torch.randn(8, 3)
    for batch in (x, [x, "label"], (x, 1, 2), {"inputs": x, "scale": 1.0}, ({"inputs": x}, "label")):
        model = Keywords()
        wideflat.refresh_batch_norm(model, [batch])
        torch.testing.assert_close(model.norm.running_mean, x.mean(0))
    model = Keywords()
    wideflat.refresh_batch_norm(model, ["8 rows"] * 3, forward=lambda m, batch: m(x, scale=2.0), num_batches=1)
    torch.testing.assert_close(model.norm.running_mean, 2 * x.mean(0))
    assert model.norm.num_batches_tracked == 1
    with pytest.raises(TypeError, match="pass forward="):
        wideflat.refresh_batch_norm(model, ["8 rows"])


def test_failures_leave_the_old_statistics():
    model = net()
    model(torch.randn(8, 3))
    before, modes = statistics(model), [m.training for m in model.modules()]

    def broken():
        yield torch.randn(8, 3)
        raise KeyboardInterrupt

    for loader, error in ((broken(), KeyboardInterrupt), ([], ValueError)):
        with pytest.raises(error):
            wideflat.refresh_batch_norm(model, loader)
        assert all(torch.equal(a, b) for a, b in zip(before, statistics(model), strict=True))
        assert [m.training for m in model.modules()] == modes
        assert model[2].momentum == 0.1


def test_without_batch_norm_the_loader_is_not_touched():
    def loader():
        raise AssertionError
        yield

    wideflat.refresh_batch_norm(nn.Linear(2, 2), loader())
    wideflat.refresh_batch_norm(nn.BatchNorm1d(2, track_running_stats=False), loader())


def test_an_empty_batch_is_named():
    with pytest.raises(ValueError, match="a batch is empty"):
        wideflat.refresh_batch_norm(nn.BatchNorm1d(2), [[]])
