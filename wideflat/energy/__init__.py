"""Eq. 4: how fast the error grows around any network's weights, on average, in the worst case, to second order."""
