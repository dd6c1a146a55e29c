"""The layer stack inside a capture: recorded once, replayed with other rows, equal to the eager run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from metrale.backends.base import RowBatch
from tests.families import driver
from tests.families.tiny import CASES, Case, build, prompt, save
from tests.oracles import oracle_module

oracle_module("torch", why="the checkpoints are made by transformers")
pytestmark = pytest.mark.oracle

CAPTURED = [c for c in CASES if c.id in ("llama", "gemma2", "olmo2")]


@pytest.mark.parametrize("case", CAPTURED, ids=lambda case: case.id)
def test_a_captured_step_equals_the_eager_one(case: Case, backend, tmp_path: Path) -> None:
    """One row a step through a graph, as decode runs it; nothing is allocated or read back while it is recorded."""
    model = driver.load(save(build(case), tmp_path), backend)
    ids = prompt(length=19)
    want = driver.run(model, backend, ids, chunk=1)
    stream = backend.stream
    ops = stream.ops
    table = driver.up(backend, [[2, 1]])
    kv = [backend.alloc_kv(3, layer.attention.kv_heads, layer.attention.head_dim) for layer in model.local.layers]
    buffers = model.new_buffers(1)
    batch = RowBatch(*(driver.up(backend, [0]) for _ in range(4)))
    pick = driver.up(backend, [0])
    logits = backend.alloc((1, model.spec.vocab), "f32")
    with stream.capture() as capture:
        model.forward(ops, buffers, batch, [table] * len(kv), kv)
        model.head(ops, buffers, logits, model.pick(ops, buffers, pick))
    assert capture.graph is not None
    for place, token in enumerate(ids):
        for device, value in ((batch.ids, token), (batch.index, place), (batch.position, place)):
            backend.upload(device, np.array([value], np.int32))
        capture.graph.launch()
        np.testing.assert_array_equal(backend.download(logits)[0], want[place])
    capture.graph.destroy()
