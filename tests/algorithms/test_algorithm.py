"""Each record says what its algorithm is, and what no algorithm can be is refused."""

import dataclasses

import pytest

from wideflat.algorithms import ALGORITHMS
from wideflat.presets import preset


def test_every_algorithm_has_a_record_that_says_what_it_is():
    for name, algorithm in ALGORITHMS.items():
        assert algorithm.name == name and algorithm.words
        assert preset("cifar10-resnet18", name).algorithm == name
        assert (algorithm.settings is None) == (name in ("sgd", "rsgd", "esgd", "rsgdxy"))  # the columns of Table 1
        assert algorithm.inner == (preset("cifar10-resnet18", name).inner_steps > 1)
        assert algorithm.replicated == (preset("cifar10-resnet18", name).num_replicas > 1)
        for field, value, has in (
            ("num_replicas", 2, algorithm.replicated),
            ("inner_steps", 7, algorithm.inner),
            ("coupling", "proximal", algorithm.modes),
        ):
            cell = preset("cifar10-resnet18", name)
            if has:
                dataclasses.replace(cell, **{field: value})
            else:
                with pytest.raises(ValueError, match=f"--{field.replace('_', '-')} is for .*{name}"):
                    dataclasses.replace(cell, **{field: value})
    with pytest.raises(ValueError, match=r"algorithm must be one of sgd, rsgd, .*, got 'adam'"):
        dataclasses.replace(preset("cifar10-resnet18"), algorithm="adam")
    with pytest.raises(ValueError, match="rsgd: an optimizer that asks for gradients itself trains one network"):
        dataclasses.replace(ALGORITHMS["rsgd"], closure=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ALGORITHMS["sgd"].name = "other"
