"""Figure 5: local energy along the training of ResNet-110 on CIFAR-10."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from wideflat.experiments.profiles import Evolution

__all__ = ["Fig5"]


class Fig5(Evolution):
    """See :class:`wideflat.experiments.profiles.Evolution`."""

    name = "fig5"
    title = "Figure 5: flatness along the training of ResNet-110 on CIFAR-10"
    claim = (
        "The paper follows the local energy along the training of ResNet-110 on CIFAR-10: as for ResNet-18, the "
        "flatness of the final minima agrees with their generalisation over a large range of σ."
    )
    quick_means = (
        "{epochs} epochs on {images} Dress-vs-Coat images (28x28, two classes) with a residual network of 2 narrow "
        "blocks, the settings of ResNet-110 otherwise; profiles at two moments"
    )
    default_rows = ("cifar10-resnet110",)
    quick_rows = default_rows
    paper_losses: ClassVar[Mapping[tuple[str, str], float]] = {
        ("cifar10-resnet110", "sgd"): 0.001,
        ("cifar10-resnet110", "esgd"): 0.0005,
        ("cifar10-resnet110", "rsgd"): 0.0005,
    }
