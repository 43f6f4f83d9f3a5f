"""What was in the way of a language model at first: twelve points, each with its test, here or where it says.

| point | test |
|---|---|
| 1 half of the inner state restarted | test_entropic: test_inside_entropy_sgd_every_state_is_whole_... |
| 2 decay groups and betas | here; test_trainer: test_decay_groups_are_kept |
| 3 schedulers reach the inner optimizer | test_entropic: test_the_param_groups_are_those_of_the_inner_... |
| 4 the pull and clipping | here |
| 5 evaluated and saved: w | test_product |
| 6 vectors of 16-bit weights are not skipped | here; contract: test_half_precision_trains_as_float32_does |
| 7 SAM in bfloat16 | test_sam_family: test_sixteen_bit_weights_are_perturbed_in_float32_if_asked_for |
| 8 logits, -100, outputs, LoRA in the measures | test_measures |
| 9 replicas share a frozen base | test_replica_networks: test_a_frozen_base_is_kept_once |
| 10 Muon and AdamW inside | test_entropic: test_muon_and_adamw_inside |
| 11 settings changed by hand survive a resume | here; test_entropic: test_a_file_in_mid_cycle_continues_bit_for_bit |
| 12 no memory for what is not used | test_entropic: test_two_copies_without_a_mean_and_nothing_within_a_step |
"""

import copy

import pytest
import torch
from tiny_networks import Examples, make
from torch import nn

import wideflat


def groups_of(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


def step(model, opt, number, clip=None):
    opt.zero_grad()
    model(**Examples("llama").batch(slice(4 * number, 4 * number + 4))).loss.backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    opt.step()


def test_decay_reaches_the_inner_optimizer_and_not_the_center():
    """Point 2: decay moves w' by lr times 0.1 a step, w by no more than that; in the other group by nothing."""
    model = make("llama")
    before = [p.detach().clone() for p in model.parameters()]
    adamw = torch.optim.AdamW(groups_of(model), lr=0.01)
    opt = wideflat.Entropic(adamw, inner_steps=2, outer_lr=1.0, outer_momentum=0.0)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        opt.step()
    for p, w in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p, w * (1 - 0.001) ** 2 if p.dim() > 1 else w, rtol=1e-5, atol=1e-8)


def test_clipping_bounds_the_gradient_and_the_pull_is_beside_it():
    """Point 4: with a gradient clipped to almost nothing a pull of 1 takes w' back to w by its share of the way."""
    model = make("llama")
    opt = wideflat.Entropic(torch.optim.SGD(model.parameters(), lr=0.1), inner_steps=10, pull=1.0)
    step(model, opt, 0)
    far = float(opt.distance())
    for number in range(1, 4):
        step(model, opt, number, clip=1e-12)
    assert float(opt.distance()) == pytest.approx(far * 0.9**6, rel=1e-4)  # half a square: twice the powers


@pytest.mark.parametrize("rounding", ["kept", "nearest"])
def test_no_vector_of_16_bit_weights_is_skipped(rounding):
    """Point 6: torch 2.13's fused SGD on the CPU leaves whole vectors of such weights where they are."""
    p = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    opt = wideflat.EntropySGD([p], inner_lr=0.5, inner_steps=4, epsilon=0.0, rounding=rounding)
    p.grad = torch.ones_like(p)
    opt.step()
    assert (p == p[0]).all() and p[0] < 1


def test_settings_of_the_inner_optimizer_that_were_changed_by_hand_survive_a_resume():
    """Point 11."""
    models = [make("llama") for _ in range(2)]
    makers = [wideflat.Entropic(torch.optim.AdamW(groups_of(m), lr=0.01), inner_steps=4) for m in models]
    step(models[0], makers[0], 0)
    makers[0].inner[0].param_groups[0].update(betas=(0.5, 0.6), weight_decay=0.3, eps=1e-4)
    step(models[0], makers[0], 1)
    for one, other in ((models[0], models[1]), (makers[0], makers[1])):
        other.load_state_dict(copy.deepcopy(one.state_dict()))
    inner = makers[1].inner[0].param_groups[0]
    assert (inner["betas"], inner["weight_decay"], inner["eps"]) == ((0.5, 0.6), 0.3, 1e-4)
    for number in range(2, 6):
        for model, opt in zip(models, makers, strict=True):
            step(model, opt, number)
    assert all(torch.equal(p, q) for p, q in zip(*(m.parameters() for m in models), strict=True))
