"""Lightning with FocusingCallback: alone, at the end, in its wrapper it is w; more in test_product."""

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from of_others import WARNINGS
from tiny_networks import Examples, assert_same, make, weights
from torch import nn
from torch.utils.data import DataLoader

import wideflat
from wideflat.integrations.lightning import FocusingCallback

pytestmark = WARNINGS

OPTIMIZERS = {
    "EntropySGD": lambda params: wideflat.EntropySGD(params, inner_lr=0.05, inner_steps=5, momentum=0.9),
    "Entropic": lambda params: wideflat.Entropic(torch.optim.AdamW(params, lr=0.01), inner_steps=5, pull=0.5),
    "Lookahead": lambda params: wideflat.Lookahead(params, inner_lr=0.05, inner_steps=5, momentum=0.9),
}


class Language(lightning.LightningModule):
    """Any of the tiny networks; it notes what it was evaluated with."""

    def __init__(self, name="gpt2", lora=False, optimizer="EntropySGD"):
        super().__init__()
        self.model = make(name, lora)
        self.make_optimizer = OPTIMIZERS[optimizer]
        self.evaluated = []

    def training_step(self, batch, _):
        return self.model(**batch).loss

    def validation_step(self, batch, _):
        self.evaluated.append((self.trainer.global_step, weights(self)))
        self.log("val_loss", self.model(**batch).loss)

    test_step = validation_step

    def predict_step(self, batch, _):
        self.evaluated.append((self.trainer.global_step, weights(self)))
        return self.model(**batch).logits

    def configure_optimizers(self):
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


class Watcher(lightning.Callback):
    """Keeps w as the optimizer has it after each step."""

    def __init__(self):
        self.centers = {}

    def on_train_batch_end(self, trainer, module, *_):
        opt = trainer.optimizers[0]
        self.centers[trainer.global_step] = {
            name: (p if opt.at_center else opt.state[p]["center"]).detach().clone()
            for name, p in module.named_parameters()
            if p.requires_grad
        }


def trainer_of(folder, *callbacks, focusing=None, **settings):
    settings = {"max_epochs": 2, "logger": False, "log_every_n_steps": 1} | settings
    return lightning.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, focusing or FocusingCallback()],
        **settings,
    )


def loaders(name="gpt2"):
    return DataLoader(Examples(name), 4), DataLoader(Examples(name, 8, seed=2), 8)


def test_everything_that_lightning_shows_is_w_alone_and_after_the_end(tmp_path):
    name = "gpt2"
    module, watcher = Language(name), Watcher()
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=4)
    light = ModelCheckpoint(tmp_path / "light", filename="{step}", save_weights_only=True, every_n_train_steps=3)
    trainer = trainer_of(tmp_path, watcher, checkpoint, light, max_steps=9, val_check_interval=4)
    trainer.fit(module, *loaders(name))
    w = watcher.centers
    assert [step for step, _ in module.evaluated[-2:]] == [4, 8]
    for step, evaluated in module.evaluated[-2:]:
        assert_same(evaluated, w[step])
    for file, step in ((tmp_path / "step=4.ckpt", 4), (tmp_path / "step=8.ckpt", 8), (light.best_model_path, 9)):
        saved = torch.load(file, weights_only=True)["state_dict"]
        assert_same({key: saved[key] for key in w[step]}, w[step])
    assert trainer.optimizers[0].at_center and trainer.optimizers[0].distance() == 0
    # Alone, after the end, and from a file.
    after = weights(module)
    for evaluate in (trainer.validate, trainer.test, trainer.predict):
        module.evaluated.clear()
        evaluate(module, loaders(name)[1])
        assert_same(module.evaluated[-1][1], after)
    module.evaluated.clear()
    trainer.validate(module, loaders(name)[1], ckpt_path=tmp_path / "step=4.ckpt", weights_only=True)
    assert_same(module.evaluated[-1][1], w[4])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_fit_logs_what_the_whole_one_does(optimizer, tmp_path):
    torch.manual_seed(0)
    modules = []
    for path in (None, tmp_path / "epoch=0.ckpt"):
        module = Language("llama", optimizer=optimizer)  # it has no dropout: Lightning does not restore generators
        checkpoint = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        focusing = FocusingCallback(factor=None if optimizer == "Lookahead" else 10.0)
        trainer = trainer_of(tmp_path, checkpoint, focusing=focusing)
        trainer.fit(module, *loaders("llama"), ckpt_path=path, weights_only=True)
        modules.append((module, trainer))
    (whole, first), (again, second) = modules
    assert_same(weights(whole), weights(again))
    for name in ("gamma", "pull", "distance", "at_center"):
        assert first.callback_metrics.get(name) == second.callback_metrics.get(name)
    assert first.callback_metrics["distance"] >= 0
    assert whole.evaluated[-1][0] == again.evaluated[-1][0]
    assert_same(whole.evaluated[-1][1], again.evaluated[-1][1])


def test_a_finished_fit_can_be_made_longer(tmp_path):
    whole, again = Language("llama"), Language("llama")
    trainer_of(tmp_path, focusing=FocusingCallback(total=16)).fit(whole, *loaders("llama"))
    first = trainer_of(tmp_path / "a", focusing=FocusingCallback(total=16), max_epochs=1)
    first.fit(again, *loaders("llama"))
    assert first.optimizers[0].at_center
    path = first.checkpoint_callback.best_model_path
    again = Language("llama")
    second = trainer_of(tmp_path / "a", focusing=FocusingCallback(total=16))
    second.fit(again, *loaders("llama"), ckpt_path=path, weights_only=True)
    assert_same(weights(whole), weights(again))


def test_focusing_by_epochs_is_logged(tmp_path):
    seen = []

    class Reader(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            seen.append(trainer.optimizers[0].param_groups[0]["gamma"])

    trainer = trainer_of(tmp_path, Reader(), focusing=FocusingCallback(factor=100.0, by="epoch"))
    trainer.fit(Language("llama"), *loaders("llama"))
    assert seen == pytest.approx([0.5] * 8 + [5.0] * 8)
    assert trainer.callback_metrics["gamma"].item() == pytest.approx(5.0)


class Vision(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.net(batch["pixel_values"]), batch["labels"])

    def configure_optimizers(self):
        return OPTIMIZERS["EntropySGD"](self.parameters())


def test_batch_norm_is_that_of_w_at_the_end(tmp_path):
    loader = DataLoader(Examples("vit"), 8)
    with pytest.raises(ValueError, match="has batch norm"):
        trainer_of(tmp_path).fit(Vision(), loader)
    module = Vision()
    callback = FocusingCallback(forward=lambda module, batch: module.net(batch["pixel_values"]))
    trainer_of(tmp_path, focusing=callback, max_steps=7).fit(module, loader)
    twin = Vision()
    twin.load_state_dict(module.state_dict())
    wideflat.refresh_batch_norm(twin, loader, forward=callback.forward)
    torch.testing.assert_close(twin.net[2].running_mean, module.net[2].running_mean)
    torch.testing.assert_close(twin.net[2].running_var, module.net[2].running_var)


def test_a_fit_that_was_interrupted_is_validated_at_w(tmp_path):
    module, watcher = Language("llama"), Watcher()

    class Stop(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 3:
                raise RuntimeError("no power")

    trainer = trainer_of(tmp_path, watcher, Stop())
    with pytest.raises(RuntimeError, match="no power"):
        trainer.fit(module, *loaders("llama"))
    explorer = weights(module)
    trainer.validate(module, loaders("llama")[1])
    assert_same(module.evaluated[-1][1], watcher.centers[3])
    assert_same(weights(module), explorer)


def test_the_wrapper_that_a_module_is_given_shows_w_too(tmp_path):
    """Lightning's wrapper calls our methods as its own, on its own attributes."""

    class Curious(Language):
        def training_step(self, batch, number):
            opt = self.optimizers()
            if number == 3:
                explorer = weights(self)
                assert not opt.at_center and not opt.optimizer.at_center
                with opt.center(self.model):
                    assert opt.at_center and opt.optimizer.at_center
                    assert all(torch.equal(p, opt.state[p]["center"]) for p in self.parameters())
                    wideflat.local_energy(self.model, batch, [0.1], metric="loss", max_passes=1, progress=False)
                    with pytest.raises(RuntimeError, match=r"within `with opt\.center"):
                        opt.optimizer.state_dict()
                assert_same(weights(self), explorer)
                opt.eval()
                assert opt.optimizer.evaluating and opt.distance() > 0
                opt.train()
            return super().training_step(batch, number)

    trainer_of(tmp_path, max_steps=5).fit(Curious("llama"), *loaders("llama"))
