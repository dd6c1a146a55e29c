"""The thread Comm: sums in rank order, captured steps, ranks that fail, stay away or disagree."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale.backends.cpu.backend import CpuBackend
from metrale.backends.cpu.comm import CommOps, ThreadComm, run_ranks, thread_group
from metrale.errors import DeviceError
from tests.toys import FAIL_AT, emit_affine


def on_ranks(size, work, *, timeout_s=60.0, streams="eager"):
    """Run work(backend, ops) on every rank; returns the results in rank order."""

    def rank(comm):
        backend = CpuBackend(threads=2, comm=comm, streams=streams)
        try:
            return work(backend, CommOps(backend.stream))
        finally:
            backend.close()

    return run_ranks(thread_group(size, timeout_s=timeout_s), rank)


def in_rank_order(parts):
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


@given(size=st.integers(2, 5), n=st.integers(0, 70), seed=st.integers(0, 99))
def test_all_reduce_is_the_sum_in_rank_order_on_every_rank(size, n, seed):
    parts = (np.random.default_rng(seed).standard_normal((size, n)) * 10.0 ** np.arange(size)[:, None]).astype(np.float32)

    def work(backend, ops):
        x = backend.alloc((n,), "f32")
        backend.upload(x, parts[backend.comm.rank])
        ops.all_reduce(x)
        return backend.download(x)

    for got in on_ranks(size, work):
        np.testing.assert_array_equal(got, in_rank_order(parts))


@pytest.mark.parametrize("dtype", ["f32", "i8", "i16"])
def test_all_gather_concatenates_rows(dtype):
    def work(backend, ops):
        x, out = backend.alloc((5, 3), dtype), backend.alloc((5, 9), dtype)
        x[:] = np.arange(15).reshape(5, 3) + 20 * backend.comm.rank
        ops.all_gather(out, x)
        return backend.download(out)

    want = np.concatenate([np.arange(15).reshape(5, 3) + 20 * rank for rank in range(3)], 1)
    for got in on_ranks(3, work):
        np.testing.assert_array_equal(got, want)


def test_broadcast():
    def work(backend, ops):
        x = backend.alloc((7,), "i32")
        x[:] = backend.comm.rank
        ops.broadcast(x, root=1)
        return backend.download(x)

    assert [got.tolist() for got in on_ranks(3, work)] == [[1] * 7] * 3


def test_one_rank_needs_no_group():
    backend = CpuBackend(threads=1, streams="eager")
    ops, x, out = CommOps(backend.stream), backend.alloc((3, 5), "f32", zero=True), backend.alloc((3, 5), "f32")
    x += 2
    ops.all_reduce(x)
    ops.broadcast(x)
    ops.all_gather(out, x)
    assert (backend.download(out) == 2).all()
    backend.close()


@pytest.mark.parametrize("streams", ["eager", "deferred"])
def test_a_captured_step_with_collectives_replays_on_every_rank(streams):
    def work(backend, ops):
        x, out = backend.alloc((2, 11), "f32", zero=True), backend.alloc((2, 22), "f32")
        with backend.stream.capture() as cap:
            emit_affine(ops, x, x, 1, 1 + backend.comm.rank)
            ops.all_reduce(x)
            ops.all_gather(out, x)
            emit_affine(ops, x, x, 0.5, 0)
        assert [record.op for record in cap.graph.program.records] == ["affine", "all_reduce", "all_gather", "affine"]
        for _ in range(200):
            cap.graph.launch()
        return backend.download(out)

    x = np.float32(0)
    for _ in range(200):
        total = np.float32(np.float32(x + np.float32(1)) + np.float32(x + np.float32(2)))
        x = np.float32(total * np.float32(0.5))
    for got in on_ranks(2, work, streams=streams):
        assert (got == total).all()


def codes(size, work, **options):
    """Return each rank's error code, None for none."""

    def caught(backend, ops):
        try:
            work(backend, ops)
        except DeviceError as error:
            return error.code
        return None

    return on_ranks(size, caught, **options)


def test_a_rank_whose_kernel_fails_frees_the_others():
    def work(backend, ops):
        x, calls = backend.alloc((3,), "f32", zero=True), backend.alloc((4,), "i64", zero=True)
        with backend.stream.capture() as cap:
            ops.all_reduce(x)
            if backend.comm.rank == 1:
                ops.emit("toy", FAIL_AT, 4, (calls, 0, 5))
            ops.all_reduce(x)
        cap.graph.launch()

    assert codes(3, work) == ["device.comm", "device.kernel", "device.comm"]


def test_a_rank_that_raises_frees_the_others_and_its_error_is_the_one_reported():
    def work(backend, ops):
        x = backend.alloc((3,), "f32", zero=True)
        if backend.comm.rank == 0:
            raise KeyError("mine")
        ops.all_reduce(x)

    with pytest.raises(KeyError):
        on_ranks(3, work)


def test_a_rank_that_stays_away_times_out_the_others():
    def work(backend, ops):
        if backend.comm.rank != 2:
            ops.all_reduce(backend.alloc((3,), "f32", zero=True))

    assert codes(3, work, timeout_s=0.05) == ["device.comm", "device.comm", None]


def test_ranks_that_disagree_are_told_so():
    def sizes(backend, ops):
        ops.all_reduce(backend.alloc((3 + backend.comm.rank,), "f32", zero=True))

    def kinds(backend, ops):
        x = backend.alloc((1, 3), "f32", zero=True)
        if backend.comm.rank:
            ops.all_reduce(x)
        else:
            ops.all_gather(backend.alloc((1, 6), "f32"), x)

    def roots(backend, ops):
        ops.broadcast(backend.alloc((3,), "f32"), root=backend.comm.rank)

    for work in (sizes, kinds, roots):
        assert codes(2, work) == ["device.comm"] * 2


def test_an_aborted_group_stays_broken():
    comms = thread_group(2)
    comms[1].abort()
    comms[1].abort()
    assert comms[0].group.aborted
    backend = CpuBackend(threads=1, comm=comms[0], streams="eager")
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"all_reduce: .* another rank failed") as caught:
            CommOps(backend.stream).all_reduce(backend.alloc((3,), "f32", zero=True))
        assert caught.value.code == "device.comm"
    backend.close()


def test_aborts_at_any_moment_never_hang_and_never_split_a_sum():
    """A collective either happens on every rank or raises; a rank never leaves while another uses its memory."""
    for turn in range(30):
        comms = thread_group(3)
        done, codes = [0] * 3, []

        def work(comm: ThreadComm, done=done, codes=codes) -> None:
            backend = CpuBackend(threads=1, comm=comm, streams="eager")
            ops = CommOps(backend.stream)
            try:
                while True:
                    x = backend.alloc((501,), "f32", zero=True)
                    x += 1
                    ops.all_reduce(x)
                    assert (x == 3).all()
                    done[comm.rank] += 1
            except DeviceError as error:
                codes.append(error.code)
            finally:
                backend.close()

        threads = [threading.Thread(target=work, args=(comm,)) for comm in comms]
        for thread in threads:
            thread.start()
        time.sleep(0.0005 * turn)
        comms[turn % 3].abort()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert len(set(done)) == 1
        assert codes == ["device.comm"] * 3


def test_bad_groups_and_arrays():
    for size, timeout_s in ((0, 1.0), (65, 1.0), (2, 0.0)):
        with pytest.raises(DeviceError) as caught:
            thread_group(size, timeout_s=timeout_s)
        assert caught.value.code == "device.comm"
    backend = CpuBackend(threads=1, comm=thread_group(2)[0], streams="eager")
    ops, x = CommOps(backend.stream), backend.alloc((4, 6), "f32")
    for use, code in ((lambda: ops.all_reduce(x[:, :3]), "op.dtype"), (lambda: ops.all_reduce(x.view(np.int32)), "op.dtype"),
                      (lambda: ops.all_gather(x, x), "op.shape"), (lambda: ops.broadcast(x, root=2), "op.args")):
        with pytest.raises(DeviceError) as caught:
            use()
        assert caught.value.code == code
    backend.close()
