"""Where data sets are looked for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from wideflat.checks.doors import asks

__all__ = ["cache_folder", "search_folders"]


def cache_folder() -> Path:
    """Where downloads and decoded images go: ``$WIDEFLAT_DATA``, else the user's cache folder."""
    if os.environ.get("WIDEFLAT_DATA"):
        return Path(os.environ["WIDEFLAT_DATA"]).expanduser()
    if os.environ.get("XDG_CACHE_HOME"):
        base = Path(os.environ["XDG_CACHE_HOME"])
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif os.name == "nt" and os.environ.get("LOCALAPPDATA"):
        base = Path(os.environ["LOCALAPPDATA"])
    else:
        base = Path.home() / ".cache"
    return base / "wideflat"


@asks
def search_folders(folder: str | os.PathLike[str] | None = None) -> list[Path]:
    """Folders in which a data set is looked for, the first first.

    Args:
        folder: Where the user says it is; then it is looked for there and nowhere else.

    Returns:
        ``folder`` alone if given. Otherwise ``$WIDEFLAT_DATA``, the cache of wideflat, ``data`` here and in the home
        folder, the cache of Keras, and where Debian installs data sets.
    """
    if folder is not None:
        return [Path(folder).expanduser()]
    home = Path.home()
    folders = [
        cache_folder(),
        Path("data"),
        home / "data",
        home / "datasets",
        home / ".keras" / "datasets",
        Path("/usr/share/datasets"),
    ]
    return list(dict.fromkeys(folders))
