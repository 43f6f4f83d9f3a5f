"""Values that nobody means, to spoil arguments with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


def rubbish() -> list[Any]:
    """Values that nobody means: numbers at the edges, empty things, things of other kinds."""
    numbers: list[Any] = [
        0,
        -1,
        1,
        2**31,
        2**63,
        -(2**63),
        10**30,
        0.5,
        -0.5,
        1e30,
        1e300,
        math.nan,
        math.inf,
        -math.inf,
    ]
    tensors: list[Any] = [
        torch.tensor(math.nan), torch.tensor([]), torch.zeros(2, 3), torch.ones(3, dtype=torch.int64),
        torch.tensor(True), torch.full((2,), 1j), torch.zeros(24, 4), torch.zeros(2**3, device="meta"),
        torch.eye(4).to_sparse(),
    ]  # fmt: skip
    others: list[Any] = [
        None, True, False, "", "auto", "nonsense", b"", [], {}, (), [[]], [None], {"a": 1}, {1, 2}, object(), int, len,
        lambda *a, **k: None, nn.Identity(), nn.Linear(2, 2), Path("nowhere"), np.zeros((2, 2)), np.array([]),
        np.float64(0.1), np.array(["a"]), range(3), iter([]), "0.1", [0.1, "a"], [math.nan], [-1.0], Exception("x"), 1j,
    ]  # fmt: skip
    return [*numbers, *tensors, *others]
