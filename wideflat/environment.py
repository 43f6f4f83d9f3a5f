"""Where and with what something was computed, for the record."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import wideflat
from wideflat.checks.options import device

__all__ = ["choose_device", "environment", "now"]


def environment() -> dict[str, Any]:
    """Where and with what this process computes: processor, threads, versions, commit, command.

    Example:
        >>> sorted(environment())
        ['command', 'commit', 'host', 'pid', 'processor', 'python', 'started', 'system', 'threads', 'torch', 'wideflat']
    """
    return {
        "started": now(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "wideflat": wideflat.__version__,
        "commit": _commit(),
        "command": " ".join(["wideflat", *sys.argv[1:]]),
    }


def choose_device(name: str | None = "auto") -> torch.device:
    """The device of that name; ``"auto"`` (or None) is a GPU if there is one.

    Example:
        >>> choose_device("cpu")
        device(type='cpu')
    """
    if name is not None and not (isinstance(name, str) and name == "auto"):
        return device("device", name) or torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _processor() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the source tree this package is imported from, if it is one."""
    folder = Path(__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True, timeout=10
        )
        return done.stdout.strip() or None
    return None


def now() -> str:
    """The time, in UTC, for a log."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
