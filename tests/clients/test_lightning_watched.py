"""Lightning without FocusingCallback validates, tests, saves and keeps w': it says so, once; not where w is shown."""

import re
import sys
import warnings

import lightning
import pytest
import torch
from of_others import WARNINGS
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import wideflat
from wideflat.checks.trainers import watch_trainer
from wideflat.integrations.lightning import FocusingCallback

pytestmark = WARNINGS

EXPLORER = "the explorer w' of EntropySGD, not its solution w"


class Network(lightning.LightningModule):
    """Five steps an epoch, three a cycle: every epoch ends in the middle of one, but the third."""

    capturable = False

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return wideflat.EntropySGD(self.parameters(), lr=0.5, inner_steps=3, capturable=self.capturable)


class Validated(Network):
    def validation_step(self, batch, _):
        self.log("loss", nn.functional.cross_entropy(self.layer(batch[0]), batch[1]))

    test_step = validation_step


class ShowsIt(Network):
    """Validates w by itself, and ends with it."""

    def validation_step(self, batch, _):
        if self.trainer.sanity_checking:
            return
        with self.trainer.optimizers[0].center(self):
            self.log("loss", nn.functional.cross_entropy(self.layer(batch[0]), batch[1]))

    def on_train_end(self):
        self.trainer.optimizers[0].flush()


class ShowsItAllAlong(Validated):
    """Validates w in other hooks, which are called after those of callbacks."""

    def on_validation_start(self):
        self.trainer.optimizers[0].eval()

    def on_validation_end(self):
        self.trainer.optimizers[0].train()

    on_train_end = ShowsIt.on_train_end


class Captured(Validated):
    capturable = True


def data():
    examples = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(examples, (examples[:, 0] > 0).long()), batch_size=4)


def said_by(network, tmp_path, *, callbacks=(), then=lambda trainer, network: None, **settings):
    """What is said of w' in a fit: the words, and the file that the warning points to."""
    settings = {"max_epochs": 2, "enable_checkpointing": False} | settings
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **settings,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(network, data(), data())
        then(trainer, network)
    said = [w for w in caught if EXPLORER in str(w.message)]
    return [(re.match(r"Lightning (.*) the explorer", str(w.message))[1], w.filename) for w in said]


@pytest.mark.parametrize("network", [Validated, Captured])
def test_a_validation_of_the_explorer_is_said_once_at_the_line_of_fit(network, tmp_path):
    assert said_by(network(), tmp_path) == [("validates", __file__)]


def test_a_checkpoint_of_the_explorer_is_said(tmp_path):
    assert said_by(Network(), tmp_path, enable_checkpointing=True) == [("saves", __file__)]


def test_an_end_at_the_explorer_is_said(tmp_path):
    assert said_by(Network(), tmp_path) == [("ends with", __file__)]


def test_a_test_of_the_explorer_is_said(tmp_path):
    def then(trainer, network):
        network.trainer.optimizers[0]._place.has_warned = False
        trainer.test(network, data(), verbose=False)

    assert [what for what, _ in said_by(Validated(), tmp_path, then=then)] == ["validates", "tests"]


@pytest.mark.parametrize("network", [ShowsIt, ShowsItAllAlong])
def test_who_shows_the_center_hears_nothing(network, tmp_path):
    assert said_by(network(), tmp_path) == []


def test_with_our_callback_nothing_is_watched(tmp_path):
    seen = []
    said = said_by(
        Validated(),
        tmp_path,
        callbacks=[FocusingCallback(factor=None)],
        enable_checkpointing=True,
        then=lambda trainer, network: seen.extend(trainer.callbacks),
    )
    assert said == [] and not any(hasattr(callback, "watches_center") for callback in seen)


def test_a_loop_of_ones_own_finds_no_trainer(monkeypatch):
    watch_trainer()
    for package in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, f"{package}.trainer.trainer", raising=False)
    monkeypatch.setattr(sys, "_getframe", lambda: pytest.fail("nobody has imported Lightning"))
    watch_trainer()
