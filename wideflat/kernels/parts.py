"""The tensors of a param group that take part in a step, gathered once and used as long as nothing has changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import is_, itemgetter
from typing import Any

from torch import Tensor

from wideflat.kernels.shards import Place, any_sharded, local

__all__ = ["Part", "has_gradient"]


@dataclass
class Part:
    """The tensors of one param group that take part in a step: of sharded ones, what this rank holds."""

    #: As the optimizer has them.
    params: list[Tensor] = field(default_factory=list)
    w_prime: list[Tensor] = field(default_factory=list)
    w: list[Tensor] = field(default_factory=list)
    #: The running means; the list w_prime itself where none are kept, because alpha = 0.
    mu: list[Tensor] = field(default_factory=list)
    #: Of the first element of each, in the noise.
    places: list[Place] = field(default_factory=list)
    #: What the optimizer keeps of each.
    states: list[dict[str, Any]] = field(default_factory=list)
    #: All parameters of the group, and which of them had no gradient.
    group: list[Tensor] = field(default_factory=list)
    absent: list[bool] = field(default_factory=list)
    #: Of the parameters when w was put there last, as autograd counts them; empty if it was not.
    versions: list[int] = field(default_factory=list)
    #: Of w', in this step.
    gradients: list[Tensor] = field(default_factory=list)
    #: The optimizer's state, all of it, when it was last found to have these states.
    _seen: tuple[list[Tensor], list[dict[str, Any]]] = ([], [])

    @property
    def sharded(self) -> bool:
        """Is one of the parameters sharded? What a rank holds of it may be elsewhere in the next step."""
        return any_sharded(self.params)

    @property
    def centers(self) -> list[Tensor]:
        """As the outer optimizer has them."""
        return [state["center"] for state in self.states]

    @property
    def keeps_mean(self) -> bool:
        """Is there a running mean beside w'?"""
        return self.mu is not self.w_prime

    def renew(self, params: list[Tensor], state: dict[Tensor, dict[str, Any]], keeps_mean: bool) -> bool:
        """Take up the gradients of a new step. False if something else is another than it was: gather anew then.

        Args:
            params: Those of the group.
            state: That of the optimizer.
            keeps_mean: Is there to be a running mean?
        """
        if len(params) != len(self.group) or not all(map(is_, params, self.group)):
            return False
        gradients = [p.grad for p in params]
        if [gradient is None for gradient in gradients] != self.absent or keeps_mean != self.keeps_mean:
            return False
        self.gradients = [gradient for gradient in gradients if gradient is not None]
        return self.is_of(state)

    def is_of(self, state: dict[Tensor, dict[str, Any]]) -> bool:
        """Is this what the optimizer keeps now? It may have been emptied, or its tensors replaced."""
        if self.sharded or not self._has_states_in(state):
            return False
        try:
            return all(map(is_, map(_CENTER, self.states), self.w)) and (
                not self.keeps_mean or all(map(is_, map(_MEAN, self.states), self.mu))
            )
        except KeyError:
            return False

    def _has_states_in(self, state: dict[Tensor, dict[str, Any]]) -> bool:
        keys, values = self._seen
        if len(state) == len(keys) > 0 and all(map(is_, state, keys)) and all(map(is_, state.values(), values)):
            return True
        if not all(map(is_, map(state.get, self.params), self.states)):
            return False
        if len(state) <= 2 * len(self.params):  # else it is quicker to look for these alone
            self._seen = list(state), list(state.values())
        return True

    def kept(self, name: str) -> list[Tensor]:
        """What the optimizer keeps under a name for each parameter; KeyError if it does not for one of them."""
        tensors = [state[name] for state in self.states]
        return [local(tensor) for tensor in tensors] if self.sharded else tensors


_CENTER, _MEAN = itemgetter("center"), itemgetter("mean")


def has_gradient(p: Tensor, optimizer: str) -> bool:
    """Does a parameter take part in this step? Sparse gradients are refused in the name of an optimizer."""
    gradient = p.grad
    if gradient is not None and gradient.is_sparse:
        raise RuntimeError(
            f"{optimizer} does not support sparse gradients (parameter of shape {tuple(p.shape)}): the center, the "
            "pull and the noise move every weight; use a dense one, for example Embedding(sparse=False)"
        )
    return gradient is not None
