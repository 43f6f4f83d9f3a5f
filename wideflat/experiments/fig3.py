"""Figure 3: local energy along the training of ResNet-18 on CIFAR-10."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from wideflat.experiments.profiles import Evolution

__all__ = ["Fig3"]


class Fig3(Evolution):
    """See :class:`wideflat.experiments.profiles.Evolution`."""

    name = "fig3"
    title = "Figure 3: flatness along the training of ResNet-18 on CIFAR-10"
    claim = (
        "The paper follows the local energy along the training of ResNet-18 on CIFAR-10: the minima found at the end "
        "by rSGD and eSGD are flatter than that of SGD over a wide range of σ, and generalise better."
    )
    quick_means = (
        "{epochs} epochs on {images} Dress-vs-Coat images (28x28, two classes) with a residual network of 2 narrow "
        "blocks, the settings of ResNet-18 otherwise; profiles at two moments"
    )
    default_rows = ("cifar10-resnet18",)
    quick_rows = default_rows
    paper_losses: ClassVar[Mapping[tuple[str, str], float]] = {
        ("cifar10-resnet18", "sgd"): 0.005,
        ("cifar10-resnet18", "esgd"): 0.01,
        ("cifar10-resnet18", "rsgd"): 0.005,
    }
