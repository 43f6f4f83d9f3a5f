"""The local energy of a run: of its network, over its training images, with the augmentation of its training.

So the paper says it measured (App. B.2). The perturbed and the unperturbed network see the same images, augmented anew
in every pass; all other conventions are those of :func:`wideflat.local_energy` and are kept in each file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wideflat.data import Augmentation, DataError, ImageData, load
from wideflat.data.own import is_own, load_own
from wideflat.energy.measure import local_energy
from wideflat.energy.profile import LocalEnergy
from wideflat.training.runs import Run
from wideflat.training.training import augmentation

__all__ = [
    "augmentation_of_run",
    "augmenting",
    "images_of_run",
    "kept",
    "measurable",
    "plain_images",
    "profile_of_run",
    "read_profile",
    "without_request",
]


def profile_of_run(
    run: Run,
    data: ImageData,
    path: Path | None,
    sigmas: Sequence[float],
    epoch: int | None = None,
    device: torch.device | str = "cpu",
    *,
    augment: bool = True,
    **settings: Any,
) -> LocalEnergy:
    """The local energy of a run's network over its training images.

    Args:
        run: The run.
        data: The data set that it was trained on, or as much of it as `images_of_run` gives.
        path: The file that the profile is kept in, and read from if it is there already; None for none.
        sigmas: Strengths of the noise.
        epoch: A snapshot; None for the final network.
        device: Where to compute.
        augment: With the augmentation of its training, as the paper does.
        **settings: More arguments of :func:`wideflat.local_energy`.
    """
    data = data.limited(run.limit_data)
    used = augmentation_of_run(run) if augment else augmentation_of_run(run).evaluation()

    def measure() -> LocalEnergy:
        model, images, more = measurable(run, data, epoch, device, augment=augment)
        return local_energy(model, images, list(sigmas), **more, **settings)

    if path is None:
        return measure()
    request = {
        "run": run.path.name,
        "epoch": epoch,
        "sigmas": tuple(float(sigma) for sigma in sigmas),
        "augmentation": repr(used),
        "images": len(data.train),
        **settings,
    }
    return kept(path, request, measure)


def measurable(
    run: Run,
    data: ImageData,
    epoch: int | None = None,
    device: torch.device | str = "cpu",
    *,
    augment: bool = True,
    build: Callable[..., nn.Module] | None = None,
) -> tuple[nn.Module, tuple[Tensor, Tensor], dict[str, Any]]:
    """A run's network and its training images, as :func:`wideflat.local_energy` takes them.

    Args:
        run: The run.
        data: See `profile_of_run`.
        epoch: See there.
        device: See there.
        augment: See there.
        build: Makes the network, if it is one of your own; see :meth:`wideflat.training.runs.Run.build_model`.

    Returns:
        The network; inputs and targets; more arguments of the measurement: what makes inputs out of bytes.
    """
    data = data.limited(run.limit_data)
    used = augmentation_of_run(run) if augment else augmentation_of_run(run).evaluation()
    pixels = data.train.images.permute(0, 2, 3, 1).contiguous().to(device)
    more: dict[str, Any] = {"augment": augmenting(used, data)}
    if used == used.evaluation() and used.size in (None, data.image_size):
        pixels, more = augmenting(used, data)(pixels), {}  # the same in every pass
    return run.load_model(epoch, device, build=build), (pixels, data.train.targets.to(device)), more


def plain_images(run: Run, data: ImageData) -> tuple[Tensor, Tensor]:
    """The training images of a run as its network takes them, without random augmentation, and their classes.

    Args:
        run: The run.
        data: See `profile_of_run`.
    """
    data = data.limited(run.limit_data)
    pixels = data.train.images.permute(0, 2, 3, 1).contiguous()
    return augmenting(augmentation_of_run(run).evaluation(), data)(pixels), data.train.targets


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


def without_request(profile: LocalEnergy) -> dict[str, Any]:
    """The conventions of a profile, without what :func:`kept` has added."""
    return {name: value for name, value in profile.conventions.items() if name != "request"}


def augmentation_of_run(run: Run) -> Augmentation:
    """What was done to the training images of a run, for :class:`wideflat.data.Batches`."""
    return augmentation(run.experiment)


def images_of_run(run: Run, folder: str | os.PathLike[str] | None = None) -> ImageData:
    """The images that a run was trained and tested on.

    Args:
        run: The run.
        folder: Where the data set is; by default where the run found it.
    """
    about = run.part("data")
    if folder is None:
        sources = [row.get("data_source") for row in run.metrics("environment")]
        folder = next(
            (source for source in reversed(sources) if source and isinstance(source, str) and _is_there(source)), None
        )
    if "digest" in about:
        data = _own_images(run, folder)
    else:
        data = load(str(about.get("name")), folder, allow_altered=bool(about.get("altered")))
    return data.limited(run.limit_data)


def _is_there(source: str) -> bool:
    return Path(source.partition(":")[2] if is_own(source) else source).exists()


def _own_images(run: Run, place: str | os.PathLike[str] | None) -> ImageData:
    """The user's own images that a run was trained on, and no others."""
    about = run.part("data")
    if not is_own(place):
        raise DataError(
            f"{run.path} was trained on data of your own ({about.get('name')}), which is not where it was: say where "
            "it is now, with --data folder:PATH or --data npz:FILE"
        )
    assert place is not None
    data = load_own(place, run.experiment.image_size)
    if data.digest != about.get("digest"):
        raise DataError(f"{place} is not what {run.path} was trained on: its images or labels have changed")
    return data
