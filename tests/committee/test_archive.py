"""Arrays and their record come back as they were written, or not at all."""

import json
import pickle

import numpy as np
import pytest

from wideflat.committee import archive


@pytest.mark.parametrize("compressed", [True, False])
def test_there_and_back(tmp_path, compressed):
    path = tmp_path / "file.npz"
    archive.write(path, {"format": "one", "names": ["a"]}, {"a": np.arange(6.0)}, compressed=compressed)
    record, arrays = archive.read(path, "one")
    assert record == {"names": ["a"]} and arrays.keys() == {"a"} and np.array_equal(arrays["a"], np.arange(6.0))
    with pytest.raises(ValueError, match="does not say that it is of the format 'two'"):
        archive.read(path, "two")


def test_what_is_something_else_is_refused(tmp_path):
    path = tmp_path / "file.npz"
    record = np.array(json.dumps({"format": "one"}))
    contents = {
        "no record": {"a": np.ones(2)},
        "a list": {"metadata": np.array("[1, 2]")},
        "no JSON": {"metadata": np.array("{")},
        "numbers": {"metadata": np.arange(3)},
        "an object": {"metadata": record, "a": np.array([{}, print], dtype=object)},
    }
    for arrays in contents.values():
        np.savez(path, **arrays)
        with pytest.raises(ValueError):
            archive.read(path, "one")
    for content in (b"", b"PK", pickle.dumps([1]), b"\x93NUMPY\x01\x00"):
        path.write_bytes(content)
        with pytest.raises(ValueError):
            archive.read(path, "one")


def test_kinds_of_numbers():
    arrays = {"a": np.zeros(2, dtype=np.int8), "b": np.array(["x", "y"])}
    assert archive.check_shapes(arrays, {"a": (2,)}, kinds="fi")["a"] is arrays["a"]
    for name, message in (("a", "must hold numbers, holds int8"), ("b", "must hold numbers"), ("c", "there is no 'c'")):
        with pytest.raises(ValueError, match=message):
            archive.check_shapes(arrays, {name: (2,)})
