"""The command line in subprocesses and on pseudo-terminals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.tiny_checkpoint import write
from tests.smollm2.conftest import smollm2_path

__all__ = ["smollm2_path"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint: every command but real words can be tried with it."""
    return write(tmp_path_factory.mktemp("cli") / "tiny")
