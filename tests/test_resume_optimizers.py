"""A run interrupted anywhere, saved and continued in a new process equals the uninterrupted one bit for bit."""

import copy
import io
import multiprocessing
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import wideflat

ALGORITHMS = ["esgd", "esgd-rmsprop", "entropic", "rsgd", "rsgd-proximal", "lookahead", "easgd", "parle", "sam"]
TOTAL = 14


def make_model():
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


class Run:
    """One algorithm in training, with all that belongs to it: a scheduler of the rate, one of gamma."""

    def __init__(self, algorithm):
        torch.manual_seed(1)
        self.algorithm = algorithm
        self.t = 0
        replicated = algorithm.startswith("rsgd") or algorithm in ("easgd", "parle")
        self.model = wideflat.Replicas(make_model, 3) if replicated else make_model()
        params = self.model.parameters()
        sgd = {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}
        entropic = {"lr": 0.6, "inner_lr": 0.05, "inner_steps": 4, "epsilon": 0.05, "gamma": 0.3, "seed": 7}
        self.opt = {
            "esgd": lambda: wideflat.EntropySGD(params, **entropic, **sgd),
            "esgd-rmsprop": lambda: wideflat.EntropySGD(
                params, **entropic, inner=partial(torch.optim.RMSprop, momentum=0.9)
            ),
            "entropic": lambda: wideflat.Entropic(
                torch.optim.AdamW(params, lr=0.05), inner_steps=4, pull=0.3, alpha=0.5, epsilon=0.05, seed=7
            ),
            "parle": lambda: wideflat.EntropySGD(params, **entropic, **sgd),
            "lookahead": lambda: wideflat.Lookahead(params, inner_lr=0.05, inner_steps=4, **sgd),
            "sam": lambda: wideflat.SAM(params, rho=0.1, lr=0.05, **sgd),
        }.get(algorithm, lambda: torch.optim.SGD(params, lr=0.05, **sgd))()
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, T_max=TOTAL)
        self.coupling = {
            "rsgd": lambda: wideflat.ReplicaCoupling(self.model, period=3, gamma=0.2),
            "rsgd-proximal": lambda: wideflat.ReplicaCoupling(
                self.model, period=3, gamma=5.0, mode="proximal", optimizer=self.opt
            ),
            "easgd": lambda: wideflat.EASGD(self.model, period=3, gamma=0.2),
            "parle": lambda: wideflat.Parle(self.model, self.opt, gamma=0.5),
        }.get(algorithm, lambda: None)()
        focused = [o for o in (self.opt, self.coupling) if isinstance(o, wideflat.ReplicaCoupling)]
        if algorithm.startswith("esgd") or algorithm in ("entropic", "parle"):
            focused.append(self.opt)
        self.focusing = [wideflat.Focusing(o, factor=100.0, total=TOTAL) for o in focused]

    def loss(self):
        replicas = list(self.model) if isinstance(self.model, wideflat.Replicas) else [self.model]
        total = 0.0
        for a, model in enumerate(replicas):
            generator = torch.Generator().manual_seed(100 * self.t + a)
            x, y = torch.randn(8, 3, generator=generator), torch.randint(2, (8,), generator=generator)
            total = total + F.cross_entropy(model(x), y)
        return total

    def step(self):
        def closure():
            self.opt.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        if self.algorithm == "sam":
            self.opt.step(closure)
        else:
            closure()
            if self.coupling is not None and self.algorithm != "parle":
                self.coupling.couple()
            self.opt.step()
            if self.algorithm == "parle":
                self.coupling.couple()
        self.scheduler.step()
        for focusing in self.focusing:
            focusing.step()
        self.t += 1

    @property
    def parts(self):
        parts = {"model": self.model, "opt": self.opt, "scheduler": self.scheduler, "coupling": self.coupling}
        parts |= {f"focusing{i}": focusing for i, focusing in enumerate(self.focusing)}
        return {name: part for name, part in parts.items() if part is not None}

    def save(self):
        buffer = io.BytesIO()
        torch.save({"t": self.t} | {name: part.state_dict() for name, part in self.parts.items()}, buffer)
        return buffer.getvalue()

    def load(self, content):
        saved = torch.load(io.BytesIO(content), weights_only=True)
        self.t = saved["t"]
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])

    def result(self):
        state = {name: value.numpy().tobytes() for name, value in self.model.state_dict().items()}
        return state | {"gamma": [focusing.gamma for focusing in self.focusing]}


def uninterrupted(algorithm):
    run = Run(algorithm)
    saved = [run.save()]
    for _ in range(TOTAL):
        run.step()
        saved.append(run.save())
    return saved, run.result()


def continued(algorithm, content):
    """To be called in any process."""
    torch.set_num_threads(1)
    run = Run(algorithm)
    run.load(content)
    while run.t < TOTAL:
        run.step()
    return run.result()


@pytest.fixture(scope="module")
def runs():
    return {algorithm: uninterrupted(algorithm) for algorithm in ALGORITHMS}


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(algorithm=st.sampled_from(ALGORITHMS), stops=st.lists(st.integers(0, TOTAL), min_size=1, max_size=3).map(sorted))
def test_interrupted_anywhere_and_several_times(runs, algorithm, stops):
    _, expected = runs[algorithm]
    run = Run(algorithm)
    for stop in stops:
        while run.t < stop:
            run.step()
        content = run.save()
        run = Run(algorithm)
        run.load(content)
    assert continued(algorithm, run.save()) == expected


def test_in_a_new_process(runs):
    """A fresh interpreter, that has nothing but the file."""
    places = torch.randint(1, TOTAL, (len(ALGORITHMS),)).tolist()
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        for algorithm, stop in zip(ALGORITHMS, places, strict=True):
            saved, expected = runs[algorithm]
            result = pool.apply(continued, (algorithm, saved[stop]))
            assert result == expected, f"{algorithm} interrupted after {stop} steps"


def test_every_kind_of_state_matters(runs):
    """Losing any part of the state shows: the test above can fail."""
    saved, expected = runs["esgd"]
    run = Run("esgd")
    run.load(saved[6])
    for group in run.opt.param_groups:
        group["step"] += 1  # other noise
    assert continued("esgd", run.save()) != expected
    for name in ("center", "mean", "momentum_buffer", "outer_momentum_buffer"):
        run = Run("esgd")
        run.load(saved[6])
        for state in run.opt.state.values():
            state[name].zero_()
        assert continued("esgd", run.save()) != expected, name


@pytest.mark.parametrize("kind", ["plain", "lookahead", "rmsprop"])
def test_states_written_before_the_family_had_one_engine(kind):
    """Written by commit 85c623f in mid-cycle, with the weights and what became of them there."""
    saved = torch.load(Path(__file__).with_name("optimizers_of_85c623f.pt"), weights_only=True)[kind]
    params = [nn.Parameter(w.clone()) for w in saved["weights"]]
    opt = {
        "plain": lambda: wideflat.EntropySGD(params),
        "lookahead": lambda: wideflat.Lookahead(params),
        "rmsprop": lambda: wideflat.EntropySGD(params, inner=partial(torch.optim.RMSprop, momentum=0.9)),
    }[kind]()
    opt.load_state_dict(copy.deepcopy(saved["optimizer"]))
    for t in range(7, 7 + saved["steps"]):
        for i, p in enumerate(params):
            p.grad = p.detach() - 0.1 * (t + i)
        opt.step()
    torch.testing.assert_close([p.detach() for p in params], saved["after"])
    keys = set(opt.state_dict()["state"][0])
    # At alpha = 0 the mean is w' itself, and is not kept any more.
    assert keys == set(saved["optimizer"]["state"][0]) - ({"mean"} if kind == "lookahead" else set())


def test_groups_of_a_file_without_newer_names_get_their_defaults():
    params = [nn.Parameter(torch.ones(3))]
    opt = wideflat.EntropySGD(params, momentum=0.9, inner_steps=2)
    state = copy.deepcopy(opt.state_dict())
    for name in ("outer_momentum", "outer_nesterov", "outer_weight_decay", "evaluating", "seed"):
        del state["param_groups"][0][name]
    opt.load_state_dict(state)
    for _ in range(3):
        params[0].grad = torch.ones(3)
        opt.step()
    assert opt.param_groups[0]["outer_momentum"] is None


@pytest.mark.parametrize("algorithm", ["esgd", "esgd-rmsprop", "entropic", "lookahead", "sam"])
@pytest.mark.parametrize("steps", [4, 6])
def test_a_state_that_shares_memory_with_the_optimizer_is_loaded(runs, algorithm, steps):
    """torch.distributed.checkpoint fills the memory of the state in place, and loads that."""
    run = Run(algorithm)
    for _ in range(steps):
        run.step()
    run.opt.load_state_dict(run.opt.state_dict())
    assert continued(algorithm, run.save()) == runs[algorithm][1]
