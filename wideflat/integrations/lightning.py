"""Lightning: what it validates, tests and saves is w, and a resumed fit goes on exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from wideflat.checks import elements, numbers_of
from wideflat.checks.records import reading
from wideflat.integrations.guide import Forward, Guide, with_center

__all__ = ["FocusingCallback"]


class FocusingCallback(Callback):
    """Focusing, and w wherever Lightning validates, tests, predicts, saves or ends; for optimizers with a center.

    .. code-block:: text

        validation, test, predict    of w, within fit as well as alone
        a checkpoint                 state_dict: w, for inference (also with save_weights_only);
                                     optimizer_states: w', mu and the place in the cycle, for fit(ckpt_path=...)
        the end of fit               flush() closes the cycle, batch norm is refreshed
        logs                         gamma or pull, distance d(w', w), at_center

    While fit runs, ``module.state_dict()`` gives w; ``module.parameters()`` are w'. The last checkpoint is of
    before the cycle was closed, so that a training can be made longer; both are the same when the number of steps is a
    multiple of L.

    Args:
        factor: gamma (or pull) at the end of training over that at its start; None leaves it as it is.
        by: ``"step"`` changes it after each optimizer step, ``"epoch"`` after each epoch.
        total: Steps or epochs until the end; None takes the Trainer's.
        kind: ``"exponential"``, ``"cosine"`` or ``"constant"``, as in `wideflat.Focusing`.
        batch_norm: Refresh the statistics of batch-norm layers at the end of fit, if there are any.
        forward: For that: called as ``forward(module, batch)`` with a training batch. Without it the module is called
            with the batch, or with the first entry of it.

    Example:
        >>> callback = FocusingCallback(factor=10.0)     # Trainer(..., callbacks=[callback])
        >>> callback.state_dict()
        {'gamma0': []}
    """

    def __init__(
        self,
        factor: float | None = 10.0,
        by: str = "step",
        total: float | None = None,
        kind: str = "exponential",
        batch_norm: bool = True,
        forward: Forward | None = None,
    ) -> None:
        self.guide = Guide(factor, by, total, kind, batch_norm)
        self.forward = forward
        self._gamma0: list[list[float]] = []
        self._logged = 0
        self._hook: RemovableHandle | None = None

    # ------------------------------------------------------------------------------------------------------------- fit

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out now what would fail at the end; and let ``state_dict()`` give w from here on."""
        self._check_forward(pl_module)
        self._release()

        def show_w(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
            state_dict.update({prefix + name: w for name, w in _hidden_centers(trainer, module).items()})

        self._hook = pl_module.register_state_dict_post_hook(show_w)

    def _check_forward(self, module: LightningModule) -> None:
        can_call = self.forward is not None or type(module).forward is not LightningModule.forward
        if self.guide.batch_norm and not can_call and any(isinstance(m, _BatchNorm) for m in module.modules()):
            raise ValueError(
                f"{type(module).__name__} has batch norm, whose statistics are refreshed at the end, and no forward(): "
                "pass FocusingCallback(forward=lambda module, batch: module.net(batch[0])), or batch_norm=False"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start focusing, or go on with it."""
        if self.guide.by == "step":
            total = trainer.estimated_stepping_batches * max(1, len(trainer.optimizers))
        else:
            total = trainer.max_epochs if trainer.max_epochs is not None else -1
        self.guide.start(trainer.optimizers, total, self._gamma0)
        self._gamma0 = self.guide.gamma0
        self._focus(trainer)

    def _focus(self, trainer: Trainer) -> None:
        self.guide.move_to(trainer.global_step if self.guide.by == "step" else trainer.current_epoch)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Focus by epochs."""
        self._focus(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Training is at w', whatever was shown or loaded before."""
        self.guide.show_explorer()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Focus by steps; log as often as the trainer does."""
        self._focus(trainer)
        due = trainer.log_every_n_steps and trainer.global_step // trainer.log_every_n_steps > self._logged
        if due:
            self._logged = trainer.global_step // trainer.log_every_n_steps
            pl_module.log_dict(self.guide.readings())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End at w."""

        def batches() -> Iterator[Any]:
            for batch in trainer.train_dataloader or ():
                yield move_data_to_device(batch, pl_module.device)

        self.guide.finish(pl_module, batches() if trainer.train_dataloader is not None else None, self.forward)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let ``state_dict()`` be as it was."""
        self._release()

    def _release(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    # ------------------------------------------------------------------------------------- validation, test, prediction

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate w."""
        _show_center(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go back to w'."""
        _show_explorer(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Test w."""
        _show_center(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go back to w'."""
        _show_explorer(trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Predict with w."""
        _show_center(trainer)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go back to w'."""
        _show_explorer(trainer)

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the optimizers' state as of `eval` into the checkpoint, whose model holds w: it brings w' along."""
        for number, optimizer in enumerate(trainer.optimizers):
            for inside in with_center([optimizer]):
                training = not inside.evaluating
                inside.eval()
                saved = trainer.strategy.optimizer_state(optimizer)
                state = {key: dict(value) for key, value in saved["state"].items()}  # from which train() takes w' out
                checkpoint["optimizer_states"][number] = {**saved, "state": state}
                if training:
                    inside.train()

    def state_dict(self) -> dict[str, Any]:
        """What is saved in a checkpoint."""
        return {"gamma0": self.guide.gamma0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from it."""
        with reading("state of a FocusingCallback"):
            saved = elements("gamma0", state_dict["gamma0"], "a list of lists of numbers")
            self._gamma0 = [numbers_of("gamma0", each) if each else [] for each in saved]


def _show_center(trainer: Trainer) -> None:
    for optimizer in with_center(trainer.optimizers):
        optimizer.eval()


def _show_explorer(trainer: Trainer) -> None:
    for optimizer in with_center(trainer.optimizers):
        optimizer.train()


@torch.no_grad()
def _hidden_centers(trainer: Trainer, module: nn.Module) -> dict[str, Tensor]:
    """The w of those parameters of a module that hold w' now, by name."""
    found = {}
    hidden = [optimizer for optimizer in with_center(trainer.optimizers) if not optimizer.at_center]
    for name, p in module.named_parameters(remove_duplicate=False):
        for optimizer in hidden:
            if "center" in optimizer.state.get(p, {}):
                found[name] = optimizer.state[p]["center"].to(p.device, p.dtype)
    return found
