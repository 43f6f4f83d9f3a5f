import itertools
import json
import signal
import threading

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from wideflat import committee_training
from wideflat.committee import SETTINGS, Interrupted, Setting, errors, train
from wideflat.committee_reference import train_one
from wideflat.committee_training import (
    _Direct,
    _Gram,
    align,
    assign,
    dropout_mask,
    initial_weights,
    order,
)
from wideflat.data import dress_coat


@pytest.fixture(scope="module")
def images():
    return dress_coat.load(60)


def make(form, setting, patterns, seeds, dtype=torch.float64):
    made = (_Direct if form == "direct" else _Gram)(setting, patterns.inputs, patterns.targets, dtype)
    if form == "gram, by torch":
        made.kernel = None
    made.load(torch.stack([initial_weights(setting, seed, patterns.inputs.shape[1]) for seed in seeds]))
    made.seeds = seeds
    return made


def advance(form, setting, seeds, epoch, count):
    orders = torch.from_numpy(np.stack([order(setting, seed, epoch, count) for seed in seeds]))
    masks = None
    if setting.dropout:
        masks = torch.from_numpy(np.stack([dropout_mask(setting, seed, epoch, count) for seed in seeds])).to(form.dtype)
    form.epoch(epoch, orders, masks)


CASES = {
    "sgd-fast": SETTINGS["sgd-fast"],
    "sgd-slow": SETTINGS["sgd-slow"],
    "dropout": SETTINGS["sgd-fast"].but(dropout=0.3),
    "rsgd": SETTINGS["rsgd-fast"].but(num_replicas=3, gamma0=2.0),
    "rsgd, period 3": SETTINGS["rsgd-slow"].but(num_replicas=3, gamma0=2.0, period=3),
    "rsgd, two replicas, dropout": SETTINGS["rsgd-fast"].but(num_replicas=2, dropout=0.2),
    "esgd": SETTINGS["esgd"].but(epsilon=0.0, inner_steps=6),
    "esgd, alpha 0": SETTINGS["esgd"].but(epsilon=0.0, inner_steps=4, alpha=0.0, hidden=5),
    "esgd, all to mu": SETTINGS["esgd"].but(epsilon=0.0, inner_steps=3, lr=0.9, gamma0=1.0, inner_lr=1e-4),
}


@pytest.mark.parametrize("form", ["gram", "gram, by torch", "direct"])
@pytest.mark.parametrize("case", CASES)
def test_the_batched_training_is_the_naive_loop(case, form, images):
    """Epoch by epoch in float64, with batches that do not divide the patterns, for weights and stopping rule."""
    setting = CASES[case].but(batch_size=16, tolerance=1e3)  # so that the distance is exact, not a bound
    seeds, count = (0, 5), len(images.inputs)
    fast = make(form, setting, images, seeds)
    twins = [train_one(setting, images.inputs, images.targets, seed) for seed in seeds]
    for epoch in range(4):
        advance(fast, setting, seeds, epoch, count)
        weights = fast.weights()
        rule = {"errors": fast.errors, "loss": lambda e=epoch: fast.loss(e), "distance": fast.distance}[setting.stop]()
        for k, twin in enumerate(twins):
            expected, value = next(twin)
            assert torch.allclose(weights[k], expected, rtol=0, atol=1e-10)
            assert rule[k].item() == pytest.approx(value, rel=1e-7)
    moved = weights[0] - initial_weights(setting, 0, 784)
    assert moved.abs().max() > 1e-4  # something has happened


def test_every_step_equals_the_naive_loop_on_one_batch_epochs(images):
    """With one mini-batch an epoch the comparison is step by step."""
    for setting in (CASES["sgd-fast"], CASES["rsgd"], CASES["esgd"].but(inner_steps=1)):
        setting = setting.but(batch_size=60)
        fast, twin = make("gram", setting, images, (1,)), train_one(setting, images.inputs, images.targets, 1)
        for epoch in range(20):
            advance(fast, setting, (1,), epoch, 60)
            assert torch.allclose(fast.weights()[0], next(twin)[0], rtol=0, atol=1e-11)


def test_the_rows_that_are_left_out_do_not_matter(images):
    """Late settings, where most coefficients are tiny: few rows against all rows (bit for bit), and the naive loop."""
    setting = SETTINGS["sgd-fast"].but(batch_size=20, omega0=200.0, tanh_beta0=4.0, lr=1e-5)
    few, every = (make("gram, by torch", setting, images, (0, 1, 2), torch.float32) for _ in range(2))
    twin = train_one(setting, images.inputs, images.targets, 0)
    fractions = []
    for epoch in range(30):
        few.active = 0.0  # then epoch() measures it
        advance(few, setting, (0, 1, 2), epoch, 60)
        fractions.append(few.active)
        every.active = 1.0
        add = every._add_rows

        def all_rows(a, index, c, add=add):
            every.measure, every.active = False, 1.0
            return add(a, index, c)

        every._add_rows = all_rows
        advance(every, setting, (0, 1, 2), epoch, 60)
        every._add_rows = add
        exact, _ = next(twin)
        assert torch.equal(few.state["a"], every.state["a"])
        assert torch.allclose(few.weights()[0].double(), exact, atol=5e-5)  # with omega = 200 roundings grow quickly
    assert min(fractions) < 0.5  # the branch was taken


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("name", ["sgd-fast", "rsgd-fast", "esgd"])
def test_a_restart_does_not_depend_on_its_neighbours(name, kernel, images, monkeypatch):
    """Bit for bit in float32: alone, in a crowd, on one thread or two, in either form."""
    if not kernel:
        monkeypatch.setattr(committee_training.CommitteeKernel, "available", staticmethod(lambda gram: False))
    setting = SETTINGS[name].but(batch_size=20, max_epochs=12, inner_steps=4, stop="errors", tolerance=0.0)
    for form in ("gram", "direct") if kernel else ("gram",):
        run = {"progress": False, "refresh": 5, "form": form}
        crowd = train(setting, images.inputs, images.targets, range(7), threads=1, **run)
        two = train(setting, images.inputs, images.targets, range(7), threads=2, **run)
        alone = train(setting, images.inputs, images.targets, [3], threads=1, **run)
        assert torch.equal(crowd.weights, two.weights)
        assert torch.equal(crowd.weights[3], alone.weights[0])
        assert crowd.epochs[3] == alone.epochs[0] and crowd.value[3] == alone.value[0]


def test_restarts_that_stop_leave_the_batch(images):
    setting = SETTINGS["sgd-fast"].but(batch_size=20, lr=5e-4, max_epochs=400)
    together = train(setting, images.inputs, images.targets, range(6), progress=False, threads=1)
    assert len(set(together.epochs)) > 2 and all(together.reached)
    assert together.train_errors == [0] * 6
    for k in (0, 5):
        alone = train(setting, images.inputs, images.targets, [k], progress=False)
        assert alone.epochs == [together.epochs[k]] and torch.equal(alone.weights[0], together.weights[k])


def test_each_rule_stops_where_the_naive_loop_would(images):
    small = {"batch_size": 20, "max_epochs": 100}
    quick = {
        "loss": SETTINGS["sgd-slow"].but(**small, tolerance=0.05, lr=1e-4, omega1=0.01, tanh_beta1=0.01),
        "replicas": SETTINGS["rsgd-fast"].but(**small, num_replicas=3, gamma0=1000.0, gamma1=0.01, tolerance=1e-6),
        "mean": SETTINGS["esgd"].but(**small, inner_steps=4, inner_lr=1e-3, lr=0.5, tolerance=1e-3, epsilon=0.0),
    }
    for setting in quick.values():
        result = train(setting, images.inputs, images.targets, [4], progress=False, dtype=torch.float64)
        twin = train_one(setting, images.inputs, images.targets, 4)
        values = [value for _, value in itertools.islice(twin, result.epochs[0])]
        assert result.stop == [setting.stop] and result.epochs[0] > 3
        assert min(values[:-1]) >= setting.tolerance > values[-1]
        assert result.value[0] == pytest.approx(values[-1], rel=1e-6)


def test_the_loss_is_a_bound_only_where_it_is_too_large(images):
    setting = SETTINGS["sgd-slow"].but(batch_size=20, lr=1e-4, omega1=0.05, tanh_beta1=0.05, tolerance=1e-3)
    form = make("gram", setting, images, (0, 1, 2, 3))
    bounds = 0
    for epoch in range(80):
        advance(form, setting, (0, 1, 2, 3), epoch, 60)
        found = form.loss(epoch)
        exact = form.loss(epoch, exact=True)
        assert (found <= exact * (1 + 1e-12)).all()
        close = (found - exact).abs() <= 1e-12 * exact
        assert ((found > setting.tolerance) | close).all()
        bounds += int((~close).sum())
    assert bounds > 20 and (exact < setting.tolerance).any()


def test_a_restart_that_misses_its_rule_says_so(images):
    flipped = images.targets.clone()
    inputs = torch.cat([images.inputs, images.inputs[:1]])  # a pattern with both labels
    targets = torch.cat([flipped, -flipped[:1]])
    setting = SETTINGS["sgd-fast"].but(batch_size=20, max_epochs=30)
    result = train(setting, inputs, targets, [0, 1], progress=False)
    assert result.stop == ["max_epochs"] * 2 and result.reached == [False] * 2 and result.solved == [False] * 2
    assert result.epochs == [30, 30] and min(result.train_errors) >= 1
    assert result.value == [float(count) for count in result.train_errors]


def test_float32_is_enough(images):
    setting = SETTINGS["rsgd-fast"].but(batch_size=20, num_replicas=3, max_epochs=60)
    single = train(setting, images.inputs, images.targets, range(2), progress=False, refresh=30)
    double = train(setting, images.inputs, images.targets, range(2), progress=False, refresh=30, dtype=torch.float64)
    assert (single.weights.double() - double.weights).abs().max() < 1e-5


def test_the_noise_of_entropy_sgd(images):
    """Its variance in the direct form is that of Algorithm 1, and the Gram form gathers the same variance for w."""
    setting = SETTINGS["esgd"].but(
        batch_size=60, gradient_scale=1e-30, epsilon=0.01, inner_steps=3, lr=0.5, gamma0=20.0
    )
    # no gradient: w moves by eta times the mean of the explorer's noise, N(0, reach) with the weights of the mean
    k, alpha = setting.inner_lr * setting.gamma0, setting.alpha
    weights = [
        sum((1 - alpha) * alpha ** (2 - i) * (1 - k) ** (i - first) for i in range(first, 3)) for first in range(3)
    ]
    variance = setting.lr**2 * setting.inner_lr * setting.epsilon**2 * sum(w**2 for w in weights)
    seeds = tuple(range(8))
    direct, gram = (make(form, setting, images, seeds) for form in ("direct", "gram"))
    start = direct.weights()
    advance(direct, setting, seeds, 0, 60)
    advance(gram, setting, seeds, 0, 60)
    moved = direct.weights() - start
    assert moved.square().mean().item() == pytest.approx(variance, rel=0.05)
    assert gram.noise == pytest.approx(variance, rel=1e-12)
    assert torch.allclose(gram.weights(), start, atol=1e-12)


def test_the_form_is_chosen_by_size_and_noise(images):
    forms = {}
    for name, changes in [("esgd", {}), ("esgd", {"epsilon": 0.1}), ("sgd-fast", {})]:
        setting = SETTINGS[name].but(batch_size=20, max_epochs=1, **changes)
        result = train(setting, images.inputs, images.targets, [0], progress=False)
        forms[name, setting.epsilon] = result.options["form"]
    assert forms == {("esgd", 1e-6): "gram", ("esgd", 0.1): "direct", ("sgd-fast", 0.0): "gram"}
    wide = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    result = train(setting, wide, images.targets[:50], [0], progress=False)
    assert result.options["form"] == "direct"


# ------------------------------------------------------------------------------------------------- aligning, polishing


def test_the_assignment_is_the_best_one():
    rng = np.random.default_rng(0)
    for size in (1, 2, 5, 9):
        for _ in range(20):
            score = rng.normal(size=(size, size)).round(1)  # ties too
            chosen = assign(score)
            assert sorted(chosen) == list(range(size))
            rows, columns = linear_sum_assignment(score, maximize=True)
            assert score[np.arange(size), chosen].sum() == pytest.approx(score[rows, columns].sum())
    score = rng.normal(size=(5, 5))
    best = max(sum(score[i, p[i]] for i in range(5)) for p in itertools.permutations(range(5)))
    assert score[np.arange(5), assign(score)].sum() == pytest.approx(best)


def test_aligning_undoes_a_permutation_and_changes_no_answer(images):
    weights = initial_weights(SETTINGS["sgd-fast"], 0, 784)
    shuffled = torch.stack([weights[0], weights[0][torch.randperm(9)], weights[0].flip(0)])
    aligned = align(shuffled)
    assert torch.equal(aligned, weights.expand(3, -1, -1))
    replicas = initial_weights(SETTINGS["rsgd-fast"], 0, 784)
    assert torch.equal(
        errors(align(replicas), images.inputs, images.targets), errors(replicas, images.inputs, images.targets)
    )


def test_aligned_replicas_overlap_more(images):
    setting = SETTINGS["rsgd-fast"].but(batch_size=20, max_epochs=1, num_replicas=4)
    plain, aligned = (
        train(setting.but(align=flag), images.inputs, images.targets, [0, 1], progress=False) for flag in (False, True)
    )
    assert not torch.equal(plain.weights, aligned.weights)
    assert aligned.setting.align


def test_polishing_removes_errors_with_little_movement():
    images = dress_coat.load(100)
    rough = SETTINGS["sgd-slow"].but(max_epochs=250, batch_size=20)
    before = train(rough, images.inputs, images.targets, range(4), progress=False)
    polish = {"polish_epochs": 300, "polish_lr": 2e-5, "polish_beta0": 1.0}
    after = train(rough.but(**polish), images.inputs, images.targets, range(4), progress=False)
    assert sum(before.train_errors) > 0 and after.errors_before == before.train_errors
    assert sum(after.train_errors) < sum(before.train_errors)
    for k in range(4):
        if before.train_errors[k] == 0:
            assert after.polish_epochs[k] == 0 and torch.equal(after.weights[k], before.weights[k])
        else:
            moved = (after.weights[k] - before.weights[k]).square().sum().item() / 9
            assert after.polish_movement[k] == pytest.approx(moved, rel=1e-3)
            assert 0 < moved < 0.05 and after.polish_epochs[k] > 0
    assert after.epochs == before.epochs


# ----------------------------------------------------------------------------------------------- interrupting, resuming


def interrupt_after(monkeypatch, calls):
    """Cancel training after so many epochs, as Ctrl-C would."""
    count = itertools.count(1)
    original = _Gram.epoch

    def epoch(self, *arguments):
        original(self, *arguments)
        if next(count) == calls:
            signal.raise_signal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else (
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            )

    monkeypatch.setattr(_Gram, "epoch", epoch)


@pytest.mark.parametrize("name", ["sgd-fast", "rsgd-fast", "esgd"])
def test_an_interrupted_run_goes_on_and_ends_the_same(name, images, tmp_path, monkeypatch):
    setting = SETTINGS[name].but(batch_size=20, max_epochs=40, inner_steps=3, stop="errors", tolerance=0.0)
    if name == "rsgd-fast":
        setting = setting.but(num_replicas=3, align=True)
    arguments = (setting, images.inputs, images.targets, range(3))
    whole = train(*arguments, progress=False, refresh=7)
    path = tmp_path / "state.npz"
    with monkeypatch.context() as patch:
        interrupt_after(patch, 12)
        with pytest.raises(
            Interrupted, match=r"of 3 restarts finished; run it again to go on from .*state\.npz"
        ) as caught:
            train(*arguments, progress=False, refresh=7, checkpoint=path, threads=1)
    partial = caught.value.solutions
    assert partial.stop.count("interrupted") >= 1
    assert next(e for e, stop in zip(partial.epochs, partial.stop, strict=True) if stop == "interrupted") % 7 == 0
    resumed = train(*arguments, progress=False, refresh=7, checkpoint=path)
    assert torch.equal(resumed.weights, whole.weights)
    assert resumed.epochs == whole.epochs and resumed.stop == whole.stop
    # and a finished checkpoint is read, not trained again
    monkeypatch.setattr(_Gram, "epoch", None)
    assert torch.equal(train(*arguments, progress=False, refresh=7, checkpoint=path).weights, whole.weights)


def test_checkpoints_of_other_runs_and_damaged_ones_are_refused(images, tmp_path):
    setting = SETTINGS["sgd-fast"].but(batch_size=20, max_epochs=2)
    path = tmp_path / "state.npz"
    train(setting, images.inputs, images.targets, range(2), progress=False, checkpoint=path)
    with pytest.raises(ValueError, match="another run: it differs in setting"):
        train(setting.but(lr=1.0), images.inputs, images.targets, range(2), progress=False, checkpoint=path)
    with pytest.raises(ValueError, match="differs in seeds"):
        train(setting, images.inputs, images.targets, range(3), progress=False, checkpoint=path)
    with pytest.raises(ValueError, match="differs in data"):
        train(setting, images.inputs, -images.targets, range(2), progress=False, checkpoint=path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        train(setting, images.inputs, images.targets, range(2), progress=False, checkpoint=path)


def test_an_error_in_a_worker_is_not_swallowed(images, monkeypatch):
    def fail(self, *arguments):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(_Gram, "epoch", fail)
    with pytest.raises(RuntimeError, match="no such luck"):
        train("sgd-fast", images.inputs, images.targets, range(3), progress=False, threads=2)


def test_the_number_of_threads_is_left_as_it_was(images):
    before = torch.get_num_threads()
    setting = SETTINGS["sgd-fast"].but(batch_size=20, max_epochs=2)
    train(setting, images.inputs, images.targets, range(2), progress=False, threads=2)
    assert torch.get_num_threads() == before


def test_randomness_is_a_function_of_seed_and_epoch():
    setting = SETTINGS["rsgd-fast"]
    first = order(setting, 3, 7, 50)
    assert first.shape == (10, 50) and np.array_equal(first, order(setting, 3, 7, 50))
    assert all(sorted(row) == list(range(50)) for row in first)
    for other in (order(setting, 4, 7, 50), order(setting, 3, 8, 50)):
        assert not np.array_equal(first, other)
    assert order(SETTINGS["esgd"], 0, 0, 50).shape == (20, 50)
    mask = dropout_mask(setting.but(dropout=0.25), 0, 0, 1000)
    assert set(np.unique(mask)) == {0.0, 1 / 0.75} and abs((mask == 0).mean() - 0.25) < 0.01


def test_a_generator_that_is_used_again_gives_the_same_numbers():
    for seed, purpose, epoch in [(0, 1, 0), (3, 1, 7), (2**64 - 1, 2, 10**6), (3, 1, 7)]:
        first = committee_training._generator(seed, purpose, epoch)
        again = committee_training._stream(seed, purpose, epoch)
        assert np.array_equal(first.random(7, dtype=np.float32), again.random(7, dtype=np.float32))  # leaves a buffer
        assert np.array_equal(first.permutation(50), again.permutation(50))


def test_own_data_with_real_inputs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 60, generator=generator)
    teacher = torch.randn(60, generator=generator)
    y = torch.where(x @ teacher > 0, 1.0, -1.0)
    setting = Setting("sgd", 1e-3, 1.0, 1e-3, 2.0, 0.0, "errors", max_epochs=2000, hidden=3, batch_size=7)
    for form in ("gram", "direct"):
        result = train(setting, x, y, range(3), progress=False, form=form)
        assert result.train_errors == [0, 0, 0]


def test_the_checkpoint_holds_plain_arrays_and_text(images, tmp_path):
    setting = SETTINGS["sgd-fast"].but(batch_size=20, max_epochs=2)
    path = tmp_path / "state.npz"
    train(setting, images.inputs, images.targets, range(2), progress=False, checkpoint=path)
    with np.load(path, allow_pickle=False) as content:
        assert json.loads(str(content["metadata"]))["format"] == "wideflat committee checkpoint 1"
    assert committee_training._CHECKPOINT_INTERVAL <= 60
