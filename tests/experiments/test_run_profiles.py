from pathlib import Path

import numpy as np
import torch

from wideflat.energy.measure import LocalEnergy
from wideflat.experiments.run_profiles import augmenting, kept


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
    from wideflat.data import Augmentation, load

    data = load("dress-coat")
    pixels = data.train.images[:4].permute(0, 2, 3, 1).contiguous()
    augment = augmenting(Augmentation(padding=4, flip=True), data)
    torch.manual_seed(0)
    first = augment(pixels)
    torch.manual_seed(0)
    assert torch.equal(first, augment(pixels))
    assert not torch.equal(first, augment(pixels))
    assert first.shape == (4, 1, 28, 28)
