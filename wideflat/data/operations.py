"""The image operations of AutoAugment on whole batches, each image with its own magnitude.

Every function takes bytes (n, H, W, C) and gives bytes of the same shape. Values are those of Pillow, in which the
operations were defined and the policies found, so tests compare with Pillow image by image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["GEOMETRIC", "OPERATIONS", "affine", "affine_matrix", "cut"]


def affine_matrix(operation: str, magnitude: Tensor, size: int) -> Tensor:
    """Maps from a point of the result to a point of the source: (n, 2, 3).

    Args:
        operation: One of :data:`GEOMETRIC`.
        magnitude: (n,). Shears are slopes, translations parts of the image's side, rotations degrees
            counter-clockwise.
        size: Side of the image.
    """
    v = magnitude.double()
    one, zero = torch.ones_like(v), torch.zeros_like(v)
    if operation == "ShearX":
        rows = [one, v, zero, zero, one, zero]
    elif operation == "ShearY":
        rows = [one, zero, zero, v, one, zero]
    elif operation == "TranslateX":
        rows = [one, zero, v * size, zero, one, zero]
    elif operation == "TranslateY":
        rows = [one, zero, zero, zero, one, v * size]
    elif operation == "Rotate":
        cos, sin = torch.cos(torch.deg2rad(v)), torch.sin(torch.deg2rad(v))
        half = size / 2
        rows = [cos, -sin, half - cos * half + sin * half, sin, cos, half - sin * half - cos * half]
    else:
        raise ValueError(f"operation must be one of {', '.join(GEOMETRIC)}, got {operation!r}")
    return torch.stack(rows, -1).view(-1, 2, 3)


def affine(pixels: Tensor, matrix: Tensor, fill: Sequence[int]) -> Tensor:
    """Move the pixels of each image by its own affine map, nearest neighbour; ``fill`` where the source ends.

    Args:
        pixels: Bytes (n, H, W, C).
        matrix: (n, 2, 3), from a point of the result to a point of the source.
        fill: Colour outside of the source.
    """
    n, height, width, channels = pixels.shape
    device = pixels.device
    matrix = matrix.to(device)
    y = torch.arange(height, device=device, dtype=torch.float64)[:, None] + 0.5
    x = torch.arange(width, device=device, dtype=torch.float64) + 0.5
    a, b, c, d, e, f = (matrix.reshape(n, 6, 1, 1)[:, i] for i in range(6))
    column, row = (a * x + b * y + c).floor_().long(), (d * x + e * y + f).floor_().long()
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    first = torch.arange(n, device=device)[:, None, None] * height * width
    source = first + torch.where(inside, row * width + column, 0)
    moved = pixels.reshape(-1, channels).index_select(0, source.view(-1)).view(pixels.shape)
    outside = torch.tensor(fill, dtype=torch.uint8, device=device)
    return torch.where(inside[..., None], moved, outside)


def cut(pixels: Tensor, magnitude: Tensor, place: Tensor, fill: Sequence[int]) -> Tensor:
    """Fill a square of each image: side ``magnitude`` of the width, center anywhere.

    Args:
        pixels: Bytes (n, H, W, C).
        magnitude: Side as a part of the width, (n,).
        place: Center as a part of width and height, (2, n).
        fill: The colour.
    """
    _, height, width, _ = pixels.shape
    side = magnitude.double() * width

    def inside(center: Tensor, length: int) -> Tensor:
        first = (center.double() * length - side / 2).clamp_min(0).floor()
        last = torch.minimum(first + side, torch.tensor(float(length), dtype=torch.float64)).floor()
        position = torch.arange(length)
        return ((position >= first[:, None]) & (position <= last[:, None])).to(pixels.device)

    square = (
        inside(place[1], height)[:, :, None]
        & inside(place[0], width)[:, None, :]
        & (side > 0)[:, None, None].to(pixels.device)
    )
    return torch.where(square[..., None], torch.tensor(fill, dtype=torch.uint8, device=pixels.device), pixels)


def invert(pixels: Tensor, magnitude: Tensor) -> Tensor:
    """255 minus the value."""
    return 255 - pixels


def solarize(pixels: Tensor, magnitude: Tensor) -> Tensor:
    """Invert the values from ``magnitude`` (0 to 256) on."""
    return torch.where(pixels < _per_image(magnitude), pixels, 255 - pixels)


def posterize(pixels: Tensor, magnitude: Tensor) -> Tensor:
    """Keep the ``int(magnitude)`` highest bits (0 to 8)."""
    low = 2 ** (8 - magnitude.int()) - 1
    return pixels & _per_image(255 - low).to(torch.uint8)


def autocontrast(pixels: Tensor, magnitude: Tensor) -> Tensor:
    """Stretch each channel to the full range; a channel of one value stays."""
    low = pixels.amin((1, 2), keepdim=True).double()
    high = pixels.amax((1, 2), keepdim=True).double()
    scale = 255 / (high - low).clamp_min(1)
    stretched = (pixels * scale - low * scale).clamp_(0, 255).to(torch.uint8)
    return torch.where(high > low, stretched, pixels)


def equalize(pixels: Tensor, magnitude: Tensor) -> Tensor:
    """Spread the values of each channel such that all are about equally frequent."""
    n, height, width, channels = pixels.shape
    planes = pixels.permute(0, 3, 1, 2).reshape(n * channels, -1).long()
    counts = torch.zeros(n * channels, 256, dtype=torch.int64, device=pixels.device)
    counts.scatter_add_(1, planes, torch.ones_like(planes))
    last = counts.gather(1, planes.amax(1, keepdim=True))
    step = (planes.shape[1] - last) // 255
    before = counts.cumsum(1) - counts
    table = ((step // 2 + before) // step.clamp_min(1)).clamp_(max=255)
    table = torch.where(step > 0, table, torch.arange(256, device=pixels.device))
    equal = table.gather(1, planes).to(torch.uint8)
    return equal.view(n, channels, height, width).permute(0, 2, 3, 1).contiguous()


def color(pixels: Tensor, magnitude: Tensor) -> Tensor:
    """0 is grey, 1 the image, more is more colourful."""
    return _blend(_grey(pixels).expand_as(pixels), pixels, magnitude)


def contrast(pixels: Tensor, magnitude: Tensor) -> Tensor:
    """0 is the mean grey, 1 the image, more has more contrast."""
    mean = (_grey(pixels).double().mean((1, 2, 3), keepdim=True) + 0.5).floor_()
    return _blend(mean.to(torch.uint8).expand_as(pixels), pixels, magnitude)


def brightness(pixels: Tensor, magnitude: Tensor) -> Tensor:
    """0 is black, 1 the image, more is brighter."""
    return _blend(torch.zeros_like(pixels), pixels, magnitude)


def sharpness(pixels: Tensor, magnitude: Tensor) -> Tensor:
    """0 is smoothed (3x3, weights 1 around 5; the border stays), 1 the image, more is sharper."""
    smooth = pixels.clone()
    if min(pixels.shape[1:3]) > 2:
        values = pixels.int()
        rows = values[:, :-2] + values[:, 1:-1] + values[:, 2:]
        around = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]
        total = around + 4 * values[:, 1:-1, 1:-1]
        smooth[:, 1:-1, 1:-1] = ((2 * total + 13) // 26).to(torch.uint8)  # total / 13, rounded
    return _blend(smooth, pixels, magnitude)


def _per_image(magnitude: Tensor) -> Tensor:
    return magnitude.view(-1, 1, 1, 1)


def _grey(pixels: Tensor) -> Tensor:
    """Luma of ITU-R 601-2, in Pillow's fixed-point numbers: (n, H, W, 1)."""
    if pixels.shape[-1] != 3:
        return pixels
    red, green, blue = pixels.int().unbind(-1)
    return ((19595 * red + 38470 * green + 7471 * blue + 32768) >> 16).to(torch.uint8)[..., None]


def _blend(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    """(1 - weight) start + weight end, cut to 0 to 255 and truncated."""
    first = start.float()
    return (first + _per_image(weight).float() * (end.float() - first)).clamp_(0, 255).to(torch.uint8)


#: Operations that move pixels, by name.
GEOMETRIC = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")

#: Operations that change values, by name.
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "AutoContrast": autocontrast,
    "Invert": invert,
    "Equalize": equalize,
    "Solarize": solarize,
    "Posterize": posterize,
    "Contrast": contrast,
    "Color": color,
    "Brightness": brightness,
    "Sharpness": sharpness,
}
