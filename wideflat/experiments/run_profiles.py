"""The local energy of the network of a run: measured once, kept in a file with what was asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wideflat.data import Augmentation, ImageData
from wideflat.data.augmentation import normalise
from wideflat.energy.measure import LocalEnergy, local_energy
from wideflat.training.runs import Run

__all__ = ["augmenting", "kept", "profile_of_run", "read_profile", "without_request"]


def augmenting(augmentation: Augmentation, data: ImageData) -> Callable[[Tensor], Tensor]:
    """What makes the input of a network of bytes (n, H, W, C): augmentation and normalisation, by torch's own seed."""

    def augment(pixels: Tensor) -> Tensor:
        return augmentation(pixels, data.mean, data.std, torch.default_generator)

    return augment


def kept(path: Path, request: dict[str, Any], measure: Callable[[], LocalEnergy]) -> LocalEnergy:
    """The profile in the file ``path`` if it is what is asked for; otherwise it is measured and written there.

    Args:
        path: The file.
        request: What is asked for: everything that the result depends on. Kept in the file.
        measure: Measures it.
    """
    request = {name: list(value) if isinstance(value, tuple) else value for name, value in request.items()}
    there = read_profile(path)
    if there is not None and there.conventions.get("request") == request:
        return there
    profile = measure()
    profile.conventions["request"] = request
    profile.save(path)
    return profile


def read_profile(path: Path) -> LocalEnergy | None:
    """The profile in a file; None if it is not there, or damaged: it is measured again then."""
    if path.exists():
        with contextlib.suppress(ValueError):
            return LocalEnergy.load(path)
    return None


def profile_of_run(
    run: Run,
    data: ImageData,
    path: Path,
    sigmas: Sequence[float],
    epoch: int | None = None,
    device: str = "cpu",
    **settings: Any,
) -> LocalEnergy:
    """The local energy of a run's network over its training images, with the augmentation of its training.

    Args:
        run: The run.
        data: The data set that it was trained on.
        path: The file that the profile is kept in.
        sigmas: Strengths of the noise.
        epoch: A snapshot; None for the final network.
        device: Where to compute.
        **settings: More arguments of :func:`wideflat.local_energy`.
    """
    data = data.limited(run.config["options"]["limit_data"])
    augmentation = run.augmentation()
    request = {
        "run": run.path.name,
        "epoch": epoch,
        "sigmas": tuple(float(sigma) for sigma in sigmas),
        "augmentation": repr(augmentation),
        "images": len(data.train),
        **settings,
    }

    def measure() -> LocalEnergy:
        pixels = data.train.images.permute(0, 2, 3, 1).contiguous().to(device)
        augment: Callable[[Tensor], Tensor] | None = augmenting(augmentation, data)
        if augmentation == augmentation.evaluation() and augmentation.size in (None, data.image_size):
            pixels, augment = normalise(pixels, data.mean, data.std), None  # the same in every pass
        images = pixels, data.train.targets.to(device)
        return local_energy(run.load_model(epoch, device), images, list(sigmas), augment=augment, **settings)

    return kept(path, request, measure)


def without_request(profile: LocalEnergy) -> dict[str, Any]:
    """The conventions of a profile, without what :func:`kept` has added."""
    return {name: value for name, value in profile.conventions.items() if name != "request"}
