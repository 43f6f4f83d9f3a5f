"""What the twins of the algorithms are made from: loops written from their definitions, step by step in float64.

The loops take nothing from the package but the gradients of the network: so they check the records (which setting of a
preset goes where) and the order in which a training couples, steps and focuses.
"""

import dataclasses

import torch
from torch.func import functional_call

from wideflat.algorithms import ALGORITHMS
from wideflat.data import ImageData, ImageSplit
from wideflat.presets import preset
from wideflat.training import Options, Training


class DoubleTraining(Training):
    def _network(self, a):
        return super()._network(a).double()

    def _to_format(self, x, y):
        return x.contiguous().double(), y


def make(name):
    """Three epochs of three mini-batches (times L = 3), the learning rate dropped in two of them; without noise."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (24, 3, 12, 12), dtype=torch.uint8, generator=generator)
    part = ImageSplit(pixels, torch.arange(24) % 10)
    algorithm = ALGORITHMS[name]
    settings = {"batch_size": 8, "image_size": 12, "padding": 2, "period": 2, "epsilon": 0.0}
    settings |= {"model": "vgg3x512", "model_arguments": (("widths", (3, 3, 3)), ("dropout", 0.0))}
    settings |= {"num_replicas": 3, "replica_gamma0": 0.7, "gamma_factor": 5.0} if algorithm.replicated else {}
    settings |= {"inner_steps": 3} if algorithm.inner else {}
    settings |= {} if algorithm.settings is not None and not algorithm.gammas else {"gamma0": 0.3}
    cell = dataclasses.replace(preset("cifar10-smallconvnet", name), **settings).with_epochs(3)
    data = ImageData.of("noise", tuple("0123456789"), part, part)
    return DoubleTraining(cell, data, Options(channels_last=False))


class Twin:
    """The settings of a training, and the gradients of its networks, as one vector each."""

    def __init__(self, training):
        self.training, self.preset = training, training.preset
        self.start = [flat(network) for network in training.learner.networks]

    def gradient(self, a, w, t):
        network = self.training.learner.networks[a]
        names, shapes = zip(*((name, p.shape) for name, p in network.named_parameters()), strict=True)
        w = w.clone().requires_grad_()
        pieces = [piece.view(shape) for piece, shape in zip(w.split([s.numel() for s in shapes]), shapes, strict=True)]
        x, y = self.training._batch(a, t)
        logits = functional_call(network, dict(zip(names, pieces, strict=True)), (x,))
        return torch.autograd.grad(torch.nn.functional.cross_entropy(logits, y), w)[0]

    def rate(self, t):
        return self.preset.schedule(t / self.training.steps_per_epoch)

    def gamma(self, t, prefix=""):
        gamma0, factor, kind = (getattr(self.preset, prefix + n) for n in ("gamma0", "gamma_factor", "focusing"))
        return gamma0 * factor ** (t / self.training.total_steps) if kind == "exponential" else gamma0

    def sgd(self, w, g, v, lr):
        """One step with the preset's momentum and weight decay: new weights and velocity."""
        d = g + self.preset.weight_decay * w
        v = self.preset.momentum * v + d
        return w - lr * (d + self.preset.momentum * v), v


def flat(network):
    return torch.cat([p.detach().flatten() for p in network.parameters()]).clone()


def replicated(twin, target):
    """SGD in every replica; at every K-th step K gamma (w_a - target) is added to the gradients."""
    w, v = list(twin.start), [0.0] * len(twin.start)
    center = sum(w) / len(w)
    for t in range(twin.training.total_steps):
        g = [twin.gradient(a, w_a, t) for a, w_a in enumerate(w)]
        period = twin.preset.period
        if (t + 1) % period == 0:
            mean = sum(w) / len(w)
            pulled_to = mean if target == "barycenter" else center
            g = [g_a + period * twin.gamma(t) * (w_a - pulled_to) for g_a, w_a in zip(g, w, strict=True)]
            center = center + 0.9 * (mean - center)
        for a in range(len(w)):
            w[a], v[a] = twin.sgd(w[a], g[a], v[a], twin.preset.lr * twin.rate(t))
        yield list(w), sum(w) / len(w) if target == "barycenter" else center


def entropic(twin, gamma, alpha, coupled=False, lookahead=False):
    """Algorithm 1 in every replica; with ``coupled`` they attract each other whenever a cycle has ended."""
    x, y = twin.preset, len(twin.start)
    w, outer = list(twin.start), [0.0] * y
    explorer, mean, v = list(w), list(w), [0.0] * y
    for t in range(twin.training.total_steps):
        inner_lr = x.inner_lr * (twin.rate(t) if lookahead else 1.0)
        lr = x.lr * (1.0 if lookahead else twin.rate(t))
        for a in range(y):
            g = twin.gradient(a, explorer[a], t) + gamma(t) * (explorer[a] - w[a])
            explorer[a], v[a] = twin.sgd(explorer[a], g, v[a], inner_lr)
            mean[a] = alpha * mean[a] + (1 - alpha) * explorer[a]
            if (t + 1) % x.inner_steps == 0:
                if lookahead:
                    w[a] = w[a] - lr * (w[a] - mean[a])
                else:
                    w[a], outer[a] = twin.sgd(w[a], w[a] - mean[a], outer[a], lr)
        if (t + 1) % x.inner_steps == 0:
            s, w_bar = lr * twin.gamma(t, "replica_") if coupled else 0.0, sum(w) / y
            w = [w_a - s / (1 + s) * (w_a - w_bar) for w_a in w]
            explorer, mean, v = list(w), list(w), [0.0] * y
        yield list(explorer), sum(w) / y


def compare(name, loop):
    """A training by the algorithm takes the steps of ``loop(twin)``, which yields all weights and their center."""
    training = make(name)
    twin = Twin(make(name))
    for t, (weights, center) in enumerate(loop(twin)):
        training.iterate()
        for a, (network, w) in enumerate(zip(training.learner.networks, weights, strict=True)):
            torch.testing.assert_close(flat(network), w, rtol=1e-9, atol=1e-11, msg=f"{name}, step {t}, replica {a}")
        torch.testing.assert_close(flat(training.learner.center()), center, rtol=1e-9, atol=1e-11)
    assert training.step == training.total_steps == t + 1
    assert (flat(training.learner.center()) - sum(twin.start) / len(twin.start)).norm() > 1e-3
