"""The committed corpus: one text a line of corpus.txt, with the escapes of Python strings for what a line cannot show."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
_NAMED = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}


def corpus() -> list[str]:
    lines = (HERE / "corpus.txt").read_text(encoding="utf-8").split("\n")[:-1]
    return [re.sub(r"\\(?:([nrt\\])|u([0-9a-f]{4})|U([0-9a-f]{8}))", _character, line) for line in lines]


def _character(match: re.Match[str]) -> str:
    named, short, long = match.groups()
    return _NAMED[named] if named else chr(int(short or long, 16))
