"""SAM and its family in the Trainer, in Accelerate and in Lightning: a loop by hand's weights, resumed exactly."""

import copy
import itertools
from functools import partial

import lightning
import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from of_others import WARNINGS
from tiny_networks import Examples, make
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler
from transformers import Trainer, TrainingArguments

import wideflat
from wideflat.integrations.huggingface import FocusingCallback, SAMCallback

pytestmark = [pytest.mark.usefixtures("fresh_accelerate"), *WARNINGS]

ADAMW = partial(torch.optim.AdamW, weight_decay=0.0)  # the Trainer decays matrices alone
FAMILY = {
    "SAM": (wideflat.SAM, {"rho": 0.1}),
    "GSAM": (wideflat.GSAM, {"rho": 0.1}),
    "FriendlySAM": (wideflat.FriendlySAM, {"rho": 0.1}),
    "LookSAM": (wideflat.LookSAM, {"rho": 0.1, "period": 3}),
}


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_same(ours, theirs, **tolerance):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], **{"rtol": 0, "atol": 0} | tolerance)


def by_hand(name, network, steps, parts=1, clip=None, lora=False):
    """The loop that everyone else is compared with: the examples in their order."""
    kind, settings = FAMILY[name]
    model = make(network, lora).eval()  # no dropout
    trainable = [p for p in model.parameters() if p.requires_grad]
    opt = kind(trainable, ADAMW, lr=0.01, **settings)
    batches = itertools.cycle(DataLoader(Examples(network), 4))
    for _ in range(steps):
        window = [next(batches) for _ in range(parts)]
        opt.zero_grad()
        for batch in window:
            (model(**batch).loss / parts).backward()
        if opt.perturb():
            for batch in window:
                (model(**batch).loss / parts).backward()
        opt.restore()
        if clip:
            nn.utils.clip_grad_norm_(trainable, clip)
        opt.step()
    return model


# ----------------------------------------------------------------------------------------------- Hugging Face's Trainer


class InOrder(Trainer):
    """Takes the examples in their order, without dropout."""

    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)

    def training_step(self, model, inputs, num_items_in_batch=None):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return super().training_step(model, inputs, num_items_in_batch)


def trainer_of(folder, model, network, name="SAM", **settings):
    kind, chosen = FAMILY[name]
    args = TrainingArguments(
        output_dir=str(folder),
        **{"per_device_train_batch_size": 4, "max_steps": 6, "save_steps": 3, "lr_scheduler_type": "constant"}
        | settings,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    optimizer = (kind, {"base": ADAMW, "lr": 0.01, **chosen})
    trainer = InOrder(model, args, train_dataset=Examples(network), optimizer_cls_and_kwargs=optimizer)
    trainer.add_callback(SAMCallback(trainer))
    return trainer


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("parts", [1, 2], ids=["plain", "accumulated"])
def test_the_trainer_does_what_a_loop_by_hand_does(name, parts, tmp_path):
    model = make("llama")
    steps = 4
    trainer = trainer_of(
        tmp_path,
        model,
        "llama",
        name,
        max_steps=steps,
        gradient_accumulation_steps=parts,
        max_grad_norm=0.5,
    )
    trainer.train()
    assert "training_step" not in vars(trainer)
    twin = by_hand(name, "llama", steps, parts, clip=0.5)
    assert_same(weights(model), weights(twin), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        first = make("llama").eval()(**Examples("llama").batch(slice(4))).loss.item()
    if parts == 1:
        trainer = trainer_of(tmp_path / "b", make("llama"), "llama", name, max_steps=1, logging_steps=1)
        trainer.train()
        assert trainer.state.log_history[0]["loss"] == pytest.approx(first, rel=1e-3)  # of w


def test_callbacks_and_optimizers_that_do_not_go_together(tmp_path):
    trainer = trainer_of(tmp_path, make("llama"), "llama")
    trainer.optimizer_cls_and_kwargs = (torch.optim.SGD, {"lr": 0.1})
    with pytest.raises(TypeError, match="SAMCallback needs"):
        trainer.train()
    trainer = trainer_of(tmp_path, make("llama"), "llama")
    trainer.add_callback(FocusingCallback())
    with pytest.raises(TypeError, match="see SAMCallback"):
        trainer.train()


# ----------------------------------------------------------------------------------------------------------- Accelerate


@pytest.mark.parametrize("name", ["SAM", "LookSAM"])
def test_accelerate(name, tmp_path):
    def prepared():
        accelerator = Accelerator(cpu=True)
        model = make("llama").eval()
        kind, settings = FAMILY[name]
        opt = kind(model.parameters(), ADAMW, lr=0.01, **settings)
        return accelerator, *accelerator.prepare(model, opt, DataLoader(Examples("llama"), 4))

    def train(parts, first, last):
        accelerator, model, opt, loader = parts
        for number, batch in enumerate(loader):
            if first <= number < last:
                opt.zero_grad()
                accelerator.backward(model(**batch).loss)
                if opt.optimizer.perturb(accelerator.scaler):
                    accelerator.backward(model(**batch).loss)
                opt.optimizer.restore()
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                opt.step()

    whole = prepared()
    train(whole, 0, 6)
    assert_same(weights(whole[1]), weights(by_hand(name, "llama", 6, clip=0.5)))
    first = prepared()
    train(first, 0, 2)
    first[0].save_state(tmp_path / "state")
    again = prepared()
    again[0].load_state(tmp_path / "state")
    train(again, 2, 6)
    assert_same(weights(again[1]), weights(whole[1]))


# ------------------------------------------------------------------------------------------------------------ Lightning


class Language(lightning.LightningModule):
    def __init__(self, name, manual, lora=False, network="llama"):
        super().__init__()
        self.model = make(network, lora)
        self.name, self.automatic_optimization = name, not manual

    def on_train_batch_start(self, *_):
        self.eval()  # no dropout

    def training_step(self, batch, _):
        if self.automatic_optimization:
            return self.model(**batch).loss
        opt = self.optimizers()
        opt.zero_grad()
        self.manual_backward(self.model(**batch).loss)
        if opt.perturb():
            self.manual_backward(self.model(**batch).loss)
        opt.restore()
        opt.step()
        return None

    def configure_optimizers(self):
        kind, settings = FAMILY[self.name]
        return kind([p for p in self.parameters() if p.requires_grad], ADAMW, lr=0.01, **settings)


def fit(folder, module, path=None, network="llama", **settings):
    checkpoint = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoint],
        max_epochs=2,
        **settings,
    )
    trainer.fit(module, DataLoader(Examples(network), 4), ckpt_path=path, weights_only=True)
    return module


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("name", FAMILY)
def test_lightning_does_what_a_loop_by_hand_does(name, manual, tmp_path):
    whole = fit(tmp_path, Language(name, manual))
    assert_same(weights(whole.model), weights(by_hand(name, "llama", 16)), rtol=1e-6, atol=1e-7)
    again = fit(tmp_path, Language(name, manual), tmp_path / "epoch=0.ckpt")
    assert_same(weights(whole), weights(again))


def test_accumulation_by_lightning_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(RuntimeError, match=r"perturb\(\) and opt.restore\(\)"):
        fit(tmp_path, Language("SAM", False), accumulate_grad_batches=2)


def test_a_copy_of_an_optimizer_knows_its_model():
    model = make("llama")
    opt = wideflat.SAM(model.parameters(), lr=0.1, model=model)
    other_model, other = copy.deepcopy((model, opt))
    assert other.model is other_model
