"""Diagnosis: guard bands, faults by layer, the best tokens of a step; and the sizes a model is opened with."""

from __future__ import annotations

import numpy as np
import pytest

from metrale.backends.base import Backend
from metrale.errors import CapacityError, DeviceError
from metrale.model.core import Diagnosis
from metrale.model.streams import Streams
from tests.model import tiny


def test_a_write_outside_is_named(device: Backend) -> None:
    model = tiny.open_model(device, diagnosis=Diagnosis(guards=True))
    tiny.start(model, 1, tiny.prompt(40))
    tiny.continue_(model, [1], 30)
    assert model.check_guards() == ()
    core = model._core
    page = core.arrays[1].v[core.limits.blocks + 1]
    device.upload(page, np.zeros(tuple(page.shape), np.float32))
    assert model.check_guards() == ("pages 1, values",)
    assert "guard bands were written: pages 1, values" in str(model.locate_fault(tiny.prompt(7)))


def test_a_fault_is_found_in_its_layer(device: Backend) -> None:
    model = tiny.open_model(device, model_spec=tiny.spec(4))
    assert model.locate_fault(tiny.prompt(70)) is None
    block = model._core.net.stack.blocks[2]
    assert block.before_attention is not None
    device.upload(block.before_attention.weight, np.full(tiny.HIDDEN, np.nan, np.float32))
    found = model.locate_fault(tiny.prompt(7))
    assert found is not None
    assert found.startswith("layer 2: ")
    assert "not finite" in found
    assert model.live_sequences() == ()
    assert model.free_blocks == model.limits.blocks


def test_the_best_tokens_of_a_step(device: Backend) -> None:
    model = tiny.open_model(device)
    tiny.start(model, 1, tiny.prompt(9))
    tiny.start(model, 2, tiny.prompt(8))
    results = model.decode_batch([1, 2])
    for row in (0, 1):
        top = model.top_tokens(row)
        assert len(top) == 5
        assert top[0][0] == results[row].token
        assert [v for _, v in top] == sorted((v for _, v in top), reverse=True)


def test_counters_count(device: Backend) -> None:
    model = tiny.open_model(device)
    tiny.generate(model, tiny.prompt(70), 5)
    stats = model.stats
    assert (stats.decode_steps, stats.prefill_chunks, stats.graph_captures, stats.graph_replays, stats.failed_steps) == (
        4,
        2,
        1,
        4,
        0,
    )
    assert (stats.peak_blocks, stats.free_blocks) == (5, model.limits.blocks)


def test_an_unnamed_context_shrinks_until_it_fits(reference: Backend) -> None:
    block = 2 * 2 * 16 * tiny.KV_HEADS * tiny.DIM * 4
    model = tiny.open_model(
        reference, model_spec=tiny.spec(context=4096), max_context=None, kv_blocks=None, kv_memory_bytes=100 * block
    )
    assert 512 <= model.limits.context_tokens < 100 * 16
    with pytest.raises(CapacityError, match="context of at most 144 tokens"):
        tiny.open_model(reference, max_context=200, kv_blocks=10)


def test_a_missing_result_is_an_error_not_a_wait(device: Backend) -> None:
    model = tiny.open_model(device)
    results = model._core.results
    with pytest.raises(DeviceError) as err:
        results.read(results.launched(1, 0))
    assert err.value.code == "result.missing"


def test_work_beside_the_steps_is_ordered_both_ways(open_backend) -> None:  # type: ignore[no-untyped-def]
    device = open_backend(deferred=True)
    model = tiny.open_model(device)
    other, source, copy = device.new_stream(), device.alloc((3,), "i32", zero=True), device.alloc((3,), "i32", zero=True)
    device.upload(source, np.array([1, 2, 3], np.int32))
    with Streams(model._core).beside(other) as stream:
        stream.ops.gather_rows(copy.reshape(3, 1).view(np.float32), source.reshape(3, 1).view(np.float32), device_rows(device))
    device.upload(source, np.array([7, 8, 9], np.int32))
    assert device.download(copy).tolist() == [1, 2, 3]


def device_rows(device: Backend) -> np.ndarray:
    rows: np.ndarray = device.alloc((3,), "i32")
    device.upload(rows, np.arange(3, dtype=np.int32))
    device.stream.synchronize()
    return rows
