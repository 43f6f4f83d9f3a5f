"""The family of outer optimizers on one picture: where w' goes and where w goes, on a loss of two weights.

    python benchmarks/family.py                                         docs/family.png, from docs/family.csv
    python benchmarks/family.py --compute                               docs/family.csv, a few seconds

The loss is a narrow valley, (w_1^2 + 30 w_2^2) / 2, with gradients that have noise of their own (seeded). Every row of
docs/family.md takes the same number of gradients from the same start.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
from torch import nn

import wideflat

ROOT = Path(__file__).resolve().parent.parent
TABLE, FIGURE = ROOT / "docs" / "family.csv", ROOT / "docs" / "family.png"
STEPS, L, RATE = 60, 10, 0.02
CURVATURE, START, NOISE = torch.tensor([1.0, 30.0]), torch.tensor([4.0, 1.0]), 6.0


class Weights(nn.Module):
    """Two weights, to be a replica."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(START.clone())


def gradients(models: list[Weights], t: int) -> None:
    for a, model in enumerate(models):
        generator = torch.Generator().manual_seed(1000 * t + a)
        model.w.grad = CURVATURE * model.w.detach() + NOISE * torch.randn(2, generator=generator)


def sgd(models: list[Weights]) -> torch.optim.Optimizer:
    return torch.optim.SGD([model.w for model in models], lr=RATE)


def outer_loops() -> dict[str, tuple[int, object]]:
    """Of each row: how many replicas, and what makes its optimizer of them."""
    entropic = {"inner_steps": L, "outer_lr": 0.67, "outer_momentum": 0.67}
    return {
        "SGD": (1, sgd),
        "Lookahead": (1, lambda m: wideflat.Lookahead([m[0].w], lr=0.5, inner_lr=RATE, inner_steps=L)),
        "SNOO": (1, lambda m: wideflat.SNOO(sgd(m), **entropic)),
        "Entropic, pull 3": (1, lambda m: wideflat.Entropic(sgd(m), pull=3.0, **entropic)),
        "Entropy-SGD": (
            1,
            lambda m: wideflat.EntropySGD([m[0].w], lr=1.0, inner_lr=RATE, inner_steps=L, gamma=10.0, epsilon=0.0),
        ),
        "DiLoCo, 3 replicas": (3, lambda m: wideflat.DiLoCo(sgd(m), replicas=as_replicas(m), **entropic)),
    }


def as_replicas(models: list[Weights]) -> wideflat.Replicas:
    given = iter(models)
    return wideflat.Replicas(lambda: next(given), len(models))


def compute() -> None:
    rows = []
    for name, (replicas, make) in outer_loops().items():
        models = [Weights() for _ in range(replicas)]
        opt = make(models)
        for t in range(STEPS + 1):
            centers = [opt.state[m.w].get("center", m.w) if hasattr(opt, "center") else m.w for m in models]
            at_center = getattr(opt, "at_center", True)
            for a, (model, center) in enumerate(zip(models, centers, strict=True)):
                w = model.w if at_center else center
                rows.append([name, t, a, *model.w.tolist(), *w.tolist()])
            gradients(models, t)
            opt.step()
    with TABLE.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["row", "step", "replica", "explorer_1", "explorer_2", "center_1", "center_2"])
        table.writerows([*row[:3], *(f"{value:.6g}" for value in row[3:])] for row in rows)


def draw() -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    with TABLE.open() as file:
        rows = list(csv.DictReader(file))
    names = list(dict.fromkeys(row["row"] for row in rows))
    figure, axes = plt.subplots(2, 3, figsize=(11, 5.4), sharex=True, sharey=True, layout="constrained")
    x, y = torch.meshgrid(torch.linspace(-1.2, 4.6, 80), torch.linspace(-1.6, 1.6, 80), indexing="ij")
    loss = (x**2 + 30 * y**2) / 2
    for name, ax in zip(names, axes.flat, strict=True):
        ax.contour(x, y, loss, levels=[0.25, 1, 3, 8, 20, 40], colors="#c8d2dc", linewidths=0.8)
        mine = [row for row in rows if row["row"] == name]
        for replica in sorted({row["replica"] for row in mine}):
            way = [row for row in mine if row["replica"] == replica]
            ax.plot(*([float(row[f"explorer_{k}"]) for row in way] for k in (1, 2)), color="#7aa6c8", lw=0.9)
        if name != "SGD":
            first = [row for row in mine if row["replica"] == "0" and int(row["step"]) % L == 0]
            ax.plot(
                *([float(row[f"center_{k}"]) for row in first] for k in (1, 2)), "o-", color="#b4541a", ms=3.5, lw=1.4
            )
        ax.plot(0, 0, "+", color="#1b2733")
        ax.set_title(name, fontsize=10)
    figure.supxlabel("$w_1$ (curvature 1)", fontsize=9)
    figure.supylabel("$w_2$ (curvature 30)", fontsize=9)
    figure.savefig(FIGURE, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compute", action="store_true", help="the table anew")
    if parser.parse_args().compute:
        compute()
    draw()
