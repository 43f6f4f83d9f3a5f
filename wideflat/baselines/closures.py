"""Closures that an optimizer calls for their gradients: those that were there before must not be in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wideflat.centered import step_quietly
from wideflat.checks import function
from wideflat.checks.parameters import refuse_stale
from wideflat.kernels.shards import anywhere, local

__all__ = ["call_for_gradients", "call_idle", "refuse_gradients", "step_of"]


def call_for_gradients(closure: Callable[[], Any], params: list[Tensor]) -> Any:
    """Call a closure that is to make gradients, and refuse one that adds to those of before.

    A gradient of one parameter is replaced by NaN, which is gone afterwards if the closure clears the gradients.

    >>> w = torch.nn.Parameter(torch.ones(1))
    >>> w.grad = torch.ones(1)
    >>> call_for_gradients(lambda: w.sum().backward(), [w])
    Traceback (most recent call last):
    ...
    RuntimeError: the closure adds to gradients that were there before: ...
    """
    before = [p for p in params if p.grad is not None and p.numel()]
    if not before:
        with torch.enable_grad():
            return function("closure", closure)()
    witness = min(before, key=Tensor.numel)
    kept = witness.grad
    witness.grad = marked = torch.full_like(witness, torch.nan)
    version = marked._version
    try:
        with torch.enable_grad():
            loss = function("closure", closure)()
    finally:
        untouched = witness.grad is marked and marked._version == version
        if untouched:
            witness.grad = kept
    if not untouched and witness.grad is marked and not anywhere([(witness, (~local(marked).isnan()).any())]):
        for p in params:
            p.grad = None
        raise RuntimeError(
            "the closure adds to gradients that were there before: let it clear them (opt.zero_grad()), and call "
            "no backward() before step(closure). Gradients that are accumulated over several mini-batches go "
            "with opt.perturb() and opt.restore(), for which the whole mini-batch is evaluated twice"
        )
    return loss


def call_idle(closure: Callable[[], Any], params: list[Tensor]) -> Any:
    """Call a closure that must not make gradients any more, because they are all there.

    >>> w = torch.nn.Parameter(torch.ones(1))
    >>> call_idle(lambda: 3.0, [w])
    3.0
    """
    before = [p.grad for p in params]
    with torch.enable_grad():
        loss = function("closure", closure)()
    if any(p.grad is not gradient for p, gradient in zip(params, before, strict=True)):
        raise RuntimeError(
            "step(closure) was called after perturb() and restore(), and the closure made gradients once more: "
            "call step() without a closure, or step(closure) alone"
        )
    return loss


def refuse_gradients(gradients: list[Tensor], params: list[Tensor]) -> None:
    """Refuse gradients that are not those of the parameters as they are, and sparse ones."""
    if any(g.shape != p.shape for g, p in zip(gradients, params, strict=True)):
        raise RuntimeError("a gradient has another shape than its parameter; call zero_grad() and backward()")
    refuse_stale(gradients, params)
    if any(g.is_sparse for g in gradients):
        raise RuntimeError(
            "SAM does not support sparse gradients, whose norm torch does not compute; "
            "use dense ones, for example Embedding(sparse=False)"
        )


def step_of(base: Optimizer) -> None:
    """A step of an optimizer inside, without the hooks; where it fails, gradients that do not fit are said so."""
    try:
        step_quietly(base)
    except RuntimeError:
        params = [p for group in base.param_groups for p in group["params"] if p.grad is not None]
        refuse_gradients([p.grad for p in params if p.grad is not None], params)
        raise
