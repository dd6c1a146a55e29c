"""The C kernels of every instruction set, called by address: equal bits whatever the set, the tiles and the other rows.

The slow tests compile `variant_bits.c`: with emulated AVX-512 and AVX-VNNI, and for aarch64 under qemu. On a machine that
has these sets the fast tests cover them too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale._ext import cpu_kernels
from metrale.backends.cpu.pack import format_number, panel_bytes
from metrale.dtypes import bf16_to_f32, f32_to_bf16
from metrale.quant.activations import quantize_rows
from metrale.quant.blocks import BLOCKS, dequantize, quantize

BLOCK_FORMATS = tuple(BLOCKS)
FORMATS = (*BLOCK_FORMATS, "f16", "bf16", "f32")
VARIANTS = cpu_kernels.supported()
GUARD = 64

variants = pytest.mark.parametrize("variant", VARIANTS)


class Guarded:
    """An array between guard bands of poison."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.raw = np.full(count + 2 * GUARD, 0xFF, np.uint8)
        self.array = self.raw[GUARD : GUARD + count].view(dtype).reshape(shape)

    def intact(self) -> bool:
        return bool((self.raw[:GUARD] == 0xFF).all() and (self.raw[-GUARD:] == 0xFF).all())


def call(variant: str, name: str, tiles: int, *args: Any, order: Any = None) -> None:
    """Run the tiles of a kernel, in `order`; every status must be 0."""
    words = np.zeros(len(args), np.int64)
    for i, arg in enumerate(args):
        if isinstance(arg, np.ndarray):
            words[i] = arg.ctypes.data
        elif isinstance(arg, float):
            words[i] = np.float64(arg).view(np.int64)
        else:
            words[i] = arg or 0
    fn = cpu_kernels.address(name, variant)
    for tile in range(tiles) if order is None else order:
        assert cpu_kernels.call(fn, words.ctypes.data, tile, tiles) == 0


def matrix(rng: np.random.Generator, form: str, n: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (rows of a file, panels, float32 values) of a random matrix."""
    values = rng.standard_normal((n, k)).astype(np.float32)
    if form in BLOCK_FORMATS:
        data = quantize(form, values)
        wide = dequantize(form, data, k)
    else:
        data = f32_to_bf16(values) if form == "bf16" else values.astype(form.replace("f", "float"))
        wide = bf16_to_f32(data) if form == "bf16" else data.astype(np.float32)
    panels = Guarded((-(-n // 16) * panel_bytes(form, k),), np.uint8)
    call("host", "pack", 2, panels.array, data, n, k, data.strides[0], format_number(form), 0, 1)
    assert panels.intact()
    return data, panels.array, wide


def tile_count(rows: int, n: int, across: int, down: int) -> int:
    panels = -(-n // 16)
    return -(-panels // across) * -(-rows // down)


def product(
    variant: str,
    form: str,
    panels: np.ndarray,
    x: Any,
    n: int,
    *,
    across: int = 4,
    down: int = 64,
    backwards: bool = False,
    bias: Any = None,
    residual: Any = None,
    factor: float = 1.0,
) -> np.ndarray:
    """Return x @ w.T by a kernel; the row stride of the output is larger than N."""
    q = isinstance(x, tuple)
    rows, k = x[0].shape if q else x.shape
    out = Guarded((rows, n + 3), np.float32)
    tiles = tile_count(rows, n, across, down)
    call(
        variant,
        "linear_q" if q else "linear_f",
        tiles,
        out.array,
        *(x if q else (x, k, 0)),
        panels,
        bias,
        residual,
        rows,
        n,
        k,
        n + 3,
        n,
        format_number(form),
        across,
        down,
        factor,
        order=range(tiles - 1, -1, -1) if backwards else None,
    )
    assert out.intact()
    assert np.isnan(out.array[:, n:]).all()
    return out.array[:, :n].copy()


def k_of(form: str, blocks: int) -> int:
    return blocks * (BLOCKS[form].block if form in BLOCK_FORMATS else 35)


def assert_same(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def test_the_best_variant_comes_first() -> None:
    assert VARIANTS[-1] == "generic"
    assert set(VARIANTS) <= set(cpu_kernels.variants())
    assert "generic" in cpu_kernels.variants()
    for variant in cpu_kernels.variants():
        assert cpu_kernels.names(variant) == cpu_kernels.names("generic")
    with pytest.raises(KeyError, match="linear_q"):
        cpu_kernels.address("nothing", "generic")


@variants
@pytest.mark.parametrize("form", FORMATS)
def test_values_and_equal_bits(variant: str, form: str) -> None:
    """Near the float64 product, and bit for bit the generic variant's and each row's own."""
    rng = np.random.default_rng(7)
    for rows, n, blocks in ((1, 37, 3), (3, 16, 1), (17, 70, 2), (70, 21, 4)):
        k = k_of(form, blocks)
        _, panels, wide = matrix(rng, form, n, k)
        x = rng.standard_normal((rows, k)).astype(np.float32)
        inputs: list[Any] = [x] if form not in BLOCK_FORMATS else [x, tuple(quantize_rows(x))]
        for given_x in inputs:
            got = product(variant, form, panels, given_x, n)
            values = np.repeat(given_x[1], 32, axis=1) * given_x[0] if isinstance(given_x, tuple) else x
            want = values.astype(np.float64) @ wide.T.astype(np.float64)
            size = np.abs(values) @ np.abs(wide).T + np.abs(values).sum(1, keepdims=True) * np.abs(wide).mean()
            assert np.all(np.abs(got - want) <= size * 4e-6)
            assert_same(got, product("generic", form, panels, given_x, n))
            assert_same(got, product(variant, form, panels, given_x, n, across=1, down=5, backwards=True))
            for t in {0, rows // 2, rows - 1}:
                one = tuple(a[t : t + 1].copy() for a in given_x) if isinstance(given_x, tuple) else given_x[t : t + 1].copy()
                assert_same(got[t : t + 1], product(variant, form, panels, one, n))


@variants
@given(
    rows=st.integers(1, 67),
    n=st.integers(1, 50),
    blocks=st.integers(1, 29),
    across=st.integers(1, 5),
    down=st.integers(1, 64),
    seed=st.integers(0, 99),
)
def test_sizes(variant: str, rows: int, n: int, blocks: int, across: int, down: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    form = ("q4_1", "q8_0", "q5_0", "f16")[seed % 4]
    k = 32 * blocks
    _, panels, _ = matrix(rng, form, n, k)
    x = rng.standard_normal((rows, k)).astype(np.float32)
    given_x: Any = x if form == "f16" else tuple(quantize_rows(x))
    want = product("generic", form, panels, given_x, n)
    assert_same(product(variant, form, panels, given_x, n, across=across, down=down, backwards=bool(seed % 2)), want)


@variants
def test_bias_factor_and_residual(variant: str) -> None:
    rng = np.random.default_rng(1)
    for n in (19, 32):
        _, panels, _ = matrix(rng, "q4_1", n, 96)
        x = rng.standard_normal((5, 96)).astype(np.float32)
        bias, old = rng.standard_normal(n).astype(np.float32), rng.standard_normal((5, n)).astype(np.float32)
        plain = product(variant, "q4_1", panels, x, n)
        assert_same(product(variant, "q4_1", panels, x, n, bias=bias), plain + bias)
        assert_same(product(variant, "q4_1", panels, x, n, residual=old), old + plain)
        got = product(variant, "q4_1", panels, x, n, bias=bias, residual=old, factor=0.3)
        assert_same(got, old + np.float32(0.3) * (plain + bias))


@variants
@pytest.mark.parametrize("act", [0, 1])
@pytest.mark.parametrize(("gate_form", "up_form"), [("q4_1", "q4_1"), ("q4_k", "q6_k"), ("q8_0", "q5_0")])
def test_mlp_up_is_two_products_and_a_gate(variant: str, act: int, gate_form: str, up_form: str) -> None:
    """The fused op equals its parts bit for bit, as floats and quantized."""
    rng = np.random.default_rng(4)
    k, n = 512, 64
    gate, up = matrix(rng, gate_form, n, k)[1], matrix(rng, up_form, n, k)[1]
    for rows in (1, 6, 33):
        x = rng.standard_normal((rows, k)).astype(np.float32) * np.float32(0.1)
        for given_x in (x, tuple(quantize_rows(x))):
            kind = "mlp_up_q" if isinstance(given_x, tuple) else "mlp_up_f"
            xs = given_x if isinstance(given_x, tuple) else (given_x, k, 0)
            both = np.hstack(
                [product(variant, form, panels, given_x, n) for form, panels in ((gate_form, gate), (up_form, up))]
            )
            want, out = np.full((rows, n), np.nan, np.float32), np.full((rows, n), np.nan, np.float32)
            call(variant, "act_mul", 1, want, None, None, None, both, both[:, n:], rows, n, 2 * n, n, act)
            tail = (rows, n, k, n, format_number(gate_form), format_number(up_form), act, 2, 64)
            call(variant, kind, tile_count(rows, n, 2, 64), out, *xs, gate, up, None, None, None, None, None, *tail)
            assert_same(out, want)
            q = [Guarded((rows, n), np.int8), Guarded((rows, n // 32), np.float32), Guarded((rows, n // 16), np.int16)]
            call(variant, kind, tile_count(rows, n, 2, 64), None, *xs, gate, up, None, None, *(g.array for g in q), *tail)
            for got, expected in zip(q, quantize_rows(want), strict=True):
                np.testing.assert_array_equal(got.array, expected)
                assert got.intact()


@variants
@pytest.mark.parametrize("act", [0, 1])
def test_activations(variant: str, act: int) -> None:
    """Within a few units in the last place of the float64 value, for every size of argument."""
    x = np.concatenate([np.linspace(-110, 110, 40001), np.linspace(-1e-3, 1e-3, 101), [1e30, 3e38, np.inf, np.nan]])
    x = x.astype(np.float32)
    both = np.concatenate([x, np.ones_like(x)])
    out = np.full_like(x, np.nan)
    call(variant, "act_mul", 1, out, None, None, None, both, both[x.size :], 1, x.size, 2 * x.size, x.size, act)
    wide = x.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        u = wide if act == 0 else 1.5957691216057308 * (wide + 0.044715 * wide**3)
        want = wide / (1 + np.exp(-u))
    with np.errstate(invalid="ignore"):
        error = np.abs(out - want)
    # The argument of exp is rounded: its relative error grows with |u|.
    allowed = np.abs(want) * 2.0**-24 * (6 + 3 * np.clip(np.abs(u), 0, 110)) + 4e-37  # exp overflows near 88.7
    finite = np.isfinite(want)
    assert np.all(error[finite] <= allowed[finite])
    np.testing.assert_array_equal(out[~finite], want[~finite].astype(np.float32))


@variants
def test_quantize_edges(variant: str) -> None:
    x = np.random.default_rng(3).standard_normal((9, 96)).astype(np.float32)
    x[1, 40], x[2, 5], x[3, 70] = np.nan, np.inf, -np.inf
    x[4, :32], x[5, 32:64], x[6] = 0, 1e-39, x[6] * np.float32(1e-36)
    x[7, :3] = 3e38, -3e38, 1
    want = quantize_rows(x)
    got = [Guarded(a.shape, a.dtype) for a in want]
    call(variant, "quantize", 4, *(g.array for g in got), x, 9, 96, 96)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g.array, w)
        assert g.intact()


@variants
@pytest.mark.parametrize("form", FORMATS)
def test_embed_is_the_file(variant: str, form: str) -> None:
    rng = np.random.default_rng(5)
    k = k_of(form, 2)
    _, panels, wide = matrix(rng, form, 41, k)
    ids = np.array([40, 0, 15, 16, 31, 32, 7], np.int32)
    out = Guarded((7, k), np.float32)
    call(variant, "embed", 3, out.array, ids, panels, 7, 41, k, k, format_number(form), 1.0, 0, 41)
    assert_same(out.array, wide[ids])
    assert out.intact()


@variants
def test_wild_bits_do_not_crash(variant: str) -> None:
    """A damaged file: any bytes at all as weights; NaN where generic has NaN, equal bits elsewhere."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal((7, 512)).astype(np.float32)
    for form in FORMATS:
        panels = rng.integers(0, 256, 2 * panel_bytes(form, 512)).astype(np.uint8)
        for given_x in (x, tuple(quantize_rows(x)))[: 1 + (form in BLOCK_FORMATS)]:
            got, want = (product(v, form, panels, given_x, 32) for v in (variant, "generic"))
            np.testing.assert_array_equal(got, want)


@variants
def test_wrong_sizes_are_statuses(variant: str) -> None:
    words = np.zeros(16, np.int64)
    for name, changed in (
        ("linear_q", {9: 33}),
        ("linear_q", {12: 9}),
        ("linear_q", {12: -1}),
        ("linear_q", {14: 65, 13: 1}),
        ("linear_f", {12: 11}),
        ("quantize", {5: 31}),
    ):
        words[:] = 0
        for i, value in changed.items():
            words[i] = value
        assert cpu_kernels.call(cpu_kernels.address(name, variant), words.ctypes.data, 0, 1) > 0


# --- other machines ----------------------------------------------------------------------------------------------------

KERNELS = Path(cpu_kernels.__file__).parents[1] / "backends/cpu/kernels"
HERE = Path(__file__).parent
FLAGS = [
    "-std=gnu11",
    "-O1",
    "-fwrapv",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    f"-I{KERNELS}",
    "-static",
]
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]


def build(tmp_path: Path, compiler: str, sources: dict[str, list[str]], define: str = "") -> Path:
    """Compile each source with its own flags and link the digest program; `define` sets the feature bits."""
    units = {"features.c": [define] if define else [], "pack_host.c": [], **sources}
    objects = {source: str(tmp_path / f"{source}.o") for source in units}
    commands = [
        [compiler, *FLAGS, *flags, "-c", str(KERNELS / source), "-o", objects[source]] for source, flags in units.items()
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(subprocess.run, command, check=True) for command in commands]:
            done.result()
    program = tmp_path / "variant_bits"
    subprocess.run([compiler, *FLAGS, str(HERE / "variant_bits.c"), *objects.values(), "-lm", "-o", str(program)], check=True)
    return program


def digests(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def need(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


@pytest.mark.slow
def test_emulated_sets_equal_generic(tmp_path: Path) -> None:
    need("gcc")
    if "avx2" not in VARIANTS:
        pytest.skip("needs an x86-64 machine with AVX2")
    wide = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
    program = build(
        tmp_path,
        "gcc",
        {
            "linear_generic.c": [],
            "linear_avx2.c": AVX2,
            "attention_generic.c": [],
            "attention_avx2.c": AVX2,
            "linear_avxvnni.c": [*AVX2, "-include", str(HERE / "emulated/avxvnni.h")],
            "attention_avxvnni.c": [*AVX2, "-include", str(HERE / "emulated/avxvnni.h")],
            "linear_avx512vnni.c": [f"-I{HERE / 'emulated'}", "-DUNROLL(n)="],
            "attention_avx512vnni.c": wide,
        },
        define="-DMETRALE_ASSUME_ALL",
    )
    want = digests(str(program), "generic")
    assert len(want.splitlines()) > 400
    for variant in ("avx2", "avxvnni", "avx512vnni"):
        assert digests(str(program), variant) == want, variant


@pytest.mark.slow
def test_aarch64_equals_this_machine(tmp_path: Path) -> None:
    need("gcc", "aarch64-linux-gnu-gcc", "qemu-aarch64")
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    dotprod = ["-march=armv8.2-a+dotprod+fp16"]
    arm = build(
        there,
        "aarch64-linux-gnu-gcc",
        {"linear_generic.c": [], "linear_neon.c": dotprod, "attention_generic.c": [], "attention_neon.c": dotprod},
    )
    emulated = {variant: digests("qemu-aarch64", "-cpu", "max", str(arm), variant) for variant in ("generic", "neon")}
    assert emulated["neon"] == emulated["generic"]
    generic = build(here, "gcc", {"linear_generic.c": [], "attention_generic.c": []}, define="-DMETRALE_GENERIC_ONLY")
    assert digests(str(generic), "generic") == emulated["generic"]
