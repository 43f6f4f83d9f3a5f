"""Elastic averaging: replicas drawn to a center that follows them."""

from twins import compare, replicated


def test_it_is_its_definition():
    compare("easgd", lambda twin: replicated(twin, "center"))
