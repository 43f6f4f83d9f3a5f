"""The data sets: embedded Dress-vs-Coat, CIFAR-10/100, Tiny ImageNet, Fashion-MNIST; and augmentation."""

from wideflat.data.augmentation import Augmentation
from wideflat.data.batches import Batches
from wideflat.data.images import ImageData, ImageSplit

__all__ = ["Augmentation", "Batches", "ImageData", "ImageSplit"]
