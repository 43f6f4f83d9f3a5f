import math

import pytest
import torch
from small_committees import committee, interrupt_after

import wideflat
from wideflat.entropy import LocalEntropy
from wideflat.entropy.measure import DELTAS, Interrupted, legendre


@pytest.mark.parametrize("method", ["bp", "tap", "ep"])
def test_the_curve_starts_at_zero_falls_and_stays_negative(method):
    w, x, y = committee()
    curve = wideflat.local_entropy(w[0], x, y, deltas=[1e-5, *DELTAS], method=method)
    assert curve.phi.shape == curve.distance.shape == curve.converged.shape == (14,)
    assert curve.converged.all() and (curve.status == "converged").all() and (curve.residual < 1e-6).all()
    assert (curve.phi <= 1e-12).all() and abs(curve.phi[0]) < 1e-6 and curve.phi[-1] < -1e-3
    assert (curve.phi.diff() < 1e-12).all() and (curve.distance.diff() > 0).all()
    assert (curve.iterations > 0).all() and (curve.training_errors == 0).all()


@pytest.mark.parametrize("method", ["bp", "ep"])
def test_the_slope_of_the_curve_is_its_conjugate_variable(method):
    """dPhi/dd = (1/Delta - D/(2 d)) / D."""
    w, x, y = committee()
    curve = wideflat.local_entropy(w[0], x, y, deltas=[0.999, 1.0, 1.001], method=method, tolerance=1e-11)
    slope = (curve.phi[2] - curve.phi[0]) / (curve.distance[2] - curve.distance[0])
    d, big_d = curve.distance[1], curve.num_weights
    assert slope.item() == pytest.approx(((1 - big_d / (2 * d)) / big_d).item(), rel=1e-4)


def test_legendre_of_a_gaussian_is_zero_and_it_is_never_positive_without_constraints():
    assert legendre(torch.tensor(0.0), torch.tensor(50.0), 1.0, 100).item() == 0
    # a reference without binding constraints: Z = 1, and moving d off its typical value costs (r - 1 - log r)/2
    assert legendre(torch.tensor(0.0), torch.tensor(60.0), 1.0, 100).item() == pytest.approx((0.2 - math.log(1.2)) / 2)


@pytest.mark.parametrize("method", ["bp", "tap", "ep"])
def test_symmetries(method):
    w, x, y = committee()
    w = w[0]
    generator = torch.Generator().manual_seed(1)
    units, patterns, inputs = (torch.randperm(n, generator=generator) for n in (3, 30, 50))
    flips = torch.where(torch.rand(50, generator=generator) < 0.5, 1.0, -1.0).double()
    mirror = torch.where(torch.rand(30, generator=generator) < 0.5, 1.0, -1.0).double()
    same = {
        "rescaled units": (w * torch.tensor([[0.1], [3.0], [40.0]]), x, y),
        "permuted units": (w[units], x, y),
        "permuted patterns": (w, x[patterns], y[patterns]),
        "permuted inputs": (w[:, inputs], x[:, inputs], y),
        "flipped inputs": (w * flips, x * flips, y),
        "mirrored patterns": (w, x * mirror.unsqueeze(1), y * mirror),
        "everything negated": (-w, x, -y),
    }
    reference = wideflat.local_entropy(w, x, y, deltas=[0.1, 1.0], method=method)
    for name, problem in same.items():
        curve = wideflat.local_entropy(*problem, deltas=[0.1, 1.0], method=method)
        torch.testing.assert_close(curve.log_z, reference.log_z, rtol=0, atol=1e-9, msg=name)
        torch.testing.assert_close(curve.distance, reference.distance, rtol=1e-8, atol=0, msg=name)


def test_many_references_equal_one_at_a_time():
    w, x, y = committee(references=4)
    curves = wideflat.local_entropy(w, x, y, deltas=[0.1, 1.0])
    assert curves.phi.shape == (4, 2) and curves.training_errors.shape == (4,)
    for r in range(4):
        one = wideflat.local_entropy(w[r], x, y, deltas=[0.1, 1.0])
        torch.testing.assert_close(curves.log_z[r], one.log_z, rtol=0, atol=1e-11)
        torch.testing.assert_close(curves.phi[r], one.phi, rtol=0, atol=1e-11)


def test_other_inputs_than_plus_and_minus_one():
    w, x, y = committee(num_inputs=20, patterns=12)
    x = x * (0.5 + torch.rand(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(0)))
    y = (w[0] @ x.T).sign().sum(0).sign()
    curves = {m: wideflat.local_entropy(w[0], x, y, deltas=[0.3, 1.0], method=m) for m in ("bp", "tap", "ep")}
    judge = wideflat.local_entropy(w[0], x, y, deltas=[0.3, 1.0], method="sample", particles=500, runs=4, sweeps=15)
    assert (judge.status == "sampled").all() and (judge.log_z_stderr > 0).all() and (judge.phi_stderr > 0).all()
    for curve in curves.values():
        assert curve.converged.all()
        assert (curve.log_z - judge.log_z).abs().max() < 0.25 * judge.log_z.abs().max() + 0.3


def test_comparison_of_the_methods():
    w, x, y = committee(num_inputs=20, patterns=10)
    curve = wideflat.local_entropy(w[0], x, y, [0.5], "ep", compare=True, particles=200, runs=3, sweeps=8)
    assert curve.method == "ep" and list(curve.others) == ["bp", "tap", "ep-vector", "sample"]
    everything = {"ep": curve, **curve.others}
    assert all(c.method == name and c.phi.shape == (1,) for name, c in everything.items())
    judge = everything["sample"]
    assert abs(curve.log_z - judge.log_z).item() < 0.2 * abs(judge.log_z).item() + 4 * judge.log_z_stderr.item()


def test_references_with_training_errors_are_counted_and_treated_as_asked():
    w, x, y = committee()
    y = y.clone()
    y[3] = -y[3]
    kept = wideflat.local_entropy(w[0], x, y, deltas=[1e-4, 0.5])
    dropped = wideflat.local_entropy(w[0], x, y, deltas=[1e-4, 0.5], on_errors="drop")
    assert kept.training_errors == dropped.training_errors == 1
    assert (kept.on_errors, dropped.on_errors) == ("keep", "drop")
    assert kept.phi[0] < -1e-3 and abs(dropped.phi[0]) < 1e-6  # only around a solution does Phi go to 0
    others = torch.arange(30) != 3
    fewer = wideflat.local_entropy(w[0], x[others], y[others], deltas=[1e-4, 0.5])
    torch.testing.assert_close(dropped.log_z, fewer.log_z, rtol=0, atol=1e-9)


def test_float32():
    w, x, y = committee()
    exact = wideflat.local_entropy(w, x, y)
    rough = wideflat.local_entropy(w.float(), x.float(), y.float(), dtype=torch.float32)
    assert rough.converged.all()
    torch.testing.assert_close(rough.log_z, exact.log_z, rtol=1e-5, atol=1e-6)
    assert (rough.iterations.sum() < exact.iterations.sum()).all()


def test_arrays_and_integers_are_welcome():
    w, x, y = committee()
    curve = wideflat.local_entropy(w[0].numpy(), x.to(torch.int8).numpy(), y.long().tolist(), deltas=[0.5])
    torch.testing.assert_close(curve.log_z, wideflat.local_entropy(w[0], x, y, deltas=[0.5]).log_z)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": torch.zeros(3)}, r"weights must have the shape \(H, N\) or .* got \(3,\)"),
        ({"weights": torch.ones(4, 50)}, "number of hidden units must be odd.*got 4"),
        ({"weights": torch.zeros(3, 50)}, "only zero weights"),
        ({"weights": torch.full((3, 50), math.nan)}, "weights has values that are not finite"),
        ({"inputs": torch.ones(30, 49)}, r"inputs must have the shape \(patterns, 50\).*got \(30, 49\)"),
        ({"inputs": torch.zeros(30, 50)}, "pattern 0 has only zero inputs"),
        ({"targets": torch.ones(29)}, "one number for each of the 30 patterns"),
        ({"targets": torch.zeros(30)}, "targets must be \\+1 or -1, got 0"),
        ({"deltas": []}, "at least one value"),
        ({"deltas": [0.1, -1]}, "finite number > 0, got -1"),
        ({"deltas": [1.0, 0.1]}, "deltas must grow"),
        ({"method": "magic"}, "method must be one of 'bp', 'tap', 'ep', 'ep-vector', 'sample', got 'magic'"),
        ({"on_errors": "hide"}, "on_errors must be"),
        ({"dtype": torch.int32}, "dtype must be torch.float32 or torch.float64"),
    ],
)
def test_bad_arguments(change, message):
    w, x, y = committee()
    with pytest.raises(ValueError, match=message):
        wideflat.local_entropy(**{"weights": w[0], "inputs": x, "targets": y, **change})


def test_ctrl_c_keeps_the_points_that_are_finished(monkeypatch, tmp_path):
    w, x, y = committee(references=2)
    deltas = [0.1, 0.5, 1.0]
    whole = wideflat.local_entropy(w, x, y, deltas)
    interrupt_after(monkeypatch, 2)
    with pytest.raises(Interrupted) as caught:
        wideflat.local_entropy(w, x, y, deltas, compare=True)
    curve = caught.value.curve
    assert curve.status.tolist() == 2 * [["converged", "converged", "not computed"]] and not curve.others
    torch.testing.assert_close(curve.phi[:, :2], whole.phi[:, :2], rtol=0, atol=0)
    assert curve.phi[:, 2].isnan().all() and str(curve).endswith("not computed")
    curve.save(tmp_path / "part.npz")
    assert LocalEntropy.load(tmp_path / "part.npz").status.tolist() == curve.status.tolist()
    interrupt_after(monkeypatch, 0)
    with pytest.raises(Interrupted) as caught:
        wideflat.local_entropy(w, x, y, deltas)
    assert caught.value.curve is None
