"""Damaged bytes for every reader: flips, cuts and insertions in a small valid file give a result or one plain error."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from test_arguments import in_time

import wideflat
from wideflat.cli import main
from wideflat.committee import Solutions
from wideflat.experiments.pgdl.keras import keras_sequential, load_keras_weights
from wideflat.experiments.pgdl.tfrecord import read_examples
from wideflat.files import read_npz
from wideflat.training.runs import Run
from wideflat.training.state_files import load_state, save_state

ROOT = Path(__file__).parent.parent


def write_npz(path: Path) -> None:
    np.savez_compressed(path, weights=np.ones((2, 3)), inputs=np.ones(4))


def write_profile(path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(8, 2, generator=generator), torch.zeros(8, dtype=torch.int64)
    wideflat.local_energy(torch.nn.Linear(2, 2), data, [0.1], progress=False).save(path)


def write_curve(path: Path) -> None:
    wideflat.local_entropy(torch.ones(1, 4), torch.ones(1, 4), torch.ones(1), deltas=[0.1]).save(path)


def write_solutions(path: Path) -> None:
    path.write_bytes((ROOT / "committee" / "written_by_85c623f" / "solutions.npz").read_bytes())


def write_config(path: Path) -> None:
    path.write_text(json.dumps({"format": 1, "experiment": {"lr": 0.1}, "options": {"seed": 1}}))


#: What writes a small valid file of each kind, its name, and what reads it.
READERS: dict[str, tuple[str, Callable[[Path], Any], Callable[[Path], Any]]] = {
    "npz": ("a.npz", write_npz, read_npz),
    "profile": ("a.json", write_profile, wideflat.LocalEnergy.load),
    "curve": ("a.npz", write_curve, wideflat.LocalEntropy.load),
    "solutions": ("a.npz", write_solutions, Solutions.load),
    "config": ("config.json", write_config, lambda path: Run.open(path.parent)),
    "state, JSON": ("a.json", lambda path: save_state(path.with_suffix(""), {"w": torch.ones(3)}),
                    lambda path: load_state(path.with_suffix(""))),
    "state, tensors": ("a.safetensors", lambda path: save_state(path.with_suffix(""), {"w": torch.ones(3)}),
                       lambda path: load_state(path.with_suffix(""))),
}  # fmt: skip


def spoilt(content: bytes, chance: random.Random) -> bytes:
    """Some bytes flipped, cut off, or put in."""
    place = chance.randrange(len(content))
    kind = chance.randrange(4)
    if kind == 0:
        return content[:place]
    if kind == 1:
        return content[:place] + chance.randbytes(chance.choice([1, 8, 100])) + content[place:]
    if kind == 2:
        return content[:place] + content[place + chance.choice([1, 8, 100]) :]
    changed = bytearray(content)
    for _ in range(chance.choice([1, 2, 10])):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


@pytest.mark.parametrize("kind", READERS)
def test_damaged_bytes_are_an_error_of_ours(tmp_path, kind):
    name, write, read = READERS[kind]
    path = tmp_path / name
    write(path)
    read(path)  # it is valid to begin with
    whole = path.read_bytes()
    for number in range(30):
        path.write_bytes(spoilt(whole, random.Random(f"{kind} {number}")))
        try:
            with in_time(20):
                read(path)
        except (ValueError, RuntimeError, OSError) as error:
            assert str(tmp_path) in str(error), f"{kind} {number}: {error}"


# ------------------------------------------------------------------------------------------------------------- bombs


def npz_that_claims(shape: tuple[int, ...], dtype: str = "<f8") -> bytes:
    member = io.BytesIO()
    np.lib.format.write_array_header_1_0(member, {"descr": dtype, "fortran_order": False, "shape": shape})
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for name in ("weights", "inputs", "targets"):
            archive.writestr(f"{name}.npy", member.getvalue() + b"\0" * 16)
    return whole.getvalue()


def npz_of_zeros(count: int) -> bytes:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("weights.npy", "w") as member:
        np.lib.format.write_array_header_1_0(member, {"descr": "|u1", "fortran_order": False, "shape": (count,)})
        for _ in range(count >> 20):
            member.write(b"\0" * (1 << 20))
    return whole.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (npz_that_claims((10**12,)), "says that it has 8000000000000 bytes, and has 16"),
        (npz_that_claims((2,), "|O"), "Python objects"),
        (b"", "not a whole .npz file"),
        (npz_of_zeros((1 << 28) + (1 << 20)), "would unpack to"),
    ],
    ids=["claims", "objects", "empty", "bomb"],
)
def test_bombs_in_npz_are_named_by_the_commands(tmp_path, capsys, content, words):
    path = tmp_path / "bomb.npz"
    path.write_bytes(content)
    for command in (["local-energy", str(path)], ["report", str(path), "--out", str(tmp_path / "r.html")]):
        assert main(command) == 1
        told = capsys.readouterr().err
        assert "bomb.npz" in told and words in told and "Traceback" not in told


def record(content: bytes, length: int | None = None) -> bytes:
    from wideflat.experiments.pgdl import tfrecord

    header = struct.pack("<Q", len(content) if length is None else length)
    return header + struct.pack("<I", tfrecord._masked_crc(header)) + content + b"\0" * 4


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (record(b"", 2**63), "a record of 9223372036854775808 bytes"),
        (record(b"\xff" * 3_000_000), "more than 64 bits"),
        (record(b"\x0a\x08\x0a\x06\x0a\x01\xff\x12\x01\x00"), "record 1"),
    ],
    ids=["length", "varint", "UTF-8"],
)
def test_bombs_in_tfrecords_are_named(tmp_path, content, words):
    path = tmp_path / "train.tfrecord"
    path.write_bytes(content)
    with in_time(20), pytest.raises(ValueError, match=rf"train\.tfrecord is not a whole TFRecord file.*{words}"):
        list(read_examples(path))


@pytest.mark.parametrize(
    "layer",
    [
        {"layer_name": "Dense", "units": 10**9},
        {"layer_name": "Dense", "units": 10**5},
        {"layer_name": "Dense"},
        {"layer_name": "Dense", "units": "many"},
        {"layer_name": "Dense", "units": [3]},
        {"layer_name": "Dense", "units": 3, "activation": ["relu"]},
    ],
)
def test_layers_that_cannot_be_meant_are_named(layer):
    with pytest.raises(ValueError, match=r"layer 1 \(Dense\)"):
        keras_sequential([layer], (4096,))


def test_keras_weights_stay_in_their_file(tmp_path):
    h5py = pytest.importorskip("h5py")
    secret = tmp_path / "secret.hdf5"
    with h5py.File(secret, "w") as file:
        file["a"] = np.ones((3, 2), np.float32)
    for put in (
        lambda group: group.__setitem__("a", h5py.ExternalLink(str(secret), "/a")),
        lambda group: group.create_group("a"),
        lambda group: group.__setitem__("a", np.array([b"x"])),
        lambda group: group.create_dataset("a", (10**6, 10**6), "f4", chunks=(1, 10**3)),
    ):
        path = tmp_path / "weights.hdf5"
        with h5py.File(path, "w") as file:
            file.attrs["layer_names"] = [b"dense"]
            group = file.create_group("dense")
            group.attrs["weight_names"] = [b"a"]
            put(group)
        _, weighted = keras_sequential([{"layer_name": "Dense", "units": 2, "use_bias": False}], (3,))
        with pytest.raises(ValueError, match=r"weights\.hdf5 is not a whole file of Keras weights"):
            load_keras_weights(path, weighted)


@pytest.mark.parametrize("place", ["/dev/zero", "pipe", "link"])
def test_what_has_no_end_is_not_read(tmp_path, monkeypatch, capsys, place):
    """A run, a result or an array that is a device, or a pipe that nobody writes to."""
    monkeypatch.chdir(tmp_path)
    for name in ("profile.json", "arrays.npz", "run/config.json"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        os.mkfifo(path) if place == "pipe" else path.symlink_to("/dev/zero" if place == "link" else place)
    with in_time(20):
        for read, name in ((wideflat.LocalEnergy.load, "profile.json"), (read_npz, "arrays.npz"), (Run.open, "run")):
            with pytest.raises((ValueError, RuntimeError), match=name):
                read(name)
        assert main(["report", "."]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_many_small_arrays_are_a_bomb_too(tmp_path):
    path = tmp_path / "many.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(3):
            with archive.open(f"a{number}.npy", "w") as member:
                np.lib.format.write_array_header_1_0(
                    member, {"descr": "|u1", "fortran_order": False, "shape": (100 << 20,)}
                )
                for _ in range(100):
                    member.write(b"\0" * (1 << 20))
    with pytest.raises(ValueError, match=r"many\.npz.*would unpack to 3145"):
        read_npz(path)


@pytest.mark.parametrize(
    "arrays",
    [
        {"weights": np.array(["a"]), "inputs": np.ones((4, 9)), "targets": np.ones(4)},
        {"weights": np.ones((3, 9), complex), "inputs": np.ones((4, 9)), "targets": np.ones(4)},
        {"weights": np.ones((2, 3, 4, 5)), "inputs": np.ones(7), "targets": np.ones((1, 1))},
        {"weights": np.ones((3, 9)), "inputs": np.ones((4, 8)), "targets": np.ones(4)},
        {"weights": np.ones((0, 9)), "inputs": np.ones((0, 9)), "targets": np.ones(0)},
        {"weights": np.full((3, 9), np.nan), "inputs": np.ones((4, 9)), "targets": np.ones(4)},
        {"weights": np.zeros((3, 9), "M8[s]"), "inputs": np.ones((4, 9)), "targets": np.ones(4)},
    ],
    ids=["strings", "complex", "dimensions", "mismatch", "empty", "nan", "dates"],
)
def test_arrays_that_are_no_committee_are_named(tmp_path, capsys, arrays):
    path = tmp_path / "odd.npz"
    np.savez(path, **arrays)
    for command in ("local-energy", "local-entropy"):
        assert main([command, str(path)]) == 1
        told = capsys.readouterr().err.strip()
        assert "odd.npz" in told and "\n" not in told


@pytest.mark.parametrize("key", ["experiment", "options", "data"])
@pytest.mark.parametrize("value", [3, "x", [1], None])
def test_a_configuration_of_other_kinds_is_named(tmp_path, capsys, key, value):
    config = {"format": 1, "experiment": {"lr": 0.1}, "options": {"seed": 1}, "data": {"name": "cifar10"}, key: value}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "a.html")]) == 1
    told = capsys.readouterr().err
    assert "config.json" in told and "Traceback" not in told


@pytest.mark.parametrize(
    "name", ["$x$", "a$b", "$", "\\frac{1}", "<script>alert(1)</script>", "x_{", "%s", "{0}", "x\ny"]
)
def test_any_name_is_a_name_in_a_report(tmp_path, name):
    """Also one that would be mathematics to matplotlib, or a part of the page."""
    folder = tmp_path / "results" / name.replace("/", "_")
    folder.mkdir(parents=True)
    write_profile(folder / "profile.json")
    assert main(["report", str(tmp_path / "results"), "--title", name, "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "<script>alert(1)</script>" not in page
    profile = wideflat.LocalEnergy.load(folder / "profile.json")
    profile.plot(matplotlib.figure.Figure().add_subplot(), label=name).figure.savefig(tmp_path / "figure.png")
