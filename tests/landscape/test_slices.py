"""Pictures of the loss: every point against a loop, directions against their definitions."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from wideflat import Slice, slices
from wideflat.noise.scales import Scales

AXIS = [-0.5, 0.0, 1.0]


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).eval().requires_grad_(False)


def data(n=40):
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, 4, generator=g), torch.randint(3, (n,), generator=g)


def test_a_grid_between_three_networks_is_that_of_a_loop():
    model, one, two, (x, y) = network(0), network(1), network(2), data()
    before = copy.deepcopy(model.state_dict())
    found = slices(model, (x, y), [one, two.state_dict()], positions=AXIS, batch_size=7, progress=False)
    base = nn.functional.cross_entropy(model(x), y, reduction="none")
    assert found.mean.shape == (3, 3) and found.baseline == pytest.approx(float(base.mean()))
    for i, s in enumerate(AXIS):
        for j, t in enumerate(AXIS):
            state = {
                name: w + s * (one.state_dict()[name] - w) + t * (two.state_dict()[name] - w)
                for name, w in before.items()
            }
            values = nn.functional.cross_entropy(torch.func.functional_call(model, state, (x,)), y, reduction="none")
            assert found.mean[i, j] == pytest.approx(float((values - base).mean()), abs=1e-5)
            assert found.stderr[i, j] == pytest.approx(float((values - base).std()) / 40**0.5, abs=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def quadratic():
    """L = (1/2) sum h w^2."""
    model = nn.Linear(5, 1, bias=False).double()
    model.weight.data.copy_(torch.tensor([[1.0, -2.0, 0.5, 1.0, 2.0]]))
    h = torch.tensor([7.0, 1.0, 3.0, 0.5, 0.1], dtype=torch.float64)

    def loss(outputs, targets):
        return 0.5 * (h * model.weight[0] ** 2).sum().expand(len(outputs))

    return model, loss, (torch.zeros(3, 5, dtype=torch.float64), torch.zeros(3))


def test_eigenvectors_have_the_curvature_of_the_eigenvalues():
    """Along v |w|: dE = g . d x + (1/2) lambda |w|^2 x^2, so the even part is half the eigenvalue times |w|^2."""
    model, loss, pair = quadratic()
    found = slices(model, pair, "eigenvectors", positions=[-1.0, 0.0, 1.0], metric=loss, progress=False)
    w2 = float(model.weight.detach().square().sum())
    assert found.lengths == pytest.approx([w2**0.5] * 2)
    even = [(found.mean[0, 1] + found.mean[2, 1]) / 2, (found.mean[1, 0] + found.mean[1, 2]) / 2]
    assert even == pytest.approx([0.5 * 7 * w2, 0.5 * 3 * w2], rel=1e-3)
    line = slices(model, pair, "eigenvectors", positions=[-1.0, 1.0], dimensions=1, metric=loss, progress=False)
    assert line.mean.mean() == pytest.approx(0.5 * 7 * w2, rel=1e-3)


def test_random_directions_have_the_length_of_the_weights_and_filters_theirs():
    model, pair = network(), data()
    size = float(torch.cat([p.flatten() for p in model.parameters()]).norm())
    plain = slices(model, pair, "random", positions=[0.0], progress=False)
    assert plain.lengths == pytest.approx([size, size], rel=1e-5) and plain.mean.tolist() == [[0.0]]
    lengths = [
        slices(model, pair, "filter", positions=[0.0], dimensions=1, seed=seed, progress=False).lengths[0]
        for seed in range(40)
    ]
    a = Scales(model, [name for name, _ in model.named_parameters()], "filter")
    expected = float(a.flat().square().sum())  # E |a z|^2
    assert np.mean(np.square(lengths)) == pytest.approx(expected, rel=0.15)
    again, same = (slices(model, pair, positions=[0.3], seed=3, progress=False).mean[0, 0] for _ in range(2))
    assert again == same != slices(model, pair, positions=[0.3], seed=4, progress=False).mean[0, 0]


def test_the_error_can_be_drawn_along_eigenvectors_of_the_loss():
    found = slices(network(), data(), "eigenvectors", positions=[0.0, 0.5], metric="error", progress=False)
    assert found.conventions["metric"] == "error" and found.mean[0, 0] == 0


def test_save_load_print_table_and_plot(tmp_path):
    for dimensions in (1, 2):
        found = slices(network(), data(), positions=AXIS, dimensions=dimensions, progress=False)
        found.save(tmp_path / "slice.json")
        again = Slice.load(tmp_path / "slice.json")
        assert np.array_equal(again.mean, found.mean) and str(again) == str(found)
        found.save(tmp_path / "slice.csv")
        rows = np.genfromtxt(tmp_path / "slice.csv", delimiter=",", names=True)
        assert rows["mean"] == pytest.approx(found.mean.flatten()) and len(rows.dtype) == dimensions + 2
        assert "directions: filter" in str(found)
        matplotlib = pytest.importorskip("matplotlib")
        matplotlib.use("agg")
        ax = found.plot()
        assert ax.get_ylabel() == ("$y$" if dimensions == 2 else r"$\delta E$  [loss]")
        ax.figure.clf()
    (tmp_path / "half.json").write_text("{")
    with pytest.raises(ValueError, match="is not a whole slice"):
        Slice.load(tmp_path / "half.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"directions": "hessian"}, 'directions must be "random", "filter", "eigenvectors"'),
        ({"directions": 7}, "directions must be a word, or one or two other networks; got 7"),
        ({"dimensions": 3}, "dimensions must be 1 or 2, got 3"),
        ({"directions": [network()] * 3}, "one or two other networks, got 3"),
        ({"directions": {"0.weight": torch.ones(2)}}, r"has no 0.weight of shape \(6, 4\)"),
        ({"positions": []}, "positions must have at least one value"),
        ({"batch_norm": "recalibrate"}, "batch_norm must be"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        slices(network(), data(), **options, progress=False)
