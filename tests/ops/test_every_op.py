"""What holds for every op alike: capture equals eager, bad shapes are refused, a row depends on itself alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from metrale.backends.base import Backend, KVLayer, Ops, PatchRing, QTensor, ResultRing, RowBatch, RowState
from metrale.backends.reference import ReferenceBackend
from metrale.errors import DeviceError
from tests.helpers import assert_close, down
from tests.ops.cases import CASES, Case, arrays

every_op = pytest.mark.parametrize("name", CASES)


def build(name: str, backend: Backend, seed: int = 1) -> Case:
    return CASES[name](backend, np.random.default_rng(seed))


def bits(case: Case, backend: Backend) -> list[bytes]:
    return [a.tobytes() for a in case.written(backend)]


def test_the_cases_cover_the_contract() -> None:
    other = {"rows_patch"}
    ops = {name for name, value in inspect.getmembers(Ops, inspect.isfunction)
           if not name.startswith("_") and not name.endswith("_scratch_bytes")}
    backend = ReferenceBackend()
    assert {build(name, backend).op for name in CASES} | other == ops


@every_op
def test_capture_executes_nothing_and_equals_eager(backend: Backend, name: str) -> None:
    eager, captured = build(name, backend), build(name, backend)
    before = bits(captured, backend)
    assert before == bits(eager, backend)
    eager.run(backend.stream.ops)
    with backend.stream.capture() as capture:
        captured.run(backend.stream.ops)
    assert bits(captured, backend) == before
    assert capture.graph is not None
    alone = name == "all_reduce"  # nothing to do for one rank
    assert alone or capture.graph.program.records
    capture.graph.launch()
    backend.stream.synchronize()
    assert bits(captured, backend) == bits(eager, backend)
    assert alone or bits(captured, backend) != before


@every_op
def test_a_replay_reads_its_buffers_again(backend: Backend, name: str) -> None:
    captured, other = build(name, backend), build(name, backend, seed=2)
    with backend.stream.capture() as capture:
        captured.run(backend.stream.ops)
    assert capture.graph is not None
    capture.graph.launch()
    captured.load(backend, other)
    capture.graph.launch()
    backend.stream.synchronize()
    other.run(backend.stream.ops)
    assert bits(captured, backend) == bits(other, backend)
    capture.graph.destroy()


@every_op
def test_a_row_depends_on_itself_alone(backend: Backend, name: str) -> None:
    together, alone = build(name, backend), build(name, backend)
    if not together.rows:
        return
    together.run(backend.stream.ops)
    for t in range(arrays(alone.args[alone.rows[0]])[0].shape[0]):
        alone.row(backend.stream.ops, t)
    if backend.name != "cuda":
        assert bits(alone, backend) == bits(together, backend)
    for one, all_rows in zip(alone.written(backend), together.written(backend), strict=True):
        if one.dtype.kind == "f":
            assert_close(one, all_rows, backend.activation_dtype, n=96, magnitude=1 + np.nanmax(np.abs(all_rows)))


def cpu_variants() -> dict[str, dict[str, Any]]:
    """Return options of CPU backends that must agree bit for bit: thread counts and instruction sets."""
    from metrale._ext import cpu_kernels

    return {"one thread": {"threads": 1}, "three threads": {"threads": 3},
            **{isa: {"threads": 2, "isa": isa} for isa in cpu_kernels.supported()}}


@pytest.fixture(scope="module")
def variants() -> Iterator[dict[str, Backend]]:
    from metrale.backends.cpu.backend import CpuBackend

    opened = {name: CpuBackend(**options) for name, options in cpu_variants().items()}
    yield opened
    for backend in opened.values():
        backend.close()


@every_op
def test_threads_and_instruction_sets_change_no_bit(variants: dict[str, Backend], name: str) -> None:
    results = {}
    for variant, backend in variants.items():
        case = build(name, backend)
        case.run(backend.stream.ops)
        results[variant] = bits(case, backend)
    first = results.pop("one thread")
    for variant, result in results.items():
        assert result == first, variant


def grown(backend: Backend, array: Any, *, axis: int) -> Any:
    names = {"float32": "f32", "float16": "f16", "uint16": "bf16", "int32": "i32", "int16": "i16", "int8": "i8"}
    shape = list(array.shape)
    if axis == array.ndim:
        shape = [1, *shape]
    else:
        shape[axis] += 1
    return backend.alloc(shape, names[str(array.dtype)], zero=True)


def misshapen(backend: Backend, arg: Any) -> list[Any]:
    """Return variants of an argument that cannot fit: one longer in the last axis, one with an axis more."""
    if isinstance(arg, QTensor):
        return [backend.alloc_q(arg.shape[0], arg.shape[1] + 32), backend.alloc_q(arg.shape[0] + 1, arg.shape[1])]
    if isinstance(arg, RowBatch):
        return [arg._replace(**{name: grown(backend, getattr(arg, name), axis=0)}) for name in RowBatch._fields]
    if isinstance(arg, RowState):
        return [arg._replace(words=arg.words[:-1])]
    if isinstance(arg, KVLayer):
        return [arg._replace(heads=arg.heads + 1), arg._replace(dim=arg.dim + 1)]
    if isinstance(arg, PatchRing | ResultRing):
        return [arg._replace(cursor=grown(backend, arg.cursor, axis=0))]
    if hasattr(arg, "dtype"):
        return [grown(backend, arg, axis=arg.ndim - 1), grown(backend, arg, axis=arg.ndim)]
    return []


def unchecked(case: Case, i: int, arg: Any, wrong: Any) -> bool:
    """Say whether nothing in the call tells that an argument is misshapen."""
    if case.op in ("kv_zero", "kv_copy") and i == 0:
        return True
    return case.op == "all_reduce" or (i in case.free and arrays(wrong)[0].ndim == arrays(arg)[0].ndim)


@every_op
def test_bad_shapes_are_refused(backend: Backend, name: str) -> None:
    case = build(name, backend)
    for i, arg in enumerate(case.args):
        for wrong in misshapen(backend, arg):
            if unchecked(case, i, arg, wrong):
                continue
            args = [wrong if j == i else a for j, a in enumerate(case.args)]
            with pytest.raises(DeviceError) as caught:
                getattr(backend.stream.ops, case.op)(*args, **case.params)
            assert caught.value.code in ("op.shape", "op.scratch"), f"argument {i}: {caught.value}"
            assert "expected" in str(caught.value)


@every_op
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_reference_rounds_to_the_activation_dtype(name: str, dtype: str) -> None:
    """The same call on bf16 or float16 activations gives the float32 result within their rounding."""
    exact, narrow = ReferenceBackend(), ReferenceBackend(activation_dtype=dtype)
    wide_case, narrow_case = CASES[name](exact, np.random.default_rng(1)), CASES[name](narrow, np.random.default_rng(1))
    for mine, theirs in zip(arrays(wide_case.args), arrays(narrow_case.args), strict=True):
        exact.upload(mine, down(narrow, theirs).astype(mine.dtype))  # the rounded inputs
    wide_case.run(exact.stream.ops)
    narrow_case.run(narrow.stream.ops)
    for i in wide_case.writes:
        for want, got in zip(arrays(wide_case.args[i]), arrays(narrow_case.args[i]), strict=True):
            values = down(exact, want)
            if values.dtype.kind != "f":
                steps = np.abs(down(narrow, got).astype(int) - values.astype(int)).max()
                assert steps <= (40 if values.dtype == np.int16 else 2 if values.dtype == np.int8 else 0)
                continue
            size = np.nanmax(np.abs(values), axis=-1, keepdims=True, initial=0, where=np.isfinite(values))
            assert_close(down(narrow, got), values, dtype, n=96, magnitude=4 * size)
