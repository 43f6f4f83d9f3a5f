"""Figure 4: local energy at the end of training, four architectures."""

from __future__ import annotations

import dataclasses
import functools

from wideflat.experiments.cells import Choice
from wideflat.experiments.experiment import Item
from wideflat.experiments.profiles import ProfileFigure, ProfileOptions

__all__ = ["ITEM", "Fig4Options"]

ROWS = ("cifar100-efficientnet", "cifar100-pyramidnet", "tinyimagenet-resnet50", "tinyimagenet-densenet")

#: The paper's training losses of the final networks; eSGD is not in all of its panels.
LOSSES = {
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


def algorithms_of(row: str) -> tuple[str, ...]:
    """Those of the paper's figure in its four rows; all three in others."""
    every = ("sgd", "rsgd", "esgd")
    return tuple(name for name in every if (row, name) in LOSSES) if row in ROWS else every


@dataclasses.dataclass
class Fig4Options(ProfileOptions):
    """Local energy at the end of training: EfficientNet, PyramidNet, ResNet-50, DenseNet, or any rows of Table 1.

    Examples:
      wideflat reproduce fig4 --quick
      wideflat reproduce fig4 --rows cifar10-smallconvnet --data ~/data
    """


ITEM = Item(
    name="fig4",
    title="Figure 4: flatness at the end of training",
    claim=(
        "The paper measures the local energy of final networks (EfficientNet-B0 and PyramidNet on CIFAR-100, ResNet-50 "
        "and DenseNet-121 on Tiny ImageNet): flatter profiles go with lower test errors, for a large range of σ."
    ),
    quick_means=(
        "{epochs} epochs on {images} Dress-vs-Coat images (28x28, two classes) with a residual network of 2 narrow "
        "blocks in the place of all four, the settings of each row otherwise"
    ),
    options=Fig4Options,
    make=functools.partial(ProfileFigure, choice=Choice.of(ROWS, algorithms=algorithms_of), losses=LOSSES),
)
