"""What the Gram forms leave out: rows without a coefficient, and what no rule needs to know."""

import torch

from wideflat.committee import SETTINGS
from wideflat.committee.reference import train_one


def test_the_rows_that_are_left_out_do_not_matter(images, make, advance):
    """Late settings, where most coefficients are tiny: few rows against all rows (bit for bit), and the naive loop."""
    setting = SETTINGS["sgd-fast"].replace(batch_size=20, omega0=200.0, tanh_beta0=4.0, lr=1e-5)
    few, every = (make("gram, by torch", setting, images, (0, 1, 2), torch.float32) for _ in range(2))
    twin = train_one(setting, images.inputs, images.targets, 0)
    fractions = []
    for epoch in range(30):
        few.active = 0.0  # then epoch() measures it
        advance(few, setting, (0, 1, 2), epoch, 60)
        fractions.append(few.active)
        every.active = 1.0
        add = every.add_rows

        def all_rows(a, index, c, add=add):
            every.measure, every.active = False, 1.0
            return add(a, index, c)

        every.add_rows = all_rows
        advance(every, setting, (0, 1, 2), epoch, 60)
        every.add_rows = add
        exact, _ = next(twin)
        assert torch.equal(few.state["a"], every.state["a"])
        assert torch.allclose(few.weights()[0].double(), exact, atol=5e-5)  # with omega = 200 roundings grow quickly
    assert min(fractions) < 0.5  # the branch was taken


def test_the_loss_is_a_bound_only_where_it_is_too_large(images, make, advance):
    setting = SETTINGS["sgd-slow"].replace(batch_size=20, lr=1e-4, omega1=0.05, tanh_beta1=0.05, tolerance=1e-3)
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


def test_the_distance_is_a_bound_only_where_it_is_too_large(images, make, advance):
    setting = SETTINGS["rsgd-fast"].replace(batch_size=20, num_replicas=3, gamma0=20.0, gamma1=0.1, tolerance=1e-4)
    gram, direct = (make(form, setting, images, (0, 1, 2)) for form in ("gram", "direct"))
    bounds = 0
    for epoch in range(60):
        for form in (gram, direct):
            advance(form, setting, (0, 1, 2), epoch, 60)
        found, exact, expected = gram.distance(), gram.distance(exact=True), direct.distance()
        assert torch.allclose(exact, expected, rtol=1e-6)
        assert (found <= exact * (1 + 1e-9)).all()
        close = (found - exact).abs() <= 1e-9 * exact
        assert ((found >= setting.tolerance) | close).all()
        bounds += int((~close).sum())
    assert bounds > 10 and (exact < setting.tolerance).any()
