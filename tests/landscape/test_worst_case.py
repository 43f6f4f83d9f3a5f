"""The worst case in a ball."""

import numpy as np
import pytest
import torch
from torch import nn

from wideflat import local_energy
from wideflat.landscape.worst_case import worst_case


def quadratic(h, w):
    """A network whose loss is (1/2) sum h_i (w_i - 1)^2, whatever the data."""
    model = nn.Linear(len(h), 1, bias=False).double()
    model.weight.data.copy_(torch.tensor(w))
    scale = torch.tensor(h, dtype=torch.float64)

    def loss(outputs, targets):
        return 0.5 * (scale * (model.weight[0] - 1) ** 2).sum().expand(len(outputs))

    return model, loss, (torch.zeros(4, len(h), dtype=torch.float64), torch.zeros(4))


def test_one_step_is_the_perturbation_of_sam():
    model, loss, data = quadratic([1.0, 3.0], [2.0, -1.0])
    w, h, sigma = np.array([2.0, -1.0]), np.array([1.0, 3.0]), 0.1
    gradient = h * (w - 1) * w
    step = w * (sigma * np.sqrt(2) * gradient / np.linalg.norm(gradient))
    expected = 0.5 * (h * (w + step - 1) ** 2).sum() - 0.5 * (h * (w - 1) ** 2).sum()
    found = worst_case(model, data, [sigma], metric=loss, objective=loss, progress=False)
    assert found.mean[0] == pytest.approx(expected)
    plain = worst_case(model, data, [sigma], metric=loss, objective=loss, scale="absolute", progress=False)
    gradient = h * (w - 1)
    step = sigma * np.sqrt(2) * gradient / np.linalg.norm(gradient)
    assert plain.mean[0] == pytest.approx(0.5 * (h * (w + step - 1) ** 2).sum() - 0.5 * (h * (w - 1) ** 2).sum())


def test_more_steps_find_the_maximum():
    """On the sphere the maximum of a quadratic is known by search."""
    model, loss, data = quadratic([1.0, 9.0], [2.0, 1.2])
    w, h, sigma = np.array([2.0, 1.2]), np.array([1.0, 9.0]), 0.4
    angle = np.linspace(0, 2 * np.pi, 100_001)
    delta = sigma * np.sqrt(2) * np.stack([np.cos(angle), np.sin(angle)])
    values = 0.5 * (h[:, None] * (w[:, None] * (1 + delta) - 1) ** 2).sum(0) - 0.5 * (h * (w - 1) ** 2).sum()
    one, many = (
        worst_case(model, data, [sigma], metric=loss, objective=loss, steps=steps, progress=False).mean[0]
        for steps in (1, 30)
    )
    assert one < many <= values.max() * (1 + 1e-6)
    assert many == pytest.approx(values.max(), rel=1e-3)


def test_it_is_worse_than_noise_and_worst_for_each_batch():
    torch.manual_seed(0)
    x = torch.randn(128, 6)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    y = model(x).argmax(1)
    before = [p.clone() for p in model.parameters()]
    model[0].bias.requires_grad_(False)
    options = {"metric": "loss", "progress": False}
    noise = local_energy(model, (x, y), [0.05], max_passes=8, **options)
    whole = worst_case(model, (x, y), [0.05], **options)
    each = worst_case(model, (x, y), [0.05], noise="batch", batch_size=16, **options)
    assert noise.mean[0] < whole.mean[0] < each.mean[0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert not model[0].bias.requires_grad and model[0].weight.requires_grad and model[0].weight.grad is None
    with pytest.raises(ValueError, match="not comparable: measure is"):
        whole.compare(noise)


@pytest.mark.parametrize(
    "options",
    [
        {"noise": "example"},
        {"steps": 0},
        {"steps": 1.5},
        {"scale": "log"},
        {"batch_norm": "recalibrate"},
        {"objective": "error"},
        {"ball": "l1"},
        {"restarts": -1},
        {"objective": lambda outputs, targets: (outputs.argmax(1) != targets).float()},
    ],
    ids=lambda value: next(iter(value)),
)
def test_bad_arguments_are_named(options):
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        worst_case(nn.Linear(2, 2), (torch.zeros(2, 2), torch.zeros(2).long()), [0.1], progress=False, **options)


def test_attention_and_targets_that_do_not_count():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=5, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(4, 3)).double()
    x, y = torch.randn(12, 5, 4, dtype=torch.float64), torch.randint(3, (12, 5))
    longer = torch.cat([y, torch.full((4, 5), -100)])
    plain = worst_case(model, (x, y), [0.1], metric="loss", progress=False)
    padded = worst_case(model, (torch.cat([x, x[:4]]), longer), [0.1], metric="loss", batch_size=16, progress=False)
    assert plain.mean[0] > 0 and padded.mean == pytest.approx(plain.mean)
    assert padded.baseline == pytest.approx(plain.baseline)
    assert padded.conventions["examples"] == 12 and padded.conventions["objective"] == "loss"


def adaptive_sharpness(model, data, rho, kind, points=4000):
    """max over |delta / |w||_p <= rho of L(w + delta) - L(w), by its definition, over random points of the ball."""
    loss = nn.functional.cross_entropy
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    names, shapes = [n for n, _ in model.named_parameters()], [p.shape for p in model.parameters()]

    def at(vector):
        parts = vector.split([shape.numel() for shape in shapes])
        named = {n: part.view(shape) for n, part, shape in zip(names, parts, shapes, strict=True)}
        return float(loss(torch.func.functional_call(model, named, (data[0],)), data[1]))

    base, generator = at(flat), torch.Generator().manual_seed(0)
    largest = 0.0
    for _ in range(points):
        z = torch.randn(len(flat), generator=generator, dtype=flat.dtype)
        z = z / z.norm() if kind == "l2" else z.sign()
        largest = max(largest, at(flat * (1 + rho * z)) - base)
    return largest


@pytest.mark.parametrize("ball", ["l2", "linf"])
def test_it_is_no_less_than_the_definition_of_adaptive_sharpness_finds_by_search(ball):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x = torch.randn(30, 3, dtype=torch.float64)
    data = x, torch.randint(2, (30,))
    sigma, size = 0.2, 8
    rho = sigma * size**0.5 if ball == "l2" else sigma
    found = worst_case(model, data, [sigma], ball=ball, steps=20, restarts=2, metric="loss", progress=False)
    searched = adaptive_sharpness(model, data, rho, ball)
    assert searched <= found.mean[0] * (1 + 1e-6) <= searched * 1.2
    assert found.conventions["ball"] == ball and found.conventions["restarts"] == 2


def test_the_box_lies_in_the_ball_and_the_average_below_both():
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    data, options = (x, model(x).argmax(1)), {"metric": "loss", "progress": False}
    l2, linf = (worst_case(model, data, [0.1, 0.02, 0.05], ball=b, steps=8, **options) for b in ("l2", "linf"))
    average = local_energy(model, data, [0.1, 0.02, 0.05], max_passes=8, **options)
    assert (l2.mean > linf.mean).all() and (linf.mean > average.mean).all()
    assert (np.diff(l2.mean[[1, 2, 0]]) > 0).all()  # a larger ball holds the smaller one


def test_the_loss_of_normalised_logits_does_not_know_the_size_of_the_last_layer():
    torch.manual_seed(0)
    x = torch.randn(40, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    data = x, torch.randint(3, (40,))

    def measured(metric):
        return worst_case(model, data, [0.05], steps=5, metric=metric, objective=metric, progress=False).mean[0]

    before = measured("normalized loss"), measured("loss")
    with torch.no_grad():
        model[2].weight.mul_(8.0)
        model[2].bias.mul_(8.0)
    after = measured("normalized loss"), measured("loss")
    assert after[0] == pytest.approx(before[0], rel=1e-4) and after[1] > 2 * before[1]
    with pytest.raises(ValueError, match="logits of several classes"):
        worst_case(nn.Linear(4, 1), (x, torch.ones(40)), [0.1], metric="normalized loss", progress=False)
