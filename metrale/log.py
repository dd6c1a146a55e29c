"""Loggers named ``metrale.<module>``; silent until the host (or `metrale.cli`) configures logging."""

from __future__ import annotations

import logging

logging.getLogger("metrale").addHandler(logging.NullHandler())


def get_logger(module: str) -> logging.Logger:
    """Return the logger of a module given as ``__name__``."""
    return logging.getLogger(module if module.startswith("metrale") else f"metrale.{module}")
