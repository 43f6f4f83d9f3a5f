import itertools

import pytest
import torch
import torch.nn.functional as F

from wideflat.presets import preset
from wideflat.training import small_images
from wideflat.training.small_images import SmallImages, convolution

SHAPES = [
    (shape, channels, kernel, stride, padding)
    for shape, channels, kernel, stride, padding in itertools.product(
        [(1, 1), (2, 2), (1, 2), (2, 1), (3, 1)],
        [(3, 5), (128, 130)],
        [(3, 3), (5, 5), (1, 3), (2, 2)],
        [1, 2, (1, 2)],
        [0, 1, 2, (1, 0)],
    )
]


def arguments(shape, channels, kernel, dtype=torch.float32, n=6):
    torch.manual_seed(0)
    x = torch.randn(n, channels[0], *shape, dtype=dtype, requires_grad=True)
    weight = torch.randn(channels[1], channels[0], *kernel, dtype=dtype, requires_grad=True)
    return x, weight, torch.randn(channels[1], dtype=dtype, requires_grad=True)


def test_results_and_gradients_are_those_of_torch() -> None:
    taken = 0
    for shape, channels, kernel, stride, padding in SHAPES:
        given = arguments(shape, channels, kernel)
        ours = convolution(*given, stride, padding)
        if ours is None:
            continue
        taken += 1
        theirs = F.conv2d(*given, stride, padding)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        direction = torch.randn_like(theirs)
        for one, other in zip(*(torch.autograd.grad(y, given, direction) for y in (ours, theirs)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            assert one.shape == other.shape and one.dtype == other.dtype
    assert taken == 166


@pytest.mark.parametrize("stride", [1, 2])
def test_in_bf16_it_is_as_near_to_the_truth_as_torch(stride: int) -> None:
    given = arguments((2, 2), (160, 128), (3, 3), n=40)
    exact = F.conv2d(*(part.double() for part in given), stride, 1)
    direction = torch.randn_like(exact)
    wanted = [exact, *torch.autograd.grad(exact, given, direction)]
    errors = []
    for call in (convolution, F.conv2d):
        with torch.autocast("cpu", torch.bfloat16):
            result = call(*given, stride, 1)
        assert result.dtype == torch.bfloat16
        found = [result, *torch.autograd.grad(result, given, direction.bfloat16())]
        errors.append(
            [
                float((a.detach().double() - b.detach()).norm() / b.detach().norm())
                for a, b in zip(found, wanted, strict=True)
            ]
        )
    for ours, theirs in zip(*errors, strict=True):
        assert ours < 1.1 * theirs + 1e-4


@pytest.mark.parametrize(
    "change",
    [
        {"input": torch.ones(2, 3, 8, 8)},  # large
        {"input": torch.ones(3, 1, 1)},  # without a batch
        {"input": torch.ones(0, 3, 1, 1)},  # no image
        {"input": torch.ones(2, 3, 1, 1, dtype=torch.float64)},  # of another format
        {"input": torch.ones(2, 4, 1, 1)},  # of other channels
        {"bias": torch.ones(3, dtype=torch.float64)},
        {"padding": "same"},
        {"dilation": 2},
        {"groups": 3},
        {"stride": 0},
        {"padding": 0},  # the kernel does not fit
        {"weight": torch.ones(3, 3, 3, 3)},  # nobody differentiates
        {"weight": torch.ones(3, 3, 1, 1, requires_grad=True)},  # a product already
        {"weight": torch.ones(3, 3, 3, 3, dtype=torch.float16, requires_grad=True)},
    ],
    ids=str,
)
def test_what_is_left_to_torch(change: dict) -> None:
    usual = {"input": torch.ones(2, 3, 1, 1), "weight": torch.ones(3, 3, 3, 3, requires_grad=True), "padding": 1}
    assert convolution(**usual) is not None
    assert convolution(**{**usual, **change}) is None
    with torch.no_grad():
        assert convolution(**usual) is None


def test_a_second_derivative_is_refused() -> None:
    x, weight, _ = arguments((1, 1), (3, 4), (3, 3))
    (gradient,) = torch.autograd.grad(convolution(x, weight, padding=1).square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_the_gradient_of_a_resnet(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network = preset("cifar10-resnet18").build_model().double()
    x, y = torch.randn(5, 3, 32, 32, dtype=torch.float64), torch.arange(5)
    monkeypatch.setattr(small_images, "FORMATS", (torch.float64,))
    calls = []
    original = small_images._Dense.apply
    monkeypatch.setattr(small_images._Dense, "apply", lambda *args: calls.append(1) or original(*args))

    def gradients() -> list[torch.Tensor]:
        network.zero_grad()
        F.cross_entropy(network(x), y).backward()
        return [parameter.grad.clone() for parameter in network.parameters()]

    plain = gradients()
    assert not calls
    with SmallImages():
        dense = gradients()
    assert len(calls) == 7  # three of 2x2 images, one of 2x2 to 1x1, three of 1x1
    for one, other in zip(dense, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)
