"""Accelerate: prepared, accumulated, clipped, saved and loaded in the middle of a cycle, at w' and at w."""

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from tiny_networks import NETWORKS, Examples, make
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


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def prepared(name, lora, optimizer, **settings):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **settings)
    model = make(name, lora).eval()  # no dropout
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


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_state_saved_after_eval_holds_w_and_is_resumed_exactly(name, lora, tmp_path):
    whole = prepared(name, lora, "EntropySGD")
    train(whole, 0, 16)
    first = prepared(name, lora, "EntropySGD")
    train(first, 0, 6)  # three steps of five
    accelerator, model, opt, _ = first
    w = {n: opt.optimizer.state[p]["center"].clone() for n, p in model.named_parameters() if p.requires_grad}
    opt.eval()
    assert_same(weights(model), w)
    accelerator.save_state(tmp_path / "state")
    saved = load_file(tmp_path / "state" / "model.safetensors")
    assert all(torch.equal(saved[n], value) for n, value in w.items() if n in saved)
    again = prepared(name, lora, "EntropySGD")
    again[0].load_state(tmp_path / "state")
    assert_same(weights(again[1]), w)
    train(again, 6, 16)
    assert_same(weights(again[1]), weights(whole[1]))


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("shown", [False, True], ids=["at the explorer", "at the center"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_either_state_is_resumed_exactly(optimizer, shown, precision, tmp_path):
    settings = {"mixed_precision": precision}
    whole, first = (prepared("llama", False, optimizer, **settings) for _ in range(2))
    train(whole, 0, 16)
    train(first, 0, 6)
    if shown:
        first[2].eval()
    first[0].save_state(tmp_path / "state")
    again = prepared("llama", False, optimizer, **settings)
    again[0].load_state(tmp_path / "state")
    train(again, 6, 16)
    assert_same(weights(again[1]), weights(whole[1]))


def test_a_step_at_the_center_says_what_was_forgotten():
    accelerator, model, opt, loader = prepared("llama", False, "Entropic")
    train((accelerator, model, opt, loader), 0, 2)
    opt.eval()
    with pytest.raises(RuntimeError, match=r"opt.train\(\)"):
        opt.step()


def test_a_compiled_network_is_resumed_exactly(tmp_path):
    settings = {"dynamo_backend": "aot_eager"}
    whole, first = (prepared("llama", False, "Entropic", **settings) for _ in range(2))
    train(whole, 0, 10)
    train(first, 0, 6)
    first[2].eval()
    first[0].save_state(tmp_path / "state")
    again = prepared("llama", False, "Entropic", **settings)
    again[0].load_state(tmp_path / "state")
    train(again, 6, 10)
    assert_same(weights(again[1]), weights(whole[1]))
