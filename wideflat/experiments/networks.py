"""One network of Figure 7: how it was trained, its errors, and its local energy at one strength of the noise."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from wideflat.data import ImageData
from wideflat.energy.measure import local_energy
from wideflat.energy.profile import LocalEnergy
from wideflat.presets import Preset
from wideflat.training.flatness import kept, profile_of_run
from wideflat.training.runs import Run

__all__ = ["Measurement", "Network"]


@dataclasses.dataclass
class Network:
    """One point of the figure.

    Attributes:
        name: Of its run or folder.
        profile: Its local energy.
        train_error: Without noise, on the images that dE is measured on.
        test_error: On the test set.
        train_loss: The cross-entropy on the training images.
        dropout: What it was trained with, where that is known; the same for the others.
        batch_size: See there.
        weight_decay: See there.
        lr: See there.
        epochs: How long it was trained.
    """

    name: str
    profile: LocalEnergy
    train_error: float
    test_error: float
    train_loss: float | None = None
    dropout: float | None = None
    batch_size: float | None = None
    weight_decay: float | None = None
    lr: float | None = None
    epochs: int | None = None

    @classmethod
    def of_run(cls, preset: Preset, run: Run, profile: LocalEnergy) -> Network:
        """A finished run."""
        result = run.result()
        assert result is not None
        return cls(
            run.path.name,
            profile,
            result["train_error"],
            result["test_error"],
            result["train_loss"],
            dropout=dict(preset.model_arguments).get("dropout"),
            batch_size=preset.batch_size,
            weight_decay=preset.weight_decay,
            lr=preset.lr,
            epochs=result["epoch"],
        )


@dataclasses.dataclass(frozen=True)
class Measurement:
    """How the local energy of every network of the figure is measured, and where it is kept.

    Args:
        folder: For the files, one a network.
        sigma: Strength of the noise.
        noise: What shares one draw of it.
        realisations: Passes over the images.
        seed: Of the noise.
        device: Where to compute.
    """

    folder: Path
    sigma: float
    noise: str
    realisations: int
    seed: int
    device: str

    @property
    def settings(self) -> dict[str, Any]:
        """What :func:`wideflat.local_energy` is told."""
        return {"noise": self.noise, "max_passes": self.realisations, "seed": self.seed}

    def file(self, name: str) -> Path:
        """Where the profile of a network is kept."""
        return self.folder / f"{name}.json"

    def of_run(self, run: Run, data: ImageData) -> LocalEnergy:
        """The profile of a run, from its file or measured now."""
        path = self.file(run.path.name)
        return profile_of_run(run, data, path, [self.sigma], device=self.device, **self.settings)

    def of_network(self, name: str, network: nn.Module, images: tuple[Tensor, Tensor]) -> LocalEnergy:
        """The profile of any network over images that are prepared already."""
        request = {"network": name, "images": len(images[0]), "sigma": self.sigma, **self.settings}
        return kept(self.file(name), request, lambda: local_energy(network, images, [self.sigma], **self.settings))
