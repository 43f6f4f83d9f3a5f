"""The published policies, and that every image draws its own sub-policy."""

from __future__ import annotations

import collections

import pytest
import torch

from wideflat.data.policies import Policy, Step, autoaugment_cifar10, fast_autoaugment_imagenet, policy


def noise(n: int, size: int = 16) -> torch.Tensor:
    return torch.randint(0, 256, (n, size, size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))


def test_autoaugment_is_the_table_of_the_paper() -> None:
    table = autoaugment_cifar10().subpolicies
    assert len(table) == 25
    assert table[5] == (Step("ShearY", 0.2, pytest.approx(0.21)), Step("Posterize", 0.3, 2.0))
    assert table[1] == (Step("Rotate", 0.7, 6.0), Step("TranslateX", 0.3, 9 / 32))
    assert table[20][0] == Step("Solarize", 0.4, 128.0)
    assert table[9][0] == Step("Contrast", 0.6, pytest.approx(1.36))


def test_autoaugment_has_the_operations_and_probabilities_of_kornia() -> None:
    module = pytest.importorskip("kornia.augmentation.auto.autoaugment.autoaugment")
    ours = [
        [(step.operation.lower(), step.probability) for step in steps] for steps in autoaugment_cifar10().subpolicies
    ]
    assert ours == [[(name.replace("_", ""), p) for name, p, _ in steps] for steps in module.cifar10_policy]


def test_fast_autoaugment_is_the_authors_table() -> None:
    table = fast_autoaugment_imagenet().subpolicies
    assert len(table) == 498
    counts = collections.Counter(step.operation for steps in table for step in steps)
    assert counts["Sharpness"] == 105 and counts["Cutout"] == 76 and counts["Invert"] == 33
    first, second = table[0]
    assert (first.operation, first.probability) == ("ShearY", 0.14143816458479197)
    assert first.magnitude == pytest.approx(-0.3 + 0.6 * 0.513124791615952)
    assert second == Step("Sharpness", 0.9290316227291179, pytest.approx(0.1 + 1.8 * 0.9788406212603302))
    assert table[-1][1].operation == "Equalize"
    assert all(0 <= step.probability <= 1 for steps in table for step in steps)


def test_every_image_draws_its_own_subpolicy() -> None:
    shift = Policy("shift", [[Step("Brightness", 1.0, k / 10)] for k in range(10)])
    out = shift(torch.full((500, 4, 4, 3), 200, dtype=torch.uint8), torch.Generator().manual_seed(0))
    values = collections.Counter(out[:, 0, 0, 0].tolist())
    assert set(values) == {20 * k for k in range(10)}, "ten results in one batch"
    assert all(20 <= count <= 90 for count in values.values()), values
    assert (out == out[:, :1, :1, :1]).all()


def test_probabilities_and_independent_steps() -> None:
    steps = Policy("two", [[Step("Invert", 0.3, 0), Step("Brightness", 0.6, 0.5)]])
    out = steps(torch.full((4000, 2, 2, 3), 200, dtype=torch.uint8), torch.Generator().manual_seed(0))
    shares = {value: count / 4000 for value, count in collections.Counter(out[:, 0, 0, 0].tolist()).items()}
    expected = {200: 0.7 * 0.4, 100: 0.7 * 0.6, 55: 0.3 * 0.4, 27: 0.3 * 0.6}
    assert set(shares) == set(expected)
    assert all(abs(shares[v] - p) < 0.035 for v, p in expected.items())


def test_the_sign_is_drawn_and_the_border_is_filled() -> None:
    pixels = torch.full((400, 8, 8, 3), 100, dtype=torch.uint8)
    move = Policy("move", [[Step("TranslateX", 1.0, 0.25)]])
    out = move(pixels, torch.Generator().manual_seed(0), fill=[1, 2, 3])
    left, right = (out[:, 0, 0] == torch.tensor([1, 2, 3])).all(-1), (out[:, 0, -1] == torch.tensor([1, 2, 3])).all(-1)
    assert torch.equal(left, ~right)
    assert 140 < int(left.sum()) < 260
    black = Policy("move", [[Step("TranslateX", 1.0, 0.25)]], mean_fill=False)(pixels, torch.Generator(), [1, 2, 3])
    assert int(black.min()) == 0


@pytest.mark.parametrize("name", ["autoaugment", "fast-autoaugment"])
def test_published_policies_are_reproducible_and_change_most_images(name: str) -> None:
    pixels = noise(64)
    before = pixels.clone()
    first, second, third = (policy(name)(pixels, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert torch.equal(pixels, before), "the input is left alone"
    changed = (first != pixels).flatten(1).any(1).float().mean()
    assert 0.5 < changed < 1
    assert first.dtype == torch.uint8 and first.shape == pixels.shape


def test_an_images_result_does_not_depend_on_its_neighbours() -> None:
    pixels = noise(32)
    whole = policy("autoaugment")(pixels, torch.Generator().manual_seed(3))
    others = pixels.clone()
    others[1:] = 0
    assert torch.equal(policy("autoaugment")(others, torch.Generator().manual_seed(3))[0], whole[0])


def test_bad_policies() -> None:
    with pytest.raises(ValueError, match="operation must be one of"):
        Step("Zoom", 1.0, 0)
    with pytest.raises(ValueError, match="same number of steps"):
        Policy("bad", [[Step("Invert", 1, 0)], []])
    with pytest.raises(ValueError, match='policy must be "autoaugment" or'):
        policy("trivial")
