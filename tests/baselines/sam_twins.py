"""The boxes of the papers of SAM's family, transcribed; the classes that they are the twins of; ways to compare."""

import copy
from functools import partial

import torch
from small_regression import loss_of, make_model, same, step
from torch import nn

import wideflat

RATE, RHO = 0.05, 0.1


class Twin:
    """One network as one vector, in float64, and plain SGD. The box of a paper is a method: the step's direction."""

    def __init__(self, model):
        self.model = copy.deepcopy(model)
        self.w = nn.utils.parameters_to_vector(self.model.parameters()).detach()
        self.memory, self.t = None, 0

    def gradient(self, w, batch):
        nn.utils.vector_to_parameters(w, self.model.parameters())
        grads = torch.autograd.grad(loss_of(self.model, batch), list(self.model.parameters()))
        return nn.utils.parameters_to_vector(grads)

    def step(self, box, batch, **settings):
        self.w = self.w - RATE * getattr(self, box)(self.w, batch, **settings)
        self.t += 1

    def sam(self, w, batch):
        g = self.gradient(w, batch)
        return self.gradient(w + RHO * g / g.norm(), batch)

    def asam(self, w, batch, eta=0.01):
        g, t = self.gradient(w, batch), w.abs() + eta
        return self.gradient(w + RHO * t**2 * g / (t * g).norm(), batch)

    def gsam(self, w, batch, alpha=0.4):
        g = self.gradient(w, batch)
        p = self.gradient(w + RHO * g / g.norm(), batch)
        parallel = (g @ p) / (p @ p) * p
        return p - alpha * (g - parallel)

    def friendly(self, w, batch, sigma=1.0, decay=0.9):
        g = self.gradient(w, batch)
        if self.t == 0:
            self.memory, d = g, g
        else:
            self.memory = decay * self.memory + (1 - decay) * g
            d = g - sigma * self.memory
        return self.gradient(w + RHO * d / d.norm(), batch)

    def look(self, w, batch, period=3, alpha=0.7):
        g = self.gradient(w, batch)
        if self.t % period:
            return g + alpha * g.norm() / self.memory.norm() * self.memory
        s = self.gradient(w + RHO * g / g.norm(), batch)
        cosine = (g @ s) / (g.norm() * s.norm())
        self.memory = s - s.norm() * cosine * g / g.norm()
        return s


FAMILY = {
    "sam": partial(wideflat.SAM, rho=RHO),
    "asam": partial(wideflat.ASAM, rho=RHO),
    "gsam": partial(wideflat.GSAM, rho=RHO),
    "friendly": partial(wideflat.FriendlySAM, rho=RHO),
    "look": partial(wideflat.LookSAM, rho=RHO, period=3),
}


def compare_with_box(name, **settings):
    """Six steps with these settings are those of the box with them."""
    torch.manual_seed(0)
    model = make_model()
    twin, opt = Twin(model), FAMILY[name].func(model.parameters(), rho=RHO, lr=RATE, **settings)
    for t in range(6):
        step(opt, model, t)
        twin.step(name, t, **settings)
        torch.testing.assert_close(nn.utils.parameters_to_vector(model.parameters()).detach(), twin.w)


def peer_step(peer, model, t):
    peer.zero_grad()
    loss_of(model, t).backward()
    peer.first_step(zero_grad=True)
    loss_of(model, t).backward()
    peer.second_step(zero_grad=True)


def compare_with_peer(make, make_peer, model=None, **settings):
    """Eight steps are those of another implementation, which takes norms in single precision."""
    torch.manual_seed(0)
    ours = make_model() if model is None else model()
    theirs = copy.deepcopy(ours)
    settings |= {"rho": RHO, "lr": RATE, "momentum": 0.9}
    opt, peer = make(ours.parameters(), **settings), make_peer(theirs.parameters(), torch.optim.SGD, **settings)
    for t in range(8):
        step(opt, ours, t)
        peer_step(peer, theirs, t)
        same(ours, theirs, rtol=1e-5, atol=1e-6)


def compare_with_sam(make, rho=RHO):
    """Five steps are those of SAM."""
    torch.manual_seed(0)
    ours = make_model()
    theirs = copy.deepcopy(ours)
    opt, other = make(ours.parameters(), rho=rho, lr=RATE), wideflat.SAM(theirs.parameters(), rho=RHO, lr=RATE)
    for t in range(5):
        step(opt, ours, t)
        step(other, theirs, t)
        same(ours, theirs, rtol=1e-7, atol=1e-8)
