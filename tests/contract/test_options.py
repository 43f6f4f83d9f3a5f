"""The keywords that torch's optimizers share: maximize, foreach, differentiable, fused."""

import pytest
import torch
from optimizers import CENTERED, OPTIMIZERS, every, gradients_at, step, weights, without_noise

pytestmark = pytest.mark.filterwarnings("ignore:.*SAM perturbs 16-bit weights")


@every
def test_to_maximize_is_to_minimize_the_opposite(name):
    """Of a function whose gradient does not follow the weights, so that nothing runs away."""
    up, down = weights([5, (2, 3)]), weights([5, (2, 3)])
    opt, other = OPTIMIZERS[name](up, maximize=True), OPTIMIZERS[name](down)
    fixed = weights([5, (2, 3)])

    def rising(params, t):
        gradients_at(fixed, t)
        for p, q in zip(params, fixed, strict=True):
            p.grad = q.grad

    def falling(params, t):
        rising(params, t)
        for p in params:
            p.grad = -p.grad

    for t in range(9):
        step(opt, up, t, rising)
        step(other, down, t, falling)
    assert all(torch.equal(p, q) for p, q in zip(up, down, strict=True))
    assert not torch.equal(up[0], fixed[0])


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "TensorFlowRMSprop"])
def test_tensor_by_tensor_or_all_at_once(name):
    once, each = weights([5, (2, 3)]), weights([5, (2, 3)])
    opts = OPTIMIZERS[name](once, foreach=True), OPTIMIZERS[name](each, foreach=False)
    for t in range(9):
        step(opts[0], once, t)
        step(opts[1], each, t)
    torch.testing.assert_close(once, each)


@pytest.mark.parametrize("name", CENTERED)
def test_steps_are_not_differentiable_and_say_so(name):
    with pytest.raises((ValueError, RuntimeError), match="differentiable"):
        OPTIMIZERS[name](weights([3]), differentiable=True)


def test_foreach_and_fused_exclude_each_other():
    with pytest.raises(RuntimeError, match="`fused` and `foreach` cannot be `True` together"):
        OPTIMIZERS["EntropySGD"](weights([3]), fused=True, foreach=True)


@every
def test_zero_gradients_without_noise_and_decay_move_nothing(name):
    params = weights([5])
    opt = without_noise(OPTIMIZERS[name](params))
    for group in (*opt.param_groups, *(group for inner in getattr(opt, "inner", []) for group in inner.param_groups)):
        group["weight_decay"] = 0.0

    def zeros(params, t):
        for p in params:
            p.grad = torch.zeros_like(p)

    for t in range(7):
        step(opt, params, t, zeros)
    torch.testing.assert_close(params, weights([5]))
