"""Backends of a test's own: model tests change rings, graphs and faults, so none is shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from metrale.backends.base import Backend

OpenBackend = Callable[..., Backend]


@pytest.fixture(params=("reference", "cpu"))
def kind(request: pytest.FixtureRequest) -> str:
    """Return the kind of backend of this run of the test."""
    return str(request.param)


@pytest.fixture
def open_backend(kind: str) -> Iterator[OpenBackend]:
    """Open backends of this kind (activations int8 unless said otherwise); all are closed at the end."""
    opened: list[Backend] = []

    def make(*, threads: int = 2, deferred: bool = False, activations: str = "int8", comm: Any = None) -> Backend:
        if kind == "reference":
            from metrale.backends.reference import ReferenceBackend

            opened.append(ReferenceBackend(activations=activations, deferred=deferred, comm=comm))
        else:
            from metrale.backends.cpu.backend import CpuBackend

            streams = "deferred" if deferred else "eager"
            opened.append(CpuBackend(threads=threads, streams=streams, activations=activations, comm=comm))
        return opened[-1]

    yield make
    for backend in opened:
        backend.fault = None
        backend.close()


@pytest.fixture
def device(open_backend: OpenBackend) -> Backend:
    """Return one backend of this kind."""
    return open_backend()
