"""Damaged GGUF files and splits: class, code and sentence of each refusal."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from metrale.errors import WeightError
from metrale.formats import open_checkpoint
from tests.helpers_gguf import info, pack_gguf, pair, text
from tests.hostile.refusal import LFS, refused

U32, U64 = struct.Struct("<I").pack, struct.Struct("<Q").pack

F32x8 = info("a", (8,), 0, 0)
GGUF: dict[str, tuple[bytes, str, str]] = {
    "empty file": (b"", "weights.truncated", r"expected a checkpoint, got an empty file; "),
    "wrong magic": (pack_gguf([], [], magic=b"GGML"), "weights.magic", r"expected a file that begins with GGUF, got 'GGML'; "),
    "old magic": (pack_gguf([], [], magic=b"tjgg"), "weights.magic", r"got 'tjgg'; .* convert the older ggml formats"),
    "two bytes": (b"GG", "weights.magic", r"got 'GG'; "),
    "magic only": (b"GGUF", "weights.truncated", r"expected 4 bytes of the version at byte 4, got 0 to the end of the file; "),
    "LFS pointer": (LFS, "weights.lfs_pointer", r"got a Git-LFS pointer"),
    "version 1": (pack_gguf([], [], version=1), "unsupported.gguf_version", r"expected GGUF version 2 or 3, got 1; convert"),
    "version 0": (pack_gguf([], [], version=0), "unsupported.gguf_version", r"got 0; "),
    "version 4": (pack_gguf([], [], version=4), "unsupported.gguf_version", r"got 4; "),
    "big endian": (
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        "unsupported.gguf_endian",
        r"expected a little-endian GGUF file, got a big-endian one; convert it with gguf-convert-endian",
    ),
    "big-endian magic": (b"FUGG" + struct.pack(">IQQ", 3, 0, 0), "unsupported.gguf_endian", r"got a big-endian one"),
    "no counts": (b"GGUF" + U32(3), "weights.truncated", r"expected 8 bytes of the number of tensors at byte 8, got 0"),
    "lying tensor count": (
        pack_gguf([], [F32x8], bytes(32), num_tensors=2**63),
        "weights.count",
        r"expected at most \d tensors in a file of \d+ bytes, got a count of 9223372036854775808; ",
    ),
    "lying key count": (
        pack_gguf([], [], num_pairs=2**32),
        "weights.count",
        r"expected at most 0 metadata keys .* got a count of 4294967296",
    ),
    "one key too many": (
        pack_gguf([pair("k", 0, b"1")], [F32x8], bytes(32), num_pairs=2),
        "weights.name",
        r"expected named tensors, got an empty name",
    ),
    "empty key": (
        pack_gguf([pair("", 0, b"1")], [], bytes(9)),
        "weights.key",
        r"expected named metadata keys, got an empty one; ",
    ),
    "long key": (
        pack_gguf([pair("k" * 65_536, 0, b"1")], []),
        "weights.string",
        r"a metadata key of at most 65535 bytes, got a length of 65536; ",
    ),
    "key out of the file": (
        pack_gguf([U64(60_000) + bytes(40)], [], num_pairs=1),
        "weights.truncated",
        r"expected 60000 bytes of a metadata key at byte 32, got \d+ to the end of the file; ",
    ),
    "key not UTF-8": (
        pack_gguf([pair(b"\xc3(", 0, b"1")], []),
        "weights.utf8",
        r"m\.gguf, a metadata key: expected UTF-8, got byte 0xc3 at 0; ",
    ),
    "key twice": (
        pack_gguf([pair("k", 0, b"1")] * 2, []),
        "weights.duplicate",
        r"expected every metadata key once, got k again; ",
    ),
    "value type 13": (
        pack_gguf([pair("k", 13, bytes(8))], []),
        "weights.value_type",
        r"expected a value type of 0 to 12 for k, got 13; ",
    ),
    "bool 2": (pack_gguf([pair("k", 7, b"\2")], []), "weights.bool", r"expected 0 or 1 as the bool k, got 2; "),
    "bools 0 7": (pack_gguf([pair("k", 9, U32(7) + U64(2) + b"\0\7")], []), "weights.bool", r"as the bool k, got 7; "),
    "value cut": (
        pack_gguf([pair("kk", 10, b"")], [])[:38],
        "weights.truncated",
        r"expected 8 bytes of the value of kk at byte 38, got 0",
    ),
    "string not UTF-8": (
        pack_gguf([pair("k", 8, text(b"a\xff"))], []),
        "weights.utf8",
        r"the value of k: expected UTF-8, got byte 0xff at 1; ",
    ),
    "string of 2^63": (
        pack_gguf([pair("k", 8, U64(2**63))], []),
        "weights.string",
        r"the value of k of at most 67108864 bytes, got a length of ",
    ),
    "string cut": (
        pack_gguf([pair("k", 8, U64(1000) + b"abc")], []),
        "weights.truncated",
        r"expected 1000 bytes of the value of k",
    ),
    "array of arrays": (
        pack_gguf([pair("k", 9, U32(9) + U64(1) + U32(0) + U64(1) + b"1")], []),
        "unsupported.nested_array",
        r"expected k to be a flat array, got an array of arrays; ",
    ),
    "array of type 99": (pack_gguf([pair("k", 9, U32(99) + U64(1))], []), "weights.value_type", r"0 to 12 for k, got 99; "),
    "array of 2^60 numbers": (
        pack_gguf([pair("k", 9, U32(5) + U64(2**60))], []),
        "weights.truncated",
        r"expected 4611686018427387904 bytes of the items of k",
    ),
    "array of 2^60 strings": (
        pack_gguf([pair("k", 9, U32(8) + U64(2**60))], []),
        "weights.truncated",
        r"expected 9223372036854775808 bytes of the items of k",
    ),
    "array with a long string": (
        pack_gguf([pair("k", 9, U32(8) + U64(2) + U64(2**64 - 1) + U64(0))], []),
        "weights.truncated",
        r"expected \d{20} bytes of the items of k at byte \d+, got \d+ to the end",
    ),
    "array cut within a length": (
        pack_gguf([pair("k", 9, U32(8) + U64(2) + text("abc") + bytes(5))], [], alignment=1),
        "weights.truncated",
        r"expected 19 bytes of the items of k at byte 49, got 16 to the end",
    ),
    "alignment 0": (
        pack_gguf([pair("general.alignment", 4, U32(0))], []),
        "weights.alignment",
        r"expected a power of two as general\.alignment, got 0; ",
    ),
    "alignment 48": (pack_gguf([pair("general.alignment", 4, U32(48))], []), "weights.alignment", r"got 48; "),
    "alignment of a string": (pack_gguf([pair("general.alignment", 8, text("32"))], []), "weights.alignment", r"got 32; "),
    "alignment true": (pack_gguf([pair("general.alignment", 7, b"\1")], []), "weights.alignment", r"got True; "),
    "info cut": (pack_gguf([], [F32x8])[:40], "weights.truncated", r"of the info of a at byte 37, got 3 to the end"),
    "five dimensions": (
        pack_gguf([], [info("a", (1,) * 5, 0, 0)], bytes(4)),
        "weights.rank",
        r"^a: expected at most 4 dimensions, got 5; ",
    ),
    "2^32 - 1 dimensions": (pack_gguf([], [text("a") + U32(2**32 - 1) + bytes(40)]), "weights.rank", r"got 4294967295; "),
    "sizes that overflow": (
        pack_gguf([], [info("a", (2**32, 2**32), 0, 0)]),
        "weights.shape",
        r"^a: expected a shape that fits in memory, got \(4294967296, 4294967296\); ",
    ),
    "overflow behind a 0": (pack_gguf([], [info("a", (2**62, 0, 8), 0, 0)]), "weights.shape", r"fits in memory"),
    "type 4": (
        pack_gguf([], [info("a", (32,), 4, 0)]),
        "unsupported.gguf_type",
        r"^a: expected a current tensor type, got 4 \(q4_2\), which llama\.cpp has withdrawn; ",
    ),
    "type 31": (pack_gguf([], [info("a", (32,), 31, 0)]), "unsupported.gguf_type", r"got 31 \(q4_0_4_4\)"),
    "type 4000": (
        pack_gguf([], [info("a", (32,), 4000, 0)]),
        "weights.dtype",
        r"^a: expected a tensor type of 0 to \d+, got 4000; ",
    ),
    "row of 33 for q4_0": (
        pack_gguf([], [info("a", (33, 2), 2, 0)], bytes(64)),
        "weights.row_length",
        r"^a: expected rows of a multiple of 32 elements for q4_0, got shape \(2, 33\); ",
    ),
    "row of 128 for q4_k": (
        pack_gguf([], [info("a", (128, 2), 12, 0)], bytes(144)),
        "weights.row_length",
        r"multiple of 256 elements for q4_k",
    ),
    "offset not aligned": (
        pack_gguf([], [info("a", (1,), 0, 4)], bytes(8)),
        "weights.offset",
        r"^a: expected an offset that is a multiple of 32, got 4; ",
    ),
    "tensor twice": (
        pack_gguf([], [F32x8, info("a", (8,), 0, 32)], bytes(64)),
        "weights.duplicate",
        r"expected every tensor once, got a again; ",
    ),
    "tensor out of the file": (
        pack_gguf([], [F32x8], bytes(31)),
        "weights.out_of_file",
        r"^a: expected within the 31 data bytes of m\.gguf, got bytes 0 to 32; ",
    ),
    "tensor far out": (
        pack_gguf([], [info("a", (8,), 0, 2**64 - 32)], bytes(64)),
        "weights.out_of_file",
        r"got bytes 18446744073709551584 to ",
    ),
    "no data at all": (pack_gguf([], [F32x8], alignment=1), "weights.out_of_file", r"expected within the 0 data bytes"),
    "overlap": (
        pack_gguf([], [info("a", (16,), 0, 0), info("b", (8,), 0, 32)], bytes(64)),
        "weights.overlap",
        r"^b: expected to begin after a, at data byte 64 or later, got bytes 32 to 64; ",
    ),
}


@pytest.mark.parametrize("name", GGUF)
def test_damaged_gguf(tmp_path: Path, name: str) -> None:
    blob, code, sentence = GGUF[name]
    (tmp_path / "m.gguf").write_bytes(blob)
    refused(tmp_path / "m.gguf", code, sentence)


def test_every_truncation_of_a_gguf_file_is_refused(tmp_path: Path) -> None:
    pairs = [
        pair("s", 8, text("héllo")),
        pair("t", 9, U32(8) + U64(3) + text("a") + text("") + text("bc")),
        pair("n", 9, U32(2) + U64(1) + b"ab"),
    ]
    whole = pack_gguf(pairs, [info("a", (3,), 0, 0), info("b", (32, 2), 8, 32)], bytes(32 + 68))
    path = tmp_path / "m.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(WeightError) as caught:
            open_checkpoint(path)
        assert caught.value.code in ("weights.truncated", "weights.out_of_file", "weights.count", "weights.magic")
    path.write_bytes(whole)
    open_checkpoint(path).close()


def split_part(number: int, count: int, name: str, total: int = 2) -> bytes:
    pairs = [pair("split.no", 2, struct.pack("<H", number)), pair("split.count", 2, struct.pack("<H", count))]
    return pack_gguf([*pairs, pair("split.tensors.count", 5, struct.pack("<i", total))], [info(name, (1,), 0, 0)], bytes(4))


SPLITS: dict[str, tuple[dict[str, bytes], str, str]] = {
    "part missing": (
        {"m-00001-of-00002.gguf": split_part(0, 2, "a")},
        "weights.missing_shard",
        r": expected 2 parts of m, got 1; fetch the missing m-00002-of-00002\.gguf$",
    ),
    "first part missing": (
        {"m-00002-of-00002.gguf": split_part(1, 2, "b")},
        "weights.missing_shard",
        r"missing m-00001-of-00002\.gguf$",
    ),
    "renamed": (
        {"model.gguf": split_part(0, 2, "a")},
        "weights.split",
        r"expected a name like NAME-00001-of-00002\.gguf for one of 2 parts, got model\.gguf; ",
    ),
    "names swapped": (
        {"m-00001-of-00002.gguf": split_part(1, 2, "a"), "m-00002-of-00002.gguf": split_part(0, 2, "b")},
        "weights.split",
        r"expected split\.no 0 of split\.count 2, got 1 of 2; the parts are of different models or renamed",
    ),
    "part of another model": (
        {"m-00001-of-00002.gguf": split_part(0, 2, "a"), "m-00002-of-00002.gguf": pack_gguf([], [F32x8], bytes(32))},
        "weights.split",
        r"m-00002-of-00002\.gguf: expected split\.no 1 of split\.count 2, got None of None; ",
    ),
    "tensor in both": (
        {"m-00001-of-00002.gguf": split_part(0, 2, "a"), "m-00002-of-00002.gguf": split_part(1, 2, "a")},
        "weights.duplicate",
        r"^a: expected in one part, got m-00001-of-00002\.gguf and m-00002-of-00002\.gguf; ",
    ),
    "tensors missing": (
        {"m-00001-of-00002.gguf": split_part(0, 2, "a", 3), "m-00002-of-00002.gguf": split_part(1, 2, "b", 3)},
        "weights.split",
        r"expected 3 tensors in all parts, got 2; ",
    ),
    "part damaged": (
        {"m-00001-of-00002.gguf": split_part(0, 2, "a"), "m-00002-of-00002.gguf": b"GGUF"},
        "weights.truncated",
        r"m-00002-of-00002\.gguf: expected 4 bytes of the version",
    ),
}


@pytest.mark.parametrize("name", SPLITS)
def test_damaged_splits(tmp_path: Path, name: str) -> None:
    files, code, sentence = SPLITS[name]
    for file, blob in files.items():
        (tmp_path / file).write_bytes(blob)
    refused(tmp_path, code, sentence)
