"""Products with packed weights of every format, and the gates and caps around them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale.backends.base import Backend, PackedWeight, WeightPart
from metrale.errors import DeviceError, UnsupportedError
from tests.helpers import (
    BLOCK_FORMATS,
    FORMATS,
    assert_close,
    block_size,
    down,
    floats,
    poisoned,
    poisoned_q,
    q_values,
    quantized,
    random_part,
    scratch,
    up,
    up_q,
    widened,
)
from tests.ops.test_norm import assert_is_int8_of

every_format = pytest.mark.parametrize("form", FORMATS)
block_formats = pytest.mark.parametrize("form", BLOCK_FORMATS)
# Below, at and past panels of 16 outputs and tiles of a few rows.
SHAPES = [(1, 1, 1), (1, 17, 3), (2, 16, 1), (3, 33, 2), (7, 47, 3), (13, 5, 2), (33, 19, 1)]


def check_product(backend: Backend, out: np.ndarray, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> None:
    """Compare with x @ w.T + bias, relative to the sum of the absolute products.

    Formats with an offset multiply d * q and m apart, each up to about twice the weight itself: hence the factor.
    """
    want = x @ w.T + (0 if bias is None else bias)
    magnitude = 4 * (np.abs(x) @ np.abs(w).T) + (0 if bias is None else np.abs(bias))
    magnitude += 4 * np.abs(x).sum(-1, keepdims=True) * np.abs(w).mean()
    assert_close(out, want, backend.activation_dtype, n=w.shape[1], magnitude=magnitude)


@every_format
def test_pack_keeps_every_weight(backend: Backend, form: str) -> None:
    rng = np.random.default_rng(5)
    for n in (1, 16, 37):
        part = random_part(rng, form, n, 3 * block_size(form))
        weight = backend.pack([part])
        assert (weight.n, weight.k, weight.formats, weight.part_rows) == (n, part.k, (form,), (n,))
        assert weight.takes_q == (form in BLOCK_FORMATS)
        np.testing.assert_array_equal(backend.unpack(weight), widened(part).astype(np.float32))


def test_pack_stacks_parts_and_forgets_its_sources(backend: Backend) -> None:
    rng = np.random.default_rng(6)
    parts = [random_part(rng, form, n, 256) for form, n in (("q4_k", 19), ("q8_0", 5), ("q6_k", 32), ("q4_1", 1))]
    want = np.concatenate([widened(part) for part in parts]).astype(np.float32)
    weight = backend.pack(parts)
    for part in parts:
        part.data[...] = 0
    np.testing.assert_array_equal(backend.unpack(weight), want)


def test_packed_bytes_stay_packed(backend: Backend) -> None:
    for form in BLOCK_FORMATS:
        part = random_part(np.random.default_rng(1), form, 64, 512)
        assert backend.pack([part]).nbytes <= 1.1 * part.data.nbytes, form


def test_pack_refuses_unknown_formats_and_bad_shapes(backend: Backend) -> None:
    with pytest.raises(UnsupportedError) as unknown:
        backend.pack([WeightPart("iq2_xs", 3, 256, np.zeros((3, 74), np.uint8))])
    assert unknown.value.code == "weights.format"
    assert "iq2_xs" in str(unknown.value)
    rng = np.random.default_rng(1)
    for parts in ([random_part(rng, "q8_0", 3, 64), random_part(rng, "q8_0", 3, 96)],
                  [random_part(rng, "f32", 3, 64)._replace(n=4)]):
        with pytest.raises(DeviceError) as caught:
            backend.pack(parts)
        assert caught.value.code == "op.shape"
    with pytest.raises(DeviceError, match="bias"):
        backend.pack([random_part(rng, "f32", 3, 64)], np.zeros(4, np.float32))


@every_format
@pytest.mark.parametrize(("rows", "n", "blocks"), SHAPES)
def test_linear_of_floats(backend: Backend, form: str, rows: int, n: int, blocks: int) -> None:
    rng = np.random.default_rng(rows)
    part = random_part(rng, form, n, blocks * (block_size(form) if form in BLOCK_FORMATS else 35))
    x, out = floats(backend, rng, rows, part.k), poisoned(backend, rows, n)
    backend.stream.ops.linear(out, up(backend, x), backend.pack([part]))
    check_product(backend, down(backend, out), x.astype(np.float64), widened(part))


@block_formats
@pytest.mark.parametrize(("rows", "n", "blocks"), SHAPES)
def test_linear_of_int8(backend: Backend, form: str, rows: int, n: int, blocks: int) -> None:
    rng = np.random.default_rng(rows)
    part = random_part(rng, form, n, blocks * block_size(form))
    x, out = floats(backend, rng, rows, part.k), poisoned(backend, rows, n)
    backend.stream.ops.linear(out, up_q(backend, x), backend.pack([part]))
    check_product(backend, down(backend, out), q_values(quantized(x)), widened(part))


@given(rows=st.integers(1, 11), sizes=st.lists(st.tuples(st.sampled_from(FORMATS), st.integers(1, 41)), min_size=1, max_size=4),
       int8=st.booleans(), biased=st.booleans(), seed=st.integers(0, 999))
def test_linear_of_mixed_parts(
    backend: Backend, rows: int, sizes: list[tuple[str, int]], int8: bool, biased: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    parts = [random_part(rng, form, n, 256) for form, n in sizes]
    total = sum(n for _, n in sizes)
    bias = rng.standard_normal(total).astype(np.float32) if biased else None
    weight = backend.pack(parts, bias)
    x, out = floats(backend, rng, rows, 256), poisoned(backend, rows, total)
    int8 = int8 and weight.takes_q
    backend.stream.ops.linear(out, up_q(backend, x) if int8 else up(backend, x), weight)
    values = q_values(quantized(x)) if int8 else x.astype(np.float64)
    check_product(backend, down(backend, out), values, np.concatenate([widened(p) for p in parts]), bias)


def test_extreme_activations_and_weights(backend: Backend) -> None:
    """Largest products of every sign: no integer sum may overflow."""
    for form in BLOCK_FORMATS:
        part = random_part(np.random.default_rng(2), form, 21, 1024)
        raw = part.data.reshape(21 * 1024 // block_size(form), -1)
        for fill in (0x00, 0x7F, 0x80, 0xFF):
            packed = np.full_like(raw, fill)
            for offset in {"q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}.get(form, (0,)):
                packed[:, offset : offset + 2] = raw[:, offset : offset + 2]
            edge = part._replace(data=packed.reshape(part.data.shape))
            x = np.sign(np.random.default_rng(3).standard_normal((2, 1024))).astype(np.float32)
            x[0] = 1
            out = poisoned(backend, 2, 21)
            backend.stream.ops.linear(out, up_q(backend, x), backend.pack([edge]))
            check_product(backend, down(backend, out), x.astype(np.float64), widened(edge))


def test_poison_passes_through(backend: Backend) -> None:
    part = random_part(np.random.default_rng(1), "q4_1", 18, 96)
    weight = backend.pack([part])
    x = np.ones((3, 96), np.float32)
    x[1, 40] = np.nan
    for rows in (up(backend, x), None):
        if rows is None:
            rows = backend.alloc_q(3, 96)
            backend.stream.ops.quantize(rows, up(backend, x))
        out = poisoned(backend, 3, 18)
        backend.stream.ops.linear(out, rows, weight)
        got = down(backend, out)
        assert np.isnan(got[1]).all()
        assert np.isfinite(got[[0, 2]]).all()


def test_int8_rows_need_block_formats(backend: Backend) -> None:
    rng = np.random.default_rng(1)
    weight = backend.pack([random_part(rng, "q8_0", 3, 64), random_part(rng, "f16", 4, 64)])
    assert not weight.takes_q
    with pytest.raises(DeviceError) as caught:
        backend.stream.ops.linear(poisoned(backend, 2, 7), up_q(backend, floats(backend, rng, 2, 64)), weight)
    assert caught.value.code == "op.dtype"


def test_adapters_are_refused(backend: Backend) -> None:
    weight = backend.pack([random_part(np.random.default_rng(1), "f32", 3, 8)])
    with pytest.raises(UnsupportedError):
        backend.stream.ops.linear(poisoned(backend, 1, 3), poisoned(backend, 1, 8), weight, lora=object())


# --- around the products -----------------------------------------------------------------------------------------------


def gated(gate_up: np.ndarray, act: str) -> np.ndarray:
    gate, up_half = np.split(gate_up.astype(np.float64), 2, axis=1)
    if act == "silu":
        return gate / (1 + np.exp(-gate)) * up_half
    return 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up_half


acts = pytest.mark.parametrize("act", ["silu", "gelu_tanh"])


@acts
@given(rows=st.integers(1, 7), inner=st.sampled_from([1, 7, 16, 33, 130]), seed=st.integers(0, 99))
def test_act_mul(backend: Backend, act: str, rows: int, inner: int, seed: int) -> None:
    x = floats(backend, np.random.default_rng(seed), rows, 2 * inner, scale=4)
    out = poisoned(backend, rows, inner)
    backend.stream.ops.act_mul(out, up(backend, x), act=act)
    magnitude = np.abs(x[:, :inner] * x[:, inner:])  # gelu of a negative number is a small difference
    assert_close(down(backend, out), gated(x, act), backend.activation_dtype, n=9, magnitude=magnitude)


@acts
def test_act_mul_far_from_zero(backend: Backend, act: str) -> None:
    gate = np.array([[-1e4, -200.0, -90.0, -30.0, 0.0, 30.0, 90.0, 200.0, 1e4]], np.float32)
    x = np.concatenate([gate, np.full_like(gate, 0.5)], axis=1)
    out = poisoned(backend, 1, 9)
    backend.stream.ops.act_mul(out, up(backend, x), act=act)
    with np.errstate(over="ignore"):
        want = gated(x, act)
    assert_close(down(backend, out), want, backend.activation_dtype, magnitude=np.abs(want) + 1e-6)


@acts
def test_act_mul_to_int8(backend: Backend, act: str) -> None:
    x = floats(backend, np.random.default_rng(4), 5, 192)
    out = poisoned_q(backend, 5, 96)
    backend.stream.ops.act_mul(out, up(backend, x), act=act)
    assert_is_int8_of([backend.download(part) for part in out], gated(x, act))


def test_unknown_activation(backend: Backend) -> None:
    with pytest.raises((UnsupportedError, DeviceError), match="swish"):
        backend.stream.ops.act_mul(poisoned(backend, 1, 3), poisoned(backend, 1, 6), act="swish")


@given(rows=st.integers(1, 5), width=st.sampled_from([1, 33, 130]), cap=st.sampled_from([0.5, 30.0]), seed=st.integers(0, 99))
def test_softcap(backend: Backend, rows: int, width: int, cap: float, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32) * 50
    device = up(backend, x, "f32")
    backend.stream.ops.softcap(device, cap=cap)
    assert_close(down(backend, device), cap * np.tanh(x.astype(np.float64) / cap), "f32", n=9)


def weights(backend: Backend, rng: np.random.Generator, n: int, parts: int = 1) -> tuple[PackedWeight, np.ndarray]:
    made = [random_part(rng, form, n, 96) for form in ("q4_1", "q8_0")[:parts]]
    return backend.pack(made), np.concatenate([widened(part) for part in made])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rows", [1, 6])
def test_linear_residual(backend: Backend, rows: int, int8: bool) -> None:
    rng = np.random.default_rng(rows)
    weight, w = weights(backend, rng, 37)
    a, x = floats(backend, rng, rows, 37), floats(backend, rng, rows, 96)
    residual = up(backend, a)
    space = scratch(backend, backend.stream.ops.linear_residual_scratch_bytes(rows, weight))
    backend.stream.ops.linear_residual(residual, up_q(backend, x) if int8 else up(backend, x), weight, scratch=space)
    values = q_values(quantized(x)) if int8 else x.astype(np.float64)
    check_product(backend, down(backend, residual), values, w, a.astype(np.float64))


@acts
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rows", [1, 6])
def test_mlp_up(backend: Backend, rows: int, int8: bool, act: str) -> None:
    rng = np.random.default_rng(rows)
    weight, w = weights(backend, rng, 64, parts=2)
    x = floats(backend, rng, rows, 96, scale=0.2)
    out = poisoned_q(backend, rows, 64) if int8 else poisoned(backend, rows, 64)
    space = scratch(backend, backend.stream.ops.mlp_up_scratch_bytes(rows, weight))
    backend.stream.ops.mlp_up(out, up_q(backend, x) if int8 else up(backend, x), weight, act=act, scratch=space)
    values = q_values(quantized(x)) if int8 else x.astype(np.float64)
    want = gated(values @ w.T, act)
    if int8:
        parts = [backend.download(part) for part in out]
        steps = np.repeat(parts[1], 32, axis=1)
        assert np.all(np.abs(q_values(parts) - want) <= steps * 0.502)
    else:
        magnitude = 4 * (np.abs(values) @ np.abs(w).T)
        size = magnitude[:, :64] * magnitude[:, 64:] + magnitude[:, 64:] + magnitude[:, :64]
        assert_close(down(backend, out), want, backend.activation_dtype, n=96, magnitude=size)


@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.125, None), (1.0, 30.0), (0.5, 5.0)])
def test_head(backend: Backend, scale: float, cap: float | None) -> None:
    rng = np.random.default_rng(8)
    weight, w = weights(backend, rng, 83)
    x, out = floats(backend, rng, 3, 96), poisoned(backend, 3, 83, dtype="f32")
    backend.stream.ops.head(out, up(backend, x), weight, scale=scale, cap=cap)
    want = scale * (x.astype(np.float64) @ w.T)
    want = want if cap is None else cap * np.tanh(want / cap)
    assert_close(down(backend, out), want, "f32", n=96, magnitude=8 * scale * (np.abs(x) @ np.abs(w).T))


@pytest.mark.parametrize("op", ["linear_residual", "mlp_up"])
def test_too_little_scratch(backend: Backend, op: str) -> None:
    weight, _ = weights(backend, np.random.default_rng(1), 32, parts=2)
    x, out = poisoned(backend, 3, 96), poisoned(backend, 3, 64 if op == "linear_residual" else 32)
    need = getattr(backend.stream.ops, f"{op}_scratch_bytes")(3, weight)
    if need:
        params = {"scratch": scratch(backend, need - 1)} | ({"act": "silu"} if op == "mlp_up" else {})
        with pytest.raises(DeviceError) as caught:
            getattr(backend.stream.ops, op)(out, x, weight, **params)
        assert caught.value.code == "op.scratch"
