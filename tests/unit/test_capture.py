"""Capture on the CPU: records and executes nothing, refuses what a replay could not repeat, keeps buffers alive."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from metrale.backends.cpu.backend import CpuBackend
from metrale.backends.cpu.emit import Emitter
from metrale.errors import CaptureError, DeviceError
from tests.toys import AFFINE, FAIL_AT, emit_affine


@pytest.fixture(params=["eager", "deferred"])
def backend(request):
    opened = CpuBackend(threads=2, streams=request.param)
    yield opened
    opened.close()


def test_nothing_runs_until_the_launch_and_buffers_are_read_again(backend):
    x, out = backend.alloc((7,), "f32", zero=True), backend.alloc((7,), "f32")
    ops = Emitter(backend.stream)
    with backend.stream.capture() as cap:
        emit_affine(ops, out, x, 2, 1)
        emit_affine(ops, out, out, 3, 0)
    assert np.isnan(backend.download(out)).all()
    for value in (1, 5):
        backend.upload(x, np.full(7, value, np.float32))
        cap.graph.launch()
        assert backend.download(out).tolist() == [6 * value + 3] * 7


def test_the_record_names_ops_buffers_and_parameters(backend):
    x, out = backend.alloc((7,), "f32"), backend.alloc((7,), "f32")
    ops = Emitter(backend.stream)
    with backend.stream.capture() as cap:
        emit_affine(ops, out, x, 2, 1)
        ops.emit("affine", AFFINE, 2, (out, x, 7, 1.0, 1.0), (out, "weight", x), extra=3)
    first, second = cap.graph.program.records
    assert (first.op, first.params) == ("affine", {"factor": 2, "shift": 1})
    assert first.buffers[0] is out
    assert first.buffers[1] is x
    assert (second.buffers[1], second.params) == ("weight", {"extra": 3})


def test_two_captures_of_one_step_are_equal_byte_for_byte(backend):
    x, out = backend.alloc((7,), "f32"), backend.alloc((7,), "f32")
    graphs = []
    for _ in range(2):
        with backend.stream.capture() as cap:
            emit_affine(Emitter(backend.stream), out, x, 2, 1)
            emit_affine(Emitter(backend.stream), out, out, 1, 0.5, tiles=1)
        graphs.append(cap.graph.ops)
        backend.upload(x, np.ones(7, np.float32))
    assert [graphs[0].op(i) for i in range(2)] == [graphs[1].op(i) for i in range(2)]


def test_a_graph_keeps_its_buffers_alive_until_destroyed(backend):
    x = backend.alloc((7,), "f32", zero=True)
    blocks = len(backend.arena)
    with backend.stream.capture() as cap:
        emit_affine(Emitter(backend.stream), x, x, 1, 1)
    del x
    gc.collect()
    assert len(backend.arena) == blocks
    cap.graph.launch()
    backend.stream.synchronize()
    assert cap.graph.program.records[0].buffers[0].tolist() == [1] * 7
    cap.graph.destroy()
    cap.graph.destroy()
    assert cap.graph.program.records == ()
    gc.collect()
    assert len(backend.arena) == blocks - 1
    with pytest.raises(DeviceError) as caught:
        cap.graph.launch()
    assert caught.value.code == "device.graph"


def test_foreign_memory_is_refused_inside_a_capture_only(backend):
    mine, foreign = backend.alloc((7,), "f32", zero=True), np.zeros(7, np.float32)
    ops = Emitter(backend.stream)
    emit_affine(ops, foreign, mine, 1, 1)
    backend.stream.synchronize()
    assert foreign.tolist() == [1] * 7
    for out, x in ((foreign, mine), (mine, foreign)):
        with pytest.raises(CaptureError) as caught, backend.stream.capture():
            emit_affine(ops, out, x, 1, 1)
        assert caught.value.code == "capture.address"
        assert "affine" in str(caught.value)
    assert not backend.stream.capturing


def test_memory_that_has_died_is_refused(backend):
    x = backend.alloc((1 << 20,), "f32")
    alias = np.ndarray((4,), np.float32, buffer=(bytes(16)))  # an address the arena never owned
    with pytest.raises(CaptureError), backend.stream.capture():
        emit_affine(Emitter(backend.stream), x, alias, 1, 1)


@pytest.mark.parametrize(("use", "code"), [
    (lambda b, x: b.alloc((3,), "f32"), "capture.alloc"),
    (lambda b, x: b.alloc_pinned((3,), "f32"), "capture.alloc"),
    (lambda b, x: b.alloc_kv(1, 1, 1), "capture.alloc"),
    (lambda b, x: b.upload(x, np.zeros(7, np.float32)), "capture.upload"),
    (lambda b, x: b.download(x), "capture.download"),
    (lambda b, x: b.stream.synchronize(), "capture.sync"),
    (lambda b, x: b.stream.record(), "capture.event"),
    (lambda b, x: b.stream.begin_capture(), "capture.nested"),
])
def test_what_a_replay_could_not_repeat_breaks_the_capture(backend, use, code):
    x = backend.alloc((7,), "f32", zero=True)
    with pytest.raises(CaptureError) as caught, backend.stream.capture() as cap:
        use(backend, x)
    assert caught.value.code == code
    assert cap.graph is None
    assert not backend.stream.capturing
    # Swallowing the error does not save the capture.
    backend.stream.begin_capture()
    with pytest.raises(CaptureError):
        use(backend, x)
    emit_affine(Emitter(backend.stream), x, x, 1, 1)
    with pytest.raises(CaptureError) as caught:
        backend.stream.end_capture()
    assert caught.value.code == "capture.broken"
    emit_affine(Emitter(backend.stream), x, x, 1, 1)
    assert backend.download(x).tolist() == [1] * 7


def test_waiting_and_launching_inside_a_capture(backend):
    x, second = backend.alloc((7,), "f32", zero=True), backend.new_stream()
    ops = Emitter(backend.stream)
    event = second.record()
    with backend.stream.capture() as cap:
        emit_affine(ops, x, x, 1, 1)
    for use, code in ((lambda: backend.stream.wait(event), "capture.event"), (cap.graph.launch, "capture.launch"),
                      (event.synchronize, "capture.sync"), (second.synchronize, "capture.sync")):
        with pytest.raises(CaptureError) as caught, backend.stream.capture():
            use()
        assert caught.value.code == code
    assert not backend.download(x).any()


def test_another_stream_works_while_one_captures(backend):
    x, y = backend.alloc((7,), "f32", zero=True), backend.alloc((7,), "f32", zero=True)
    second = backend.new_stream()
    with backend.stream.capture() as cap:
        emit_affine(Emitter(backend.stream), x, x, 1, 1)
        emit_affine(Emitter(second), y, y, 1, 2)
    assert len(cap.graph.program.records) == 1
    assert backend.download(y, second).tolist() == [2] * 7
    assert not backend.download(x).any()


def test_an_exception_discards_the_capture_and_propagates(backend):
    x = backend.alloc((7,), "f32", zero=True)

    def capture() -> None:
        with backend.stream.capture():
            emit_affine(Emitter(backend.stream), x, x, 1, 1)
            raise KeyError("mine")

    with pytest.raises(KeyError):
        capture()
    assert not backend.stream.capturing
    backend.alloc((3,), "f32")
    emit_affine(Emitter(backend.stream), x, x, 1, 3)
    assert backend.download(x).tolist() == [3] * 7


def test_ending_what_never_began(backend):
    with pytest.raises(CaptureError) as caught:
        backend.stream.end_capture()
    assert caught.value.code == "capture.none"
    backend.stream.abort_capture()


def test_a_kernel_that_fails_in_a_replay(backend):
    calls = backend.alloc((5,), "i64", zero=True)
    x = backend.alloc((7,), "f32", zero=True)
    ops = Emitter(backend.stream)
    with backend.stream.capture() as cap:
        ops.emit("toy", FAIL_AT, 5, (calls, 2, 9))
        emit_affine(ops, x, x, 1, 1)

    def step() -> None:
        cap.graph.launch()
        backend.stream.synchronize()

    for _ in range(2):
        with pytest.raises(DeviceError, match=r"toy: .* got 9") as caught:
            step()
        assert caught.value.code == "device.kernel"
    assert not backend.download(x).any()
    backend.stream.synchronize()
    emit_affine(ops, x, x, 1, 1)
    assert backend.download(x).tolist() == [1] * 7
