"""A tiny random decoder, built without files, and ways to run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from metrale.backends.base import Backend, WeightPart
from metrale.config.engine import EngineConfig
from metrale.config.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec
from metrale.families.dense import NORMS
from metrale.model.core import Diagnosis
from metrale.model.plan import Fork, RowSampling, SequenceSpec
from metrale.model.transformer import TransformerModel
from metrale.weights.loader import Weights

HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, DIM = 64, 96, 98, 4, 2, 16
CONFIG = EngineConfig(max_context=224, max_rows=6, chunk_tokens=64, kv_blocks=64)
GREEDY = RowSampling()


def spec(layers: int = 2, *, windows: Sequence[int | None] = (None,), context: int = 224) -> ModelSpec:
    """Return a llama-shaped spec; layer i has windows[i % len]."""
    rope = RopeSpec(dim=DIM, theta=10000.0, max_position=context)
    made = tuple(
        LayerSpec(
            AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, rope, windows[i % len(windows)]),
            MlpSpec(INNER, "silu"),
            NormSpec(1e-5),
        )
        for i in range(layers)
    )
    return ModelSpec("llama", VOCAB, HIDDEN, made, NormSpec(1e-5), tied=False, max_context=context)


def _matrix(rng: np.random.Generator, n: int, k: int, fmt: str) -> WeightPart:
    if fmt == "f32":
        return WeightPart("f32", n, k, (rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32))
    blocks = np.zeros((n, k // 32, 34), np.uint8)
    scale = (rng.uniform(0.5, 1.5, (n, k // 32, 1)) / (73 * np.sqrt(k))).astype(np.float16)
    blocks[..., :2] = scale.view(np.uint8)
    blocks[..., 2:] = rng.integers(-127, 128, (n, k // 32, 32)).astype(np.int8).view(np.uint8)
    return WeightPart("q8_0", n, k, blocks.reshape(n, -1))


def _cut(part: WeightPart, rows: slice | None = None, columns: slice | None = None) -> WeightPart:
    """Return a rank's share of a float32 matrix."""
    data = part.data[rows or slice(None), columns or slice(None)]
    return WeightPart(part.format, *data.shape, np.ascontiguousarray(data))


def weights(spec: ModelSpec, backend: Backend, *, seed: int = 3, fmt: str = "f32") -> Weights:
    """Return random weights, this rank's share of them where the backend has several ranks."""
    rng = np.random.default_rng(seed)
    rank, size = backend.comm.rank, backend.comm.size

    def share(length: int) -> slice | None:
        return None if size == 1 else slice(rank * length // size, (rank + 1) * length // size)

    def cut(part: WeightPart, *, rows: bool) -> WeightPart:
        at = share(part.n if rows else part.k)
        return part if at is None else _cut(part, rows=at if rows else None, columns=None if rows else at)

    matrices = {"embed": backend.pack([_matrix(rng, spec.vocab, spec.hidden, "f32")])}
    vectors: dict[str, Any] = {}
    for i, layer in enumerate(spec.layers):
        a, m = layer.attention, layer.mlp
        qkv = [_matrix(rng, n, spec.hidden, fmt) for n in (a.q_rows, a.kv_rows, a.kv_rows)]
        matrices[f"layers.{i}.qkv"] = backend.pack([cut(p, rows=True) for p in qkv])
        matrices[f"layers.{i}.o"] = backend.pack([cut(_matrix(rng, spec.hidden, a.q_rows, fmt), rows=False)])
        gate_up = [_matrix(rng, m.size, spec.hidden, fmt) for _ in range(2)]
        matrices[f"layers.{i}.gate_up"] = backend.pack([cut(p, rows=True) for p in gate_up])
        matrices[f"layers.{i}.down"] = backend.pack([cut(_matrix(rng, spec.hidden, m.size, fmt), rows=False)])
        for norm in NORMS[layer.placement]:
            vectors[f"layers.{i}.{norm}"] = _vector(backend, rng, spec.hidden)
    vectors["norm"] = _vector(backend, rng, spec.hidden)
    matrices["head"] = backend.pack([cut(_matrix(rng, spec.vocab, spec.hidden, fmt), rows=True)])
    return Weights(matrices, vectors, "f32", sum(w.nbytes for w in matrices.values()))


def _vector(backend: Backend, rng: np.random.Generator, size: int) -> Any:
    device = backend.alloc((size,), "f32")
    backend.upload(device, rng.uniform(0.5, 1.5, size).astype(np.float32))
    return device


def open_model(
    backend: Backend,
    *,
    fmt: str = "f32",
    model_spec: ModelSpec | None = None,
    diagnosis: Diagnosis | None = None,
    **options: Any,
) -> TransformerModel:
    """Open the tiny model on a backend; options are those of EngineConfig."""
    chosen = model_spec if model_spec is not None else spec()
    return TransformerModel(chosen, weights(chosen, backend, fmt=fmt), replace(CONFIG, **options), backend, diagnosis=diagnosis)


def prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    """Return a random prompt."""
    return tuple(int(t) for t in np.random.default_rng(seed).integers(0, VOCAB, length))


def start(model: TransformerModel, seq_id: int, tokens: Sequence[int], sampling: RowSampling = GREEDY, **more: Any) -> None:
    """Allocate and prefill a sequence."""
    model.alloc_sequence(SequenceSpec(seq_id, tuple(tokens), len(tokens), sampling, **more))
    model.prefill(seq_id)


def fork(model: TransformerModel, parent: int, seq_id: int, sampling: RowSampling) -> None:
    """Fork another choice over the parent's prompt."""
    model.fork_sequence(Fork(parent, seq_id, model.sequence(parent).prompt_len - 1, sampling))


def continue_(model: TransformerModel, seq_ids: Sequence[int], steps: int) -> list[list[int]]:
    """Decode a batch for some steps; return each sequence's tokens after its prompt."""
    for _ in range(steps):
        model.decode_batch(seq_ids)
    return [list(model.sequence(s).tokens[model.sequence(s).prompt_len :]) for s in seq_ids]


def generate(
    model: TransformerModel, tokens: Sequence[int], steps: int, sampling: RowSampling = GREEDY, seq_id: int = 900
) -> list[int]:
    """Run one sequence from prompt to `steps` tokens and free it."""
    start(model, seq_id, tokens, sampling)
    try:
        return continue_(model, [seq_id], steps - 1)[0]
    finally:
        model.free_sequence(seq_id)
