"""Cards on disk, in words and in a notebook."""

import dataclasses
import json

import numpy as np
import pytest

from wideflat import Card
from wideflat.cards.card import Entry
from wideflat.cards.measures import MEASURES


def test_every_measure_is_there_with_its_time_and_conventions(measured):
    assert measured.measured == [measure.name for measure in MEASURES] and measured.refused == {}
    assert all(entry.seconds > 0 and entry.rounds == 1 for entry in measured.entries.values())
    assert measured["relative"].conventions["scale"] == "relative"
    assert measured["filter"].conventions["scale"] == "filter"
    assert measured["worst"]["l2"].conventions["ball"] == "l2" and set(measured["layers"]) == {"0", "2"}
    assert measured["shift"]["quantize"].positions.tolist() == [8, 6, 4, 3, 2]
    assert (measured["worst"]["l2"].mean >= measured["worst"]["average"].mean).all()
    assert measured.conventions["examples"] == 64 and measured.conventions["few"] == 16


def test_what_is_compared_with_the_noise_sees_the_same_examples(measured):
    layers, shift = measured["layers"].values(), measured["shift"].values()
    assert {part.conventions["examples"] for part in layers} == {64} == {s.conventions["examples"] for s in shift}
    assert {part.baseline for part in layers} == {measured["relative"].baseline}
    assert measured["worst"]["l2"].conventions["examples"] == 16
    assert "64 examples (16 for worst case, spectrum, slice and free entropy)" in str(measured)


def test_what_falls_is_said_to_fall(measured):
    found = dataclasses.replace(measured["relative"], mean=-np.abs(measured["relative"].mean) - 0.1)
    assert "points less under relative noise" in Card("x", {"relative": Entry(found)}).headline


@pytest.mark.parametrize("ending", ["json", "html"])
def test_both_files_hold_all_of_it(measured, tmp_path, ending):
    measured.save(tmp_path / f"card.{ending}")
    again = Card.load(tmp_path / f"card.{ending}")
    assert str(again) == str(measured) and again.conventions == measured.conventions
    assert np.array_equal(again["slice"].mean, measured["slice"].mean)
    assert np.array_equal(again["relative"].covariance, measured["relative"].covariance)


def test_numbers_that_json_does_not_have_come_back(measured, tmp_path):
    card = Card("x", {"at_w": measured.entries["at_w"]}, {"infinite": float("inf"), "none": None})
    card.save(tmp_path / "card.json")
    assert Card.load(tmp_path / "card.json").conventions == {"infinite": float("inf"), "none": None}
    json.loads((tmp_path / "card.json").read_text(), parse_constant=lambda name: pytest.fail(name))


def test_words(measured):
    text, page = str(measured), measured._repr_html_()
    for words in ("local energy, relative noise", "4 bits", "worst case", "trace", "log Z at least", "LLC"):
        assert words in text and words in page
    assert "net &lt;1&gt;" in page and "<1>" not in page
    assert measured.headline.startswith("error 0.0 ± 1.6 % at the weights")


def test_what_was_not_measured_says_why(measured):
    card = Card("x", {"at_w": measured.entries["at_w"], "spectrum": Entry(reason="no second derivative")})
    assert "spectrum of the Hessian (not measured)\n  no second derivative" in str(card)
    with pytest.raises(KeyError, match="no second derivative"):
        card["spectrum"]
    with pytest.raises(KeyError, match="a card has at_w, spectrum"):
        card["speed"]


@pytest.mark.parametrize("content", ["{", "{}", '{"kind": "wideflat card", "format": 1}', "[]"])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "card.json").write_text(content)
    with pytest.raises(ValueError, match=r"card\.json is not a whole card"):
        Card.load(tmp_path / "card.json")


def test_other_files_are_refused(measured, tmp_path):
    (tmp_path / "page.html").write_text("<html></html>")
    with pytest.raises(ValueError, match="holds no card"):
        Card.load(tmp_path / "page.html")
    with pytest.raises(ValueError, match=r"\.html or \.json"):
        measured.save(tmp_path / "card.pdf")
