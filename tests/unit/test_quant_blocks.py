"""Block formats against the gguf package, and the int8 activations against their definition."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize as gguf_dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from metrale.errors import UnsupportedError, WeightError
from metrale.formats.gguf import TENSOR_TYPES
from metrale.formats.types import FORMATS
from metrale.quant.activations import dequantize_rows, quantize_rows
from metrale.quant.blocks import BLOCKS, dequantize, quantize

NAMES = tuple(BLOCKS)

# Largest error of the plain quantizer on uniform rows, as a part of a block's range: half a step, and for the k-quants
# half a step of the 6-bit scale and minimum besides.
STEP = {
    "q4_0": 1 / 16, "q4_1": 1 / 30, "q5_0": 1 / 32, "q5_1": 1 / 62, "q8_0": 1 / 254,
    "q4_k": 1 / 18, "q5_k": 1 / 30, "q6_k": 1 / 62,
}  # fmt: skip


def gguf_type(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name.upper()]


def random_rows(name: str, rows: int, k: int, seed: int) -> np.ndarray:
    """Return random bytes: every bit pattern of scales too, NaN and infinity included."""
    return np.random.default_rng(seed).integers(0, 256, (rows, BLOCKS[name].row_bytes(k)), np.uint8)


def test_table_equals_the_gguf_package() -> None:
    for kind, (block, nbytes) in gguf.GGML_QUANT_SIZES.items():
        form = FORMATS[TENSOR_TYPES[int(kind)]]
        assert (form.name, form.block, form.nbytes) == (kind.name.lower(), block, nbytes)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (3, 2), (17, 5)])
def test_dequantize_equals_the_gguf_package_bit_for_bit(name: str, rows: int, blocks: int) -> None:
    k = BLOCKS[name].block * blocks
    data = random_rows(name, rows, k, rows)
    with np.errstate(all="ignore"):
        want = gguf_dequantize(data, gguf_type(name))
    got = dequantize(name, data, k)
    assert got.dtype == np.float32
    assert got.shape == (rows, k)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    finite = ~np.isnan(want)
    np.testing.assert_array_equal(got[finite].view(np.uint32), want[finite].view(np.uint32))


@pytest.mark.parametrize("name", NAMES)
def test_dequantize_reads_strided_rows(name: str) -> None:
    k = BLOCKS[name].block * 3
    data = random_rows(name, 10, k, 5)
    np.testing.assert_array_equal(dequantize(name, data[::2], k), dequantize(name, data, k)[::2])


@pytest.mark.parametrize("name", NAMES)
def test_quantize_stays_within_its_step(name: str) -> None:
    block = BLOCKS[name].block
    x = np.random.default_rng(11).uniform(-1, 1, (7, block * 3)).astype(np.float32)
    x[2] = np.abs(x[2])
    x[3] *= 1e-3
    x[4] = 0
    packed = quantize(name, x)
    assert packed.shape == (7, BLOCKS[name].row_bytes(block * 3))
    again = dequantize(name, packed, block * 3)
    error = np.abs(again - x).reshape(7, 3, block).max(axis=-1)
    reach = x.reshape(7, 3, block)
    span = np.maximum(reach.max(axis=-1), 0) - np.minimum(reach.min(axis=-1), 0)
    assert (error <= 1.05 * STEP[name] * span + 1e-7).all(), (error / np.maximum(span, 1e-30)).max()


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("_k")])
def test_quantize_is_about_as_good_as_the_gguf_package(name: str) -> None:
    x = np.random.default_rng(3).standard_normal((5, 32 * 7)).astype(np.float32)
    theirs = gguf_dequantize(gguf.quants.quantize(x, gguf_type(name)), gguf_type(name))
    ours = dequantize(name, quantize(name, x), x.shape[1])
    assert np.square(ours - x).mean() <= 1.02 * np.square(theirs - x).mean()


def test_what_dequantize_refuses() -> None:
    with pytest.raises(UnsupportedError, match=r"^iq4_xs: expected one of q4_0, .*, got .*; requantize") as caught:
        dequantize("iq4_xs", np.zeros((1, 136), np.uint8), 256)
    assert caught.value.code == "unsupported.block_format"
    with pytest.raises(WeightError, match=r"^q4_k rows: expected a multiple of 256 columns, got 288; ") as refused:
        quantize("q4_k", np.zeros((2, 288), np.float32))
    assert refused.value.code == "weights.row_length"
    for data in (np.zeros((2, 35), np.uint8), np.zeros((2, 36), np.int8), np.zeros(36, np.uint8)):
        with pytest.raises(WeightError, match=r"^q4_0 rows: expected \(N, 36\) uint8 for 64 columns, got .*; pass") as refused:
            dequantize("q4_0", data, 64)
        assert refused.value.code == "weights.row_length"


# --- activations ---------------------------------------------------------------------------------------------------


def plain_quantize(row: np.ndarray) -> tuple[list[int], list[np.float32]]:
    """Quantize one row as the contract words it, value by value."""
    q, scales = [], []
    for start in range(0, len(row), 32):
        block = row[start : start + 32]
        amax = np.float32(np.abs(block).max())
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.float32(127) / amax
        if np.isinf(inverse):
            scales.append(np.float32(0))
            q += [0] * 32
        else:
            scales.append(amax / np.float32(127))
            q += [round(float(x * inverse)) for x in block]  # Python rounds half to even
    return q, scales


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.integers(1, 3).map(lambda n: 32 * n)),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
)
def test_activations_follow_their_definition(x: np.ndarray) -> None:
    q = quantize_rows(x)
    assert (q.data.dtype, q.scales.dtype, q.sums.dtype) == (np.int8, np.float32, np.int16)
    for row in range(len(x)):
        data, scales = plain_quantize(x[row])
        np.testing.assert_array_equal(q.data[row], data)
        np.testing.assert_array_equal(q.scales[row], scales)
    np.testing.assert_array_equal(q.sums, q.data.astype(int).reshape(len(x), -1, 16).sum(axis=-1))


def test_activations_round_half_to_even_and_use_the_whole_range() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :6] = [127, -127, 0.5, 1.5, 2.5, -0.5]
    assert quantize_rows(x).data[0, :6].tolist() == [127, -127, 0, 2, 2, 0]


def test_activations_of_zeros_and_of_tiny_values_are_zero() -> None:
    for value in (0.0, 1e-40, 3e-37):
        q = quantize_rows(np.full((2, 64), value, np.float32))
        assert not q.data.any()
        assert not q.scales.any()


def test_activations_keep_poison_visible() -> None:
    x = np.ones((3, 96), np.float32)
    x[0, 40], x[2, 95] = np.nan, -np.inf
    q = quantize_rows(x)
    assert np.isnan(q.scales[0, 1])
    assert np.isposinf(q.scales[2, 2])
    assert np.isfinite(q.scales[1]).all()
    assert not q.data[0, 32:64].any()
    assert (q.data[0, :32] == 127).all()
    with np.errstate(invalid="ignore"):
        assert np.isnan(dequantize_rows(q)[2, 64:]).all()


def test_activations_refuse_a_ragged_row() -> None:
    with pytest.raises(ValueError, match="x: expected rows of a multiple of 32, got 48; pad"):
        quantize_rows(np.zeros((1, 48), np.float32))
