"""Deferred streams: work runs as late as events allow, so that a missing edge shows as a wrong number."""

from __future__ import annotations

import numpy as np
import pytest

from metrale.backends.cpu.backend import CpuBackend
from metrale.backends.cpu.emit import Emitter
from metrale.backends.cpu.stream import QUERIES_BEFORE_RUN
from metrale.errors import DeviceError
from tests.toys import FAIL_AT, emit_affine


@pytest.fixture
def backend():
    opened = CpuBackend(threads=2, streams="deferred")
    yield opened
    opened.close()


def zeros(backend, n=5):
    return backend.alloc((n,), "f32", zero=True)


def test_nothing_runs_before_the_host_asks(backend):
    x = zeros(backend)
    emit_affine(Emitter(backend.stream), x, x, 1, 1)
    assert not x.any()
    backend.stream.synchronize()
    assert x.tolist() == [1] * 5


def test_a_missing_edge_shows_and_an_edge_orders(backend):
    for edge in (False, True):
        x, y = zeros(backend), zeros(backend)
        producer, consumer = backend.new_stream(), backend.new_stream()
        emit_affine(Emitter(producer), x, x, 1, 7)
        if edge:
            consumer.wait(producer.record())
        emit_affine(Emitter(consumer), y, x, 1, 0)
        assert backend.download(y, consumer).tolist() == [7 * edge] * 5


def test_a_wait_runs_the_other_stream_only_up_to_the_event(backend):
    x, y = zeros(backend), zeros(backend)
    one, two = backend.new_stream(), backend.new_stream()
    emit_affine(Emitter(one), x, x, 1, 1)
    event = one.record()
    emit_affine(Emitter(one), x, x, 1, 10)
    two.wait(event)
    emit_affine(Emitter(two), y, x, 1, 0)
    two.synchronize()
    assert (y[0], x[0]) == (1, 1)
    one.synchronize()
    assert x[0] == 11


def test_edges_chain_over_streams(backend):
    x = zeros(backend)
    streams = [backend.new_stream() for _ in range(4)]
    before = None
    for i, stream in enumerate(streams):
        if before is not None:
            stream.wait(before)
        emit_affine(Emitter(stream), x, x, 2, i)
        before = stream.record()
    assert not x.any()
    before.synchronize()
    assert x[0] == ((0 * 2 + 1) * 2 + 2) * 2 + 3


def test_a_poll_says_no_at_first_and_ends(backend):
    x = zeros(backend)
    emit_affine(Emitter(backend.stream), x, x, 1, 1)
    event = backend.stream.record()
    answers = [event.query() for _ in range(QUERIES_BEFORE_RUN + 1)]
    assert answers == [False] * QUERIES_BEFORE_RUN + [True]
    assert x[0] == 1
    assert event.query()
    assert backend.stream.record().query()  # nothing is queued before it


def test_uploads_are_late_and_only_pinned_memory_is_read_late(backend):
    x, y = zeros(backend), zeros(backend)
    pinned, pageable = backend.alloc_pinned((5,), "f32"), np.ones(5, np.float32)
    pinned[:] = 1
    backend.upload(x, pinned)
    backend.upload(y, pageable)
    pageable[:] = 2
    pinned[2:] = 2  # rewritten before its event: shows
    assert not x.any()
    assert not y.any()
    assert backend.download(x).tolist() == [1, 1, 2, 2, 2]
    assert backend.download(y).tolist() == [1] * 5


def test_launches_are_late_and_keep_the_graph(backend):
    x = zeros(backend)
    with backend.stream.capture() as cap:
        emit_affine(Emitter(backend.stream), x, x, 1, 1)
    cap.graph.launch()
    cap.graph.launch()
    assert not x.any()
    with pytest.raises(DeviceError) as caught:
        cap.graph.destroy()  # in flight
    assert caught.value.code == "device.graph"
    backend.stream.synchronize()
    assert x[0] == 2
    cap.graph.destroy()


def test_scalars_and_buffers_are_frozen_when_emitted(backend):
    x = zeros(backend)
    emit_affine(Emitter(backend.stream), x, x, 1, 1)
    del x
    y = zeros(backend)
    backend.stream.synchronize()
    assert not y.any()
    with pytest.raises(DeviceError) as caught:
        emit_affine(Emitter(backend.stream), y[::2], y[::2], 1, 1)
    assert caught.value.code == "op.layout"


def test_a_fault_shows_where_the_host_asks_and_drops_what_came_after(backend):
    calls, x = backend.alloc((4,), "i64", zero=True), zeros(backend)
    second = backend.new_stream()
    ops = Emitter(backend.stream)
    passed = backend.stream.record()
    ops.emit("toy", FAIL_AT, 4, (calls, 0, 3))
    emit_affine(ops, x, x, 1, 1)
    event = backend.stream.record()
    second.wait(event)
    emit_affine(Emitter(second), x, x, 1, 1)
    with pytest.raises(DeviceError) as caught:
        second.synchronize()
    assert caught.value.code == "device.kernel"
    for ask in (event.query, event.synchronize):
        with pytest.raises(DeviceError) as caught:
            ask()
        assert caught.value.code == "device.fault"
    assert passed.query()
    backend.stream.synchronize()
    second.synchronize()
    assert not x.any()
    emit_affine(ops, x, x, 1, 1)
    assert backend.download(x)[0] == 1


def test_a_failed_launch_is_no_longer_in_flight(backend):
    calls = backend.alloc((4,), "i64", zero=True)
    with backend.stream.capture() as cap:
        Emitter(backend.stream).emit("toy", FAIL_AT, 4, (calls, 0, 3))
    cap.graph.launch()
    cap.graph.launch()
    with pytest.raises(DeviceError):
        backend.stream.synchronize()
    cap.graph.destroy()


def test_kv_read_sees_queued_work(backend):
    layer = backend.alloc_kv(2, 1, 1)
    flat = layer.k.reshape(-1)
    emit_affine(Emitter(backend.stream), flat, flat, 1, 4)
    assert (backend.kv_read(layer, 1)[0] == 4).all()
