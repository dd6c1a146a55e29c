"""Deferred streams run as late as their events allow, so that a missing edge shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from metrale.backends.base import Backend
from metrale.backends.reference import ReferenceBackend
from metrale.errors import DeviceError
from tests.helpers import random_part, up
from tests.ops.cases import CASES


@pytest.fixture(params=["reference", "cpu"])
def deferred(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    monkeypatch.setenv("METRALE_STREAMS", "deferred")
    opened: Any
    if request.param == "reference":
        opened = ReferenceBackend()
    else:
        from metrale.backends.cpu.backend import CpuBackend

        opened = CpuBackend(threads=2)
    yield opened
    opened.close()


def ones(backend: Backend, value: float = 1.0) -> Any:
    x = up(backend, np.full((1, 3), value, np.float32))
    backend.stream.synchronize()
    return x


def peek(x: Any) -> float:
    """Return what the memory holds now, without waiting for any stream (host memory only)."""
    return float(np.asarray(x)[0, 0])


def test_work_waits_until_the_host_asks(deferred: Backend) -> None:
    x = ones(deferred)
    deferred.stream.ops.scale(x, factor=2.0)
    assert peek(x) == 1
    deferred.stream.synchronize()
    assert peek(x) == 2


def test_an_event_runs_a_stream_no_further_than_needed(deferred: Backend) -> None:
    x = ones(deferred)
    deferred.stream.ops.scale(x, factor=2.0)
    event = deferred.stream.record()
    deferred.stream.ops.scale(x, factor=2.0)
    event.synchronize()
    assert peek(x) == 2
    assert event.query()


def test_a_missing_edge_shows_and_an_edge_heals_it(deferred: Backend) -> None:
    for edge, expected in ((False, 2.0), (True, 4.0)):
        second = deferred.new_stream()
        x, y = ones(deferred), ones(deferred)
        deferred.stream.ops.scale(x, factor=3.0)
        if edge:
            second.wait(deferred.stream.record())
        second.ops.add(y, x)
        second.synchronize()
        assert peek(y) == expected


def test_pinned_memory_is_read_late(deferred: Backend) -> None:
    pinned, x = deferred.alloc_pinned((1, 3), "f32"), ones(deferred, 0.0)
    pinned[...] = 5
    deferred.upload(x, pinned)
    pinned[...] = 6  # too early: no event says that the copy is done
    deferred.stream.synchronize()
    assert peek(x) == 6


def test_graphs_are_deferred_too(deferred: Backend) -> None:
    x = ones(deferred)
    with deferred.stream.capture() as capture:
        deferred.stream.ops.scale(x, factor=3.0)
    assert capture.graph is not None
    capture.graph.launch()
    assert peek(x) == 1
    capture.graph.launch()
    deferred.stream.synchronize()
    assert peek(x) == 9


@pytest.mark.parametrize("name", CASES)
def test_every_op_gives_the_same_bits(deferred: Backend, name: str) -> None:
    late, now = CASES[name](deferred, np.random.default_rng(1)), CASES[name](deferred, np.random.default_rng(1))
    late.run(deferred.stream.ops)
    now.run(deferred.stream.ops)
    deferred.stream.synchronize()
    for a, b in zip(late.written(deferred), now.written(deferred), strict=True):
        assert a.tobytes() == b.tobytes()


def test_a_failing_op_drops_what_was_behind_it() -> None:
    backend = ReferenceBackend(deferred=True)
    x, table = ones(backend), backend.pack([random_part(np.random.default_rng(1), "f32", 5, 3)])
    backend.stream.ops.embed(backend.alloc((1, 3), "f32"), up(backend, [99]), table, scale=1.0)
    backend.stream.ops.scale(x, factor=2.0)
    with pytest.raises(DeviceError) as caught:
        backend.stream.synchronize()
    assert caught.value.code == "op.index"
    backend.stream.synchronize()
    assert peek(x) == 1
