"""The rest of the public names: right arguments pass; wrong ones, each of a kind that was once a raw error, do not."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import pytest
import torch
from torch import nn

matplotlib.use("agg")
sys.path.insert(0, str(Path(__file__).parent))
from doors import network
from more_doors import MORE_DOORS
from room_doors import ROOM_DOORS


def within_itself() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3))
    model.add_module("again", model)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted({*MORE_DOORS, *ROOM_DOORS} - {"Card.from_dict", "Slice.figure"}))
def test_right_arguments_pass(name):
    door = {**MORE_DOORS, **ROOM_DOORS}[name]
    arguments = door.arguments()
    door.use(door.function(**arguments), arguments)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        *[(name, "other", [0.1]) for name in ("LocalEnergy.compare", "FreeEntropy.compare", "Spectrum.joined")],
        *[(name, "path", 3) for name in ("LocalEnergy.load", "Spectrum.load", "LocalEntropy.load")],
        *[(name, "path", "/dev/zero") for name in ("LocalEnergy.load", "Spectrum.load", "LocalEntropy.load")],
        *[(name, "ax", "x") for name in ("LocalEnergy.plot", "Slice.plot")],
        *[(name, "state", 5e-324) for name in ("EntropySGD.load_state_dict", "SAM.load_state_dict")],
        *[("Replicas.own", "model", 3), ("Replicas.ensemble", "inputs", "x"), ("ASAM", "rho", 2**1000)],
        *[("LocalEnergy.from_dict, entries", "mean", [1.0]), ("Slice.from_dict", "positions", 3)],
        *[("local_energy, more", "sigmas", iter(lambda: 0.1, None)), ("DiLoCo", "pull", "x")],
        *[("local_energy, more", "model", within_itself()), ("local_energy, more", "parameters", "(" * 2000)],
        *[("local_energy, more", "sigmas", torch.tensor(0.1).expand(2**40)), ("spectrum", "seed", 10**400)],
        *[("LocalEnergy.from_dict, entries", "mean", range(10**12)), ("Focusing.load_state_dict", "kind", 3)],
        *[("FreeEntropy.from_dict", "points", [{"sigma": None}]), ("EntropySGD, more", "state_device", "meta")],
        *[("Replicas.loss", "batches", [(torch.ones(3, 7), torch.ones(3, 1))] * 2), ("plot", "labels", range(10**12))],
        *[("ReplicaCoupling, more", "gamma", 1e308), ("local_energy, more", "scale", {"0.weight": "x"})],
        *[(name, "params", iter(lambda: 0.1, None)) for name in ("ASAM", "EntropySGD, more")],
        *[(name, "path", 1) for name in ("files.sha256", "Run.open", "data.from_npz")],  # 1 is what is printed to
        *[("Run.append", "table", "../metrics"), ("Run.append", "row", {"net": network()})],
        *[("Run.result", "epoch", 0.5), ("Batches.batch", "epoch", -1.5), ("Batches", "seed", "x")],
        *[("committee.wrong_patterns", name, torch.ones(2, 2)) for name in ("weight", "inputs", "targets")],
        *[("Preset.with_data", "data", "cifar10"), ("configuration", "options", 3), ("legendre", "log_z", 0.5)],
        *[("Augmentation()", name, [0.5]) for name in ("pixels", "mean", "std")],
        *[("with_center", "optimizers", iter(lambda: 0.1, None)), ("choose_device", "name", "cuda:99")],
        *[("lightning.load_state_dict", "gamma0", 3), ("TargetDistance.load_state_dict", "heard", 3)],
        *[("huggingface.EntropicAround", "inner", 0.5), ("ReplicaBatches", "num_replicas", None)],
    ],
)
def test_wrong_ones_are_refused_in_our_words(name, argument, value):
    door = {**MORE_DOORS, **ROOM_DOORS}[name]
    arguments = {**door.arguments(), argument: value}
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        door.use(door.function(**arguments), arguments)
    assert str(caught.traceback[-1].path).startswith(str(Path(__file__).parent.parent.parent / "wideflat"))
