"""Products with packed weights: one row against a read loop over the same bytes, many rows in operations a second."""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from bench.report import Line
from metrale._ext import cpu_kernels
from metrale._ext.program import Program, Team
from metrale.backends.cpu.ops_linear import tile_shape
from metrale.backends.cpu.pack import format_number, panel_bytes
from metrale.quant.blocks import BLOCKS

SHAPES = ((960, 576), (3072, 576), (576, 1536))  # N, K of SmolLM2-135M: qkv, gate and up, down
ONE_ROW = (1536, 1536)
PROMPT = 512
READ_BAR = ">= 0.8"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the routine's options."""
    parser.add_argument("--isa", default=cpu_kernels.supported()[0], choices=cpu_kernels.supported())
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--formats", nargs="+", default=list(BLOCKS), choices=list(BLOCKS))
    parser.add_argument("--bytes", type=int, default=1 << 30, help="weights to rotate over (default: 1 GiB)")
    parser.add_argument("--rounds", type=int, default=7)


def run(args: argparse.Namespace) -> list[Line]:
    """Measure every format."""
    lines = []
    rng = np.random.default_rng(0)
    weights = rng.integers(0, 256, args.bytes, dtype=np.uint8)
    for form in args.formats:
        lines += [_one_row(args, form, weights, threads) for threads in args.threads]
        lines += [_many_rows(args, form, weights, n, k) for n, k in SHAPES]
    return lines


def _rows(rng: np.random.Generator, rows: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    data = rng.integers(-127, 128, (rows, k)).astype(np.int8)
    sums = data.reshape(rows, -1, 16).sum(-1, dtype=np.int16)
    return data, rng.random((rows, k // 32), np.float32), sums


def _one_row(args: argparse.Namespace, form: str, weights: np.ndarray, threads: int) -> Line:
    n, k = ONE_ROW
    size = panel_bytes(form, k)
    matrix = n // 16 * size
    across, down, tiles = tile_shape(1, n // 16, size)
    x, out, sums = _rows(np.random.default_rng(1), 1, k), np.empty((1, n), np.float32), np.empty(tiles, np.int32)
    product, read = Program(), Program()
    count = weights.nbytes // matrix
    for i in range(count):
        part = weights[i * matrix : (i + 1) * matrix]
        words = (out, *x, part, None, None, 1, n, k, n, n, format_number(form), across, down, 1.0)
        product.append(cpu_kernels.address("linear_q", args.isa), words, tiles, "linear")
        read.append(cpu_kernels.address("read_loop", args.isa), (sums, part, matrix // 256 * 256), tiles, "read")
    team = Team(threads)
    times: list[tuple[float, float]] = []
    for _ in range(args.rounds):
        times.append((_seconds(team, product), _seconds(team, read)))
    team.close()
    best = min(t for t, _ in times)
    ratio = statistics.median(r / t for t, r in times)
    rate, ceiling = (count * matrix / s / 1e9 for s in (best, min(r for _, r in times)))
    return Line(
        f"ops/linear/{form}/one row/{threads} threads",
        round(rate, 2),
        "GB/s",
        round(ratio, 3),
        f"read loop {ceiling:.1f} GB/s",
        READ_BAR,
        args.isa,
    )


def _seconds(team: Team, program: Program) -> float:
    start = time.perf_counter()
    team.run(program)
    return time.perf_counter() - start


def _many_rows(args: argparse.Namespace, form: str, weights: np.ndarray, n: int, k: int) -> Line:
    k = k // BLOCKS[form].block * BLOCKS[form].block
    across, down, tiles = tile_shape(PROMPT, n // 16, panel_bytes(form, k))
    x, out = _rows(np.random.default_rng(1), PROMPT, k), np.empty((PROMPT, n), np.float32)
    words = (out, *x, weights, None, None, PROMPT, n, k, n, n, format_number(form), across, down, 1.0)
    packed = np.zeros(len(words), np.int64)
    for i, word in enumerate(words):
        packed[i] = word.ctypes.data if isinstance(word, np.ndarray) else (word or 0)
    packed[-1] = np.float64(1.0).view(np.int64)  # the factor
    kernel = cpu_kernels.address("linear_q", args.isa)
    times = []
    for _ in range(5 * args.rounds):
        start = time.thread_time()  # one thread's own time: neighbours on the machine do not count
        cpu_kernels.call_all(kernel, packed.ctypes.data, 0, tiles, tiles)
        times.append(time.thread_time() - start)
    return Line(
        f"ops/linear/{form}/{PROMPT} rows/{n}x{k}", round(2e-9 * PROMPT * n * k / min(times), 1), "GOP/s", note=args.isa
    )
