"""What every hostile test of the readers asks of a refusal."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from metrale.errors import MetraleError, UnsupportedError, WeightError
from metrale.formats import open_checkpoint

LFS = b"version https://git-lfs.example/spec/v1\noid sha256:" + b"4f" * 32 + b"\nsize 988097824\n"


def refused(path: Path, code: str, sentence: str) -> MetraleError:
    """Open a damaged checkpoint and check class, code, sentence, and that nothing stays mapped."""
    kind = UnsupportedError if code.startswith("unsupported.") else WeightError
    with pytest.raises(MetraleError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert type(caught.value) is kind, message
    assert caught.value.code == code, message
    assert re.fullmatch(r"[^\n]+: expected [^\n]+, got [^\n]+; [^\n]+", message), message
    assert re.search(sentence, message), message
    if os.path.exists("/proc/self/maps"):
        assert str(path) not in Path("/proc/self/maps").read_text()
    return caught.value
