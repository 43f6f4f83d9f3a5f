"""Parle is Algorithm 1 in every replica, and they attract each other whenever a cycle has ended."""

from twins import compare, entropic


def test_it_is_its_definition():
    compare("parle", lambda twin: entropic(twin, twin.gamma, twin.preset.alpha, coupled=True))
