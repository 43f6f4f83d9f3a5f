"""The random numbers of committee training: starts, orders of the data, dropout.

All are a function of (seed of the restart, purpose, epoch), never of a state. So a run can go on from any epoch, and
restarts can be grouped in any way.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from wideflat.committee.settings import Setting

__all__ = ["NOISE", "ORDER", "POLISH", "dropout_mask", "generator", "initial_weights", "order"]

#: What random numbers are for; part of the key of the generator.
START, ORDER, DROPOUT, NOISE, POLISH = range(5)


def generator(seed: int, purpose: int, epoch: int = 0) -> np.random.Generator:
    """The numbers of a restart for a purpose in an epoch."""
    key = np.array([seed % 2**64, purpose], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, epoch]))


_reused = threading.local()


def _stream(seed: int, purpose: int, epoch: int) -> np.random.Generator:
    """The numbers of ``generator`` from an object that is used again: good until the next call in this thread.

    To make a new object takes longer than to permute 500 patterns with it.
    """
    if not hasattr(_reused, "generator"):
        _reused.generator = generator(0, 0)
        _reused.state = {**_reused.generator.bit_generator.state, "buffer_pos": 4, "has_uint32": 0, "uinteger": 0}
    counter, key = _reused.state["state"]["counter"], _reused.state["state"]["key"]
    counter[:] = 0, 0, 0, epoch
    key[:] = seed % 2**64, purpose
    _reused.generator.bit_generator.state = _reused.state
    return _reused.generator


def initial_weights(setting: Setting, seed: int, num_inputs: int) -> Tensor:
    """Uniform weights with every hidden unit at norm one, (y, H, N) in float64."""
    shape = (setting.num_replicas, setting.hidden, num_inputs)
    weights = torch.from_numpy(generator(seed, START).uniform(-1, 1, shape))
    return weights / weights.norm(dim=-1, keepdim=True)


def order(setting: Setting, seed: int, epoch: int, num_patterns: int, purpose: int = ORDER) -> np.ndarray:
    """The order of the data in one epoch: permutations (passes, num_patterns).

    A pass is for one replica of rSGD, or one of the L passes that eSGD makes in an epoch.
    """
    rows = np.empty((setting.passes_per_epoch, num_patterns), dtype=np.int64)
    rows[:] = np.arange(num_patterns)
    return _stream(seed, purpose, epoch).permuted(rows, axis=1, out=rows)


def dropout_mask(setting: Setting, seed: int, epoch: int, num_patterns: int) -> np.ndarray:
    """Factors 0 or 1/(1 - p) of the hidden units in the order of presentation, (passes, H, num_patterns)."""
    shape = (setting.passes_per_epoch, setting.hidden, num_patterns)
    draw = _stream(seed, DROPOUT, epoch).random(shape, dtype=np.float32)
    return (draw >= setting.dropout) / (1.0 - setting.dropout)
