"""Reading TFRecord files of serialised tensors, without TensorFlow.

A file is a sequence of records: length (8 bytes), its checksum (4), the content, its checksum (4). The content is a
protocol buffer ``Example``, here a map from names to serialised tensors (``tf.io.serialize_tensor``). Only what such
files hold is understood; anything else is an error that names the file.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator

import numpy as np

__all__ = ["read_examples"]

#: What the numbers of TensorFlow's ``DataType`` mean, and which field of ``TensorProto`` holds single values.
_TYPES: dict[int, tuple[type, int]] = {
    1: (np.float32, 5),
    2: (np.float64, 6),
    3: (np.int32, 7),
    4: (np.uint8, 7),
    9: (np.int64, 10),
}

#: The most bytes of a record and of a tensor: those of PGDL have some thousands.
MOST_BYTES = 2**28


def read_examples(path: str | os.PathLike[str]) -> Iterator[dict[str, np.ndarray]]:
    """The records of a file, each as its tensors by name.

    Raises:
        ValueError: If the file is truncated, damaged or of another kind; the message names it and the record.
    """
    with open(path, "rb") as file:
        number = 0
        while header := file.read(12):
            number += 1
            try:
                if len(header) < 12:
                    raise ValueError("it ends within a record")
                (length,) = struct.unpack("<Q", header[:8])
                if struct.unpack("<I", header[8:])[0] != _masked_crc(header[:8]):
                    raise ValueError("the checksum of a length is wrong")
                if length > MOST_BYTES:
                    raise ValueError(f"a record of {length} bytes, more than {MOST_BYTES}")
                content = file.read(length)
                if len(content) < length or len(file.read(4)) < 4:
                    raise ValueError("it ends within a record")
                yield {name: _tensor(value) for name, value in _example(content).items()}
            except (ValueError, IndexError, OverflowError, TypeError, struct.error) as error:
                raise ValueError(f"{path} is not a whole TFRecord file: record {number}: {error}") from None


def _example(content: bytes) -> dict[str, bytes]:
    """``Example { features = 1 { feature = 1: map<name, Feature { bytes_list = 1 { value = 1 } }> } }``."""
    result = {}
    for entry in _children(_one(content, 1), 1):
        name, feature = _one(entry, 1).decode(), _one(entry, 2)
        result[name] = _one(_one(feature, 1), 1)
    return result


def _tensor(content: bytes) -> np.ndarray:
    """``TensorProto { dtype = 1, tensor_shape = 2, tensor_content = 4, values = 5, 6, 7, 10 }``."""
    fields = list(_fields(content))
    kind = next((value for number, value in fields if number == 1), 0)
    if not isinstance(kind, int) or kind not in _TYPES:
        raise ValueError(f"tensors of TensorFlow's type {kind!r} are not understood, only {sorted(_TYPES)}")
    dtype, values_field = _TYPES[kind]
    dimensions = [part for number, value in fields if number == 2 for part in _children(_as_bytes(value), 2)]
    shape = [_size(dimension) for dimension in dimensions]
    raw = [value for number, value in fields if number == 4]
    if raw:
        return np.frombuffer(_as_bytes(raw[0]), dtype).reshape(shape)
    values = [entry for number, value in fields if number == values_field for entry in _values(value, dtype)]
    count = math.prod(shape)
    if count * np.dtype(dtype).itemsize > MOST_BYTES:
        raise ValueError(f"a tensor of shape {shape}, more than {MOST_BYTES} bytes")
    filled: np.ndarray = np.array(values or [0], dtype)
    return (np.repeat(filled[-1:], count) if len(filled) < count else filled[:count]).reshape(shape)


def _size(dimension: bytes) -> int:
    """``Dim { size = 1 }``, which is left out where it is 0."""
    size = [part for key, part in _fields(dimension) if key == 1]
    return int(size[0]) if size else 0


def _values(value: int | bytes, dtype: type) -> list[float]:
    """One number, or several that are packed."""
    if isinstance(value, int):
        return [value]
    if np.issubdtype(dtype, np.floating):
        return np.frombuffer(value, dtype).tolist()
    values: list[float] = []
    position = 0
    while position < len(value):
        item, position = _varint(value, position)
        values.append(item - (1 << 64) if item >> 63 else item)
    return values


# ------------------------------------------------------------------------------------------------ protocol buffers


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field: a number, or bytes."""
    position = 0
    while position < len(content):
        key, position = _varint(content, position)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value: int | bytes
            value, position = _varint(content, position)
        elif kind in (1, 2, 5):
            if kind == 2:
                size, position = _varint(content, position)
            else:
                size = 8 if kind == 1 else 4
            value = content[position : position + size]
            if len(value) < size:
                raise ValueError("a field is longer than its message")
            position += size
        else:
            raise ValueError(f"a field of unknown kind {kind}")
        yield number, value


def _children(content: bytes, number: int) -> list[bytes]:
    return [_as_bytes(value) for key, value in _fields(content) if key == number]


def _one(content: bytes, number: int) -> bytes:
    found = _children(content, number)
    if len(found) != 1:
        raise ValueError(f"expected one field {number}, got {len(found)}: not a map from names to serialised tensors")
    return found[0]


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where a message was expected")
    return value


def _varint(content: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


# ---------------------------------------------------------------------------------------------------- the checksum


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _crc_table()


def _masked_crc(content: bytes) -> int:
    """CRC-32C, rotated and shifted as TFRecord does it.

    Example:
        >>> hex(_masked_crc(b"123456789") - 0xA282EAD8 & 0xFFFFFFFF)  # CRC-32C is 0xE3069283
        '0x2507c60d'
    """
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
