"""Eq. 1 for any network: the volume of good weights around its own, by thermodynamic integration, with its error."""
