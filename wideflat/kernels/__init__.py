"""Loops in C, and what torch does in their place."""
