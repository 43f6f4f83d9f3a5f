"""Ctrl-C and SIGTERM: work that is asked to stop keeps what it has and says how to go on."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["Interrupted", "stop_requests", "terminated_like_interrupted", "undisturbed"]


class Interrupted(KeyboardInterrupt):
    """Work was asked to stop and has stopped; nothing that it had is lost. Those derived from it say what there is."""


@contextlib.contextmanager
def stop_requests() -> Iterator[list[signal.Signals]]:
    """A list that SIGINT (Ctrl-C) and SIGTERM are put into; the second one of them interrupts at once.

    For work that stops by itself at a good moment. In another than the main thread, which alone may handle signals, the
    list stays empty.
    """
    received: list[signal.Signals] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        if len(received) > 1:
            raise KeyboardInterrupt

    with _handling(handle, signal.SIGINT, signal.SIGTERM):
        yield received


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does: for work that keeps what it has when a KeyboardInterrupt reaches it."""
    with _handling(signal.default_int_handler, signal.SIGTERM):
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C, and SIGTERM if it is answered, wait until the block has ended: for putting something back whole."""
    answered = [number for number in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(number))]
    pressed: list[int] = []
    try:
        with _handling(lambda number, frame: pressed.append(number), *answered):
            yield
    finally:
        for number in pressed[:1]:
            handler = signal.getsignal(number)
            if callable(handler):
                handler(number, None)


@contextlib.contextmanager
def _handling(handler: signal._HANDLER, *numbers: signal.Signals) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
