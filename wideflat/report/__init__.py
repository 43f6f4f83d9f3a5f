"""Figures, and the self-contained HTML page made of them."""
