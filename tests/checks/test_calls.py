"""What fails inside of something of the user's says what failed, on what, in its own words."""

import pytest
import torch

from wideflat.checks.calls import called


def fails_with(error):
    def forward(x, scale=1.0):
        raise error

    return forward


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TypeError("no such operand"), TypeError),
        (ValueError("no such value"), ValueError),
        (KeyError("no such key"), RuntimeError),
        (AttributeError("no such attribute"), RuntimeError),
    ],
)
def test_the_error_names_the_function_and_its_inputs_and_keeps_its_cause(error, kind):
    with pytest.raises(kind, match=r"the metric \(forward\) fails on .*\(2, 3\).* and scale=2.0: .*no such") as caught:
        called("the metric", fails_with(error), torch.zeros(2, 3), scale=2.0)
    assert caught.value.__cause__ is error


class Doubt(RuntimeError):
    """One that somebody waits for by its name."""


@pytest.mark.parametrize("error", [Doubt("this one"), KeyboardInterrupt(), MemoryError("all of it")])
def test_an_error_that_somebody_waits_for_goes_through_as_it_is(error):
    with pytest.raises(type(error)) as caught:
        called("the metric", fails_with(error), 1)
    assert caught.value is error


def test_what_works_is_given_back():
    assert called("the network", lambda x, y: (x, y), 1, y=2) == (1, 2)
