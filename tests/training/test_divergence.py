"""Rates that cannot be meant: refused at the door, or ended as diverged with the last good state, in any company."""

import math

import pytest
import torch
import torch.distributed as dist
from small_trainings import QUIET, images, small
from torch.distributed.device_mesh import init_device_mesh

from wideflat.algorithms import ALGORITHMS
from wideflat.cli import main
from wideflat.training import Diverged, Options, Run, train_in
from wideflat.training.company import Alone
from wideflat.training.elastic import Elastic
from wideflat.training.ranks import Ranks

FIELDS = [
    *[("sgd", "lr"), ("sgd", "weight_decay"), ("esgd", "epsilon"), ("esgd", "gamma0"), ("rsgd", "gamma0")],
    *[("sam", "rho"), ("esgd", "inner_lr")],
]
LARGE = [1e10, 1e30]
#: Of jobs that come and go: all that rsgd has.
OF_JOBS = [("rsgd", "lr"), ("rsgd", "weight_decay"), ("rsgd", "gamma0")]


def diverge(company, out, algorithm, field, value):
    """Train with a value that is too large; what was said when it diverged, None if it lived."""
    replicas = {"num_replicas": 2, "period": 2} if ALGORITHMS[algorithm].replicated else {}
    experiment = small(algorithm, **{field: value}, **replicas)
    try:
        train_in(company, experiment, out, images(32, 16), Options(batch_norm_images=32), **QUIET)
    except Diverged as error:
        return str(error)
    return None


def must_be_good(told, out):
    """It says where and what to do, and what is on disk is finite: a state, or what came out."""
    run = Run.open(out)
    if told is None:  # it lived
        assert all(bool(torch.isfinite(p).all()) for p in run.load_model().parameters())
        return
    assert "at iteration" in told and "keeps the last good state" in told and "Try a smaller --lr" in told
    assert run.metrics("events")[-1]["event"] == told and run.result() is None
    with run.locked():
        state = run.restore()
    state = state and state.get("training", state)  # that of a job has how often it met the others beside it
    assert state is None or all(
        bool(torch.isfinite(weight).all()) for network in state["learner"]["networks"] for weight in network.values()
    )


@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf])
@pytest.mark.parametrize(("algorithm", "field"), FIELDS)
def test_what_is_not_finite_is_refused(algorithm, field, value):
    with pytest.raises(ValueError, match=rf"{field}.* must be a finite number"):
        small(algorithm, **{field: value})


@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize("company", [[], ["--fault-tolerant"], ["--fault-tolerant", "--replica", "0"]])
def test_the_command_refuses_it_in_any_company_before_anything_is_started(tmp_path, capsys, company, value):
    out = tmp_path / "run"
    for option in ("lr", "weight-decay", "gamma0"):
        words = ["train", "cifar10-smallconvnet", "--algorithm", "rsgd", f"--{option}", value, "--out", str(out)]
        assert main([*words, *company]) == 2
        told = capsys.readouterr().err
        assert option.replace("-", "_") in told and "must be a finite number" in told
    assert not out.exists()


@pytest.mark.filterwarnings("ignore:lr K gamma")  # which says the same before it is tried
@pytest.mark.parametrize("value", LARGE)
@pytest.mark.parametrize(("algorithm", "field"), FIELDS)
def test_what_is_too_large_ends_as_diverged(tmp_path, algorithm, field, value):
    must_be_good(diverge(Alone(), tmp_path / "run", algorithm, field, value), tmp_path / "run")


def diverge_on_ranks(out, cases):
    """One after the other: replicas on two ranks, or one network whose mini-batches they divide."""
    told = []
    for algorithm, field, value in cases:
        shape = (2, 1) if ALGORITHMS[algorithm].replicated else (1, 2)
        company = Ranks(init_device_mesh("cpu", shape, mesh_dim_names=("replica", "dp")))
        told.append(diverge(company, f"{out}/{algorithm}-{field}-{value}", algorithm, field, value))
    return told


@pytest.mark.parametrize(
    "cases",
    [
        [("rsgd", "gamma0", 1e30), ("sgd", "lr", 1e10), ("sam", "rho", 1e30)],
        pytest.param([(*each, value) for each in FIELDS for value in LARGE], marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_ranks_diverge_together(ranks, tmp_path, cases):
    first, second = ranks(diverge_on_ranks, 2, str(tmp_path), cases, timeout=300.0)
    assert first == second  # the same words on both, or both lived
    for (algorithm, field, value), told in zip(cases, first, strict=True):
        must_be_good(told, tmp_path / f"{algorithm}-{field}-{value}")
    assert any(first)


def diverge_as_jobs(lighthouse, out, cases):
    told = []
    for algorithm, field, value in cases:
        dist.barrier()  # all begin together, so that they need not wait for each other long
        with Elastic(dist.get_rank(), lighthouse, "127.0.0.1", start_timeout=20.0) as company:
            told.append(diverge(company, f"{out}/{algorithm}-{field}-{value}", algorithm, field, value))
    return told


@pytest.mark.parametrize(
    "cases",
    [
        [("rsgd", "lr", 1e10)],
        pytest.param([(*each, value) for each in OF_JOBS for value in LARGE], marks=pytest.mark.slow),
    ],
    ids=["one", "all"],
)
def test_jobs_that_come_and_go_diverge_each_with_its_last_good_state(ranks, lighthouse, tmp_path, cases):
    found = ranks(diverge_as_jobs, 2, lighthouse, str(tmp_path), cases, timeout=400.0)
    for a, words in enumerate(found):
        for (algorithm, field, value), told in zip(cases, words, strict=True):
            must_be_good(told, tmp_path / f"{algorithm}-{field}-{value}" / f"replica-{a}")
    assert all(any(words) for words in found)
