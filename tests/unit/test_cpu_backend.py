"""The CPU backend's memory, copies, K/V pages, options, tracing and the hook that makes calls fail."""

from __future__ import annotations

import gc
import logging

import numpy as np
import pytest

from metrale._ext.arena import Arena
from metrale.backends.base import BLOCK_TOKENS
from metrale.backends.cpu.backend import CpuBackend
from metrale.backends.cpu.emit import Emitter
from metrale.errors import CapacityError, ConfigError, DeviceError
from tests.toys import FAIL_AT, emit_affine


@pytest.fixture
def backend():
    opened = CpuBackend(threads=2, streams="eager")
    yield opened
    opened.close()


def test_arrays_are_aligned_typed_and_shaped(backend):
    wanted = (((3, 5), "f32", "float32"), ((7,), "i8", "int8"), ((), "i64", "int64"), ((0, 4), "bf16", "uint16"))
    for shape, dtype, numpy_name in wanted:
        x = backend.alloc(shape, dtype, zero=True)
        assert (x.shape, x.dtype.name) == (shape, numpy_name)
        assert x.flags.carray
        assert not x.any()
        assert x.size == 0 or x.ctypes.data % 64 == 0


def test_what_was_not_asked_to_be_zero_reads_as_nan(backend):
    assert np.isnan(backend.alloc((3, 5), "f32")).all()
    assert (backend.alloc((3, 5), "i16") == -1).all()


def test_large_memory_is_touched_only_where_used(backend):
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    x = backend.alloc((1 << 28,), "f32", zero=True)  # 1 GiB
    assert x.ctypes.data % (2 << 20) == 0
    x[123456789] = 3
    assert x[[123456789, 5]].tolist() == [3, 0]
    assert resident() - before < 64 << 20


def test_the_arena_knows_what_is_alive():
    arena = Arena()
    blocks = [arena.alloc(size) for size in (1, 100, 5000, 3 << 20, 0)]
    for block, size in zip(blocks, (1, 100, 5000, 3 << 20, 0), strict=True):
        assert len(block) == size
        assert arena.contains(block.address, size)
        assert not arena.contains(block.address - 1, 1)
        assert not arena.contains(block.address + 1, max(size, 1))
    assert len(arena) == 5
    view, address = np.frombuffer(blocks[2], np.uint8)[17:], blocks[2].address
    del blocks, block
    gc.collect()
    assert len(arena) == 1  # the view holds it
    assert arena.contains(address, 5000)
    assert arena.nbytes == 5000
    del view
    gc.collect()
    assert (len(arena), arena.nbytes) == (0, 0)
    assert not arena.contains(address, 1)
    with pytest.raises(MemoryError):
        arena.alloc((1 << 62) + 1)
    assert len(arena) == 0


def test_too_much_memory_is_a_capacity_error(backend):
    before = len(backend.arena)
    for size in (1 << 45, 1 << 61):
        with pytest.raises(CapacityError) as caught:
            backend.alloc((size,), "f32")
        assert caught.value.code == "capacity.memory"
    assert len(backend.arena) == before
    free, total = backend.memory()
    assert 0 < free <= total


def test_bad_allocations(backend):
    for shape, dtype in (((3,), "f33"), ((-1, 4), "f32")):
        with pytest.raises(DeviceError) as caught:
            backend.alloc(shape, dtype)
        assert caught.value.code == "op.dtype"


def test_copies(backend):
    x = backend.alloc((3, 5), "f32")
    host = np.arange(15, dtype=np.float32).reshape(3, 5)
    backend.upload(x, host)
    host += 1
    copy = backend.download(x)
    np.testing.assert_array_equal(copy, host - 1)
    x += 5
    np.testing.assert_array_equal(copy, host - 1)
    backend.upload(x[1], host[0])
    np.testing.assert_array_equal(backend.download(x[1]), host[0])
    with pytest.raises(DeviceError) as caught:
        backend.upload(x, host[:2])
    assert caught.value.code == "op.shape"
    with pytest.raises(DeviceError) as caught:
        backend.upload(x, host.astype(np.float64))
    assert caught.value.code == "op.dtype"
    with pytest.raises(DeviceError):
        backend.upload(x, host, CpuBackend(threads=1).stream)


def test_pinned_memory_is_zero_and_its_own_view(backend):
    pinned = backend.alloc_pinned((3, 7), "i32")
    assert not pinned.any()
    assert backend.device_view(pinned) is pinned


def test_kv_pages(backend):
    layer = backend.alloc_kv(5, 3, 24)
    assert (layer.k.shape, layer.v.shape) == ((5, 3, 24, BLOCK_TOKENS), (5, 3, BLOCK_TOKENS, 24))
    assert not layer.k.any()
    assert not layer.v.any()
    layer.k[2, 1, 7, 9] = 4  # head 1, dim 7, token 9
    layer.v[2, 1, 9, 7] = 5
    k, v = backend.kv_read(layer, 2)
    assert k.shape == v.shape == (BLOCK_TOKENS, 3, 24)
    assert (k[9, 1, 7], v[9, 1, 7], k.sum(), v.sum()) == (4, 5, 4, 5)
    assert backend.kv_block_bytes(3, 24) * 5 == layer.k.nbytes + layer.v.nbytes


def test_options(monkeypatch):
    assert CpuBackend(threads=1).int8_activations
    assert not CpuBackend(threads=1, activations="f32").int8_activations
    for options, code in (({"activations": "f16"}, "config.activations"), ({"streams": "late"}, "config.streams"),
                          ({"isa": "mmx"}, "config.isa"), ({"threads": 0}, "engine.threads")):
        with pytest.raises(ConfigError) as caught:
            CpuBackend(**options)
        assert caught.value.code == code
    monkeypatch.setenv("METRALE_STREAMS", "deferred")
    assert CpuBackend(threads=1).stream.deferred
    assert not CpuBackend(threads=1, streams="eager").stream.deferred


def test_two_backends_do_not_share_anything():
    one, two = CpuBackend(threads=1), CpuBackend(threads=2)
    x = one.alloc((3,), "f32", zero=True)
    one.close()
    y = two.alloc((3,), "f32", zero=True)
    emit_affine(Emitter(two.stream), y, y, 1, 2)
    assert y.tolist() == [2, 2, 2]
    assert x.tolist() == [0, 0, 0]  # closing lets go of memory, it does not take it away
    two.close()


def test_a_closed_backend_refuses_every_call():
    backend = CpuBackend(threads=2, streams="eager")
    x = backend.alloc((3,), "f32", zero=True)
    stream, ops = backend.stream, Emitter(backend.stream)
    with stream.capture() as cap:
        emit_affine(ops, x, x, 1, 1)
    event = stream.record()
    backend.close()
    backend.close()
    for use in (lambda: backend.alloc((3,), "f32"), lambda: backend.alloc_pinned((3,), "f32"), lambda: backend.upload(x, x),
                lambda: backend.download(x), backend.new_stream, stream.begin_capture, stream.record, stream.synchronize,
                lambda: stream.wait(event), event.query, event.synchronize, cap.graph.launch,
                lambda: emit_affine(ops, x, x, 1, 1), lambda: backend.alloc_kv(1, 1, 1)):
        with pytest.raises(DeviceError) as caught:
            use()
        assert caught.value.code == "device.closed"
    assert not x.any()
    cap.graph.destroy()
    stream.abort_capture()


def all_calls(backend, seen=None):
    """Make every kind of call once; returns the array that all of it changes."""
    x = backend.alloc((5,), "f32", zero=True)
    pinned = backend.alloc_pinned((5,), "f32")
    pinned[:] = 1
    stream = backend.stream
    backend.upload(x, pinned)
    ops = Emitter(stream)
    emit_affine(ops, x, x, 1, 1)
    with stream.capture() as cap:
        emit_affine(ops, x, x, 2, 0)
    cap.graph.launch()
    second = backend.new_stream()
    event = stream.record()
    second.wait(event)
    event.query()
    event.synchronize()
    stream.synchronize()
    return backend.download(x)


@pytest.mark.parametrize("streams", ["eager", "deferred"])
def test_every_call_can_be_made_to_fail(streams):
    names = []
    backend = CpuBackend(threads=1, streams=streams)
    backend.fault = names.append
    assert all_calls(backend).tolist() == [4] * 5
    assert names == ["alloc", "alloc_pinned", "upload", "affine", "begin_capture", "affine", "end_capture", "launch",
                     "new_stream", "record", "wait", "query", "synchronize", "synchronize", "download"]
    for place in range(len(names)):
        left = iter(range(place))

        def fail(name, left=left):
            if next(left, None) is None:
                raise DeviceError(f"injected at {name}", code="test.injected")

        backend.fault = fail
        with pytest.raises(DeviceError) as caught:
            all_calls(backend)
        assert caught.value.code == "test.injected"
        assert not backend.stream.capturing
        assert not backend.recording
        backend.fault = None
        assert all_calls(backend).tolist() == [4] * 5
    backend.close()


def test_a_failed_kernel_leaves_the_backend_usable(backend):
    ops, calls = Emitter(backend.stream), backend.alloc((6,), "i64", zero=True)
    with pytest.raises(DeviceError) as caught:
        ops.emit("toy", FAIL_AT, 6, (calls, 3, 17))
    assert caught.value.code == "device.kernel"
    assert all_calls(backend).tolist() == [4] * 5


def test_trace_shows_ops_shapes_and_values_that_are_not_finite(monkeypatch, caplog):
    monkeypatch.setenv("METRALE_TRACE", "3")
    backend = CpuBackend(threads=1, streams="eager")
    x = backend.alloc((5,), "f32", zero=True)
    ops = Emitter(backend.stream)
    with caplog.at_level(logging.INFO, logger="metrale"):
        emit_affine(ops, x, x, 1, 2)
        assert "affine(float32[5], float32[5], 5, 1.0, 2.0) in 3 tiles" in caplog.text
        assert "finite" not in caplog.text
        with backend.stream.capture() as cap:
            emit_affine(ops, x, x, np.inf, 0)
        assert "inf" not in caplog.text
        cap.graph.launch()
        assert "affine: 5 of 5 values of its destination are not finite" in caplog.text
    backend.close()
