"""The architectures of Table 1 and of the correlation figure.

Each is a function that takes ``num_classes`` and returns a new network with freshly drawn weights.
"""

from wideflat.models.densenet import densenet121
from wideflat.models.efficientnet import efficientnet_b0
from wideflat.models.initialisation import kaiming_normal
from wideflat.models.pyramidnet import pyramidnet272
from wideflat.models.resnet import resnet18, resnet50, resnet110
from wideflat.models.small_conv_net import smallconvnet
from wideflat.models.vgg import vgg3x512

__all__ = [
    "densenet121",
    "efficientnet_b0",
    "kaiming_normal",
    "pyramidnet272",
    "resnet18",
    "resnet50",
    "resnet110",
    "smallconvnet",
    "vgg3x512",
]
