"""The safetensors container: one file, or shards listed in ``*.safetensors.index.json``.

Layout of a file: a little-endian u64 header length N, N bytes of JSON, then the data. The header maps each tensor's name
to ``{"dtype", "shape", "data_offsets": [begin, end]}`` (offsets from the start of the data) and may hold
``"__metadata__"``, strings to strings. The tensors' spans must cover the data exactly: no overlap, no hole, no rest.

Source: the format section of the safetensors README; limits as in its reference implementation.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from metrale.errors import WeightError
from metrale.formats.mapped import REFETCH, MappedFile, shown
from metrale.formats.tensor import MappedCheckpoint, TensorView
from metrale.formats.types import FORMATS, MAX_BYTES, addressable, tensor_bytes
from metrale.log import get_logger

MAX_HEADER_BYTES: Final = 100_000_000
_LENGTH: Final = struct.Struct("<Q")
_SAVE_AGAIN: Final = "save the checkpoint again with a current safetensors"
_HALF_PAIR: Final = re.compile(rb"\\u[dD][89a-fA-F]")  # perhaps half a pair: JSON may escape both halves properly

# The dtype names of the format, to the names used here.
DTYPES: Final[dict[str, str]] = {
    name: name.lower()
    for name in (
        *("BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
        *("I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64"),
    )
}

_log = get_logger(__name__)


class SafetensorsCheckpoint(MappedCheckpoint):
    """An open safetensors checkpoint, single or sharded."""

    container = "safetensors"


def open_safetensors(path: str | os.PathLike[str]) -> SafetensorsCheckpoint:
    """Open one ``.safetensors`` file and validate its header; reads no tensor.

    Raises: WeightError, the codes of `MappedFile` and ``weights.truncated``, ``header``, ``json``, ``utf8``,
            ``duplicate``, ``dtype``, ``shape``, ``size``, ``out_of_file``, ``overlap``, ``hole``.
    """
    file = MappedFile(path)
    try:
        tensors, metadata = _read_header(file)
    except BaseException:
        file.close()
        raise
    return SafetensorsCheckpoint(file.path, (file,), tensors, metadata)


def open_sharded(index_path: str | os.PathLike[str]) -> SafetensorsCheckpoint:
    """Open every shard that an index names; the index decides which shard a tensor comes from.

    Raises: WeightError, the codes of `open_safetensors` and ``weights.index``, ``weights.missing_shard``,
            ``weights.missing_tensor``.
    """
    index_path = Path(index_path)
    weight_map, metadata = _read_index(index_path)
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not os.path.exists(index_path.parent / name)]
    if missing:
        listed = ", ".join(shown(name) for name in missing[:4]) + (", ..." if len(missing) > 4 else "")
        raise WeightError(
            f"{index_path.parent}: expected the {len(names)} shards named in {index_path.name}, got "
            f"{len(names) - len(missing)}; fetch the missing {listed}",
            code="weights.missing_shard",
        )
    shards: dict[str, SafetensorsCheckpoint] = {}
    try:
        for name in names:
            shards[name] = open_safetensors(index_path.parent / name)
        tensors = {tensor: _from_shard(tensor, shards[name]) for tensor, name in weight_map.items()}
    except BaseException:
        for shard in shards.values():
            shard.close()
        raise
    unlisted = sum(len(shard.tensors) for shard in shards.values()) - len(tensors)
    if unlisted > 0:
        _log.info("%s: the shards hold %d tensors that it does not list; they are not used", index_path, unlisted)
    files = tuple(file for shard in shards.values() for file in shard.files)
    return SafetensorsCheckpoint(index_path, files, tensors, metadata)


def _from_shard(tensor: str, shard: SafetensorsCheckpoint) -> TensorView:
    view = shard.tensors.get(tensor)
    if view is None:
        raise WeightError(
            f"{shown(tensor)}: expected in {shard.path.name} as the index says, got a shard without it; "
            "index and shards are of different checkpoints, fetch all of them again",
            code="weights.missing_tensor",
        )
    return view


# --- the header ----------------------------------------------------------------------------------------------------


def _read_header(file: MappedFile) -> tuple[dict[str, TensorView], dict[str, str]]:
    text, data_start = _header_text(file)
    header = _parse_object(text, file.path, "header")
    metadata = _string_map(header.pop("__metadata__", {}), file.path)
    tensors = {name: _tensor(file, name, info, data_start) for name, info in header.items()}
    _check_cover(file, tensors, data_start)
    return tensors, metadata


def _header_text(file: MappedFile) -> tuple[bytes, int]:
    if file.size < _LENGTH.size:
        raise WeightError(f"{file.path}: expected at least 8 bytes, got {file.size}; {REFETCH}", code="weights.truncated")
    (length,) = _LENGTH.unpack_from(file.buffer, 0)
    first = file.read(_LENGTH.size, _LENGTH.size + 1)
    if length < 2 or length > MAX_HEADER_BYTES:
        raise WeightError(
            f"{file.path}: expected a header of 2 to {MAX_HEADER_BYTES} bytes, got a length of {length}; "
            "the file is damaged or no safetensors file",
            code="weights.header",
        )
    if first not in (b"{", b""):
        raise WeightError(
            f"{file.path}: expected a header that begins with '{{', got {first.decode('latin-1')!a}; "
            "the file is damaged or no safetensors file",
            code="weights.header",
        )
    stop = _LENGTH.size + length
    if stop > file.size:
        raise WeightError(
            f"{file.path}: expected a header of {length} bytes, got a file of {file.size} bytes; {REFETCH}",
            code="weights.truncated",
        )
    return file.read(_LENGTH.size, stop), stop


def _tensor(file: MappedFile, name: str, info: Any, data_start: int) -> TensorView:
    if not isinstance(info, dict) or not {"dtype", "shape", "data_offsets"} <= info.keys():
        got = ", ".join(map(shown, list(info)[:5])) if isinstance(info, dict) else type(info).__name__
        raise WeightError(
            f"{shown(name)}: expected an object with dtype, shape and data_offsets in the header, got {got or 'an empty one'}; "
            f"{_SAVE_AGAIN}",
            code="weights.header",
        )
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise WeightError(
            f"{shown(name)}: expected a dtype of the safetensors format, got {shown(dtype)}; {_SAVE_AGAIN}",
            code="weights.dtype",
        )
    form = FORMATS[DTYPES[dtype]]
    if not _is_sizes(shape) or not addressable(form, shape):
        raise WeightError(
            f"{shown(name)}: expected a shape of at most 32 sizes that fit in memory, got {shown(shape)}; {_SAVE_AGAIN}",
            code="weights.shape",
        )
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise WeightError(
            f"{shown(name)}: expected data_offsets [begin, end] with begin <= end, got {shown(offsets)}; {_SAVE_AGAIN}",
            code="weights.header",
        )
    nbytes = tensor_bytes(form, shape)
    begin, end = offsets
    if nbytes is None or nbytes != end - begin:
        need = f"{nbytes} bytes" if nbytes is not None else f"rows of a multiple of {form.block} elements"
        raise WeightError(
            f"{shown(name)}: expected {need} for {dtype} {shown(shape)}, got data_offsets of {end - begin} bytes; "
            f"{_SAVE_AGAIN}",
            code="weights.size",
        )
    return TensorView(name, form.name, tuple(shape), data_start + begin, nbytes, file)


def _is_sizes(value: Any) -> bool:
    # bool is an int in Python, not in JSON.
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= MAX_BYTES for n in value)


def _check_cover(file: MappedFile, tensors: Mapping[str, TensorView], data_start: int) -> None:
    """Check that the spans lie in the file and cover its data exactly, once each."""
    reached, before = data_start, "the header"
    for view in sorted(tensors.values(), key=lambda view: (view.offset, view.nbytes)):
        begin, end = view.offset - data_start, view.offset + view.nbytes - data_start
        if view.offset + view.nbytes > file.size:
            raise WeightError(
                f"{shown(view.name)}: expected within the {file.size - data_start} data bytes of {file.path.name}, "
                f"got bytes {begin} to {end}; {REFETCH}",
                code="weights.out_of_file",
            )
        if view.offset < reached:
            raise WeightError(
                f"{shown(view.name)}: expected to begin at data byte {reached - data_start}, after {before}, got bytes "
                f"{begin} to {end}, which overlap it; {_SAVE_AGAIN}",
                code="weights.overlap",
            )
        if view.offset > reached:
            raise WeightError(
                f"{shown(view.name)}: expected to begin at data byte {reached - data_start}, after {before}, got {begin}, "
                f"which leaves a hole; {_SAVE_AGAIN}",
                code="weights.hole",
            )
        reached, before = view.offset + view.nbytes, shown(view.name)
    if reached != file.size:
        raise WeightError(
            f"{file.path}: expected {reached} bytes by its header, got {file.size}; the file is damaged or two files were "
            "joined, fetch it again",
            code="weights.hole",
        )


# --- the index -----------------------------------------------------------------------------------------------------


def _read_index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    file = MappedFile(path)
    try:
        if file.size > MAX_HEADER_BYTES:
            raise WeightError(
                f"{path}: expected an index of at most {MAX_HEADER_BYTES} bytes, got {file.size}; {REFETCH}",
                code="weights.index",
            )
        text = file.read(0, file.size)
    finally:
        file.close()
    index = _parse_object(text, path, "index")
    weight_map, metadata = index.get("weight_map"), index.get("metadata", {})
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(metadata, dict):
        raise WeightError(
            f"{path}: expected an object with a weight_map from tensors to files, got keys "
            f"{', '.join(map(shown, list(index)[:5])) or 'none'}; {REFETCH}",
            code="weights.index",
        )
    for tensor, name in weight_map.items():
        # A plain name: an index must not reach outside its own folder.
        if not isinstance(name, str) or not name or name in (".", "..") or any(c in name for c in "/\\\0"):
            raise WeightError(
                f"{shown(tensor)}: expected a file name in the weight_map of {path.name}, got {shown(name)}; {REFETCH}",
                code="weights.index",
            )
    return weight_map, metadata


# --- strict JSON ---------------------------------------------------------------------------------------------------


class _Refused(ValueError):
    """JSON that Python would accept and the format does not."""

    def __init__(self, code: str, got: str) -> None:
        super().__init__(got)
        self.code = code


def _parse_object(text: bytes, path: Path, what: str) -> dict[str, Any]:
    """Parse a JSON object, refusing what Python's parser would let pass: duplicate keys, NaN, lone surrogates."""
    code, got = "", ""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_constant)
        if _HALF_PAIR.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        if isinstance(value, dict):
            return value
        code, got = f"weights.{what}", f"a {type(value).__name__}"
    except UnicodeDecodeError as error:
        code, got = "weights.utf8", f"byte {error.object[error.start]:#04x} at {error.start}"
    except UnicodeEncodeError:
        code, got = "weights.utf8", "a string with half a surrogate pair"
    except _Refused as error:
        code, got = error.code, str(error)
    except RecursionError:
        code, got = "weights.json", "values nested too deeply"
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        code, got = "weights.json", str(error)
    raise WeightError(f"{path}: expected a JSON object in UTF-8 as {what}, got {got}; {REFETCH}", code=code)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise _Refused("weights.duplicate", f"the key {shown(twice)} twice")
    return result


def _constant(name: str) -> Any:
    raise _Refused("weights.json", f"the number {name}")


def _string_map(value: Any, path: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(entry, str) for entry in value.values()):
        raise WeightError(
            f"{path}: expected __metadata__ to map strings to strings, got {shown(value)}; {_SAVE_AGAIN}", code="weights.header"
        )
    return value
