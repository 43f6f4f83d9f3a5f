"""More public names with arguments that are right: the rest of the family, and what results and optimizers can do."""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import wideflat

sys.path.insert(0, str(Path(__file__).parent))
from doors import Door, committee, couple, data, measured, network, pairs, steps, weights

FOLDER = Path(tempfile.mkdtemp())


def around_sgd(kind: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    """An optimizer around another one."""
    return lambda **settings: kind(torch.optim.SGD(weights(), lr=0.1), **{**fixed, **settings})


def diloco(kind: Callable[..., Any]) -> Callable[..., Any]:
    """One of two replicas in one process."""

    def make(**settings: Any) -> Any:
        replicas = wideflat.Replicas(lambda: nn.Linear(2, 1), num_replicas=2, independent=False)
        return kind(torch.optim.SGD(replicas.parameters(), lr=0.1), replicas=replicas, **settings)

    return make


@functools.cache
def result(name: str) -> Any:
    """Something measured, of every kind, once."""
    few: dict[str, Any] = {"progress": False, "seed": 0}
    other: dict[str, Any] = {"progress": False, "seed": 1}
    makers: dict[str, Callable[[], Any]] = {
        "energy": lambda: wideflat.local_energy(network(), data(), [0.0, 0.1, 0.2], max_passes=2, **few),
        "spectrum": lambda: wideflat.spectrum(network(), data(), probes=2, steps=3, top=1, **few),
        "another spectrum": lambda: wideflat.spectrum(network(), data(), probes=2, steps=3, top=1, **other),
        "shift": lambda: wideflat.shift_profile(network(), data(), quantize=[4, 8], max_passes=1, **few),
        "slice": lambda: wideflat.slices(network(), data(), positions=[-0.1, 0.0, 0.1], **few),
        "entropy": lambda: wideflat.local_entropy(**committee(), deltas=[0.1, 0.2]),
        "volume": lambda: wideflat.free_entropy(network(), data(), [0.1], chains=1, samples=4, burn=2, points=8,
                                                quick=True, **few),
        "card": lambda: wideflat.card(network(), data(), quick=True, examples=8, **few),
    }  # fmt: skip
    return makers[name]()


def of(name: str, method: str) -> Callable[..., Any]:
    """A method of a result."""
    return lambda **arguments: getattr(result(name), method)(**arguments)


def from_state(make: Callable[[], Any]) -> Door:
    """What a state dict can be spoilt to: each of its entries is an argument."""

    def load(**state: Any) -> None:
        made = make()
        made.load_state_dict(state)
        if isinstance(made, torch.optim.Optimizer):
            steps(made, {})

    return Door(load, lambda: stepped(make()).state_dict())


def stepped(made: Any) -> Any:
    """After a few steps, so that there is a state."""
    if isinstance(made, torch.optim.Optimizer):
        steps(made, {})
    return made


def sam_like(kind: Callable[..., Any], **more: Any) -> Door:
    return Door(kind, lambda: {"params": weights(), "base": torch.optim.SGD, "rho": 0.05, "lr": 0.1, **more}, steps)


def saved(name: str, suffix: str) -> Path:
    """A file of a result, to be read again."""
    path = FOLDER / f"{name}{suffix}"
    if not path.exists():
        result(name).save(path)
    return path


MORE_DOORS: dict[str, Door] = {
    "ASAM": sam_like(wideflat.ASAM, eta=0.01),
    "GSAM": sam_like(wideflat.GSAM, alpha=0.4, rho_min=None, lr_min=0.0, lr_max=None),
    "FriendlySAM": sam_like(wideflat.FriendlySAM, sigma=1.0, decay=0.9),
    "LookSAM": sam_like(wideflat.LookSAM, period=2, alpha=0.7),
    "SAM, more": sam_like(wideflat.SAM, adaptive=False, eta=0.01, model=None, perturb_dtype=None),
    "SNOO": Door(around_sgd(wideflat.SNOO), lambda: {"inner_steps": 2, "outer_lr": 0.67, "outer_momentum": 0.6}, steps),
    "DiLoCo": Door(diloco(wideflat.DiLoCo), lambda: {"mesh": None, "manager": None, "inner_steps": 2, "outer_lr": 0.7,
                                                     "outer_momentum": 0.9, "pull": 0.0}),
    "StreamingDiLoCo": Door(diloco(wideflat.StreamingDiLoCo), lambda: {"fragments": 2, "inner_steps": 2}),
    "TargetDistance": Door(
        wideflat.TargetDistance,
        lambda: {"optimizer": wideflat.EntropySGD(weights(), epsilon=0.0), "ratio": 0.1, "gain": 1.0},
        lambda target, arguments: target.load_state_dict(target.state_dict()),
    ),
    "EntropySGD, more": Door(
        wideflat.EntropySGD,
        lambda: {"params": weights(), "inner_steps": 2, "outer_nesterov": None, "outer_weight_decay": None,
                 "inner_state": None, "state_dtype": torch.float32, "state_device": None, "rounding": "kept",
                 "maximize": False, "foreach": None, "differentiable": False},
        steps,
    ),
    "Focusing, more": Door(
        wideflat.Focusing,
        lambda: {"target": wideflat.EntropySGD(weights()), "total": 5, "gamma0": 0.1, "gamma_max": 1.0, "every": 1},
        lambda focusing, arguments: focusing.step(),
    ),
    "ReplicaCoupling, more": Door(
        wideflat.ReplicaCoupling,
        lambda: {"replicas": (chosen := pairs()), "mesh": None, "gamma": 0.1, "mode": "proximal", "period": 1,
                 "optimizer": torch.optim.SGD(chosen.parameters(), lr=0.1)},
        couple,
    ),
    "ReplicaCoupling.initial_gamma": Door(
        lambda losses: wideflat.ReplicaCoupling(pairs()).initial_gamma(losses), lambda: {"losses": [1.0, 2.0]}
    ),
    "Replicas, more": Door(
        wideflat.Replicas,
        lambda: {"make_model": lambda: nn.Linear(2, 1), "independent": True, "vectorize": "auto",
                 "share_frozen": False},
    ),
    "Replicas.barycenter": Door(lambda buffers: pairs().barycenter(buffers), lambda: {"buffers": "average"}),
    "Replicas.ensemble": Door(
        lambda inputs: wideflat.Replicas(lambda: nn.Linear(2, 3), num_replicas=2).ensemble(inputs),
        lambda: {"inputs": torch.ones(3, 2)},
    ),
    "Replicas.own": Door(lambda model: pairs().own(model), lambda: {"model": pairs()[0]}),
    "Replicas.loss": Door(
        lambda batches, criterion: pairs().loss(batches, criterion),
        lambda: {"batches": [(torch.ones(3, 2), torch.ones(3, 1))] * 2, "criterion": nn.functional.mse_loss},
    ),
    "EntropySGD.load_state_dict": from_state(lambda: wideflat.EntropySGD(weights(), inner_steps=2)),
    "Entropic.load_state_dict": from_state(around_sgd(wideflat.Entropic, inner_steps=2)),
    "SAM.load_state_dict": from_state(lambda: wideflat.SAM(weights(), lr=0.1)),
    "Focusing.load_state_dict": from_state(lambda: wideflat.Focusing(wideflat.EntropySGD(weights()), total=5)),
    "ReplicaCoupling.load_state_dict": from_state(lambda: wideflat.ReplicaCoupling(pairs(), gamma=0.1)),
    "spectrum": Door(
        wideflat.spectrum,
        measured(matrix="hessian", probes=2, steps=3, top=1, scale="relative", metric="loss", batch_norm="eval",
                 parameters="all", seed=0, batch_size=8, forward=None),
        lambda found, arguments: str(found),
    ),
    "layer_spectra": Door(
        wideflat.layer_spectra,
        measured(layers=None, matrix="hessian", probes=2, steps=2, top=1, scale="relative", metric="loss", seed=0),
    ),
    "local_energy, more": Door(
        wideflat.local_energy,
        measured(sigmas=[0.1], scale="relative", common_noise=True, forward=None, augment=None, calibration=8,
                 max_passes=1),
    ),
    "worst_case, more": Door(wideflat.worst_case, measured(sigmas=[0.1], ball="l2", restarts=0, batch_size=8)),
    "free_entropy, more": Door(
        wideflat.free_entropy,
        measured(sigmas=[0.1], parameters="all", chains=1, samples=4, burn=2, points=8, quick=True, forward=None,
                 batch_norm="eval", on_errors="refuse", solution_beta=None, checkpoint=None),
    ),
    "local_entropy, more": Door(
        wideflat.local_entropy,
        lambda: {**committee(), "deltas": [0.1], "compare": False, "on_errors": "keep", "dtype": torch.float64,
                 "tolerance": None, "particles": 4, "runs": 2, "sweeps": 1, "seed": 0},
    ),
    "card": Door(
        wideflat.card,
        measured(title="", quick=True, minutes=None, against=None, metric="error", loss="loss", batch_norm="eval",
                 parameters="all", examples=8, seed=0, forward=None),
    ),
    "plot": Door(wideflat.plot, lambda: {"labels": None, "ax": None, "a": result("energy")}),
    "LocalEnergy.certified": Door(of("energy", "certified"), lambda: {"shift": 0.1, "confidence": 0.95}),
    "LocalEnergy.compare": Door(
        of("energy", "compare"), lambda: {"other": result("energy"), "force": False, "baseline_tolerance": 0.01}
    ),
    "LocalEnergy.from_dict": Door(wideflat.LocalEnergy.from_dict, lambda: {"content": result("energy").to_dict()}),
    "LocalEnergy.from_dict, entries": Door(
        lambda **content: wideflat.LocalEnergy.from_dict(content), lambda: result("energy").to_dict(),
        lambda energy, arguments: str(energy),
    ),
    "LocalEnergy.interval": Door(of("energy", "interval"), lambda: {"confidence": 0.95}),
    "LocalEnergy.sigma_at": Door(of("energy", "sigma_at"), lambda: {"amount": 0.05, "confidence": 0.95}),
    "LocalEnergy.load": Door(wideflat.LocalEnergy.load, lambda: {"path": saved("energy", ".json")}),
    "LocalEnergy.plot": Door(of("energy", "plot"), lambda: {"ax": None, "label": None, "spread": False}),
    "Spectrum.density": Door(of("spectrum", "density"), lambda: {"points": None, "width": None}),
    "Spectrum.joined": Door(of("spectrum", "joined"), lambda: {"other": result("another spectrum")}),
    "Spectrum.mean": Door(of("spectrum", "mean"), lambda: {"function": abs}),
    "Spectrum.from_dict": Door(
        lambda **content: wideflat.Spectrum.from_dict(content), lambda: result("spectrum").to_dict()
    ),
    "Spectrum.load": Door(wideflat.Spectrum.load, lambda: {"path": saved("spectrum", ".json")}),
    "ShiftProfile.from_dict": Door(
        lambda **content: wideflat.ShiftProfile.from_dict(content), lambda: result("shift").to_dict(),
        lambda shift, arguments: str(shift),
    ),
    "Slice.from_dict": Door(
        lambda **content: wideflat.Slice.from_dict(content), lambda: result("slice").to_dict(),
        lambda picture, arguments: str(picture),
    ),
    "Slice.figure": Door(of("slice", "figure"), lambda: {"kind": "surface"}),
    "Slice.plot": Door(of("slice", "plot"), lambda: {"ax": None, "levels": 4}),
    "LocalEntropy.at": Door(of("entropy", "at"), lambda: {"relative_distance": 0.05}),
    "LocalEntropy.load": Door(wideflat.LocalEntropy.load, lambda: {"path": saved("entropy", ".npz")}),
    "FreeEntropy.from_dict": Door(
        lambda **content: wideflat.FreeEntropy.from_dict(content), lambda: result("volume").to_dict(),
        lambda volume, arguments: str(volume),
    ),
    "FreeEntropy.interval": Door(of("volume", "interval"), lambda: {"level": 0.95}),
    "FreeEntropy.compare": Door(of("volume", "compare"), lambda: {"other": result("volume"), "force": True}),
    "Card.from_dict": Door(
        lambda **content: wideflat.Card.from_dict(content), lambda: result("card").to_dict(),
        lambda card, arguments: card.html(),
    ),
    "Card.get": Door(of("card", "get"), lambda: {"name": "noise"}),
    "Card.compare": Door(of("card", "compare"), lambda: {"other": result("card"), "force": False}),
    "CommitteeMachine, more": Door(
        wideflat.CommitteeMachine, lambda: {"num_inputs": 9, "generator": None, "device": None, "dtype": None}
    ),
    "CommitteeMachine.predict": Door(
        lambda x: wideflat.CommitteeMachine(9, 3).predict(x), lambda: {"x": torch.ones(2, 9)}
    ),
    "CommitteeMachine.surrogate": Door(
        lambda x, mask: wideflat.CommitteeMachine(9, 3).surrogate(x, mask),
        lambda: {"x": torch.ones(2, 9), "mask": None},
    ),
}  # fmt: skip
