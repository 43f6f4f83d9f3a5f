"""The outer optimizers of the papers, transcribed: vectors in float64, plain loops; and what is compared with them."""

import torch
from small_regression import loss_of, make_model
from torch import nn

import wideflat


def gradient(model, w, batch):
    nn.utils.vector_to_parameters(w, model.parameters())
    grads = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
    return nn.utils.parameters_to_vector(grads)


class AdamW:
    """Loshchilov and Hutter, Algorithm 2, with torch's eps outside of the root."""

    def __init__(self, lr, decay=0.01, betas=(0.9, 0.999), eps=1e-8):
        self.lr, self.decay, self.betas, self.eps = lr, decay, betas, eps
        self.t, self.m, self.v = 0, 0.0, 0.0

    def __call__(self, w, g):
        self.t += 1
        b1, b2 = self.betas
        w = w * (1 - self.lr * self.decay)
        self.m, self.v = b1 * self.m + (1 - b1) * g, b2 * self.v + (1 - b2) * g * g
        m, v = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
        return w - self.lr * m / (v.sqrt() + self.eps)


class Nesterov:
    """The outer optimizer of DiLoCo and SNOO."""

    def __init__(self, lr, momentum):
        self.lr, self.momentum, self.b = lr, momentum, None

    def __call__(self, w, d):
        self.b = d.clone() if self.b is None else self.momentum * self.b + d
        return w - self.lr * (d + self.momentum * self.b)


def snoo(model, w, steps, inner, outer, K):
    """Keep a snapshot; K steps of the base; the pseudo-gradient goes through Nesterov."""
    held = w.clone()
    for t in range(steps):
        held = inner(held, gradient(model, held, t))
        if (t + 1) % K == 0:
            w = outer(w, w - held)
            held = w.clone()
        yield held


def diloco(model, w, steps, inners, outer, H, pull=0.0, alpha=0.0):
    """Algorithm 1 of DiLoCo, for workers i = 0, ..., k - 1; with a pull and a running mean, entropic DiLoCo."""
    k = len(inners)
    held, mu = [w.clone() for _ in inners], [w.clone() for _ in inners]
    for t in range(steps):
        for i, inner in enumerate(inners):
            g = gradient(model, held[i], k * t + i)
            if t % H:
                held[i] = held[i] - pull / H * (held[i] - w)
            held[i] = inner(held[i], g)
            mu[i] = alpha * mu[i] + (1 - alpha) * held[i]
        if (t + 1) % H == 0:
            w = outer(w, sum(w - m for m in mu) / k)
            held, mu = [w.clone() for _ in inners], [w.clone() for _ in inners]
        yield held


def parle(model, ws, steps, L, lr, inner_lr, gamma, alpha, attraction):
    """Entropy-SGD in each replica; at its outer steps each goes towards their mean (the proximal form)."""
    ws = list(ws)
    held, mu = [w.clone() for w in ws], [w.clone() for w in ws]
    for t in range(steps):
        for i in range(len(ws)):
            pulled = gradient(model, held[i], t) + gamma * (held[i] - ws[i])
            held[i] = held[i] - inner_lr * pulled
            mu[i] = alpha * mu[i] + (1 - alpha) * held[i]
        if (t + 1) % L == 0:
            ws = [w - lr * (w - m) for w, m in zip(ws, mu, strict=True)]
            mean, s = sum(ws) / len(ws), lr * attraction
            ws = [(w + s * mean) / (1 + s) for w in ws]
            held, mu = [w.clone() for w in ws], [w.clone() for w in ws]
        yield held


def easgd(model, ws, steps, period, lr, rho, beta):
    """Elastic averaging, symmetric form: at every period-th step both are drawn together by what they were."""
    ws, center = list(ws), sum(ws) / len(ws)
    for t in range(steps):
        gradients = [gradient(model, w, t) for w in ws]
        if (t + 1) % period == 0:
            elastic = [w - center for w in ws]
            center = (1 - beta) * center + beta * sum(ws) / len(ws)
        else:
            elastic = [torch.zeros_like(center)] * len(ws)
        ws = [w - lr * (g + rho * e) for w, g, e in zip(ws, gradients, elastic, strict=True)]
        yield ws


OUTER = {"outer_lr": 0.6, "outer_momentum": 0.8}


def vector(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def made(seed=0):
    torch.manual_seed(seed)
    return make_model()


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01)


def replicas_from_one(num_replicas):
    torch.manual_seed(0)
    return wideflat.Replicas(make_model, num_replicas, independent=False)


def step_all(opt, replicas, t):
    """One step of all replicas, each on its own mini-batch."""
    opt.zero_grad()
    k = len(replicas)
    sum(loss_of(model, k * t + i) for i, model in enumerate(replicas)).backward()
    opt.step()
