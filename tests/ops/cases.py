"""One call of every op, with its buffers, for the tests that treat all ops alike (capture, shapes, rows, dtypes)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from metrale.backends.base import Backend, Ops, QkNorm, QTensor, RowBatch
from tests.helpers import (
    HostRows,
    floats,
    paged,
    patch_ring,
    poisoned,
    poisoned_batch,
    poisoned_q,
    random_part,
    result_ring,
    scratch,
    up,
    up_batch,
    up_q,
)

T, R, H, V = 5, 7, 96, 83
HQ, HK, D = 6, 3, 20
NORM = {"eps": 1e-5, "offset": 1.0, "cast_first": True}


@dataclass
class Case:
    """An op call: arguments in order, destination first.

    writes: positions of the arguments it changes. rows: positions of those with one entry a row of the step (empty: rows
    belong together). free: positions whose sizes the op cannot check against anything.
    """

    op: str
    args: tuple[Any, ...]
    params: dict[str, Any] = field(default_factory=dict)
    writes: tuple[int, ...] = (0,)
    rows: tuple[int, ...] = ()
    free: tuple[int, ...] = ()

    def run(self, ops: Ops) -> None:
        getattr(ops, self.op)(*self.args, **self.params)

    def row(self, ops: Ops, t: int) -> None:
        """Run row t alone."""
        args = [one_row(a, t) if i in self.rows else a for i, a in enumerate(self.args)]
        getattr(ops, self.op)(*args, **self.params)

    def written(self, backend: Backend) -> list[np.ndarray]:
        return [backend.download(a) for i in self.writes for a in arrays(self.args[i])]

    def load(self, backend: Backend, other: Case) -> None:
        """Copy another case's buffers into mine."""
        for mine, theirs in zip(arrays(self.args), arrays(other.args), strict=True):
            backend.upload(mine, backend.download(theirs))


def one_row(arg: Any, t: int) -> Any:
    return arg.rows(t, t + 1) if isinstance(arg, QTensor | RowBatch) else arg[t : t + 1]


def arrays(arg: Any) -> list[Any]:
    """Return the device arrays inside an argument, in order."""
    if hasattr(arg, "dtype"):
        return [arg]
    return [a for part in arg for a in arrays(part)] if isinstance(arg, tuple) else []


def shared() -> np.random.Generator:
    """Return the generator of weights: the same in every case, whatever its own seed."""
    return np.random.default_rng(99)


def state(rng: np.random.Generator) -> HostRows:
    rows = HostRows(R, max_blocks=3, max_tokens=41)
    for row in range(R):
        rows.set(row, token=rng.integers(V), index=int(rng.integers(1, 20)), limit=int(rng.integers(15, 40)), delta=row - 2,
                 seed=int(rng.integers(2**63)), choice=row, temperature=[0.0, 0.7, 1.3][row % 3], top_k=[0, 9, 40][row % 3],
                 top_p=0.9, min_p=0.02, repetition=1.2, presence=0.3, frequency=0.4, prompt_len=4,
                 logprobs=[2, -1, 20][row % 3])
        rows.history(row, rng.integers(0, V, 41))
        rows.bias(row, (3, 1.5, 100), (int(rng.integers(V)), -np.inf, 100), (11, 9.0, 2))
    return rows.order(4, 2, -1, 6, 0)


def seqs(b: Backend, rng: np.random.Generator) -> tuple[Any, Any]:
    """Return the seq and index of T rows, the fourth of them padding."""
    return up(b, np.array([5, 0, 3, -1, 2])), up(b, np.where([1, 1, 1, 0, 1], rng.integers(5, 30, T), 0))


# --- rows ------------------------------------------------------------------------------------------------------------


def rows_patch(b: Backend, rng: np.random.Generator) -> Case:
    ring, pinned = patch_ring(b, 4, 6, cursor=5)
    pinned[1, 0] = 3
    pinned[1, 2:8] = np.stack([rng.permutation(R)[:3], rng.integers(0, 99, 3)], axis=1).reshape(-1)
    return Case("rows_patch", (state(rng).upload(b), ring), writes=(0, 1))


def rows_begin(b: Backend, rng: np.random.Generator) -> Case:
    return Case("rows_begin", (poisoned_batch(b, T), state(rng).upload(b)), writes=(0, 1))


def batch(b: Backend, rng: np.random.Generator) -> RowBatch:
    """Return T rows over sequences 0, 1 and 2 (lengths of `pages`), the second of them padding."""
    index = np.array([18, 0, 3, 39, 4])
    return up_batch(b, np.array([0, -1, 1, 2, 1]), index, ids=rng.integers(0, V, T), position=index + 2)


def rows_prefill(b: Backend, rng: np.random.Generator) -> Case:
    return Case("rows_prefill", (batch(b, rng), state(rng).upload(b)), writes=(1,), rows=(0,))


def rows_commit(b: Backend, rng: np.random.Generator) -> Case:
    seq, index = seqs(b, rng)
    ids = up(b, rng.integers(0, V, T))
    return Case("rows_commit", (ids, seq, index, state(rng).upload(b)), writes=(3,), rows=(0, 1, 2))


def publish(b: Backend, rng: np.random.Generator) -> Case:
    ring, _ = result_ring(b, 3, R, cursor=8)
    seq, _ = seqs(b, rng)
    rows = state(rng).set(6, flag=1)
    return Case("publish", (ring, up(b, rng.integers(0, V, T)), seq, rows.upload(b)))


# --- rows of numbers -------------------------------------------------------------------------------------------------


def embed(b: Backend, rng: np.random.Generator) -> Case:
    weight = b.pack([random_part(shared(), "q4_1", V, H)])
    return Case("embed", (poisoned(b, T, H), up(b, rng.integers(0, V, T)), weight), {"scale": 1.7}, rows=(0, 1))


def gather_rows(b: Backend, rng: np.random.Generator) -> Case:
    rows = up(b, np.array([3, -1, 0, 4, 3, 1]))
    return Case("gather_rows", (poisoned(b, 6, H), up(b, floats(b, rng, T, H)), rows), rows=(0, 2))


def add(b: Backend, rng: np.random.Generator) -> Case:
    return Case("add", (up(b, floats(b, rng, T, H)), up(b, floats(b, rng, T, H))), rows=(0, 1))


def scale(b: Backend, rng: np.random.Generator) -> Case:
    return Case("scale", (up(b, floats(b, rng, T, H)),), {"factor": 0.3}, rows=(0,), free=(0,))


def vector(b: Backend, rng: np.random.Generator, n: int = H) -> Any:
    return up(b, rng.standard_normal(n), "f32")


def rms_norm(b: Backend, rng: np.random.Generator) -> Case:
    return Case("rms_norm", (poisoned(b, T, H), up(b, floats(b, rng, T, H)), vector(b, rng)), dict(NORM), rows=(0, 1))


def rms_norm_q(b: Backend, rng: np.random.Generator) -> Case:
    return Case("rms_norm", (poisoned_q(b, T, H), up(b, floats(b, rng, T, H)), vector(b, rng)), dict(NORM), rows=(0, 1))


def add_rms_norm(b: Backend, rng: np.random.Generator) -> Case:
    args = (poisoned(b, T, H), up(b, floats(b, rng, T, H)), up(b, floats(b, rng, T, H)), vector(b, rng))
    return Case("add_rms_norm", args, dict(NORM), writes=(0, 1), rows=(0, 1, 2))


def add_rms_norm_q(b: Backend, rng: np.random.Generator) -> Case:
    args = (poisoned_q(b, T, H), up(b, floats(b, rng, T, H)), up(b, floats(b, rng, T, H)), vector(b, rng))
    return Case("add_rms_norm", args, dict(NORM), writes=(0, 1), rows=(0, 1, 2))


def norm_add(b: Backend, rng: np.random.Generator) -> Case:
    args = (up(b, floats(b, rng, T, H)), up(b, floats(b, rng, T, H)), vector(b, rng))
    return Case("norm_add", args, dict(NORM), rows=(0, 1))


def quantize_rest(b: Backend, rng: np.random.Generator) -> Case:
    args = (poisoned_q(b, T, H), up(b, floats(b, rng, T, H)), up_q(b, floats(b, rng, T, H)))
    return Case("quantize_rest", args, rows=(0, 1, 2))


def quantize(b: Backend, rng: np.random.Generator) -> Case:
    return Case("quantize", (poisoned_q(b, T, H), up(b, floats(b, rng, T, H))), rows=(0, 1))


def matrix(b: Backend, *rows: int, bias: bool = True) -> Any:
    """Return a packed matrix of H inputs: parts of `rows` outputs in different block formats."""
    rng = shared()
    parts = [random_part(rng, form, n, H) for n, form in zip(rows, ("q4_1", "q8_0", "q5_0"), strict=False)]
    return b.pack(parts, rng.standard_normal(sum(rows)).astype(np.float32) if bias else None)


def linear(b: Backend, rng: np.random.Generator) -> Case:
    return Case("linear", (poisoned(b, T, 61), up(b, floats(b, rng, T, H)), matrix(b, 35, 7, 19)), rows=(0, 1))


def linear_q(b: Backend, rng: np.random.Generator) -> Case:
    return Case("linear", (poisoned(b, T, 61), up_q(b, floats(b, rng, T, H)), matrix(b, 35, 7, 19)), rows=(0, 1))


def linear_residual(b: Backend, rng: np.random.Generator) -> Case:
    weight = matrix(b, 61)
    args = (up(b, floats(b, rng, T, 61)), up(b, floats(b, rng, T, H)), weight)
    space = scratch(b, b.stream.ops.linear_residual_scratch_bytes(T, weight))
    return Case("linear_residual", args, {"scratch": space}, rows=(0, 1))


def linear_residual_q(b: Backend, rng: np.random.Generator) -> Case:
    case = linear_residual(b, rng)
    return Case(case.op, (case.args[0], up_q(b, floats(b, rng, T, H)), case.args[2]), case.params, rows=(0, 1))


def mlp_up(b: Backend, rng: np.random.Generator) -> Case:
    weight = matrix(b, 37, 37, bias=False)
    space = scratch(b, b.stream.ops.mlp_up_scratch_bytes(T, weight))
    args = (poisoned(b, T, 37), up(b, floats(b, rng, T, H)), weight)
    return Case("mlp_up", args, {"act": "silu", "scratch": space}, rows=(0, 1))


def mlp_up_q(b: Backend, rng: np.random.Generator) -> Case:
    weight = matrix(b, 64, 64, bias=False)
    space = scratch(b, b.stream.ops.mlp_up_scratch_bytes(T, weight))
    args = (poisoned_q(b, T, 64), up_q(b, floats(b, rng, T, H)), weight)
    return Case("mlp_up", args, {"act": "gelu_tanh", "scratch": space}, rows=(0, 1))


def head(b: Backend, rng: np.random.Generator) -> Case:
    args = (poisoned(b, T, V, dtype="f32"), up(b, floats(b, rng, T, H)), matrix(b, V, bias=False))
    return Case("head", args, {"scale": 0.25, "cap": 30.0}, rows=(0, 1))


def head_q(b: Backend, rng: np.random.Generator) -> Case:
    args = (poisoned(b, T, V, dtype="f32"), up_q(b, floats(b, rng, T, H)), matrix(b, V, bias=False))
    return Case("head", args, {"scale": 1.0, "cap": None}, rows=(0, 1))


def act_mul(b: Backend, rng: np.random.Generator) -> Case:
    return Case("act_mul", (poisoned(b, T, 37), up(b, floats(b, rng, T, 74))), {"act": "gelu_tanh"}, rows=(0, 1))


def act_mul_q(b: Backend, rng: np.random.Generator) -> Case:
    return Case("act_mul", (poisoned_q(b, T, 64), up(b, floats(b, rng, T, 128))), {"act": "silu"}, rows=(0, 1))


def softcap(b: Backend, rng: np.random.Generator) -> Case:
    return Case("softcap", (up(b, floats(b, rng, T, V, scale=40), "f32"),), {"cap": 30.0}, rows=(0,), free=(0,))


# --- attention -------------------------------------------------------------------------------------------------------


def pages(b: Backend, rng: np.random.Generator) -> tuple[Any, Any]:
    """Return the pages and tables of three sequences; the scattering of the blocks depends on the case's seed."""
    cache = paged(b, rng, (33, 5, 40), HK, D)
    return cache.layer, cache.tables


def qkv(b: Backend, rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """Return q, k and v, views into one projection."""
    whole = up(b, floats(b, rng, T, (HQ + 2 * HK) * D))
    q, k, v = whole[:, : HQ * D], whole[:, HQ * D : (HQ + HK) * D], whole[:, (HQ + HK) * D :]
    return q.reshape(T, HQ, D), k.reshape(T, HK, D), v.reshape(T, HK, D)


def table(b: Backend, dims: int) -> Any:
    angles = np.outer(np.arange(67), 0.3 ** np.arange(dims // 2))
    return up(b, np.concatenate([np.cos(angles), np.sin(angles)], axis=1), "f32")


def qk_norm(b: Backend, rng: np.random.Generator) -> Case:
    q, k, _ = qkv(b, rng)
    return Case("qk_norm", (q, k, vector(b, rng, D), vector(b, rng, D)), {**NORM, "scope": "head"}, writes=(0, 1), rows=(0, 1))


def qk_norm_full(b: Backend, rng: np.random.Generator) -> Case:
    q, k, _ = qkv(b, rng)
    args = (q, k, vector(b, rng, HQ * D), vector(b, rng, HK * D))
    return Case("qk_norm", args, {**NORM, "offset": 0.0, "scope": "full"}, writes=(0, 1), rows=(0, 1))


def rope(b: Backend, rng: np.random.Generator) -> Case:
    q, k, _ = qkv(b, rng)
    return Case("rope", (q, k, table(b, 12), up(b, rng.integers(0, 67, T))), writes=(0, 1), rows=(0, 1, 3))


def kv_write(b: Backend, rng: np.random.Generator) -> Case:
    layer, tables = pages(b, rng)
    _, k, v = qkv(b, rng)
    return Case("kv_write", (layer, k, v, batch(b, rng), tables), rows=(1, 2, 3), free=(4,))


def qkv_rope_write(b: Backend, rng: np.random.Generator) -> Case:
    layer, tables = pages(b, rng)
    q, k, v = qkv(b, rng)
    norms = QkNorm(vector(b, rng, D), vector(b, rng, D), 1e-6, 1.0, False, "head")
    args = (q, k, v, layer, batch(b, rng), tables, table(b, D), norms)
    return Case("qkv_rope_write", args, writes=(0, 3), rows=(0, 1, 2, 4), free=(5,))


def attention(b: Backend, rng: np.random.Generator) -> Case:
    layer, tables = pages(b, rng)
    args = (poisoned(b, T, HQ, D), qkv(b, rng)[0], layer, batch(b, rng), tables)
    return Case("attention", args, {"scale": 0.2, "window": None, "softcap": None}, rows=(0, 1, 3), free=(4,))


def attention_window(b: Backend, rng: np.random.Generator) -> Case:
    case = attention(b, rng)
    case.params |= {"window": 11, "softcap": 5.0}
    return case


def kv_zero(b: Backend, rng: np.random.Generator) -> Case:
    layer, _ = pages(b, rng)
    return Case("kv_zero", (layer, up(b, np.array([3, -1, 5]))), free=(1,))


def kv_copy(b: Backend, rng: np.random.Generator) -> Case:
    layer, _ = pages(b, rng)
    return Case("kv_copy", (layer, up(b, np.array([3, -1, 5])), up(b, np.array([1, 2, 6]))))


# --- choosing tokens -------------------------------------------------------------------------------------------------


def logits(b: Backend, rng: np.random.Generator) -> Any:
    return up(b, rng.standard_normal((T, V)) * 3, "f32")


def penalize(b: Backend, rng: np.random.Generator) -> Case:
    seq, index = seqs(b, rng)
    args = (logits(b, rng), seq, index, state(rng).upload(b), up(b, np.zeros((T, V), int)))
    return Case("penalize", args, writes=(0, 4), rows=(0, 1, 2, 4))


def sample(b: Backend, rng: np.random.Generator) -> Case:
    seq, index = seqs(b, rng)
    args = (poisoned(b, T, dtype="i32"), logits(b, rng), seq, index, state(rng).upload(b), poisoned(b, T, V, dtype="f32"))
    return Case("sample", args, rows=(0, 1, 2, 3, 5))


def argmax(b: Backend, rng: np.random.Generator) -> Case:
    return Case("argmax", (poisoned(b, T, dtype="i32"), logits(b, rng)), rows=(0, 1), free=(1,))


def logprobs(b: Backend, rng: np.random.Generator) -> Case:
    ring, _ = result_ring(b, 3, R, cursor=7)
    seq, _ = seqs(b, rng)
    return Case("logprobs", (ring, logits(b, rng), up(b, rng.integers(0, V, T)), seq, state(rng).upload(b)), free=(1,))


def all_reduce(b: Backend, rng: np.random.Generator) -> Case:
    return Case("all_reduce", (up(b, floats(b, rng, T, H)),), rows=(0,), free=(0,))


def all_gather(b: Backend, rng: np.random.Generator) -> Case:
    return Case("all_gather", (poisoned(b, T, H), up(b, floats(b, rng, T, H))), rows=(0, 1))


_BUILDERS = (
    rows_patch, rows_begin, rows_prefill, rows_commit, publish, embed, gather_rows, add, scale, rms_norm, rms_norm_q,
    add_rms_norm, add_rms_norm_q, norm_add, quantize, quantize_rest,
    linear, linear_q, linear_residual, linear_residual_q, mlp_up, mlp_up_q,
    head, head_q, act_mul, act_mul_q, softcap, qk_norm, qk_norm_full, rope, kv_write, qkv_rope_write, attention,
    attention_window, kv_zero, kv_copy, penalize, sample, argmax, logprobs, all_reduce, all_gather,
)  # fmt: skip
CASES: dict[str, Callable[[Backend, np.random.Generator], Case]] = {build.__name__: build for build in _BUILDERS}
