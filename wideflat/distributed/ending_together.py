"""An error on one rank ends all of them, with that error, instead of leaving them waiting for it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

__all__ = ["ReplicaFailed", "ending_together"]


class ReplicaFailed(RuntimeError):
    """Another rank has raised an error, which the message repeats."""


_FAILURE, _SEEN = "wideflat/failure", "wideflat/failure-seen"


@contextlib.contextmanager
def ending_together(patience: float = 10.0) -> Iterator[None]:
    """An error on one rank ends the block on all ranks, with that error, instead of leaving them waiting.

    The rank that fails leaves its error in the process group's store, waits until the others have read it, and raises
    it; when its process ends, the next collective of the others breaks, and they raise the error as `ReplicaFailed`. A
    rank that computes sees it at its next collective, at the latest after K iterations. Without a process group the
    block is left alone.

    Args:
        patience: Seconds that the failing rank waits for the others at most.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    watch = _Watch()
    try:
        yield
    except BaseException as error:
        message = None
        with contextlib.suppress(Exception):  # whatever happens here, the error itself matters more
            message = watch.failure_of_another(error)
            if message is None:
                watch.report(f"rank {dist.get_rank()} raised {type(error).__name__}: {error}", patience)
        if message is not None:
            raise ReplicaFailed(message) from error
        raise
    finally:
        watch.stop.set()
        watch.join(JOIN_SECONDS)  # a daemon that is inside the store when the interpreter ends aborts the process


#: Seconds that the end of the watch is waited for; it looks five times a second.
JOIN_SECONDS = 5.0


def _connection(store: Any) -> Any:
    """Another connection to a store: on that of torch, one who waits would keep the others out."""
    if hasattr(store, "clone"):
        return store.clone()
    store = store._underlying_non_prefix_store  # torch before 2.8 has no clone
    if isinstance(store, dist.TCPStore):
        return dist.TCPStore(store.host, store.port, is_master=False)
    return store


class _Watch(threading.Thread):
    """Looks out for the failure of another rank, on a connection of its own to the store."""

    interval = 0.2

    def __init__(self) -> None:
        super().__init__(name="wideflat-watch", daemon=True)
        self.store = _connection(dist.distributed_c10d._get_default_store())
        self.others = dist.get_world_size() - 1
        self.stop = threading.Event()
        self.found = threading.Event()
        self.message: str | None = None
        self.start()

    def run(self) -> None:
        with contextlib.suppress(Exception):  # the store has gone: the collectives will tell
            while not self.stop.wait(self.interval):
                if self.store.check([_FAILURE]):
                    self.message = self.store.get(_FAILURE).decode()
                    self.store.add(_SEEN, 1)
                    break
        self.found.set()

    def failure_of_another(self, error: BaseException) -> str | None:
        """What another rank has reported, if the error here may be no more than a broken connection to it.

        torch raises `torch.distributed.DistError`, or where gloo fails a bare RuntimeError, like many other things; so
        a bare one counts as a broken connection if, and only if, another rank has reported a failure of its own.
        """
        if type(error) is not RuntimeError and not isinstance(error, (dist.DistError, ConnectionError)):
            return None
        self.found.wait(5 * self.interval)
        return self.message

    def report(self, message: str, patience: float) -> None:
        """Tell the others, and stay until they know (the store may live in this process)."""
        self.stop.set()
        self.found.wait()
        self.store.set(_FAILURE, message)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and self.store.add(_SEEN, 0) < self.others:
            time.sleep(self.interval / 4)
