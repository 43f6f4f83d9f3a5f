"""Eq. 4: how fast the error of any network grows around its weights, on average, with error bars."""

from wideflat.energy.committees import committee_local_energy
from wideflat.energy.measure import local_energy
from wideflat.energy.profile import Interrupted, LocalEnergy
from wideflat.energy.series import LocalEnergyTrace, layer_profiles

__all__ = [
    "Interrupted",
    "LocalEnergy",
    "LocalEnergyTrace",
    "committee_local_energy",
    "layer_profiles",
    "local_energy",
]
