"""rSGD x y takes the steps of Replicated-SGD."""

from twins import compare, replicated


def test_it_is_its_definition():
    compare("rsgdxy", lambda twin: replicated(twin, "barycenter"))
