"""Reading the pickles of CIFAR without executing them.

A pickle is a program: loading it can call any function. Those of CIFAR need only containers, numbers, strings and
NumPy arrays of bytes. So the program is run with every outside name replaced by a stand-in made for this one reading,
which can do nothing but note an array's shape and content; any other name is refused.

What it may use is limited as well: a few hundred bytes can ask for gigabytes, by references that unfold, by places of
the memo far beyond its end, by encoding one string many times.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

import numpy as np

from wideflat.checks import a_kind

__all__ = ["UnsafePickleError", "read_pickle"]

_LIMIT = 1 << 31  # bytes that one array may have
_ITEMS = 1 << 21  # numbers, strings and containers in all, once references are unfolded; CIFAR-100 has 200,000


class UnsafePickleError(ValueError):
    """A pickle asks for something that the data needs not, or is damaged."""


def read_pickle(content: bytes) -> Any:
    """What a pickle of containers, numbers, strings and NumPy arrays of bytes holds.

    Args:
        content: Of the file. Strings of Python 2 become bytes.

    Raises:
        UnsafePickleError: If the pickle names anything beyond that, or is damaged. Nothing of it has been executed.

    Example:
        >>> read_pickle(pickle.dumps({"labels": [1, 2], "data": np.array([[3, 4]], np.uint8)}, protocol=2))
        {'labels': [1, 2], 'data': array([[3, 4]], dtype=uint8)}
        >>> import os
        >>> read_pickle(pickle.dumps(os.getcwd))
        Traceback (most recent call last):
        ...
        wideflat.data.pickles.UnsafePickleError: the pickle asks for posix.getcwd, which is not needed for data
    """
    array, reader = _reader(content)
    try:
        _check_memo(content)
        loaded = reader.load()
    except UnsafePickleError:
        raise
    except Exception as error:  # whatever a damaged program runs into
        raise UnsafePickleError(f"the pickle is damaged: {type(error).__name__}: {error}") from error
    return _Conversion(array)(loaded)


def _check_memo(content: bytes) -> None:
    """Refuse a program that keeps a value at a place beyond all that it has kept: room is made for all between."""
    kept = 0
    for opcode, place, _ in pickletools.genops(content):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT"):
            assert isinstance(place, int)
            if place > kept + 1:  # Python's own pickles count from 0, or from 1
                raise UnsafePickleError(f"the pickle keeps its value number {kept} at place {place}")
            kept = max(kept, place + 1)
        elif opcode.name == "MEMOIZE":
            kept += 1


def _reader(content: bytes) -> tuple[Any, pickle.Unpickler]:
    """A reader with stand-ins of its own, so that a pickle that tampers with them harms no other reading."""
    room = _Room(4 * len(content) + (1 << 20))  # bytes that may be made out of strings: each is used once
    array, known = _stand_ins(room)

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            try:
                return known[module, name]
            except KeyError:
                raise UnsafePickleError(f"the pickle asks for {module}.{name}, which is not needed for data") from None

        def persistent_load(self, pid: Any) -> Any:
            raise UnsafePickleError("the pickle refers to something outside of it")

    return array, Reader(io.BytesIO(content), encoding="bytes")


class _Room:
    """Bytes that may still be made."""

    def __init__(self, left: int) -> None:
        self._left = left

    def take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise UnsafePickleError("the pickle makes more bytes than it has")


def _stand_ins(room: _Room) -> tuple[Any, dict[tuple[str, str], Any]]:
    """The class that notes an array, and what stands for each name that a pickle may ask for."""

    class Type:
        __slots__ = ("name",)

        def __init__(self, name: Any, *rest: Any) -> None:
            self.name = name.decode("latin1") if isinstance(name, bytes) else name

        def __setstate__(self, state: Any) -> None:
            pass  # byte order and the like: there is none for bytes

    class Array:
        __slots__ = ("content", "fortran", "shape", "type")

        def __setstate__(self, state: Any) -> None:
            _, self.shape, self.type, self.fortran, self.content = state

        def array(self) -> np.ndarray:
            if not isinstance(self.type, Type) or self.type.name not in ("u1", "|u1", "uint8"):
                raise UnsafePickleError("an array of the pickle is not of bytes")
            raw = self.content.encode("latin1") if isinstance(self.content, str) else self.content
            size = 1
            for n in self.shape:
                if not isinstance(n, int) or n < 0 or (size := size * n) > _LIMIT:
                    raise UnsafePickleError(f"an array of the pickle has the shape {self.shape!r}")
            if not isinstance(raw, bytes) or len(raw) != size:
                raise UnsafePickleError(f"an array of the pickle has {len(raw)} bytes, its shape {self.shape!r}")
            return np.frombuffer(raw, np.uint8).reshape(self.shape, order="F" if self.fortran else "C")

    class Nothing:
        __slots__ = ()

    def reconstruct(*arguments: Any) -> Array:
        return Array()

    def from_buffer(buffer: Any, kind: Any, shape: Any, order: Any = "C") -> Array:
        if not isinstance(buffer, (bytes, bytearray)):
            raise UnsafePickleError(f"an array of the pickle is made of {a_kind(buffer)}")
        room.take(len(buffer))
        made = Array()
        made.__setstate__((1, shape, kind, order == "F", bytes(buffer)))
        return made

    def encode(text: Any, encoding: Any = "latin1", *rest: Any) -> bytes:
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise UnsafePickleError(f"the pickle encodes with {encoding!r}")
        room.take(len(text))
        return text.encode("latin1")

    def empty_bytes(*arguments: Any) -> bytes:
        if arguments:
            raise UnsafePickleError("the pickle makes bytes of something")
        return b""

    known: dict[tuple[str, str], Any] = {("_codecs", "encode"): encode}
    for builtins in ("builtins", "__builtin__"):
        known[builtins, "bytes"] = empty_bytes
    for core in ("numpy.core", "numpy._core"):
        known[f"{core}.multiarray", "_reconstruct"] = reconstruct
        known[f"{core}.numeric", "_frombuffer"] = from_buffer
    known["numpy", "ndarray"] = Nothing
    known["numpy", "dtype"] = Type

    return Array, known


class _Conversion:
    """Arrays out of their stand-ins; anything but containers, numbers and strings is refused, and so is too much."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self._left = _ITEMS

    def __call__(self, value: Any, depth: int = 0) -> Any:
        self._left -= 1
        if self._left < 0:
            raise UnsafePickleError(f"the pickle holds more than {_ITEMS} values")
        if depth > 20:
            raise UnsafePickleError("the pickle is nested too deeply")
        if isinstance(value, self._array):
            return value.array()
        if type(value) is dict:
            return {self(k, depth + 1): self(v, depth + 1) for k, v in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self(v, depth + 1) for v in value)
        if value is None or type(value) in (int, float, bool, str, bytes):
            return value
        raise UnsafePickleError(f"the pickle holds {a_kind(value)}")
