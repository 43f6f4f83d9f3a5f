"""Figure 5: local energy along the training of ResNet-110 on CIFAR-10."""

from __future__ import annotations

import dataclasses
import functools

from wideflat.experiments.cells import Choice
from wideflat.experiments.experiment import Item
from wideflat.experiments.profiles import MomentOptions, along_training

__all__ = ["ITEM", "Fig5Options"]

CHOICE = Choice.of(("cifar10-resnet110",))

#: The paper's training losses of the final networks.
LOSSES = {
    ("cifar10-resnet110", "sgd"): 0.001,
    ("cifar10-resnet110", "esgd"): 0.0005,
    ("cifar10-resnet110", "rsgd"): 0.0005,
}


@dataclasses.dataclass
class Fig5Options(MomentOptions):
    """Local energy along training: ResNet-110 on CIFAR-10.

    Examples:
      wideflat reproduce fig5 --quick
      wideflat reproduce fig5 --epochs 16 --moments 0.5 1 --data ~/data
    """


ITEM = Item(
    name="fig5",
    title="Figure 5: flatness along the training of ResNet-110 on CIFAR-10",
    claim=(
        "The paper follows the local energy along the training of ResNet-110 on CIFAR-10: as for ResNet-18, the "
        "flatness of the final minima agrees with their generalisation over a large range of σ."
    ),
    quick_means=(
        "{epochs} epochs on {images} Dress-vs-Coat images (28x28, two classes) with a residual network of 2 narrow "
        "blocks, the settings of ResNet-110 otherwise; profiles at two moments"
    ),
    options=Fig5Options,
    make=functools.partial(along_training, choice=CHOICE, losses=LOSSES),
)
