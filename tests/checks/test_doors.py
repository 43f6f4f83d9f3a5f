"""What annotations say is asked of arguments; the rest is left to the function."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from wideflat.checks.doors import asks


@asks
def door(
    count: int = 1,
    rate: float = 0.5,
    name: str | None = None,
    path: str | os.PathLike[str] = "a",
    names: Sequence[str] = (),
    sizes: tuple[float, ...] = (),
    kind: Literal["one", "two"] = "one",
    weight: float | Tensor = 1.0,
    model: nn.Module | None = None,
    device: torch.device | str = "cpu",
    quick: bool = False,
    places: Sequence[float] = (),
    other: Unknown = None,  # noqa: F821 # as what is imported for the type checker
    **more: int,
) -> dict:
    """A public function."""
    return dict(locals())


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": 0.5}, {"count": True}, {"count": "1"}, {"count": torch.ones(2)}, {"rate": "x"}, {"rate": 1j},
        {"rate": float("nan")}, {"name": 3}, {"name": b"x"}, {"path": 3}, {"path": None}, {"path": "a\0"},
        {"names": [1]}, {"names": 3}, {"sizes": [None]}, {"sizes": {1: 2}}, {"kind": "three"},
        {"kind": None}, {"weight": "x"}, {"weight": torch.ones(1, device="meta")}, {"model": 3}, {"model": nn.Linear},
        {"device": 0.5}, {"device": "cuda:99"}, {"quick": "no"}, {"quick": None},
    ],
)  # fmt: skip
def test_what_the_annotation_does_not_say_is_refused(wrong):
    (name,) = wrong
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
        door(**wrong)


def test_what_it_says_passes_as_the_plain_type():
    given = door(np.int64(3), np.float32(0.5), "a", Path("b"), iter(["x"]), [1, 2], "two", other=object(), extra=1)
    assert (given["count"], given["rate"], given["names"], given["sizes"]) == (3, 0.5, ["x"], (1.0, 2.0))
    assert type(given["count"]) is int and given["path"] == Path("b") and given["more"] == {"extra": 1}
    weight = torch.ones((), requires_grad=True)
    assert door(weight=weight)["weight"] is weight  # with its graph
    assert door(model=None)["model"] is None and door(quick=np.True_)["quick"] is True
    assert isinstance(door(places=torch.ones(3))["places"], Tensor)
    assert door(sizes=torch.ones(3))["sizes"] == (1.0, 1.0, 1.0)


def test_too_many_arguments_are_said_in_the_words_of_python():
    @asks
    def one(count: int) -> int:
        return count

    with pytest.raises(TypeError, match=r"one\(\) takes 1 positional argument but 2 were given"):
        one(1, 2)
    with pytest.raises(TypeError, match="missing 1 required"):
        one()


def test_of_a_class_the_fields_are_asked():
    @asks
    @dataclasses.dataclass(frozen=True)
    class Split:
        images: Tensor
        names: Iterable[str] = ()

    assert Split(torch.ones(2)).names == ()
    with pytest.raises(TypeError, match="images must be a Tensor, got 3"):
        Split(3)
    with pytest.raises(TypeError, match="an entry of names must be a text, got 1"):
        dataclasses.replace(Split(torch.ones(2)), names=[1])
