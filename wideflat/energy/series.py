"""Many profiles of one network: layer by layer, and along a training."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from wideflat.checks import network, shown
from wideflat.distributed.whole import whole_network
from wideflat.energy.measure import local_energy
from wideflat.energy.profile import LocalEnergy
from wideflat.energy.ranks import rank
from wideflat.evaluation.evaluation import Evaluation
from wideflat.evaluation.remembered import remembered
from wideflat.evaluation.selection import layers_of
from wideflat.files import read_json, write_json
from wideflat.noise.scales import NothingMoves
from wideflat.seeds import as_seed

__all__ = ["LocalEnergyTrace", "layer_profiles"]


def layer_profiles(
    model: nn.Module,
    data: Any,
    sigmas: Sequence[float] | Tensor | np.ndarray,
    layers: Iterable[str] | None = None,
    **options: Any,
) -> dict[str, LocalEnergy]:
    """One profile for each layer, with noise on the parameters of that layer alone.

    Args:
        model: The network.
        data: See :func:`local_energy`. Batches of a loader are kept in memory (up to a gigabyte of them) and read once
            for all layers.
        sigmas: Strengths of the noise.
        layers: Names of modules; by default all that have parameters of their own.
        **options: Passed on to :func:`local_energy`. ``parameters="trainable"`` leaves out what is frozen, such as the
            base under LoRA adapters; else ``layers`` are what one chooses.

    Returns:
        The profiles by the name of the layer. Layers whose parameters are all tied to those of another are left out,
        and, with a warning, those that the noise cannot move (all their weights are 0, say, under relative noise).

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> data = torch.randn(20, 3), torch.randint(2, (20,))
        >>> list(layer_profiles(model, data, [0.1], progress=False))
        ['0', '2']
    """
    trainable = options.pop("parameters", "all")
    if trainable not in ("all", "trainable"):
        raise ValueError(
            "layer_profiles chooses the parameters itself: give layers= instead of parameters= (or 'trainable')"
        )
    model = whole_network(network(model))
    if layers is not None and (not isinstance(layers, Iterable) or isinstance(layers, (str, Tensor))):
        raise TypeError(f"layers must be a list of names of modules, got {shown(layers)}")
    profiles: dict[str, LocalEnergy] = {}
    unmoved: list[tuple[str, NothingMoves]] = []
    evaluation = Evaluation(model, "loss", "eval", None)
    data = remembered(data, evaluation, as_seed(options.get("seed", 0)))
    moved = {name for name, p in model.named_parameters() if p.requires_grad or trainable == "all"}
    for layer, names in layers_of(model, layers).items():
        names = [name for name in names if name in moved]
        if not names:
            continue

        def inside(name: str, _: nn.Parameter, names: list[str] = names) -> bool:
            return name in names

        inside.__qualname__ = f"layer {layer}"
        try:
            profiles[layer] = local_energy(model, data, sigmas, parameters=inside, **options)
        except NothingMoves as reason:
            unmoved.append((layer, reason))
    if unmoved and not profiles:
        raise unmoved[0][1]
    if unmoved:
        left_out = ", ".join(layer for layer, _ in unmoved)
        warnings.warn(f"no profile of {left_out}: {unmoved[0][1]}", stacklevel=2)
    return profiles


class LocalEnergyTrace:
    """Traces the profile along a training run (the paper's figures of flatness against epochs).

    Call it after every epoch (or whatever is counted); it measures every ``every``-th time and keeps the profiles.
    With an optimizer that moves the weights away from its center, call it inside ``with optimizer.center():``.

    Args:
        data: See :func:`local_energy`.
        sigmas: Strengths of the noise.
        every: Measure when ``step`` is a multiple of this.
        path: Write all profiles to this JSON file after each measurement.
        **options: Passed on to :func:`local_energy`.

    Example:
        >>> import torch
        >>> data = torch.randn(20, 3), torch.randint(2, (20,))
        >>> trace = LocalEnergyTrace(data, [0.1, 0.2], every=2, progress=False)
        >>> model = nn.Linear(3, 2)
        >>> for epoch in range(1, 5):
        ...     _ = trace(model, epoch)
        >>> sorted(trace.profiles)
        [2, 4]
    """

    def __init__(
        self,
        data: Any,
        sigmas: Sequence[float] | Tensor | np.ndarray,
        every: int = 1,
        path: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be >= 1, got {every}")
        self.data, self.sigmas, self.every, self.path, self.options = data, sigmas, every, path, options
        self.profiles: dict[int, LocalEnergy] = {}

    def __call__(self, model: nn.Module, step: int) -> LocalEnergy | None:
        """Measure ``model`` if it is time to; returns the profile then, else None."""
        if step % self.every:
            return None
        profile = self.profiles[step] = local_energy(model, self.data, self.sigmas, **self.options)
        if self.path is not None and rank() == 0:
            self.save(self.path)
        return profile

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all profiles as JSON, whole or not at all."""
        content = {"format": 1, "profiles": {str(step): profile.to_dict() for step, profile in self.profiles.items()}}
        write_json(path, content, allow_nan=False)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> dict[int, LocalEnergy]:
        """The profiles that :meth:`save` wrote, by step."""

        def profiles(content: Any) -> dict[int, LocalEnergy]:
            return {int(step): LocalEnergy.from_dict(profile) for step, profile in content["profiles"].items()}

        return read_json(path, "trace of local-energy profiles", profiles)

    def plot(self, ax: Any = None) -> Any:
        """Draw all profiles, the later the darker; returns the axes."""
        if not self.profiles:
            raise ValueError("nothing was measured yet")
        steps = sorted(self.profiles)
        for i, step in enumerate(steps):
            shade = 0.25 + 0.75 * (i + 1) / len(steps)
            profile = self.profiles[step]
            label = f"{step} (E = {100 * profile.baseline:.2f}%)"
            if profile.conventions.get("metric") != "error":
                label = f"{step} (E = {profile.baseline:.3g})"
            ax = profile.plot(ax, label=label, color="C0", alpha=shade)
        return ax
