"""Images in memory and their statistics."""

from __future__ import annotations

import pytest
import torch

from wideflat.data import ImageData, ImageSplit
from wideflat.data.images import channel_statistics


def split(n: int, classes: int = 3) -> ImageSplit:
    generator = torch.Generator().manual_seed(n)
    images = torch.randint(0, 256, (n, 3, 4, 4), dtype=torch.uint8, generator=generator)
    return ImageSplit(images, torch.randint(classes, (n,), generator=generator))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_statistics_are_those_of_the_floats(layout: torch.memory_format) -> None:
    images = split(50).images.contiguous(memory_format=layout)
    mean, std = channel_statistics(images)
    values = images.double() / 255
    assert mean == pytest.approx(values.mean((0, 2, 3)).tolist(), rel=1e-12)
    assert std == pytest.approx(values.std((0, 2, 3), correction=0).tolist(), rel=1e-12)


def test_the_test_part_is_normalised_as_the_training_part() -> None:
    data = ImageData.of("x", ("a", "b", "c"), split(30), split(7))
    assert data.mean == channel_statistics(split(30).images)[0]
    assert (data.num_classes, data.image_size, data.channels) == (3, 4, 3)
    assert len(data.split("train")) == 30 and len(data.split("test")) == 7


def test_subsets_keep_the_statistics() -> None:
    data = ImageData.of("x", ("a", "b", "c"), split(30), split(7))
    less = data.subset(train=10, test=2)
    assert len(less.train) == 10 and len(less.test) == 2 and less.mean == data.mean
    assert torch.equal(less.train.images, data.train.images[:10])
    assert len(data.subset().train) == 30
    with pytest.raises(ValueError, match="1 to 30 images, got 31"):
        data.subset(train=31)


def test_wrong_shapes_types_and_targets_are_refused() -> None:
    good = split(4)
    with pytest.raises(ValueError, match="images must be uint8"):
        ImageSplit(good.images.float(), good.targets)
    with pytest.raises(ValueError, match="images must be uint8"):
        ImageSplit(good.images[0], good.targets)
    with pytest.raises(ValueError, match=r"targets must be int64 \(4,\), got torch\.int64 \(3,\)"):
        ImageSplit(good.images, good.targets[:3])
    with pytest.raises(ValueError, match="targets must be int64"):
        ImageSplit(good.images, good.targets.float())
    with pytest.raises(ValueError, match="targets of x must lie in 0 to 1"):
        ImageData.of("x", ("a", "b"), ImageSplit(good.images, torch.tensor([0, 1, 2, 0])), good)
    with pytest.raises(ValueError, match='"train" or "test"'):
        ImageData.of("x", ("a", "b", "c"), good, good).split("validation")
