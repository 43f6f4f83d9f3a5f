"""Pickles of data are read; pickles that ask for more are refused, and nothing of them runs."""

from __future__ import annotations

import contextlib
import os
import pickle
import pickletools
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wideflat.data.pickles import UnsafePickleError, read_pickle

BATCH = {
    b"labels": [3, 1],
    b"data": np.arange(6, dtype=np.uint8).reshape(2, 3),
    b"batch_label": b"one",
    b"more": (1.5, None, True),
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_batches_of_every_protocol_are_read(protocol: int) -> None:
    read = read_pickle(pickle.dumps(BATCH, protocol=protocol))
    assert list(read) == list(BATCH)
    assert (read[b"data"] == BATCH[b"data"]).all() and read[b"data"].dtype == np.uint8
    assert all(read[key] == BATCH[key] for key in BATCH if key != b"data")


def test_fortran_order_and_empty_arrays() -> None:
    array = np.asfortranarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    assert (read_pickle(pickle.dumps(array, protocol=2)) == array).all()
    assert read_pickle(pickle.dumps(np.zeros((0, 3), np.uint8), protocol=2)).shape == (0, 3)


def test_the_pickle_of_python_2_is_read() -> None:
    """What cPickle of Python 2 wrote for CIFAR: 8-bit strings, numpy.core, dtype u1; byte for byte its opcodes."""
    content = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b"
        b"\x87Rq\x05(K\x01K\x02K\x03\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb\x89U\x06abcdeftbU\x06labelsq\x08]q\t(K\x06K\teu."
    )
    assert [opcode.name for opcode, _, _ in pickletools.genops(content)][-1] == "STOP"
    read = read_pickle(content)
    assert read[b"labels"] == [6, 9]
    assert read[b"data"].tolist() == [[97, 98, 99], [100, 101, 102]]


class Attack:
    """Unpickles to the result of a call."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_malicious_pickles_are_refused_and_do_nothing(protocol: int, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    attacks = [
        Attack(os.system, f"touch {victim}"),
        Attack(eval, f"open({str(victim)!r}, 'w')"),
        Attack(open, str(victim), "w"),
        Attack(subprocess.Popen, ["touch", str(victim)]),
        Attack(getattr, "", "join"),
        Attack(np.load, str(victim)),
        {b"data": Attack(os.system, f"touch {victim}")},
    ]
    for attack in attacks:
        with pytest.raises(UnsafePickleError, match="asks for"):
            read_pickle(pickle.dumps(attack, protocol=protocol))
    assert not victim.exists()


def test_tricks_with_the_allowed_names_are_refused() -> None:
    for content, reason in {
        b"c_codecs\nencode\n(Vab\nVrot13\ntR.": "encodes with",
        b"cbuiltins\nbytes\n(I99999999999\ntR.": "makes bytes",
        b"cnumpy\nndarray\n.": "holds a",
        b"cnumpy.core.multiarray\n_reconstruct\n.": "holds a",
        b"Pelsewhere\n.": "outside",
        b"cnumpy\nndarray.__reduce__\n.": "asks for",
        b"": "damaged",
        b"\x80\x02}q\x01(U\x04data": "damaged",
    }.items():
        with pytest.raises(UnsafePickleError, match=reason):
            read_pickle(content)


def test_arrays_must_be_bytes_of_their_shape() -> None:
    with pytest.raises(UnsafePickleError, match="not of bytes"):
        read_pickle(pickle.dumps(np.zeros(3), protocol=2))
    with pytest.raises(UnsafePickleError, match=r"asks for|not of bytes|damaged"):
        read_pickle(pickle.dumps(np.array([os.system], dtype=object), protocol=2))
    good = pickle.dumps(np.zeros((2, 3), np.uint8), protocol=2)
    assert good.count(b"K\x02K\x03\x86") == 1
    with pytest.raises(UnsafePickleError, match="has 6 bytes"):
        read_pickle(good.replace(b"K\x02K\x03\x86", b"K\x02K\x04\x86"))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_pickles_raise_one_kind_of_error(data: st.DataObject) -> None:
    content = bytearray(pickle.dumps(BATCH, protocol=2))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(UnsafePickleError):
        read_pickle(bytes(content[: data.draw(st.integers(0, len(content)))]))


def test_tampering_with_a_stand_in_harms_no_other_reading() -> None:
    # BUILD on the function itself: sets attributes on the stand-in of this reading only.
    content = b"cnumpy.core.multiarray\n_reconstruct\n}(V__wrapped__\nV1\nub."
    with pytest.raises(UnsafePickleError):
        read_pickle(content)
    assert (read_pickle(pickle.dumps(BATCH[b"data"], protocol=2)) == BATCH[b"data"]).all()


def test_references_that_unfold_are_refused():
    bomb = [0] * 10
    for _ in range(12):  # 10^13 numbers in 300 bytes
        bomb = [bomb] * 10
    content = pickle.dumps(bomb, protocol=2)
    assert len(content) < 500
    with pytest.raises(UnsafePickleError, match="more than"):
        read_pickle(content)


@pytest.mark.parametrize("place", [1 << 20, 1 << 31])
def test_a_place_far_beyond_the_memo_is_refused(place):
    content = b"\x80\x02]r" + place.to_bytes(4, "little") + b"."
    with pytest.raises(UnsafePickleError, match=f"at place {place}"):
        read_pickle(content)


def test_one_string_is_not_encoded_again_and_again():
    text = "x" * (1 << 20)
    head = b"\x80\x02(X" + len(text).to_bytes(4, "little") + text.encode() + b"q\x000"
    again = b"c_codecs\nencode\nh\x00\x85R"
    with pytest.raises(UnsafePickleError, match="more bytes than it has"):
        read_pickle(head + again * 100 + b"t.")


def test_an_array_is_not_made_of_a_number():
    kind = b"cnumpy\ndtype\nX\x02\x00\x00\x00u1\x85R"
    number = b"\x8a\x05\x00\x00\x00\x00\x04"  # 2^34, of which bytes() would make 16 GB
    content = b"\x80\x02cnumpy.core.numeric\n_frombuffer\n(" + number + kind + b")X\x01\x00\x00\x00CtR."
    with pytest.raises(UnsafePickleError, match="made of an int"):
        read_pickle(content)
