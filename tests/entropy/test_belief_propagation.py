import math

import pytest
import torch
from scipy import special

from wideflat.committee.channel import vote_channel
from wideflat.entropy.belief_propagation import TAP, Problem, RelaxedBP, UnreducedBP, evaluate
from wideflat.entropy.expectation_propagation import FullCovariance
from wideflat.entropy.fixed_point import anderson, solve, sweep


def teacher(hidden, num_inputs, patterns, seed, real_inputs=False, references=1, overlap=0.0):
    """Random patterns, and references that classify all of them right: the first of them labels the patterns."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(patterns, num_inputs, dtype=torch.float64, generator=generator)
    if overlap:  # each input of a pattern is that of a common one with some probability
        common = torch.randn(num_inputs, dtype=torch.float64, generator=generator)
        same = torch.rand(patterns, num_inputs, generator=generator) < math.sqrt(overlap)
        x = torch.where(same, common, x)
    x = x if real_inputs else torch.where(x > 0, 1.0, -1.0).double()
    w = torch.randn(1, hidden, num_inputs, dtype=torch.float64, generator=generator)
    w = w + 0.05 * torch.randn(references, hidden, num_inputs, dtype=torch.float64, generator=generator)
    w[0] = w.mean(0) if references == 1 else w[0]
    y = (w[0] @ x.T).sign().sum(0).sign()
    return w, x, y


def closures(problem):
    found = {
        "tap": TAP(problem.num_inputs, problem.squares),
        "ep": FullCovariance(problem.gram, problem.num_inputs),
    }
    if problem.squares is None:
        found["bp"] = RelaxedBP(problem.num_inputs)
    else:
        found["bp"] = UnreducedBP(problem.num_inputs, problem.squares)
    return found


def explicit_messages(w, x, y, delta, damping=0.5, iterations=4000):
    """The naive twin: relaxed BP with all H x P x N messages, and the Bethe free entropy from its three kinds of terms.

    A message of pattern mu to weight (h, i) is exp(-A w^2/2 + B w); that of the weight to the pattern has mean m and
    variance v. Nothing is reduced, and the means are not centred.
    """
    hidden, num_inputs = w.shape
    patterns = len(x)
    w = w * math.sqrt(num_inputs) / w.norm(dim=1, keepdim=True)
    scaled = x / math.sqrt(num_inputs)  # (P, N)
    A = torch.zeros(hidden, patterns, num_inputs, dtype=x.dtype)
    B = torch.zeros_like(A)
    for _ in range(iterations):
        precision = 1 / delta + A.sum(1, keepdim=True)
        field = (w / delta).unsqueeze(1) + B.sum(1, keepdim=True)
        v = 1 / (precision - A)
        m = (field - B) * v
        omega, V = (scaled * m).sum(-1), (scaled**2 * v).sum(-1)
        log_z_out, g, G = vote_channel(omega, V, y)
        # the moments of w_hi given this pattern, then divided by the message it sent
        mean = m + v * scaled * g.unsqueeze(-1)
        variance = v - v**2 * scaled**2 * G.unsqueeze(-1)
        A_new, B_new = 1 / variance - 1 / v, mean / variance - m / v
        change = max((A_new - A).abs().max().item(), (B_new - B).abs().max().item())
        A, B = damping * A + (1 - damping) * A_new, damping * B + (1 - damping) * B_new
        if change < 1e-14:
            break

    def log_gauss(mean, variance, A, B):
        """Logarithm of the integral of N(w; mean, variance) exp(-A w^2/2 + B w)."""
        new = 1 / (1 / variance + A)
        peak = new * (mean / variance + B)
        return 0.5 * (new / variance).log() + 0.5 * peak**2 / new - 0.5 * mean**2 / variance

    weights_term = log_gauss(w, torch.tensor(delta, dtype=x.dtype), A.sum(1), B.sum(1)).sum()
    edges_term = log_gauss(m, v, A, B).sum()
    posterior = 1 / (1 / delta + A.sum(1))
    center = posterior * (w / delta + B.sum(1))
    distance = 0.5 * ((center - w).square().sum() + posterior.sum())
    return (log_z_out.sum() + weights_term - edges_term).item(), distance.item(), change


@pytest.mark.parametrize("hidden", [1, 3])
@pytest.mark.parametrize("real_inputs", [False, True])
def test_the_reduced_form_equals_the_explicit_messages(hidden, real_inputs):
    w, x, y = teacher(hidden, num_inputs=14, patterns=9, seed=1 + hidden, real_inputs=real_inputs)
    problem = Problem.of(w, x, y)
    assert (problem.squares is None) != real_inputs
    for delta in (0.05, 0.6):
        log_z, distance, change = explicit_messages(w[0], x, y, delta)
        assert change < 1e-13
        found = solve(problem, closures(problem)["bp"], delta, tolerance=1e-12)
        assert found.converged.all()
        assert found.log_z.item() == pytest.approx(log_z, abs=1e-10)
        assert found.distance.item() == pytest.approx(distance, rel=1e-10)


def test_the_unreduced_form_equals_the_reduced_one_where_both_hold():
    w, x, y = teacher(3, num_inputs=20, patterns=12, seed=2)
    problem = Problem.of(w, x, y)
    reduced = solve(problem, RelaxedBP(20), 0.3, tolerance=1e-12)
    unreduced = solve(problem, UnreducedBP(20, x.square()), 0.3, tolerance=1e-12)
    assert unreduced.log_z.item() == pytest.approx(reduced.log_z.item(), abs=1e-11)
    assert unreduced.distance.item() == pytest.approx(reduced.distance.item(), rel=1e-11)
    tap = solve(problem, TAP(20), 0.3, tolerance=1e-12)
    tap_general = solve(problem, TAP(20, x.square()), 0.3, tolerance=1e-12)
    assert tap_general.log_z.item() == pytest.approx(tap.log_z.item(), abs=1e-11)


@pytest.mark.parametrize("real_inputs", [False, True])
@pytest.mark.parametrize("delta", [0.01, 1.0, 100.0])
def test_one_unit_and_one_pattern_is_exact(delta, real_inputs):
    w, x, y = teacher(1, num_inputs=30, patterns=1, seed=5, real_inputs=real_inputs)
    problem = Problem.of(w, x, y)
    k = (y * problem.kappa[0, 0]).item() / math.sqrt(delta * problem.gram.item())
    methods = closures(problem)
    exact = float(special.log_ndtr(k))
    assert solve(problem, methods["bp"], delta).log_z.item() == pytest.approx(
        exact, abs=1e-9 if not real_inputs else 0.02
    )
    assert solve(problem, methods["ep"], delta).log_z.item() == pytest.approx(exact, abs=1e-9)
    assert solve(problem, methods["tap"], delta).log_z.item() == pytest.approx(exact, abs=0.02)


def test_a_reference_that_is_wrong_has_a_finite_free_entropy():
    w, x, y = teacher(1, num_inputs=30, patterns=1, seed=5)
    problem = Problem.of(w, x, -y)
    found = solve(problem, RelaxedBP(30), 1e-3)
    k = -(y * problem.kappa[0, 0]).item() / math.sqrt(1e-3)
    assert found.converged.all() and found.log_z.item() == pytest.approx(float(special.log_ndtr(k)), rel=1e-9)


def hadamard(size):
    x = torch.ones(1, 1, dtype=torch.float64)
    while len(x) < size:
        x = torch.cat([torch.cat([x, x], 1), torch.cat([x, -x], 1)])
    return x


@pytest.mark.parametrize("hidden", [1, 3, 5])
def test_orthogonal_patterns_are_independent(hidden):
    """EP sees that the fields are independent, and is exact. BP gives the weights one variance in all directions."""
    errors = {}
    for num_inputs in (32, 128):
        x = hadamard(num_inputs)[:8]
        w = torch.randn(1, hidden, num_inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        y = (w[0] @ x.T).sign().sum(0).sign()
        problem = Problem.of(w, x, y)
        kappa = problem.kappa[:, 0]
        exact = vote_channel(kappa, torch.full_like(kappa, 0.7), y).log_z.sum().item()
        if hidden == 1:
            assert exact == pytest.approx(special.log_ndtr((y * kappa[0] / math.sqrt(0.7)).numpy()).sum(), abs=1e-12)
        methods = closures(problem)
        assert solve(problem, methods["ep"], 0.7).log_z.item() == pytest.approx(exact, abs=1e-8)
        errors[num_inputs] = solve(problem, methods["bp"], 0.7).log_z.item() - exact
    assert abs(errors[32]) < 0.2
    assert abs(errors[128]) < 0.5 * abs(errors[32])  # of order P/N


@pytest.mark.parametrize("method", ["bp", "tap", "ep", "unreduced"])
def test_the_free_entropy_is_stationary_at_the_fixed_point(method):
    w, x, y = teacher(3, num_inputs=24, patterns=18, seed=8, real_inputs=method == "unreduced", overlap=0.3)
    problem = Problem.of(w, x, y)
    closure = closures(problem)["bp" if method == "unreduced" else method]
    delta = 0.5
    point = solve(problem, closure, delta, tolerance=1e-12)
    generator = torch.Generator().manual_seed(0)
    dg = torch.randn(point.g.shape, dtype=torch.float64, generator=generator)
    dV = torch.randn(point.V.shape, dtype=torch.float64, generator=generator)

    def at(step, along_g, along_V):
        g, V = point.g + step * along_g * dg, point.V * (step * along_V * dV).exp()
        return evaluate(problem, closure, delta, g, V)[0].item()

    for along in ((1, 0), (0, 1)):
        step = 1e-4
        slope = (at(step, *along) - at(-step, *along)) / (2 * step)
        assert abs(slope) < 1e-5
    # and the residual is what it is said to be: the step of the plain map
    omega = problem.kappa + delta * point.g @ problem.gram - point.V * point.g
    torch.testing.assert_close(vote_channel(omega, point.V, y).g, point.g, rtol=0, atol=1e-11)


@pytest.mark.parametrize("method", ["bp", "tap", "ep", "unreduced"])
def test_the_distance_is_the_derivative_of_the_free_entropy(method):
    w, x, y = teacher(5, num_inputs=30, patterns=25, seed=9, real_inputs=method == "unreduced", overlap=0.4)
    problem = Problem.of(w, x, y)
    closure = closures(problem)["bp" if method == "unreduced" else method]
    delta, step = 0.8, 1e-4
    up, at, down = (solve(problem, closure, d, tolerance=1e-12) for d in (delta + step, delta, delta - step))
    slope = (up.log_z - down.log_z).item() / (2 * step)
    expected = (at.distance.item() - 5 * 30 * delta / 2) / delta**2
    assert slope == pytest.approx(expected, rel=1e-6)


def test_batched_equals_single():
    w, x, y = teacher(3, num_inputs=40, patterns=30, seed=4, references=5, overlap=0.5)
    together = Problem.of(w, x, y)
    for method in ("bp", "tap", "ep"):
        closure = closures(together)[method]
        batch = list(sweep(together, closure, (0.1, 1.0)))
        for r in range(5):
            alone = list(sweep(Problem.of(w[r : r + 1], x, y), closure, (0.1, 1.0)))
            for one, many in zip(alone, batch, strict=True):
                assert one.converged.all() and many.converged.all()
                assert many.log_z[r].item() == pytest.approx(one.log_z.item(), abs=1e-10)
                assert many.distance[r].item() == pytest.approx(one.distance.item(), rel=1e-8)


def test_overlapping_patterns_converge_everywhere_from_anywhere():
    """Overlap 0.64, as of the images: the plain iteration diverges unless it is damped by 0.99."""
    w, x, y = teacher(5, num_inputs=200, patterns=120, seed=6, overlap=0.64, references=3)
    problem = Problem.of(w, x, y)
    assert torch.linalg.eigvalsh(problem.gram)[-1] > 60
    plain = torch.zeros_like(problem.kappa)
    for _ in range(200):  # undamped, at fixed V
        _, plain, _ = problem.channel(plain, torch.full_like(plain, 1.0), 1.0)
    _, again, _ = problem.channel(plain, torch.full_like(plain, 1.0), 1.0)
    assert (again - plain).abs().max() > 0.1
    deltas = (0.01, 0.1, 1.0, 3.0)
    warm = list(sweep(problem, RelaxedBP(200), deltas))
    for delta, point in zip(deltas, warm, strict=True):
        cold = solve(problem, RelaxedBP(200), delta)
        assert point.converged.all() and cold.converged.all()
        assert (point.residual < 1e-8).all() and (point.iterations < 100).all()
        torch.testing.assert_close(cold.log_z, point.log_z, rtol=0, atol=1e-9)


def test_a_point_without_convergence_says_so():
    w, x, y = teacher(3, num_inputs=40, patterns=30, seed=4, overlap=0.5)
    problem = Problem.of(w, x, y)
    point = solve(problem, RelaxedBP(40), 1.0, max_iterations=3)
    assert not point.converged.any() and (point.residual > 1e-8).all()
    (point,) = sweep(problem, RelaxedBP(40), [1.0], max_iterations=3)
    assert not point.converged.any()
    assert (point.iterations > 3).all()  # it was tried again


def test_what_does_not_converge_is_given_up_in_time():
    w, x, y = teacher(3, num_inputs=40, patterns=30, seed=4, overlap=0.5)
    points = list(sweep(Problem.of(w, x, y), RelaxedBP(40), [0.5, 1.0, 2.0], max_iterations=3))
    assert not any(point.converged.any() for point in points)
    # once from no messages and four steps of a ladder; not again after a point that failed
    assert [point.iterations.tolist() for point in points] == [[3 * 6], [3], [3]]


def test_steps_shrink_where_there_is_no_progress():
    """A map that turns in more planes than are remembered: full steps never come nearer, short ones do."""
    generator = torch.Generator().manual_seed(1)
    turn = torch.randn(20, 20, dtype=torch.float64, generator=generator)
    turn = 3 * (turn - turn.T) / math.sqrt(20) - torch.eye(20, dtype=torch.float64)

    def residual_map(index, state):
        step = state @ turn.T
        return step, step.abs().amax(-1)

    start = 10 * torch.randn(3, 20, dtype=torch.float64, generator=generator)
    count = torch.zeros(3, dtype=torch.long)
    _, residual = anderson(residual_map, start, 1e-3, 300, count, window=5, patience=1000)
    assert (residual > 1).all()
    found, residual = anderson(residual_map, start, 1e-3, 300, count.zero_(), window=5)
    assert (residual < 1e-3).all() and (found.abs() < 1e-2).all() and (count < 300).all()


def test_patterns_that_are_not_kept_are_no_constraints():
    w, x, y = teacher(3, num_inputs=40, patterns=30, seed=4)
    keep = torch.ones(1, 30, dtype=torch.bool)
    keep[0, ::3] = False
    for method in ("bp", "tap", "ep"):
        masked = Problem.of(w, x, y, keep)
        fewer = Problem.of(w, x[keep[0]], y[keep[0]])
        a = solve(masked, closures(masked)[method], 0.5)
        b = solve(fewer, closures(fewer)[method], 0.5)
        assert a.log_z.item() == pytest.approx(b.log_z.item(), abs=1e-9)
        assert a.distance.item() == pytest.approx(b.distance.item(), rel=1e-9)


def test_float32_is_as_accurate_as_stated():
    w, x, y = teacher(5, num_inputs=200, patterns=120, seed=6, overlap=0.64)
    exact, rough = Problem.of(w, x, y), Problem.of(w.float(), x.float(), y.float())
    for delta in (0.1, 1.0, 3.0):
        a = solve(exact, RelaxedBP(200), delta)
        b = solve(rough, RelaxedBP(200), delta)
        assert b.converged.all() and b.g.dtype is torch.float32
        assert b.log_z.item() == pytest.approx(a.log_z.item(), rel=1e-5)
