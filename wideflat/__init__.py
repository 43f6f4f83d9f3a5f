"""wideflat: find wide flat minima of neural networks, and measure how wide and flat they are."""

__version__ = "0.1.0"
