"""Values at the edge of what Python, NumPy and torch have, to spoil arguments with, and what is inside of arguments."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import math
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Failing:
    """Something of which one special method fails."""

    def __init__(self, method: str) -> None:
        def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError(method)

        self.__class__ = type("Failing", (Failing,), {method: fail, "__init__": object.__init__})


class OwnFloat(float):
    """A number of the user's."""


class OwnTensor(torch.Tensor):
    """A tensor of the user's."""


class Colour(enum.Enum):
    """No number."""

    RED = 1


def in_itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def nested(depth: int = 2000) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def with_weights(value: float) -> nn.Module:
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.fill_(value)
    return model


TYPES = (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool, torch.complex64)
SPECIAL = ("__len__", "__iter__", "__eq__", "__repr__", "__bool__", "__index__", "__float__", "__array__", "__fspath__")
X, Y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3

#: Functions, since some of the values can be used once.
STRANGE: list[Callable[[], Any]] = [
    *(lambda t=t, s=s: torch.ones(s).to(t) for t in TYPES for s in ((), (2,), (24, 4))),
    *(lambda t=t: t(1) for t in (np.int8, np.uint8, np.uint64, np.float16, np.longdouble, np.complex64, np.bool_)),
    *(lambda name=name: Failing(name) for name in SPECIAL),
    *(lambda v=v: v for v in (True, False, None, ..., NotImplemented, 1j, 10**5000, -(10**400), 2**64, -0.0, 5e-324)),
    *(lambda v=v: v for v in (1e308, math.nan, math.inf, -math.inf, 0, -1, 1, 0.5, "", "auto", "nan", "\0", "\ud800")),
    *(lambda v=v: v for v in ("x" * 10**5, "cuda:99", "meta", "[", "*", b"", b"auto", bytearray(b"x"), Colour.RED)),
    *(lambda v=v: v for v in ([], (), {}, [[]], [None], [""], [[0.1]], [0.1, [0.2]], [math.nan], [True], [1j], {1: 2})),
    *(lambda v=v: v for v in ({None: None}, {(): 1}, frozenset([1]), (1, 2, 3, 4), [10**400], slice(1), range(10**12))),
    *(lambda v=v: v for v in (int, nn.Linear, torch.optim.SGD, torch, print, len, torch.float16, torch.int64)),
    lambda: np.datetime64("2020-01-01"), lambda: np.array(None), lambda: np.ma.masked_array([1.0, 2.0], [True, False]),
    lambda: np.zeros((0, 3)), lambda: np.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
    lambda: np.arange(4, dtype=">f4"), lambda: np.array([1, "a"], dtype=object), lambda: np.broadcast_to(1.0, (24, 4)),
    lambda: fractions.Fraction(1, 3), lambda: fractions.Fraction(10**400), lambda: decimal.Decimal("sNaN"),
    lambda: datetime.timedelta(1), lambda: OwnFloat(0.1), lambda: torch.ones(2).as_subclass(OwnTensor),
    lambda: torch.ones(()).as_subclass(OwnTensor), lambda: nn.Parameter(torch.ones(2)),
    lambda: nn.UninitializedParameter(),
    lambda: torch.zeros(24, 4, device="meta"), lambda: torch.zeros((), device="meta"), lambda: torch.eye(4).to_sparse(),
    lambda: torch.eye(4).to_sparse_csr(), lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), lambda: torch.empty(0, 4),
    lambda: torch.ones(1).expand(24), lambda: torch.full((24,), 2**40), lambda: torch.full((24, 4), math.nan),
    lambda: (x for x in [0.1]),
    lambda: collections.deque([0.1]), lambda: np.matrix([[1.0]]), lambda: range(0),
    lambda: types.MappingProxyType({"a": 1}), lambda: collections.UserDict(a=1), in_itself, nested,
    lambda: [np.ones(2), np.ones(3)], lambda: [torch.ones(2, 4)], lambda: [{"params": []}], lambda: {"0.weight": "x"},
    lambda: (X, None), lambda: (X, Y[:5]), lambda: (X, Y + 7), lambda: (X, Y.float()), lambda: (X[:0], Y[:0]),
    lambda: (X.to("meta"), Y), lambda: (X.tolist(), Y.tolist()), lambda: {"x": X, "y": Y}, lambda: (X[:, :2], Y),
    lambda: TensorDataset(X), lambda: DataLoader([]), lambda: DataLoader(["a"]), object, torch.Generator,
    lambda: nn.Identity(), lambda: nn.Sequential(), lambda: nn.Linear(4, 3).half(),
    lambda: nn.Linear(4, 3, device="meta"),
    lambda: nn.Linear(2, 3), lambda: nn.LazyLinear(3), lambda: nn.Linear(4, 0), lambda: nn.LSTM(4, 3),
    lambda: nn.Linear(4, 3).requires_grad_(False), lambda: with_weights(math.nan), lambda: with_weights(1e38),
    lambda: torch.optim.LBFGS([nn.Parameter(torch.ones(2))]), lambda: torch.optim.AdamW([nn.Parameter(torch.ones(2))]),
]  # fmt: skip


def spoilt(value: Any, chance: random.Random, depth: int = 0) -> Any:
    """The value with something strange in it, or in its place."""
    if depth < 6 and chance.random() < 0.85:
        if type(value) is dict and value:
            key = chance.choice(list(value))
            if (what := chance.random()) < 0.1:
                return {name: item for name, item in value.items() if name is not key}
            if what < 0.2:
                return {**value, chance.choice(["foreign", 7, None]): chance.choice(STRANGE)()}
            return {**value, key: spoilt(value[key], chance, depth + 1)}
        if type(value) in (list, tuple) and value:
            at = chance.randrange(len(value))
            inside = [] if chance.random() < 0.1 else [spoilt(value[at], chance, depth + 1)]
            return type(value)([*value[:at], *inside, *value[at + 1 :]])
    if isinstance(value, torch.Tensor) and not value.is_meta and chance.random() < 0.6:
        flat = value.detach().reshape(-1)
        return chance.choice(
            [value.double(), flat, value[..., None], value.to("meta"), torch.cat([flat] * 3), value.to(torch.complex64)]
        )
    return chance.choice(STRANGE)()
