"""What METRALE_TRACE shows of an op: its shapes before it runs, and whether what it wrote is finite."""

from __future__ import annotations

from typing import Any

import numpy as np

from metrale.log import get_logger

log = get_logger(__name__)


def _text(arg: Any) -> str:
    if isinstance(arg, np.ndarray):
        return f"{arg.dtype}{list(arg.shape)}"
    return "-" if arg is None else str(arg)


def log_op(stream: str, name: str, tiles: int, args: tuple[Any, ...]) -> None:
    """Log an op with the shapes and numbers it is called with."""
    log.info("%s: %s(%s) in %d tiles", stream, name, ", ".join(map(_text, args)), tiles)


def log_finite(name: str, args: tuple[Any, ...]) -> None:
    """Warn when the first array among the arguments (the destination) is of floats and not finite.

    A warning and no error: rows of padding may hold NaN.
    """
    out = next((arg for arg in args if isinstance(arg, np.ndarray)), None)
    if out is None or out.dtype.kind != "f":
        return
    bad = int(out.size - np.isfinite(out).sum())
    if bad:
        log.warning("%s: %d of %d values of its destination are not finite", name, bad, out.size)
