"""Eqs. 1 and 3: local entropy of committee machines by Belief Propagation, expectation propagation and sampling."""
