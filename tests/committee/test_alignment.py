import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from wideflat.committee import SETTINGS, errors, train
from wideflat.committee.alignment import align, assign
from wideflat.committee.randomness import initial_weights
from wideflat.data import dress_coat


@pytest.fixture(scope="module")
def images():
    return dress_coat.load(60)


def test_the_assignment_is_the_best_one():
    rng = np.random.default_rng(0)
    for size in (1, 2, 5, 9):
        for _ in range(20):
            score = rng.normal(size=(size, size)).round(1)  # ties too
            chosen = assign(score)
            assert sorted(chosen) == list(range(size))
            rows, columns = linear_sum_assignment(score, maximize=True)
            assert score[np.arange(size), chosen].sum() == pytest.approx(score[rows, columns].sum())
    score = rng.normal(size=(5, 5))
    best = max(sum(score[i, p[i]] for i in range(5)) for p in itertools.permutations(range(5)))
    assert score[np.arange(5), assign(score)].sum() == pytest.approx(best)


def test_aligning_undoes_a_permutation_and_changes_no_answer(images):
    weights = initial_weights(SETTINGS["sgd-fast"], 0, 784)
    shuffled = torch.stack([weights[0], weights[0][torch.randperm(9)], weights[0].flip(0)])
    aligned = align(shuffled)
    assert torch.equal(aligned, weights.expand(3, -1, -1))
    replicas = initial_weights(SETTINGS["rsgd-fast"], 0, 784)
    assert torch.equal(
        errors(align(replicas), images.inputs, images.targets), errors(replicas, images.inputs, images.targets)
    )


def test_replicas_are_aligned_if_asked_for(images):
    setting = SETTINGS["rsgd-fast"].replace(batch_size=20, max_epochs=1, num_replicas=4)
    plain, aligned = (
        train(setting.replace(align=flag), images.inputs, images.targets, [0, 1], progress=False)
        for flag in (False, True)
    )
    assert not torch.equal(plain.weights, aligned.weights)
    assert aligned.setting.align
