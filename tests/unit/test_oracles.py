"""What happens when a library that tests compare with is not there."""

from __future__ import annotations

import sys

import pytest

from tests import oracles


def test_a_missing_oracle_fails_on_the_pinned_python_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracles, "PINNED", sys.version_info[:2])
    with pytest.raises(ModuleNotFoundError):
        oracles.oracle_module("no_such_oracle", why="a test")
    monkeypatch.setattr(oracles, "PINNED", (3, 0))
    with pytest.raises(pytest.skip.Exception, match="a test"):
        oracles.oracle_module("no_such_oracle", why="a test")
    assert oracles.oracle_module("json", why="a test").loads("1") == 1
