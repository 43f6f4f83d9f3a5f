"""Lookahead is Algorithm 1 without pull, noise and mean, the schedule on the inner step."""

from twins import compare, entropic


def test_it_is_its_definition():
    compare("lookahead", lambda twin: entropic(twin, lambda t: 0.0, 0.0, lookahead=True))
