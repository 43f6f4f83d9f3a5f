import dataclasses
import json

import numpy as np
import pytest
import torch

from wideflat.committee import SETTINGS, Solutions, train


def patterns(count=40, size=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, size, generator=generator).sign()
    return x, torch.randn(count, generator=generator).sign()


@pytest.fixture(scope="module")
def solutions():
    x, y = patterns(count=30)
    test_x, test_y = patterns(count=20, seed=1)
    setting = SETTINGS["sgd-fast"].replace(hidden=3, batch_size=10, lr=1e-3, max_epochs=300)
    return train(setting, x, y, range(4), test_inputs=test_x, test_targets=test_y, progress=False)


def test_the_record_is_true(solutions):
    assert solutions.weights.shape == (4, 3, 30)
    assert torch.allclose(solutions.weights.norm(dim=-1), torch.ones(4, 3), atol=1e-5)
    for restart in range(4):
        network = solutions.machine(restart)
        wrong = int((network.predict(solutions.inputs) != solutions.targets).sum())
        assert wrong == solutions.train_errors[restart]
        assert solutions.reached[restart] == (wrong == 0)
        test = (network.predict(solutions.test_inputs) != solutions.test_targets).double().mean()
        assert solutions.test_error[restart] == pytest.approx(test.item())
    summary = solutions.summary()
    assert summary["restarts"] == 4
    assert summary["test_error_spread"] == pytest.approx(np.std(solutions.test_error, ddof=1))


def test_a_file_gives_back_what_was_saved(solutions, tmp_path):
    path = tmp_path / "solutions.npz"
    solutions.save(path)
    again = Solutions.load(path)
    for item in dataclasses.fields(Solutions):
        old, new = getattr(solutions, item.name), getattr(again, item.name)
        assert torch.equal(old, new) if isinstance(old, torch.Tensor) else old == new, item.name
    part = again.subset([2, 0])
    assert part.seeds == [2, 0] and torch.equal(part.weights[1], solutions.weights[0])
    assert part.summary()["restarts"] == 2


def test_wrong_files_are_named(solutions, tmp_path):
    path = tmp_path / "solutions.npz"
    solutions.save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"solutions\.npz is not a whole file of committee solutions"):
        Solutions.load(path)
    np.savez(path, weights=np.ones(3))
    with pytest.raises(ValueError, match="not a whole file"):
        Solutions.load(path)
    with pytest.raises(FileNotFoundError):
        Solutions.load(tmp_path / "none.npz")


def alter(path, array=None, shape=None, **metadata):
    """The same file with an array of another shape, or with other metadata."""
    with np.load(path) as content:
        arrays = dict(content)
    if array:
        arrays[array] = np.zeros(shape, dtype=np.float32)
    record = json.loads(str(arrays["metadata"]))
    arrays["metadata"] = np.array(json.dumps({**record, **metadata}))
    np.savez_compressed(path, **arrays)


@pytest.mark.parametrize(
    ("array", "shape", "message"),
    [
        ("weights", (3, 3, 30), r"'weights' must have the shape \(4, 3, 30\), has \(3, 3, 30\)"),
        ("weights", (4, 5, 30), r"must have the shape \(4, 3, 30\)"),
        ("weights", (4, 3, 31), r"must have the shape \(4, 3, 30\)"),
        ("weights", (4, 90), r"must have the shape"),
        ("targets", (29,), r"'targets' must have the shape \(30,\)"),
        ("test_targets", (21,), r"'test_targets' must have the shape \(20,\)"),
        ("test_inputs", (20, 31), r"'test_inputs' must have the shape \(20, 30\)"),
        ("inputs", (30,), r"inputs must have one pattern a row"),
    ],
)
def test_arrays_of_other_shapes_than_the_record_says_are_refused(solutions, tmp_path, array, shape, message):
    path = tmp_path / "solutions.npz"
    solutions.save(path)
    alter(path, array, shape)
    with pytest.raises(ValueError, match=rf"solutions\.npz is not a whole file of committee solutions .*{message}"):
        Solutions.load(path)


@pytest.mark.parametrize(
    "metadata",
    [{"seeds": [0, 1, 2]}, {"value": 7}, {"setting": {"algorithm": "sgd"}}, {"setting": [1]}, {"stop": None}],
)
def test_records_that_do_not_fit_are_refused(solutions, tmp_path, metadata):
    path = tmp_path / "solutions.npz"
    solutions.save(path)
    alter(path, **metadata)
    with pytest.raises(ValueError, match=r"solutions\.npz is not a whole file of committee solutions"):
        Solutions.load(path)


def test_bytes_that_are_altered_anywhere_are_noticed(solutions, tmp_path):
    path = tmp_path / "solutions.npz"
    solutions.save(path)
    whole = path.read_bytes()
    for place in range(40, len(whole) // 2, len(whole) // 25):
        path.write_bytes(whole[:place] + bytes(255 - byte for byte in whole[place : place + 8]) + whole[place + 8 :])
        with pytest.raises(ValueError, match="not a whole file of committee solutions"):
            Solutions.load(path)


def test_joined_and_parted(solutions):
    both = solutions.subset([0, 1]).joined(solutions.subset([3]))
    assert both.seeds == [0, 1, 3] and torch.equal(both.weights, solutions.weights[[0, 1, 3]])
    other = dataclasses.replace(solutions, setting=solutions.setting.replace(lr=1.0))
    with pytest.raises(ValueError, match="of one setting on the same training patterns"):
        solutions.joined(other)
