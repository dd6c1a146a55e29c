"""Attention: one row against a read loop over the same K and V, a prompt in floating-point operations a second."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

from bench.report import Line
from metrale._ext import cpu_kernels
from metrale._ext.program import Program, Team
from metrale.backends.base import RowBatch
from metrale.backends.cpu.backend import CpuBackend

SHAPES = {"smollm2-135m": (9, 3, 64), "llama-3.1-8b": (32, 8, 128)}  # query heads, K/V heads, head size
CONTEXTS = (128, 640, 4096)
ROTATE_BYTES = 256 << 20
PROMPT = 512


def run(args: argparse.Namespace) -> list[Line]:
    """Measure decode at each context and number of threads, then a prompt on one thread."""
    lines = []
    for name, shape in SHAPES.items():
        lines += [_decode(args, name, shape, context, threads) for context in CONTEXTS for threads in args.threads]
        lines.append(_prompt(args, name, shape))
    return lines


def _layers(b: CpuBackend, shape: tuple[int, int, int], context: int, count: int) -> list[Any]:
    """Return layers whose sequence 0 holds `context` random tokens in scattered blocks, and its table."""
    _, heads, dim = shape
    rng = np.random.default_rng(0)
    blocks = -(-context // 16)
    table = b.alloc((1, max(blocks, 512)), "i32", zero=True)
    table[0, :blocks] = 1 + rng.permutation(blocks)
    layers = []
    for _ in range(count):
        layer = b.alloc_kv(blocks + 1, heads, dim)
        rng.random(dtype=np.float32, out=layer.k)
        rng.random(dtype=np.float32, out=layer.v)
        layers.append(layer)
    return [table, *layers]


def _batch(b: CpuBackend, index: np.ndarray) -> RowBatch:
    arrays = [b.alloc(index.shape, "i32", zero=True) for _ in range(4)]
    arrays[2][:] = index
    return RowBatch(*arrays)


def _decode(args: argparse.Namespace, name: str, shape: tuple[int, int, int], context: int, threads: int) -> Line:
    q_heads, heads, dim = shape
    b = CpuBackend(threads=threads, isa=args.isa, streams="eager")
    size = 8 * context * heads * dim
    table, *layers = _layers(b, shape, context, max(1, ROTATE_BYTES // size))
    q, out, batch = b.alloc((1, q_heads, dim), "f32"), b.alloc((1, q_heads, dim), "f32"), _batch(b, np.array([context - 1]))
    q[:] = np.random.default_rng(1).standard_normal(q.shape)
    with b.stream.capture() as capture:
        for layer in layers:
            b.stream.ops.attention(out, q, layer, batch, table, scale=dim**-0.5, window=None, softcap=None)
    assert capture.graph is not None
    read, team, sums = Program(), Team(threads), np.empty(64, np.int32)
    for layer in layers:
        for pages in (layer.k, layer.v):
            part = pages.reshape(-1)[: size // 8]
            read.append(cpu_kernels.address("read_loop", args.isa), (sums, part, part.nbytes // 256 * 256), 16, "read")
    times = []
    for _ in range(args.rounds):
        start = time.perf_counter()
        capture.graph.launch()
        middle = time.perf_counter()
        team.run(read)
        times.append((middle - start, time.perf_counter() - middle))
    team.close()
    b.close()
    rate, ceiling = (len(layers) * size / min(t) / 1e9 for t in zip(*times, strict=True))
    return Line(
        f"ops/attention/{name}/one row/{context} tokens/{threads} threads",
        round(rate, 2),
        "GB/s",
        round(statistics.median(r / t for t, r in times), 3),
        f"read loop {ceiling:.1f} GB/s",
        None,
        args.isa,
    )


def _prompt(args: argparse.Namespace, name: str, shape: tuple[int, int, int]) -> Line:
    q_heads, _, dim = shape
    b = CpuBackend(threads=1, isa=args.isa, streams="eager")
    table, layer = _layers(b, shape, PROMPT, 1)
    q, out, batch = b.alloc((PROMPT, q_heads, dim), "f32"), b.alloc((PROMPT, q_heads, dim), "f32"), _batch(b, np.arange(PROMPT))
    q[:] = np.random.default_rng(1).standard_normal(q.shape)
    times = []
    for _ in range(3 * args.rounds):
        start = time.thread_time()  # one thread's own time: neighbours on the machine do not count
        b.stream.ops.attention(out, q, layer, batch, table, scale=dim**-0.5, window=None, softcap=None)
        times.append(time.thread_time() - start)
    b.close()
    work = 4 * dim * q_heads * PROMPT * (PROMPT + 1) / 2
    return Line(
        f"ops/attention/{name}/{PROMPT} rows",
        round(work / min(times) / 1e9, 1),
        "GFLOP/s",
        note=f"{min(times) * 1e3:.2f} ms on one thread, {args.isa}",
    )
