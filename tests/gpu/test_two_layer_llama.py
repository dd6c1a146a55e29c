"""A two-layer llama on the GPU: captured = eager = reference, and a failed capture costs nothing but itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from metrale.backends.reference import ReferenceBackend
from metrale.errors import CaptureError, DeviceError
from metrale.model.plan import RowSampling
from tests.gpu.conftest import OpenCuda
from tests.helpers import assert_close, down, up
from tests.model import tiny

pytestmark = pytest.mark.gpu
STEPS = 32
SAMPLED = RowSampling(temperature=0.9, top_k=20, top_p=0.95, seed=71, repetition=1.1)
kinds = pytest.mark.parametrize(("fmt", "activations"), [("f32", "f32"), ("q8_0", "f32"), ("q8_0", "int8")])


@kinds
@pytest.mark.parametrize("sampling", [tiny.GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_captured_equals_eager_equals_the_reference(
    open_cuda_backend: OpenCuda, fmt: str, activations: str, sampling: RowSampling
) -> None:
    backend = open_cuda_backend(activations=activations)
    captured = tiny.open_model(backend, fmt=fmt)
    eager = tiny.open_model(backend, fmt=fmt, graphs=False)
    reference = tiny.open_model(ReferenceBackend(activations=activations), fmt=fmt)
    prompt = tiny.prompt(21)
    tokens = tiny.generate(captured, prompt, STEPS, sampling)
    assert len(tokens) == STEPS
    assert tokens == tiny.generate(eager, prompt, STEPS, sampling)
    assert tokens == tiny.generate(reference, prompt, STEPS, sampling)
    assert (captured.stats.graph_captures, captured.stats.graph_replays, captured.stats.eager_steps) == (1, STEPS - 1, 0)
    assert (eager.stats.graph_captures, eager.stats.eager_steps) == (0, STEPS - 1)
    assert captured.check_guards() == eager.check_guards() == ()


@kinds
def test_logits_are_the_reference_s(open_cuda_backend: OpenCuda, fmt: str, activations: str) -> None:
    tokens = tiny.prompt(50, seed=5)
    got = tiny.open_model(open_cuda_backend(activations=activations), fmt=fmt).score(tokens)
    want = tiny.open_model(ReferenceBackend(activations=activations), fmt=fmt).score(tokens)
    # int8 activations: a sum rounded the other way may move a value to the next of 255 steps.
    tolerance = 0.05 if activations == "int8" else 2e-5
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=tolerance * float(np.abs(want).max()), rtol=0)


def test_a_replay_follows_the_rows(open_cuda_backend: OpenCuda) -> None:
    """Rows come, go and move between replays of one graph; every sequence decodes as it does alone."""
    backend = open_cuda_backend()
    model, alone = tiny.open_model(backend), tiny.open_model(ReferenceBackend())
    prompts = {seq: tiny.prompt(5 + 7 * seq, seed=seq) for seq in (1, 2, 3, 4)}
    for seq in (1, 2):
        tiny.start(model, seq, prompts[seq])
    tiny.continue_(model, (1, 2), 3)
    model.free_sequence(1)
    tiny.start(model, 3, prompts[3])
    tiny.continue_(model, (3, 2), 4)
    tiny.start(model, 4, prompts[4])
    model.free_sequence(2)
    model.compact()
    tiny.continue_(model, (4, 3), 17)  # past the end of a block
    assert model.stats.graph_captures == 1
    assert model.stats.graph_replays == 24
    for seq, steps in ((3, 22), (4, 18)):
        got = list(model.sequence(seq).tokens[len(prompts[seq]) :])
        assert got == tiny.generate(alone, prompts[seq], steps)


def test_padding_rows_change_nothing(open_cuda_backend: OpenCuda) -> None:
    """Three sequences run as a batch of four."""
    model, alone = tiny.open_model(open_cuda_backend()), tiny.open_model(ReferenceBackend())
    prompts = [tiny.prompt(9 + n, seed=n) for n in range(3)]
    for n, prompt in enumerate(prompts):
        tiny.start(model, n, prompt)
    for prompt, got in zip(prompts, tiny.continue_(model, (0, 1, 2), 20), strict=True):
        assert got == tiny.generate(alone, prompt, 21)
    assert [key[1] for key in model.graph_keys()] == [4]


def test_replays_allocate_nothing_and_cupy_s_own_pool_is_untouched(device: Any) -> None:
    cupy = device.cupy
    before = cupy.get_default_memory_pool().total_bytes(), cupy.cuda.get_allocator()
    model = tiny.open_model(device)
    tiny.start(model, 1, tiny.prompt(11))
    tiny.continue_(model, (1,), 2)
    used = device._pool.used_bytes()
    tiny.continue_(model, (1,), 20)
    assert device._pool.used_bytes() == used
    assert (cupy.get_default_memory_pool().total_bytes(), cupy.cuda.get_allocator()) == before


def test_two_engines_in_one_process(open_cuda_backend: OpenCuda) -> None:
    models = [tiny.open_model(open_cuda_backend()), tiny.open_model(open_cuda_backend(activations="int8"), fmt="q8_0")]
    for model in models:
        tiny.start(model, 1, tiny.prompt(13))
    for _ in range(10):
        for model in models:
            model.decode_batch((1,))
    for model, (fmt, activations) in zip(models, (("f32", "f32"), ("q8_0", "int8")), strict=True):
        reference = tiny.open_model(ReferenceBackend(activations=activations), fmt=fmt)
        assert list(model.sequence(1).tokens[13:]) == tiny.generate(reference, tiny.prompt(13), 11)


# --- captures that fail ------------------------------------------------------------------------------------------------


def test_a_failing_capture_runs_the_step_eagerly(device: Any) -> None:
    model, alone = tiny.open_model(device), tiny.open_model(ReferenceBackend())
    tiny.start(model, 1, tiny.prompt(11))

    def fault(name: str) -> None:
        if name == "kv_write" and device.stream.capturing:
            raise DeviceError("kv_write: injected", code="device.test")

    device.fault = fault
    tiny.continue_(model, (1,), 2)
    device.fault = None
    assert (model.stats.graph_captures, model.stats.eager_steps) == (0, 2)
    got = tiny.continue_(model, (1,), 8)[0]
    assert (model.stats.graph_captures, model.stats.graph_replays) == (1, 8)
    assert got == tiny.generate(alone, tiny.prompt(11), 11)


def still_usable(backend: Any, x: Any) -> None:
    """Check that nothing of the failed capture ran, and that eager work and a new capture do."""
    assert not backend.stream.capturing
    assert down(backend, x).tolist() == [[1.0] * 3]
    with backend.stream.capture() as capture:
        backend.stream.ops.scale(x, factor=2.0)
    capture.graph.launch()
    backend.stream.ops.scale(x, factor=3.0)
    assert down(backend, x).tolist() == [[6.0] * 3]


def test_an_array_that_cupy_would_allocate_breaks_the_capture(device: Any) -> None:
    x = up(device, np.ones((1, 3), np.float32))

    def record() -> None:
        with device.stream.capture():
            device.stream.ops.scale(x, factor=5.0)
            device.cupy.zeros(3)

    with pytest.raises(CaptureError) as caught:
        record()
    assert caught.value.code == "capture.alloc"
    still_usable(device, x)


def test_a_wait_the_driver_refuses_breaks_the_capture(device: Any) -> None:
    """Behind the backend's back, so that the driver itself gives the recording up."""
    x = up(device, np.ones((1, 3), np.float32))
    runtime = device.cupy.cuda.runtime

    def record() -> None:
        with device.stream.capture():
            device.stream.ops.scale(x, factor=5.0)
            with pytest.raises(RuntimeError):
                runtime.streamSynchronize(device.stream.handle.ptr)

    with pytest.raises(CaptureError) as caught:
        record()
    assert caught.value.code == "capture.broken"
    still_usable(device, x)


def test_pinned_memory_outlives_the_backend(open_cuda_backend: OpenCuda) -> None:
    backend = open_cuda_backend()
    pinned = backend.alloc_pinned((3, 5), "i32")
    view = backend.device_view(pinned[1:])
    assert view.shape == (2, 5)
    with pytest.raises(DeviceError, match="alloc_pinned"):
        backend.device_view(np.zeros(3, np.int32))
    x = up(backend, np.arange(10).reshape(2, 5))
    backend.stream.ops.gather_rows(view, x, up(backend, [1, 0]))
    backend.stream.synchronize()
    assert pinned.tolist() == [[0] * 5, [5, 6, 7, 8, 9], [0, 1, 2, 3, 4]]
    backend.close()
    pinned[0] = 3
    assert_close(pinned[0], [3] * 5)
