"""Adding, scaling and normalising rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale.backends.base import Backend
from tests.helpers import assert_close, down, floats, poisoned, poisoned_q, q_values, up

widths = st.sampled_from([1, 5, 16, 31, 64, 97, 129, 576])


def normed(x: np.ndarray, weight: np.ndarray, eps: float, offset: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + np.float32(eps)) * (offset + weight.astype(np.float64))


@given(rows=st.integers(1, 7), width=widths, seed=st.integers(0, 99))
def test_add_and_scale(backend: Backend, rows: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = floats(backend, rng, rows, width), floats(backend, rng, rows, width)
    x = up(backend, a)
    backend.stream.ops.add(x, up(backend, b))
    assert_close(down(backend, x), a.astype(np.float64) + b, backend.activation_dtype)
    x = up(backend, a)
    backend.stream.ops.scale(x, factor=1.7)
    assert_close(down(backend, x), a * np.float64(np.float32(1.7)), backend.activation_dtype)


@given(rows=st.integers(1, 7), width=widths, offset=st.sampled_from([0.0, 1.0]), cast_first=st.booleans(),
       seed=st.integers(0, 99))
def test_rms_norm(backend: Backend, rows: int, width: int, offset: float, cast_first: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = floats(backend, rng, rows, width, scale=10.0 ** rng.integers(-3, 4))
    weight = rng.standard_normal(width).astype(np.float32)
    out = poisoned(backend, rows, width)
    backend.stream.ops.rms_norm(out, up(backend, x), up(backend, weight, "f32"), eps=1e-5, offset=offset, cast_first=cast_first)
    assert_close(down(backend, out), normed(x, weight, 1e-5, offset), backend.activation_dtype, n=width)


@pytest.mark.parametrize("heads", [1, 3])
def test_rms_norm_of_heads_and_in_place(backend: Backend, heads: int) -> None:
    rng = np.random.default_rng(3)
    x, weight = floats(backend, rng, 5, heads, 23), rng.standard_normal(23).astype(np.float32)
    buffer = up(backend, x)
    backend.stream.ops.rms_norm(buffer, buffer, up(backend, weight, "f32"), eps=1e-6, offset=0.0, cast_first=True)
    assert_close(down(backend, buffer), normed(x, weight, 1e-6, 0.0), backend.activation_dtype, n=23)


def test_rms_norm_of_zeros_and_of_large_values(backend: Backend) -> None:
    x = np.zeros((3, 33), np.float32)
    x[1] = 1e4
    out = poisoned(backend, 3, 33)
    backend.stream.ops.rms_norm(out, up(backend, x), up(backend, np.ones(33), "f32"), eps=1e-6, offset=0.0, cast_first=False)
    assert_close(down(backend, out), normed(x, np.ones(33), 1e-6, 0.0), backend.activation_dtype, n=33)


@given(rows=st.integers(1, 5), width=st.sampled_from([32, 96, 576]), seed=st.integers(0, 99))
def test_rms_norm_to_int8(backend: Backend, rows: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, weight = floats(backend, rng, rows, width), rng.standard_normal(width).astype(np.float32)
    out = poisoned_q(backend, rows, width)
    backend.stream.ops.rms_norm(out, up(backend, x), up(backend, weight, "f32"), eps=1e-5, offset=0.0, cast_first=False)
    assert_is_int8_of([backend.download(a) for a in out], normed(x, weight, 1e-5, 0.0))


def assert_is_int8_of(parts: list[np.ndarray], want: np.ndarray) -> None:
    """Check a quantized result: scales to rounding, values within half a step (and its rounding), sums exactly."""
    data, scales, sums = parts
    rows, k = want.shape
    blocks = np.abs(want).reshape(rows, k // 32, 32)
    assert_close(scales, blocks.max(-1) / 127, "f32", n=k)
    assert np.all(np.abs(q_values(parts) - want) <= np.repeat(scales, 32, axis=1) * (0.5 + 1e-3))
    np.testing.assert_array_equal(sums, data.reshape(rows, k // 16, 16).sum(-1, dtype=np.int16))


@given(rows=st.integers(1, 7), width=widths, seed=st.integers(0, 99))
def test_add_rms_norm(backend: Backend, rows: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b, weight = floats(backend, rng, rows, width), floats(backend, rng, rows, width), rng.standard_normal(width)
    weight = weight.astype(np.float32)
    residual, out = up(backend, a), poisoned(backend, rows, width)
    device_weight = up(backend, weight, "f32")
    backend.stream.ops.add_rms_norm(out, residual, up(backend, b), device_weight, eps=1e-5, offset=1.0, cast_first=True)
    assert_close(down(backend, residual), a.astype(np.float64) + b, backend.activation_dtype)
    want = normed(down(backend, residual), weight, 1e-5, 1.0)
    assert_close(down(backend, out), want, backend.activation_dtype, n=width, magnitude=np.abs(want) + 1e-2)


@given(rows=st.integers(1, 5), width=st.sampled_from([32, 96, 576]), seed=st.integers(0, 99))
def test_add_rms_norm_to_int8(backend: Backend, rows: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b, weight = floats(backend, rng, rows, width), floats(backend, rng, rows, width), rng.standard_normal(width)
    weight = weight.astype(np.float32)
    residual, out = up(backend, a), poisoned_q(backend, rows, width)
    device_weight = up(backend, weight, "f32")
    backend.stream.ops.add_rms_norm(out, residual, up(backend, b), device_weight, eps=1e-5, offset=0.0, cast_first=False)
    summed = down(backend, residual)
    assert_close(summed, a.astype(np.float64) + b, backend.activation_dtype)
    assert_is_int8_of([backend.download(x) for x in out], normed(summed, weight, 1e-5, 0.0))


@given(rows=st.integers(1, 7), width=widths, seed=st.integers(0, 99))
def test_norm_add(backend: Backend, rows: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b, weight = floats(backend, rng, rows, width), floats(backend, rng, rows, width), rng.standard_normal(width)
    weight = weight.astype(np.float32)
    residual = up(backend, a)
    backend.stream.ops.norm_add(residual, up(backend, b), up(backend, weight, "f32"), eps=1e-5, offset=1.0, cast_first=False)
    step = normed(b, weight, 1e-5, 1.0)
    assert_close(down(backend, residual), a + step, backend.activation_dtype, n=width, magnitude=np.abs(a) + 2 * np.abs(step))
