"""Small black and white images in few bytes: a context model and an entropy coder.

A pixel is predicted by its four neighbours that come before it, by the pixel that mirrors it and the one beside that
(clothes are symmetric), by its column and by its quarter of the rows; how often it is 1 in each of these contexts is in
the file, as one of few values. What the prediction leaves open is coded by rANS (Duda, arXiv 1311.2540), many images at
a time, so that NumPy can do it.
"""

from __future__ import annotations

import numpy as np

__all__ = ["pack", "unpack"]

#: Frequencies are of 2^12; a coder's state has 16 to 32 bits, and gives and takes 16 at a time.
BITS, HALF, STATE = 12, np.uint64(16), np.uint64(1 << 16)
#: Images that one coder codes, one after the other: a coder costs 4 bytes.
IMAGES = 8
#: Values of the pixels that predict one, for each column and quarter of the rows.
NEIGHBOURS = 64


def pack(images: np.ndarray) -> np.ndarray:
    """The words of 16 bits that ``unpack`` makes the images of.

    Args:
        images: Zeros and ones in uint8, shape (number, height, width), both sides even.
    """
    number, height, width = images.shape
    planes = np.ascontiguousarray(images.transpose(1, 2, 0))
    contexts = np.stack([_contexts(planes, y, x) for y in range(height) for x in range(width)])
    pixels = planes.reshape(-1, number)
    size = NEIGHBOURS * width * 4
    ones = np.bincount(contexts.ravel(), weights=pixels.ravel(), minlength=size)
    share = (ones + 0.02) / (np.bincount(contexts.ravel(), minlength=size) + 0.04)
    odds = 2.0 ** (np.round(2 * np.log2(share / (1 - share))) / 2)  # few values, so that the table compresses well
    frequencies = np.clip(np.round(odds / (1 + odds) * 2**BITS), 1, 2**BITS - 1).astype(np.uint64)
    coders = -(-number // IMAGES)
    state = np.full(coders, STATE)
    written: list[np.ndarray] = []
    for image in reversed(range(IMAGES)):  # the last in is the first out
        rows = np.arange(image * coders, min((image + 1) * coders, number))
        for place in reversed(range(height * width)):
            start, frequency = _interval(frequencies[contexts[place, rows]], pixels[place, rows] > 0)
            mine = state[: len(rows)]
            full = mine >= frequency << np.uint64(32 - BITS)
            written.append((mine[full] & (STATE - np.uint64(1))).astype(np.uint16))
            mine = np.where(full, mine >> HALF, mine)
            state[: len(rows)] = ((mine // frequency) << np.uint64(BITS)) + mine % frequency + start
    head = [np.array([number, height, width]), frequencies, state & (STATE - np.uint64(1)), state >> HALF]
    return np.concatenate([*(part.astype(np.uint16) for part in head), *reversed(written)])


def unpack(words: np.ndarray) -> np.ndarray:
    """The images that were packed.

    Example:
        >>> image = (np.indices((4, 6)).sum(0) % 3 == 0).astype(np.uint8)
        >>> bool((unpack(pack(image[None])) == image).all())
        True
    """
    number, height, width = (int(value) for value in words[:3])
    coders, size = -(-number // IMAGES), NEIGHBOURS * width * 4
    frequencies = words[3 : 3 + size].astype(np.uint64)
    position = 3 + size + 2 * coders
    low, high = words[3 + size : position].astype(np.uint64).reshape(2, coders)
    state = low | (high << HALF)
    images = np.zeros((number, height, width), np.uint8)
    for first in range(0, number, coders):
        mine = state[: number - first]
        planes = np.zeros((height, width, len(mine)), np.uint8)
        for y in range(height):
            for x in range(width):
                slot = mine & np.uint64(2**BITS - 1)
                ones = frequencies[_contexts(planes, y, x)]
                pixel = slot < ones
                start, frequency = _interval(ones, pixel)
                mine = frequency * (mine >> np.uint64(BITS)) + slot - start
                empty = np.flatnonzero(mine < STATE)
                mine[empty] = (mine[empty] << HALF) | words[position : position + len(empty)]
                position += len(empty)
                planes[y, x] = pixel
        images[first : first + coders], state[: len(mine)] = planes.transpose(2, 0, 1), mine
    return images


def _contexts(planes: np.ndarray, y: int, x: int) -> np.ndarray:
    """What is known of a pixel before it is itself, for each image: a whole number below 64 * width * 4."""
    height, width, number = planes.shape
    known = np.zeros(number, np.uint8)
    before = ((y, x - 1), (y - 1, x), (y - 1, x + 1), (y - 1, x - 1))
    for row, column in (*before, (y, width - 1 - x), (y, width - x)):
        seen = row >= 0 and 0 <= column < width and (row < y or column < x)
        known = 2 * known + planes[row, column] if seen else 2 * known
    return known.astype(np.intp) * (4 * width) + (4 * x + 4 * y // height)


def _interval(ones: np.ndarray, pixel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the part of a pixel's value begins among 2^12, and how long it is."""
    return np.where(pixel, np.uint64(0), ones), np.where(pixel, ones, np.uint64(2**BITS) - ones)
