"""Norms on the CPU: the fused forms equal their primitives bit for bit, a row equals itself in any batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from metrale.backends.base import QTensor
from metrale.backends.cpu.backend import CpuBackend
from metrale.quant.activations import quantize_rows
from tests.helpers import down, floats, poisoned, poisoned_q, up

WIDTHS = [32, 96, 576, 2048]
NORM = {"eps": 1e-5, "offset": 1.0, "cast_first": False}


@pytest.fixture(scope="module")
def cpu() -> Iterator[CpuBackend]:
    opened = CpuBackend(threads=2)
    yield opened
    opened.close()


def parts(b: CpuBackend, q: QTensor) -> list[np.ndarray]:
    return [b.download(a) for a in q]


@pytest.mark.parametrize("width", WIDTHS)
def test_int8_is_the_quantized_float_result(cpu: CpuBackend, width: int) -> None:
    rng = np.random.default_rng(width)
    x, weight = floats(cpu, rng, 9, width), up(cpu, rng.standard_normal(width), "f32")
    x[1, :32], x[2, 3], x[3, 30], x[4] = 0, np.nan, np.inf, 1e-30
    plain, q = poisoned(cpu, 9, width), poisoned_q(cpu, 9, width)
    cpu.stream.ops.rms_norm(plain, up(cpu, x), weight, **NORM)
    cpu.stream.ops.rms_norm(q, up(cpu, x), weight, **NORM)
    for got, want in zip(parts(cpu, q), quantize_rows(cpu.download(plain)), strict=True):
        np.testing.assert_array_equal(got, want)
    separate = poisoned_q(cpu, 9, width)
    cpu.stream.ops.quantize(separate, plain)
    for got, want in zip(parts(cpu, q), parts(cpu, separate), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm_equals_add_then_norm(cpu: CpuBackend, width: int, quantized: bool) -> None:
    rng = np.random.default_rng(width)
    a, b, weight = floats(cpu, rng, 7, width), floats(cpu, rng, 7, width), up(cpu, rng.standard_normal(width), "f32")
    outs = [poisoned_q(cpu, 7, width) if quantized else poisoned(cpu, 7, width) for _ in range(2)]
    first, second, x = up(cpu, a), up(cpu, a), up(cpu, b)
    cpu.stream.ops.add_rms_norm(outs[0], first, x, weight, **NORM)
    cpu.stream.ops.add(second, x)
    cpu.stream.ops.rms_norm(outs[1], second, weight, **NORM)
    np.testing.assert_array_equal(cpu.download(first), cpu.download(second))
    fused, apart = (parts(cpu, out) if quantized else [cpu.download(out)] for out in outs)
    for mine, theirs in zip(fused, apart, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("width", [5, *WIDTHS])
def test_norm_add_equals_norm_then_add(cpu: CpuBackend, width: int) -> None:
    rng = np.random.default_rng(width)
    a, b, weight = floats(cpu, rng, 7, width), floats(cpu, rng, 7, width), up(cpu, rng.standard_normal(width), "f32")
    first, second, x, y = up(cpu, a), up(cpu, a), up(cpu, b), up(cpu, b)
    cpu.stream.ops.norm_add(first, x, weight, **NORM)
    cpu.stream.ops.rms_norm(y, y, weight, **NORM)
    cpu.stream.ops.add(second, y)
    np.testing.assert_array_equal(cpu.download(first), cpu.download(second))
    np.testing.assert_array_equal(cpu.download(x), cpu.download(y))


@pytest.mark.parametrize("width", [33, 576])
def test_a_row_is_the_same_in_any_batch(cpu: CpuBackend, width: int) -> None:
    rng = np.random.default_rng(width)
    x, weight = floats(cpu, rng, 130, width), up(cpu, rng.standard_normal(width), "f32")
    together = poisoned(cpu, 130, width)
    cpu.stream.ops.rms_norm(together, up(cpu, x), weight, **NORM)
    for t in (0, 1, 64, 129):
        alone = poisoned(cpu, 1, width)
        cpu.stream.ops.rms_norm(alone, up(cpu, x[t : t + 1]), weight, **NORM)
        np.testing.assert_array_equal(down(cpu, alone)[0], down(cpu, together)[t])


def test_rows_with_gaps_between_them(cpu: CpuBackend) -> None:
    """Views into a wider buffer: only their own columns change."""
    rng = np.random.default_rng(4)
    wide, weight = floats(cpu, rng, 5, 150), up(cpu, rng.standard_normal(40), "f32")
    buffer, dense, want = up(cpu, wide), up(cpu, wide[:, 60:100]), poisoned(cpu, 5, 40)
    cpu.stream.ops.rms_norm(want, dense, weight, **NORM)
    cpu.stream.ops.rms_norm(buffer[:, 100:140], buffer[:, 60:100], weight, **NORM)
    expected = wide.copy()
    expected[:, 100:140] = cpu.download(want)
    cpu.stream.ops.add(buffer[:, :60], up(cpu, np.ones((5, 60), np.float32)))
    expected[:, :60] += 1
    np.testing.assert_array_equal(cpu.download(buffer), expected)


@pytest.mark.parametrize("width", [1, 63, 16384, 16385, 50000])
def test_rows_wider_than_a_tile(cpu: CpuBackend, width: int) -> None:
    rng = np.random.default_rng(width)
    x = floats(cpu, rng, 3, width, scale=30)
    x[1, 0], x[2, -1] = np.nan, np.inf
    scaled, capped = up(cpu, x), up(cpu, x)
    cpu.stream.ops.scale(scaled, factor=0.3)
    np.testing.assert_array_equal(cpu.download(scaled), x * np.float32(0.3))
    cpu.stream.ops.softcap(capped, cap=30.0)
    want = 30 * np.tanh(x.astype(np.float64) / 30)
    np.testing.assert_allclose(cpu.download(capped), want, rtol=4e-7, atol=1e-7)
