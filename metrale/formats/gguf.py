"""The GGUF container, versions 2 and 3, little endian, one file or a split.

Layout of a file: magic, u32 version, u64 counts of tensors and of key/value pairs; the pairs (string key, u32 type,
value); the tensor infos (string name, u32 rank, u64 sizes innermost first, u32 type, u64 offset); padding to
``general.alignment`` (32 by default); the data, every tensor at a multiple of the alignment.

Counts are never believed: nothing is allocated or looped over by a count that the rest of the file could not hold.

Source: the GGUF specification (docs/gguf.md of ggml).
"""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path
from typing import Any, Final

from metrale.errors import UnsupportedError, WeightError
from metrale.formats.gguf_values import MAX_NAME_BYTES, Cursor
from metrale.formats.mapped import REFETCH, MappedFile, shown
from metrale.formats.tensor import MappedCheckpoint, TensorView
from metrale.formats.types import FORMATS, addressable, tensor_bytes

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_RANK: Final = 4
DEFAULT_ALIGNMENT: Final = 32

_MIN_PAIR_BYTES: Final = 8 + 1 + 4 + 1  # a key of one letter and one byte of value
_MIN_INFO_BYTES: Final = 8 + 4 + 4 + 8  # an empty name and no sizes

# Tensor types by number, and those that llama.cpp has withdrawn.
TENSOR_TYPES: Final[dict[int, str]] = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 9: "q8_1", 10: "q2_k", 11: "q3_k",
    12: "q4_k", 13: "q5_k", 14: "q6_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 20: "iq4_nl",
    21: "iq3_s", 22: "iq2_s", 23: "iq4_xs", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64", 29: "iq1_m", 30: "bf16",
    34: "tq1_0", 35: "tq2_0", 39: "mxfp4", 40: "nvfp4", 41: "q1_0",
}  # fmt: skip
WITHDRAWN_TYPES: Final[dict[int, str]] = {
    4: "q4_2", 5: "q4_3", 31: "q4_0_4_4", 32: "q4_0_4_8", 33: "q4_0_8_8", 36: "iq4_nl_4_4", 37: "iq4_nl_4_8",
    38: "iq4_nl_8_8",
}  # fmt: skip

_SPLIT_NAME: Final = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf", re.DOTALL)


class GGUFCheckpoint(MappedCheckpoint):
    """An open GGUF checkpoint.

    version: 2 or 3, of the (first) file. alignment: of its tensors, in bytes.
    """

    container = "gguf"

    def __init__(
        self,
        path: Path,
        files: tuple[MappedFile, ...],
        tensors: dict[str, TensorView],
        metadata: dict[str, Any],
        *,
        version: int,
        alignment: int,
    ) -> None:
        super().__init__(path, files, tensors, metadata)
        self.version = version
        self.alignment = alignment


def open_gguf(path: str | PathLike[str]) -> GGUFCheckpoint:
    """Open a GGUF file and validate its header; reads no tensor.

    Any part of a split (``NAME-00001-of-00003.gguf``) opens the whole of it: metadata from the first part, tensors of all.

    Raises: WeightError, the codes of `MappedFile` and ``weights.magic``, ``truncated``, ``count``, ``key``, ``name``,
            ``value_type``, ``bool``, ``string``, ``utf8``, ``duplicate``, ``alignment``, ``rank``, ``dtype``, ``shape``,
            ``row_length``, ``offset``, ``out_of_file``, ``overlap``, ``split``, ``missing_shard``; UnsupportedError
            ``unsupported.gguf_version``, ``gguf_endian``, ``gguf_type``, ``nested_array``.
    """
    path = Path(path)
    first = _open_part(path)
    opened = [first]
    try:
        if first.metadata.get("split.count", 1) in (0, 1):
            return first
        paths = _split_paths(first)
        for number, part_path in enumerate(paths):
            part = first if part_path == path else _open_part(part_path)
            if part is not first:
                opened.append(part)
            _check_part(part, number, len(paths))
        parts = [next(part for part in opened if part.path == part_path) for part_path in paths]
        return _joined(parts)
    except BaseException:
        for part in opened:
            part.close()
        raise


def _open_part(path: Path) -> GGUFCheckpoint:
    file = MappedFile(path)
    try:
        return _read(file)
    except BaseException:
        file.close()
        raise


def _read(file: MappedFile) -> GGUFCheckpoint:
    cursor = Cursor(file)
    version = _check_preamble(cursor)
    num_tensors = _count(cursor, "tensors", _MIN_INFO_BYTES)
    num_pairs = _count(cursor, "metadata keys", _MIN_PAIR_BYTES)
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.text("a metadata key", MAX_NAME_BYTES)
        if not key:
            raise WeightError(f"{file.path}: expected named metadata keys, got an empty one; {REFETCH}", code="weights.key")
        if key in metadata:
            raise WeightError(
                f"{file.path}: expected every metadata key once, got {shown(key)} again; {REFETCH}", code="weights.duplicate"
            )
        metadata[key] = cursor.value(key)
    alignment = _alignment(file, metadata)
    infos: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name, info = _tensor_info(cursor, alignment)
        if name in infos:
            raise WeightError(
                f"{file.path}: expected every tensor once, got {shown(name)} again; {REFETCH}", code="weights.duplicate"
            )
        infos[name] = info
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: TensorView(name, form, shape, data_start + offset, nbytes, file)
        for name, (form, shape, offset, nbytes) in infos.items()
    }
    _check_spans(file, tensors, data_start)
    return GGUFCheckpoint(file.path, (file,), tensors, metadata, version=version, alignment=alignment)


def _check_preamble(cursor: Cursor) -> int:
    file = cursor.file
    magic = file.read(0, 4)
    if magic not in (MAGIC, MAGIC[::-1]):
        raise WeightError(
            f"{file.path}: expected a file that begins with GGUF, got {magic.decode('latin-1')!a}; pass a GGUF file, or "
            "convert the older ggml formats with a current llama.cpp",
            code="weights.magic",
        )
    cursor.take(4, "the magic")
    version = cursor.u32("the version")
    if magic != MAGIC or (version and not version & 0xFFFF):
        raise UnsupportedError(
            f"{file.path}: expected a little-endian GGUF file, got a big-endian one; convert it with gguf-convert-endian",
            code="unsupported.gguf_endian",
        )
    if version not in VERSIONS:
        raise UnsupportedError(
            f"{file.path}: expected GGUF version 2 or 3, got {version}; convert the model again with a current llama.cpp",
            code="unsupported.gguf_version",
        )
    return version


def _count(cursor: Cursor, what: str, least_bytes: int) -> int:
    count = cursor.u64(f"the number of {what}")
    if count > cursor.remaining // least_bytes:
        raise WeightError(
            f"{cursor.file.path}: expected at most {cursor.remaining // least_bytes} {what} in a file of {cursor.file.size} "
            f"bytes, got a count of {count}; {REFETCH}",
            code="weights.count",
        )
    return count


def _alignment(file: MappedFile, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or value <= 0 or value & (value - 1):
        raise WeightError(
            f"{file.path}: expected a power of two as general.alignment, got {shown(value)}; {REFETCH}",
            code="weights.alignment",
        )
    return value


def _tensor_info(cursor: Cursor, alignment: int) -> tuple[str, tuple[str, tuple[int, ...], int, int]]:
    """Read one info; return the name and (format, shape outermost first, offset in the data, bytes)."""
    name = cursor.text("a tensor name", MAX_NAME_BYTES)
    if not name:
        raise WeightError(f"{cursor.file.path}: expected named tensors, got an empty name; {REFETCH}", code="weights.name")
    what = f"the info of {shown(name)}"
    rank = cursor.u32(what)
    if rank > MAX_RANK:
        raise WeightError(f"{shown(name)}: expected at most {MAX_RANK} dimensions, got {rank}; {REFETCH}", code="weights.rank")
    shape = cursor.u64s(rank, what)[::-1]
    kind = cursor.u32(what)
    offset = cursor.u64(what)
    if kind in WITHDRAWN_TYPES:
        raise UnsupportedError(
            f"{shown(name)}: expected a current tensor type, got {kind} ({WITHDRAWN_TYPES[kind]}), which llama.cpp has "
            "withdrawn; quantize the model again",
            code="unsupported.gguf_type",
        )
    if kind not in TENSOR_TYPES:
        raise WeightError(
            f"{shown(name)}: expected a tensor type of 0 to {max(TENSOR_TYPES)}, got {kind}; the file is damaged or newer than "
            "this build",
            code="weights.dtype",
        )
    form = FORMATS[TENSOR_TYPES[kind]]
    if not addressable(form, shape):
        raise WeightError(f"{shown(name)}: expected a shape that fits in memory, got {shape}; {REFETCH}", code="weights.shape")
    nbytes = tensor_bytes(form, shape)
    if nbytes is None:
        raise WeightError(
            f"{shown(name)}: expected rows of a multiple of {form.block} elements for {form.name}, got shape {shape}; "
            f"{REFETCH}",
            code="weights.row_length",
        )
    if offset % alignment:
        raise WeightError(
            f"{shown(name)}: expected an offset that is a multiple of {alignment}, got {offset}; {REFETCH}",
            code="weights.offset",
        )
    return name, (form.name, shape, offset, nbytes)


def _check_spans(file: MappedFile, tensors: dict[str, TensorView], data_start: int) -> None:
    """Check that the spans lie in the file and do not overlap; holes and padding are allowed."""
    before: TensorView | None = None
    for view in sorted((view for view in tensors.values() if view.nbytes), key=lambda view: view.offset):
        begin, end = view.offset - data_start, view.offset + view.nbytes - data_start
        if view.offset + view.nbytes > file.size:
            raise WeightError(
                f"{shown(view.name)}: expected within the {max(0, file.size - data_start)} data bytes of {file.path.name}, "
                f"got bytes {begin} to {end}; {REFETCH}",
                code="weights.out_of_file",
            )
        if before is not None and view.offset < before.offset + before.nbytes:
            raise WeightError(
                f"{shown(view.name)}: expected to begin after {shown(before.name)}, at data byte "
                f"{before.offset + before.nbytes - data_start} or later, got bytes {begin} to {end}; {REFETCH}",
                code="weights.overlap",
            )
        before = view


# --- split files ---------------------------------------------------------------------------------------------------


def _split_paths(part: GGUFCheckpoint) -> list[Path]:
    """Return the paths of all parts of the split that `part` belongs to."""
    count = part.metadata["split.count"]
    match = _SPLIT_NAME.fullmatch(part.path.name)
    if type(count) is not int or match is None or int(match["parts"]) != count:
        raise WeightError(
            f"{part.path}: expected a name like NAME-00001-of-{shown(count):0>5}.gguf for one of {shown(count)} parts, got "
            f"{shown(part.path.name)}; give the parts their original names, or join them with llama-gguf-split --merge",
            code="weights.split",
        )
    paths = [part.path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        listed = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        raise WeightError(
            f"{part.path.parent}: expected {count} parts of {match['stem']}, got {count - len(missing)}; fetch the missing "
            f"{listed}",
            code="weights.missing_shard",
        )
    return paths


def _check_part(part: GGUFCheckpoint, number: int, count: int) -> None:
    got = (part.metadata.get("split.no"), part.metadata.get("split.count"))
    if got != (number, count):
        raise WeightError(
            f"{part.path}: expected split.no {number} of split.count {count}, got {shown(got[0])} of {shown(got[1])}; the "
            "parts are of different models or renamed, fetch them again",
            code="weights.split",
        )


def _joined(parts: list[GGUFCheckpoint]) -> GGUFCheckpoint:
    first = parts[0]
    tensors: dict[str, TensorView] = {}
    for part in parts:
        for name, view in part.tensors.items():
            if name in tensors:
                raise WeightError(
                    f"{shown(name)}: expected in one part, got {tensors[name].file.path.name} and {part.path.name}; the parts "
                    "are of different models, fetch them again",
                    code="weights.duplicate",
                )
            tensors[name] = view
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise WeightError(
            f"{first.path}: expected {shown(total)} tensors in all parts, got {len(tensors)}; the parts are of different "
            "models, fetch them again",
            code="weights.split",
        )
    files = tuple(file for part in parts for file in part.files)
    return GGUFCheckpoint(first.path, files, tensors, dict(first.metadata), version=first.version, alignment=first.alignment)
