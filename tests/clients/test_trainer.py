"""transformers' Trainer: its end, logs, stopping early, other callbacks; all networks are in test_product."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from tiny_networks import Examples, assert_same, make, weights
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

import wideflat
from wideflat.integrations.huggingface import EntropicAround, FocusingCallback

# peft asks transformers for a name that transformers has given up.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

OPTIMIZERS = {
    "EntropySGD": (wideflat.EntropySGD, {"lr": 0.5, "inner_lr": 0.05, "inner_steps": 5, "momentum": 0.9}),
    "Entropic": (EntropicAround, {"inner": partial(torch.optim.AdamW, lr=0.01), "inner_steps": 5, "pull": 0.5}),
    "Lookahead": (wideflat.Lookahead, {"lr": 0.5, "inner_lr": 0.05, "inner_steps": 5}),
}


class Watcher(TrainerCallback):
    """Keeps w as the optimizer has it at each step and each evaluation."""

    def __init__(self):
        self.centers, self.evaluated = {}, {}

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        inside = optimizer.optimizer
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        open_cycle = inside.state_dict()["param_groups"][0]
        open_cycle = open_cycle.get("entropic", open_cycle)["position"] > 0
        self.centers[state.global_step] = {
            name: (inside.state[p]["center"] if open_cycle else p).detach().clone() for name, p in named.items()
        }

    def on_evaluate(self, args, state, control, metrics=None, model=None, **kwargs):
        self.evaluated[state.global_step] = (
            metrics["eval_loss"],
            {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad},
        )


def trainer_of(folder, model, name, optimizer="EntropySGD", callback=None, watcher=None, **settings):
    settings = {"max_steps": 8, "save_steps": 4, "eval_steps": 4} | settings
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        eval_strategy="steps",
        logging_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        weight_decay=0.1,
        dataloader_pin_memory=False,
        **settings,
    )
    callback = callback or FocusingCallback(factor=None if optimizer == "Lookahead" else 10.0)
    return Trainer(
        model,
        args,
        train_dataset=Examples(name),
        eval_dataset=Examples(name, 8, seed=2),
        optimizer_cls_and_kwargs=OPTIMIZERS[optimizer],
        callbacks=[*([watcher] if watcher else []), callback],
    )


def saved_in(folder, model):
    """The trainable weights of a checkpoint, by the names that the model has for them."""
    (file,) = [path for path in folder.iterdir() if path.name in ("model.safetensors", "adapter_model.safetensors")]
    saved = load_file(file)
    named = {name.replace(".default.", "."): name for name in weights(model)}
    return {named[name]: value for name, value in saved.items() if name in named}


def test_everything_the_trainer_shows_is_w_and_the_end_too(tmp_path):
    name, watcher, model = "t5", Watcher(), make("t5")
    trainer = trainer_of(tmp_path, model, name, watcher=watcher, max_steps=9)
    trainer.train()
    w = watcher.centers
    for step in (4, 8):
        _, evaluated = watcher.evaluated[step]
        assert_same(evaluated, w[step])
        saved = saved_in(tmp_path / f"checkpoint-{step}", model)
        assert saved and all(torch.equal(value, w[step][key]) for key, value in saved.items())
    assert trainer.optimizer.optimizer.at_center
    # Evaluating once more, and saving, after the end: nothing moves.
    before = weights(model)
    loss = trainer.evaluate()["eval_loss"]
    assert_same(before, weights(model))
    model.eval()
    with torch.no_grad():
        expected = model(**Examples(name, 8, seed=2).batch()).loss.item()
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_training_logs_what_the_whole_one_does(optimizer, tmp_path):
    whole = make("gpt2")
    trainer = trainer_of(tmp_path / "whole", whole, "gpt2", optimizer)
    trainer.train()
    again = make("gpt2")
    resumed = trainer_of(tmp_path / "again", again, "gpt2", optimizer)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert_same(weights(whole), weights(again))
    ours, theirs = ([log for log in t.state.log_history if "loss" in log][-1] for t in (trainer, resumed))
    for reading in ("gamma", "pull", "distance", "at_center", "loss"):
        assert ours.get(reading) == theirs.get(reading)
    assert ours["distance"] > 0


def test_a_finished_training_can_be_made_longer(tmp_path):
    """The last checkpoint is of before the cycle was closed."""
    settings = {"lr_scheduler_type": "constant", "save_steps": 7, "eval_steps": 7}
    whole, again = make("gpt2"), make("gpt2")
    trainer_of(tmp_path, whole, "gpt2", callback=FocusingCallback(total=9), max_steps=9, **settings).train()
    short = trainer_of(tmp_path / "a", again, "gpt2", callback=FocusingCallback(total=9), max_steps=7, **settings)
    short.train()
    again = make("gpt2")
    longer = trainer_of(tmp_path / "a", again, "gpt2", callback=FocusingCallback(total=9), max_steps=9, **settings)
    longer.train(resume_from_checkpoint=True)
    assert_same(weights(whole), weights(again))


def test_the_best_model_is_the_w_that_was_evaluated(tmp_path):
    watcher, model = Watcher(), make("gpt2")
    trainer = trainer_of(
        tmp_path,
        model,
        "gpt2",
        watcher=watcher,
        max_steps=12,
        save_steps=3,
        eval_steps=3,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the worst one, so that it is not the last
    )
    trainer.train()
    losses = {step: loss for step, (loss, _) in watcher.evaluated.items()}
    best = max(losses, key=losses.get)
    assert best != 12
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    assert_same(weights(model), watcher.evaluated[best][1])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[best], rel=1e-6)
    trainer.save_model(str(tmp_path / "final"))
    again = type(model).from_pretrained(tmp_path / "final")
    assert_same(weights(again), weights(model))


def test_saving_only_the_best_and_stopping_early(tmp_path):
    watcher, model = Watcher(), make("gpt2")
    best = {"save_strategy": "best", "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    trainer = trainer_of(
        tmp_path, model, "gpt2", watcher=watcher, max_steps=30, eval_steps=3, greater_is_better=True, **best
    )
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
    trainer.train()
    assert trainer.state.global_step < 30
    losses = {step: loss for step, (loss, _) in watcher.evaluated.items()}
    chosen = max(losses, key=losses.get)
    assert_same(saved_in(tmp_path / f"checkpoint-{chosen}", model), watcher.centers[chosen])
    assert_same(weights(model), watcher.centers[chosen])
    trainer.evaluate()
    assert_same(weights(model), watcher.centers[chosen])


def test_focusing_by_epochs_takes_its_length_from_the_trainer(tmp_path):
    model = make("gpt2")
    epochs = {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "epoch"}
    trainer = trainer_of(tmp_path, model, "gpt2", callback=FocusingCallback(factor=100.0, by="epoch"), **epochs)
    trainer.train()
    gammas = [log["gamma"] for log in trainer.state.log_history if "loss" in log]
    assert gammas == pytest.approx([0.5] * 3 + [5.0] * 4 + [50.0])  # the step that ends an epoch logs the next one
    saved = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["FocusingCallback"]["attributes"] == {"gamma0": [[0.5, 0.5]]}
    again = trainer_of(tmp_path, make("gpt2"), "gpt2", callback=FocusingCallback(factor=100.0, by="epoch"), **epochs)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert [log["gamma"] for log in again.state.log_history if "loss" in log] == gammas
    assert_same(weights(model), weights(again.model))


def test_decay_groups_are_kept(tmp_path):
    for optimizer in OPTIMIZERS:
        trainer = trainer_of(tmp_path, make("gpt2"), "gpt2", optimizer)
        groups = trainer.create_optimizer().param_groups
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
        assert all(p.dim() == 1 for p in groups[1]["params"])


def test_another_optimizer_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, make("gpt2"), "gpt2")
    trainer.optimizer_cls_and_kwargs = (torch.optim.SGD, {"lr": 0.1})
    with pytest.raises(TypeError, match="needs an optimizer with a center"):
        trainer.train()


class Saver(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step == 3
        return control


def test_a_checkpoint_of_the_explorer_does_not_pass_unseen(tmp_path):
    trainer = trainer_of(tmp_path, make("gpt2"), "gpt2")
    trainer.add_callback(Saver())
    with pytest.raises(RuntimeError, match="pass FocusingCallback as the last"):
        trainer.train()


def test_a_training_whose_callbacks_are_restored_is_resumed_bit_for_bit(tmp_path):
    whole, again, settings = make("llama"), make("llama"), {"restore_callback_states_from_checkpoint": True}
    trainer_of(tmp_path / "whole", whole, "llama", **settings).train()
    resumed = trainer_of(tmp_path / "again", again, "llama", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert_same(weights(whole), weights(again))
    assert resumed.optimizer.optimizer.at_center
