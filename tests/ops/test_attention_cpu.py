"""Attention on the CPU: equal bits whatever the tiles, slots, chunks, threads and instruction set."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale._ext import cpu_kernels
from metrale.backends.base import QkNorm
from metrale.backends.cpu.backend import CpuBackend
from metrale.backends.cpu.ops_attention import ENOUGH_TILES, QUERIES, attention_plan
from metrale.errors import DeviceError
from tests.helpers import Paged, down, floats, paged, poisoned, poisoned_kv, up, up_batch
from tests.ops.test_rope import angle_table, views

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "metrale" / "backends" / "cpu" / "kernels"
SHAPES = [(9, 3, 64), (4, 1, 20), (5, 5, 40), (14, 2, 128), (3, 3, 7)]
MASKS = [(None, None), (37, None), (None, 30.0), (300, 5.0)]


@pytest.fixture(scope="module")
def cpu() -> Iterator[CpuBackend]:
    opened = CpuBackend(threads=2)
    yield opened
    opened.close()


def attend(b: CpuBackend, cache: Paged, q: np.ndarray, seq: Any, index: Any, *, window: int | None = None,
           cap: float | None = None, tables: np.ndarray | None = None) -> np.ndarray:
    out = poisoned(b, *q.shape)
    where = cache.tables if tables is None else up(b, tables)
    b.stream.ops.attention(out, up(b, q), cache.layer, up_batch(b, seq, index), where, scale=q.shape[2] ** -0.5, window=window,
                           softcap=cap)
    got = down(b, out)
    assert np.isfinite(got).all()  # everything no token owns is NaN
    return got


@pytest.mark.parametrize(("window", "cap"), MASKS)
@pytest.mark.parametrize(("heads", "kv", "dim"), SHAPES)
def test_chunks_equal_the_whole_prompt(cpu: CpuBackend, heads: int, kv: int, dim: int, window: int | None,
                                       cap: float | None) -> None:
    rng = np.random.default_rng(dim)
    length = 310
    cache = paged(cpu, rng, [length], kv, dim)
    q = floats(cpu, rng, length, heads, dim)
    whole = attend(cpu, cache, q, np.zeros(length, int), np.arange(length), window=window, cap=cap)
    for size in (1, 7, 16, 33, 100):
        # Of the smallest chunks only some: each is a call.
        starts = range(0, length, size) if size > 7 else (0, 15 // size * size, 255 // size * size, 308 // size * size)
        for start in starts:
            rows = np.arange(start, min(start + size, length))
            part = attend(cpu, cache, q[rows], np.zeros(len(rows), int), rows, window=window, cap=cap)
            np.testing.assert_array_equal(part, whole[rows])


@given(lengths=st.lists(st.sampled_from([1, 16, 33, 255, 256, 257, 530]), min_size=1, max_size=4), rows=st.integers(1, 40),
       shape=st.sampled_from(SHAPES), mask=st.sampled_from(MASKS), seed=st.integers(0, 99))
def test_a_batch_equals_its_rows(cpu: CpuBackend, lengths: list[int], rows: int, shape: tuple[int, int, int],
                                 mask: tuple[int | None, float | None], seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads, kv, dim = shape
    window, cap = mask
    cache = paged(cpu, rng, lengths, kv, dim)
    seq = rng.integers(-1, len(lengths), rows)
    index = np.array([rng.integers(lengths[s]) if s >= 0 else 0 for s in seq])
    q = floats(cpu, rng, rows, heads, dim)
    together = attend(cpu, cache, q, seq, index, window=window, cap=cap)
    for t in rng.permutation(rows)[:6]:
        alone = attend(cpu, cache, q[t : t + 1], seq[t : t + 1], index[t : t + 1], window=window, cap=cap)
        np.testing.assert_array_equal(alone[0], together[t])


def test_the_number_of_slots_changes_no_bit(cpu: CpuBackend) -> None:
    """Wider tables give more slots, many rows none; the same chunks are merged in the same order."""
    rng = np.random.default_rng(5)
    cache = paged(cpu, rng, [1500], 3, 64)
    q = floats(cpu, rng, 40, 9, 64)
    plans, results = set(), [attend(cpu, cache, q, [0] * 40, [1499] * 40)[:1]]
    for width in (94, 200, 700):
        tables = np.zeros((1, width), np.int32)
        tables[:, :94] = cache.host_tables[:, :94]
        plans.add(attention_plan(1, 9, 3, width)[1])
        results += [attend(cpu, cache, q[:1], [0], [1499], tables=tables) for _ in range(2)]
    assert len(plans) > 1
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("isa", cpu_kernels.supported())
def test_threads_and_instruction_sets_agree(cpu: CpuBackend, isa: str, threads: int) -> None:
    other = CpuBackend(threads=threads, isa=isa)
    for heads, kv, dim in SHAPES:
        seq = np.array([0] * 20 + [-1] + [1] * 3)
        index = np.array([*range(280, 300), 0, 1, 2, 4])
        results = []
        for b in (cpu, other):
            rng = np.random.default_rng(8)
            cache = paged(b, rng, [300, 5], kv, dim)
            q = floats(b, rng, len(seq), heads, dim)
            results.append([attend(b, cache, q, seq, index, window=window, cap=cap) for window, cap in MASKS]
                           + [attend(b, cache, q[:1], seq[:1], index[:1])])
        for mine, theirs in zip(*results, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    other.close()


@given(rows=st.integers(1, 700), kv=st.integers(1, 16), group=st.integers(1, 12), blocks=st.integers(1, 3000))
def test_the_plan_covers_all_rows_and_heads(rows: int, kv: int, group: int, blocks: int) -> None:
    a_tile, slots, tiles = attention_plan(rows, kv * group, kv, blocks)
    assert a_tile * group <= max(QUERIES, group)
    if slots:
        assert tiles == rows * kv * slots
        assert tiles < 2 * ENOUGH_TILES
    else:
        assert tiles == -(-rows // a_tile) * kv


def test_a_captured_row_keeps_its_room(cpu: CpuBackend) -> None:
    """The room for chunk results may grow for other calls; a program goes on using its own."""
    rng = np.random.default_rng(3)
    cache = paged(cpu, rng, [600], 2, 24)
    q, out, batch = up(cpu, floats(cpu, rng, 1, 4, 24)), poisoned(cpu, 1, 4, 24), up_batch(cpu, [0], [599])
    args = (out, q, cache.layer, batch, cache.tables)
    with cpu.stream.capture() as capture:
        cpu.stream.ops.attention(*args, scale=0.2, window=None, softcap=None)
    big = paged(cpu, rng, [900] * 5, 3, 64)
    attend(cpu, big, floats(cpu, rng, 5, 27, 64), range(5), [899] * 5)
    assert capture.graph is not None
    capture.graph.launch()
    cpu.stream.synchronize()
    replayed = down(cpu, out)
    cpu.stream.ops.attention(*args, scale=0.2, window=None, softcap=None)
    np.testing.assert_array_equal(down(cpu, out), replayed)


@pytest.mark.parametrize("scope", [None, "head", "full"])
@pytest.mark.parametrize("turned", [None, 8, 20])
def test_the_fused_qkv_equals_its_primitives(cpu: CpuBackend, scope: str | None, turned: int | None) -> None:
    rng = np.random.default_rng(6)
    rows, hq, hk, dim = 37, 6, 3, 20
    x = floats(cpu, rng, rows, (hq + 2 * hk) * dim)
    tables = up(cpu, 1 + rng.permutation(3)[None])
    seq, index = np.where(np.arange(rows) == 4, -1, 0), np.arange(rows)
    batch = up_batch(cpu, seq, index, position=index + 2)
    table = None if turned is None else up(cpu, angle_table(50, turned), "f32")
    norms = None
    if scope is not None:
        sizes = (dim, dim) if scope == "head" else (hq * dim, hk * dim)
        weights = [up(cpu, rng.standard_normal(n), "f32") for n in sizes]
        norms = QkNorm(*weights, 1e-6, 1.0, False, scope)
    results = []
    for fused in (True, False):
        layer = poisoned_kv(cpu, 4, hk, dim)
        q, k, v = views(cpu, x, hq, hk, hk, dim=dim)
        if fused:
            cpu.stream.ops.qkv_rope_write(q, k, v, layer, batch, tables, table, norms)
        else:
            if norms is not None:
                cpu.stream.ops.qk_norm(q, k, norms.q, norms.k, eps=1e-6, offset=1.0, cast_first=False, scope=scope)
            if table is not None:
                cpu.stream.ops.rope(q, k, table, batch.position)
            cpu.stream.ops.kv_write(layer, k, v, batch, tables)
        results.append([down(cpu, a) for a in (q, layer.k[1:], layer.v[1:])])
    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_row_past_its_table_is_an_error_and_the_backend_goes_on(cpu: CpuBackend) -> None:
    rng = np.random.default_rng(1)
    cache = paged(cpu, rng, [20], 2, 16)
    q = floats(cpu, rng, 1, 4, 16)
    width = cache.host_tables.shape[1] * 16
    with pytest.raises(DeviceError) as caught:
        attend(cpu, cache, q, [0], [width])
    assert caught.value.code == "device.kernel"
    k = up(cpu, floats(cpu, rng, 1, 2, 16))
    with pytest.raises(DeviceError):
        cpu.stream.ops.kv_write(cache.layer, k, k, up_batch(cpu, [0], [width]), cache.tables)
    with pytest.raises(DeviceError):
        cpu.stream.ops.rope(k, k, up(cpu, angle_table(5, 16), "f32"), up(cpu, np.array([5])))
    attend(cpu, cache, q, [0], [19])


# --- other instruction sets ------------------------------------------------------------------------------------------


def bits(folder: Path, compiler: str, variant: str, *flags: str, run: tuple[str, ...] = ()) -> str:
    """Compile attention_bits.c with one variant's kernels and return what it prints."""
    for program in (compiler, *run[:1]):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    program = folder / f"bits_{variant}_{compiler}"
    common = ["-O2", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", f"-I{KERNELS}"]
    sources = [str(HERE / "attention_bits.c"), str(KERNELS / f"attention_{variant}.c")]
    subprocess.run([compiler, *common, f"-DVARIANT={variant}", *flags, *sources, "-o", str(program), "-lm"], check=True)
    return subprocess.run([*run, str(program)], check=True, capture_output=True, text=True).stdout


def test_emulated_avx512_equals_generic(tmp_path: Path) -> None:
    want = bits(tmp_path, "gcc", "generic")
    assert len(want.splitlines()) == 16
    assert bits(tmp_path, "gcc", "avx512vnni", f"-I{HERE / 'emulated'}", "-DUNROLL(n)=", "-D__AVX512F__=1") == want


@pytest.mark.slow
def test_aarch64_equals_this_machine(tmp_path: Path) -> None:
    want = bits(tmp_path, "gcc", "generic")
    arm, run = "aarch64-linux-gnu-gcc", ("qemu-aarch64", "-cpu", "max")
    assert bits(tmp_path, arm, "generic", "-static", run=run) == want
    assert bits(tmp_path, arm, "neon", "-static", "-march=armv8.2-a+dotprod+fp16", run=run) == want
