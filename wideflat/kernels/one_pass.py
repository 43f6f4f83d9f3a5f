"""What `wideflat.Entropic` does around optimizers that are known, in one pass over memory together with their step.

Around any optimizer the pull, the noise, the mean and the outer step are operations of their own, each another trip to
memory: around a fused AdamW they take half as long again as its step. Where the inner optimizer is torch's own Adam or
AdamW with ``fused=True`` on the CPU, the kernel in C does its step with them; the outer step goes through the kernel,
or through blocks, if it is torch's SGD. Both are equal to the general way to rounding.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from wideflat.kernels.blocks import BlockLists
from wideflat.kernels.entropy_sgd import KernelLists, Rule, pointers
from wideflat.kernels.flat_blocks import Memory
from wideflat.kernels.library import compile_kernel, kernel_is_there, threads_for
from wideflat.kernels.noise import GaussianNoise
from wideflat.kernels.parts import Part
from wideflat.kernels.shards import local, stretches

__all__ = ["OnePass"]


class AdamRule(ctypes.Structure):
    """What a step does; the fields of the same name in C."""

    _fields_ = [
        *(
            (name, ctypes.c_double)
            for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "pull", "alpha", "noise")
        ),
        ("decoupled", ctypes.c_int64),
        ("maximize", ctypes.c_int64),
    ]


class _AdamLists:
    """The tensors of a param group as the kernel takes them: w', w, mu or None, and Adam's two moments."""

    def __init__(self, lists: list[list[Tensor] | None], places: list[int]) -> None:
        w_prime = lists[0] or []
        self._step = compile_kernel(w_prime[0].dtype).adam_step
        self.kept = [None if tensors is None else [t.detach() for t in tensors] for tensors in lists]
        self.memory, self.places = Memory(lists), places
        self._pointers = [None if tensors is None else pointers(tensors) for tensors in lists]
        numbers = ctypes.c_int64 * len(w_prime)
        self._sizes, self._starts = numbers(*(p.numel() for p in w_prime)), numbers(*places)
        self._elements = sum(self._sizes)

    def step(
        self, gradients: list[Tensor], counts: list[float], rule: AdamRule, noise: GaussianNoise | None, step: int
    ) -> None:
        """One step; ``counts`` are those of Adam for each tensor, ``step`` is that of the noise."""
        gradients = self.memory.in_order(gradients)
        reals = ctypes.c_double * len(counts)
        rates = reals(*(rule.lr / (1 - rule.beta1**count) for count in counts))
        roots = reals(*(math.sqrt(1 - rule.beta2**count) for count in counts))
        self._step(
            ctypes.c_int64(threads_for(self._elements)),
            ctypes.c_int64(len(self._sizes)),
            self._sizes,
            self._starts,
            rates,
            roots,
            ctypes.byref(rule),
            None if noise is None else ctypes.byref(noise.source(step)),
            *self._pointers,
            pointers(gradients),
        )
        for tensors in self.kept:  # autograd must know that they are others now
            if tensors is not None:
                torch.autograd.graph.increment_version(tensors)


class OnePass:
    """The lists of the groups of one `wideflat.Entropic`, made when they are first asked for."""

    def __init__(self) -> None:
        self._adam: dict[int, _AdamLists] = {}
        self._sgd: dict[int, KernelLists | BlockLists] = {}

    def inner(
        self,
        inner: Optimizer,
        numbers: range,
        parts: list[Part],
        settings: dict[str, Any],
        noise: GaussianNoise,
    ) -> bool:
        """The step of an inner optimizer with pull, noise and mean. False if it is none that is known: nothing is done.

        Args:
            inner: The optimizer.
            numbers: The numbers of its groups.
            parts: Their tensors.
            settings: Those of Entropic.
            noise: Of which as much is added as they say.
        """
        if not (settings["pull"] or settings["epsilon"] or settings["alpha"]) or not _is_fused_adam(inner):
            return False
        lists = [self._lists(inner, number, part) for number, part in zip(numbers, parts, strict=True) if part.params]
        if any(each is None for each in lists):
            return False
        here = [(group, part) for group, part in zip(inner.param_groups, parts, strict=True) if part.params]
        for each, (group, part) in zip(lists, here, strict=True):
            assert each is not None
            counters = [inner.state[p]["step"] for p in part.params]
            torch._foreach_add_(counters, 1)
            counts = [float(counter) for counter in counters]
            lr = float(group["lr"])
            scale = math.sqrt(lr) * float(settings["epsilon"])
            pull = min(1.0, float(settings["pull"]) / settings["inner_steps"])
            betas = [float(beta) for beta in group["betas"]]
            decay = float(group["weight_decay"])
            rule = AdamRule(lr, *betas, float(group["eps"]), decay, pull, float(settings["alpha"]), scale)
            # a key of torch 2.7 and later; before, the class said it
            rule.decoupled = group.get("decoupled_weight_decay", isinstance(inner, torch.optim.AdamW))
            rule.maximize = group["maximize"]
            each.step(part.gradients, counts, rule, noise if scale else None, int(settings["step"]))
        return True

    def _lists(self, inner: Optimizer, number: int, part: Part) -> _AdamLists | None:
        places = stretches(part.places)
        if places is None or not kernel_is_there(part.w_prime[0]):
            return None
        try:
            moments = [[inner.state[p][name] for p in part.params] for name in ("exp_avg", "exp_avg_sq")]
        except KeyError:  # of a parameter that has its first gradient now
            return None
        lists = [part.w_prime, part.w, part.mu if part.keeps_mean else None, *moments]
        kept = self._adam.get(number)
        if kept is not None and kept.places == part.places and kept.memory.holds(lists):
            return kept
        self._adam.pop(number, None)
        if not KernelLists.fits(*lists):
            return None
        self._adam[number] = _AdamLists(lists, places)
        return self._adam[number]

    def outer(self, sgd: Optimizer, number: int, part: Part) -> bool:
        """The outer step of a group, if it is torch's SGD. False if not: nothing is done."""
        group = sgd.param_groups[number]
        if type(sgd) is not torch.optim.SGD or _is_watched(sgd) or group["maximize"] or group["dampening"]:
            return False
        if not part.params or group["differentiable"] or part.w_prime[0].dtype != part.w[0].dtype:
            return False
        places = stretches(part.places)
        if places is None:
            return False
        velocity = None
        if group["momentum"]:
            for center in part.centers:
                if sgd.state[center].get("momentum_buffer") is None:
                    sgd.state[center]["momentum_buffer"] = torch.zeros_like(center)
            velocity = [local(sgd.state[center]["momentum_buffer"]) for center in part.centers]
        lists = self._outer_lists(number, part, places, velocity)
        if lists is None:
            return False
        settings = [float(group[name]) for name in ("lr", "momentum", "nesterov", "weight_decay")]
        lists.outer_step(Rule(*settings))
        return True

    def _outer_lists(
        self, number: int, part: Part, places: list[int], velocity: list[Tensor] | None
    ) -> KernelLists | BlockLists | None:
        lists = (part.w_prime, part.w, part.mu if part.keeps_mean else None, velocity)
        kept = self._sgd.get(number)
        if kept is not None and kept.matches(*lists, *([None] * isinstance(kept, BlockLists)), offsets=part.places):
            return kept
        self._sgd.pop(number, None)
        if kernel_is_there(part.w_prime[0]) and KernelLists.fits(*lists):
            self._sgd[number] = KernelLists(*lists, offsets=places)
        elif BlockLists.fits(*lists):
            self._sgd[number] = BlockLists(*lists, offsets=places)
        return self._sgd.get(number)


def _is_fused_adam(inner: Optimizer) -> bool:
    """Is it torch's own Adam or AdamW, in the settings that the kernel knows, and does nobody look at its steps?"""
    return (
        type(inner) in (torch.optim.Adam, torch.optim.AdamW)
        and not _is_watched(inner)
        and getattr(inner, "grad_scale", None) is None
        and getattr(inner, "found_inf", None) is None
        and all(
            group["fused"] and not (group["amsgrad"] or group["capturable"] or group["differentiable"])
            for group in inner.param_groups
        )
    )


def _is_watched(optimizer: Optimizer) -> bool:
    """Are there hooks on its step, or a scheduler that counts its calls?"""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks or "step" in optimizer.__dict__
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)
