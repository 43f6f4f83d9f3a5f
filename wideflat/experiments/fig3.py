"""Figure 3: local energy along the training of ResNet-18 on CIFAR-10."""

from __future__ import annotations

import dataclasses
import functools

from wideflat.experiments.cells import Choice
from wideflat.experiments.experiment import Item
from wideflat.experiments.profiles import MomentOptions, along_training

__all__ = ["ITEM", "Fig3Options"]

CHOICE = Choice.of(("cifar10-resnet18",))

#: The paper's training losses of the final networks.
LOSSES = {
    ("cifar10-resnet18", "sgd"): 0.005,
    ("cifar10-resnet18", "esgd"): 0.01,
    ("cifar10-resnet18", "rsgd"): 0.005,
}


@dataclasses.dataclass
class Fig3Options(MomentOptions):
    """Local energy along training: ResNet-18 on CIFAR-10.

    Examples:
      wideflat reproduce fig3 --quick
      wideflat reproduce fig3 --epochs 16 --moments 0.5 1 --data ~/data
    """


ITEM = Item(
    name="fig3",
    title="Figure 3: flatness along the training of ResNet-18 on CIFAR-10",
    claim=(
        "The paper follows the local energy along the training of ResNet-18 on CIFAR-10: the minima found at the end "
        "by rSGD and eSGD are flatter than that of SGD over a wide range of σ, and generalise better."
    ),
    quick_means=(
        "{epochs} epochs on {images} Dress-vs-Coat images (28x28, two classes) with a residual network of 2 narrow "
        "blocks, the settings of ResNet-18 otherwise; profiles at two moments"
    ),
    options=Fig3Options,
    make=functools.partial(along_training, choice=CHOICE, losses=LOSSES),
)
