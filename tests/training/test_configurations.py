"""Whether a run on disk may go on with what is asked for."""

import dataclasses

import pytest

from wideflat.presets import preset
from wideflat.training.configurations import ADDED, WITHOUT_EFFECT, as_read, differences


def configuration(**changes):
    cell = dataclasses.replace(preset("cifar10-resnet18", "rsgd"), **changes)
    return {"experiment": dataclasses.asdict(cell), "options": {"seed": 0, "evaluate_every": 1}}


def test_a_configuration_is_equal_to_what_is_read_back():
    config = configuration()
    read = as_read(config)
    assert read != config  # tuples are lists
    assert differences(read, as_read(config)) == ""


def test_what_changes_the_training_is_named_with_both_values():
    there, here = as_read(configuration()), as_read(configuration(lr=0.5, batch_size=7))
    lr, size = there["experiment"]["lr"], there["experiment"]["batch_size"]
    assert differences(there, here) == f"batch_size is {size} there and 7 here, lr is {lr} there and 0.5 here"
    other = {**there, "options": {**there["options"], "seed": 3}}
    assert differences(there, other) == "options.seed is 0 there and 3 here"


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_what_does_not_change_the_training_may_differ(name):
    there = as_read(configuration())
    part, key = name.split(".")
    here = {**there, part: {**there[part], key: "another"}}
    assert there != here and differences(there, here) == "" == differences(here, there)


@pytest.mark.parametrize("name", sorted(ADDED))
def test_what_earlier_versions_did_not_write_is_what_they_did(name):
    part, key = name.split(".")
    here = as_read(configuration())
    here[part][key] = ADDED[name]
    there = {**here, part: {k: value for k, value in here[part].items() if k != key}}
    assert differences(there, here) == ""
    here[part][key] = "another"
    assert differences(there, here) == f"{key} is {ADDED[name]} there and another here"


def test_what_is_there_on_one_side_alone_differs():
    assert differences({"a": {"b": 1}}, {"a": {}}) == "a.b is 1 there and None here"
    assert differences({"a": {"b": 1}}, {"a": 1}) == "a is {'b': 1} there and 1 here"
