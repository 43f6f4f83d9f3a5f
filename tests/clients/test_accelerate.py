"""Accelerate: saved and loaded in the middle of a cycle, at w' and at w. More in test_product."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from tiny_networks import Examples, assert_same, make, weights
from torch.utils.data import DataLoader

import wideflat

# peft asks transformers for a name that transformers has given up.
pytestmark = [
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]

OPTIMIZERS = {
    "EntropySGD": lambda params: wideflat.EntropySGD(params, inner_lr=0.05, inner_steps=5, momentum=0.9),
    "Entropic": lambda params: wideflat.Entropic(torch.optim.AdamW(params, lr=0.01), inner_steps=5, pull=0.5),
    "Lookahead": lambda params: wideflat.Lookahead(params, inner_lr=0.05, inner_steps=5, momentum=0.9),
}


def prepared(name, optimizer):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make(name).eval()  # no dropout
    opt = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    return accelerator, *accelerator.prepare(model, opt, DataLoader(Examples(name), 2))


def train(parts, first, last):
    """Batches first, ..., last - 1 of an epoch."""
    accelerator, model, opt, loader = parts
    opt.train()
    for number, batch in enumerate(loader):
        if first <= number < last:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                opt.step()
                opt.zero_grad()


@pytest.mark.parametrize("shown", [False, True], ids=["at the explorer", "at the center"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_either_state_is_resumed_exactly(optimizer, shown, tmp_path):
    whole, first = (prepared("llama", optimizer) for _ in range(2))
    train(whole, 0, 16)
    train(first, 0, 6)
    if shown:
        first[2].eval()
    first[0].save_state(tmp_path / "state")
    again = prepared("llama", optimizer)
    again[0].load_state(tmp_path / "state")
    train(again, 6, 16)
    assert_same(weights(again[1]), weights(whole[1]))


def test_a_step_at_the_center_says_what_was_forgotten():
    accelerator, model, opt, loader = prepared("llama", "Entropic")
    train((accelerator, model, opt, loader), 0, 2)
    opt.eval()
    with pytest.raises(RuntimeError, match=r"opt.train\(\)"):
        opt.step()


def test_a_step_that_the_scaler_skips_does_not_count_in_the_cycle():
    """fp16 by Accelerate is for accelerators; its optimizer wrapper with a scaler of the CPU does the same here."""
    twins, _ = [], Accelerator(cpu=True)
    for spoilt in (False, True):
        model = make("llama")
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        opt = AcceleratedOptimizer(OPTIMIZERS["Entropic"](model.parameters()), scaler=scaler)
        for number, batch in enumerate(DataLoader(Examples("llama"), 4)):
            repeats = (True, False) if spoilt and number == 3 else (False,)
            for infinite in repeats:
                opt.zero_grad()
                opt.scaler.scale(model(**batch).loss).backward()
                if infinite:
                    next(model.parameters()).grad.fill_(torch.inf)
                position = opt.optimizer.param_groups[0]["entropic"]["position"]
                opt.step()
                assert opt.step_was_skipped == infinite
                if infinite:
                    assert opt.optimizer.param_groups[0]["entropic"]["position"] == position == 3
        twins.append(weights(model))
    assert_same(*twins)
