"""Crops, flips, normalisation, Cutout and resizing against loops over images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from wideflat.data import Augmentation
from wideflat.data.augmentation import crop, cutout, flip, normalise, resize


def pictures(n: int, size: int = 12, channels: int = 3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, size, size, channels), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(("size", "channels", "padding"), [(12, 3, 4), (7, 1, 2), (5, 3, 1), (8, 3, 8)])
def test_crop_and_flip_equal_the_loop(size: int, channels: int, padding: int) -> None:
    pixels = pictures(9, size, channels)
    generator = torch.Generator().manual_seed(1)
    top, left = torch.randint(2 * padding + 1, (2, 9), generator=generator)
    mirrored = torch.rand(9, generator=generator) < 0.5
    assert mirrored.any() and not mirrored.all()  # both cases are there
    actual = crop(flip(pixels, mirrored), top, left, padding)
    for i in range(9):
        image = pixels[i].numpy()
        if mirrored[i]:
            image = image[:, ::-1]
        padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
        expected = padded[top[i] : top[i] + size, left[i] : left[i] + size]
        assert (actual[i].numpy() == expected).all()


def test_crop_without_offset_is_the_image_and_beyond_the_border_is_zero() -> None:
    pixels = pictures(2)
    middle = torch.tensor([4, 4])
    assert torch.equal(crop(pixels, middle, middle, 4), pixels)
    corner = crop(pixels, torch.tensor([0, 8]), torch.tensor([0, 8]), 4)
    assert not corner[0, :4].any() and not corner[0, :, :4].any()
    assert not corner[1, -4:].any() and not corner[1, :, -4:].any()


def test_normalise_is_channels_last_and_right() -> None:
    pixels = pictures(3)
    mean, std = (0.1, 0.5, 0.9), (0.2, 0.25, 0.3)
    actual = normalise(pixels, mean, std)
    expected = (pixels.permute(0, 3, 1, 2).double() / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[
        :, None, None
    ]
    assert actual.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_cutout_zeroes_the_square_and_may_stick_out() -> None:
    images = normalise(pictures(3), (0.0,) * 3, (1.0,) * 3) + 1
    cut = cutout(images, torch.tensor([0, 6, 11]), torch.tensor([0, 6, 5]), 4)
    zero = (cut == 0).all(1)
    expected = torch.zeros(3, 12, 12, dtype=torch.bool)
    expected[0, 0:2, 0:2] = expected[1, 4:8, 4:8] = expected[2, 9:12, 3:7] = True
    assert torch.equal(zero, expected)
    assert torch.equal(cut[~expected[:, None].expand_as(cut)], images[~expected[:, None].expand_as(cut)])
    assert cut.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("old", "new"), [(32, 224), (28, 32), (64, 32)])
def test_resize_agrees_with_pillow(old: int, new: int) -> None:
    ramp = torch.linspace(0, 255, old)
    smooth = ((ramp[:, None] + ramp) / 2).to(torch.uint8)[None, :, :, None].expand(1, old, old, 3).contiguous()
    actual = resize(smooth, new)[0].numpy().astype(int)
    expected = np.asarray(Image.fromarray(smooth[0].numpy()).resize((new, new), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(actual - expected).max() <= 1


def test_the_whole_chain_is_a_function_of_the_generator() -> None:
    augmentation = Augmentation(padding=4, flip=True, policy="autoaugment", cutout=4)
    pixels = pictures(16)

    def once(seed: int) -> torch.Tensor:
        return augmentation(pixels, (0.5,) * 3, (0.25,) * 3, torch.Generator().manual_seed(seed))

    assert torch.equal(once(1), once(1))
    assert not torch.equal(once(1), once(2))
    assert once(1).shape == (16, 3, 12, 12)
    assert once(1).is_contiguous(memory_format=torch.channels_last)


def test_all_offsets_and_both_flips_are_drawn() -> None:
    """A picture whose values say where they come from: which crops occurred can be read off."""
    size, padding, n = 6, 2, 4000
    place = torch.arange(1, size * size + 1, dtype=torch.uint8).view(1, size, size, 1).expand(n, -1, -1, -1)
    out = Augmentation(padding=padding, flip=True)(place.contiguous(), (0.0,), (1 / 255,), torch.Generator())
    center = out[:, 0, 2:4, 2:4].round().long()
    seen = {(int(a), int(b)) for a, b in zip(center[:, 0, 0], center[:, 0, 1], strict=True)}
    assert len(seen) == 2 * (2 * padding + 1) ** 2


def test_evaluation_only_resizes_and_normalises() -> None:
    augmentation = Augmentation(padding=4, flip=True, policy="fast-autoaugment", cutout=16, size=24)
    evaluation = augmentation.evaluation()
    assert evaluation == Augmentation(size=24)
    pixels = pictures(2)
    out = evaluation(pixels, (0.0,) * 3, (1.0,) * 3, torch.Generator())
    assert torch.equal((out * 255).round().to(torch.uint8).permute(0, 2, 3, 1), resize(pixels, 24))


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="padding"):
        Augmentation(padding=-1)
    with pytest.raises(ValueError, match='policy must be "autoaugment" or'):
        Augmentation(policy="randaugment")  # type: ignore[arg-type]
