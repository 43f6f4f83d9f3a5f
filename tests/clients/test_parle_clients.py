"""Parle in the trainers of others: replicas in one model, coupled after each step; shown, saved and ended at w."""

import lightning
import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from of_others import WARNINGS
from tiny_networks import Examples, make
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

import wideflat
from wideflat.integrations import huggingface
from wideflat.integrations import lightning as light

pytestmark = [pytest.mark.usefixtures("fresh_accelerate"), *WARNINGS]

SETTINGS = {"lr": 0.5, "inner_lr": 0.05, "inner_steps": 3, "epsilon": 0.0}


class Together(nn.Module):
    """Two replicas as one network: the sum of their losses, each on its half of the mini-batch."""

    def __init__(self):
        super().__init__()
        seeds = iter((1, 2))

        def one():
            model = make("llama")
            torch.manual_seed(next(seeds))
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.02 * torch.randn_like(p))
            return model

        self.replicas = wideflat.Replicas(one, 2)

    def forward(self, input_ids, attention_mask, labels):
        halves = zip(input_ids.chunk(2), attention_mask.chunk(2), labels.chunk(2), strict=True)
        names = ("input_ids", "attention_mask", "labels")
        return {"loss": self.replicas.loss([dict(zip(names, half, strict=True)) for half in halves])}


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_same(ours, theirs):
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


def by_hand(steps):
    """The loop that the trainers are compared with."""
    model = Together()
    opt = wideflat.EntropySGD(model.parameters(), **SETTINGS)
    coupling = wideflat.Parle(model.replicas, opt, gamma=0.5)
    batches = [batch for _ in range(2) for batch in DataLoader(Examples("llama"), 4)]
    for batch in batches[:steps]:
        opt.zero_grad()
        model(**batch)["loss"].backward()
        opt.step()
        coupling.couple()
    opt.flush()
    return model


# ------------------------------------------------------------------------------------------------------------ Lightning


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Together()

    def training_step(self, batch, _):
        return self.model(**batch)["loss"]

    def configure_optimizers(self):
        opt = wideflat.EntropySGD(self.parameters(), **SETTINGS)
        self.coupling = wideflat.Parle(self.model.replicas, opt, gamma=0.5)
        return opt

    def on_train_batch_end(self, *_):
        self.coupling.couple()


def test_lightning(tmp_path):
    modules = []
    for path in (None, tmp_path / "epoch=0.ckpt"):
        checkpoint = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu",
            default_root_dir=tmp_path,
            max_epochs=2,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[checkpoint, light.FocusingCallback(factor=None)],
        )
        trainer.fit(module, DataLoader(Examples("llama"), 4), ckpt_path=path, weights_only=True)
        modules.append(weights(module))
    assert_same(*modules)
    torch.testing.assert_close(modules[0], weights(by_hand(16)))


# ----------------------------------------------------------------------------------------------------------- Accelerate


def test_accelerate(tmp_path):
    def prepared():
        accelerator, model = Accelerator(cpu=True), Together()
        opt = wideflat.EntropySGD(model.parameters(), **SETTINGS)
        coupling = wideflat.Parle(model.replicas, opt, gamma=0.5)
        return accelerator, coupling, *accelerator.prepare(model, opt, DataLoader(Examples("llama"), 4))

    def train(parts, first, last):
        accelerator, coupling, model, opt, loader = parts
        opt.train()
        for number, batch in enumerate(loader):
            if first <= number < last:
                opt.zero_grad()
                accelerator.backward(model(**batch)["loss"])
                opt.step()
                coupling.couple()

    whole = prepared()
    train(whole, 0, 8)
    whole[3].optimizer.flush()
    assert_same(weights(whole[2]), weights(by_hand(8)))
    first = prepared()
    train(first, 0, 4)  # one step into the second cycle
    first[3].eval()
    first[0].save_state(tmp_path / "state")
    again = prepared()
    again[0].load_state(tmp_path / "state")
    train(again, 4, 8)
    again[3].optimizer.flush()
    assert_same(weights(again[2]), weights(whole[2]))


# ----------------------------------------------------------------------------------------------- Hugging Face's Trainer


class Couple(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.coupling = wideflat.Parle(model.replicas, optimizer.optimizer, gamma=0.5)

    def on_step_end(self, args, state, control, **kwargs):
        self.coupling.couple()


def test_trainer(tmp_path):
    results = []
    for folder, path in (("whole", None), ("again", str(tmp_path / "whole" / "checkpoint-4"))):
        args = TrainingArguments(
            output_dir=str(tmp_path / folder),
            per_device_train_batch_size=4,
            max_steps=8,
            save_steps=4,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            lr_scheduler_type="constant",
        )
        model = Together()
        trainer = Trainer(
            model,
            args,
            train_dataset=Examples("llama"),
            optimizer_cls_and_kwargs=(wideflat.EntropySGD, SETTINGS),
            callbacks=[Couple(), huggingface.FocusingCallback(factor=None)],
        )
        trainer.train(resume_from_checkpoint=path)
        assert trainer.optimizer.optimizer.at_center
        results.append(weights(model))
    assert_same(*results)
