"""Targets as class labels: where the classes are, and what counts."""

import pytest
import torch

from wideflat.evaluation.labels import IGNORED, Labels, class_axis, distribution_axis, sums_to_one


def test_the_axis_of_the_classes_is_told_by_the_shape_of_the_labels():
    assert class_axis(torch.Size([8, 3]), torch.Size([8])) == 1
    assert class_axis(torch.Size([8, 5, 3]), torch.Size([8, 5])) == 2
    assert class_axis(torch.Size([8, 3, 5]), torch.Size([8, 5])) == 1
    assert class_axis(torch.Size([8, 3, 5, 6]), torch.Size([8, 5, 6])) == 1
    assert class_axis(torch.Size([8, 5, 6, 3]), torch.Size([8, 5, 6])) == 3


def test_the_rule_where_both_axes_fit():
    assert class_axis(torch.Size([8, 5, 5]), torch.Size([8, 5])) == 2
    assert class_axis(torch.Size([8, 5, 5, 5]), torch.Size([8, 5, 5])) == 1
    assert class_axis(torch.Size([8, 5, 5]), torch.Size([8, 5]), known=1) == 1
    with pytest.raises(ValueError, match="axis 1 of the batches before"):
        class_axis(torch.Size([8, 5, 3]), torch.Size([8, 5]), known=1)
    with pytest.raises(ValueError, match=r"\(8, 5, 3\) and targets of shape \(8, 4\)"):
        class_axis(torch.Size([8, 5, 3]), torch.Size([8, 4]))


def test_the_mean_is_over_positions_and_examples_that_count():
    targets = torch.tensor([[0, 1, IGNORED], [IGNORED] * 3, [2, IGNORED, IGNORED]])
    known = Labels.of(targets, 2, 3, "error")
    values = known.over_positions(torch.tensor([[1.0, 3.0, 7.0], [9.0, 9.0, 9.0], [5.0, float("nan"), 7.0]]))
    assert known.examples == 2 and values.tolist() == [3.0, 0.0, 7.5]
    assert values.mean().item() == pytest.approx((2 + 5) / 2)


def test_probabilities_along_an_axis():
    hot = torch.eye(3)[None].expand(2, 3, 3)
    assert distribution_axis(hot) == 2 and distribution_axis(torch.full((2, 4, 3, 5), 0.25)) == 1
    assert distribution_axis(torch.full((2, 3), 0.5)) is None
    assert sums_to_one(torch.randn(9, 4).softmax(1), 1) and not sums_to_one(torch.tensor([[2.0, -1.0]]), 1)
