"""Images that train in a moment, and forms that are made and moved without the trainer."""

import numpy as np
import pytest
import torch

from wideflat.committee.job import make_form
from wideflat.committee.randomness import dropout_mask, initial_weights, order
from wideflat.data import dress_coat


@pytest.fixture(scope="session")
def images():
    return dress_coat.load(60)


@pytest.fixture(scope="session")
def make():
    """``make(form, setting, patterns, seeds)``: a form at its start; "gram, by torch" does without the kernel."""

    def make(form, setting, patterns, seeds, dtype=torch.float64):
        made = make_form(form.partition(",")[0], setting, patterns, dtype)
        if form == "gram, by torch":
            made.kernel = None
        made.load(torch.stack([initial_weights(setting, seed, patterns.inputs.shape[1]) for seed in seeds]))
        made.seeds = seeds
        return made

    return make


@pytest.fixture(scope="session")
def advance():
    """``advance(form, setting, seeds, epoch, count)``: one epoch with the data in the order of the seeds."""

    def advance(form, setting, seeds, epoch, count):
        orders = torch.from_numpy(np.stack([order(setting, seed, epoch, count) for seed in seeds]))
        masks = None
        if setting.dropout:
            drawn = np.stack([dropout_mask(setting, seed, epoch, count) for seed in seeds])
            masks = torch.from_numpy(drawn).to(form.dtype)
        form.epoch(epoch, orders, masks)

    return advance
