"""What a network may be given: several inputs, NumPy arrays; and what is refused at the door."""

import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from wideflat import local_energy
from wideflat.evaluation.evaluation import Evaluation


def measure(model, data, sigmas=(0.0, 0.1), **options):
    return local_energy(model, data, sigmas, progress=False, **options)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(classes, *shape, seed=1):
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


class Two(nn.Module):
    """Two inputs, one weight each."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(4, 2)

    def forward(self, x1, x2):
        return self.a(x1) + self.b(x2)


class Pair(Two):
    def forward(self, pair):
        return super().forward(*pair)


class Wrong(Two):
    def forward(self, x1, x2=None):
        return self.a(x1)


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("form", ["list", "names", "batches"])
def test_several_inputs(kind, form):
    torch.manual_seed(0)
    x1, x2, y, model = numbers(40, 3), numbers(40, 4), labels(2, 40), Two()
    expected = float((model(x1, x2).argmax(1) != y).float().mean())
    inputs = {"x2": x2, "x1": x1} if form == "names" else [x1, x2]
    data = kind([inputs, y])
    if form == "batches":
        data = [kind([[x1[i : i + 10], x2[i : i + 10]], y[i : i + 10]]) for i in range(0, 40, 10)]
    for noise in ("auto", "batch", "pass"):
        profile = measure(model, data, noise=noise, max_passes=2)
        assert profile.baseline == pytest.approx(expected) and profile.conventions["examples"] == 40
    if form != "names":
        pair = Pair()
        pair.load_state_dict(model.state_dict())
        assert measure(pair, data).baseline == pytest.approx(expected)  # its forward takes one list
        with pytest.raises(TypeError, match="Say how it is called"):
            measure(Wrong(), data)
    with pytest.raises(ValueError, match="same length"):
        measure(model, ([x1, x2[:5]], y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_arrays_of_numpy(dtype):
    model = nn.Linear(3, 2).to(dtype)
    x, y = np.random.default_rng(0).standard_normal((40, 3)), np.arange(40) % 2
    expected = float((model(torch.tensor(x, dtype=dtype)).argmax(1).numpy() != y).mean())
    frozen = x.copy()
    frozen.flags.writeable = False
    backwards = x[::-1], y[::-1].astype(">i4")
    batches = [(x[:25], y[:25]), (x[25:], y[25:])]
    for data in ((x, y), (frozen, y), backwards, batches, (torch.tensor(x, dtype=dtype), y)):
        profile = measure(model, data)
        assert profile.baseline == pytest.approx(expected) and profile.conventions["examples"] == 40
    with pytest.raises(TypeError, match="must be numbers"):
        measure(model, (x, np.array(["cat"] * 40)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Evaluation(-math.inf, "error", "eval", None), "model must be a torch.nn.Module, got -inf"),
        (lambda: Evaluation(None, "error", "eval", None), "model must be a torch.nn.Module"),
        (lambda: measure(-math.inf, (numbers(4, 3), labels(3, 4))), "model must be a torch.nn.Module"),
        (lambda: measure(nn.Linear, (numbers(4, 3), labels(3, 4))), "model must be a torch.nn.Module"),
        (lambda: measure(nn.Linear(3, 3), math.nan), "data must be tensors .* got nan"),
        (lambda: measure(nn.Linear(3, 3), None), "data must be tensors"),
        (lambda: measure(nn.Linear(3, 3), (numbers(4, 3), labels(3, 4)), forward=3), "forward must be a function"),
        (lambda: measure(nn.Linear(3, 3), numbers(4, 3)), "compares outputs with targets; got NoneType"),
        (lambda: measure(nn.Linear(3, 3), [numbers(4, 3), labels(3, 4)]), "compares outputs with targets"),
    ],
)
def test_rubbish_is_named_at_the_door(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_the_mean_of_a_batch_has_its_graph_and_counts():
    model, batch = nn.Linear(3, 2), (numbers(5, 3), torch.tensor([0, 1, -100, 1, 0]))
    evaluation = Evaluation(model, "loss", "eval", None)
    value, counted = evaluation.mean(batch, 5)
    keep = batch[1] >= 0
    expected = nn.functional.cross_entropy(model(batch[0][keep]), batch[1][keep])
    assert counted == 4 and torch.allclose(value, expected) and value.requires_grad
    assert evaluation.values(batch, 5).mean().item() == pytest.approx(value.item())
    assert evaluation.meaning == "cross-entropy" and evaluation.counted == 4


class Viewing(nn.Module):
    """Views its maps as vectors, which channels-last memory does not allow."""

    def __init__(self, flatten):
        super().__init__()
        self.conv, self.norm, self.out, self.flatten = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.Linear(24, 3), flatten

    def forward(self, x):
        return self.out(self.flatten(self.norm(self.conv(x))))


@pytest.mark.parametrize("noise", ["batch", "example", "pass"])
def test_a_network_may_view_its_maps(noise):
    torch.manual_seed(0)
    model, plain = Viewing(lambda x: x.view(x.size(0), -1)), Viewing(lambda x: x.flatten(1))
    plain.load_state_dict(model.state_dict())
    data = torch.randn(24, 2, 4, 4), labels(3, 24)
    options = {"metric": "loss", "noise": noise, "max_passes": 50}
    ours, theirs = (measure(network, data, [0.3], **options) for network in (model, plain))
    assert ours.baseline == pytest.approx(theirs.baseline, rel=1e-5)
    assert abs(ours.mean[0] - theirs.mean[0]) < 4 * np.hypot(ours.stderr[0], theirs.stderr[0])


# --------------------------------------------- torch's own branches and loops, compiled where they are called


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.w = nn.Linear(6, 3), nn.Linear(6, 3), nn.Parameter(torch.ones(2))

    def forward(self, x):
        return torch.cond(self.w.sum() > 0, lambda x: self.a(x).tanh(), lambda x: self.b(x).sigmoid(), (x,))


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.h = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        first = torch.tensor(0), x
        return self.h(torch.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, self.a(h).tanh()), first)[1])


class BranchOfPython(Branch):
    def forward(self, x):
        return self.a(x).tanh() if self.w.sum() > 0 else self.b(x).sigmoid()


class LoopOfPython(Loop):
    def forward(self, x):
        for _ in range(3):
            x = self.a(x).tanh()
        return self.h(x)


@pytest.mark.parametrize(("kind", "twin"), [(Branch, BranchOfPython), (Loop, LoopOfPython)], ids=["cond", "while_loop"])
def test_what_cannot_be_compiled_is_refused_with_a_way_that_is_right(kind, twin):
    torch.manual_seed(0)
    torch.compiler.reset()
    model = kind()
    python = twin()
    python.load_state_dict(model.state_dict())
    inputs = torch.randn(40, 6)
    with torch.no_grad():
        data = inputs, python(inputs)
    options = {"metric": lambda o, t: (o - t).square().mean(1), "max_passes": 4, "progress": False}
    for noise in ("auto", "pass"):
        with pytest.raises(RuntimeError, match=re.escape('with torch.compiler.set_stance("force_eager"):')) as caught:
            local_energy(model, data, [0.2, 0.8], noise=noise, **options)
        assert "fails on these data" not in str(caught.value) and kind.__name__ in str(caught.value)
        with torch.compiler.set_stance("force_eager"):
            found = local_energy(model, data, [0.2, 0.8], noise=noise, **options)
        same = local_energy(python, data, [0.2, 0.8], noise=found.conventions["noise"], **options)
        np.testing.assert_allclose(found.mean, same.mean, rtol=1e-4)  # the noise is the same
        assert 0 < found.mean[0] < found.mean[1]
