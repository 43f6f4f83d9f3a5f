"""The reduced Fashion-MNIST of Appendix B.1: Dress against Coat, binarised, embedded in the package."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import numpy as np
import torch

from wideflat.checks import choice, whole
from wideflat.data.bitmaps import unpack
from wideflat.data.patterns import Patterns

__all__ = ["COUNTS", "FILE", "SHA256", "images", "load"]

#: The embedded images, made by ``tools/make_dress_coat.py``: words of ``data.bitmaps``, then a byte for each image.
FILE = Path(__file__).with_name("dress_coat.npy")
SHA256 = "179f6e61848cbc8c589996a07adf8f7199ade56a1e9476f6f7f3399b5488c683"

#: How many images there are of (Dress, Coat).
COUNTS = {"train": (344, 3583), "test": (74, 603)}


def load(size: int | None = 500, draw: str = "balanced", seed: int = 0) -> Patterns:
    """Training patterns drawn by seed, with the whole test set.

    Images of Fashion-MNIST's classes Dress (target +1) and Coat (target -1) whose median pixel lies between 0.25 and
    0.75 of the range, each binarised to +-1 at its own median. There are 3,927 of them for training (344 Dress, 3,583
    Coat) and 677 for testing (74, 603), so that always answering Coat has 10.9% test error: look at the balanced test
    error too.

    The paper trains on 500 patterns and does not say how they were drawn.

    Args:
        size: How many training patterns; None for all that the draw can give.
        draw: ``"balanced"`` for as many of each class (at most 688 in all), ``"random"`` for a draw without regard
            to the class (500 are then about 44 Dress and 456 Coat).
        seed: The seed of the draw. Draws with one seed are nested: the first patterns of a larger balanced or random
            draw are those of a smaller one, up to their order.

    Example:
        >>> patterns = load(500, seed=0)
        >>> patterns.inputs.shape, patterns.test_inputs.shape
        (torch.Size([500, 784]), torch.Size([677, 784]))
        >>> int(patterns.targets.sum()), patterns.inputs.unique().tolist()
        (0, [-1.0, 1.0])
        >>> load(size=None, draw="random").inputs.shape
        torch.Size([3927, 784])
    """
    choice("draw", draw, ("balanced", "random"))
    size, seed = None if size is None else whole("size", size, 1), whole("seed", seed, most=2**63 - 1)
    inputs, targets, test_inputs, test_targets = images()
    shuffled = np.random.Generator(np.random.PCG64(seed)).permutation(len(inputs))
    if draw == "balanced":
        dress, coat = shuffled[targets[shuffled] > 0], shuffled[targets[shuffled] < 0]
        most = 2 * min(len(dress), len(coat))
        shuffled = np.stack([dress[: most // 2], coat[: most // 2]], axis=1).ravel()
    most = len(shuffled)
    size = most if size is None else size
    if not 1 <= size <= most or (draw == "balanced" and size % 2):
        limit = f"an even number from 2 to {most}" if draw == "balanced" else f"from 1 to {most}"
        more = ', or draw="random" for up to 3,927' if draw == "balanced" and size > most else ""
        raise ValueError(f'size must be {limit} with draw="{draw}"{more}; got {size}')
    chosen = np.sort(shuffled[:size])
    return Patterns(
        torch.from_numpy(inputs[chosen].astype(np.float32)),
        torch.from_numpy(targets[chosen].astype(np.float32)),
        torch.from_numpy(test_inputs.astype(np.float32)),
        torch.from_numpy(test_targets.astype(np.float32)),
        source=f"dress_coat(size={size}, draw={draw!r}, seed={seed})",
    )


@functools.cache
def images() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """All embedded images as +-1 in int8, with their targets: training inputs and targets, test inputs and targets."""
    content = FILE.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256:
        raise RuntimeError(f"{FILE.name} is damaged (SHA-256 {digest}, expected {SHA256}): install the package again")
    words = np.load(FILE, allow_pickle=False)
    bits = unpack(words)
    tail = words[len(words) - (len(bits) + 1) // 2 :]
    flags = tail.astype("<u2").view(np.uint8)[: len(bits)]  # bit 0: a Dress, bit 1: for testing
    signs = 2 * bits.reshape(len(bits), -1).astype(np.int8) - 1
    targets = 2 * (flags & 1).astype(np.int8) - 1
    test = flags >> 1 == 1
    return signs[~test], targets[~test], signs[test], targets[test]
