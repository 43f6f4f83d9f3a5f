"""Dictionaries with labels, and networks that compute their own loss of them."""

import collections
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from wideflat import local_energy
from wideflat.evaluation.labelled import LabelAlignment
from wideflat.hessian.curvature import curvature
from wideflat.landscape.worst_case import worst_case

WORDS = 7


class Words(nn.Module):
    """A small transformer with the interface of those of Hugging Face: one layer of attention over embedded words.

    Its task: the ``"next"`` word, ``"masked"`` words, or a class of the ``"sequence"``.
    """

    def __init__(self, task, smoothing=0.0, kind=lambda **fields: SimpleNamespace(**fields)):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3 if task == "sequence" else WORDS)
        self.task, self.smoothing, self.kind = task, smoothing, kind

    def forward(self, input_ids, attention_mask=None, labels=None):
        length = input_ids.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length) if self.task == "next" else None
        hidden = self.layer(self.embedding(input_ids), src_mask=causal)
        logits = self.head(hidden[:, 0] if self.task == "sequence" else hidden)
        loss = None
        if labels is not None:
            ours, theirs = (logits[:, :-1], labels[:, 1:]) if self.task == "next" else (logits, labels)
            loss = F.cross_entropy(ours.reshape(-1, ours.shape[-1]), theirs.reshape(-1), label_smoothing=self.smoothing)
        return self.kind(loss=loss, logits=logits)


def batch(task, length=6, examples=24):
    ids = torch.randint(WORDS, (examples, length), generator=torch.Generator().manual_seed(1))
    if task == "sequence":
        return {"input_ids": ids, "labels": ids[:, 0] % 3}
    labels = ids.clone()
    labels[::3, -2:] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def by_hand(model, data):
    """Error and loss, example by example, positions that count counted alike within each."""
    logits, labels = model.eval()(data["input_ids"]).logits, data["labels"]
    if model.task == "next":
        logits, labels = logits[:, :-1], labels[:, 1:]
    errors, losses = [], []
    for row, wanted in zip(logits.detach().reshape(len(labels), -1, logits.shape[-1]), labels, strict=True):
        wanted = wanted.reshape(-1)
        row, wanted = row[wanted != -100], wanted[wanted != -100]
        errors.append(float((row.argmax(1) != wanted).float().mean()))
        losses.append(float(F.cross_entropy(row, wanted)))
    return np.mean(errors), np.mean(losses)


@pytest.mark.parametrize("task", ["next", "masked", "sequence"])
@pytest.mark.parametrize("form", ["memory", "batches", "mapping"])
def test_labels_are_shifted_as_the_network_shifts_them(task, form):
    model, data = Words(task), batch(task)
    error, loss = by_hand(model, data)
    whole = data
    if form != "memory":
        make = collections.UserDict if form == "mapping" else dict
        whole = [make({name: tensor[i : i + 8] for name, tensor in data.items()}) for i in range(0, 24, 8)]
    for metric, expected in (("error", error), ("loss", loss)):
        profile = local_energy(model, whole, [0.0, 0.05], metric=metric, progress=False)
        assert profile.baseline == pytest.approx(expected, rel=1e-4)
        assert np.isfinite(profile.mean).all() and profile.conventions["examples"] == 24


def test_the_other_measures_take_them_too():
    model, data = Words("next"), batch("next")
    _, loss = by_hand(model, data)
    assert worst_case(model, data, [0.01], metric="loss", progress=False).baseline == pytest.approx(loss, rel=1e-4)
    bent = curvature(model, data, top=1, probes=2, parameters="head.*", progress=False)
    assert bent.baseline == pytest.approx(loss, rel=1e-4) and bent.eigenvalues[0] > 0


def test_padding_changes_nothing():
    model, data = Words("next"), batch("next")
    padded = {name: F.pad(tensor, (0, 3), value=-100 if name == "labels" else 0) for name, tensor in data.items()}
    ours, theirs = (
        local_energy(model, given, [0.05], metric="loss", batch_size=8, noise="batch", progress=False)
        for given in (data, padded)
    )
    assert ours.baseline == pytest.approx(theirs.baseline, rel=1e-5)
    assert ours.mean == pytest.approx(theirs.mean, rel=1e-3)


def test_outputs_that_are_dictionaries_and_functions_of_them():
    model, data = Words("masked", kind=dict), batch("masked")
    assert local_energy(model, data, [0.0], progress=False).baseline == pytest.approx(by_hand(Words("masked"), data)[0])
    own = local_energy(
        model, data, [0.0], metric=lambda outputs, labels: outputs["loss"], batch_size=24, progress=False
    )
    assert own.baseline == pytest.approx(model.eval()(**data)["loss"].item(), rel=1e-5)


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (lambda logits, labels: {"logits": logits}, "it returned no loss"),
        (lambda logits, labels: {"logits": logits, "loss": torch.tensor(3.0)}, "its own loss, 3, is neither"),
        (lambda logits, labels: {"logits": 0 * logits, "loss": torch.tensor(5.0).log()}, "its own loss is both"),
    ],
)
def test_what_cannot_be_told_is_refused_with_the_lines_that_say_it(result, why):
    logits, labels = torch.randn(4, 6, 5), torch.randint(5, (4, 6))
    with pytest.raises(ValueError, match=why) as refusal:
        LabelAlignment().aligned(result(logits, labels), labels)
    assert 'return logits[:, :-1], batch["labels"][:, 1:]' in str(refusal.value)


def test_a_network_with_another_loss_is_refused_and_measured_with_forward():
    model, data = Words("next", smoothing=0.2), batch("next")
    with pytest.raises(ValueError, match="Say it"):
        local_energy(model, data, [0.0], progress=False)

    def forward(model, batch):
        logits = model(**batch).logits
        return logits[:, :-1], batch["labels"][:, 1:]

    profile = local_energy(model, data, [0.0], forward=forward, progress=False)
    assert profile.baseline == pytest.approx(by_hand(model, data)[0], rel=1e-4)


def test_the_first_batch_decides_for_all():
    alignment = LabelAlignment()
    logits, labels = torch.randn(4, 6, 5), torch.randint(5, (4, 6))
    own = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    alignment.aligned({"logits": logits, "loss": own}, labels)
    outputs, targets = alignment.aligned({"logits": logits + torch.randn(4, 6, 5), "loss": None}, labels)
    assert alignment.shifted and outputs.shape == (4, 5, 5) and torch.equal(targets, labels[:, 1:])


class Pixels(nn.Module):
    """A classifier of images with the same interface."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(12, 3)

    def forward(self, pixel_values, labels=None):
        logits = self.head(pixel_values.flatten(1))
        return {"logits": logits, "loss": F.cross_entropy(logits, labels)}


def test_arrays_of_numpy_in_a_dictionary():
    pixels, labels = np.random.default_rng(0).standard_normal((20, 3, 2, 2)), np.arange(20) % 3
    model = Pixels()
    wrong = model.head(torch.tensor(pixels, dtype=torch.float32).flatten(1)).argmax(1).numpy() != labels
    profile = local_energy(model, {"pixel_values": pixels, "labels": labels}, [0.0, 0.1], progress=False)
    assert profile.baseline == pytest.approx(wrong.mean())


class Counting(Words):
    """Counts how often it is given labels, and can need them, or answer otherwise without them."""

    def __init__(self, habit):
        super().__init__("masked")
        self.habit = habit
        Counting.given = Counting.calls = 0  # counts of its own would be put back before every call

    def forward(self, input_ids, attention_mask=None, labels=None):
        Counting.calls += 1
        Counting.given += labels is not None
        if labels is None and self.habit == "needs them":
            raise ValueError("labels are needed")
        result = super().forward(input_ids, attention_mask, labels)
        if labels is None and self.habit == "answers otherwise":
            result.logits = result.logits + 1e-3 * torch.arange(WORDS)
        return result


@pytest.mark.parametrize("habit", ["free", "needs them", "answers otherwise"])
def test_a_network_that_answers_the_same_without_labels_is_not_given_them(habit):
    words = torch.randint(WORDS, (6, 5))
    batch = {"input_ids": words, "labels": words}
    model = Counting(habit)
    profile = local_energy(model, [batch], [0.1], metric="loss", max_passes=9, noise="batch", progress=False)
    assert model.calls >= 10
    assert model.given == (1 if habit == "free" else model.calls - 1)
    usual = local_energy(
        Words("masked"), [batch], [0.1], metric="loss", max_passes=9, noise="batch", progress=False,
        forward=lambda model, batch: (model(**batch).logits, batch["labels"]),
    )  # fmt: skip
    np.testing.assert_allclose([profile.baseline, *profile.mean], [usual.baseline, *usual.mean], rtol=1e-6)
