"""The local energy of a run: over its own images, with its own augmentation, kept in a file."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from small_trainings import QUIET, images, small

import wideflat
from wideflat.data import Augmentation, load
from wideflat.energy.profile import LocalEnergy
from wideflat.training import Options, train
from wideflat.training.flatness import (
    augmentation_of_run,
    augmenting,
    images_of_run,
    kept,
    measurable,
    profile_of_run,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    return train(small("rsgd", epochs=1), out, images(40, 16), Options(limit_data=24), snapshots=[0], **QUIET)


def test_a_profile_is_measured_once_and_kept(run, tmp_path, monkeypatch):
    path = tmp_path / "profile.json"
    first = profile_of_run(run, images(40, 16), path, (0.0, 0.5), seed=1, max_passes=1)
    assert first.conventions["examples"] == 24 and first.conventions["augmented"]  # as many as the run has used
    assert LocalEnergy.load(path).conventions["request"]["images"] == 24

    def never(*_, **__):
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:
        patch.setattr("wideflat.training.flatness.local_energy", never)
        again = profile_of_run(run, images(40, 16), path, (0.0, 0.5), seed=1, max_passes=1)
        assert np.array_equal(again.mean, first.mean)
        for other in ({"seed": 2}, {"augment": False}, {"epoch": 0}):
            with pytest.raises(AssertionError, match="measured again"):
                profile_of_run(run, images(40, 16), path, (0.0, 0.5), **{"seed": 1, "max_passes": 1, **other})


def test_it_is_the_local_energy_of_the_network_on_its_images(run):
    model, data, more = measurable(run, images(40, 16), augment=False)
    assert more == {}  # nothing random is done to the images: they are the inputs
    expected = wideflat.local_energy(model, data, [0.0, 0.5], max_passes=1, seed=3)
    profile = profile_of_run(run, images(40, 16), None, [0.0, 0.5], augment=False, max_passes=1, seed=3)
    assert np.array_equal(profile.mean, expected.mean) and not profile.conventions["augmented"]
    assert profile.baseline == pytest.approx(run.result()["train_error"])


def test_the_images_are_found_where_the_run_found_them(run, tmp_path, monkeypatch):
    asked = []

    def load(name, folder, allow_altered):
        asked.append((name, folder, allow_altered))
        return images(40, 16)

    monkeypatch.setattr("wideflat.training.flatness.load", load)
    found = images_of_run(run, tmp_path)
    assert (len(found.train), len(found.test)) == (24, 24)
    images_of_run(run)
    assert asked == [("generated", tmp_path, False), ("generated", None, False)]  # it was trained on no folder


def test_the_augmentation_is_that_of_the_preset(run):
    used = augmentation_of_run(run)
    assert used.flip and used.padding == 4
    assert dataclasses.replace(used, flip=False, padding=0).size == 16


def test_a_profile_is_measured_once_and_again_when_asked_otherwise_or_damaged(tmp_path: Path) -> None:
    calls = []

    def measure() -> LocalEnergy:
        calls.append(1)
        return LocalEnergy(sigmas=[0.0, 0.5], mean=[0.0, 0.1], stderr=[0.0, 0.01], baseline=0.02)

    path = tmp_path / "profiles" / "a.json"
    request = {"run": "a", "sigmas": (0.0, 0.5), "max_passes": 2}
    for _ in range(2):
        profile = kept(path, request, measure)
    assert len(calls) == 1
    np.testing.assert_array_equal(profile.mean, [0, 0.1])
    kept(path, {**request, "max_passes": 3}, measure)
    assert len(calls) == 2
    path.write_text(path.read_text()[:-20])
    kept(path, {**request, "max_passes": 3}, measure)
    assert len(calls) == 3


def test_augmentation_follows_torch_s_seed() -> None:
    data = load("dress-coat")
    pixels = data.train.images[:4].permute(0, 2, 3, 1).contiguous()
    augment = augmenting(Augmentation(padding=4, flip=True), data)
    torch.manual_seed(0)
    first = augment(pixels)
    torch.manual_seed(0)
    assert torch.equal(first, augment(pixels))
    assert not torch.equal(first, augment(pixels))
    assert first.shape == (4, 1, 28, 28)
