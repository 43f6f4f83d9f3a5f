"""Replicated-SGD: replicas that start apart, and attract each other's gradients to their mean."""

from twins import compare, replicated


def test_it_is_its_definition():
    compare("rsgd", lambda twin: replicated(twin, "barycenter"))
