"""What an optimizer with a center keeps and loads: types, foreign state, and what is refused."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import wideflat
from wideflat.centered import adopt_state, step_quietly
from wideflat.checks.parameters import check_parameter


def test_a_quiet_step_is_the_step_without_the_hooks_on_all_optimizers():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    p.grad = q.grad = torch.ones(3)
    loud, quiet = torch.optim.Adam([p]), torch.optim.Adam([q])
    seen = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        loud.step()
        step_quietly(quiet)
    finally:
        handle.remove()
    assert seen == [loud]
    assert torch.equal(p, q)


def test_state_is_adopted_by_its_names():
    p = nn.Parameter(torch.ones(3))
    adam = torch.optim.Adam([p], lr=0.3)
    values = {"step": torch.tensor(5.0), "exp_avg": torch.ones(3), "exp_avg_sq": torch.full((3,), 2.0)}
    adopt_state(adam, "inner_", {p: {f"inner_{name}": value for name, value in values.items()} | {"center": p}})
    assert set(adam.state[p]) == set(values)
    assert (adam.state[p]["step"].item(), adam.param_groups[0]["lr"]) == (5.0, 0.3)
    adopt_state(adam, "inner_", {})
    assert not adam.state


def test_what_shares_memory_with_itself_is_refused():
    check_parameter(torch.zeros(3, 1).expand(3, 1))
    with pytest.raises(ValueError, match=r"shape \(3, 2\) is expanded"):
        check_parameter(torch.zeros(3, 1).expand(3, 2))


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "expected"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float64, torch.float32, torch.float64),
        (torch.float32, torch.float64, torch.float64),
    ],
)
def test_state_has_the_wider_type(dtype, state_dtype, expected):
    p = nn.Parameter(torch.ones(3, dtype=dtype))
    p.grad = torch.ones_like(p)
    opt = wideflat.EntropySGD([p], momentum=0.9, inner_steps=2, state_dtype=state_dtype)
    for _ in range(3):
        opt.step()
    state = {name: value for name, value in opt.state[p].items() if name != "rest"}  # of w', which has 16 bits
    assert len(state) == 4 and {value.dtype for value in state.values()} == {expected}
    assert ("rest" in opt.state[p]) == (dtype == torch.bfloat16 and expected == torch.float32)


def test_a_state_after_eval_that_lost_w_prime_on_its_way_is_refused():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    opt = wideflat.EntropySGD([p])
    opt.step()
    opt.eval()
    saved = copy.deepcopy(opt.state_dict())
    del saved["state"][0]["explorer"]
    with pytest.raises(ValueError, match="came here without w'"):
        opt.load_state_dict(saved)


def test_the_center_is_seen_inside_of_autocast():
    """Autocast keeps weights that it has cast until its end: those of w' were evaluated for w."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 3), torch.randn(16, 8)
    opt = wideflat.EntropySGD(model.parameters(), lr=0.5, inner_lr=0.5, inner_steps=5)
    for _ in range(3):
        opt.zero_grad()
        model(x).square().sum().backward()
        opt.step()
    with opt.center(), torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        explorer = model(x)
        with opt.center():
            assert torch.equal(model(x), expected)
        assert torch.equal(model(x), explorer) and not torch.equal(explorer, expected)
