"""Checkpoint containers: safetensors and GGUF. Bytes, headers and tensors; no device code, no NumPy until data is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from metrale.errors import UnsupportedError, WeightError
from metrale.formats.gguf import MAGIC, open_gguf
from metrale.formats.mapped import MappedFile, shown
from metrale.formats.safetensors import open_safetensors, open_sharded
from metrale.formats.tensor import Checkpoint, TensorView
from metrale.formats.types import FORMATS, Format

__all__ = ["FORMATS", "Checkpoint", "Format", "TensorView", "open_checkpoint"]

_PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PICKLE_STARTS: Final = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04")
_INDEX_SUFFIX: Final = ".safetensors.index.json"


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint and validate its headers; no tensor is read.

    path: a ``.safetensors`` file, a ``*.safetensors.index.json``, a ``.gguf`` file (any part of a split), or a folder with
    one of them. A folder's safetensors win over its GGUF files, a single ``model.safetensors`` over an index.

    Raises: WeightError (``weights.not_found``, ``weights.empty_folder``, ``weights.ambiguous``, ``weights.unknown_format``
            and those of the readers); UnsupportedError (``unsupported.pickle`` and those of the readers).
    """
    path = Path(path)
    return _open_folder(path) if os.path.isdir(path) else _open_file(path)


def _open_file(path: Path) -> Checkpoint:
    if path.name.endswith(_INDEX_SUFFIX):
        return open_sharded(path)
    file = MappedFile(path)
    start = file.read(0, 9)
    file.close()
    if start[:4] in (MAGIC, MAGIC[::-1]) or path.suffix == ".gguf":
        return open_gguf(path)
    # Files of a hub cache may have no suffix: their first bytes decide.
    if path.suffix == ".safetensors" or start[8:] == b"{":
        return open_safetensors(path)
    if path.suffix in _PICKLE_SUFFIXES or start.startswith(_PICKLE_STARTS):
        raise _pickle(path, path.name)
    raise WeightError(
        f"{path}: expected a safetensors or GGUF file, got one that begins with {start.decode('latin-1')!a}; pass the "
        "checkpoint's file or its folder",
        code="weights.unknown_format",
    )


def _open_folder(path: Path) -> Checkpoint:
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise WeightError(
            f"{path}: expected a readable folder, got {error}; check its permissions", code="weights.unreadable"
        ) from error
    safetensors = [name for name in names if name.endswith(".safetensors")]
    indices = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    ggufs = [name for name in names if name.endswith(".gguf")]
    if "model.safetensors" in safetensors:
        return open_safetensors(path / "model.safetensors")
    if f"model{_INDEX_SUFFIX}" in indices:
        return open_sharded(path / f"model{_INDEX_SUFFIX}")
    if len(indices) == 1:
        return open_sharded(path / indices[0])
    if len(safetensors) == 1:
        return open_safetensors(path / safetensors[0])
    if safetensors:
        raise WeightError(
            f"{path}: expected model{_INDEX_SUFFIX} beside {len(safetensors)} safetensors files, got "
            f"{f'{len(indices)} indices' if indices else 'no index'}; fetch the index, or pass one file",
            code="weights.missing_index",
        )
    whole = [name for name in ggufs if "-of-" not in name or name.endswith(_first_part_suffix(name))]
    if len(whole) == 1 or (ggufs and not whole):
        return open_gguf(path / (whole or ggufs)[0])
    if whole:
        raise WeightError(
            f"{path}: expected one GGUF model in the folder, got {len(whole)}; pass one file, such as {shown(whole[0])}",
            code="weights.ambiguous",
        )
    pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    if pickles:
        raise _pickle(path, ", ".join(map(shown, pickles[:3])))
    raise WeightError(
        f"{path}: expected *.safetensors or *.gguf in the folder, got "
        f"{f'{len(names)} other files' if names else 'an empty folder'}; pass the folder that holds the weights, or fetch them "
        "with `metrale pull`",
        code="weights.empty_folder",
    )


def _first_part_suffix(name: str) -> str:
    return "-00001-of-" + name.rpartition("-of-")[2]


def _pickle(path: Path, names: str) -> UnsupportedError:
    return UnsupportedError(
        f"{path}: expected safetensors or GGUF weights, got PyTorch pickles ({names}), which can run code; save the model "
        "again with safetensors (`save_pretrained` of transformers writes it), or fetch a safetensors revision",
        code="unsupported.pickle",
    )
