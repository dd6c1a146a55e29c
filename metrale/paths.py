"""Where metrale keeps what it downloads and compiles."""

from __future__ import annotations

import os
from pathlib import Path

from metrale import env


def cache_dir() -> Path:
    """Return the cache folder: METRALE_CACHE, else XDG_CACHE_HOME/metrale, else ~/.cache/metrale. Not created."""
    chosen = env.get("METRALE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "metrale"


def models_dir() -> Path:
    """Return the folder of pulled models."""
    return cache_dir() / "models"
