"""Safetensors fixtures packed by hand, so that headers may lie."""

from __future__ import annotations

import json
import struct
from typing import Any


def pack_safetensors(header: dict[str, Any] | str | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Pack a file from a header (a dict is written as JSON) and its data; `length` overrides the header's length."""
    if isinstance(header, dict):
        header = json.dumps(header)
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    """Return one tensor's entry of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
