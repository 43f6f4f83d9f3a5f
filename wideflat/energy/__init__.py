"""Eq. 4: how fast the error grows around any network's weights, on average, in the worst case, to second order."""

from wideflat.energy.committees import committee_local_energy
from wideflat.energy.measure import local_energy
from wideflat.energy.profile import Interrupted, LocalEnergy
from wideflat.energy.series import LocalEnergyTrace, layer_profiles

# The functions worst_case and curvature have the names of their modules: wideflat itself exports them.
__all__ = [
    "Interrupted",
    "LocalEnergy",
    "LocalEnergyTrace",
    "committee_local_energy",
    "layer_profiles",
    "local_energy",
]
