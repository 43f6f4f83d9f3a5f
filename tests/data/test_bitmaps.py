import numpy as np
import pytest

from wideflat.data.bitmaps import IMAGES, NEIGHBOURS, pack, unpack


@pytest.mark.parametrize("number", [1, 2, 7, 8, 33])
@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 1.0])
def test_what_was_packed_is_unpacked(number, share):
    images = (np.random.default_rng(number).random((number, 6, 8)) < share).astype(np.uint8)
    words = pack(images)
    assert words.dtype == np.uint16
    assert np.array_equal(unpack(words), images)


def test_words_after_the_images_are_left_alone():
    images = np.eye(4, dtype=np.uint8)[None].repeat(3, axis=0)
    assert np.array_equal(unpack(np.append(pack(images), np.uint16(7))), images)


def test_what_the_model_knows_costs_little():
    """Symmetric shapes in the middle of an image, wider or narrower: far less than a bit a pixel."""
    widths = np.random.default_rng(0).integers(4, 14, size=(500, 1, 1))
    across = np.abs(np.arange(28) - 13.5)[None, None, :]
    images = np.broadcast_to(across < widths, (500, 28, 28)).astype(np.uint8)
    table, coders = NEIGHBOURS * 28 * 4, 4 * (-(-500 // IMAGES))
    assert 16 * (len(pack(images)) - table - coders // 2) < 0.05 * images.size
