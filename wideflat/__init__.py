"""Find wide flat minima of neural networks, and measure how wide and flat they are.

    opt = wideflat.EntropySGD(model.parameters(), lr=0.5, inner_lr=0.02, gamma=0.5, momentum=0.9, nesterov=True)
    loss.backward(); opt.step()                           one mini-batch a step; every fifth also moves the center
    with opt.center(): evaluate(model)

    profile = wideflat.local_energy(model, (inputs, targets), sigmas=[0.1, 0.3, 0.5])    how the error grows with noise
    volume = wideflat.free_entropy(model, (inputs, targets), sigmas=[0.3])               how much room there is

README.md has more; docs/ has a page for each.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wideflat.baselines import ASAM, EASGD, GSAM, SAM, SNOO, DiLoCo, FriendlySAM, Lookahead, LookSAM, Parle
    from wideflat.baselines import StreamingDiLoCo as StreamingDiLoCo
    from wideflat.batch_norm import refresh_batch_norm
    from wideflat.cards.card import Card
    from wideflat.cards.measuring import card
    from wideflat.committee import CommitteeMachine
    from wideflat.energy import LocalEnergy, LocalEnergyTrace, committee_local_energy, layer_profiles, local_energy
    from wideflat.entropic import Entropic
    from wideflat.entropy import LocalEntropy
    from wideflat.entropy.measure import local_entropy
    from wideflat.entropy_sgd import EntropySGD
    from wideflat.focusing import Focusing, TargetDistance, automatic_gamma0
    from wideflat.hessian.curvature import curvature
    from wideflat.hessian.eigenvalues import Spectrum
    from wideflat.hessian.spectrum import layer_spectra, spectrum
    from wideflat.landscape.shift import ShiftProfile, shift_profile
    from wideflat.landscape.slices import Slice, slices
    from wideflat.landscape.worst_case import worst_case
    from wideflat.notebook import plot
    from wideflat.replicas import ReplicaCoupling, Replicas
    from wideflat.volume.free_entropy import free_entropy
    from wideflat.volume.learning_coefficient import llc
    from wideflat.volume.volumes import FreeEntropy

__version__ = "0.2.0"

#: Where each public name is. It is imported when it is asked for: those who train need not wait for the measures.
_PLACES = {
    "EntropySGD": "entropy_sgd",
    "Entropic": "entropic",
    "Replicas": "replicas",
    "ReplicaCoupling": "replicas",
    "Focusing": "focusing.schedule",
    "automatic_gamma0": "focusing.automatic",
    "TargetDistance": "focusing.target_distance",
    "refresh_batch_norm": "batch_norm",
    "local_energy": "energy.measure",
    "LocalEnergy": "energy.profile",
    "committee_local_energy": "energy.committees",
    "layer_profiles": "energy.series",
    "LocalEnergyTrace": "energy.series",
    "worst_case": "landscape.worst_case",
    "curvature": "hessian.curvature",
    "spectrum": "hessian.spectrum",
    "layer_spectra": "hessian.spectrum",
    "Spectrum": "hessian.eigenvalues",
    "shift_profile": "landscape.shift",
    "ShiftProfile": "landscape.shift",
    "slices": "landscape.slices",
    "Slice": "landscape.slices",
    "card": "cards.measuring",
    "Card": "cards.card",
    "local_entropy": "entropy.measure",
    "LocalEntropy": "entropy.curve",
    "free_entropy": "volume.free_entropy",
    "FreeEntropy": "volume.volumes",
    "llc": "volume.learning_coefficient",
    "plot": "notebook",
    "Lookahead": "baselines.lookahead",
    "EASGD": "baselines.easgd",
    "Parle": "baselines.parle",
    "SNOO": "baselines.snoo",
    "DiLoCo": "baselines.diloco",
    "StreamingDiLoCo": "baselines.streaming_diloco",
    "SAM": "baselines.sam",
    "ASAM": "baselines.asam",
    "GSAM": "baselines.gsam",
    "FriendlySAM": "baselines.friendly_sam",
    "LookSAM": "baselines.look_sam",
    "CommitteeMachine": "committee.machine",
}

#: Rooms that are used by their names, as in ``wideflat.committee.train``.
_ROOMS = ("committee", "data", "models", "presets")

__all__ = [
    "EntropySGD",
    "Entropic",
    "Replicas",
    "ReplicaCoupling",
    "Focusing",
    "automatic_gamma0",
    "TargetDistance",
    "refresh_batch_norm",
    "local_energy",
    "LocalEnergy",
    "committee_local_energy",
    "layer_profiles",
    "LocalEnergyTrace",
    "worst_case",
    "curvature",
    "spectrum",
    "layer_spectra",
    "Spectrum",
    "shift_profile",
    "ShiftProfile",
    "slices",
    "Slice",
    "card",
    "Card",
    "local_entropy",
    "LocalEntropy",
    "free_entropy",
    "FreeEntropy",
    "llc",
    "plot",
    "Lookahead",
    "EASGD",
    "Parle",
    "SNOO",
    "DiLoCo",
    "StreamingDiLoCo",
    "SAM",
    "ASAM",
    "GSAM",
    "FriendlySAM",
    "LookSAM",
    "CommitteeMachine",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"wideflat.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'wideflat' has no attribute {name!r}")
    found = getattr(import_module(f"wideflat.{_PLACES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, *_ROOMS]
