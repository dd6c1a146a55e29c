"""Collectives of the reference backend: ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from metrale.backends.base import Backend
from metrale.backends.reference import ReferenceBackend, ReferenceComm
from metrale.errors import DeviceError
from tests.helpers import floats, poisoned, up


def on_ranks(size: int, work: Callable[[ReferenceBackend], Any]) -> list[Any]:
    """Run `work` on every rank of a group; return results or errors in rank order."""
    comms = ReferenceComm.group(size)
    results: list[Any] = [None] * size

    def rank(i: int) -> None:
        try:
            results[i] = work(ReferenceBackend(comm=comms[i]))
        except DeviceError as error:
            results[i] = error
            comms[i].abort()

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_one_rank_is_the_identity(backend: Backend) -> None:
    x = floats(backend, np.random.default_rng(1), 3, 7)
    device, out = up(backend, x), poisoned(backend, 3, 7)
    backend.stream.ops.all_reduce(device)
    backend.stream.ops.all_gather(out, device)
    np.testing.assert_array_equal(backend.download(out), backend.download(device))


@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_sums_in_rank_order(size: int) -> None:
    parts = np.random.default_rng(2).standard_normal((size, 3, 5)).astype(np.float32)

    def work(backend: ReferenceBackend) -> np.ndarray:
        x = up(backend, parts[backend.comm.rank])
        for _ in range(3):
            backend.stream.ops.all_reduce(x)
        return backend.download(x)

    first, *others = on_ranks(size, work)
    np.testing.assert_allclose(first, parts.astype(np.float64).sum(0) * size**2, rtol=1e-5)
    for other in others:
        assert other.tobytes() == first.tobytes()


@pytest.mark.parametrize("size", [2, 3])
def test_all_gather_in_a_graph(size: int) -> None:
    def work(backend: ReferenceBackend) -> np.ndarray:
        x = up(backend, np.full((2, 3), backend.comm.rank, np.float32))
        out = poisoned(backend, 2, 3 * size)
        with backend.stream.capture() as capture:
            backend.stream.ops.all_gather(out, x)
            backend.stream.ops.scale(out, factor=2.0)
        assert capture.graph is not None
        capture.graph.launch()
        return backend.download(out)

    for result in on_ranks(size, work):
        np.testing.assert_array_equal(result, np.tile(np.repeat(2.0 * np.arange(size), 3), (2, 1)))


def test_a_failing_rank_does_not_hang_the_others() -> None:
    def work(backend: ReferenceBackend) -> None:
        if backend.comm.rank == 1:
            raise DeviceError("rank 1 fails", code="device.test")
        backend.stream.ops.all_reduce(up(backend, np.ones((1, 2), np.float32)))

    codes = [error.code for error in on_ranks(3, work)]
    assert codes == ["comm.broken", "device.test", "comm.broken"]
