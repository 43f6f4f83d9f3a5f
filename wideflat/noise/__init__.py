"""Gaussian noise on the weights of a network: how large it is for each, and how it gets in at little cost."""
