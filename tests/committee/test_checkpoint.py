"""A checkpoint goes on only if it is whole, of this run, and holds what its record says."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from wideflat.committee import SETTINGS, Solutions, train
from wideflat.committee.checkpoint import Restart, read, write


@pytest.fixture
def restarts():
    generator = torch.Generator().manual_seed(0)
    return [Restart(seed, torch.randn(2, 3, 5, generator=generator)) for seed in (7, 8)]


def test_a_checkpoint_gives_back_what_was_saved(restarts, tmp_path):
    path = tmp_path / "state.npz"
    restarts[1].epoch, restarts[1].stop, restarts[1].value = 4, "errors", 0.0
    write(path, {"setting": {"lr": 0.1}}, restarts)
    begun = [Restart(seed, torch.zeros(2, 3, 5)) for seed in (7, 8)]
    found = read(path, {"setting": {"lr": 0.1}}, begun)
    for old, new in zip(restarts, found, strict=True):
        assert torch.equal(old.weights, new.weights)
        assert (old.seed, old.epoch, old.stop, repr(old.value)) == (new.seed, new.epoch, new.stop, repr(new.value))
    with pytest.raises(ValueError, match="checkpoint of another run: it differs in setting"):
        read(path, {"setting": {"lr": 0.2}}, begun)


@pytest.mark.parametrize(
    ("weights", "lines", "message"),
    [
        ((2, 2, 3, 4), None, r"'weights' must have the shape \(2, 2, 3, 5\), has \(2, 2, 3, 4\)"),
        ((2, 2, 3, 6), None, "must have the shape"),
        ((1, 2, 3, 5), None, "must have the shape"),
        ((2, 1, 3, 5), None, "must have the shape"),
        ((60,), None, "must have the shape"),
        (None, [{"epoch": 0, "stop": "", "value": 0.0}], "zip"),
        (None, [{"epoch": -3, "stop": "", "value": 0.0}] * 2, "said to be at"),
        (None, [{"epoch": "soon", "stop": "", "value": 0.0}] * 2, "said to be at"),
        (None, [1, 2], "not"),
    ],
)
def test_what_does_not_fit_the_record_is_refused(restarts, tmp_path, weights, lines, message):
    path = tmp_path / "state.npz"
    write(path, {"seeds": [7, 8]}, restarts)
    with np.load(path) as content:
        arrays = dict(content)
    if weights:
        arrays["weights"] = np.zeros(weights, dtype=np.float32)
    if lines:
        arrays["metadata"] = np.array(json.dumps({**json.loads(str(arrays["metadata"])), "restarts": lines}))
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=rf"state\.npz is not a whole checkpoint .*{message}.*; delete it to start"):
        read(path, {"seeds": [7, 8]}, restarts)


def test_a_training_does_not_go_on_from_weights_of_another_size(tmp_path):
    """They would reach the kernel, which reads and writes as far as the setting says."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 12, generator=generator), torch.ones(20)
    setting = SETTINGS["rsgd-fast"].replace(num_replicas=2, hidden=3, batch_size=5, max_epochs=4)
    path = tmp_path / "state.npz"
    train(setting, x, y, range(2), progress=False, checkpoint=path)
    with np.load(path) as content:
        arrays = dict(content)
    record = json.loads(str(arrays["metadata"]))
    record["restarts"] = [{"epoch": 2, "stop": "", "value": float("nan")}] * 2
    arrays["metadata"] = np.array(json.dumps(record))
    for shape in ((2, 2, 3, 11), (2, 2, 1, 12), (2, 1, 3, 12), (2, 2, 3, 13)):
        np.savez(path, **{**arrays, "weights": np.zeros(shape, dtype=np.float32)})
        with pytest.raises(ValueError, match="'weights' must have the shape"):
            train(setting, x, y, range(2), progress=False, checkpoint=path)


def test_files_of_an_earlier_version_are_read_and_go_on(tmp_path):
    """Written by 85c623f: the solutions of a training, and a checkpoint of the same training in its 12th epoch."""
    folder = Path(__file__).with_name("written_by_85c623f")
    whole = Solutions.load(folder / "solutions.npz")
    assert whole.weights.shape == (3, 3, 12) and whole.seeds == [0, 1, 2] and whole.setting.num_replicas == 2
    path = tmp_path / "checkpoint.npz"
    shutil.copy(folder / "checkpoint.npz", path)
    with np.load(path) as content:
        assert {line["epoch"] for line in json.loads(str(content["metadata"]))["restarts"]} == {10}
    resumed = train(
        whole.setting, whole.inputs, whole.targets, range(3), refresh=5, form="gram", progress=False, checkpoint=path
    )
    assert resumed.epochs == whole.epochs == [30] * 3 and resumed.stop == whole.stop
    assert torch.allclose(resumed.weights, whole.weights, atol=1e-5)
