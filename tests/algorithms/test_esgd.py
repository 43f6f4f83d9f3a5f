"""Entropy-SGD is Algorithm 1, with focusing and the schedule on the outer step."""

from twins import compare, entropic


def test_it_is_its_definition():
    compare("esgd", lambda twin: entropic(twin, twin.gamma, twin.preset.alpha))
