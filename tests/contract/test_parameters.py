"""Parameters of every kind: empty, late, frozen, sparse, complex, of several types and devices in one group."""

import pytest
import torch
from optimizers import CENTERED, OPTIMIZERS, copied, every, gradients_at, step, uncoupled, weights, without_noise
from torch import nn

import wideflat

pytestmark = pytest.mark.filterwarnings("ignore:.*SAM perturbs 16-bit weights")


@every
def test_parameters_without_elements_and_without_dimensions(name):
    params, twin = weights([(0,), (3, 0), (), 4]), weights([(), 4])
    opt, other = without_noise(OPTIMIZERS[name](params)), without_noise(OPTIMIZERS[name](twin))

    def gradients(params, t):
        some = [p for p in params if p.numel()]
        gradients_at(some, t)
        for p in params:
            p.grad = torch.zeros_like(p) if not p.numel() else p.grad

    for t in range(9):
        step(opt, params, t, gradients)
        step(other, twin, t)
    torch.testing.assert_close([p for p in params if p.numel()], twin)
    only = weights([(0, 2)])
    opt = OPTIMIZERS[name](only)
    for t in range(7):
        step(opt, only, t)


@every
def test_a_parameter_that_gets_its_first_gradient_late(name):
    """Until then it stays; nothing that others do depends on it."""
    params, alone = weights([5, 6]), weights([5, 6])[:1]
    opt, other = (uncoupled(without_noise(OPTIMIZERS[name](each))) for each in (params, alone))
    late = params[1].detach().clone()

    def first(params, t):
        gradients_at(params[:1], t)

    for t in range(9):
        step(opt, params, t, first if t < 4 else gradients_at)
        step(other, alone, t)
        if t < 4:
            assert torch.equal(params[1], late)
    assert not torch.equal(params[1], late)
    torch.testing.assert_close(params[0], alone[0])


@every
def test_a_step_without_any_gradient_moves_nothing(name):
    params = weights([5, 6])
    opt = OPTIMIZERS[name](params)
    for t in range(7):
        step(opt, params, t, lambda params, t: None)
    assert all(torch.equal(p, q) for p, q in zip(params, weights([5, 6]), strict=True))


@every
def test_frozen_parameters_may_be_given_and_thawed(name):
    params = weights([5, 6])
    params[1].requires_grad_(False)
    opt = OPTIMIZERS[name](params)
    for t in range(4):
        step(opt, params, t, lambda params, t: gradients_at(params[:1], t))
    assert torch.equal(params[1], weights([5, 6])[1])
    params[1].requires_grad_(True)
    for t in range(4, 11):
        step(opt, params, t)
    assert not torch.equal(params[1], weights([5, 6])[1])


@every
def test_several_types_in_one_group(name):
    kinds = [torch.float32, torch.float64, torch.bfloat16]
    mixed = [nn.Parameter(p.detach().to(kind)) for p, kind in zip(weights([5, 6, 7]), kinds, strict=True)]
    whole = [nn.Parameter(p.detach().double()) for p in mixed]
    if "Rprop" in name:
        pytest.skip("its steps are signs of gradients, which rounding may turn round")
    opt, other = (uncoupled(without_noise(OPTIMIZERS[name](each))) for each in (mixed, whole))
    for t in range(9):
        step(opt, mixed, t)
        step(other, whole, t)
    for p, q, kind in zip(mixed, whole, kinds, strict=True):
        assert p.dtype == kind
        torch.testing.assert_close(p.double(), q, rtol=0, atol=0.03 if kind is torch.bfloat16 else 1e-4)


@every
@pytest.mark.parametrize("when", [0, 3, 4])
def test_a_model_may_be_cast_after_the_optimizer_was_made(name, when):
    if "Adam" in name.partition(", Adam outside")[0]:
        pytest.skip("torch's Adam keeps moments of the type that its parameters had, and refuses others")
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    params = list(net.parameters())
    opt = OPTIMIZERS[name](params)
    for t in range(when):
        step(opt, params, t)
    for kind in (torch.float64, torch.bfloat16):
        net.to(kind)
        before = [p.detach().clone() for p in params]
        for t in range(4):
            step(opt, params, t)
        assert all(p.dtype == kind and p.isfinite().all() for p in params)
        assert not any(torch.equal(p, q) for p, q in zip(params, before, strict=True))


@every
def test_several_devices_in_one_group(name):
    """``meta`` has no numbers; the weights beside it must be as they are without it."""
    here, alone = weights([5]), weights([5])
    there = nn.Parameter(torch.empty(6, device="meta"))
    if "capturable" in name:
        with pytest.raises(ValueError, match="on several devices"):
            OPTIMIZERS[name]([*here, there])
        return
    opt, other = without_noise(OPTIMIZERS[name]([*here, there])), without_noise(OPTIMIZERS[name](alone))

    def gradients(params, t):
        gradients_at(params[:1], t)
        there.grad = torch.empty_like(there)

    if isinstance(opt, wideflat.SAM) or name.startswith("Entropic(AdamW"):
        pytest.skip("one norm of all, and counters on the host: meta has no numbers for them")
    for t in range(2):  # within a cycle
        step(opt, [*here, there], t, gradients)
        step(other, alone, t)
    torch.testing.assert_close(here, alone)


@every
def test_sparse_gradients_are_refused_in_a_sentence_or_taken(name):
    embedding = nn.Embedding(5, 3, sparse=True)
    opt = OPTIMIZERS[name](list(embedding.parameters()))

    def closure():
        opt.zero_grad()
        loss = embedding(torch.tensor([1, 2])).sum()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        opt.step(closure)


@every
def test_complex_parameters_are_refused_in_a_sentence_or_are_two_real_ones(name):
    (pairs,) = weights([(3, 2)])
    p = nn.Parameter(torch.view_as_complex(pairs.detach().clone()))
    if name in CENTERED:
        with pytest.raises(ValueError, match="complex parameters"):
            OPTIMIZERS[name]([p])
        return
    opt, other = OPTIMIZERS[name]([p]), OPTIMIZERS[name]([pairs])

    def gradients(params, t):
        fixed = weights([(3, 2)])
        gradients_at(fixed, t)
        gradient = fixed[0].grad
        params[0].grad = torch.view_as_complex(gradient) if params[0].is_complex() else gradient

    for t in range(5):
        try:
            step(opt, [p], t, gradients)
        except (RuntimeError, ValueError) as error:
            assert "complex" in str(error)
            return
        step(other, [pairs], t, gradients)
    torch.testing.assert_close(torch.view_as_real(p), pairs, rtol=1e-4, atol=1e-5)


@every
def test_gradients_are_not_written_to(name):
    params = weights([5, (2, 3)])
    opt = OPTIMIZERS[name](params)
    for t in range(7):
        kept = []

        def gradients(params, t, kept=kept):
            gradients_at(params, t)
            kept += [(p.grad, p.grad.clone()) for p in params]

        step(opt, params, t, gradients)
        assert all(torch.equal(now, before) for now, before in kept)


@pytest.mark.parametrize("name", CENTERED)
def test_an_emptied_state_starts_afresh(name):
    params = weights([5])
    opt = OPTIMIZERS[name](params)
    for t in range(3):
        step(opt, params, t)
    again = copied(params)
    opt.state.clear()
    for t in range(3, 6):
        step(opt, params, t)
    assert not torch.equal(params[0], again[0])
    assert opt.at_center
