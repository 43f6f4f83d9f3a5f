"""The data sets: embedded Dress-vs-Coat, CIFAR-10/100, Tiny ImageNet, Fashion-MNIST; data of your own; augmentation."""

from wideflat.data.augmentation import Augmentation
from wideflat.data.batches import Batches
from wideflat.data.catalogue import CATALOGUE, check, fetch, find, load
from wideflat.data.folders import cache_folder, search_folders
from wideflat.data.images import ImageData, ImageSplit
from wideflat.data.own import from_datasets, from_folder, from_npz
from wideflat.data.published import DataError, FileReport

__all__ = [
    "CATALOGUE",
    "Augmentation",
    "Batches",
    "DataError",
    "FileReport",
    "ImageData",
    "ImageSplit",
    "cache_folder",
    "check",
    "fetch",
    "find",
    "from_datasets",
    "from_folder",
    "from_npz",
    "load",
    "search_folders",
]
