"""Backends of a test's own: these tests break captures and count memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from metrale.backends.base import Backend

OpenCuda = Callable[..., Any]


@pytest.fixture
def open_cuda_backend() -> Iterator[OpenCuda]:
    """Open CUDA backends; all are closed at the end."""
    from metrale.backends.cuda.backend import CudaBackend

    opened: list[Backend] = []

    def make(**options: Any) -> Backend:
        opened.append(CudaBackend(**options))
        return opened[-1]

    yield make
    for backend in opened:
        backend.fault = None
        backend.close()


@pytest.fixture
def device(open_cuda_backend: OpenCuda) -> Any:
    """Return one CUDA backend with float32 activations."""
    return open_cuda_backend()
