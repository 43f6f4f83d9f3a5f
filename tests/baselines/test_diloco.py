"""DiLoCo and its entropic form against their twin; what it is with one step, and what it refuses."""

import pytest
import torch
from family_twins import OUTER, AdamW, Nesterov, adamw, diloco, made, replicas_from_one, step_all, vector
from small_regression import loss_of, make_model, same

import wideflat


@pytest.mark.parametrize("settings", [{}, {"pull": 0.7}, {"pull": 0.7, "alpha": 0.4}], ids=["", "pull", "mean"])
def test_diloco_and_entropic_diloco(settings):
    replicas = replicas_from_one(3)
    inners = [AdamW(0.01) for _ in replicas]
    twin = diloco(made(), vector(replicas[0]), 11, inners, Nesterov(0.6, 0.8), 3, **settings)
    opt = wideflat.DiLoCo(adamw(replicas.parameters()), replicas=replicas, inner_steps=3, **OUTER, **settings)
    for t, held in enumerate(twin):
        step_all(opt, replicas, t)
        for model, w in zip(replicas, held, strict=True):
            torch.testing.assert_close(vector(model), w)
    assert not opt.at_center
    with opt.center():
        same(replicas[0], replicas[2], rtol=0, atol=0)
    opt.flush()
    same(replicas[0], replicas[1], rtol=0, atol=0)


def test_diloco_after_every_step_of_sgd_is_data_parallel_sgd():
    replicas, model = replicas_from_one(2), made()
    sgd = torch.optim.SGD(replicas.parameters(), lr=0.05)
    opt = wideflat.DiLoCo(sgd, replicas=replicas, inner_steps=1, outer_lr=1.0, outer_momentum=0.0)
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    for t in range(6):
        step_all(opt, replicas, t)
        plain.zero_grad()
        ((loss_of(model, 2 * t) + loss_of(model, 2 * t + 1)) / 2).backward()
        plain.step()
    same(replicas[0], model)
    same(replicas[1], model)


def test_what_cannot_be_meant_is_refused():
    torch.manual_seed(0)
    apart = wideflat.Replicas(make_model, 2)
    with pytest.raises(ValueError, match="start from one w"):
        wideflat.DiLoCo(adamw(apart.parameters()), replicas=apart)
    together = replicas_from_one(2)
    with pytest.raises(ValueError, match="4 parameters and the replicas have 8"):
        wideflat.DiLoCo(adamw(together[0].parameters()), replicas=together)
