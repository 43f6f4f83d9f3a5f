"""Eqs. 1 and 3: local entropy of committee machines by Belief Propagation, expectation propagation and sampling."""

from wideflat.entropy.curve import LocalEntropy
from wideflat.entropy.measure import METHODS

__all__ = ["METHODS", "LocalEntropy"]
