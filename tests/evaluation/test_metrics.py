"""Error and loss: what outputs and targets mean, against loops over examples, and what is refused."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from wideflat import local_energy
from wideflat.evaluation.metrics import ErrorMetric, LossMetric, error_metric, loss_metric, scores


def measure(model, data, sigmas=(0.0, 0.1), **options):
    return local_energy(model, data, sigmas, progress=False, **options)


class Same(nn.Module):
    """Gives back its input, made into something else; one weight that is 1."""

    def __init__(self, then=lambda outputs: outputs):
        super().__init__()
        self.weight, self.then = nn.Parameter(torch.ones(())), then

    def forward(self, x):
        return self.then(self.weight * x)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(classes, *shape, seed=1):
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


# ---- classes


def by_loops(outputs, targets):
    """Error and loss of outputs (B, T, C) with labels (B, T), example by example, position by position."""
    errors, losses = [], []
    for rows, wanted in zip(outputs.tolist(), targets.tolist(), strict=True):
        counted = [(row, label) for row, label in zip(rows, wanted, strict=True) if label != -100]
        errors.append(np.mean([float(np.argmax(row) != label) for row, label in counted]))
        losses.append(np.mean([math.log(sum(map(math.exp, row))) - row[label] for row, label in counted]))
    return errors, losses


@pytest.mark.parametrize("length", [1, 4, 5, 7], ids="T={}".format)
@pytest.mark.parametrize("ignored", [False, True])
def test_sequences_have_their_classes_last_whatever_their_length(length, ignored):
    outputs, targets = numbers(6, length, 5), labels(5, 6, length)
    if ignored and length > 1:
        targets[0, 1:] = targets[3, 0] = -100
    errors, losses = by_loops(outputs.double(), targets)
    assert error_metric(outputs, targets).tolist() == pytest.approx(errors)
    assert loss_metric(outputs, targets).tolist() == pytest.approx(losses, rel=1e-5)
    profile = measure(Same(), (outputs, targets))
    assert profile.baseline == pytest.approx(np.mean(errors), rel=1e-6)


@pytest.mark.parametrize("shape", [(3, 7), (4, 2, 6), (4, 4, 5)])
def test_torchs_own_order_of_axes(shape):
    """Classes in the second axis, as torch's cross-entropy has them, wherever the shape of the targets says so."""
    classes, *places = shape
    outputs, targets = numbers(5, *shape), labels(classes, 5, *places)
    expected = F.cross_entropy(outputs, targets, reduction="none").flatten(1).mean(1)
    assert torch.allclose(loss_metric(outputs, targets), expected)
    assert torch.equal(error_metric(outputs, targets), (outputs.argmax(1) != targets).float().flatten(1).mean(1))


def test_what_another_batch_told_decides_where_both_axes_fit():
    metric = LossMetric()
    metric(numbers(2, 3, 4), labels(3, 2, 4))  # classes second: told by this batch
    outputs, targets = numbers(2, 3, 3), labels(3, 2, 3)
    expected = F.cross_entropy(outputs, targets, reduction="none").mean(1)
    assert torch.allclose(metric(outputs, targets), expected) and "axis 1" in metric.meaning
    with pytest.raises(ValueError, match="axis 1 of the batches before"):
        metric(numbers(2, 4, 3), labels(3, 2, 4))


def test_padding_changes_nothing():
    outputs, targets = numbers(4, 6, 9), labels(9, 4, 6)
    longer = torch.cat([outputs, 100 * numbers(4, 3, 9)], 1)
    padded = torch.cat([targets, torch.full((4, 3), -100)], 1)
    for metric in (error_metric, loss_metric):
        assert torch.allclose(metric(longer, padded), metric(outputs, targets), atol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 4, 20])
@pytest.mark.parametrize("noise", ["batch", "pass", "example"])
def test_examples_without_a_target_do_not_count(noise, batch_size):
    outputs, targets = numbers(20, 3), labels(3, 20)
    keep = torch.arange(20) % 7 != 3
    some = torch.where(keep, targets, -100)
    expected = float((outputs.argmax(1) != targets)[keep].float().mean())
    if batch_size == 1:
        with pytest.raises(ValueError, match="no target of a batch counts"):
            measure(Same(), (outputs, some), noise=noise, batch_size=1, max_passes=2)
        return
    profile = measure(Same(), (outputs, some), noise=noise, batch_size=batch_size, max_passes=2)
    assert profile.baseline == pytest.approx(expected, rel=1e-6)
    assert profile.evaluations[1] == 2 * int(keep.sum())


@pytest.mark.parametrize("kind", ["float", "bool", "column", "uint8", "one-hot", "one-hot integers"])
def test_labels_of_every_kind(kind):
    outputs, targets = numbers(12, 2), labels(2, 12)
    given = {
        "float": targets.float(),
        "bool": targets.bool(),
        "column": targets[:, None],
        "uint8": targets.to(torch.uint8),
        "one-hot": F.one_hot(targets, 2).double(),
        "one-hot integers": F.one_hot(targets, 2),
    }[kind]
    assert torch.equal(error_metric(outputs, given), (outputs.argmax(1) != targets).float())
    assert torch.allclose(loss_metric(outputs, given), F.cross_entropy(outputs, targets, reduction="none"))


def test_one_hot_labels_of_images():
    outputs, targets = numbers(3, 4, 2, 5), labels(4, 3, 2, 5)
    hot = F.one_hot(targets, 4).movedim(-1, 1).float()
    assert torch.equal(error_metric(outputs, hot), error_metric(outputs, targets))
    assert torch.allclose(loss_metric(outputs, hot), loss_metric(outputs, targets))


def test_an_answer_that_is_no_number_is_wrong():
    nothing = torch.full((3, 2), math.nan)
    assert error_metric(nothing, torch.tensor([0, 1, 0])).tolist() == [1, 1, 1]
    assert error_metric(nothing[:, 0], torch.tensor([0, 1, 0])).tolist() == [1, 1, 1]


def test_the_loss_of_soft_labels_and_of_probabilities():
    outputs = numbers(6, 4)
    soft = numbers(6, 4, seed=3).softmax(1)
    assert torch.allclose(loss_metric(outputs, soft), -(soft * outputs.log_softmax(1)).sum(1))
    targets = labels(4, 6)
    metric = LossMetric()
    expected = F.cross_entropy(outputs, targets, reduction="none")
    assert torch.allclose(metric(outputs.softmax(1), targets), expected, rtol=1e-4)
    assert metric.meaning == "cross-entropy of probabilities"
    with pytest.raises(ValueError, match="these are not"):
        metric(outputs, targets)
    overflow = outputs.softmax(1)
    overflow[0] = math.nan
    assert metric(overflow, targets).isnan().tolist() == [True] + 5 * [False]
    half = numbers(40, 300).bfloat16()
    assert torch.allclose(loss_metric(half.softmax(1), labels(300, 40)), loss_metric(half, labels(300, 40)), rtol=1e-2)
    words = numbers(2, 5, 4).softmax(2)
    where = labels(4, 2, 5)
    assert torch.allclose(loss_metric(words, where), -words.log().gather(2, where[:, :, None])[:, :, 0].mean(1))


def test_the_loss_of_half_precision_is_taken_in_single():
    outputs, targets = numbers(50, 10).bfloat16(), labels(10, 50)
    assert torch.equal(loss_metric(outputs, targets), loss_metric(outputs.float(), targets))


# ---- one output


def perceptron(last=None):
    """A network with one output that answers its 200 examples rightly, their targets 0 and 1."""
    x = numbers(200, 3)
    network = nn.Linear(3, 1)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[3.0, -2.0, 1.0]]))
        network.bias.fill_(1.0)
    return nn.Sequential(network, *([last] if last else [])), x, (network(x)[:, 0] > 0).float()


def test_a_perfect_network_whose_output_is_a_probability_makes_no_error():
    model, x, y = perceptron(nn.Sigmoid())
    logits, _, _ = perceptron()
    profile = measure(model, (x, y), [0.0, 0.5], max_passes=20)
    same = measure(logits, (x, y), [0.0, 0.5], max_passes=20)
    assert profile.baseline == same.baseline == 0
    assert profile.mean[1] == same.mean[1] > 0.02
    assert "0.5" in profile.conventions["meaning"] and "0.5" in str(profile)
    loss = measure(model, (x, y), [0.0, 0.1], metric="loss"), measure(logits, (x, y), [0.0, 0.1], metric="loss")
    assert loss[0].baseline == pytest.approx(loss[1].baseline, rel=1e-5)
    assert loss[0].mean[1] == pytest.approx(loss[1].mean[1], rel=1e-3)
    assert [profile.conventions["meaning"].split()[-1] for profile in loss] == ["probability", "logit"]


@pytest.mark.parametrize("kind", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("column", [False, True])
def test_logits_with_targets_of_both_conventions(kind, column):
    outputs = torch.tensor([0.2, -0.7, 3.0, 0.0])
    positive = torch.tensor([1, 1, 0, 0])
    wanted = [0.0, 1.0, 1.0, 0.0]
    losses = F.binary_cross_entropy_with_logits(outputs, positive.float(), reduction="none")
    for targets in (positive, 2 * positive - 1):
        given = targets.to(kind) if not (kind is torch.bool and targets.min() < 0) else targets
        shaped = (outputs[:, None], given[:, None]) if column else (outputs, given)
        assert error_metric(*shaped).tolist() == wanted
        assert torch.allclose(loss_metric(*shaped), losses)


def test_a_margin_inside_the_unit_interval_is_no_probability_where_a_target_is_minus_one():
    assert error_metric(torch.tensor([0.2, 0.4]), torch.tensor([1.0, -1.0])).tolist() == [0, 1]


def test_one_decision_for_all_batches():
    """What the first batches did not tell, and was taken for the wrong, is an error and not a number."""
    metric = ErrorMetric()
    metric(torch.tensor([0.2, 0.9]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="Say what they are"):
        metric(torch.tensor([0.2, 1.5]), torch.tensor([0, 1]))
    metric = ErrorMetric()
    assert metric(torch.tensor([0.3, 0.9]), torch.tensor([1, 1])).tolist() == [0, 0]
    with pytest.raises(ValueError, match="Say what they are"):
        metric(torch.tensor([0.3, 0.9]), torch.tensor([0, 1]))
    metric = ErrorMetric()  # nothing depends on it yet, so nothing is decided
    metric(torch.tensor([0.7, 0.9]), torch.tensor([1, 1]))
    metric(torch.tensor([-0.7, 0.3]), torch.tensor([0, 1]))
    assert metric(torch.tensor([0.3]), torch.tensor([1])).tolist() == [0]
    with pytest.raises(ValueError, match="got -1, 0 and 1"):
        metric(torch.tensor([0.3]), torch.tensor([-1]))


# ---- what is refused

MULTI_HOT = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])


@pytest.mark.parametrize("metric", ["error", "loss"])
@pytest.mark.parametrize(
    ("outputs", "targets", "message"),
    [
        (numbers(64, 1), 20 + torch.rand(64), "for regression give metric="),
        (numbers(64), numbers(64), "for regression give metric="),
        (numbers(64, 3), numbers(64), "for regression give metric="),
        (numbers(64, 3), numbers(64, 3), "for regression give metric="),
        (numbers(2, 3), MULTI_HOT, "several labels an example give metric="),
        (numbers(2, 3), MULTI_HOT.long(), "several labels an example give metric="),
        (numbers(64, 3), labels(5, 64), "labels must be 0 to 2 for 3 outputs"),
        (numbers(64, 2), 2 * labels(2, 64) - 1, "got -1"),
        (numbers(4, 6, 3), labels(3, 4), "do not go together"),
        (numbers(4, 3), labels(3, 4, 6), "do not go together"),
        (numbers(4, 3), labels(3, 5), "one target for each example"),
        (numbers(4, 1), labels(5, 4), "must be 0 and 1, or -1 and"),
        (numbers(4, 3), torch.full((4,), -100), "no target of a batch counts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "x".join(map(str, value.shape)),
)
def test_what_cannot_be_meant_is_refused(metric, outputs, targets, message):
    with pytest.raises(ValueError, match=message):
        {"error": error_metric, "loss": loss_metric}[metric](outputs, targets)
    if len(outputs) == len(targets):
        with pytest.raises(ValueError, match=message):
            measure(Same(), (outputs, targets), metric=metric)


def test_the_error_of_soft_labels_is_refused():
    with pytest.raises(ValueError, match='use metric="loss"'):
        error_metric(numbers(6, 4), numbers(6, 4).softmax(1))


def test_the_lines_that_the_refusals_give_work():
    outputs, targets = numbers(8, 1), numbers(8)
    for shaped in ((outputs, targets), (outputs[:, 0], targets[:, None]), (numbers(8, 3), numbers(8, 3))):
        with pytest.raises(ValueError, match="metric=lambda") as refusal:
            error_metric(*shaped)
        line = str(refusal.value).partition("metric=lambda")[2]
        assert eval("lambda" + line)(*shaped).shape == (8,)
    with pytest.raises(ValueError, match="metric=lambda") as refusal:
        error_metric(numbers(2, 3), MULTI_HOT.long())
    first, second = str(refusal.value).split("metric=lambda")[1:]
    for line in (first.removesuffix(", the share of wrong labels, or "), second):
        assert eval("lambda" + line)(numbers(2, 3), MULTI_HOT.long()).shape == (2,)


@pytest.mark.parametrize("metric", ["error", "loss"])
def test_labels_outside_the_outputs_are_found_in_any_batch(metric):
    batches = [(numbers(8, 3), labels(3, 8)) for _ in range(4)]
    batches[3][1][5] = 3
    with pytest.raises(ValueError, match="got 3"):
        measure(Same(), batches, metric=metric, noise="batch", max_passes=1)


def test_targets_that_are_written_into_are_looked_at_again():
    metric, outputs, targets = ErrorMetric(), torch.eye(3), torch.arange(3)
    assert metric(outputs, targets).tolist() == [0, 0, 0]
    targets.copy_(torch.tensor([2, 1, 0]))
    assert metric(outputs, targets).tolist() == [1, 0, 1]
    targets[0] = 7
    with pytest.raises(ValueError, match="got 7"):
        metric(outputs, targets)
    with torch.inference_mode():
        metric, targets = ErrorMetric(), torch.zeros(3, dtype=torch.long)
        metric(outputs, targets)
        targets.fill_(-100)[0] = 1
        assert metric(outputs, targets).tolist() == [3, 0, 0] and metric.counted == 1


def test_targets_are_looked_at_once_for_all_sigmas(monkeypatch):
    looks = []
    read = ErrorMetric._read
    monkeypatch.setattr(ErrorMetric, "_read", lambda self, *pair: looks.append(1) or read(self, *pair))
    data = numbers(64, 3), labels(3, 64)
    measure(Same(), data, [0.1 * k for k in range(1, 21)], noise="batch", batch_size=16, max_passes=1)
    assert len(looks) < 2 * 4 + 4  # four blocks and a look at the first, not eighty


# ---- what a network may return


class Answer:
    def __init__(self, logits):
        self.logits, self.loss = logits, None


@pytest.mark.parametrize("then", [Answer, lambda x: {"logits": x, "loss": None}], ids=["object", "dict"])
def test_outputs_with_logits(then):
    data = numbers(30, 3), labels(3, 30)
    ours, plain = (measure(model, data, [0.0, 0.5]) for model in (Same(then), Same()))
    assert ours.baseline == plain.baseline and (ours.mean == plain.mean).all()


@pytest.mark.parametrize(
    ("then", "place"),
    [(lambda x: {"out": x, "aux": x}, "['out']"), (lambda x: (x, None), "[0]"), (lambda x: object(), ".their_name")],
    ids=["dict", "tuple", "object"],
)
def test_other_outputs_are_refused_with_the_lines_that_would_do(then, place):
    data = numbers(30, 3), labels(3, 30)
    with pytest.raises(TypeError, match="def forward") as refusal:
        measure(Same(then), data)
    assert f"return model(inputs){place}, targets" in str(refusal.value)
    if place == "['out']":
        lines = str(refusal.value).split("\n")[1:4]
        space = {}
        exec("\n".join(line[4:] for line in lines), space)
        assert measure(Same(then), data, forward=space["forward"]).baseline == measure(Same(), data).baseline


def test_a_function_gets_what_the_network_returned():
    data = numbers(30, 3), labels(3, 30)
    profile = measure(Same(lambda x: {"out": x}), data, metric=lambda outputs, targets: outputs["out"][:, 0])
    assert profile.baseline == pytest.approx(float(data[0][:, 0].mean()), rel=1e-5)
    assert profile.conventions["meaning"] is None
    with pytest.raises(TypeError, match="tensor of real outputs"):
        scores(torch.zeros(2, 2, dtype=torch.complex64))


@pytest.mark.parametrize("metric", [3, None, ["error"], {"error"}])
def test_a_metric_that_is_none(metric):
    with pytest.raises(ValueError, match="metric must be"):
        measure(Same(), (numbers(4, 3), labels(3, 4)), metric=metric)


def test_strange_targets_and_values_are_read_rightly_or_refused():
    torch.manual_seed(0)
    x, classes, probability = torch.randn(64, 6), nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 1), nn.Sigmoid())
    with torch.no_grad():
        labels, signs = classes(x).argmax(1), torch.sign(probability(x)[:, 0] - 0.5)
    options = {"max_passes": 2, "progress": False}
    one_hot = nn.functional.one_hot(labels, 3).bool()
    assert local_energy(classes, (x, one_hot), [0.1], **options).baseline == 0
    with pytest.raises(ValueError, match="may be probabilities"):
        local_energy(probability, (x, signs), [0.1], **options)
    for metric, kind in ((lambda o, t: o[:, 0] * 1j, "complex"), (lambda o, t: None, "None")):
        with pytest.raises(TypeError, match=kind):
            local_energy(classes, (x, labels), [0.1], metric=metric, **options)
