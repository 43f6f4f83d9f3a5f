import struct
from pathlib import Path

import numpy as np
import pytest

from wideflat.experiments.pgdl.tfrecord import read_examples

DTYPES = {np.dtype(np.float32): 1, np.dtype(np.int32): 3, np.dtype(np.int64): 9, np.dtype(np.uint8): 4}


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def message(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def tensor_proto(array: np.ndarray) -> bytes:
    """What ``tf.io.serialize_tensor`` writes: type, shape, content."""
    shape = b"".join(message(2, b"\x08" + varint(size)) for size in array.shape)
    return b"\x08" + varint(DTYPES[array.dtype]) + message(2, shape) + message(4, array.tobytes())


def example(**arrays: bytes) -> bytes:
    entries = b""
    for name, content in arrays.items():
        feature = message(1, message(1, content))
        entries += message(1, message(1, name.encode()) + message(2, feature))
    return message(1, entries)


def crc32c(content: bytes) -> int:
    """Bit by bit, from the polynomial."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 * (crc & 1))
    return crc ^ 0xFFFFFFFF


def masked(content: bytes) -> bytes:
    crc = crc32c(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def write_records(path: Path, contents: list[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        for content in contents:
            length = struct.pack("<Q", len(content))
            file.write(length + masked(length) + content + masked(content))


def test_tensors_come_back(tmp_path: Path) -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the published check value
    rng = np.random.default_rng(0)
    images = rng.normal(size=(3, 4, 4, 2)).astype(np.float32)
    path = tmp_path / "shard_1.tfrecord"
    write_records(
        path, [example(inputs=tensor_proto(x), output=tensor_proto(np.int32(i))) for i, x in enumerate(images)]
    )
    records = list(read_examples(path))
    np.testing.assert_array_equal(np.stack([record["inputs"] for record in records]), images)
    assert [int(record["output"]) for record in records] == [0, 1, 2]
    assert records[0]["output"].shape == ()


def test_tensors_written_value_by_value(tmp_path: Path) -> None:
    shape = message(2, message(2, b"\x08\x03"))
    floats = b"\x08\x01" + shape + message(5, np.array([1.5, -2.0, 3.0], np.float32).tobytes())
    ints = b"\x08\x03" + shape + message(7, varint(5) + varint(300) + varint(2**64 - 7))
    constant = b"\x08\x03" + shape + b"\x38\x09"  # one value for all places
    path = tmp_path / "a.tfrecord"
    write_records(path, [example(a=floats, b=ints, c=constant)])
    (record,) = read_examples(path)
    assert record["a"].tolist() == [1.5, -2.0, 3.0]
    assert record["b"].tolist() == [5, 300, -7]
    assert record["c"].tolist() == [9, 9, 9]


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "shard_7.tfrecord"
    good = example(inputs=tensor_proto(np.zeros(4, np.float32)))
    write_records(path, [good, good])
    whole = path.read_bytes()
    for damaged, words in (
        (whole[:-2], "record 2: it ends within a record"),
        (whole[:-40], "record 2: it ends within a record"),
        (whole + b"abc", "record 3: it ends within a record"),
        (b"x" + whole[1:], "record 1: the checksum of a length"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"shard_7.tfrecord is not a whole TFRecord file: {words}"):
            list(read_examples(path))
    write_records(path, [b"\x0a\x7f"])
    with pytest.raises(ValueError, match="longer than its message"):
        list(read_examples(path))
    write_records(path, [example(inputs=b"\x08\x07")])
    with pytest.raises(ValueError, match="type 7 are not understood"):
        list(read_examples(path))
