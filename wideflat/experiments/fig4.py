"""Figure 4: local energy at the end of training, four architectures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from wideflat.experiments.profiles import ProfileExperiment

__all__ = ["Fig4"]


class Fig4(ProfileExperiment):
    """The profiles of the final networks; ``rows`` may be any rows of Table 1, such as ``cifar10-smallconvnet``."""

    name = "fig4"
    title = "Figure 4: flatness at the end of training"
    claim = (
        "The paper measures the local energy of final networks (EfficientNet-B0 and PyramidNet on CIFAR-100, ResNet-50 "
        "and DenseNet-121 on Tiny ImageNet): flatter profiles go with lower test errors, for a large range of σ."
    )
    quick_means = (
        "{epochs} epochs on {images} Dress-vs-Coat images (28x28, two classes) with a residual network of 2 narrow "
        "blocks in the place of all four, the settings of each row otherwise"
    )
    default_rows = ("cifar100-efficientnet", "cifar100-pyramidnet", "tinyimagenet-resnet50", "tinyimagenet-densenet")
    quick_rows = default_rows
    paper_losses: ClassVar[Mapping[tuple[str, str], float]] = {
        ("cifar100-efficientnet", "sgd"): 0.08,
        ("cifar100-efficientnet", "rsgd"): 0.06,
        ("cifar100-pyramidnet", "sgd"): 0.07,
        ("cifar100-pyramidnet", "rsgd"): 0.07,
        ("tinyimagenet-resnet50", "sgd"): 0.04,
        ("tinyimagenet-resnet50", "esgd"): 0.006,
        ("tinyimagenet-resnet50", "rsgd"): 0.1,
        ("tinyimagenet-densenet", "sgd"): 0.1,
        ("tinyimagenet-densenet", "esgd"): 0.2,
        ("tinyimagenet-densenet", "rsgd"): 0.12,
    }

    def algorithms_of(self, row: str) -> tuple[str, ...]:
        """Those of the paper's figure in its four rows; all three in others."""
        if self.chosen is None and row in self.default_rows:
            return tuple(name for name in self.default_algorithms if (row, name) in self.paper_losses)
        return super().algorithms_of(row)
