"""The lighthouse of torchft, which knows who is alive: started, and waited for."""

from __future__ import annotations

import socket
import time
from typing import Any
from urllib.parse import urlsplit

__all__ = ["start_lighthouse", "wait_for_lighthouse"]


def start_lighthouse(bind: str = "0.0.0.0:29510", heartbeat_timeout: float = 2.0, join_timeout: float = 30.0) -> Any:
    """Start the lighthouse, which knows who is alive, in this process; the same as the command ``torchft_lighthouse``.

    Args:
        bind: Address and port; port 0 takes a free one.
        heartbeat_timeout: Seconds of silence after which a replica counts as dead.
        join_timeout: Seconds that replicas wait for one that is alive but does not come to a meeting. It must be
            longer than the slowest replica is behind the fastest one.

    Returns:
        A server with ``address()`` and ``shutdown()``.
    """
    from torchft.coordination import LighthouseServer

    return LighthouseServer(
        bind=bind,
        min_replicas=1,
        join_timeout_ms=int(1000 * join_timeout),
        quorum_tick_ms=20,
        heartbeat_timeout_ms=int(1000 * heartbeat_timeout),
    )


def wait_for_lighthouse(address: str, patience: float) -> None:
    """Wait until the lighthouse answers; it may just be started again.

    Args:
        address: ``http://host:port``.
        patience: Seconds that it is waited for; torchft itself gives up after half a minute.

    Raises:
        ConnectionError: If there is none.

    Example:
        >>> wait_for_lighthouse("http://127.0.0.1:1", patience=0.0)
        Traceback (most recent call last):
        ...
        ConnectionError: no lighthouse answers at http://127.0.0.1:1 ...
    """
    try:
        place = urlsplit(address)
        where = (place.hostname or "", place.port or 80)
    except ValueError as error:
        raise ValueError(
            f"lighthouse must be an address such as http://HOST:29510, got {address!r} ({error})"
        ) from None
    deadline = time.monotonic() + patience
    while True:
        try:
            socket.create_connection(where, timeout=5.0).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ConnectionError(
                    f"no lighthouse answers at {address} after {patience:g} seconds ({error}): start one there with "
                    "`torchft_lighthouse --min_replicas 1`, or give the address of another"
                ) from None
            time.sleep(0.5)
