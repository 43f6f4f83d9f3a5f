"""``wideflat card`` on checkpoints and on bad input."""

import dataclasses
import json
import os
import signal

import pytest
import torch

from wideflat import Card
from wideflat.cards import measures, measuring
from wideflat.cli import main
from wideflat.data import ImageData, ImageSplit


@pytest.fixture
def project(builder, monkeypatch):
    """A card of three cheap measures."""
    chosen = tuple(measure for measure in measures.MEASURES if measure.name in ("at_w", "relative", "shift"))
    monkeypatch.setattr(measuring, "MEASURES", chosen)
    return ["card", "weights.pt", "--build", f"{builder}:build", "--quick", "--examples", "8"]


def test_a_checkpoint_with_its_builder(project, tmp_path, capsys):
    assert main(project) == 0
    out = capsys.readouterr().out
    found = Card.load(tmp_path / "weights.card.json")
    assert found.title == "weights.pt" and str(found) in out and "page: weights.card.html" in out
    assert Card.load(tmp_path / "weights.card.html").measured == ["at_w", "relative", "shift"]
    assert main([*project, "--json", "--seed", "1", "--out", "b.html", "--against", "weights.card.html"]) == 1
    text = capsys.readouterr().out
    assert "Not compared with weights.pt" in json.loads(text)["comparison"]  # another seed draws other examples
    assert main([*project, "--out", "c.html", "--against", "weights.card.json"]) == 0
    assert "No difference in flatness to weights.pt is seen" in capsys.readouterr().out


def test_a_card_is_never_replaced_unasked(project, tmp_path, capsys):
    (tmp_path / "mine.json").write_text("{}")
    assert main([*project, "--out", "mine.html"]) == 2
    assert "mine.json is there already" in capsys.readouterr().err
    assert (tmp_path / "mine.json").read_text() == "{}"
    assert main(project) == main(project) == 0
    assert Card.load(tmp_path / "weights.card-2.html").measured
    assert main([*project, "--out", "mine.html", "--overwrite"]) == 0


def test_a_run_is_measured_on_the_images_it_was_trained_on(project, tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (60, 3, 32, 32), generator=generator).to(torch.uint8)
    split = ImageSplit(pixels, torch.arange(60) % 10)
    names = tuple(map(str, range(10)))
    data = dataclasses.replace(ImageData.of("cifar10", names, split, split), name="cifar10", source="nowhere")
    for place in ("wideflat.data.load", "wideflat.training.flatness.load"):
        monkeypatch.setattr(place, lambda name, folder=None, allow_altered=False: data)
    train = ["train", "cifar10-smallconvnet", "--epochs", "1", "--batch-size", "20", "--no-tensorboard"]
    assert main([*train, "--limit-data", "20", "--out", "run", "-q"]) == 0
    assert main(["card", "run", "--quick", "--examples", "30", "-q"]) == 0
    found = Card.load(tmp_path / "run" / "card.html")
    assert found.title == "run" and found["at_w"].examples == 20  # of 60


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_writes_what_there_is(project, tmp_path, capsys, monkeypatch, number):
    monkeypatch.setattr("wideflat.cards.measures.shift_profile", lambda *_, **__: os.kill(os.getpid(), number))
    assert main(project) == 130
    for name in ("weights.card.json", "weights.card.html"):
        found = Card.load(tmp_path / name)
        assert found.measured == ["at_w", "relative"] and found.refused == {"shift": "interrupted"}
    assert "interrupted; what was measured until then is written, without shift" in capsys.readouterr().err


def test_a_second_signal_leaves_the_numbers(project, tmp_path, monkeypatch):
    monkeypatch.setattr("wideflat.cards.measures.shift_profile", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr("wideflat.cards.card.Card.html", lambda _: os.kill(os.getpid(), signal.SIGINT))
    assert main(project) == 130
    assert Card.load(tmp_path / "weights.card.json").measured == ["at_w", "relative"]
    assert not (tmp_path / "weights.card.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["weights.pt"], "give --build"),
        (["weights.pt", "--build", "{builder}:wrong"], "must return (model, data)"),
        (["weights.pt", "--build", "{builder}:build", "--against", "none.json"], "none.json"),
        (["weights.pt", "--build", "{builder}:build", "--out", "card.txt"], "must be a page"),
        (["solutions.npz"], "committee machines"),
    ],
)
def test_bad_input(builder, capsys, arguments, message):
    assert main(["card", *(argument.format(builder=builder) for argument in arguments)]) in (1, 2)
    assert message in capsys.readouterr().err
