"""The GGUF reader on whole files: against the gguf package, and its own rules."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize as gguf_dequantize

from metrale.errors import WeightError
from metrale.formats import open_checkpoint
from metrale.formats.gguf import open_gguf
from metrale.formats.gguf_values import ArrayValue
from metrale.quant.blocks import BLOCKS, dequantize
from tests.helpers_gguf import info, pack_gguf, pair, text, write_gguf

ROOT = Path(__file__).resolve().parents[2]
METADATA = {
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "general.name": "Größe 模型",
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.tokens": ["a", "", "é", "Ġthe", "日本"],
    "tokenizer.ggml.scores": [0.0, -1.5, -2.25],
    "tokenizer.ggml.token_type": [1, 3, 2, 1],
    "a.flags": [True, False, True],
}


def some_tensors() -> dict[str, tuple[str, np.ndarray]]:
    rng = np.random.default_rng(7)
    tensors = {
        f"w.{name}": (name, rng.standard_normal((i + 2, form.block * 2)).astype(np.float32))
        for i, (name, form) in enumerate(BLOCKS.items())
    }
    tensors["norm"] = ("f32", rng.standard_normal(5).astype(np.float32))
    tensors["half"] = ("f16", rng.standard_normal((3, 7)))
    tensors["brain"] = ("bf16", rng.integers(0, 2**16, (3, 4), np.uint16))
    tensors["experts"] = ("q8_0", rng.standard_normal((2, 3, 64)).astype(np.float32))
    return tensors


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    tensors = some_tensors()
    path = write_gguf(tmp_path / "m.gguf", tensors, METADATA)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.container == "gguf"
        assert list(checkpoint.tensors) == list(tensors)
        for name, (form, array) in tensors.items():
            view = checkpoint.tensors[name]
            assert (view.format, view.shape) == (form, array.shape)
            want = theirs[name]
            assert view.nbytes == want.n_bytes
            if form in BLOCKS:
                assert view.data().shape == (view.rows, view.row_bytes)
                ours = dequantize(form, view.data(), view.columns).reshape(view.shape)
                np.testing.assert_array_equal(ours, gguf_dequantize(want.data, want.tensor_type))
            elif form == "bf16":
                np.testing.assert_array_equal(view.data(), array)
            else:
                np.testing.assert_array_equal(view.data(), want.data)


def test_reads_the_metadata(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, METADATA)
    with open_checkpoint(path) as checkpoint:
        metadata = checkpoint.metadata
    got = {key: list(value) if isinstance(value, ArrayValue) else value for key, value in metadata.items()}
    assert got == {"general.architecture": "llama", **METADATA}
    tokens, scores, flags = (metadata[key] for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "a.flags"))
    assert (tokens.element, scores.element, flags.element) == ("string", "float32", "bool")
    assert (len(tokens), tokens[-1], tokens[1:3], len(tokens[:0])) == (5, "日本", ("", "é"), 0)
    assert tokens.raw_strings()[2] == "é".encode()
    assert scores.numpy().tolist() == [0, -1.5, -2.25]
    assert flags.numpy().tolist() == [True, False, True]
    assert repr(tokens) == "<5 x string>"
    with pytest.raises(TypeError, match=r"tokenizer\.ggml\.tokens: an array of strings"):
        tokens.numpy()
    with pytest.raises(TypeError, match=r"scores: expected an array of strings, got float32"):
        scores.raw_strings()


def test_every_value_type(tmp_path: Path) -> None:
    values = {
        0: ("B", 255), 1: ("b", -128), 2: ("H", 65535), 3: ("h", -2), 4: ("I", 2**32 - 1), 5: ("i", -7), 6: ("f", 0.5),
        7: ("?", True), 10: ("Q", 2**64 - 1), 11: ("q", -(2**63)), 12: ("d", 0.1),
    }  # fmt: skip
    pairs = [pair(f"k{kind}", kind, struct.pack("<" + code, value)) for kind, (code, value) in values.items()]
    pairs += [
        pair(f"a{kind}", 9, struct.pack(f"<IQ3{code}", kind, 3, value, value, value)) for kind, (code, value) in values.items()
    ]
    pairs += [pair("empty", 9, struct.pack("<IQ", 8, 0)), pair("none", 9, struct.pack("<IQ", 5, 0)), pair("s", 8, text("x\0y"))]
    path = tmp_path / "m.gguf"
    path.write_bytes(pack_gguf(pairs, []))
    metadata = open_gguf(path).metadata
    for kind, (_, value) in values.items():
        assert metadata[f"k{kind}"] == value
        assert tuple(metadata[f"a{kind}"]) == (value,) * 3
        assert metadata[f"a{kind}"].numpy().tolist() == [value] * 3
    assert (list(metadata["empty"]), list(metadata["none"]), metadata["s"]) == ([], [], "x\0y")


def test_strings_are_decoded_when_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(pack_gguf([pair("tokens", 9, struct.pack("<IQ", 8, 3) + text("ok") + text(b"\xc3\x28") + text("z"))], []))
    tokens = open_gguf(path).metadata["tokens"]
    assert len(tokens) == 3
    assert tokens.raw_strings() == [b"ok", b"\xc3\x28", b"z"]
    with pytest.raises(WeightError, match=r"^tokens\[1\]: expected UTF-8, got byte 0xc3 at 0; convert") as caught:
        tokens[0]
    assert caught.value.code == "weights.utf8"


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_versions_alignments_holes_and_tails(tmp_path: Path, version: int, alignment: int) -> None:
    pairs = [pair("general.alignment", 4, struct.pack("<I", alignment))]
    step = max(alignment, 8)
    infos = [info("b", (3,), 26, 2 * step), info("a", (2, 1), 0, 0), info("none", (0, 4), 0, 0)]
    data = struct.pack("<2f", 1, 2).ljust(2 * step, b"\0") + struct.pack("<3i", 5, 6, 7) + b"tail"
    path = tmp_path / "m.gguf"
    path.write_bytes(pack_gguf(pairs, infos, data, version=version, alignment=alignment))
    checkpoint = open_gguf(path)
    assert (checkpoint.version, checkpoint.alignment) == (version, alignment)
    assert checkpoint.tensors["a"].data().tolist() == [[1, 2]]
    assert checkpoint.tensors["b"].data().tolist() == [5, 6, 7]
    assert checkpoint.tensors["none"].data().shape == (4, 0)


def test_a_vocabulary_without_tensors_may_end_unpadded(tmp_path: Path) -> None:
    path = tmp_path / "vocab.gguf"
    path.write_bytes(pack_gguf([pair("k", 7, b"\1")], [])[: 24 + 8 + 1 + 4 + 1])
    assert open_gguf(path).metadata == {"k": True}


def test_formats_without_arithmetic_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(pack_gguf([], [info("x", (512, 3), 23, 0), info("s", (), 24, 832)], bytes(range(256)) * 4))
    checkpoint = open_gguf(path)
    assert (checkpoint.tensors["x"].format, checkpoint.tensors["x"].data().shape) == ("iq4_xs", (3, 272))
    assert (checkpoint.tensors["s"].shape, int(checkpoint.tensors["s"].data())) == ((), 64)


def write_split(folder: Path, tensors: list[list[str]]) -> None:
    total = sum(map(len, tensors))
    for number, names in enumerate(tensors):
        pairs = [
            pair("split.no", 2, struct.pack("<H", number)),
            pair("split.count", 2, struct.pack("<H", len(tensors))),
            pair("split.tensors.count", 5, struct.pack("<i", total)),
        ]
        pairs += [pair("general.architecture", 8, text("llama"))] if number == 0 else []
        infos = [info(name, (1,), 0, 32 * i) for i, name in enumerate(names)]
        data = b"".join(struct.pack("<f", ord(name)).ljust(32, b"\0") for name in names)
        (folder / f"m-{number + 1:05}-of-{len(tensors):05}.gguf").write_bytes(pack_gguf(pairs, infos, data))


def test_any_part_opens_the_whole_split(tmp_path: Path) -> None:
    write_split(tmp_path, [["a", "b"], [], ["c"]])
    for path in (tmp_path, *sorted(tmp_path.glob("*.gguf"))):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.metadata["general.architecture"] == "llama"
            assert len(checkpoint.files) == 3
            data = {name: view.data().tolist() for name, view in checkpoint.tensors.items()}
            assert data == {"a": [97], "b": [98], "c": [99]}


def test_opening_and_reading_a_header_imports_no_numpy(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", some_tensors(), METADATA)
    code = (
        "import sys; from metrale.formats import open_checkpoint; import metrale.quant.blocks, metrale.quant.activations\n"
        f"c = open_checkpoint({str(path)!r}); list(c.metadata['tokenizer.ggml.tokens']); print('numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"
