"""Steps that are traced once: equal to the others, one graph for all phases of a cycle; what cannot be captured."""

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn

import wideflat

SHAPES = ((7, 5), (3,), (), (4, 2, 3, 3), (64, 65))
SGD = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
CYCLE = {"lr": 0.7, "inner_lr": 0.02, "inner_steps": 4}


def entropic(params, base=torch.optim.AdamW, settings=None, capturable=False, **changes):
    inner = base(params, lr=0.02, **(settings or {}))
    cycle = {"inner_steps": 4, "pull": 1.0, "alpha": 0.5, "epsilon": 0.1} | changes
    return wideflat.Entropic(inner, capturable=capturable, **cycle)


def around_two(params, base=torch.optim.SGD, settings=SGD, capturable=False, **changes):
    """The first of them has two groups, so that those of the second are at other places in its own list."""
    groups = [{"params": params[:1]}, {"params": params[4:], "lr": 0.01}]
    inner = base(groups, lr=0.02, **settings), torch.optim.AdamW(params[1:4], lr=0.02)
    cycle = {"inner_steps": 4, "pull": 1.0, "alpha": 0.5, "epsilon": 0.1} | changes
    return wideflat.Entropic(*inner, capturable=capturable, **cycle)


OPTIMIZERS = {
    "EntropySGD": partial(wideflat.EntropySGD, epsilon=0.1, **CYCLE, **SGD),
    "EntropySGD, no momentum, no mean": partial(wideflat.EntropySGD, alpha=0.0, momentum=0.0, **CYCLE),
    "EntropySGD, upwards": partial(wideflat.EntropySGD, maximize=True, epsilon=0.1, **CYCLE),
    "EntropySGD, velocity kept": partial(wideflat.EntropySGD, inner_state="keep", **CYCLE, **SGD),
    "EntropySGD(inner=RMSprop)": partial(wideflat.EntropySGD, inner=torch.optim.RMSprop, epsilon=0.1, **CYCLE),
    "Lookahead": partial(wideflat.Lookahead, **CYCLE, **SGD),
    "Entropic(SGD)": partial(entropic, base=torch.optim.SGD, settings=SGD),
    "Entropic(AdamW)": entropic,
    "Entropic, no pull, no noise": partial(entropic, pull=0.0, alpha=0.0, epsilon=0.0, outer_momentum=0.0),
    "Entropic(SGD, AdamW)": around_two,
    "SNOO": lambda params, **changes: wideflat.SNOO(torch.optim.AdamW(params, lr=0.02), inner_steps=4, **changes),
}
every = pytest.mark.parametrize("name", OPTIMIZERS)

#: What torch says of itself when it traces.
pytestmark = pytest.mark.filterwarnings("ignore:Profiler record function", "ignore:.torch.jit.:DeprecationWarning")


def parameters(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    for k, p in enumerate(params):
        if p.dim() == 4:
            params[k] = nn.Parameter(p.detach().to(memory_format=torch.channels_last))
    return params


def set_gradients(params, t, absent=()):
    for i, p in enumerate(params):
        target = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * t + i), dtype=torch.float64)
        p.grad = None if i in absent else (p.detach().double() - target).to(p.dtype)


def run(params, step, steps=22, absent=lambda t: (), after=lambda: None, first=0):
    for t in range(first, first + steps):
        set_gradients(params, t, absent(t))
        step()
        after()


class Graphs:
    """A backend that counts, and runs what it is given as it is."""

    def __init__(self):
        self.count = 0

    def __call__(self, module, inputs):
        self.count += 1
        return module.forward


#: Whose dynamo the graphs were tried with; that of 2.6 refuses them, and compiles the step in pieces.
NEWEST = (2, 13)


def compiled(opt, backend):
    if tuple(map(int, torch.__version__.split(".")[:2])) < NEWEST:
        pytest.skip("a step as one graph was tried with torch 2.13")
    torch._dynamo.reset()
    return torch.compile(opt.step, fullgraph=True, backend=backend)


def assert_close(params, others, opt, other, tolerance=1e-5):
    for ours, theirs in zip(params, others, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    with opt.center(), other.center():
        for ours, theirs in zip(params, others, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@every
def test_a_captured_step_is_the_ordinary_one(name):
    """Over five cycles and a half, with noise, mean, momentum and decay, and parameters without gradients at times."""

    def absent(t):
        return {3: (1,), 5: (0, 2), 9: (4,), 10: (4,), 11: (4,), 12: (4,)}.get(t, (2,) if t < 2 else ())

    params, others = parameters(torch.float64), parameters(torch.float64)
    opt, other = OPTIMIZERS[name](params), OPTIMIZERS[name](others, capturable=True)
    run(params, opt.step, absent=absent)
    run(others, other.step, absent=absent)
    assert_close(params, others, opt, other, 1e-10)


#: Traced in every run of the tests; the others in slow ones.
TRACED = ("EntropySGD", "Lookahead", "Entropic(SGD)", "Entropic(AdamW)", "Entropic(SGD, AdamW)")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in TRACED else pytest.mark.slow) for n in OPTIMIZERS])
def test_a_compiled_step_is_one_graph_and_the_ordinary_one(name):
    params, others = parameters(), parameters()
    opt, other, graphs = OPTIMIZERS[name](params), OPTIMIZERS[name](others), Graphs()
    run(params, opt.step)
    run(others, compiled(other, graphs))
    assert graphs.count == 1
    assert_close(params, others, opt, other)


@pytest.mark.slow
def test_a_gradient_that_comes_or_goes_is_another_graph_and_right():
    def absent(t):
        return (1,) if t in (5, 6, 7, 8, 9) else ()

    params, others = parameters(torch.float64), parameters(torch.float64)
    opt, other, graphs = OPTIMIZERS["EntropySGD"](params), OPTIMIZERS["EntropySGD"](others), Graphs()
    run(params, opt.step, absent=absent)
    run(others, compiled(other, graphs), absent=absent)
    assert graphs.count == 2
    assert_close(params, others, opt, other, 1e-10)


def test_rates_in_tensors_are_scheduled_without_another_graph():
    """The outer rate by a scheduler of torch, gamma by Focusing."""

    def trained(capturable, step_of):
        params = parameters(torch.float64)
        lr, gamma = (torch.tensor(0.7), torch.tensor(0.5)) if capturable else (0.7, 0.5)
        opt = wideflat.EntropySGD(params, inner_lr=0.02, inner_steps=4, gamma=gamma, **SGD, lr=lr)
        step = step_of(opt)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        focusing = wideflat.Focusing(opt, factor=10.0, total=22)

        def after():
            scheduler.step()
            focusing.step()

        opt._opt_called = True  # the step was taken from before the scheduler
        run(params, step, after=after)
        return params, opt

    graphs = Graphs()
    params, opt = trained(False, lambda opt: opt.step)
    others, other = trained(True, lambda opt: compiled(opt, graphs))
    assert graphs.count == 1 and isinstance(other.param_groups[0]["gamma"], torch.Tensor)
    assert_close(params, others, opt, other, 1e-5)


@pytest.mark.slow
def test_the_pull_of_entropic_in_a_tensor_is_focused_without_another_graph():
    params, others, graphs = parameters(torch.float64), parameters(torch.float64), Graphs()
    opt, other = entropic(params), entropic(others, pull=torch.tensor(1.0))
    step = compiled(other, graphs)
    for each, its, step_of in ((opt, params, opt.step), (other, others, step)):
        focusing = wideflat.Focusing(each, factor=3.0, total=22)
        run(its, step_of, after=focusing.step)
    assert graphs.count == 1
    assert_close(params, others, opt, other, 1e-5)


@pytest.mark.parametrize("rounding", ["kept", "stochastic", "nearest"])
@pytest.mark.parametrize("how", ["captured", pytest.param("compiled", marks=pytest.mark.slow)])
def test_parameters_of_16_bits(rounding, how):
    params, others = parameters(torch.bfloat16), parameters(torch.bfloat16)
    make = partial(wideflat.EntropySGD, rounding=rounding, epsilon=0.01, **CYCLE, **SGD)
    opt, other = make(params), make(others, capturable=how == "captured")
    for its, step in ((params, opt.step), (others, other.step if how == "captured" else compiled(other, "eager"))):
        for t in range(22):  # gradients that do not depend on how w' is rounded
            for i, p in enumerate(its):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * t + i)).to(p.dtype)
            step()
    ours, theirs = ([opt.state[p]["center"] for p in its] for opt, its in ((opt, params), (other, others)))
    apart = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    lost = 22 * 2**-8 * max(float(w.abs().max()) for w in ours)  # what 22 roundings may lose: another half in each
    assert apart < (1e-5 if rounding == "kept" else lost)
    assert ours[0].dtype == torch.float32


@pytest.mark.parametrize("name", ["EntropySGD", "Entropic(AdamW)"])
@pytest.mark.parametrize("into", [False, True])
def test_a_state_of_mid_cycle_goes_on_either_way(name, into):
    """Saved by a captured one or an ordinary one, loaded into the other."""
    params, others, thirds = (parameters(torch.float64) for _ in range(3))
    whole, first = OPTIMIZERS[name](params), OPTIMIZERS[name](others, capturable=not into)
    run(params, whole.step, steps=14)
    run(others, first.step, steps=6)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = OPTIMIZERS[name](thirds, capturable=into)
    second.load_state_dict(torch.load(file, weights_only=True))
    for p, other in zip(thirds, others, strict=True):
        p.data.copy_(other.data)
    run(thirds, second.step, steps=8, first=6)
    assert_close(params, thirds, whole, second, 1e-10)


def test_what_is_done_between_captured_steps():
    """Center, eval, flush, recenter, distance and copies see the counters that are tensors."""
    params, others = parameters(torch.float64), parameters(torch.float64)
    opt, other = OPTIMIZERS["EntropySGD"](params), OPTIMIZERS["EntropySGD"](others, capturable=True)
    run(params, opt.step, steps=6)
    run(others, other.step, steps=6)
    assert not other.at_center and other.distance() == pytest.approx(float(opt.distance()))
    clone = copy.deepcopy(other)
    assert int(clone.param_groups[0]["position"]) == 2
    for each in (opt, other):
        each.eval()
        each.train()
        each.flush()
    assert other.at_center
    run(params, opt.step, steps=3, first=6)
    run(others, other.step, steps=3, first=6)
    assert_close(params, others, opt, other, 1e-10)
    other.recenter()
    assert other.at_center and isinstance(other.param_groups[0]["position"], torch.Tensor)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: wideflat.EntropySGD(p, state_device="cpu", capturable=True), "state_device"),
        (lambda p: entropic(p, outer=partial(torch.optim.Adam, lr=0.1), capturable=True), "outer optimizer"),
        (lambda p: entropic(p, inner_state="restart", capturable=True), "inner_state"),
    ],
)
def test_what_cannot_be_captured_is_refused(make, why):
    with pytest.raises(ValueError, match=f"cannot be captured, because .*{why}"):
        make(parameters())


@pytest.mark.slow
def test_what_cannot_be_captured_is_compiled_in_pieces():
    params, others = parameters(), parameters()
    make = partial(entropic, outer=partial(torch.optim.Adam, lr=0.1), epsilon=0.0)
    opt, other = make(params), make(others)
    torch._dynamo.reset()
    run(params, opt.step, steps=6)
    run(others, torch.compile(other.step, backend="eager"), steps=6)
    assert_close(params, others, opt, other)


@pytest.mark.slow
def test_muon_and_adamw_are_one_graph():
    """Its products of matrices are traced, too."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has no Muon")
    make = partial(around_two, base=torch.optim.Muon, settings={}, epsilon=0.0)
    params, others = parameters(), parameters()
    opt, other = make(params), make(others)
    graphs = Graphs()
    run(params, opt.step, steps=10)
    run(others, compiled(other, graphs), steps=10)
    assert graphs.count == 1
    assert_close(params, others, opt, other)


@pytest.mark.slow
@every
def test_inductor_on_the_cpu(name):
    params, others = parameters(), parameters()
    opt, other = OPTIMIZERS[name](params), OPTIMIZERS[name](others)
    run(params, opt.step)
    run(others, compiled(other, "inductor"))
    assert_close(params, others, opt, other, 2e-5)
