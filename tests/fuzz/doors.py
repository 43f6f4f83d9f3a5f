"""The public names with arguments that are right, each to be spoilt by a fuzzer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import wideflat
from wideflat import models
from wideflat.committee import SETTINGS
from wideflat.committee import train as train_committee
from wideflat.integrations import huggingface, lightning  # now, since no import survives being ended
from wideflat.presets import preset
from wideflat.schedules import Schedule
from wideflat.training import Options


@dataclass(frozen=True)
class Door:
    """A public name: what makes its right arguments, and what is done with what it gives."""

    function: Callable[..., Any]
    arguments: Callable[[], dict[str, Any]]
    use: Callable[[Any, dict[str, Any]], Any] = lambda result, arguments: result


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(24, 4, generator=generator), torch.randint(3, (24,), generator=generator)


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(5))]


def steps(optimizer: torch.optim.Optimizer, arguments: dict[str, Any], count: int = 3) -> None:
    """A few steps, and there and back through a state dict."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum((p.float() ** 2).sum() for group in optimizer.param_groups for p in group["params"])
        loss.backward()
        return loss

    for _ in range(count):
        optimizer.step(closure)
    optimizer.load_state_dict(optimizer.state_dict())


def entropic(**settings: Any) -> torch.optim.Optimizer:
    return wideflat.Entropic(torch.optim.SGD(weights(), lr=0.1), **settings)


def pairs() -> wideflat.Replicas:
    return wideflat.Replicas(lambda: nn.Linear(2, 1), num_replicas=2)


def couple(coupling: Any, arguments: dict[str, Any]) -> None:
    for p in coupling.replicas.parameters() if hasattr(coupling, "replicas") else []:
        p.grad = torch.zeros_like(p)
    coupling.couple()
    coupling.load_state_dict(coupling.state_dict())


def committee() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.where(torch.rand(6, 9, generator=generator) < 0.5, 1.0, -1.0)
    w = torch.randn(3, 9, generator=generator)
    y = torch.where((w @ x.T).sign().sum(0) > 0, 1.0, -1.0)
    return {"weights": w, "inputs": x, "targets": y}


def measured(**more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"model": network(), "data": data(), **more, "progress": False}


DOORS: dict[str, Door] = {
    "EntropySGD": Door(
        wideflat.EntropySGD,
        lambda: {"params": weights(), "lr": 0.5, "inner_lr": 0.02, "inner_steps": 2, "gamma": 0.5, "epsilon": 1e-4,
                 "alpha": 0.75, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4, "outer_momentum": None,
                 "inner": None, "seed": 0, "fused": None},
        steps,
    ),
    "Lookahead": Door(
        wideflat.Lookahead,
        lambda: {"params": weights(), "lr": 0.5, "inner_lr": 0.1, "inner_steps": 2, "momentum": 0.9, "inner": None},
        steps,
    ),
    "SAM": Door(
        wideflat.SAM, lambda: {"params": weights(), "base": torch.optim.SGD, "rho": 0.05, "lr": 0.1}, steps
    ),
    "Entropic": Door(entropic, lambda: {"inner_steps": 2, "outer_lr": 0.67, "outer_momentum": 0.67, "pull": 1.0,
                                        "alpha": 0.0, "epsilon": 0.0, "outer": None, "inner_state": "keep", "seed": 0,
                                        "state_dtype": torch.float32, "state_device": None},
                     steps),
    "Parle": Door(
        wideflat.Parle,
        lambda: {"replicas": (chosen := pairs()), "gamma": 0.5,
                 "optimizer": [wideflat.EntropySGD(each.parameters(), inner_steps=1) for each in chosen]},
        couple,
    ),
    "Replicas": Door(
        wideflat.Replicas,
        lambda: {"make_model": lambda: nn.Linear(2, 1), "num_replicas": 2},
        lambda replicas, arguments: replicas.barycenter(),
    ),
    "ReplicaCoupling": Door(
        wideflat.ReplicaCoupling, lambda: {"replicas": pairs(), "period": 1, "gamma": 0.5, "mode": "gradient"}, couple
    ),
    "EASGD": Door(wideflat.EASGD, lambda: {"replicas": pairs(), "rate": 0.9, "period": 1, "gamma": 0.5}, couple),
    "Focusing": Door(
        wideflat.Focusing,
        lambda: {"target": wideflat.EntropySGD(weights()), "factor": 10.0, "total": 5, "kind": "exponential"},
        lambda focusing, arguments: focusing.step(),
    ),
    "Focusing.from_epochs": Door(
        wideflat.Focusing.from_epochs,
        lambda: {"target": wideflat.EntropySGD(weights()), "epochs": 2, "steps": 3, "factor": 10.0, "by": "step"},
        lambda focusing, arguments: (focusing.step(), focusing.load_state_dict(focusing.state_dict())),
    ),
    "Replicas.batches": Door(
        pairs().batches,
        lambda: {"loader": DataLoader([0, 1, 2, 3], batch_size=2), "seed": 0},
        lambda batches, arguments: (list(batches), batches.load_state_dict(batches.state_dict())),
    ),
    "ReplicaBatches.load_state_dict": Door(
        lambda **state: pairs().batches(DataLoader([0, 1, 2, 3], batch_size=2)).load_state_dict(state),
        lambda: {"epoch": 0, "position": 1, "seed": 0, "num_replicas": 2},
    ),
    "huggingface.FocusingCallback": Door(
        huggingface.FocusingCallback,
        lambda: {"factor": 10.0, "by": "step", "total": None, "kind": "exponential", "batch_norm": True},
        lambda callback, arguments: callback.state(),
    ),
    "lightning.FocusingCallback": Door(
        lightning.FocusingCallback,
        lambda: {"factor": 10.0, "by": "step", "total": None, "kind": "exponential", "batch_norm": True,
                 "forward": None},
        lambda callback, arguments: callback.load_state_dict(callback.state_dict()),
    ),
    "automatic_gamma0": Door(
        wideflat.automatic_gamma0,
        lambda: {"optimizer": wideflat.EntropySGD([w := nn.Parameter(torch.ones(2))]),
                 "closure": lambda: ((w**2).sum().backward(), (w**2).sum())[1]},
    ),
    "refresh_batch_norm": Door(
        wideflat.refresh_batch_norm, lambda: {"model": network(), "loader": [data()], "num_batches": None}
    ),
    "local_energy": Door(
        wideflat.local_energy,
        measured(sigmas=[0.1], noise="auto", metric="error", batch_norm="eval", parameters="all", max_passes=2, seed=0,
                 batch_size=8, target_stderr=None),
        lambda profile, arguments: (str(profile), profile.mean),
    ),
    "worst_case": Door(
        wideflat.worst_case,
        measured(sigmas=[0.1], noise="pass", steps=1, metric="error", objective="loss", scale="relative",
                 batch_norm="eval", parameters="all", seed=0, batch_size=8, forward=None),
        lambda profile, arguments: str(profile),
    ),
    "curvature": Door(
        wideflat.curvature,
        measured(top=2, probes=2, scale="relative", metric="loss", batch_norm="eval", parameters="all", tolerance=0.1,
                 max_iterations=100, seed=0, batch_size=8, forward=None),
        lambda result, arguments: str(result),
    ),
    "layer_profiles": Door(
        wideflat.layer_profiles,
        measured(sigmas=[0.1], layers=None, noise="auto", metric="error", max_passes=1, seed=0, batch_size=8),
    ),
    "shift_profile": Door(
        wideflat.shift_profile,
        measured(other=None, quantize=[4], prune=None, positions=None, per="tensor", metric="error", batch_norm="eval",
                 parameters=None, scale="relative", noise=True, max_passes=1, seed=0, batch_size=8, forward=None,
                 calibration=8, align=False),
        lambda profile, arguments: str(profile),
    ),
    "shift_profile to others": Door(
        wideflat.shift_profile,
        measured(other=network().state_dict(), positions=[0.0, 0.5, 1.0], align=False, noise=False, max_passes=1),
    ),
    "slices": Door(
        wideflat.slices,
        measured(directions="filter", positions=[-0.1, 0.0, 0.1], dimensions=1, metric="loss", batch_norm="eval",
                 parameters="all", seed=0, batch_size=8, forward=None),
        lambda picture, arguments: str(picture),
    ),
    "committee_local_energy": Door(wideflat.committee_local_energy, lambda: {**committee(), "sigmas": [0.1]}),
    "local_entropy": Door(
        wideflat.local_entropy,
        lambda: {**committee(), "deltas": [0.1], "method": "bp"},
        lambda curve, arguments: str(curve),
    ),
    "free_entropy": Door(
        wideflat.free_entropy,
        measured(sigmas=[0.1], measure="loss", beta=1.0, scale="relative", chains=1, samples=4, burn=2, points=8,
                 seed=0, quick=True, subset=8, subset_seed=0, batch_size=8, target_stderr=None, minutes=None),
    ),
    "llc": Door(
        wideflat.llc, measured(sigma=0.1, beta=None, chains=1, samples=4, burn=2, points=8, quick=True, probes=1,
                               lanczos_steps=2),
    ),
    "Preset": Door(
        functools.partial(dataclasses.replace, preset("cifar10-smallconvnet", "esgd")),
        lambda: {"lr": 0.5, "epochs": 2, "gamma0": 0.1, "alpha": 0.75,
                 "epsilon": 0.0, "weight_decay": 0.0, "inner_steps": 2, "num_classes": 10, "batch_size": 8,
                 "model": "smallconvnet", "schedule": Schedule(2), "momentum": 0.9, "num_replicas": 1},
        lambda cell, arguments: cell.with_epochs(3).build_model(),
    ),
    "Options": Door(
        Options, lambda: {"seed": 0, "limit_data": None, "amp": "off", "evaluate_every": 1, "batch_norm_images": 10,
                          "max_loss": 100.0}
    ),
    "CommitteeMachine": Door(
        wideflat.CommitteeMachine,
        lambda: {"num_inputs": 9, "hidden": 3, "tanh_beta": 1.0, "dropout": 0.0},
        lambda machine, arguments: machine(torch.ones(2, 9)),
    ),
    "committee.train": Door(
        train_committee,
        lambda: {"setting": SETTINGS["sgd-fast"].replace(max_epochs=3), "inputs": committee()["inputs"],
                 "targets": committee()["targets"], "seeds": [0, 1], "progress": False},
    ),
    "smallconvnet": Door(models.smallconvnet, lambda: {"num_classes": 3}),
    "resnet18": Door(models.resnet18, lambda: {"num_classes": 3, "stem": "cifar"}),
}  # fmt: skip
