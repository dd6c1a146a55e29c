"""The smallest way to run a model: one KV table, a whole prompt in chunks, logits of every row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from metrale.backends.base import BLOCK_TOKENS, Backend, RowBatch
from metrale.config.spec import ModelSpec
from metrale.layers.stack import DenseModel
from metrale.weights.loader import load_weights
from tests.families.opened import open_model


def load(path: Path, backend: Backend, max_context: int | None = None) -> DenseModel:
    with open_model(path) as opened:
        weights = load_weights(opened.index, opened.weights, backend, source=opened.config.source)
        return DenseModel(backend, opened.spec, weights, max_context or opened.spec.max_context)


def spec_of(path: Path) -> ModelSpec:
    with open_model(path) as opened:
        return opened.spec


def up(backend: Backend, x: Any) -> Any:
    x = np.asarray(x, np.int32)
    device = backend.alloc(x.shape, "i32")
    backend.upload(device, x)
    return device


def run(model: DenseModel, backend: Backend, ids: Sequence[int], chunk: int | None = None) -> np.ndarray:
    """Return float32 logits (T, V) of a prompt, computed `chunk` rows at a time (None: at once)."""
    ops, total = backend.stream.ops, len(ids)
    blocks = -(-total // BLOCK_TOKENS)
    table = up(backend, np.random.default_rng(5).permutation(np.arange(1, blocks + 1))[None, :])
    layers = model.local.layers
    kv = [backend.alloc_kv(blocks + 1, layer.attention.kv_heads, layer.attention.head_dim) for layer in layers]
    step = chunk or total
    buffers = model.new_buffers(step)
    out = []
    for start in range(0, total, step):
        stop = min(start + step, total)
        place = up(backend, np.arange(start, stop))
        batch = RowBatch(up(backend, ids[start:stop]), up(backend, np.zeros(stop - start)), place, place)
        logits = backend.alloc((stop - start, model.spec.vocab), "f32")
        hidden = model.forward(ops, buffers, batch, [table] * len(layers), kv)
        model.head(ops, buffers, logits, hidden)
        out.append(np.array(backend.download(logits)))
    return np.concatenate(out)


def logits(
    path: Path, backend: Backend, ids: Sequence[int], *, max_context: int | None = None, chunk: int | None = None
) -> np.ndarray:
    return run(load(path, backend, max_context), backend, ids, chunk)
