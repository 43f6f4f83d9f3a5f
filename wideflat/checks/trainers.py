"""Lightning's Trainer without our callback shows its users w' and does not know it: said once, when it happens."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from wideflat.checks import warn_user

__all__ = ["watch_trainer"]

#: The two names under which Lightning is installed.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_OURS = "wideflat.integrations.lightning"


def watch_trainer() -> None:
    """Called within the first step of an optimizer with a center. If it is a Trainer of Lightning that takes the step,
    and it has no FocusingCallback, it gets a callback that looks where the optimizer is when something is evaluated,
    saved, or done. Nothing is imported for it, and a loop of one's own is left alone.

    Example:
        >>> watch_trainer()   # nobody's trainer
    """
    for package in _PACKAGES:
        if f"{package}.trainer.trainer" in sys.modules and (trainer := _trainer_above(f"{package}.trainer.trainer")):
            ours = getattr(sys.modules.get(_OURS), "FocusingCallback", ())
            if not any(isinstance(known, ours) or hasattr(known, "watches_center") for known in trainer.callbacks):
                trainer.callbacks.append(_watch(sys.modules[package]))


def _trainer_above(module: str) -> Any:
    """The Trainer on whose behalf this is called: that of the nearest caller in its module."""
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_globals.get("__name__") == module and hasattr(trainer := frame.f_locals.get("self"), "callbacks"):
            return trainer
    return None


def _watch(lightning: ModuleType) -> Any:
    """A callback of Lightning, whose class is not ours to import."""

    def begin(self: Any, trainer: Any, module: Any) -> None:
        self.shown = [_times_shown(optimizer) for optimizer in trainer.optimizers]

    def end(what: str) -> Any:
        def look(self: Any, trainer: Any, module: Any) -> None:
            for optimizer, before in zip(trainer.optimizers, self.shown, strict=False):
                if _times_shown(optimizer) == before:  # else the module has asked for w by itself
                    _warn(optimizer, what)

        return look

    def saved(self: Any, trainer: Any, module: Any, checkpoint: Any) -> None:
        for optimizer in trainer.optimizers:
            _warn(optimizer, "saves")

    def finished(self: Any, trainer: Any, module: Any) -> None:
        for optimizer in trainer.optimizers:
            _warn(optimizer, "ends with")

    hooks = {"on_save_checkpoint": saved, "on_fit_end": finished, "watches_center": True, "shown": ()}
    for stage, what in (("validation", "validates"), ("test", "tests"), ("predict", "predicts with")):
        hooks |= {f"on_{stage}_start": begin, f"on_{stage}_end": end(what)}
    return type("WatchesCenter", (lightning.Callback,), hooks)()


def _times_shown(optimizer: Any) -> int:
    return getattr(getattr(optimizer, "_place", None), "times_shown", 0)


def _warn(optimizer: Any, what: str) -> None:
    """Once for an optimizer, as `wideflat.centered.warn_off_center` does."""
    place = getattr(optimizer, "_place", None)
    if place is None or place.has_warned or optimizer.at_center:
        return
    place.has_warned = True
    warn_user(
        f"Lightning {what} the explorer w' of {type(optimizer).__name__}, not its solution w: pass the callback "
        f"{_OURS}.FocusingCallback to its Trainer (factor=None leaves gamma alone)",
        *(
            str(Path(module.__file__).parent)
            for name in _PACKAGES
            if (module := sys.modules.get(name)) and module.__file__
        ),
    )
