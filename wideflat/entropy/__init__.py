"""Eqs. 1 and 3: local entropy of committee machines by Belief Propagation, expectation propagation and sampling, of any
network by thermodynamic integration.
"""

from wideflat.entropy.curve import LocalEntropy
from wideflat.entropy.measure import METHODS
from wideflat.entropy.volumes import FreeEntropy

__all__ = ["METHODS", "FreeEntropy", "LocalEntropy"]
