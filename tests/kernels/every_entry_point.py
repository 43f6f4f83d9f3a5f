"""Calls every entry point of the kernels with sizes at the edges; test_sanitizers.py runs it under the sanitizers.

Tensors are as long as they say and no longer, so that a number too many is one that a sanitizer sees. The results are
compared with torch's operations too, or with the same at other sizes.
"""

import ctypes
import itertools
import sys

import torch

import wideflat
from wideflat.kernels import library
from wideflat.kernels.committee import CommitteeKernel
from wideflat.kernels.library import compile_kernel
from wideflat.kernels.noise import GaussianNoise

SIZES = (0, 1, 15, 16, 17, 1023, 1025)
LARGE = 2**20 + 1
REALS = (torch.float32, torch.float64)


class StepParameters(ctypes.Structure):
    """As C has it."""

    _fields_ = [
        *(
            (name, ctypes.c_double)
            for name in ("lr", "momentum", "nesterov", "weight_decay", "gamma", "alpha", "noise")
        ),
        ("starting", ctypes.c_int64),
    ]


def at(size, offset, dtype, seed=0):
    """Numbers that begin ``offset`` places after the start of their memory, and end where it ends."""
    return torch.randn(size + offset, dtype=dtype, generator=torch.Generator().manual_seed(seed))[offset:]


def fill(large):
    for size, dtype, offset, threads in itertools.product((*SIZES, *large), REALS, (0, 1), (1, 2)):
        torch.set_num_threads(threads)
        noise, weights = GaussianNoise(1), at(size, offset, dtype)
        expected = noise(2, 0, size, dtype)
        assert torch.equal(noise.fill(at(size, offset, dtype), step=2), expected)
        assert torch.equal(noise.fill(at(size, 0, dtype), weights, step=2), expected * weights)
        in_place = weights.clone()
        assert torch.equal(noise.fill(in_place, in_place, step=2), expected * weights)
    torch.set_num_threads(1)


def step(lists, places, threads, stream, **parameters):
    tensors = lists[0]
    addresses = ctypes.c_void_p * len(tensors)
    numbers = ctypes.c_int64 * len(tensors)
    compile_kernel(tensors[0].dtype).step(
        ctypes.c_int64(threads),
        ctypes.c_int64(len(tensors)),
        numbers(*(t.numel() for t in tensors)),
        numbers(*places),
        ctypes.byref(StepParameters(**parameters)),
        None if stream is None else ctypes.byref(stream.source(4)),
        *(None if group is None else addresses(*(t.data_ptr() for t in group)) for group in lists),
    )


def steps(large):
    kinds = [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": 1.0}]
    cases = itertools.product(REALS, kinds, (0, 1), (True, False), (0.0, 0.2, 0.75), (1, 2), (True, False))
    for dtype, kind, starting, noisy, alpha, threads, outer in cases:
        sizes = (*SIZES, *large)
        places = [sum(sizes[:k]) + 3 * k for k in range(len(sizes))]
        made = [[at(size, 1, dtype, seed) for size in sizes] for seed in range(5)]
        before = [[t.clone() for t in group] for group in made]
        x, w, mu, v, g = made
        noise = GaussianNoise(3) if noisy and not outer else None
        parameters = {"lr": 0.1, "weight_decay": 0.01, "gamma": 0.5, "alpha": alpha, "noise": 0.2, **kind}
        velocity = v if kind else None
        mean = mu if alpha else None
        step([x, w, mean, velocity, None if outer else g], places, threads, noise, starting=starting, **parameters)
        for k, (x0, w0, mu0, v0, g0) in enumerate(zip(*before, strict=True)):
            if outer:
                moved = by_torch(w0, w0 - (mu0 if alpha else x0) + 0.01 * w0, v0, kind, 0)
                assert torch.allclose(w[k], moved, atol=1e-5) and torch.equal(x[k], w[k])
            else:
                pulled = 0 if starting else 0.5 * (x0 - w0)
                moved = by_torch(x0, g0 + 0.01 * x0 + pulled, v0, kind, starting)
                moved = moved + (0.2 * GaussianNoise(3)(4, places[k], len(x0), dtype) if noisy else 0)
                assert torch.allclose(x[k], moved, atol=1e-5)
                if not alpha:
                    assert torch.equal(mu[k], mu0)
                    continue
                assert torch.allclose(mu[k], alpha * (x0 if starting else mu0) + (1 - alpha) * moved, atol=1e-5)


def by_torch(x, d, v, kind, starting):
    if kind:
        velocity = d if starting else 0.9 * v + d
        d = d + 0.9 * velocity if "nesterov" in kind else velocity
    return x - 0.1 * d


def adam(large):
    """Entropic around AdamW by the kernel, against the box with torch's AdamW inside."""
    for dtype, threads, noisy, alpha in itertools.product(REALS, (1, 2), (True, False), (0.0, 0.75)):
        torch.set_num_threads(threads)
        runs = []
        for fused in (True, False):
            params = [torch.nn.Parameter(at(size, 0, dtype, size)) for size in (*SIZES, *large)]
            inner = torch.optim.AdamW(params, lr=0.1, fused=fused)
            opt = wideflat.Entropic(inner, inner_steps=3, pull=1.0, alpha=alpha, epsilon=0.1 * noisy)
            for t in range(5):
                for p in params:
                    p.grad = at(p.numel(), 1, dtype, t)
                opt.step()
            runs.append(params)
        assert all(torch.allclose(p, q, rtol=1e-4, atol=1e-5) for p, q in zip(*runs, strict=True))
    torch.set_num_threads(1)


def gram_of(used, dtype):
    size = -(-(used + 1) // 32) * 32
    x = at(used * 40, 0, dtype).view(used, 40) / 6
    gram = torch.zeros(size, size, dtype=dtype)
    gram[:used, :used] = x @ x.T
    return gram


def rows(_):
    for used, batch, hidden, networks, dtype in itertools.product(
        (1, 15, 17, 70), (0, 1, 17), (1, 2, 9), (0, 2), REALS
    ):
        gram = gram_of(used, dtype)
        patterns = torch.randint(used + 1, (networks, batch), generator=torch.Generator().manual_seed(0))
        c = at(networks * hidden * batch, 0, dtype).view(networks, hidden, batch)
        a = torch.zeros(networks, hidden, len(gram), dtype=dtype)
        CommitteeKernel(gram, used).add_rows(a, patterns, c)
        assert torch.allclose(a, torch.einsum("nhb,nbp->nhp", c, gram[patterns]), atol=1e-4)


def epochs(_):
    constants = {"slope": 2.0, "inside": -1.0, "outside": 0.01, "threshold": 1e-12}
    cases = itertools.product((1, 15, 16, 17, 70), (1, 16, 17), (1, 3, 5), (0, 17), REALS)
    for used, size, hidden, restarts, dtype in cases:
        gram, size = gram_of(used, dtype), min(size, used)
        kernel, width = CommitteeKernel(gram, used), len(gram)
        target = torch.zeros(width, dtype=dtype)
        target[:used] = 1 - 2.0 * (torch.arange(used) % 2)
        order = torch.arange(used).flip(0)
        a = at(restarts * hidden * width, 0, dtype).view(restarts, hidden, width) / 10
        a[..., used:] = 0
        c, m = torch.zeros_like(a), torch.ones(restarts, hidden, 1, dtype=dtype)
        orders = order.expand(restarts, 3, used).contiguous()
        distance = kernel.esgd_epoch(a, c, m, orders, target, size, pull=0.1, alpha=0.75, lr=0.5, **constants)
        assert distance.isfinite().all() and a.isfinite().all() and distance.shape == (restarts, 1)
        y = 2
        v = torch.zeros(y * restarts, hidden, -(-(3 * width + 2 * y) // 32) * 32, dtype=dtype)
        v[..., :used] = v[..., width : width + used] = 0.1
        v[..., 2 * width : 2 * width + y] = 0.5
        v[..., 3 * width + y : 3 * width + 2 * y] = 1
        orders = order.expand(y * restarts, used).contiguous()
        kernel.rsgd_epoch(v, orders, target, size, replicas=y, period=2, number=1, strength=0.3, **constants)
        assert v.isfinite().all()


if __name__ == "__main__":
    library.FLAGS = ["-O1", *library.FLAGS[1:]]  # the sanitizers' own code takes -O3 too long
    for part in (fill, steps, adam, rows, epochs):
        part([LARGE] if "--large" in sys.argv else [])
    print("no error")
