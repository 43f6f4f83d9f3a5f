import numpy as np
import pytest
import torch

from wideflat.data.patterns import Patterns, binarize, check_patterns


def test_a_file_gives_back_what_was_saved(tmp_path):
    generator = torch.Generator().manual_seed(0)
    patterns = Patterns.from_arrays(
        torch.randn(6, 4, generator=generator), [1, -1, 1, -1, 1, 1], torch.randn(3, 4, generator=generator), [1, 1, -1]
    )
    patterns.save(tmp_path / "own.npz")
    again = Patterns.from_file(tmp_path / "own.npz")
    for name in ("inputs", "targets", "test_inputs", "test_targets"):
        assert torch.equal(getattr(again, name), getattr(patterns, name))
    assert again.source == "file own.npz"


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        ([1, 2, 3], [1], r"shape \(P, N\)"),
        ([[1, 2], [3, 4]], [1], r"each of the 2 patterns, shape \(2,\); got shape \(1,\)"),
        ([[1, 2], [3, 4]], [0, 1], r"use 2 \* targets - 1"),
        ([[1, 2], [3, 4]], [1, 3], r"\+1 or -1, got 1, 3"),
        ([[1, np.nan], [3, 4]], [1, -1], "not finite"),
        ([[1, 2], [0, 0]], [1, -1], "zero everywhere .the first is pattern 1"),
        ([["a", "b"]], [1], "array of numbers"),
        (np.empty((0, 3)), np.empty(0), "empty"),
    ],
)
def test_wrong_arrays_are_named(inputs, targets, message):
    with pytest.raises(ValueError, match=message):
        check_patterns(inputs, targets)


def test_wrong_files_are_named(tmp_path):
    path = tmp_path / "x.npz"
    path.write_bytes(b"not a zip file")
    with pytest.raises(ValueError, match=r"x\.npz is not a whole \.npz file"):
        Patterns.from_file(path)
    np.savez(path, images=np.ones((2, 2)))
    with pytest.raises(ValueError, match=r"must hold arrays 'inputs'.*it holds images"):
        Patterns.from_file(path)
    whole = tmp_path / "whole.npz"
    np.savez(whole, inputs=np.ones((2, 2)), targets=np.ones(2))
    path.write_bytes(whole.read_bytes()[:-40])
    with pytest.raises(ValueError, match="not a whole"):
        Patterns.from_file(path)
    with pytest.raises(FileNotFoundError):
        Patterns.from_file(tmp_path / "none.npz")


def test_test_patterns_must_fit():
    with pytest.raises(ValueError, match="give both or neither"):
        Patterns.from_arrays([[1, 2]], [1], test_inputs=[[1, 2]])
    with pytest.raises(ValueError, match="test patterns have 3 inputs, training patterns have 2"):
        Patterns.from_arrays([[1, 2]], [1], [[1, 2, 3]], [1])


def test_binarize_uses_each_images_median_and_refuses_constant_images():
    images = torch.tensor([[[0, 1], [2, 3]], [[5, 5], [5, 9]]])
    assert binarize(images).tolist() == [[-1, -1, 1, 1], [-1, -1, -1, 1]]
    with pytest.raises(ValueError, match=r"1 of 2 images have no pixel above their median .the first is image 1"):
        binarize([[0, 1], [7, 7]])


def test_patterns_without_a_test_set_are_read_again(tmp_path):
    Patterns.from_arrays([[1, -1], [1, 1]], [1, -1]).save(tmp_path / "own.npz")
    again = Patterns.from_file(tmp_path / "own.npz")
    assert again.targets.tolist() == [1, -1] and again.test_inputs.shape == (0, 2)
