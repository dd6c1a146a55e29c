"""The libraries that tests compare with: there on the Python they are pinned for, a reason to skip on others."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

PINNED = (3, 11)  # torch and transformers are in the dev extra for this Python only


def oracle_module(module: str, why: str) -> Any:
    """Return a module; where it is missing, fail on the pinned Python and skip the test (or the file) on others."""
    if sys.version_info[:2] == PINNED:
        return importlib.import_module(module)
    return pytest.importorskip(module, reason=why)
