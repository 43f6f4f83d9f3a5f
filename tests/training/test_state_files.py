import hashlib
import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wideflat.training.state_files import DamagedState, load_state, read_about, remove_state, save_state


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def test_optimizer_and_model_states_come_back_bit_for_bit(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.8, 0.9))
    model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    optimizer.step()
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    save_state(tmp_path / "a.b", state)
    back = load_state(tmp_path / "a.b")
    assert equal(back["model"], state["model"])
    assert equal(back["optimizer"], state["optimizer"])
    assert equal(back["rng"], state["rng"])
    moment = back["optimizer"]["state"][0]["exp_avg"]
    assert moment.is_contiguous(memory_format=torch.channels_last)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.b.json", "a.b.safetensors"]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
KEYS = st.text() | st.integers() | st.just("$tensor")
STATES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(state=STATES)
def test_any_nesting_of_plain_values_comes_back(state, tmp_path_factory):
    path = tmp_path_factory.mktemp("state") / "x"
    save_state(path, state)
    assert equal(load_state(path), state)


def test_tensors_whose_places_read_alike_do_not_collide(tmp_path):
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    save_state(tmp_path / "x", state)
    assert equal(load_state(tmp_path / "x"), state)


def test_what_cannot_be_saved_is_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match=r"groups\.0\.f is <class 'function'>"):
        save_state(tmp_path / "x", {"groups": [{"f": lambda: 0}]})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "remove"])
def test_a_damaged_file_is_named_and_never_loaded(tmp_path, suffix, damage):
    save_state(tmp_path / "x", {"weight": torch.arange(100.0), "lr": 0.125})
    path = tmp_path / f"x{suffix}"
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(data[:-7])
    elif damage == "flip":
        position = data.index(b"0.125") if suffix == ".json" else len(data) - 20
        data[position] ^= 1
        path.write_bytes(data)
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    with pytest.raises(DamagedState, match=f"x{suffix} is (damaged|missing)"):
        load_state(tmp_path / "x")


def test_a_note_is_read_without_the_tensors(tmp_path):
    save_state(tmp_path / "x.5", {"weight": torch.zeros(2)}, about={"error": 0.5})
    (tmp_path / "x.5.safetensors").unlink()
    assert read_about(tmp_path / "x.5") == {"error": 0.5}
    assert read_about(tmp_path / "x") is None


def test_a_state_is_removed_whole_and_alone(tmp_path):
    for name in ("x", "x.5"):
        save_state(tmp_path / name, {"weight": torch.zeros(2)})
    remove_state(tmp_path / "x.5")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.json", "x.safetensors"]
    remove_state(tmp_path / "x.5")  # nothing to remove


def with_header(header, rest=b""):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + rest


def numbers(shape, start, end):
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 4) + b"\xff\xfe{}",
        with_header({"w": numbers([10**6, 10**6], 0, 4 * 10**12)}, bytes(16)),
        with_header({"w": numbers([2], 0, 8), "v": numbers([2], 4, 12)}, bytes(16)),
        with_header({"v": numbers([2], 0, 8)}, bytes(8)),
        b"",
    ],
    ids=["length", "utf-8", "claim", "overlap", "another tensor", "nothing"],
)
def test_tensors_that_are_none_are_named_even_where_the_digests_fit(tmp_path, data):
    save_state(tmp_path / "state", {"w": torch.ones(2)})
    (tmp_path / "state.safetensors").write_bytes(data)
    forge(tmp_path / "state.json", tensors_sha256=hashlib.sha256(data).hexdigest())
    with pytest.raises(DamagedState, match=r"state\.(safetensors|json) is damaged"):
        load_state(tmp_path / "state")


@pytest.mark.parametrize(
    "change",
    [{"format": None}, {"format": "x"}, {"state": {"$tensor": 3}}, {"state": {"$items": 3}}, {"state": {"$tuple": 3}},
     {"tensors_sha256": None}],
    ids=str,
)  # fmt: skip
def test_a_table_that_is_none_is_named_even_where_its_digest_fits(tmp_path, change):
    save_state(tmp_path / "state", {"w": torch.ones(2)})
    forge(tmp_path / "state.json", **change)
    with pytest.raises(DamagedState, match=r"state\.(safetensors|json) is damaged"):
        load_state(tmp_path / "state")


def forge(table, **changes):
    """Write other parts into the table of a state, with a digest that fits."""
    content = {**json.loads(table.read_text()), **changes}
    del content["sha256"]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    table.write_text(json.dumps({**content, "sha256": digest}))
