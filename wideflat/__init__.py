"""wideflat: find wide flat minima of neural networks, and measure how wide and flat they are."""

from wideflat.baselines import EASGD, SAM, Lookahead, Parle
from wideflat.batch_norm import refresh_batch_norm
from wideflat.committee import CommitteeMachine
from wideflat.energy import LocalEnergy, committee_local_energy, layer_profiles, local_energy
from wideflat.energy.curvature import curvature
from wideflat.energy.shift import ShiftProfile, shift_profile
from wideflat.energy.slices import Slice, slices
from wideflat.energy.worst_case import worst_case
from wideflat.entropic import Entropic
from wideflat.entropy import FreeEntropy, LocalEntropy
from wideflat.entropy.free_entropy import free_entropy
from wideflat.entropy.learning_coefficient import llc
from wideflat.entropy.measure import local_entropy
from wideflat.entropy_sgd import EntropySGD
from wideflat.focusing import Focusing, automatic_gamma0
from wideflat.replicas import ReplicaCoupling, Replicas

__version__ = "0.1.0"

__all__ = [
    "EntropySGD",
    "Entropic",
    "Replicas",
    "ReplicaCoupling",
    "Focusing",
    "automatic_gamma0",
    "refresh_batch_norm",
    "local_energy",
    "LocalEnergy",
    "committee_local_energy",
    "layer_profiles",
    "worst_case",
    "curvature",
    "shift_profile",
    "ShiftProfile",
    "slices",
    "Slice",
    "local_entropy",
    "LocalEntropy",
    "free_entropy",
    "FreeEntropy",
    "llc",
    "Lookahead",
    "EASGD",
    "Parle",
    "SAM",
    "CommitteeMachine",
    "__version__",
]
