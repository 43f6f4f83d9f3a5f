"""Every operation on whole batches against Pillow, image by image."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from wideflat.data.operations import GEOMETRIC, OPERATIONS, affine, affine_matrix, cut

SIZE = 32


def pictures(n: int, seed: int = 0) -> torch.Tensor:
    """Random pictures of several kinds: noise, narrow range, one colour, a ramp."""
    generator = np.random.default_rng(seed)
    out = generator.integers(0, 256, (n, SIZE, SIZE, 3), dtype=np.uint8)
    out[1] = generator.integers(100, 130, (SIZE, SIZE, 3))
    out[2] = 77
    out[3] = np.linspace(0, 255, SIZE).astype(np.uint8)[:, None, None]
    out[4, ..., 0] = 200
    out[5] = np.where(generator.random((SIZE, SIZE, 1)) < 0.95, 10, out[5])
    return torch.from_numpy(out)


PILLOW: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "AutoContrast": lambda image, v: ImageOps.autocontrast(image),
    "Invert": lambda image, v: ImageOps.invert(image),
    "Equalize": lambda image, v: ImageOps.equalize(image),
    "Solarize": lambda image, v: ImageOps.solarize(image, v),
    "Posterize": lambda image, v: ImageOps.posterize(image, int(v)) if v >= 1 else Image.new("RGB", image.size),
    "Contrast": lambda image, v: ImageEnhance.Contrast(image).enhance(v),
    "Color": lambda image, v: ImageEnhance.Color(image).enhance(v),
    "Brightness": lambda image, v: ImageEnhance.Brightness(image).enhance(v),
    "Sharpness": lambda image, v: ImageEnhance.Sharpness(image).enhance(v),
}
RANGES = {"Solarize": (0, 256), "Posterize": (0, 8)}


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_values_equal_pillows(name: str) -> None:
    n = 24
    pixels = pictures(n)
    magnitude = torch.linspace(*RANGES.get(name, (0.1, 1.9)), n, dtype=torch.float64)
    actual = OPERATIONS[name](pixels, magnitude).numpy().astype(int)
    for i in range(n):
        expected = np.asarray(PILLOW[name](Image.fromarray(pixels[i].numpy()), float(magnitude[i]))).astype(int)
        difference = np.abs(actual[i] - expected)
        assert difference.max() <= 1, (name, i, float(magnitude[i]))
        assert (difference > 0).mean() < 0.002, (name, i, float(magnitude[i]))  # the last bit of a float32


def pillow_affine(image: Image.Image, name: str, v: float, fill: tuple[int, int, int]) -> Image.Image:
    if name == "Rotate":
        return image.rotate(v, fillcolor=fill)
    data = {
        "ShearX": (1, v, 0, 0, 1, 0),
        "ShearY": (1, 0, 0, v, 1, 0),
        "TranslateX": (1, 0, v * SIZE, 0, 1, 0),
        "TranslateY": (1, 0, 0, 0, 1, v * SIZE),
    }[name]
    return image.transform(image.size, Image.Transform.AFFINE, data, fillcolor=fill)


@pytest.mark.parametrize("name", GEOMETRIC)
def test_moved_pixels_equal_pillows(name: str) -> None:
    n, fill = 20, (1, 2, 3)
    pixels = pictures(n)
    magnitude = torch.linspace(-1, 1, n, dtype=torch.float64) * {"Rotate": 30, "ShearX": 0.3, "ShearY": 0.3}.get(
        name, 0.45
    )
    actual = affine(pixels, affine_matrix(name, magnitude, SIZE), fill)
    for i in range(n):
        expected = np.asarray(pillow_affine(Image.fromarray(pixels[i].numpy()), name, float(magnitude[i]), fill))
        same = (actual[i].numpy() == expected).all(-1).mean()
        assert same > 0.99, (name, i)  # Pillow rounds the map to 1/65536: points on an edge may fall to either side


def test_cut_equals_pillows_rectangle() -> None:
    n, fill = 30, (9, 8, 7)
    pixels = pictures(n)
    generator = torch.Generator().manual_seed(0)
    magnitude = torch.linspace(0, 0.2, n)
    place = torch.rand(2, n, generator=generator)
    actual = cut(pixels, magnitude, place, fill)
    assert torch.equal(actual[0], pixels[0]), "nothing is cut at magnitude 0"
    for i in range(1, n):
        side = float(magnitude[i].double()) * SIZE
        x0, y0 = (int(max(0, float(p.double()) * SIZE - side / 2)) for p in place[:, i])
        image = Image.fromarray(pixels[i].numpy())
        ImageDraw.Draw(image).rectangle((x0, y0, int(min(SIZE, x0 + side)), int(min(SIZE, y0 + side))), fill)
        assert (actual[i].numpy() == np.asarray(image)).all()


def test_identities() -> None:
    pixels = pictures(8)
    one = torch.ones(8)
    for name in ("Contrast", "Color", "Brightness", "Sharpness"):
        assert torch.equal(OPERATIONS[name](pixels, one), pixels), name
    assert torch.equal(OPERATIONS["Posterize"](pixels, 8 * one), pixels)
    assert torch.equal(OPERATIONS["Solarize"](pixels, 256 * one), pixels)
    assert torch.equal(OPERATIONS["Solarize"](pixels, 0 * one), OPERATIONS["Invert"](pixels, one))
    assert not OPERATIONS["Brightness"](pixels, 0 * one).any()
    for name in GEOMETRIC:
        assert torch.equal(affine(pixels, affine_matrix(name, 0 * one, SIZE), (0, 0, 0)), pixels), name


def test_grey_images_work_too() -> None:
    grey = pictures(8)[..., :1].contiguous()
    for name, operation in OPERATIONS.items():
        assert operation(grey, torch.full((8,), 0.5 if name != "Posterize" else 4.0)).shape == grey.shape, name


def test_unknown_geometry_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of ShearX"):
        affine_matrix("Zoom", torch.ones(1), SIZE)
