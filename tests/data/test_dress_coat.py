import gzip
import hashlib
import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from wideflat.data import dress_coat
from wideflat.files import sha256

_spec = importlib.util.spec_from_file_location(
    "make_dress_coat", Path(__file__).parents[2] / "tools" / "make_dress_coat.py"
)
make_dress_coat = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_dress_coat)


def test_the_embedded_file_is_whole_and_has_the_counts_of_the_paper():
    assert sha256(dress_coat.FILE) == dress_coat.SHA256
    inputs, targets, test_inputs, test_targets = dress_coat.images()
    assert inputs.shape == (3927, 784) and test_inputs.shape == (677, 784)
    assert ((targets > 0).sum(), (targets < 0).sum()) == dress_coat.COUNTS["train"]
    assert ((test_targets > 0).sum(), (test_targets < 0).sum()) == dress_coat.COUNTS["test"]
    # The median splits an image in two halves: the darker one may be larger where pixels are equal to the median.
    above = (inputs > 0).mean(axis=1)
    assert above.max() <= 0.5 and above.mean() > 0.49


def test_the_pixels_are_those_of_earlier_versions():
    """The digest of all rows as version 0.1 kept them: a byte of flags and 98 of pixels an image."""
    digest = hashlib.sha256()
    inputs, targets, test_inputs, test_targets = dress_coat.images()
    for test, (signs, sides) in enumerate(((inputs, targets), (test_inputs, test_targets))):
        flags = (sides > 0).astype(np.uint8) | np.uint8(test << 1)
        digest.update(np.concatenate([flags[:, None], np.packbits(signs > 0, axis=1)], axis=1).tobytes())
    assert digest.hexdigest() == "58affb23e31f897a73179ecb1ce15821462c8121b1f19d78571bfac1021a1295"


def test_a_draw_depends_on_its_seed_only():
    first, again, other = dress_coat.load(seed=3), dress_coat.load(seed=3), dress_coat.load(seed=4)
    assert torch.equal(first.inputs, again.inputs) and torch.equal(first.targets, again.targets)
    assert not torch.equal(first.inputs, other.inputs)
    assert torch.equal(first.test_inputs, other.test_inputs)
    assert (first.targets > 0).sum() == 250


def test_draws_are_nested():
    small, large = dress_coat.load(100, seed=1), dress_coat.load(200, seed=1)
    rows = {row.numpy().tobytes() for row in large.inputs}
    assert all(row.numpy().tobytes() in rows for row in small.inputs)


def test_the_random_draw_keeps_the_frequencies():
    dress = [int((dress_coat.load(500, "random", seed).targets > 0).sum()) for seed in range(20)]
    assert 35 < np.mean(dress) < 53  # 500 * 344 / 3927 = 43.8, standard error 1.3
    assert len(set(dress)) > 1


@pytest.mark.parametrize(
    ("size", "draw", "message"),
    [
        (499, "balanced", "even number from 2 to 688"),
        (690, "balanced", 'or draw="random" for up to 3,927; got 690'),
        (4000, "random", "from 1 to 3927"),
        (500, "stratified", '"balanced" or "random", got \'stratified\''),
    ],
)
def test_impossible_draws_are_refused(size, draw, message):
    with pytest.raises(ValueError, match=message):
        dress_coat.load(size, draw)


def test_a_damaged_file_is_never_loaded(tmp_path, monkeypatch):
    damaged = tmp_path / "dress_coat.npy"
    content = bytearray(dress_coat.FILE.read_bytes())
    content[1000] ^= 1
    damaged.write_bytes(content)
    monkeypatch.setattr(dress_coat, "FILE", damaged)
    with pytest.raises(RuntimeError, match=r"dress_coat\.npy is damaged"):
        dress_coat.images.__wrapped__()


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


def test_the_script_keeps_the_right_images(tmp_path, monkeypatch):
    """Synthetic idx files with a known answer: class, range of the median, order, bits."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (8, 28, 28))
    images[1] //= 8  # median below a quarter of the range
    images[2] = 255 - images[2] // 8  # and above three quarters
    labels = np.array([3, 3, 4, 4, 0, 9, 3, 4])
    for name in ("train", "t10k"):
        write_idx(tmp_path / f"{name}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / f"{name}-labels-idx1-ubyte.gz", labels)
    digest = make_dress_coat.main(tmp_path, tmp_path / "out.npy")
    monkeypatch.setattr(dress_coat, "FILE", tmp_path / "out.npy")
    monkeypatch.setattr(dress_coat, "SHA256", digest)
    inputs, targets, test_inputs, test_targets = dress_coat.images.__wrapped__()
    assert targets.tolist() == test_targets.tolist() == [1, -1, 1, -1]
    kept = images[[0, 3, 6, 7]].reshape(4, -1)
    assert np.array_equal(inputs > 0, kept > np.median(kept, axis=1, keepdims=True))
    assert np.array_equal(inputs, test_inputs)
    assert make_dress_coat.main(tmp_path, tmp_path / "again.npy") == digest


def test_the_script_names_missing_and_wrong_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"idx files"):
        make_dress_coat.main(tmp_path, tmp_path / "out.npy")
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"PNG")
    with pytest.raises(ValueError, match="not an idx file"):
        make_dress_coat.main(tmp_path, tmp_path / "out.npy")
    assert not (tmp_path / "out.npy").exists()


@pytest.mark.slow
@pytest.mark.skipif("FASHION_MNIST" not in os.environ, reason="needs the idx files: set FASHION_MNIST to their folder")
def test_the_embedded_file_is_made_again_byte_for_byte(tmp_path):
    assert make_dress_coat.main(Path(os.environ["FASHION_MNIST"]), tmp_path / "out.npy") == dress_coat.SHA256
