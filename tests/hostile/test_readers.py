"""Damaged safetensors files and indices, and paths without a checkpoint: class, code and sentence of each refusal."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from metrale.errors import WeightError
from metrale.formats import open_checkpoint
from tests.helpers_gguf import pack_gguf
from tests.helpers_safetensors import entry, pack_safetensors
from tests.hostile.refusal import LFS, refused

U64 = struct.Struct("<Q").pack
GOOD = {"a": entry("F32", [2, 3], 0, 24), "b": entry("BF16", [4], 24, 32)}
DATA = bytes(range(32))


# --- safetensors ---------------------------------------------------------------------------------------------------

NESTED = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"

SAFETENSORS: dict[str, tuple[bytes, str, str]] = {
    "empty file": (b"", "weights.truncated", r"expected a checkpoint, got an empty file; .* fetch it again"),
    "seven bytes": (b"\x10" + bytes(6), "weights.truncated", r"expected at least 8 bytes, got 7; "),
    "header cut": (
        pack_safetensors(GOOD)[:40],
        "weights.truncated",
        r"expected a header of \d+ bytes, got a file of 40 bytes; ",
    ),
    "length only": (U64(96), "weights.truncated", r"expected a header of 96 bytes, got a file of 8 bytes; "),
    "length huge": (
        pack_safetensors(GOOD, DATA, length=2**64 - 1),
        "weights.header",
        r"expected a header of 2 to 100000000 bytes, got a length of 18446744073709551615; ",
    ),
    "length over the limit": (pack_safetensors(GOOD, DATA, length=100_000_001), "weights.header", r"got a length of 100000001"),
    "length 0": (pack_safetensors("", DATA), "weights.header", r"got a length of 0"),
    "html page": (b"<!DOCTYPE html><html>Not found", "weights.header", r"got a length of \d+; .* no safetensors file"),
    "no brace": (pack_safetensors(" {}"), "weights.header", r"expected a header that begins with '{', got ' '; "),
    "not utf-8": (
        pack_safetensors(b'{"\xff": 1}'),
        "weights.utf8",
        r"expected a JSON object in UTF-8 as header, got byte 0xff at 2; ",
    ),
    "half a surrogate": (pack_safetensors('{"\\ud800": 1}'), "weights.utf8", r"got a string with half a surrogate pair"),
    "not JSON": (pack_safetensors('{"a": '), "weights.json", r"got Expecting value"),
    "JSON and more": (pack_safetensors("{} {}"), "weights.json", r"got Extra data"),
    "NaN": (pack_safetensors('{"a": NaN}'), "weights.json", r"got the number NaN"),
    "nested": (pack_safetensors(NESTED), "weights.json", r"got values nested too deeply"),
    "a number of 5000 digits": (pack_safetensors('{"a": ' + "9" * 5000 + "}"), "weights.json", r"got Exceeds the limit"),
    "duplicate tensor": (
        pack_safetensors('{"a": 1, "a": 2}'),
        "weights.duplicate",
        r"expected a JSON object in UTF-8 as header, got the key a twice",
    ),
    "duplicate dtype": (
        pack_safetensors('{"a": {"dtype": "F32", "dtype": "F16"}}'),
        "weights.duplicate",
        r"the key dtype twice",
    ),
    "entry of no object": (pack_safetensors({"a": 3}), "weights.header", r"^a: expected an object with dtype, .* got int; "),
    "entry without shape": (
        pack_safetensors({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4)),
        "weights.header",
        r"^a: expected an object with dtype, shape and data_offsets in the header, got dtype, data_offsets; ",
    ),
    "metadata of numbers": (
        pack_safetensors({"__metadata__": {"a": 1}}),
        "weights.header",
        r"expected __metadata__ to map strings to strings, got {'a': 1}; ",
    ),
    "metadata of no object": (pack_safetensors({"__metadata__": None}), "weights.header", r"got None; "),
    "unknown dtype": (
        pack_safetensors({"a": entry("F3", [1], 0, 4)}, bytes(4)),
        "weights.dtype",
        r"^a: expected a dtype .* got F3; ",
    ),
    "dtype of no string": (pack_safetensors({"a": entry(["F32"], [1], 0, 4)}, bytes(4)), "weights.dtype", r"got \['F32'\]; "),
    "negative size": (
        pack_safetensors({"a": entry("F32", [-1], 0, 4)}, bytes(4)),
        "weights.shape",
        r"^a: expected a shape .* got \[-1\]; ",
    ),
    "size that is a bool": (pack_safetensors({"a": entry("U8", [True], 0, 1)}, bytes(1)), "weights.shape", r"got \[True\]; "),
    "size that is a float": (pack_safetensors({"a": entry("U8", [1.0], 0, 1)}, bytes(1)), "weights.shape", r"got \[1\.0\]; "),
    "sizes that overflow": (
        pack_safetensors({"a": entry("F32", [2**32, 2**32], 0, 0)}),
        "weights.shape",
        r"fit in memory, got ",
    ),
    "overflow behind a 0": (
        pack_safetensors({"a": entry("F32", [2**62, 0, 8], 0, 0)}),
        "weights.shape",
        r"fit in memory, got ",
    ),
    "33 dimensions": (pack_safetensors({"a": entry("U8", [1] * 33, 0, 1)}, bytes(1)), "weights.shape", r"at most 32 sizes"),
    "three offsets": (
        pack_safetensors({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 8]}}, bytes(4)),
        "weights.header",
        r"^a: expected data_offsets \[begin, end\] with begin <= end, got \[0, 4, 8\]; ",
    ),
    "offsets backwards": (pack_safetensors({"a": entry("U8", [4], 4, 0)}, bytes(4)), "weights.header", r"got \[4, 0\]; "),
    "offsets against the shape": (
        pack_safetensors({"a": entry("F32", [2, 3], 0, 20)}, bytes(20)),
        "weights.size",
        r"^a: expected 24 bytes for F32 \[2, 3\], got data_offsets of 20 bytes; save the checkpoint again",
    ),
    "a row of half a byte": (
        pack_safetensors({"a": entry("F4", [2, 3], 0, 3)}, bytes(3)),
        "weights.size",
        r"^a: expected rows of a multiple of 2 elements for F4 \[2, 3\], got ",
    ),
    "tensor out of the file": (
        pack_safetensors(GOOD, DATA[:30]),
        "weights.out_of_file",
        r"^b: expected within the 30 data bytes of m\.safetensors, got bytes 24 to 32; .* fetch it again",
    ),
    "overlap": (
        pack_safetensors({"a": entry("U8", [6], 0, 6), "b": entry("U8", [6], 4, 10)}, bytes(10)),
        "weights.overlap",
        r"^b: expected to begin at data byte 6, after a, got bytes 4 to 10, which overlap it; ",
    ),
    "two tensors in one place": (
        pack_safetensors({"a": entry("U8", [6], 0, 6), "b": entry("U8", [6], 0, 6)}, bytes(6)),
        "weights.overlap",
        r"^b: expected to begin at data byte 6, after a, got bytes 0 to 6",
    ),
    "hole": (
        pack_safetensors({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 4, 6)}, bytes(6)),
        "weights.hole",
        r"^b: expected to begin at data byte 2, after a, got 4, which leaves a hole; ",
    ),
    "hole at the start": (
        pack_safetensors({"a": entry("U8", [2], 1, 3)}, bytes(3)),
        "weights.hole",
        r"data byte 0, after the header",
    ),
    "rest at the end": (pack_safetensors(GOOD, DATA + b"!"), "weights.hole", r"expected \d+ bytes by its header, got \d+; "),
    "rest without tensors": (pack_safetensors("{}", b"!"), "weights.hole", r"expected 10 bytes by its header, got 11; "),
    "LFS pointer": (
        LFS,
        "weights.lfs_pointer",
        r"expected a checkpoint, got a Git-LFS pointer of \d+ bytes; run `git lfs pull`",
    ),
    "name of newlines": (
        pack_safetensors({"\n\x1b[2J" + "x" * 5000: 3}),
        "weights.header",
        r"^'\\n\\x1b\[2Jx{90,}'\.\.\.: expected an object",
    ),
}


@pytest.mark.parametrize("name", SAFETENSORS)
def test_damaged_safetensors(tmp_path: Path, name: str) -> None:
    blob, code, sentence = SAFETENSORS[name]
    (tmp_path / "m.safetensors").write_bytes(blob)
    refused(tmp_path / "m.safetensors", code, sentence)


def test_every_truncation_of_a_safetensors_file_is_refused(tmp_path: Path) -> None:
    whole = pack_safetensors(GOOD, DATA)
    path = tmp_path / "m.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(WeightError) as caught:
            open_checkpoint(path)
        assert caught.value.code in ("weights.truncated", "weights.out_of_file")


# --- shards --------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    (tmp_path / "one.safetensors").write_bytes(pack_safetensors({"a": entry("U8", [3], 0, 3)}, b"abc"))
    (tmp_path / "two.safetensors").write_bytes(pack_safetensors({"b": entry("U8", [2], 0, 2)}, b"de"))
    write_index(tmp_path, {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    open_checkpoint(tmp_path).close()
    return tmp_path


def write_index(folder: Path, index: object) -> None:
    (folder / "model.safetensors.index.json").write_text(index if isinstance(index, str) else json.dumps(index))


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "two.safetensors").unlink()
    sentence = r": expected the 2 shards named in model\.safetensors\.index\.json, got 1; fetch the missing two\.safetensors$"
    refused(sharded, "weights.missing_shard", sentence)


def test_many_missing_shards_are_listed_in_part(tmp_path: Path) -> None:
    write_index(tmp_path, {"weight_map": {f"t{i}": f"part{i:02}.safetensors" for i in range(40)}})
    sentence = r"the 40 shards .* got 0; fetch the missing part00.safetensors, .*, part03.safetensors, \.\.\.$"
    refused(tmp_path, "weights.missing_shard", sentence)


def test_a_shard_that_lacks_its_tensor(sharded: Path) -> None:
    write_index(sharded, {"weight_map": {"a": "two.safetensors", "b": "two.safetensors"}})
    refused(sharded, "weights.missing_tensor", r"^a: expected in two\.safetensors as the index says, got a shard without it; ")


def test_a_damaged_shard_names_itself_and_unmaps_the_others(sharded: Path) -> None:
    (sharded / "two.safetensors").write_bytes(LFS)
    refused(sharded, "weights.lfs_pointer", r"two\.safetensors: expected a checkpoint, got a Git-LFS pointer")


@pytest.mark.parametrize(
    "name", ["../one.safetensors", "/etc/hostname", "sub/one.safetensors", "a\\b", "..", "", "x\0y", 3, None]
)
def test_an_index_cannot_reach_outside_its_folder(sharded: Path, name: object) -> None:
    write_index(sharded, {"weight_map": {"a": name}})
    refused(sharded, "weights.index", r"^a: expected a file name in the weight_map of model\.safetensors\.index\.json, got ")


@pytest.mark.parametrize(
    ("index", "code", "sentence"),
    [
        ({}, "weights.index", r"expected an object with a weight_map from tensors to files, got keys none; "),
        ({"metadata": {}}, "weights.index", r"got keys metadata; "),
        ({"weight_map": {}}, "weights.index", r"got keys weight_map; "),
        ({"weight_map": ["a"]}, "weights.index", r"got keys weight_map; "),
        ({"weight_map": {"a": "one.safetensors"}, "metadata": 3}, "weights.index", r"got keys weight_map, metadata; "),
        ("[]", "weights.index", r"expected a JSON object in UTF-8 as index, got a list; "),
        ("{", "weights.json", r"as index, got Expecting property name"),
        ('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}', "weights.duplicate", r"got the key a twice; "),
        (LFS.decode(), "weights.lfs_pointer", r"index\.json: expected a checkpoint, got a Git-LFS pointer"),
        ({"weight_map": {"a": "x" * 5000}}, "weights.missing_shard", r"got 0; fetch the missing 'x+'\.\.\.$"),
    ],
)
def test_damaged_indices(sharded: Path, index: object, code: str, sentence: str) -> None:
    write_index(sharded, index)
    refused(sharded, code, sentence)


# --- paths and folders ---------------------------------------------------------------------------------------------


def make_two_ggufs(folder: Path) -> None:
    for name in ("q4.gguf", "q8.gguf"):
        (folder / name).write_bytes(pack_gguf([], []))


def make_shards_without_index(folder: Path) -> None:
    for number in (1, 2):
        (folder / f"model-0000{number}-of-00002.safetensors").write_bytes(pack_safetensors("{}"))


def write(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).write_bytes(b"\x80\x02}q\x00.") for name in names] and None


FOLDERS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "empty": (
        lambda folder: None,
        "weights.empty_folder",
        r"expected \*\.safetensors or \*\.gguf in the folder, got an empty folder; ",
    ),
    "other files": (write("config.json", "model.onnx"), "weights.empty_folder", r"got 2 other files; "),
    "pytorch": (
        write("config.json", "pytorch_model.bin"),
        "unsupported.pickle",
        r"expected safetensors or GGUF weights, got PyTorch pickles \(pytorch_model\.bin\), which can run code; save",
    ),
    "pth": (write("consolidated.00.pth"), "unsupported.pickle", r"consolidated\.00\.pth"),
    "two models": (
        make_two_ggufs,
        "weights.ambiguous",
        r"expected one GGUF model in the folder, got 2; pass one file, such as q4\.gguf",
    ),
    "no index": (
        make_shards_without_index,
        "weights.missing_index",
        r"expected model\.safetensors\.index\.json beside 2 safetensors files, got no index; fetch the index, or pass one file",
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_without_a_checkpoint(tmp_path: Path, name: str) -> None:
    make, code, sentence = FOLDERS[name]
    make(tmp_path)
    refused(tmp_path, code, sentence)


@pytest.mark.parametrize(
    ("name", "blob", "code", "sentence"),
    [
        ("pytorch_model.bin", b"PK\x03\x04rest", "unsupported.pickle", r"got PyTorch pickles \(pytorch_model\.bin\)"),
        ("blob", b"PK\x03\x04rest", "unsupported.pickle", r"got PyTorch pickles \(blob\)"),
        ("blob", b"\x80\x02}q\x00.", "unsupported.pickle", r"which can run code"),
        (
            "README.md",
            b"# A model",
            "weights.unknown_format",
            r"expected a safetensors or GGUF file, got one that begins with '# A model'; ",
        ),
        ("blob", LFS, "weights.lfs_pointer", r"got a Git-LFS pointer"),
        ("m.gguf", b"\x80\x02}q\x00.", "weights.magic", r"got '\\x80\\x02}q'; "),
    ],
)
def test_files_of_other_kinds(tmp_path: Path, name: str, blob: bytes, code: str, sentence: str) -> None:
    (tmp_path / name).write_bytes(blob)
    refused(tmp_path / name, code, sentence)


def test_paths_that_cannot_be_opened(tmp_path: Path) -> None:
    refused(
        tmp_path / "nothing.gguf",
        "weights.not_found",
        r"nothing\.gguf: expected a checkpoint, got nothing at this path; check the spelling",
    )
    refused(tmp_path / "nothing", "weights.not_found", r"got nothing at this path")
    refused(tmp_path / ("x" * 300), "weights.unreadable", r"expected a readable file, got .*File name too long")
    refused(tmp_path / "a\0b", "weights.unreadable", r"expected a readable file, got embedded null byte; check its permissions")
    os.mkfifo(tmp_path / "pipe.gguf")
    refused(
        tmp_path / "pipe.gguf", "weights.unreadable", r"expected a regular file, got a pipe; pass a checkpoint's file or folder"
    )
    (tmp_path / "x.safetensors").mkdir()
    refused(tmp_path / "x.safetensors", "weights.empty_folder", r"got an empty folder")
    os.symlink("gone", tmp_path / "model.safetensors")
    refused(tmp_path, "weights.not_found", r"model\.safetensors: expected a checkpoint, got nothing at this path")


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")

    def deny(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", deny)
    with pytest.raises(WeightError, match=r"m\.gguf: expected a readable file, got .*Permission denied.*; check") as caught:
        open_checkpoint(tmp_path / "m.gguf")
    assert caught.value.code == "weights.unreadable"
