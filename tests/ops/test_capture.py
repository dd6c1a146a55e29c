"""Capture, graphs, events, faults: what every stream promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from metrale.backends.base import Backend
from metrale.errors import CaptureError, DeviceError, MetraleError
from tests.helpers import down, poisoned, up


def test_the_record_names_ops_buffers_and_parameters(backend: Backend) -> None:
    x, y = up(backend, np.ones((2, 3), np.float32)), up(backend, np.ones((2, 3), np.float32))
    with backend.stream.capture() as capture:
        backend.stream.ops.add(x, y)
        backend.stream.ops.scale(x, factor=3.0)
    assert capture.graph is not None
    first, second = capture.graph.program.records
    assert (first.op, second.op) == ("add", "scale")
    assert first.buffers[0] is x
    assert first.buffers[1] is y
    assert second.params == {"factor": 3.0}


def test_replays_run_in_order_with_eager_work(backend: Backend) -> None:
    x, one = up(backend, np.zeros((1, 5), np.float32)), up(backend, np.ones((1, 5), np.float32))
    with backend.stream.capture() as capture:
        backend.stream.ops.scale(x, factor=2.0)
        backend.stream.ops.add(x, one)
    assert capture.graph is not None
    for _ in range(3):
        capture.graph.launch()
    backend.stream.ops.add(x, one)
    capture.graph.launch()
    assert down(backend, x).tolist() == [[17.0] * 5]


def test_a_graph_keeps_its_buffers_alive(backend: Backend) -> None:
    x = up(backend, np.zeros((64, 65), np.float32))

    def record() -> Any:
        step = up(backend, np.full((64, 65), 0.5, np.float32))
        with backend.stream.capture() as capture:
            backend.stream.ops.add(x, step)
        return capture.graph

    graph = record()
    others = [poisoned(backend, 64, 65) for _ in range(8)]  # would take the place of freed memory
    graph.launch()
    assert (down(backend, x) == 0.5).all()
    assert len(others) == 8


def test_a_destroyed_graph_refuses(backend: Backend) -> None:
    x = up(backend, np.ones((1, 3), np.float32))
    with backend.stream.capture() as capture:
        backend.stream.ops.scale(x, factor=2.0)
    graph = capture.graph
    assert graph is not None
    graph.destroy()
    graph.destroy()
    with pytest.raises(DeviceError):
        graph.launch()
    assert down(backend, x).tolist() == [[1.0] * 3]


def test_an_empty_capture(backend: Backend) -> None:
    with backend.stream.capture() as capture:
        pass
    assert capture.graph is not None
    assert capture.graph.program.records == ()
    capture.graph.launch()
    backend.stream.synchronize()


# --- what a capture refuses --------------------------------------------------------------------------------------------


def forbidden(backend: Backend) -> dict[str, Callable[[], Any]]:
    x, event = up(backend, np.ones((1, 3), np.float32)), backend.stream.record()
    host = backend.download(x)
    return {
        "alloc": lambda: backend.alloc((3,), "f32"),
        "alloc_q": lambda: backend.alloc_q(1, 32),
        "alloc_pinned": lambda: backend.alloc_pinned((3,), "f32"),
        "alloc_kv": lambda: backend.alloc_kv(2, 1, 8),
        "upload": lambda: backend.upload(x, host),
        "download": lambda: backend.download(x),
        "synchronize": backend.stream.synchronize,
        "begin_capture": backend.stream.begin_capture,
        "record": backend.stream.record,
        "wait": lambda: backend.stream.wait(event),
    }


NAMES = ("alloc", "alloc_q", "alloc_pinned", "alloc_kv", "upload", "download", "synchronize", "begin_capture", "record", "wait")


@pytest.mark.parametrize("name", NAMES)
def test_a_capture_refuses_and_the_stream_survives(backend: Backend, name: str) -> None:
    x = up(backend, np.ones((1, 3), np.float32))
    call = forbidden(backend)[name]
    handles = []

    def record() -> None:
        with backend.stream.capture() as capture:
            handles.append(capture)
            backend.stream.ops.scale(x, factor=5.0)
            call()

    with pytest.raises(CaptureError) as caught:
        record()
    assert caught.value.code.startswith("capture.")
    assert not backend.stream.capturing
    assert handles[0].graph is None
    backend.stream.ops.scale(x, factor=2.0)
    assert down(backend, x).tolist() == [[2.0] * 3]


@pytest.mark.parametrize("name", ["alloc", "download", "synchronize"])
def test_a_swallowed_refusal_breaks_the_capture(backend: Backend, name: str) -> None:
    call = forbidden(backend)[name]
    backend.stream.begin_capture()
    with pytest.raises(CaptureError):
        call()
    with pytest.raises(CaptureError):
        backend.stream.end_capture()
    assert not backend.stream.capturing
    backend.stream.abort_capture()
    backend.stream.synchronize()


def test_a_failing_block_discards_the_capture(backend: Backend) -> None:
    x = up(backend, np.ones((1, 3), np.float32))

    def record() -> None:
        with backend.stream.capture():
            backend.stream.ops.scale(x, factor=5.0)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        record()
    assert not backend.stream.capturing
    assert down(backend, x).tolist() == [[1.0] * 3]


def test_a_bad_shape_inside_a_capture(backend: Backend) -> None:
    x, wide = up(backend, np.ones((1, 3), np.float32)), up(backend, np.ones((1, 4), np.float32))

    def record() -> None:
        with backend.stream.capture():
            backend.stream.ops.add(x, wide)

    with pytest.raises(DeviceError) as caught:
        record()
    assert caught.value.code == "op.shape"
    assert not backend.stream.capturing


def test_ending_or_aborting_without_a_capture(backend: Backend) -> None:
    backend.stream.abort_capture()
    with pytest.raises(CaptureError):
        backend.stream.end_capture()


# --- streams and events ------------------------------------------------------------------------------------------------


def test_events_order_streams(backend: Backend) -> None:
    second = backend.new_stream()
    x, y = up(backend, np.ones((1, 7), np.float32)), up(backend, np.ones((1, 7), np.float32))
    backend.stream.ops.scale(x, factor=4.0)
    second.wait(backend.stream.record())
    second.ops.add(y, x)
    event = second.record()
    event.synchronize()
    assert event.query()
    backend.stream.wait(event)
    backend.stream.ops.add(x, y)
    assert down(backend, x).tolist() == [[9.0] * 7]
    np.testing.assert_array_equal(backend.download(y, second), backend.download(y))


def test_two_streams_capture_apart(backend: Backend) -> None:
    second = backend.new_stream()
    x, y = up(backend, np.ones((1, 3), np.float32)), up(backend, np.ones((1, 3), np.float32))
    with second.capture() as capture:
        assert second.capturing
        assert not backend.stream.capturing
        second.ops.scale(y, factor=3.0)
        backend.stream.ops.scale(x, factor=2.0)
    backend.stream.synchronize()
    assert down(backend, x).tolist() == [[2.0] * 3]
    assert down(backend, y).tolist() == [[1.0] * 3]
    assert capture.graph is not None
    capture.graph.launch()
    second.synchronize()
    assert down(backend, y).tolist() == [[3.0] * 3]


# --- memory ------------------------------------------------------------------------------------------------------------


def test_upload_checks_the_shape_and_download_copies(backend: Backend) -> None:
    x = up(backend, np.ones((2, 3), np.float32))
    with pytest.raises(DeviceError) as caught:
        backend.upload(x, np.ones((3, 2), np.asarray(backend.download(x)).dtype))
    assert caught.value.code == "op.shape"
    copy = backend.download(x)
    copy[...] = 9
    assert down(backend, x).tolist() == [[1.0] * 3] * 2


def test_uploads_may_reuse_their_source(backend: Backend) -> None:
    x, source = backend.alloc((4, 5), "i32"), np.full((4, 5), 3, np.int32)
    backend.upload(x, source)
    source[...] = 8
    assert (backend.download(x) == 3).all()


def test_zeroed_memory_and_sizes(backend: Backend) -> None:
    for dtype in ("f32", "i32", "i16", "i8", "u8", "bf16", "f16"):
        assert not backend.download(backend.alloc((3, 5), dtype, zero=True)).any()
    pinned = backend.alloc_pinned((3, 5), "i32")
    assert not pinned.any()
    free, total = backend.memory()
    assert 0 < free <= total


def test_a_request_beyond_memory(backend: Backend) -> None:
    with pytest.raises(MetraleError) as caught:
        backend.alloc((1 << 20, 1 << 26), "f32")
    assert caught.value.code == "capacity.memory"


# --- faults ------------------------------------------------------------------------------------------------------------


class InjectedError(Exception):
    pass


def failing(at: str) -> Callable[[str], None]:
    def fault(name: str) -> None:
        if name == at:
            raise InjectedError(name)

    return fault


CALLS: dict[str, Callable[[Backend, Any], Any]] = {
    "alloc": lambda b, x: b.alloc((2,), "f32"),
    "upload": lambda b, x: b.upload(x, np.zeros(x.shape, np.asarray(b.download(x)).dtype)),
    "download": lambda b, x: b.download(x),
    "scale": lambda b, x: b.stream.ops.scale(x, factor=2.0),
    "begin_capture": lambda b, x: b.stream.begin_capture(),
    "record": lambda b, x: b.stream.record(),
    "synchronize": lambda b, x: b.stream.synchronize(),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_injected_fault_comes_before_the_call_does_anything(backend: Backend, name: str) -> None:
    x = up(backend, np.ones((1, 3), np.float32))
    backend.fault = failing(name)
    try:
        with pytest.raises(InjectedError):
            CALLS[name](backend, x)
    finally:
        backend.fault = None
    assert not backend.stream.capturing
    assert down(backend, x).tolist() == [[1.0] * 3]


@pytest.mark.parametrize("name", ["begin_capture", "scale", "end_capture"])
def test_a_fault_in_a_capture_leaves_none_open(backend: Backend, name: str) -> None:
    x = up(backend, np.ones((1, 3), np.float32))

    def record() -> None:
        with backend.stream.capture():
            backend.stream.ops.scale(x, factor=2.0)

    backend.fault = failing(name)
    try:
        with pytest.raises(InjectedError):
            record()
    finally:
        backend.fault = None
    assert not backend.stream.capturing
    record()
    assert down(backend, x).tolist() == [[1.0] * 3]


def test_a_fault_at_launch(backend: Backend) -> None:
    x = up(backend, np.ones((1, 3), np.float32))
    with backend.stream.capture() as capture:
        backend.stream.ops.scale(x, factor=2.0)
    assert capture.graph is not None
    backend.fault = failing("launch")
    try:
        with pytest.raises(InjectedError):
            capture.graph.launch()
    finally:
        backend.fault = None
    assert down(backend, x).tolist() == [[1.0] * 3]
    capture.graph.launch()
    assert down(backend, x).tolist() == [[2.0] * 3]


def test_a_closed_backend_refuses(backend: Backend) -> None:
    other = type(backend)()
    x = up(other, np.ones((1, 3), np.float32))
    ops = other.stream.ops
    other.close()
    other.close()
    for call in (lambda: other.alloc((2,), "f32"), lambda: ops.scale(x, factor=2.0), lambda: other.download(x)):
        with pytest.raises(DeviceError) as caught:
            call()
        assert caught.value.code == "device.closed"
