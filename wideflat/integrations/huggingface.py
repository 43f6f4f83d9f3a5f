"""Hugging Face's Trainer: what it evaluates, saves and chooses is w, and a resumed training goes on exactly."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from wideflat.baselines.sam import SAM
from wideflat.checks import maker
from wideflat.entropic import Entropic
from wideflat.integrations.guide import Guide, innermost, with_center

__all__ = ["EntropicAround", "FocusingCallback", "SAMCallback"]


class EntropicAround(Entropic):
    """`wideflat.Entropic` around an optimizer that is made of params, as ``optimizer_cls_and_kwargs`` wants it.

    The Trainer passes two groups, with and without weight decay; they are those of the inner optimizer. Classes that
    take params already (`wideflat.EntropySGD`, `wideflat.Lookahead`) need nothing of this:
    ``optimizer_cls_and_kwargs=(wideflat.EntropySGD, {"lr": 0.5, "inner_lr": 0.02})``.

    Args:
        params: Parameters, or groups of them.
        inner: Makes the inner optimizer of them; its learning rate is the one that the Trainer's schedule drives.
        **settings: Those of `wideflat.Entropic`.

    Example:
        >>> from functools import partial
        >>> adamw = partial(torch.optim.AdamW, lr=1e-3)
        >>> optimizer_cls_and_kwargs = (EntropicAround, {"inner": adamw, "inner_steps": 20, "pull": 1.0})
        >>> groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "weight_decay": 0.1}]
        >>> opt = EntropicAround(groups, **optimizer_cls_and_kwargs[1])
        >>> opt.param_groups[0]["weight_decay"], opt.inner_steps
        (0.1, 20)
    """

    def __init__(self, params: Any, *, inner: Callable[..., Optimizer] = torch.optim.AdamW, **settings: Any) -> None:
        super().__init__(maker("inner", inner)(params), **settings)


class FocusingCallback(TrainerCallback, ExportableState):
    """Focusing, and w wherever the Trainer evaluates, saves or ends; for optimizers with a center.

    .. code-block:: text

        evaluation     of w: the Trainer calls the optimizer's eval() itself, and train() before the next step
        a checkpoint   model: w, for inference; optimizer: w', mu and the place in the cycle, for resume_from_checkpoint
        the end        flush() closes the cycle, batch norm is refreshed; or, with load_best_model_at_end, the best w
        logs           gamma or pull, distance d(w', w), at_center

    The last checkpoint is saved before the cycle is closed, so that a training can be made longer; both are the same
    when the number of steps is a multiple of L. Values of the logs are in ``trainer.state.log_history``
    and in callbacks that come after this one.

    Args:
        factor: gamma (or pull) at the end of training over that at its start; None leaves it as it is.
        by: ``"step"`` changes it after each optimizer step, ``"epoch"`` after each epoch.
        total: Steps or epochs until the end; None takes the Trainer's ``max_steps`` or ``num_train_epochs``.
        kind: ``"exponential"``, ``"cosine"`` or ``"constant"``, as in `wideflat.Focusing`.
        batch_norm: Refresh the statistics of batch-norm layers at the end of training, if there are any.

    Example:
        >>> callback = FocusingCallback(factor=10.0)     # Trainer(..., callbacks=[callback])
        >>> callback.state()["args"]["by"]
        'step'
    """

    def __init__(
        self,
        factor: float | None = 10.0,
        by: str = "step",
        total: float | None = None,
        kind: str = "exponential",
        batch_norm: bool = True,
    ) -> None:
        self.guide = Guide(factor, by, total, kind, batch_norm)

    def state(self) -> dict[str, Any]:
        """What is saved in ``trainer_state.json``."""
        return {"args": self.guide.settings, "attributes": {"gamma0": self.guide.gamma0}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start focusing, or go on with it."""
        mine = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if isinstance(mine, list):
            raise ValueError("the Trainer has several FocusingCallbacks; one is enough")
        gamma0 = mine["attributes"]["gamma0"] if state.global_step > 0 else []
        total = state.max_steps if self.guide.by == "step" else state.num_train_epochs
        self.guide.start([kwargs["optimizer"]], total, gamma0)
        self._focus(state)

    def _focus(self, state: TrainerState) -> None:
        self.guide.move_to(state.global_step if self.guide.by == "step" else math.floor(state.epoch or 0))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Focus; and show w if a checkpoint is due now."""
        self._focus(state)
        if control.should_save:
            self.guide.show_center()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show w if a checkpoint is due now."""
        if control.should_save:
            self.guide.show_center()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuse to let a checkpoint of w' pass for one of w."""
        if not all(optimizer.at_center for optimizer in with_center([kwargs["optimizer"]])):
            raise RuntimeError(
                f"checkpoint-{state.global_step} holds w' instead of w: a callback that comes after FocusingCallback "
                "asked for it (control.should_save); pass FocusingCallback as the last of the callbacks"
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the readings to what the Trainer logs of a step."""
        if logs is not None and "loss" in logs:
            readings = self.guide.readings()
            logs.update(readings)
            state.log_history[-1].update(readings)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End at w: the last one, or the best one, which the Trainer has put into the model by now."""
        model, batches = kwargs["model"], kwargs["train_dataloader"]
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            for optimizer in self.guide.optimizers:
                optimizer.recenter()
            self.guide.refresh(model, batches)
        else:
            self.guide.finish(model, batches)


class SAMCallback(TrainerCallback):
    """Two gradients a step, for `wideflat.SAM` and its family in a Trainer, or in a class that is made of one.

    .. code-block:: text

        each mini-batch          the Trainer's own training_step: its loss, its precision, its backward
        the last of a step       perturb(); the training_step of all its mini-batches again; restore()
        then, by the Trainer     clipping, step(), the schedule: on the second gradients

    The logged loss is that of w. Buffers are put back after the second pass, so that batch norm sees each mini-batch
    once; dropout draws anew. The model holds w whenever the Trainer evaluates or saves.

    Args:
        trainer: Where it belongs: ``trainer.add_callback(SAMCallback(trainer))``.
        per_rank: On several ranks, let each go along its own gradient (m-sharpness) instead of their mean.

    Example:
        >>> optimizer_cls_and_kwargs = (SAM, {"base": torch.optim.AdamW, "rho": 0.05, "lr": 1e-3})
        >>> SAMCallback("a trainer")
        Traceback (most recent call last):
        ...
        TypeError: SAMCallback belongs to a Trainer, trainer.add_callback(SAMCallback(trainer)); got str
    """

    def __init__(self, trainer: Trainer, per_rank: bool = False) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(
                "SAMCallback belongs to a Trainer, trainer.add_callback(SAMCallback(trainer)); "
                f"got {type(trainer).__name__}"
            )
        self.trainer, self.per_rank = trainer, per_rank
        self._batches: list[tuple[Any, tuple[Any, ...]]] = []
        self._training_step: Callable[..., Tensor] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the place of the Trainer's training_step, which is called twice from here on."""
        optimizer = innermost(kwargs["optimizer"])
        if not isinstance(optimizer, SAM):
            raise TypeError(f"SAMCallback needs wideflat.SAM or one of its family; got {type(optimizer).__name__}")
        self._sam, self._batches = optimizer, []
        self._training_step = self.trainer.training_step
        self.trainer.training_step = self._twice

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let the Trainer be as it was."""
        if self._training_step is not None:
            self._sam.model = None
            del self.trainer.training_step
            self._training_step = None

    def _twice(self, model: nn.Module, inputs: Any, *others: Any) -> Tensor:
        """One mini-batch; and if it is the last of a step, all of them once more, at w + e."""
        assert self._training_step is not None
        accelerator, self._sam.model = self.trainer.accelerator, model
        self._batches.append((copy.copy(inputs), others))
        with accelerator.no_sync(model) if self.per_rank else nullcontext():
            loss = self._training_step(model, inputs, *others)
        if accelerator.sync_gradients:
            batches, self._batches = self._batches, []
            if self._sam.perturb(accelerator.scaler):
                for number, (again, rest) in enumerate(batches, start=1):
                    with accelerator.no_sync(model) if number < len(batches) else nullcontext():
                        self._training_step(model, again, *rest)
            self._sam.restore()
        return loss
