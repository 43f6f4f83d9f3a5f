"""Batches: complete, reproducible, any of them at any time."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wideflat.data import Augmentation, Batches, ImageData, ImageSplit


def numbered(n: int = 23, size: int = 6, channels: int = 3) -> ImageData:
    """Image i is full of the value i."""
    pixels = torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1).expand(n, channels, size, size).contiguous()
    part = ImageSplit(pixels, torch.arange(n) % 10)
    return ImageData.of("numbered", tuple("0123456789"), part, part)


def identity(data: ImageData, images: torch.Tensor) -> list[int]:
    """Which images these are, read from their pixels."""
    return (images[:, 0, 0, 0] * data.std[0] * 255 + data.mean[0] * 255).round().long().tolist()


def test_an_epoch_is_every_image_once_and_epochs_differ() -> None:
    data = numbered()
    stream = Batches(data, 5, seed=3)
    epochs = []
    for number in range(3):
        order: list[int] = []
        sizes = []
        for images, targets in stream.epoch(number):
            which = identity(data, images)
            assert targets.tolist() == [i % 10 for i in which]
            order += which
            sizes.append(len(which))
        assert sizes == [5, 5, 5, 5, 3] and len(stream) == 5
        assert sorted(order) == list(range(23))
        epochs.append(order)
    assert len({tuple(order) for order in epochs}) == 3


def test_replicas_and_seeds_have_their_own_order() -> None:
    data = numbered()

    def order(**settings_: int) -> tuple[int, ...]:
        return tuple(i for images, _ in Batches(data, 5, **settings_).epoch(0) for i in identity(data, images))

    orders = {order(seed=seed, replica=replica) for seed, replica in itertools.product(range(3), range(4))}
    assert len(orders) == 12
    assert order(seed=1, replica=2) == order(seed=1, replica=2)


def test_test_images_come_in_order_and_without_augmentation() -> None:
    data = numbered()
    stream = Batches(data, 10, split="test")
    batches = [identity(data, images) for images, _ in stream.epoch(0)]
    assert batches == [list(range(10)), list(range(10, 20)), [20, 21, 22]]


def test_drop_last() -> None:
    stream = Batches(numbered(), 5, drop_last=True)
    assert [len(t) for _, t in stream.epoch(0)] == [5, 5, 5, 5]
    assert len(stream) == 4
    with pytest.raises(ValueError, match="drop_last leaves nothing"):
        Batches(numbered(3), 5, drop_last=True)


@settings(max_examples=25, deadline=None)
@given(epoch=st.integers(0, 3), batch_size=st.integers(1, 12))
def test_any_batch_can_be_asked_for_at_any_time(epoch: int, batch_size: int) -> None:
    data = numbered()
    augment = Augmentation(padding=2, flip=True, policy="autoaugment", cutout=2)
    first, second = (Batches(data, batch_size, seed=7, replica=1, augment=augment) for _ in range(2))
    expected = [batch for k in range(epoch + 1) for batch in first.epoch(k)][-len(first) :]
    for position in reversed(range(len(second))):
        for ours, theirs in zip(second.batch(epoch, position), expected[position], strict=True):
            assert torch.equal(ours, theirs)


def test_layout_and_device() -> None:
    images, targets = Batches(numbered(), 4, augment=Augmentation(padding=1, flip=True)).batch(0, 0)
    assert images.dtype == torch.float32 and images.is_contiguous(memory_format=torch.channels_last)
    assert targets.dtype == torch.int64
    images, _ = Batches(numbered(channels=1), 4, augment=Augmentation(padding=1, flip=True, size=9)).batch(0, 0)
    assert images.shape == (4, 1, 9, 9)


def test_channels_last_data_is_not_copied() -> None:
    pixels = torch.randint(0, 256, (6, 4, 4, 3), dtype=torch.uint8)
    part = ImageSplit(pixels.permute(0, 3, 1, 2), torch.zeros(6, dtype=torch.int64))
    stream = Batches(ImageData.of("x", ("a",), part, part), 2)
    assert stream._pixels.data_ptr() == pixels.data_ptr()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="batch_size must be a whole number >= 1"):
        Batches(numbered(), 0)
    with pytest.raises(ValueError, match='"train" or "test"'):
        Batches(numbered(), 2, split="val")
    with pytest.raises(ValueError, match="position must be at most 4"):
        Batches(numbered(), 5).batch(0, 5)
