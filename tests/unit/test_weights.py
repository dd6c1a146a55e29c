"""Preflight and loading of weights: names, layouts, shapes, formats, shares of ranks, progress."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from metrale.backends.base import Comm
from metrale.backends.reference import ReferenceBackend
from metrale.errors import UnsupportedError, WeightError
from metrale.formats.tensor import TensorView
from metrale.quant.blocks import BLOCKS, dequantize
from metrale.weights import loader
from metrale.weights.loader import Weights, count_not_finite, load_weights
from metrale.weights.preflight import Preflight, preflight
from tests.families.opened import open_model

CONFIG = {
    "model_type": "llama",
    "vocab_size": 35,
    "hidden_size": 12,
    "intermediate_size": 22,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
SHAPES = {
    "self_attn.q_proj": (24, 12),
    "self_attn.k_proj": (12, 12),
    "self_attn.v_proj": (12, 12),
    "self_attn.o_proj": (12, 24),
    "mlp.gate_proj": (22, 12),
    "mlp.up_proj": (22, 12),
    "mlp.down_proj": (12, 22),
}


def tensors(prefix: str = "model.", dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    names = {f"{prefix}embed_tokens.weight": (35, 12), f"{prefix}norm.weight": (12,), "lm_head.weight": (35, 12)}
    for i in range(2):
        names |= {f"{prefix}layers.{i}.{name}.weight": shape for name, shape in SHAPES.items()}
        names |= {f"{prefix}layers.{i}.{norm}_layernorm.weight": (12,) for norm in ("input", "post_attention")}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in names.items()}


def write(folder: Path, found: Mapping[str, np.ndarray], **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(dict(found), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def check(folder: Path) -> Preflight:
    with open_model(folder) as opened:
        return preflight(opened.index, opened.weights, "config.json")


def load(folder: Path, comm: Comm | None = None, **options: Any) -> tuple[Weights, ReferenceBackend]:
    backend = ReferenceBackend(comm=comm)
    with open_model(folder) as opened:
        return load_weights(opened.index, opened.weights, backend, **options), backend


def test_a_whole_checkpoint_has_no_problem(tmp_path: Path) -> None:
    found = tensors()
    report = check(write(tmp_path, found))
    assert report.problems == ()
    assert report.formats == {"f32": 16}
    assert report.matrix_bytes == sum(a.nbytes for a in found.values() if a.ndim == 2)
    report.check()


@pytest.mark.parametrize("prefix", ["model.", "", "language_model.model.", "model.language_model."])
def test_layouts(prefix: str, tmp_path: Path) -> None:
    found = tensors(prefix)
    if prefix == "language_model.model.":
        found["language_model.lm_head.weight"] = found.pop("lm_head.weight")
    weights, backend = load(write(tmp_path, found))
    name = f"{prefix}layers.1.self_attn."
    want = np.concatenate([found[f"{name}{letter}_proj.weight"] for letter in "qkv"])
    np.testing.assert_array_equal(backend.unpack(weights.matrices["layers.1.qkv"]), want)
    np.testing.assert_array_equal(backend.unpack(weights.matrices["head"]), next(a for n, a in found.items() if "lm_head" in n))
    np.testing.assert_array_equal(weights.vectors["norm"], found[f"{prefix}norm.weight"])


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        (
            "model.layers.1.mlp.gate_proj.weight",
            (11, 12),
            r"expected shape \(22, 12\) from config.json, got \(11, 12\); the shard may be",
        ),
        ("model.layers.1.mlp.down_proj.weight", (22, 12), r"expected shape \(12, 22\).*different models"),
        ("model.layers.0.input_layernorm.weight", (13,), r"expected shape \(12,\)"),
        ("model.embed_tokens.weight", (36, 12), r"expected shape \(35, 12\)"),
        ("lm_head.weight", (35, 12, 1), r"expected shape \(35, 12\)"),
    ],
)
def test_shapes_that_disagree_are_named(name: str, shape: tuple[int, ...], text: str, tmp_path: Path) -> None:
    found = {**tensors(), name: np.ones(shape, np.float32)}
    with pytest.raises(WeightError, match=f"{name}: {text}") as error:
        load(write(tmp_path, found))
    assert error.value.code == "weights.shape"


def test_missing_and_unexpected_tensors_are_named_and_counted(tmp_path: Path) -> None:
    found = tensors()
    del found["model.layers.0.mlp.up_proj.weight"], found["model.norm.weight"]
    found["model.layers.0.self_attn.q_proj.bias"] = np.ones(24, np.float32)
    report = check(write(tmp_path, found))
    assert [p.code for p in report.problems] == ["weights.missing", "weights.missing", "weights.unexpected"]
    with pytest.raises(WeightError, match=r"layers.0.mlp.up_proj.weight: expected a tensor.*and 2 more such disagreements"):
        report.check()


def test_nothing_large_is_read_before_the_preflight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tensors()
    del found["lm_head.weight"]
    monkeypatch.setattr(TensorView, "data", lambda self: pytest.fail(f"read {self.name}"))
    with pytest.raises(WeightError, match="lm_head"):
        load(write(tmp_path, found))


def test_tied_models_may_store_a_copy_of_the_head(tmp_path: Path) -> None:
    found = tensors()
    weights, _ = load(write(tmp_path, found, tie_word_embeddings=True))
    assert "head" not in weights.matrices
    del found["lm_head.weight"]
    assert check(write(tmp_path, found, tie_word_embeddings=True)).problems == ()


def test_known_leftovers_are_ignored(tmp_path: Path) -> None:
    found = {**tensors(), "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}
    assert check(write(tmp_path, found)).problems == ()


def test_unsupported_formats_are_named(tmp_path: Path) -> None:
    found = tensors()
    found["model.layers.0.mlp.up_proj.weight"] = np.ones((22, 12), np.int8)
    with pytest.raises(UnsupportedError, match=r"up_proj.weight: expected one of f32, f16, bf16, .*got format i8") as error:
        load(write(tmp_path, found))
    assert error.value.code == "weights.format"


def test_half_precision_is_kept_and_vectors_widen(tmp_path: Path) -> None:
    found = tensors(dtype=np.float16)
    weights, backend = load(write(tmp_path, found))
    assert weights.matrices["layers.0.o"].formats == ("f16",)
    assert weights.embed_format == "f16"
    assert weights.vectors["layers.0.input_layernorm"].dtype == np.float32
    np.testing.assert_array_equal(
        backend.unpack(weights.matrices["layers.0.o"]), found["model.layers.0.self_attn.o_proj.weight"]
    )


class Rank(Comm):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def test_ranks_get_their_rows_and_columns_of_each_part(tmp_path: Path) -> None:
    found = {
        **tensors(),
        **{
            f"model.layers.{i}.self_attn.{p}_proj.bias": np.arange(n, dtype=np.float32) + 1
            for i in range(2)
            for p, n in (("q", 24), ("k", 12), ("v", 12), ("o", 12))
        },
    }
    folder = write(tmp_path, found, attention_bias=True)
    for rank in range(2):
        weights, backend = load(folder, Rank(rank, 2))
        name = "model.layers.1."
        q, k, v, gate, up = (
            found[f"{name}{p}_proj.weight"] for p in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
        )

        def half(x: np.ndarray, rank: int = rank) -> np.ndarray:
            return np.split(x, 2)[rank]

        unpacked = {target: backend.unpack(weights.matrices[target]) for target in weights.matrices}
        np.testing.assert_array_equal(unpacked["layers.1.qkv"], np.concatenate([half(q), half(k), half(v)]))
        np.testing.assert_array_equal(unpacked["layers.1.gate_up"], np.concatenate([half(gate), half(up)]))
        np.testing.assert_array_equal(
            unpacked["layers.1.down"], np.split(found[f"{name}mlp.down_proj.weight"], 2, axis=1)[rank]
        )
        assert unpacked["embed"].shape == unpacked["head"].shape == (35, 12)  # 35 rows do not divide: whole copies
        bias = np.asarray(weights.matrices["layers.1.qkv"].bias)
        np.testing.assert_array_equal(
            bias, np.concatenate([half(np.arange(24) + 1), half(np.arange(12) + 1), half(np.arange(12) + 1)])
        )
        out = np.asarray(weights.matrices["layers.1.o"].bias)
        np.testing.assert_array_equal(out, (np.arange(12) + 1) * (rank == 0))


def test_progress_ends_at_the_whole_and_pages_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[str] = []
    plain = TensorView.release

    def release(self: TensorView, *args: Any) -> None:
        released.append(self.name)
        plain(self, *args)

    monkeypatch.setattr(TensorView, "release", release)
    calls: list[tuple[int, int]] = []
    found = tensors()
    load(write(tmp_path, found), progress=lambda done, total: calls.append((done, total)))
    matrices = {name: a.nbytes for name, a in found.items() if a.ndim == 2}
    assert calls == sorted(calls)
    assert calls[-1] == (sum(matrices.values()), sum(matrices.values()))
    assert set(released) == set(matrices)


def test_not_finite_elements_are_counted(tmp_path: Path) -> None:
    found = tensors()
    found["model.embed_tokens.weight"][3, 4] = np.nan
    found["model.embed_tokens.weight"][34, 11] = np.inf
    with open_model(write(tmp_path, found)) as opened:
        counts = {name: count_not_finite(t) for name, t in opened.checkpoint.tensors.items()}
    assert counts.pop("model.embed_tokens.weight") == 2
    assert set(counts.values()) == {0}


@pytest.mark.parametrize("form", BLOCKS)
def test_not_finite_elements_of_blocks_are_counted(form: str) -> None:
    """Any bytes: the elements that the dequantizer makes NaN or infinite, found from the float16 numbers alone."""
    k = 3 * BLOCKS[form].block
    rows = np.random.default_rng(5).integers(0, 256, (997, BLOCKS[form].row_bytes(k)), np.uint8)
    values = dequantize(form, rows, k)
    found = loader._damaged_blocks(form, rows)
    assert 0 < np.count_nonzero(~np.isfinite(found)) == np.count_nonzero(~np.isfinite(values))
    assert found.size < values.size / 4
