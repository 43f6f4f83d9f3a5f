"""The baseline is its definition, with momentum, weight decay and a schedule."""

from twins import compare


def sgd(twin):
    w, v = twin.start[0], 0.0
    for t in range(twin.training.total_steps):
        w, v = twin.sgd(w, twin.gradient(0, w, t), v, twin.preset.lr * twin.rate(t))
        yield [w], w


def test_it_is_its_definition():
    compare("sgd", sgd)
