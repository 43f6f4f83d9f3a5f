"""The naive twin of ``wideflat.volume.walks``: the algorithm transcribed, numpy in float64, explicit loops.

Only the numbers drawn are taken from the same streams; nothing else is shared.
"""

import hashlib
import math

import numpy as np
import torch


def stream(seed, *what):
    key = (int(seed), *what)
    number = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1
    return torch.Generator().manual_seed(number), number


def gaussian(generator, size):
    return torch.empty(size, dtype=torch.float64).normal_(generator=generator).numpy()


def uniform(generator):
    return torch.rand((), generator=generator).item()


def walk(energy, xi, betas, burns, keep, eps, seed):
    """One chain: a list of dictionaries of traces, one a node."""

    def V(x):
        value, gradient = energy.gradient(torch.tensor(x))
        return value, gradient.numpy()

    v, g = V(xi)
    nodes, kappa = [], None
    for j, beta in enumerate(betas):
        if kappa is not None:
            eps = 1 / math.sqrt(1 / 1.2**2 + beta * kappa)
        log_eps, trace = [], {"V": [], "pull": [], "virial": [], "accept": [], "burn": []}
        for t in range(burns[j] + keep):
            generator, _ = stream(seed, j, t)
            angle = math.pi / 8 + (math.pi / 2 - math.pi / 8) * uniform(generator)
            steps = min(100, max(1, math.ceil(angle / eps - 0.25)))
            h = min(eps, angle / steps)
            p = gaussian(generator, len(xi))
            x1, p1, v1, g1 = xi.copy(), p.copy(), v, g
            for _ in range(steps):
                p1 = p1 - h / 2 * beta * g1
                x1, p1 = x1 * math.cos(h) + p1 * math.sin(h), p1 * math.cos(h) - x1 * math.sin(h)
                v1, g1 = V(x1)
                p1 = p1 - h / 2 * beta * g1
            # the Hamiltonian itself, of which the library sums increments
            dH = (x1 @ x1 + p1 @ p1) / 2 + beta * v1 - (xi @ xi + p @ p) / 2 - beta * v
            accept = min(1.0, math.exp(-dH))
            if uniform(generator) < accept:
                xi, v, g = x1, v1, g1
            if t < burns[j]:
                eps = min(1.2, eps * math.exp((math.exp(-abs(dH)) - 0.7) / (1 + 0.15 * t)))
                log_eps.append(math.log(eps))
                trace["burn"].append(v)
                if t == burns[j] - 1:
                    second = log_eps[len(log_eps) // 2 :]
                    eps = math.exp(sum(second) / len(second))
            else:
                trace["V"].append(v)
                trace["pull"].append(xi @ g)
                trace["virial"].append(xi @ xi - len(xi) + beta * (xi @ g))
                trace["accept"].append(accept)
        kappa = max(0.0, 1 / eps**2 - 1 / 1.2**2) / beta
        nodes.append(trace)
    return nodes


def tau(chains):
    """Geyer's initial positive sequence about one mean; a list of chains."""
    mean = np.mean(chains)
    m = len(chains[0])
    f = [sum((c[t] - mean) * (c[t + k] - mean) for c in chains for t in range(m - k)) for k in range(m)]
    total, k = 0.0, 0
    while k + 1 < m and f[k] + f[k + 1] >= 0:
        total += (f[k] + f[k + 1]) / f[0]
        k += 2
    return max(1.0, 2 * total - 1)


def variance_of_means(nodes):
    """For each node, a list of chains: the variance of its mean and the degrees of freedom."""
    taus = [tau(chains) for chains in nodes]
    found = []
    for chains, t in zip(nodes, taus, strict=True):
        n = max(2.0, np.size(chains) / max(t, np.mean(taus)))
        found.append((np.mean((np.array(chains) - np.mean(chains)) ** 2) / (n - 1), n - 1))
    return found


def second_opinion(energy, v0, sigma, seed, log_z, stderr, top):
    """log Z from points alone, its error, and what it adds to that of the chains' value."""

    def counting(v):
        w = [math.exp(-energy.beta * (x - min(v))) for x in v]
        return sum(w) ** 2 / sum(x**2 for x in w)

    v = list(v0)
    while counting(v0) >= max(4, len(v0) / 32) and counting(v) < 64 and len(v) < 1024:
        wanted = min(1024, math.ceil(len(v) * min(4.0, max(1.25, 64 / counting(v)))))
        while len(v) < wanted:
            generator = stream(seed, "point", repr(sigma), len(v))[0]
            v.append(energy.value(torch.tensor(gaussian(generator, energy.size))))
    value = math.log(sum(math.exp(-energy.beta * x) for x in v) / len(v))
    error = math.sqrt(max(0.0, 1 / counting(v) - 1 / len(v)))
    below = sum(x < sorted(v)[2] for x in top) / len(top)
    if counting(v) < 16:
        return math.nan, math.nan, 0.0
    return value, error, max(0.0, abs(value - log_z) - math.hypot(error, stderr)) if below <= 0.5 else 0.0


def free_entropy(energy, sigma=1.0, chains=2, burn=12, keep=18, points=128, seed=0):
    """log Z, stderr, dof, gap, gap_stderr, drift, quadrature, d*/N and the lower and upper bound."""
    beta, N = energy.beta, energy.size
    v0 = np.array(
        [energy.value(torch.tensor(gaussian(stream(seed, "point", repr(sigma), i)[0], N))) for i in range(points)]
    )

    def ess(b):
        return sum(np.exp(-b * (v0 - min(v0)))) ** 2 / sum(np.exp(-2 * b * (v0 - min(v0))))

    low, high = 1e-12 * beta, beta  # the largest beta at which two thirds of the points count
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if ess(middle) >= points * 2 / 3 else (low, middle)
    weight = np.exp(-low * v0)
    weight = weight / np.mean(weight)
    v_low = np.mean(weight * v0)
    length = math.log(beta / low)
    K = 4 if length <= 2 else 6 if length <= 5 else 8
    betas = [low * math.exp(length * (1 - math.cos(math.pi * k / K)) / 2) for k in range(K + 1)]
    omega = []
    for k in range(K + 1):  # Clenshaw-Curtis by its sum of cosines
        c = sum((1 if j in (0, K) else 2) / (1 - j * j) * math.cos(j * k * math.pi / K) for j in range(0, K + 1, 2))
        omega.append(length * c / K / (2 if k in (0, K) else 1) * betas[k])
    sides = {}
    for side in ("up", "down"):
        sides[side] = []
        for r in range(chains):
            _, number = stream(seed, "chain", repr(sigma), f"{side} {r}")
            if side == "up":
                start = gaussian(stream(number, "start")[0], N)
                nodes = walk(energy, start, betas[1:], [burn] * K, keep, 1.0, number)
            else:
                nodes = walk(energy, np.zeros(N), betas[:0:-1], [3 * burn] + [burn] * (K - 1), keep, 0.1, number)[::-1]
            sides[side].append(nodes)
    every = sides["up"] + sides["down"]
    totals = [-sum(omega[k + 1] * np.mean(nodes[k]["V"]) for k in range(K)) for nodes in every]
    base = math.log(np.mean(np.exp(-low * v0))) - omega[0] * v_low
    parts = {}
    for name, group in (("up", sides["up"]), ("down", sides["down"]), ("both", every)):
        found = variance_of_means([[nodes[k]["V"] for nodes in group] for k in range(K)])
        parts[name] = [(omega[k + 1] ** 2 * var, nu) for k, (var, nu) in enumerate(found)]
    node_sum = sum(part for part, _ in parts["both"])
    statistical2 = max(node_sum, np.var(totals, ddof=1) / len(totals))
    statistical2 += np.var(weight - omega[0] * weight * (v0 - v_low), ddof=1) / points
    gap = np.mean(totals[chains:]) - np.mean(totals[:chains])
    gap_stderr = math.sqrt(sum(part for name in ("up", "down") for part, _ in parts[name]))
    lam = [betas[0] * v_low] + [betas[k + 1] * np.mean([nodes[k]["V"] for nodes in every]) for k in range(K)]
    quadrature = 0.0
    for j in range(K - K // 4, K + 1):
        t = sum((0.5 if k in (0, K) else 1) * lam[k] * math.cos(math.pi * j * k / K) for k in range(K + 1)) * 2 / K
        quadrature += length * abs(t * (0.5 if j in (0, K) else 1)) / (K**2 - 1)
    halves = [
        np.mean([np.mean(n[k]["V"][keep // 2 :]) - np.mean(n[k]["V"][: keep // 2]) for n in every]) for k in range(K)
    ]
    log_z = base + np.mean(totals)
    top = [v for nodes in every for v in nodes[-1]["V"]]
    burn_in = [v for nodes in sides["down"] for v in nodes[-1]["burn"]]
    inside = sum(v < min(top) for v in burn_in)
    left = math.log(1 + inside / (len(top) + len(burn_in) - inside))
    stderr = math.sqrt(statistical2 + quadrature**2 + (max(0, abs(gap) - gap_stderr) / 2) ** 2 + left**2)
    points_log_z, points_stderr, more = second_opinion(energy, v0, sigma, seed, log_z, stderr, top)
    return {
        "log_z": log_z,
        "stderr": math.hypot(stderr, more),
        "points_log_z": points_log_z,
        "points_stderr": points_stderr,
        "dof": node_sum**2 / sum(part**2 / nu for part, nu in parts["both"]),
        "gap": gap,
        "gap_stderr": gap_stderr,
        "drift": -sum(omega[k + 1] * halves[k] for k in range(K)),
        "quadrature": quadrature,
        "lower": -beta * np.mean(v0),
        "upper": -lam[-1],
        "ratio": 1 - beta / N * np.mean([nodes[-1]["pull"] for nodes in every]),
    }
