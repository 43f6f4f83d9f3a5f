"""The gradient of SAM is the one at the worst point of a ball."""

from twins import compare


def sam(twin):
    w, v = twin.start[0], 0.0
    for t in range(twin.training.total_steps):
        g = twin.gradient(0, w, t)
        worst = w + twin.preset.rho * g / g.norm()
        w, v = twin.sgd(w, twin.gradient(0, worst, t), v, twin.preset.lr * twin.rate(t))
        yield [w], w


def test_it_is_its_definition():
    compare("sam", sam)
