"""What a network carries from call to call besides its parameters: buffers, counters, caches, generators of its own.

A measurement calls a network at many points, in an order of its own. What a call leaves behind (hidden units that are
kept for an input, a merged weight, a count of calls) must not reach the next one, which has other weights. So what the
modules hold is noted before the first call, and what changes from call to call is put back before every evaluation.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence, MutableSet
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Carried"]

#: What modules hold by themselves, which calls do not change.
_OWN = frozenset(vars(nn.Module())) - {"_buffers"}
#: Objects in objects that are followed.
DEPTH = 4
#: Parts of a list, a dictionary or an object up to which what is in them is noted, and not only which they are.
PARTS = 64
#: Numbers of a tensor up to which it is copied; one that is larger is not put back if it is written into.
MANY = 2**26
#: Numbers of a tensor that are compared, so that those written behind torch's back are seen.
FEW = 4096

_GENERATORS: dict[type, Callable[[Any], Any]] = {
    torch.Generator: lambda generator: generator.get_state(),
    random.Random: lambda generator: generator.getstate(),
    np.random.Generator: lambda generator: generator.bit_generator.state,
    np.random.RandomState: lambda generator: generator.get_state(legacy=False),
}


class Carried:
    """What the modules of a network hold now.

    Args:
        model: The network.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> model.calls, model.seen = 0, []
        >>> carried = Carried(model)
        >>> model.calls += 1; model.seen.append("x")
        >>> carried.changed()
        ['calls', 'seen']
        >>> carried.restore(); model.calls, model.seen
        (0, [])
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._structure = _structure(model)
        known: dict[tuple[int, int], _Note] = {}
        self._notes = {place: (store, name, _note(value, known)) for place, store, name, value in _places(model)}

    @property
    def whole(self) -> bool:
        """Whether the network has the parameters that it had, under the same names."""
        return _structure(self._model) == self._structure

    def changed(self) -> list[str]:
        """Where something else is now."""
        now = {place: value for place, _, _, value in _places(self._model)}
        there = [place for place, (*_, note) in self._notes.items() if place not in now or not note.holds(now[place])]
        return there + [place for place in now if place not in self._notes]

    @contextlib.contextmanager
    def afterwards(self) -> Iterator[None]:
        """Everything is as it was at the end."""
        try:
            yield
        finally:
            self.restore()

    def drawn(self) -> list[str]:
        """Where a generator of random numbers is now in another state."""
        return [
            place
            for place, (store, name, note) in self._notes.items()
            if isinstance(note.value, tuple(_GENERATORS)) and name in store and not note.holds(store[name])
        ]

    def restore(self, where: Iterable[str] | None = None) -> None:
        """Put back what was there, everywhere or at some places; not where parameters have been replaced."""
        if where is None:
            where = self.changed() if self.whole else ()
        for place in where:
            if place in self._notes:
                store, name, note = self._notes[place]
                store[name] = note.restored()
            else:
                prefix, _, name = place.rpartition(".")
                module = self._model.get_submodule(prefix)
                for store in (module._buffers, vars(module)):
                    store.pop(name, None)


class _Note:
    """An object, and what was in it."""

    __slots__ = ("content", "value", "version")

    def __init__(self, value: Any, known: dict[tuple[int, int], _Note], depth: int) -> None:
        self.value, self.version = value, 0
        self.content: Any = None
        if isinstance(value, Tensor):
            if type(value) is Tensor and value.layout is torch.strided and value.numel() <= MANY:
                self.version = 0 if value.is_inference() else value._version
                self.content = value.detach().clone()
        elif isinstance(value, tuple(_GENERATORS)):
            self.content = _state(value)
        elif depth and (parts := _parts(value)) is not None:
            deeper = depth - 1 if len(parts) <= PARTS else 0
            self.content = [(key, _note(part, known, deeper)) for key, part in parts]

    def holds(self, value: Any) -> bool:
        """Whether ``value`` is what was noted."""
        if isinstance(value, (bool, int, float, complex, str, bytes)) and not isinstance(value, Tensor):
            return type(value) is type(self.value) and (value == self.value or (value != value))
        if value is not self.value:
            return False
        if self.content is None:
            return True
        if isinstance(value, Tensor):
            written = not value.is_inference() and value._version != self.version
            return not written and (value.device.type != "cpu" or value.numel() > FEW or _equal(value, self.content))
        if isinstance(value, tuple(_GENERATORS)):
            return _same_state(_state(value), self.content)
        parts = _parts(value)
        return (
            parts is not None
            and len(parts) == len(self.content)
            and all(map(is_, (key for key, _ in parts), (key for key, _ in self.content)))
            and all(note.holds(part) for (_, part), (_, note) in zip(parts, self.content, strict=True))
        )

    def restored(self) -> Any:
        """The object, with what was in it."""
        value = self.value
        if self.content is None or self.holds(value):
            return value
        if isinstance(value, Tensor):
            value.data.copy_(self.content)
            self.version = 0 if value.is_inference() else value._version
        elif isinstance(value, MutableMapping):
            value.clear()
            value.update({key: note.restored() for key, note in self.content})
        elif isinstance(value, (MutableSequence, deque)):
            value.clear()
            value.extend(note.restored() for _, note in self.content)
        elif isinstance(value, MutableSet):
            value.clear()
            value |= {note.restored() for _, note in self.content}
        elif isinstance(value, tuple):
            for _, note in self.content:
                note.restored()
        elif not isinstance(value, tuple(_GENERATORS)):
            vars(value).clear()
            vars(value).update({key: note.restored() for key, note in self.content})
        return value


def _note(value: Any, known: dict[tuple[int, int], _Note], depth: int = DEPTH) -> _Note:
    """A note of an object; one for all places where it is."""
    if (id(value), depth) not in known:
        known[id(value), depth] = _Note(value, known, depth)
    return known[id(value), depth]


def _places(model: nn.Module) -> Iterator[tuple[str, Any, str, Any]]:
    """Everything that the modules hold: its name, the dictionary that it is in, its key there and what it is."""
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        for name, value in module._buffers.items():
            yield start + name, module._buffers, name, value
        for name, value in vars(module).items():
            if name not in _OWN and name != "_buffers":
                yield start + name, vars(module), name, value


def _structure(model: nn.Module) -> list[tuple[str, int]]:
    """The parameters by name."""
    return [(name, id(parameter)) for name, parameter in model.named_parameters(remove_duplicate=False)]


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    """What is in a container or in an object of somebody's own; None for what has no parts, or is not looked into."""
    if isinstance(value, MutableMapping):
        return list(value.items())
    if isinstance(value, (MutableSequence, deque, tuple)):
        return [(None, part) for part in value]
    if isinstance(value, MutableSet):
        return [(None, part) for part in value]
    library = type(value).__module__.partition(".")[0] in ("torch", "numpy", "builtins", "functools", "types")
    if library or isinstance(value, (nn.Module, type)) or callable(value) or not hasattr(value, "__dict__"):
        return None
    return list(vars(value).items())


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


def _state(generator: Any) -> Any:
    return next(read(generator) for kind, read in _GENERATORS.items() if isinstance(generator, kind))


def _same_state(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else repr(a) == repr(b)
