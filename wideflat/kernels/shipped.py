"""The compiled loops that a wheel carries, used if they are whole, of these sources, and for this processor.

A wheel that was built on a platform has ``compiled/kernels-float.so``, and beside it a JSON file: its SHA-256, that of
the sources it was made of, and which processor it needs. What does not fit is left alone, and the loops are compiled
here; so are those for float64, which a wheel does not carry.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from wideflat.files import sha256

__all__ = ["shipped_library"]


def shipped_library(real: str, sources: dict[str, bytes], folder: Path | None = None) -> Path | None:
    """The library for one type of numbers that came with the package; None if there is none that can be used.

    Args:
        real: ``"float"`` or ``"double"``.
        sources: The C files of this package, by name.
        folder: Where it is looked for, by default in the package.
    """
    folder = folder or Path(str(files("wideflat.kernels"))) / "compiled"
    library = folder / f"kernels-{real}.so"
    try:
        about = json.loads(library.with_suffix(".json").read_bytes())
        fits = isinstance(about, dict) and _is_for_here(about) and _is_trusted(library)
        whole = fits and about.get("sources") == digest_of(sources) and about.get("sha256") == sha256(library)
    except (OSError, ValueError):
        return None
    return library if whole else None


def digest_of(sources: dict[str, bytes]) -> str:
    """SHA-256 of all sources."""
    return hashlib.sha256(bytes(1).join(sources.values())).hexdigest()


def _is_for_here(about: dict[str, Any]) -> bool:
    """Is it for this kind of processor, and does this one have what it needs?"""
    needed = about.get("capabilities")
    has = not needed or torch.backends.cpu.get_cpu_capability() in needed
    return about.get("machine") == platform.machine() and has


def _is_trusted(library: Path) -> bool:
    """Does it belong to this user or to the system, and can nobody else write to it?"""
    status = library.stat()
    return not hasattr(os, "getuid") or (status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022)
