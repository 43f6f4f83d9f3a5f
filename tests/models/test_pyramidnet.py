"""ShakeDrop as published, and the widths of the pyramid."""

from __future__ import annotations

import pytest
import torch
from architectures import CIFAR10, CIFAR100, check_shapes, count, depth

from wideflat.models.pyramidnet import PyramidNet, ShakeDrop


def factors(drop: float, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward and backward factor of each image."""
    x = torch.ones(batch, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    out = ShakeDrop(drop).train()(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    for values in (out, gradient):
        assert (values == values[:, :1, :1, :1]).all(), "one factor an image"
    return out.detach()[:, 0, 0, 0], gradient[:, 0, 0, 0]


def test_without_drop_nothing_is_disturbed() -> None:
    forward, backward = factors(0.0, 5)
    assert (forward == 1).all()
    assert (backward == 1).all()


def test_always_disturbed_has_alpha_in_pm1_and_beta_in_01() -> None:
    torch.manual_seed(0)
    forward, backward = factors(1.0, 4000)
    assert forward.min() >= -1 and forward.max() <= 1 and abs(forward.mean()) < 0.05
    assert abs(forward.var() - 1 / 3) < 0.03
    assert backward.min() >= 0 and backward.max() <= 1 and abs(backward.mean() - 0.5) < 0.03
    assert abs(backward.var() - 1 / 12) < 0.01
    correlation = torch.corrcoef(torch.stack([forward, backward]))[0, 1]
    assert abs(correlation) < 0.08, "alpha and beta are drawn independently"


def test_the_gate_is_drawn_once_a_batch_with_the_right_probability() -> None:
    torch.manual_seed(0)
    open_gates = []
    for _ in range(400):
        forward, backward = factors(0.3, 4)
        kept = (forward == 1).all().item()
        assert kept == (backward == 1).all().item()
        assert kept or (forward != 1).all()
        open_gates.append(kept)
    assert abs(sum(open_gates) / 400 - 0.7) < 4 * (0.3 * 0.7 / 400) ** 0.5


def test_evaluation_is_the_expectation_of_training() -> None:
    torch.manual_seed(0)
    mean = torch.cat([factors(0.4, 8)[0] for _ in range(3000)]).mean()
    expected = ShakeDrop(0.4).eval()(torch.ones(1, 1, 1, 1, dtype=torch.float64)).item()
    assert expected == pytest.approx(0.6)
    assert mean == pytest.approx(expected, abs=0.03)


def test_the_probabilities_grow_linearly_to_one_half() -> None:
    with torch.device("meta"):
        net = PyramidNet(272, 200, 10)
    drops = [m.drop for m in net.modules() if isinstance(m, ShakeDrop)]
    assert drops == pytest.approx([0.5 * k / 90 for k in range(1, 91)])


def test_the_widths_grow_linearly() -> None:
    with torch.device("meta"):
        net = PyramidNet(272, 200, 10)
    widths = [block.conv2.out_channels for block in net.blocks]
    assert all(abs(width - (16 + 200 * k / 90)) <= 0.5 + 1e-9 for k, width in enumerate(widths, 1))
    assert widths[-1] == 216


def test_odd_image_sizes() -> None:
    with torch.device("meta"):
        assert PyramidNet(29, 12, 3)(torch.empty(2, 3, 33, 33)).shape == (2, 3)


def test_it_trains_and_its_randomness_comes_from_the_seed() -> None:
    def gradient(seed: int) -> torch.Tensor:
        torch.manual_seed(0)
        net = PyramidNet(29, 12, 3)
        x = torch.randn(4, 3, 8, 8)
        torch.manual_seed(seed)
        net(x).logsumexp(1).sum().backward()
        return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

    assert torch.equal(gradient(1), gradient(1))
    assert not torch.equal(gradient(1), gradient(2))
    assert gradient(1).isfinite().all()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        ShakeDrop(1.5)
    with pytest.raises(ValueError, match="9 n \\+ 2"):
        PyramidNet(270, 200, 10)


@pytest.mark.parametrize(
    ("name", "arguments", "published", "source"),
    [
        ("pyramidnet272", {"num_classes": CIFAR10}, 26_210_842, "osmr/pytorchcv, pyramidnet272_a200_bn_cifar10"),
        ("pyramidnet272", {"num_classes": CIFAR100}, 26_288_692, "osmr/pytorchcv, pyramidnet272_a200_bn_cifar100"),
    ],
)
def test_parameter_count_is_the_published_one(name, arguments, published, source):
    assert count(name, **arguments) == published, source


@pytest.mark.parametrize(
    ("name", "arguments", "size", "shapes"),
    [
        # Han et al. 2017, Table 1: 16 + 200 k / 90 channels, times 4, after block k; blocks 30 and 60 halve the image.
        (
            "pyramidnet272",
            {},
            32,
            {
                "conv1": (16, 32, 32),
                "blocks.0": (4 * 18, 32, 32),
                "blocks.29": (4 * 83, 32, 32),
                "blocks.30": (4 * 85, 16, 16),
                "blocks.60": (4 * 152, 8, 8),
                "blocks.89": (864, 8, 8),
            },
        ),
    ],
)
def test_layer_shapes_are_the_published_ones(name, arguments, size, shapes):
    check_shapes(name, arguments, size, shapes)


def test_the_number_in_the_name_is_the_number_of_layers():
    assert depth("pyramidnet272") == 272
