"""SNOO against its twin."""

import torch
from family_twins import OUTER, AdamW, Nesterov, adamw, made, snoo, vector
from small_regression import step

import wideflat


def test_snoo():
    model = made()
    twin = snoo(made(), vector(model), 11, AdamW(0.01), Nesterov(0.6, 0.8), 3)
    opt = wideflat.SNOO(adamw(model.parameters()), inner_steps=3, **OUTER)
    for t, held in enumerate(twin):
        step(opt, model, t)
        torch.testing.assert_close(vector(model), held)
