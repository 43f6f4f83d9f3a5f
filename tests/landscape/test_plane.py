"""Networks on planes through their weights: the fast way gives what the plain one does, or is not taken."""

import pytest
import torch
from torch import nn

from wideflat import slices
from wideflat.evaluation.blocks import Block
from wideflat.evaluation.evaluation import Evaluation
from wideflat.landscape.plane import Plane


class Writes(nn.Linear):
    def forward(self, x):
        return super().forward(x.mul_(1.0).add_(1.0))


class Twice(nn.Module):
    """The first layer is used again on what comes out of it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


NETWORKS = {
    "linear": lambda: nn.Linear(4, 3),
    "mlp": lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)),
    "twice": Twice,
    "writes": lambda: Writes(4, 3),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 5, 2, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(),
        nn.Linear(45, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("dimensions", [1, 2])
def test_every_point_is_that_of_weights_written_by_hand(name, dimensions):
    torch.manual_seed(0)
    model = NETWORKS[name]().eval().requires_grad_(False)
    if name == "convolution":
        model[2].running_mean.normal_()
        model[2].running_var.uniform_(0.5, 2)
        model[2].weight.normal_()
    x, y = torch.randn(9, 4), torch.randint(3, (9,))
    names = [n for n, _ in model.named_parameters()]
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    ways = [{n: 0.5 * torch.randn_like(p) for n, p in weights.items()} for _ in range(dimensions)]
    evaluation = Evaluation(model, "loss", "eval", None)
    with evaluation.prepared():
        plane = Plane(evaluation, names, ways, Block(0, (x.clone(), y), 9))
        with plane:
            plane.start(evaluation.load((x.clone(), y)))
            for point in ((0.0, 0.0), (0.3, -1.0), (-2.0, 0.5)):
                found = plane.values(point[:dimensions], 9)
                moved = {n: w + sum(t * d[n] for t, d in zip(point, ways, strict=False)) for n, w in weights.items()}
                outputs = torch.func.functional_call(model, moved, (x.clone(),))
                expected = nn.functional.cross_entropy(outputs, y, reduction="none")
                assert found.float() == pytest.approx(expected, abs=1e-4)
    assert bool(plane.notes) == (name == "writes")
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())


def test_a_slice_says_that_it_went_the_plain_way():
    found = slices(Writes(4, 3), (torch.randn(8, 4), torch.randint(3, (8,))), positions=[0.0, 1.0], progress=False)
    assert "plain way" in found.conventions["notes"][0]
