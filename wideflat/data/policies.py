"""Augmentation policies found by search and published: AutoAugment (CIFAR-10), Fast AutoAugment (ImageNet)."""

from __future__ import annotations

import bz2
import csv
import dataclasses
import functools
from collections.abc import Sequence
from importlib import resources

import torch
from torch import Tensor

from wideflat.checks import choice
from wideflat.checks.doors import asks
from wideflat.data.operations import GEOMETRIC, OPERATIONS, affine, affine_matrix, cut
from wideflat.kernels.float64 import has_float64

__all__ = ["Policy", "Step", "autoaugment_cifar10", "check_pixels", "fast_autoaugment_imagenet", "policy"]

_NAMES = (*GEOMETRIC, *OPERATIONS, "Cutout")


@dataclasses.dataclass(frozen=True)
class Step:
    """An operation, the probability that it is done, and its magnitude in the units of the operation."""

    operation: str
    probability: float
    magnitude: float

    def __post_init__(self) -> None:
        if self.operation not in _NAMES:
            raise ValueError(f"operation must be one of {', '.join(_NAMES)}, got {self.operation!r}")


def check_pixels(pixels: Tensor, *values: Sequence[float] | None) -> None:
    """Refuse what are no images as bytes, and values that are not one for each of their channels."""
    alike = pixels.dim() > 0 and all(each is None or len(each) == pixels.shape[-1] for each in values)
    if pixels.dtype != torch.uint8 or pixels.dim() != 4 or not alike:
        raise ValueError(
            "pixels must be uint8 (n, H, W, C), with a mean, a deviation or a colour for each channel; got "
            f"{pixels.dtype} {tuple(pixels.shape)} and {[len(each) for each in values if each is not None]}"
        )


class Policy:
    """A list of sub-policies, each of a few steps one after another. Every image draws its own sub-policy.

    (kornia's ``AutoAugment`` draws one sub-policy for a whole batch; published is one for every image.) Geometric
    steps have a random sign.

    Args:
        name: Of the policy.
        subpolicies: All of the same length.
        mean_fill: What comes in at the borders of moved images: the mean colour if true (as in the code of
            AutoAugment, where it is zero after normalisation), black otherwise (as in the code of Fast AutoAugment).

    Example:
        >>> negative = Policy("negative", [[Step("Invert", 1.0, 0)]])
        >>> pixels = torch.full((2, 4, 4, 3), 255, dtype=torch.uint8)
        >>> negative(pixels, torch.Generator()).max().item()
        0
    """

    def __init__(self, name: str, subpolicies: Sequence[Sequence[Step]], mean_fill: bool = True) -> None:
        self.name = name
        self.subpolicies = tuple(map(tuple, subpolicies))
        self.mean_fill = mean_fill
        if len({len(steps) for steps in self.subpolicies}) != 1:
            raise ValueError("a policy needs sub-policies, all with the same number of steps")
        steps = list(zip(*self.subpolicies, strict=True))  # steps[k][j]: step k of sub-policy j
        self._operation = torch.tensor([[_NAMES.index(step.operation) for step in row] for row in steps])
        self._probability = torch.tensor([[step.probability for step in row] for row in steps])
        self._magnitude = torch.tensor([[step.magnitude for step in row] for row in steps], dtype=torch.float64)

    @asks
    def __call__(self, pixels: Tensor, generator: torch.Generator, fill: Sequence[int] | None = None) -> Tensor:
        """Apply to each image a sub-policy of its own.

        Args:
            pixels: Bytes (n, H, W, C), square, on any device.
            generator: On the CPU; all random numbers come from it, and always the same number of them.
            fill: The mean colour; grey by default.
        """
        if not has_float64(pixels.device):  # has no float64, which the operations need to agree with Pillow
            return self(pixels.cpu(), generator, fill).to(pixels.device)
        check_pixels(pixels, fill)
        n, size, channels = len(pixels), pixels.shape[1], pixels.shape[-1]
        mean = [128] * channels if fill is None else list(fill)
        border = mean if self.mean_fill else [0] * channels
        chosen = torch.randint(len(self.subpolicies), (n,), generator=generator)
        draws = torch.rand(len(self._operation), 4, n, generator=generator)
        pixels = pixels.clone()
        for operations, probabilities, magnitudes, (u, sign, *place) in zip(
            self._operation, self._probability, self._magnitude, draws, strict=True
        ):
            operation, magnitude = operations[chosen], magnitudes[chosen]
            done = u < probabilities[chosen]
            signed = torch.where(sign < 0.5, magnitude, -magnitude)
            moved = (done & (operation < len(GEOMETRIC))).nonzero().view(-1)
            if len(moved):
                matrix = torch.empty(len(moved), 2, 3, dtype=torch.float64)
                for k in operation[moved].unique().tolist():
                    these = operation[moved] == k
                    matrix[these] = affine_matrix(_NAMES[k], signed[moved][these], size)
                index = moved.to(pixels.device)
                pixels[index] = affine(pixels[index], matrix, border)
            for k in operation[done & (operation >= len(GEOMETRIC))].unique().tolist():
                which = (done & (operation == k)).nonzero().view(-1)
                index = which.to(pixels.device)
                if _NAMES[k] == "Cutout":
                    at = torch.stack([p[which] for p in place])
                    pixels[index] = cut(pixels[index], magnitude[which], at, mean)
                else:
                    pixels[index] = OPERATIONS[_NAMES[k]](pixels[index], magnitude[which].to(pixels.device))
        return pixels


# The 25 sub-policies of AutoAugment for CIFAR-10: (operation, probability, level 0 to 9) twice.
# Cubuk, Zoph, Mane, Vasudevan, Le, "AutoAugment: learning augmentation policies from data", CVPR 2019
# (arXiv 1805.09501), Table 7.
_CIFAR10 = """
    Invert       0.1 7  Contrast     0.2 6
    Rotate       0.7 2  TranslateX   0.3 9
    Sharpness    0.8 1  Sharpness    0.9 3
    ShearY       0.5 8  TranslateY   0.7 9
    AutoContrast 0.5 8  Equalize     0.9 2
    ShearY       0.2 7  Posterize    0.3 7
    Color        0.4 3  Brightness   0.6 7
    Sharpness    0.3 9  Brightness   0.7 9
    Equalize     0.6 5  Equalize     0.5 1
    Contrast     0.6 7  Sharpness    0.6 5
    Color        0.7 7  TranslateX   0.5 8
    Equalize     0.3 7  AutoContrast 0.4 8
    TranslateY   0.4 3  Sharpness    0.2 6
    Brightness   0.9 6  Color        0.2 8
    Solarize     0.5 2  Invert       0.0 3
    Equalize     0.2 0  AutoContrast 0.6 0
    Equalize     0.2 8  Equalize     0.6 4
    Color        0.9 9  Equalize     0.6 6
    AutoContrast 0.8 4  Solarize     0.2 8
    Brightness   0.1 3  Color        0.7 0
    Solarize     0.4 5  AutoContrast 0.9 3
    TranslateY   0.9 9  TranslateY   0.7 9
    AutoContrast 0.9 2  Solarize     0.8 3
    Equalize     0.8 8  Invert       0.1 3
    TranslateY   0.7 9  AutoContrast 0.9 1
"""


def _autoaugment_magnitude(operation: str, level: int) -> float:
    """What a level means in the authors' code for CIFAR."""
    if operation in ("ShearX", "ShearY"):
        return 0.3 * level / 10
    if operation in ("TranslateX", "TranslateY"):
        return level / 32  # pixels of 32; the same part of the side at other sizes
    if operation == "Rotate":
        return float(int(30 * level / 10))
    if operation == "Solarize":
        return float(256 - int(256 * level / 10))
    if operation == "Posterize":
        return float(4 - int(4 * level / 10))
    if operation in ("Color", "Contrast", "Brightness", "Sharpness"):
        return 0.1 + 1.8 * level / 10
    return 0.0


@functools.cache
def autoaugment_cifar10() -> Policy:
    """AutoAugment with the policy found on CIFAR-10: 25 sub-policies of two steps.

    Magnitudes are those of the authors' code for CIFAR. There, translations are up to 10 of 32 pixels; at other image
    sizes they are the same part of the side.
    """
    subpolicies = []
    for line in _CIFAR10.split("\n"):
        words = line.split()
        if words:
            steps = [(words[i], float(words[i + 1]), int(words[i + 2])) for i in (0, 3)]
            subpolicies.append([Step(name, p, _autoaugment_magnitude(name, level)) for name, p, level in steps])
    return Policy("autoaugment", subpolicies)


#: The range over which a level 0 to 1 of Fast AutoAugment runs.
_FAST_RANGES = {
    "ShearX": (-0.3, 0.3),
    "ShearY": (-0.3, 0.3),
    "TranslateX": (-0.45, 0.45),
    "TranslateY": (-0.45, 0.45),
    "Rotate": (-30.0, 30.0),
    "Solarize": (0.0, 256.0),
    "Posterize": (4.0, 8.0),
    "Contrast": (0.1, 1.9),
    "Color": (0.1, 1.9),
    "Brightness": (0.1, 1.9),
    "Sharpness": (0.1, 1.9),
    "Cutout": (0.0, 0.2),
}


@functools.cache
def fast_autoaugment_imagenet() -> Policy:
    """Fast AutoAugment with the policy found on (reduced) ImageNet: 498 sub-policies of two steps.

    The numbers are the authors', in ``fast_autoaugment_imagenet.csv.bz2`` with their source (``bzcat`` shows it).
    """
    content = resources.files("wideflat.data").joinpath("fast_autoaugment_imagenet.csv.bz2").read_bytes()
    text = bz2.decompress(content).decode()
    rows = list(csv.reader(line for line in text.splitlines() if not line.startswith("#")))[1:]

    def step(name: str, probability: str, level: str) -> Step:
        low, high = _FAST_RANGES.get(name, (0.0, 1.0))
        return Step(name, float(probability), low + float(level) * (high - low))

    return Policy("fast-autoaugment", [[step(*row[:3]), step(*row[3:])] for row in rows], mean_fill=False)


def policy(name: str) -> Policy:
    """The policy of that name: "autoaugment" or "fast-autoaugment"."""
    known = {"autoaugment": autoaugment_cifar10, "fast-autoaugment": fast_autoaugment_imagenet}
    return known[choice("policy", name, known)]()
