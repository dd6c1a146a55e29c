"""GGUF fixtures: whole files through the gguf package, and hand-packed ones for what it refuses to write."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from metrale.quant.blocks import BLOCKS, quantize


def write_gguf(path: Path, tensors: Mapping[str, tuple[str, np.ndarray]], metadata: Mapping[str, Any] | None = None) -> Path:
    """Write a GGUF file with the gguf package.

    tensors: name -> (format, array); f32 and f16 arrays are converted, block formats quantized from float32, bf16 taken
    as uint16 bits. metadata: bools, ints (uint32), floats, strings and lists of one kind.
    """
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (metadata or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name, (form, array) in tensors.items():
        kind = gguf.GGMLQuantizationType[form.upper()]
        if form in BLOCKS:
            rows = quantize(form, array.reshape(-1, array.shape[-1]))
            writer.add_tensor(name, rows.reshape(*array.shape[:-1], -1), raw_dtype=kind)
        elif form == "bf16":
            writer.add_tensor(name, array.view(np.uint8), raw_dtype=kind)
        else:
            writer.add_tensor(name, array.astype({"f32": np.float32, "f16": np.float16}[form]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def text(value: str | bytes) -> bytes:
    """Pack a GGUF string."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    """Pack one key/value pair; the value is packed already."""
    return text(key) + struct.pack("<I", kind) + value


def info(name: str | bytes, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    """Pack one tensor info; sizes innermost first, as in the file."""
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def pack_gguf(
    pairs: list[bytes],
    infos: list[bytes],
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_pairs: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """Pack a whole file by hand; counts may lie."""
    head = magic + struct.pack(
        "<IQQ", version, len(infos) if num_tensors is None else num_tensors, len(pairs) if num_pairs is None else num_pairs
    )
    head += b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data
